//! Whether the program has made a thread, as far as the preload library has seen.

use core::sync::atomic::{AtomicU8, Ordering};

crate::one_page! {
    static THREADS: AtomicU8 = AtomicU8::new(UNKNOWN);
}
const UNKNOWN: u8 = 0;
const ONE: u8 = 1;
const SEVERAL: u8 = 2;

/// Reports whether the program is known to have made no thread. False without the preload library,
/// which sees threads being made.
pub fn has_one_thread() -> bool {
    THREADS.load(Ordering::Relaxed) == ONE
}

/// Records the start of a process whose threads are seen from now on: of a program, which may have
/// made some already, or of a fork's child.
pub fn note_one_thread(is_forked: bool) {
    if is_forked {
        crate::guard::forked();
    }
    let before = if is_forked { SEVERAL } else { UNKNOWN };
    let relaxed = Ordering::Relaxed;
    let _ = THREADS.compare_exchange(before, ONE, relaxed, relaxed);
}

/// Records that the program makes a thread; true if it had one until now.
pub fn note_thread() -> bool {
    THREADS.swap(SEVERAL, Ordering::Relaxed) == ONE
}

/// Returns the thread pointer of the ABI, unique among live threads.
#[expect(unsafe_code, reason = "the only way without a call")]
pub fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: on x86-64 Linux the thread control block begins at fs:0 with its own address (psABI,
    // TLS variant II), set before any library code runs.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly));
    }
    // SAFETY: reading tpidr_el0 has no side effect; it holds the thread pointer on arm64 Linux.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, nomem, preserves_flags));
    }
    pointer
}
