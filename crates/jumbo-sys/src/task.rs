//! Tasks unknown to the C library, and their system calls: [`Thread`], [`clone3`], [`call`],
//! [`wait`].
//!
//! They have no `errno`, and the reaper's tasks run after libc is unmapped. So the calls are
//! machine code, and return the kernel's result: a negative errno on failure.
#![expect(unsafe_code, reason = "system calls, and tasks on stacks of their own")]

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

/// Makes a system call.
///
/// # Safety
/// As for the call.
#[inline(always)]
pub unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: the kernel's convention on x86-64: it clobbers rcx and r11, and leaves the stack
    // alone.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    // SAFETY: the kernel's convention on arm64: it changes only x0, and leaves the stack alone.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!(
            "svc 0",
            inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f, in("x8") number,
            options(nostack),
        );
    }
    result
}

/// Entry point of a new task.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Function that runs on the new stack.
    pub function: unsafe extern "C" fn(usize) -> !,
    /// Argument of the function.
    pub argument: usize,
}

/// Makes a clone(2) or clone3(2) whose child runs `entry`. Returns the child's ID.
///
/// # Safety
/// As for the call; its arguments contain a stack for the child alone, large enough for `entry`.
unsafe fn spawn(number: libc::c_long, arguments: [usize; 5], entry: Entry) -> isize {
    let [a, b, c, d, e] = arguments;
    let result;
    // SAFETY: the child never leaves this block: it begins on its own empty stack, and `entry` does
    // not return. For the caller it is a plain system call.
    #[cfg(target_arch = "x86_64")]
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
            // Named registers: the compiler could choose rbp.
            in("r9") entry.function,
            in("r12") entry.argument,
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e,
            out("rcx") _, out("r11") _,
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
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
            // Named registers: the compiler could choose x30.
            in("x9") entry.argument,
            in("x10") entry.function,
            inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x8") number,
        );
    }
    result
}

/// Makes a task that runs `entry` on `stack` (start and size). `word` is both the parent's and the
/// child's ID word of `flags`. Returns the ID.
///
/// # Errors
/// The negative errno of clone3(2).
///
/// # Safety
/// As for clone3(2) with those flags; only the task uses the stack, which is large enough for
/// `entry`.
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

/// Ends this thread by exit(2).
fn exit() -> ! {
    loop {
        // SAFETY: the call writes only to the word of CLONE_CHILD_CLEARTID.
        unsafe { call(libc::SYS_exit, [0; 6]) };
    }
}

/// Result of [`wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// A wake-up, a signal or the timeout ended the wait.
    Woken,
    /// The word did not have the expected value.
    Changed,
    /// The word is not readable.
    Failed,
}

/// FUTEX_WAIT of futex(2), on shared memory: returns after a wake-up, after `timeout`, or if `word`
/// is not `expected`.
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

/// FUTEX_WAKE of futex(2): wakes all waiters of `word`, in all processes.
pub fn wake(word: &AtomicU32) {
    let operation = libc::FUTEX_WAKE.cast_unsigned() as usize;
    let all = i32::MAX.unsigned_abs() as usize;
    let word = word.as_ptr().expose_provenance();
    // SAFETY: FUTEX_WAKE writes nothing.
    unsafe { call(libc::SYS_futex, [word, operation, all, 0, 0, 0]) };
}

/// Variant of [`wait`] for either of two words. Without the second one, and before futex_waitv(2)
/// (Linux 5.16), it returns after a second at the latest.
pub fn wait_either(
    (word, expected): (&AtomicU32, u32),
    second: Option<(&AtomicU32, u32)>,
    timeout: Duration,
) {
    const MAX_BLIND_WAIT: Duration = Duration::from_secs(1);
    #[repr(C)]
    struct Waiter {
        value: u64,
        address: u64,
        flags: u32,
        reserved: u32,
    }
    /// FUTEX2_SIZE_U32.
    const IS_32_BITS: u32 = 2;
    const ENOSYS: isize = -(libc::ENOSYS as isize);
    let waiter = |word: &AtomicU32, value: u32| Waiter {
        value: value.into(),
        address: word.as_ptr().expose_provenance() as u64,
        flags: IS_32_BITS,
        reserved: 0,
    };
    let Some((other, others)) = second else {
        wait(word, expected, timeout.min(MAX_BLIND_WAIT));
        return;
    };
    let waiters = [waiter(word, expected), waiter(other, others)];
    let until = super::now().saturating_add(timeout);
    let until = libc::timespec {
        tv_sec: until.as_secs().cast_signed(),
        tv_nsec: until.subsec_nanos().into(),
    };
    let arguments = [
        waiters.as_ptr().expose_provenance(),
        waiters.len(),
        0,
        (&raw const until).expose_provenance(),
        libc::CLOCK_MONOTONIC.cast_unsigned() as usize,
        0,
    ];
    // SAFETY: the call reads the array, its words and the time, which outlive it.
    if unsafe { call(libc::SYS_futex_waitv, arguments) } == ENOSYS {
        wait(word, expected, timeout.min(MAX_BLIND_WAIT));
    }
}

/// Returns the word that the kernel zeroes and wakes when the calling thread ends or execs (its
/// `clear_child_tid`), if the C library has registered one.
pub fn tid_word() -> Option<&'static AtomicU32> {
    /// `PR_GET_TID_ADDRESS` of prctl(2), Linux 3.5 with CONFIG_CHECKPOINT_RESTORE.
    const PR_GET_TID_ADDRESS: usize = 40;
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
pub unsafe fn word_at(address: usize) -> Option<&'static AtomicU32> {
    let usable = address != 0 && address.is_multiple_of(align_of::<AtomicU32>());
    // SAFETY: the C library registered the address with the kernel, and keeps the word in the
    // thread's control block, which is mapped as long as the process runs.
    usable.then(|| unsafe { AtomicU32::from_ptr(core::ptr::with_exposed_provenance_mut(address)) })
}

/// Thread unknown to the C library. Its thread pointer refers to a zeroed block of its own: a
/// function with a stack protector reads there, and the block of the creating thread may be gone.
/// It may call nothing that uses thread-locals (errno).
#[derive(Debug)]
pub struct Thread {
    /// Nonzero until the kernel has released the thread.
    alive: AtomicU32,
    /// Descriptor of CLONE_PIDFD, not used; or the process ID of a [`Thread::SIBLING`].
    number: AtomicU32,
}

impl Thread {
    /// Size of the block at the thread pointer. Two words hold the pointer itself, as the ABI of
    /// x86-64 and the C libraries require.
    const BLOCK_BYTES: usize = 1 << 10;
    /// Size of the block below the thread pointer, where C libraries keep a thread's data on arm64.
    const BELOW_BYTES: usize = if cfg!(target_arch = "aarch64") {
        4 << 10
    } else {
        0
    };
    /// Alignment of thread blocks in C libraries: the address identifies the thread.
    const ALIGN_BYTES: usize = 64;

    /// Flags of clone(2) for such a thread. Without CLONE_SYSVSEM: it makes no semaphore
    /// operation, and kcmp(2) compares the program's undo lists.
    pub const FLAGS: u32 = (libc::CLONE_VM
        | libc::CLONE_SETTLS
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_CHILD_CLEARTID)
        .cast_unsigned();

    /// Flags of clone(2) for a process that shares the memory in place of a thread, see
    /// `watch::sibling`. It has no exit signal: only a wait with __WALL or __WCLONE finds it. The
    /// kernel writes its ID before it runs. It begins with the program's descriptors, since a copy
    /// would keep pipes open: [`super::leave_descriptors`] gives it an empty table.
    pub const SIBLING: u32 = (libc::CLONE_VM
        | libc::CLONE_SETTLS
        | libc::CLONE_FILES
        | libc::CLONE_UNTRACED
        | libc::CLONE_PARENT_SETTID
        | libc::CLONE_CHILD_CLEARTID)
        .cast_unsigned();

    /// Returns a value without a thread.
    pub const fn none() -> Self {
        Self {
            alive: AtomicU32::new(0),
            number: AtomicU32::new(0),
        }
    }

    /// Starts the thread with `work` on `stack` (start and size). False if clone(2) fails.
    ///
    /// A seccomp filter can check the flags of clone(2), but not those of clone3(2), which are in
    /// memory. The block at the thread pointer is at the beginning of the stack.
    ///
    /// # Safety
    /// `flags` are [`Thread::FLAGS`] with or without CLONE_PIDFD, or [`Thread::SIBLING`]. All signals are blocked: no
    /// handler may run on such a thread. The stack is large enough for `work`. Until
    /// [`Thread::join`] has returned, only the thread uses the stack, and this value and `work` do
    /// not move. The previous thread has been joined.
    pub unsafe fn start<W: Fn() + Sync>(
        &self,
        flags: u32,
        (stack, size): (usize, usize),
        work: &W,
    ) -> bool {
        let alive = self.alive.as_ptr().expose_provenance();
        let number = self.number.as_ptr().expose_provenance();
        let (flags, top) = (flags as usize, stack + size);
        let first = stack.next_multiple_of(Self::ALIGN_BYTES);
        let block = first + Self::BELOW_BYTES;
        let bytes = core::ptr::with_exposed_provenance_mut::<u8>(first);
        let words = core::ptr::with_exposed_provenance_mut::<usize>(block);
        // SAFETY: only the thread uses the stack, and it has not started.
        unsafe {
            bytes.write_bytes(0, Self::BELOW_BYTES + Self::BLOCK_BYTES);
            words.write(block);
            words.add(2).write(block);
        }
        let arguments = if cfg!(target_arch = "aarch64") {
            [flags, top, number, block, alive]
        } else {
            [flags, top, number, alive, block]
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

    /// Reports whether the thread is alive.
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire) != 0
    }

    /// Returns the process ID of a [`Thread::SIBLING`]; 0: none.
    pub fn number(&self) -> u32 {
        self.number.load(Ordering::Relaxed)
    }

    /// Forgets the process ID of a [`Thread::SIBLING`].
    pub fn forget_number(&self) {
        self.number.store(0, Ordering::Relaxed);
    }

    /// Forgets the thread.
    ///
    /// # Safety
    /// This is the child of a fork(2), which does not have the thread.
    pub unsafe fn forget(&self) {
        self.alive.store(0, Ordering::Relaxed);
    }

    /// Variant of [`Thread::join`] that waits about `timeout` at most.
    pub fn join_for(&self, timeout: Duration) {
        if let alive @ 1.. = self.alive.load(Ordering::Acquire) {
            wait(&self.alive, alive, timeout);
        }
    }

    /// Waits until the kernel has released the thread, if there is one.
    pub fn join(&self) {
        while let alive @ 1.. = self.alive.load(Ordering::Acquire) {
            wait(&self.alive, alive, Duration::from_secs(1));
        }
    }
}

/// # Safety
/// Only [`Thread::start`] passes it to clone(2): `work` is the address of a `W` that outlives the
/// thread.
unsafe extern "C" fn run<W: Fn() + Sync>(work: usize) -> ! {
    // SAFETY: the caller's promise.
    let work = unsafe { &*core::ptr::with_exposed_provenance::<W>(work) };
    work();
    exit()
}
