//! The lock of glibc's list of streams, taken before this library's locks at a fork: [`lock`].
//!
//! glibc's fork(2) takes the list lock (`_IO_list_lock`) after all handlers of pthread_atfork(3). A
//! thread in fflush(NULL) holds the list lock and waits for a stream; a thread in getline(3) holds
//! that stream and waits for the heap while its buffer grows. So this library's locks must follow
//! the list lock, or the three deadlock (glibc bug 19431 was the same in its own malloc). The lock
//! is recursive, so glibc takes it once more.
//!
//! musl's list lock is not accessible. There [`fflush`] is interposed, and a fork waits until no
//! thread is in fflush(NULL).

use core::arch::naked_asm;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU8, Ordering};

use jumbo_inside::sync::Lock;

use crate::next;

jumbo_inside::one_page! {
    /// Recursion depth of the list lock in the forking thread: one for each nested fork. Written
    /// with the list locked.
    static HELD: AtomicU8 = AtomicU8::new(0);
    /// Nested forks that took no lock; they end in reverse order.
    static SKIPPED: AtomicU8 = AtomicU8::new(0);

    /// Held by fflush(NULL) and over a fork, if the C library's list lock is not accessible.
    static FLUSHING: Lock<()> = Lock::new(());
}

/// Takes the list lock before this library's locks. A process with one thread takes none, as in
/// glibc.
pub(crate) fn lock() {
    if next::is_single_threaded() {
        SKIPPED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    if next::is_glibc() {
        // SAFETY: any thread may call it at any time; `unlock` or `reset` follows.
        unsafe { (next::_IO_list_lock.get())() };
    } else if !FLUSHING.acquire_always() {
        // A nested fork.
        SKIPPED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    HELD.fetch_add(1, Ordering::Relaxed);
}

/// Releases the list lock in the parent, after all locks of this library.
pub(crate) fn unlock() {
    if SKIPPED.load(Ordering::Relaxed) > 0 {
        SKIPPED.fetch_sub(1, Ordering::Relaxed);
    } else if HELD.load(Ordering::Relaxed) > 0 {
        HELD.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: `lock` took it in this thread.
        unsafe { release(&next::_IO_list_unlock) };
    }
}

/// Resets the list lock in the child, which has one thread.
pub(crate) fn reset() {
    SKIPPED.store(0, Ordering::Relaxed);
    if HELD.swap(0, Ordering::Relaxed) > 0 {
        // SAFETY: glibc does the same in the child of a process with threads; this is the only
        // thread.
        unsafe { release(&next::_IO_list_resetlock) };
    }
}

/// # Safety
/// This thread, or the parent's that it copies, holds the list lock; `glibc_release` releases it.
unsafe fn release(glibc_release: &next::Next<unsafe extern "C" fn()>) {
    // SAFETY: the caller's promise.
    unsafe {
        match next::is_glibc() {
            true => (glibc_release.get())(),
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
    // A cancellation point: no Rust frame may be on the stack.
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "endbr64", "test rdi, rdi", "jne 2f", "push rdi", "call {all}", "pop rdi", "jmp rax", "2:", "jmp [rip + {next}]",
        all = sym next_flush_all, next = sym next::fflush
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "hint #34", "cbnz x0, 2f", "stp x0, x30, [sp, #-16]!", "bl {all}", "mov x16, x0", "ldp x0, x30, [sp], #16",
        "br x16", "2:", "adrp x16, {next}", "ldr x16, [x16, :lo12:{next}]", "br x16",
        all = sym next_flush_all, next = sym next::fflush
    );
}

extern "C" fn next_flush_all() -> *mut c_void {
    match next::is_glibc() {
        true => next::fflush.address(),
        false => flush_all as *mut c_void,
    }
}

/// musl's fflush(NULL), excluded during forks: it holds the list lock while it waits for a stream.
unsafe extern "C" fn flush_all(stream: *mut c_void) -> c_int {
    let is_taken = FLUSHING.acquire_always();
    // SAFETY: the same call.
    let answer = unsafe { (next::fflush.get())(stream) };
    if is_taken {
        // SAFETY: acquired above.
        unsafe { FLUSHING.release() };
    }
    answer
}
