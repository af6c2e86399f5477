//! Handlers of calls that affect the process of [`jumbo_inside::reaper`].
//!
//! - unshare(2), setns(2): the kernel refuses some namespaces while memory is shared.
//! - chroot(2), pivot_root(2): the reaper would keep the old root, visible in /proc.
//! - setuid(2) and similar calls: the reaper would keep the old identity.
//! - shmat(2), io_setup(2), flock(2), fcntl(2): they acquire resources that live as long as the
//!   memory; see [`crate::reaper::auto`].

use core::ffi::{c_int, c_long, c_uint, c_ulong, c_void};

use jumbo_inside::events::Mechanism as _;
use jumbo_inside::reaper::{Ids, State};
use jumbo_inside::{density, sandbox, shmem};
use jumbo_sys as sys;
use rustix::fd::BorrowedFd;

use crate::mechanisms::All;
use crate::next;
use crate::own_stack::on;
use crate::reaper::{auto, renewed, without};

/// Commands of fcntl(2) for locks (Linux 3.15) and leases of an open file.
pub(crate) const LOCKS: [c_int; 3] = [libc::F_OFD_SETLK, libc::F_OFD_SETLKW, libc::F_SETLEASE];
/// Flags that unshare(2) accepts while memory is shared; single threads use them.
const THREAD_FLAGS: c_int = libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SYSVSEM;

/// unshare(2).
pub(crate) fn unshared(flags: c_int, call: impl Fn() -> c_int) -> c_int {
    if flags & !THREAD_FLAGS == 0 {
        return call();
    }
    joined(call)
}

/// unshare(2) and setns(2), which fail while memory is shared: EINVAL, EUSERS.
pub(crate) fn joined(call: impl FnMut() -> c_int) -> c_int {
    let before = next::errno();
    // Some of these calls also fail in a process with several threads.
    on(All::changing_privilege);
    let answer = without(call, |answer| {
        *answer == -1 && [libc::EINVAL, libc::EUSERS].contains(&next::errno())
    });
    if answer != -1 {
        next::set_errno(before);
    }
    answer
}

/// chroot(2) and pivot_root(2). The reaper keeps its root, and processes that may trace it (of the
/// same user, without a capability) reach that at /proc/PID/root. So it ends before the call, and
/// starts again below the new root.
pub(crate) fn rooted(call: impl FnMut() -> c_int) -> c_int {
    on(All::before_confinement);
    let answer = without(call, |_| false);
    on(All::rooted);
    answer
}

/// Makes a call that drops privileges: jumbo's threads would keep them, and run in memory that the
/// program can write. The C library repeats such calls in each of its own threads only. The second
/// event ends threads that another thread started during the call.
pub(crate) fn privileged<T>(call: impl FnOnce() -> T) -> T {
    on(All::changing_privilege);
    let answer = call();
    on(All::changing_privilege);
    answer
}

/// Makes a call that changes the identity to `requested` IDs: the reaper would keep the old one.
pub(crate) fn identified(ids: Ids, requested: &[c_uint], call: impl FnOnce() -> c_int) -> c_int {
    privileged(|| renewed(ids, requested, call))
}

/// shmat(2).
///
/// # Safety
/// As for shmat(2): SHM_REMAP replaces existing mappings.
pub(crate) unsafe fn attach(
    call: impl Fn(c_int, *const c_void, c_int) -> *mut c_void,
    id: c_int,
    at: *const c_void,
    flags: c_int,
) -> *mut c_void {
    // Only the kernel knows the length.
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

/// Returns length and properties of a covered segment of base pages.
fn segment(id: c_int) -> Option<(usize, shmem::SharedMapping)> {
    /// Bit in `shm_perm.mode` of a segment on hugetlb pages (SHM_HUGETLB, linux/shm.h).
    const HUGETLB_BIT: u32 = 11;
    if !shmem::covers(usize::MAX) {
        return None;
    }
    let before = next::errno();
    let mut segment = core::mem::MaybeUninit::<libc::shmid_ds>::uninit();
    // SAFETY: IPC_STAT writes a complete `shmid_ds`, or fails.
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
        file_bytes: 0,
    };
    Some((segment.shm_segsz, known))
}

/// fallocate(2): holes that the program punches in shared memory stay holes, and what it allocates is
/// its own.
pub(crate) fn allocating(fd: c_int, mode: c_int) {
    if mode & !libc::FALLOC_FL_KEEP_SIZE == 0 && fd >= 0 {
        // SAFETY: the program's descriptor; it is queried and not kept.
        shmem::allocating(unsafe { BorrowedFd::borrow_raw(fd) });
    }
    if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 {
        All::punching();
    }
}

/// io_setup(2) of libaio; the C library has none. Makes the system call itself: libaio may not be
/// loaded.
///
/// # Safety
/// As for io_setup(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_setup(events: c_uint, context: *mut c_ulong) -> c_int {
    // libaio leaves errno alone, and returns the error.
    let before = next::errno();
    // SAFETY: the same call; it goes through this library's `syscall`, which handles it.
    let answer = unsafe { libc::syscall(libc::SYS_io_setup, c_long::from(events), context) };
    let error = next::errno();
    next::set_errno(before);
    if answer == 0 { 0 } else { -error }
}

/// io_setup(2).
pub(crate) fn set_up_aio(call: impl Fn() -> c_long) -> c_long {
    let answer = call();
    if answer == 0 {
        on(|| auto::acquire(State::Aio));
    }
    answer
}

/// flock(2) and fcntl(2); `is_lock`: the call takes a lock or a lease.
pub(crate) fn locked(fd: c_int, is_lock: bool, call: impl FnOnce() -> c_int) -> c_int {
    let answer = call();
    if answer == 0 && is_lock {
        on(|| auto::locked(fd));
    }
    answer
}

/// ioctl(2): a program registers memory whose page faults it handles itself. Scans end, and what the
/// program has not touched becomes missing again, so that its handler is asked for it.
pub(crate) fn requesting(request: c_ulong, argument: c_ulong) {
    /// <linux/userfaultfd.h>.
    const UFFDIO_REGISTER: c_ulong = 0xc020_aa00;
    // The kernel takes 32 bits: some callers extend the sign of an int.
    if request & c_ulong::from(u32::MAX) != UFFDIO_REGISTER {
        return;
    }
    on(|| registering(argument));
}

/// A registration with userfaultfd(2): `struct uffdio_register` at that address.
fn registering(argument: c_ulong) {
    const UFFDIO_REGISTER_MODE_MISSING: usize = 1;
    shmem::leave();
    sys::guarded(|| register(argument, UFFDIO_REGISTER_MODE_MISSING));
}

fn register(argument: c_ulong, missing: usize) {
    if sandbox::is_entered() {
        return;
    }
    // `struct uffdio_register` begins with start, length and mode.
    let mut words = [0; 3];
    let read = usize::try_from(argument).map(|from| sys::copy_words(from, &mut words));
    let [start, length, mode] = words;
    if read != Ok(Ok(words.len())) {
        return;
    }
    All::protected(start, length, libc::PROT_NONE);
    if mode & missing != 0
        && let Some(end) = start.checked_add(length)
    {
        density::make_missing(&(start..end));
    }
}
