//! System calls of the sibling: in its own machine code, without libc.
//!
//! The sibling runs on the thread pointer of the thread that started it, so `errno` is not its own, and in the
//! end libc is not mapped any more. What a call returns is the kernel's own word: a negative errno where
//! it failed.
#![expect(unsafe_code, reason = "the leaf that makes the system calls")]

use core::sync::atomic::AtomicU32;
use core::time::Duration;

/// `PR_GET_TID_ADDRESS` of prctl(2), Linux 3.5 with CONFIG_CHECKPOINT_RESTORE.
const PR_GET_TID_ADDRESS: usize = 40;

/// Makes a system call.
///
/// # Safety
/// As for the call.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let answer;
    // SAFETY: the kernel's convention on x86-64: rcx and r11 are lost, the stack is not touched.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number => answer,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

/// Makes a system call.
///
/// # Safety
/// As for the call.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub(super) unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let answer;
    // SAFETY: the kernel's convention on arm64: only x0 is changed, the stack is not touched.
    unsafe {
        core::arch::asm!(
            "svc 0",
            inlateout("x0") a => answer,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f, in("x8") number,
            options(nostack),
        );
    }
    answer
}

/// Where and how a new task starts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// Runs on the new stack, and never returns.
    pub(crate) function: unsafe extern "C" fn(usize) -> !,
    /// Passed to it.
    pub(crate) argument: usize,
}

/// Makes a clone(2) or clone3(2) whose child runs `entry`. Returns what the caller gets: the child's ID.
///
/// # Safety
/// As for the call; it is given a stack that is the child's alone and large enough for `entry`.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn spawn(number: libc::c_long, arguments: [usize; 5], entry: Entry) -> isize {
    let [a, b, c, d, e] = arguments;
    let answer;
    // SAFETY: the child never leaves this block: it begins on its own stack, with nothing on it, and
    // `entry` does not return. For the caller it is a system call like another.
    unsafe {
        core::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r9",
            "ud2",
            "2:",
            // By name: the compiler could choose rbp.
            in("r9") entry.function,
            in("r12") entry.argument,
            inlateout("rax") number => answer,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e,
            out("rcx") _, out("r11") _,
        );
    }
    answer
}

/// Makes a clone(2) or clone3(2) whose child runs `entry`. Returns what the caller gets: the child's ID.
///
/// # Safety
/// As for the call; it is given a stack that is the child's alone and large enough for `entry`.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn spawn(number: libc::c_long, arguments: [usize; 5], entry: Entry) -> isize {
    let [a, b, c, d, e] = arguments;
    let answer;
    // SAFETY: the child never leaves this block: it begins on its own stack, with nothing on it, and
    // `entry` does not return. For the caller it is a system call like another.
    unsafe {
        core::arch::asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x30, xzr",
            "mov x0, x9",
            "blr x10",
            "brk 1",
            "2:",
            // By name: the compiler could choose x30.
            in("x9") entry.argument,
            in("x10") entry.function,
            inlateout("x0") a => answer,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x8") number,
        );
    }
    answer
}

/// Makes a task that runs `entry` on `stack`, which begins there and has that size; `word` has its ID while it lives,
/// where `flags` ask for that. Returns the ID.
///
/// # Errors
/// The negative errno of clone3(2).
///
/// # Safety
/// As for clone3(2) with those flags; the stack is the task's alone and large enough for `entry`.
pub(crate) unsafe fn clone3(
    flags: u64,
    word: &'static AtomicU32,
    (stack, stack_size): (usize, usize),
    entry: Entry,
) -> isize {
    let word = word.as_ptr().expose_provenance() as u64;
    let arguments = libc::clone_args {
        flags,
        pidfd: 0,
        child_tid: word,
        parent_tid: word,
        exit_signal: 0,
        stack: stack as u64,
        stack_size: stack_size as u64,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: 0,
    };
    let (pointer, size) = (
        (&raw const arguments).expose_provenance(),
        size_of::<libc::clone_args>(),
    );
    // SAFETY: the caller's promise; the kernel only reads the arguments.
    unsafe { spawn(libc::SYS_clone3, [pointer, size, 0, 0, 0], entry) }
}

/// Makes a call that takes numbers only, or reads what its pointer points to.
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
/// No thread uses the range any more.
pub(super) unsafe fn unmap(start: usize, length: usize) -> isize {
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_munmap, [start, length, 0, 0, 0, 0]) }
}

/// madvise(2).
///
/// # Safety
/// Where the advice drops what the range holds, no thread uses it any more.
pub(super) unsafe fn advise(start: usize, length: usize, advice: i32) -> isize {
    let advice = advice.cast_unsigned() as usize;
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_madvise, [start, length, advice, 0, 0, 0]) }
}

/// exit_group(2).
pub(super) fn exit_group(code: usize) -> ! {
    loop {
        // SAFETY: it writes nothing.
        unsafe { plain(libc::SYS_exit_group, [code, 0, 0]) };
    }
}

/// exit(2): this thread alone.
pub(crate) fn exit(code: usize) -> ! {
    loop {
        // SAFETY: it writes nothing, but what the thread's maker asked for.
        unsafe { plain(libc::SYS_exit, [code, 0, 0]) };
    }
}

/// How a wait came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// By a wake-up, or because the time was over.
    Woken,
    /// The word was not what was expected.
    Changed,
    /// At once: the word cannot be read.
    Failed,
}

/// futex(2) FUTEX_WAIT, on memory that processes share: returns when woken, when `word` is not
/// `expected`, or after `timeout`.
pub(super) fn wait(word: &AtomicU32, expected: u32, timeout: Duration) -> Wait {
    const EAGAIN: isize = -(libc::EAGAIN as isize);
    const EINTR: isize = -(libc::EINTR as isize);
    const ETIMEDOUT: isize = -(libc::ETIMEDOUT as isize);
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs().cast_signed(),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    let arguments = [
        word.as_ptr().expose_provenance(),
        libc::FUTEX_WAIT.cast_unsigned() as usize,
        expected as usize,
        (&raw const timeout).expose_provenance(),
        0,
        0,
    ];
    // SAFETY: FUTEX_WAIT reads the word and the timeout, both of which outlive the call.
    match unsafe { call(libc::SYS_futex, arguments) } {
        0 | EINTR | ETIMEDOUT => Wait::Woken,
        EAGAIN => Wait::Changed,
        _ => Wait::Failed,
    }
}

/// futex(2) FUTEX_WAKE: wakes all who wait for `word`, in whatever process.
pub(super) fn wake(word: &AtomicU32) {
    let operation = libc::FUTEX_WAKE.cast_unsigned() as usize;
    let everybody = i32::MAX.unsigned_abs() as usize;
    let arguments = [word.as_ptr().expose_provenance(), operation, everybody];
    // SAFETY: FUTEX_WAKE writes nothing.
    unsafe { plain(libc::SYS_futex, arguments) };
}

/// The futex word that the kernel zeroes, and wakes one waiter of, when the calling thread is gone or has
/// become another program, if another process shares its memory then. `None` on kernels that do not tell.
pub(super) fn tid_word() -> Option<&'static AtomicU32> {
    let mut address = 0usize;
    let arguments = [PR_GET_TID_ADDRESS, (&raw mut address).expose_provenance()];
    let [option, to] = arguments;
    // SAFETY: the kernel writes one pointer to `address`.
    let answer = unsafe { call(libc::SYS_prctl, [option, to, 0, 0, 0, 0]) };
    // SAFETY: the kernel tells what the C library registered, or left the 0.
    unsafe { word_at(address) }.filter(|_| answer == 0)
}

/// The word at an address, or `None` where that is 0.
///
/// # Safety
/// [`tid_word`] gave the address in this process, or it is 0.
pub(super) unsafe fn word_at(address: usize) -> Option<&'static AtomicU32> {
    let usable = address != 0 && address.is_multiple_of(align_of::<AtomicU32>());
    // SAFETY: the thread's C library registered the address with the kernel, and keeps the word in the
    // thread's control block, which is mapped for as long as the thread's process can run.
    usable.then(|| unsafe { AtomicU32::from_ptr(core::ptr::with_exposed_provenance_mut(address)) })
}

/// Nanoseconds of CLOCK_MONOTONIC. Not from the vDSO, whose data may be gone.
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

/// read(2) into `buffer`; `None` where it failed.
pub(super) fn read(descriptor: usize, buffer: &mut [u8]) -> Option<usize> {
    let (to, length) = (buffer.as_mut_ptr().expose_provenance(), buffer.len());
    // SAFETY: the kernel writes at most `length` bytes to the buffer.
    let answer = unsafe { call(libc::SYS_read, [descriptor, to, length, 0, 0, 0]) };
    usize::try_from(answer).ok().map(|read| read.min(length))
}
