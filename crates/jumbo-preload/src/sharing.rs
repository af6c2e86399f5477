//! Calls that bear on the sibling of [`jumbo_inside::reaper`].
//!
//! unshare(2) and setns(2), which the kernel refuses for some namespaces while memory is shared: it is
//! ended before. chroot(2) and pivot_root(2), after which it would still have the old root, for the program
//! to find in /proc. setuid(2) and its kin, after which it would still be who the program was. And what acquires something that hangs on the memory: shmat(2), io_setup(2), flock(2),
//! fcntl(2); see [`crate::reaper::auto`].

use core::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};

use jumbo_inside::reaper::{Ids, State};
use jumbo_inside::{gather, heap, shmem, watch};

use crate::reaper::{auto, renewed, without};
use crate::{environment, next, threads};

/// fcntl(2)'s locks that belong to an open file; Linux 3.15. And leases, which do too.
const LOCKS: [c_int; 3] = [libc::F_OFD_SETLK, libc::F_OFD_SETLKW, libc::F_SETLEASE];
/// What may be unshared while memory is shared, and is by single threads.
const HARMLESS: c_long = (libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SYSVSEM) as c_long;

/// unshare(2).
#[unsafe(no_mangle)]
pub extern "C" fn unshare(flags: c_int) -> c_int {
    // SAFETY: the same call.
    let call = || c_long::from(unsafe { (next::unshare.get())(flags) });
    if unshared(c_long::from(flags), call) == 0 {
        0
    } else {
        -1
    }
}

/// unshare(2), by whatever name it was called.
pub(crate) fn unshared(flags: c_long, mut call: impl FnMut() -> c_long) -> c_long {
    if flags & !HARMLESS == 0 {
        return call();
    }
    joined(call)
}

/// setns(2).
#[unsafe(no_mangle)]
pub extern "C" fn setns(descriptor: c_int, kind: c_int) -> c_int {
    // SAFETY: the same call.
    let call = || c_long::from(unsafe { (next::setns.get())(descriptor, kind) });
    if joined(call) == 0 { 0 } else { -1 }
}

/// setns(2), by whatever name it was called. Refused while memory is shared: EINVAL, EUSERS.
pub(crate) fn joined(call: impl FnMut() -> c_long) -> c_long {
    let before = next::errno();
    // The kernel refuses some of these to a process of several threads as well.
    threads::end_ours();
    let answer = without(call, |answer| {
        *answer == -1 && [libc::EINVAL, libc::EUSERS].contains(&next::errno())
    });
    if answer != -1 {
        next::set_errno(before);
    }
    answer
}

/// chroot(2).
///
/// # Safety
/// As for chroot(2): a path.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn chroot(path: *const c_char) -> c_int {
    // SAFETY: the same call.
    rooted(|| unsafe { (next::chroot.get())(path) })
}

/// pivot_root(2), which glibc has and declares nowhere.
///
/// # Safety
/// As for pivot_root(2): two paths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pivot_root(root: *const c_char, old: *const c_char) -> c_int {
    // SAFETY: the same call.
    rooted(|| unsafe { (next::pivot_root.get())(root, old) })
}

/// chroot(2) and pivot_root(2), by whatever name they were called. The sibling's root is the one that it was
/// started with, and who may trace it (without any capability, where the user is the same) finds it at
/// /proc/PID/root: so it is ended before, and starts again below the new one.
pub(crate) fn rooted<T>(call: impl FnMut() -> T) -> T {
    heap::before_confinement();
    let answer = without(call, |_| false);
    environment::rooted();
    answer
}

/// The calls that change who a process is: the sibling would stay who it was, and executes memory that the program
/// can write. The C library has each of its threads make them, and knows not of ours. A worker of [`gather`] that was made
/// before, or meanwhile, goes after the call.
macro_rules! identities {
    ($($name:ident($($argument:ident),*): $ids:ident;)*) => {$(
        #[doc = concat!(stringify!($name), "(2).")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: c_uint),*) -> c_int {
            // SAFETY: the same call.
            let call = || unsafe { (next::$name.get())($($argument),*) };
            watch::end();
            let answer = renewed(Ids::$ids, &[$($argument),*], call);
            gather::end_workers();
            answer
        }
    )*};
}

identities! {
    setuid(id): User;
    seteuid(id): User;
    setreuid(real, effective): User;
    setresuid(real, effective, saved): User;
    setgid(id): Group;
    setegid(id): Group;
    setregid(real, effective): Group;
    setresgid(real, effective, saved): Group;
}

/// setgroups(2): the C library has its own threads make it, and knows not of ours.
///
/// # Safety
/// As for setgroups(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setgroups(count: usize, groups: *const libc::gid_t) -> c_int {
    watch::end();
    // SAFETY: the same call.
    let answer = unsafe { (next::setgroups.get())(count, groups) };
    gather::end_workers();
    answer
}

/// initgroups(3), which calls setgroups(2) past ours.
///
/// # Safety
/// As for initgroups(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn initgroups(user: *const c_char, group: libc::gid_t) -> c_int {
    watch::end();
    // SAFETY: the same call.
    let answer = unsafe { (next::initgroups.get())(user, group) };
    gather::end_workers();
    answer
}

/// capset(2): a worker of [`gather`] would keep what the program gives up, and run in its memory.
///
/// # Safety
/// As for capset(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capset(header: *mut c_void, data: *const c_void) -> c_int {
    threads::end_ours();
    // SAFETY: the same call.
    unsafe { (next::capset.get())(header, data) }
}

/// shmat(2).
///
/// # Safety
/// As for shmat(2): SHM_REMAP replaces what is there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmat(id: c_int, at: *const c_void, flags: c_int) -> *mut c_void {
    // How long it is only the kernel knows.
    gather::about_to_map_at(at.addr(), 1);
    shmem::unmapped(at.addr(), 1);
    let plain = at.is_null() && flags & !libc::SHM_RDONLY == 0;
    let known = if plain { segment(id) } else { None };
    let hint = known.and_then(|(length, _)| shmem::place(length, 0));
    let hint = hint.map(core::ptr::with_exposed_provenance);
    // SAFETY: the same call.
    let mut attached = unsafe { (next::shmat.get())(id, hint.unwrap_or(at), flags) };
    if attached == libc::MAP_FAILED && hint.is_some() {
        // SAFETY: the same call.
        attached = unsafe { (next::shmat.get())(id, at, flags) };
    }
    if attached != libc::MAP_FAILED {
        auto::acquire(State::SysvSegment);
        if let Some((length, mut known)) = known {
            if flags & libc::SHM_RDONLY != 0 {
                known.ours = 0;
            }
            shmem::mapped(attached.addr(), length, known);
        }
    }
    attached
}

/// How long a segment is, if it is one of base pages that is covered; and whether it is this process's.
fn segment(id: c_int) -> Option<(usize, shmem::Known)> {
    /// `shm_perm.mode` of a segment on hugetlb pages (linux/shm.h).
    const SHM_HUGETLB: libc::c_ushort = 0o4000;
    if !shmem::covers(usize::MAX) {
        return None;
    }
    let before = next::errno();
    let mut segment = core::mem::MaybeUninit::<libc::shmid_ds>::uninit();
    // SAFETY: IPC_STAT writes a whole `shmid_ds`, or fails.
    let segment = unsafe {
        match libc::shmctl(id, libc::IPC_STAT, segment.as_mut_ptr()) {
            0 => {
                let segment = segment.assume_init();
                (segment.shm_perm.mode & SHM_HUGETLB == 0).then_some(segment)
            }
            _ => None,
        }
    };
    next::set_errno(before);
    let segment = segment.filter(|segment| shmem::covers(segment.shm_segsz))?;
    let ours = segment.shm_nattch == 0
        && segment.shm_cpid == rustix::process::getpid().as_raw_nonzero().get();
    let known = shmem::Known {
        ours: if ours { segment.shm_segsz } else { 0 },
        nameless: false,
        has_room: true,
    };
    Some((segment.shm_segsz, known))
}

/// shmdt(2).
///
/// # Safety
/// As for shmdt(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmdt(at: *const c_void) -> c_int {
    shmem::unmapped(at.addr(), 1);
    // SAFETY: the same call.
    unsafe { (next::shmdt.get())(at) }
}

/// fallocate(2): a hole in shared memory is not filled again.
#[unsafe(no_mangle)]
pub extern "C" fn fallocate(
    descriptor: c_int,
    mode: c_int,
    offset: libc::off_t,
    length: libc::off_t,
) -> c_int {
    if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 {
        shmem::punched();
    }
    // SAFETY: the same call.
    unsafe { (next::fallocate.get())(descriptor, mode, offset, length) }
}

/// fallocate(2), by its other name.
#[unsafe(no_mangle)]
pub extern "C" fn fallocate64(
    descriptor: c_int,
    mode: c_int,
    offset: libc::off_t,
    length: libc::off_t,
) -> c_int {
    fallocate(descriptor, mode, offset, length)
}

/// io_setup(2) as libaio has it: the C library has none. Made here, since libaio may not be there, or not
/// yet.
///
/// # Safety
/// As for io_setup(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_setup(events: c_uint, context: *mut c_ulong) -> c_int {
    // libaio leaves errno alone, and returns the error.
    let before = next::errno();
    // SAFETY: the same call; it goes through our own `syscall`, which looks at it.
    let answer = unsafe { libc::syscall(libc::SYS_io_setup, c_long::from(events), context) };
    let error = next::errno();
    next::set_errno(before);
    if answer == 0 { 0 } else { -error }
}

/// flock(2).
#[unsafe(no_mangle)]
pub extern "C" fn flock(descriptor: c_int, operation: c_int) -> c_int {
    // SAFETY: the same call.
    let answer = unsafe { (next::flock.get())(descriptor, operation) };
    flocked(answer.into(), descriptor, operation);
    answer
}

/// flock(2), by whatever name it was called, has answered.
pub(crate) fn flocked(answer: c_long, descriptor: c_int, operation: c_int) {
    if answer == 0 && operation & libc::LOCK_UN == 0 {
        auto::locked(descriptor);
    }
}

/// fcntl(2), by whatever name it was called, has answered.
pub(crate) fn controlled(answer: c_long, descriptor: c_int, command: c_int) {
    if answer == 0 && LOCKS.contains(&command) {
        auto::locked(descriptor);
    }
}

/// fcntl(2). Declared with the one argument that any command has at most.
///
/// # Safety
/// As for fcntl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(descriptor: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the same call.
    let answer = unsafe { (next::fcntl.get())(descriptor, command, argument) };
    controlled(answer.into(), descriptor, command);
    answer
}

/// fcntl(2), by its other name.
///
/// # Safety
/// As for [`fcntl`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl64(descriptor: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the same call: off_t has 64 bits here.
    unsafe { fcntl(descriptor, command, argument) }
}
