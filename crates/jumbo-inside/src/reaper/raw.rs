//! System calls of the reaper: without libc, by the machine code of [`crate::sys`].
//!
//! The reaper runs on the thread pointer of the thread that started it, so it has no `errno`, and
//! it unmaps libc. A call returns the kernel's result: a negative errno on failure.
#![expect(unsafe_code, reason = "the leaf that makes the system calls")]

use core::sync::atomic::AtomicU32;

pub(super) use crate::sys::{Entry, Wait, call, clone3, wait, wake};

/// `PR_GET_TID_ADDRESS` of prctl(2), Linux 3.5 with CONFIG_CHECKPOINT_RESTORE.
const PR_GET_TID_ADDRESS: usize = 40;

/// Makes a call whose arguments are numbers, or pointers that the kernel only reads.
///
/// # Safety
/// The call writes nothing to the memory of the caller, and leaves it mapped.
#[inline(always)]
pub(super) unsafe fn plain(number: libc::c_long, arguments: [usize; 3]) -> isize {
    let [a, b, c] = arguments;
    // SAFETY: the caller's promise.
    unsafe { call(number, [a, b, c, 0, 0, 0]) }
}

/// munmap(2).
///
/// # Safety
/// No thread uses the range.
pub(super) unsafe fn unmap(start: usize, length: usize) -> isize {
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_munmap, [start, length, 0, 0, 0, 0]) }
}

/// madvise(2).
///
/// # Safety
/// If the advice drops memory, no thread uses the range.
pub(super) unsafe fn advise(start: usize, length: usize, advice: i32) -> isize {
    let advice = advice.cast_unsigned() as usize;
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_madvise, [start, length, advice, 0, 0, 0]) }
}

/// exit_group(2).
pub(super) fn exit_group(code: usize) -> ! {
    loop {
        // SAFETY: the call writes nothing.
        unsafe { plain(libc::SYS_exit_group, [code, 0, 0]) };
    }
}

/// Returns the calling thread's futex word (set_tid_address(2)). If another process shares the
/// memory, the kernel zeroes it and wakes one waiter when the thread ends or execs. `None` on
/// kernels that do not report it.
pub(super) fn tid_word() -> Option<&'static AtomicU32> {
    let mut address = 0usize;
    let to = (&raw mut address).expose_provenance();
    // SAFETY: the kernel writes one pointer to `address`.
    let result = unsafe { call(libc::SYS_prctl, [PR_GET_TID_ADDRESS, to, 0, 0, 0, 0]) };
    // SAFETY: the address that the C library registered, or 0.
    unsafe { word_at(address) }.filter(|_| result == 0)
}

/// Returns the word at an address, or `None` for address 0.
///
/// # Safety
/// The address is that of a [`tid_word`] of this process, or 0.
pub(super) unsafe fn word_at(address: usize) -> Option<&'static AtomicU32> {
    let usable = address != 0 && address.is_multiple_of(align_of::<AtomicU32>());
    // SAFETY: the C library registered the address with the kernel, and keeps the word in the
    // thread's control block, which is mapped as long as the process runs.
    usable.then(|| unsafe { AtomicU32::from_ptr(core::ptr::with_exposed_provenance_mut(address)) })
}

/// Returns the nanoseconds of CLOCK_MONOTONIC, without the vDSO, which may be unmapped.
pub(super) fn now() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let clock = libc::CLOCK_MONOTONIC.cast_unsigned() as usize;
    let to = (&raw mut time).expose_provenance();
    // SAFETY: the kernel writes one timespec to `time`.
    unsafe { call(libc::SYS_clock_gettime, [clock, to, 0, 0, 0, 0]) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// read(2) into `buffer`; `None` on failure.
pub(super) fn read(descriptor: usize, buffer: &mut [u8]) -> Option<usize> {
    let (to, length) = (buffer.as_mut_ptr().expose_provenance(), buffer.len());
    // SAFETY: the kernel writes at most `length` bytes to the buffer.
    let answer = unsafe { call(libc::SYS_read, [descriptor, to, length, 0, 0, 0]) };
    usize::try_from(answer).ok().map(|read| read.min(length))
}
