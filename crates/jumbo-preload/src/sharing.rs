//! Calls that bear on the sibling of [`jumbo_inside::reaper`].
//!
//! unshare(2) and setns(2), which the kernel refuses for some namespaces while memory is shared: it is
//! ended before. chroot(2) and pivot_root(2), after which it would still have the old root, for the program
//! to find in /proc. setuid(2) and its kin, after which it would still be who the program was. And what acquires something that hangs on the memory: shmat(2), io_setup(2), flock(2),
//! fcntl(2); see [`crate::reaper::auto`].

use core::ffi::{c_int, c_long, c_uint, c_ulong, c_void};

use jumbo_inside::events::Mechanism as _;
use jumbo_inside::reaper::{Ids, State};
use jumbo_inside::shmem;

use crate::mechanisms::All;
use crate::next;
use crate::reaper::{auto, renewed, without};

/// fcntl(2)'s locks that belong to an open file; Linux 3.15. And leases, which do too.
pub(crate) const LOCKS: [c_int; 3] = [libc::F_OFD_SETLK, libc::F_OFD_SETLKW, libc::F_SETLEASE];
/// What may be unshared while memory is shared, and is by single threads.
const HARMLESS: c_int = libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SYSVSEM;

/// unshare(2).
pub(crate) fn unshared(flags: c_int, call: impl Fn() -> c_int) -> c_int {
    if flags & !HARMLESS == 0 {
        return call();
    }
    joined(call)
}

/// unshare(2) and setns(2), which are refused while memory is shared: EINVAL, EUSERS.
pub(crate) fn joined(call: impl FnMut() -> c_int) -> c_int {
    let before = next::errno();
    // The kernel refuses some of these to a process of several threads as well.
    All::changing_privilege();
    let answer = without(call, |answer| {
        *answer == -1 && [libc::EINVAL, libc::EUSERS].contains(&next::errno())
    });
    if answer != -1 {
        next::set_errno(before);
    }
    answer
}

/// chroot(2) and pivot_root(2). The sibling's root is the one that it was started with, and who may trace it (without any
/// capability, where the user is the same) finds it at /proc/PID/root: so it is ended before, and starts again below the
/// new one.
pub(crate) fn rooted(call: impl FnMut() -> c_int) -> c_int {
    All::before_confinement();
    let answer = without(call, |_| false);
    All::rooted();
    answer
}

/// Makes a call that takes privilege from the program: threads of ours would keep it, and run in memory that the program
/// can write. The C library has each of its own threads make such calls, and knows not of ours. What another thread has made
/// meanwhile goes after the call.
pub(crate) fn privileged<T>(call: impl FnOnce() -> T) -> T {
    All::changing_privilege();
    let answer = call();
    All::changing_privilege();
    answer
}

/// The calls that change who a process is: the sibling would stay who it was. `wanted` are the IDs that are asked for.
pub(crate) fn identified(ids: Ids, wanted: &[c_uint], call: impl FnOnce() -> c_int) -> c_int {
    privileged(|| renewed(ids, wanted, call))
}

/// shmat(2).
///
/// # Safety
/// As for shmat(2): SHM_REMAP replaces what is there.
pub(crate) unsafe fn attach(
    call: impl Fn(c_int, *const c_void, c_int) -> *mut c_void,
    id: c_int,
    at: *const c_void,
    flags: c_int,
) -> *mut c_void {
    // How long it is only the kernel knows.
    All::mapping_at(at.addr(), 1);
    let plain = at.is_null() && flags & !libc::SHM_RDONLY == 0;
    let known = if plain { segment(id) } else { None };
    let hint = known.and_then(|(length, _)| shmem::address_hint(length, 0));
    let hint = hint.map(core::ptr::with_exposed_provenance);
    let mut attached = call(id, hint.unwrap_or(at), flags);
    if attached == libc::MAP_FAILED && hint.is_some() {
        attached = call(id, at, flags);
    }
    if attached != libc::MAP_FAILED {
        auto::acquire(State::SysvSegment);
        if let Some((length, mut known)) = known {
            if flags & libc::SHM_RDONLY != 0 {
                known.own_bytes = 0;
            }
            shmem::mapped(attached.addr(), length, known);
        }
    }
    attached
}

/// How long a segment is, if it is one of base pages that is covered; and whether it is this process's.
fn segment(id: c_int) -> Option<(usize, shmem::SharedMapping)> {
    /// The bit in `shm_perm.mode` of a segment on hugetlb pages (SHM_HUGETLB, linux/shm.h).
    const HUGETLB_BIT: u32 = 11;
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
                (segment.shm_perm.mode >> HUGETLB_BIT & 1 == 0).then_some(segment)
            }
            _ => None,
        }
    };
    next::set_errno(before);
    let segment = segment.filter(|segment| shmem::covers(segment.shm_segsz))?;
    let ours = segment.shm_nattch == 0
        && segment.shm_cpid == rustix::process::getpid().as_raw_nonzero().get();
    let known = shmem::SharedMapping {
        own_bytes: if ours { segment.shm_segsz } else { 0 },
        is_anonymous: false,
        has_room: true,
    };
    Some((segment.shm_segsz, known))
}

/// fallocate(2): a hole in shared memory is not filled again.
pub(crate) fn allocating(mode: c_int) {
    if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 {
        All::punching();
    }
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

/// io_setup(2).
pub(crate) fn set_up_aio(call: impl Fn() -> c_long) -> c_long {
    let answer = call();
    if answer == 0 {
        auto::acquire(State::Aio);
    }
    answer
}

/// flock(2) and fcntl(2), where they lock or take a lease.
pub(crate) fn locked(fd: c_int, is_lock: bool, call: impl FnOnce() -> c_int) -> c_int {
    let answer = call();
    if answer == 0 && is_lock {
        auto::locked(fd);
    }
    answer
}

/// ioctl(2): a program that answers page faults itself is left alone.
pub(crate) fn requesting(request: c_ulong) {
    /// `UFFDIO_REGISTER` of <linux/userfaultfd.h>.
    const REGISTER: c_ulong = 0xc020_aa00;
    // The kernel takes 32 bits: some callers extend the sign of an int.
    if request & c_ulong::from(u32::MAX) == REGISTER {
        shmem::leave();
    }
}
