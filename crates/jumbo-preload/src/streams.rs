//! glibc's list of streams, taken before our own locks when a program forks: [`lock`].
//!
//! fork(2) of glibc takes the list (`_IO_list_lock`) after all handlers of pthread_atfork(3), ours included. A thread
//! in fflush(NULL) holds the list and waits for a stream; a thread in getline(3) holds that stream and waits for the
//! heap while its buffer grows. So our locks must come after the list, or the three wait for each other (glibc bug
//! 19431 was the same of its own malloc). The lock is recursive, so glibc takes it once more behind us.
//!
//! musl's list cannot be reached. There [`fflush`] is ours, and a fork waits until no thread is in fflush(NULL).

use core::arch::naked_asm;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU8, Ordering};

use jumbo_inside::sync::Lock;

use crate::next;

jumbo_inside::one_page! {
    /// The times that the forking thread holds the list through us: once more for each fork inside of its own fork. Written with
    /// the list locked.
    static HELD: AtomicU8 = AtomicU8::new(0);
    /// Forks of a single thread, for which nothing was locked; they end in the reverse order.
    static SKIPPED: AtomicU8 = AtomicU8::new(0);

    /// Held by fflush(NULL), and over a fork, where the C library's list cannot be taken.
    static FLUSHING: Lock<()> = Lock::new(());
}

/// Takes the list, before any lock of ours. Not in a process with one thread, in which nothing can wait for another:
/// there glibc leaves the list alone, too.
pub(crate) fn lock() {
    if next::is_single_threaded() {
        SKIPPED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    if next::is_glibc() {
        // SAFETY: may be called by any thread at any time; `unlock` or `reset` follows.
        unsafe { (next::_IO_list_lock.get())() };
    } else if !FLUSHING.acquire() {
        // A fork inside of its own.
        SKIPPED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    HELD.fetch_add(1, Ordering::Relaxed);
}

/// Gives it back in the parent, after all locks of ours.
pub(crate) fn unlock() {
    if SKIPPED.load(Ordering::Relaxed) > 0 {
        SKIPPED.fetch_sub(1, Ordering::Relaxed);
    } else if HELD.load(Ordering::Relaxed) > 0 {
        HELD.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: taken by `lock` in this thread.
        unsafe { give_back(&next::_IO_list_unlock) };
    }
}

/// Frees it in the child, which has one thread, whatever the parent's threads held.
pub(crate) fn reset() {
    SKIPPED.store(0, Ordering::Relaxed);
    if HELD.swap(0, Ordering::Relaxed) > 0 {
        // SAFETY: glibc does the same in the child of a process with threads; no other thread is here.
        unsafe { give_back(&next::_IO_list_resetlock) };
    }
}

/// # Safety
/// This thread, or the one that it is the copy of, has taken the list; `glibcs` gives it back.
unsafe fn give_back(glibcs: &next::Next<unsafe extern "C" fn()>) {
    // SAFETY: the caller's promise.
    unsafe {
        match next::is_glibc() {
            true => (glibcs.get())(),
            false => FLUSHING.release(),
        }
    }
}

/// fflush(3).
///
/// # Safety
/// As for fflush(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fflush(stream: *mut c_void) -> c_int {
    // A call that can be cancelled: of ours nothing is on the stack where glibc makes it.
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "endbr64", "test rdi, rdi", "jne 2f", "push rdi", "call {all}", "pop rdi", "jmp rax", "2:", "jmp [rip + {next}]",
        all = sym how_to_flush_all, next = sym next::fflush
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "hint #34", "cbnz x0, 2f", "stp x0, x30, [sp, #-16]!", "bl {all}", "mov x16, x0", "ldp x0, x30, [sp], #16",
        "br x16", "2:", "adrp x16, {next}", "ldr x16, [x16, :lo12:{next}]", "br x16",
        all = sym how_to_flush_all, next = sym next::fflush
    );
}

extern "C" fn how_to_flush_all() -> *mut c_void {
    match next::is_glibc() {
        true => next::fflush.address(),
        false => flush_all as *mut c_void,
    }
}

/// fflush(NULL) of musl, which holds the list while it waits for a stream: not while a thread forks.
unsafe extern "C" fn flush_all(stream: *mut c_void) -> c_int {
    let is_taken = FLUSHING.acquire();
    // SAFETY: the same call.
    let answer = unsafe { (next::fflush.get())(stream) };
    if is_taken {
        // SAFETY: taken above.
        unsafe { FLUSHING.release() };
    }
    answer
}
