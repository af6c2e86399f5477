//! Tasks that the C library does not know, and what they call the kernel by: [`Thread`], [`clone3`], [`call`], [`wait`].
//!
//! They run on the thread pointer of the task that made them, so `errno` is not their own; and the reaper's run when
//! libc is not mapped any more. So all of it is machine code of ours, and what a call returns is the kernel's own
//! word: a negative errno where it failed.
#![expect(unsafe_code, reason = "system calls, and tasks on stacks of their own")]

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

/// Makes a system call.
///
/// # Safety
/// As for the call.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> isize {
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
pub unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> isize {
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
pub struct Entry {
    /// Runs on the new stack, and never returns.
    pub function: unsafe extern "C" fn(usize) -> !,
    /// Passed to it.
    pub argument: usize,
}

/// Makes a clone(2) or clone3(2) whose child runs `entry`. Returns what the caller gets: the child's ID.
///
/// # Safety
/// As for the call; it is given a stack that is the child's alone and large enough for `entry`.
#[cfg(target_arch = "x86_64")]
unsafe fn spawn(number: libc::c_long, arguments: [usize; 5], entry: Entry) -> isize {
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
unsafe fn spawn(number: libc::c_long, arguments: [usize; 5], entry: Entry) -> isize {
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
pub unsafe fn clone3(
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

/// exit(2): this thread alone.
fn exit() -> ! {
    loop {
        // SAFETY: it writes nothing, but what the thread's maker asked for.
        unsafe { call(libc::SYS_exit, [0; 6]) };
    }
}

/// How a wait came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// By a wake-up, or because the time was over.
    Woken,
    /// The word was not what was expected.
    Changed,
    /// At once: the word cannot be read.
    Failed,
}

/// futex(2) FUTEX_WAIT, on memory that processes share: returns when woken, when `word` is not
/// `expected`, or after `timeout`.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Duration) -> Wait {
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
pub fn wake(word: &AtomicU32) {
    let operation = libc::FUTEX_WAKE.cast_unsigned() as usize;
    let all = i32::MAX.unsigned_abs() as usize;
    let word = word.as_ptr().expose_provenance();
    // SAFETY: FUTEX_WAKE writes nothing.
    unsafe { call(libc::SYS_futex, [word, operation, all, 0, 0, 0]) };
}

/// A thread that the C library does not know. Its thread pointer is at zeroes of its own, where the C library has nothing: a
/// function that is compiled with a stack protector reads there, and the thread that made this one may have ended. It may call
/// nothing that has an answer there (errno).
#[derive(Debug)]
pub struct Thread {
    /// Not 0 until the kernel has let go of it.
    alive: AtomicU32,
    /// Its descriptor, where the flags ask for one: of no use.
    descriptor: AtomicU32,
}

impl Thread {
    /// The zeroes at its thread pointer, in bytes, behind two words that are the pointer itself, as the ABI of x86-64 and the C
    /// libraries want it.
    const BLOCK_BYTES: usize = 1 << 10;
    /// The zeroes below its thread pointer, where the C libraries have their block of a thread on arm64.
    const BELOW_BYTES: usize = if cfg!(target_arch = "aarch64") {
        4 << 10
    } else {
        0
    };
    /// As of a thread block of the C library's: its address tells threads apart.
    const ALIGN_BYTES: usize = 64;

    /// The flags of such a thread.
    pub const FLAGS: u32 = (libc::CLONE_VM
        | libc::CLONE_SETTLS
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM
        | libc::CLONE_CHILD_CLEARTID)
        .cast_unsigned();

    /// None yet.
    pub const fn none() -> Self {
        Self {
            alive: AtomicU32::new(0),
            descriptor: AtomicU32::new(0),
        }
    }

    /// Has the thread do `work` on `stack`, which begins there and has that size. False where none can be made.
    ///
    /// clone(2), whose flags a filter can check, where clone3(2) has them in memory. The block at the thread pointer is at the
    /// beginning of the stack.
    ///
    /// # Safety
    /// `flags` are [`Thread::FLAGS`], and CLONE_PIDFD or not. All signals are blocked: no handler may run on such a thread.
    /// Until [`Thread::join`] has returned the stack, which is large enough for `work`, is the thread's alone, and this value
    /// and `work` stay where they are. The thread that was made before has been joined.
    pub unsafe fn start<W: Fn() + Sync>(
        &self,
        flags: u32,
        (stack, size): (usize, usize),
        work: &W,
    ) -> bool {
        let alive = self.alive.as_ptr().expose_provenance();
        let descriptor = self.descriptor.as_ptr().expose_provenance();
        // Flags, the top of the stack, and where to tell descriptor and end.
        let (flags, top) = (flags as usize, stack + size);
        let first = stack.next_multiple_of(Self::ALIGN_BYTES);
        let block = first + Self::BELOW_BYTES;
        let bytes = core::ptr::with_exposed_provenance_mut::<u8>(first);
        let words = core::ptr::with_exposed_provenance_mut::<usize>(block);
        // SAFETY: the stack is the thread's alone, and it is not there yet.
        unsafe {
            bytes.write_bytes(0, Self::BELOW_BYTES + Self::BLOCK_BYTES);
            words.write(block);
            words.add(2).write(block);
        }
        let arguments = if cfg!(target_arch = "aarch64") {
            [flags, top, descriptor, block, alive]
        } else {
            [flags, top, descriptor, alive, block]
        };
        let entry = Entry {
            function: run::<W>,
            argument: core::ptr::from_ref(work).expose_provenance(),
        };
        self.alive.store(1, Ordering::Relaxed);
        // SAFETY: the caller's promise; the kernel writes to two atomics.
        let made = unsafe { spawn(libc::SYS_clone, arguments, entry) } >= 0;
        if !made {
            self.alive.store(0, Ordering::Relaxed);
        }
        made
    }

    /// Whether there is one.
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire) != 0
    }

    /// Takes the thread for gone.
    ///
    /// # Safety
    /// This is the child of a fork(2), which does not have it.
    pub unsafe fn forget(&self) {
        self.alive.store(0, Ordering::Relaxed);
    }

    /// [`Thread::join`], for about so long at most.
    pub fn join_for(&self, time: Duration) {
        if let alive @ 1.. = self.alive.load(Ordering::Acquire) {
            wait(&self.alive, alive, time);
        }
    }

    /// Waits until the kernel has let go of the thread, if there is one.
    pub fn join(&self) {
        while let alive @ 1.. = self.alive.load(Ordering::Acquire) {
            wait(&self.alive, alive, Duration::from_secs(1));
        }
    }
}

/// # Safety
/// Called by [`Thread::start`] alone: `work` is the address of a `W` that outlives the thread.
unsafe extern "C" fn run<W: Fn() + Sync>(work: usize) -> ! {
    // SAFETY: the caller's promise.
    let work = unsafe { &*core::ptr::with_exposed_provenance::<W>(work) };
    work();
    exit()
}
