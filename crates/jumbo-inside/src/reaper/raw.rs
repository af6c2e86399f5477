//! System calls of the reaper: without libc, by the machine code of [`jumbo_sys`].
//!
//! The reaper runs on the thread pointer of the thread that started it, so it has no `errno`, and
//! it unmaps libc. A call returns the kernel's result: a negative errno on failure.
#![expect(unsafe_code, reason = "the leaf that makes the system calls")]

pub(super) use jumbo_sys::{Entry, Wait, call, clone3, tid_word, wait, wake, word_at};

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
