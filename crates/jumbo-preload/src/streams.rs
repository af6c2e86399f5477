//! glibc's list of streams, taken before our own locks when a program forks: [`lock`].
//!
//! fork(2) of glibc takes the list (`_IO_list_lock`) after all handlers of pthread_atfork(3), ours included. A thread
//! in fflush(NULL) holds the list and waits for a stream; a thread in getline(3) holds that stream and waits for the
//! heap while its buffer grows. So our locks must come after the list, or the three wait for each other (glibc bug
//! 19431 was the same of its own malloc). The lock is recursive, so glibc takes it once more behind us.

use core::sync::atomic::{AtomicU8, Ordering};

use crate::next;

/// How often the forking thread holds the list through us: once more for each fork inside of its own fork. Written with
/// the list locked.
static HELD: AtomicU8 = AtomicU8::new(0);
/// Forks of a single thread, for which nothing was locked; they end in the reverse order.
static SKIPPED: AtomicU8 = AtomicU8::new(0);

/// Takes the list, before any lock of ours. Not in a process with one thread, in which nothing can wait for another:
/// there glibc leaves the list alone, too.
pub(crate) fn lock() {
    if next::is_single_threaded() {
        SKIPPED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    // SAFETY: may be called by any thread at any time; `unlock` or `reset` follows.
    unsafe { (next::_IO_list_lock.get())() };
    HELD.fetch_add(1, Ordering::Relaxed);
}

/// Gives it back in the parent, after all locks of ours.
pub(crate) fn unlock() {
    if SKIPPED.load(Ordering::Relaxed) > 0 {
        SKIPPED.fetch_sub(1, Ordering::Relaxed);
    } else if HELD.load(Ordering::Relaxed) > 0 {
        HELD.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: taken by `lock` in this thread.
        unsafe { (next::_IO_list_unlock.get())() };
    }
}

/// Frees it in the child, which has one thread, whatever the parent's threads held.
pub(crate) fn reset() {
    SKIPPED.store(0, Ordering::Relaxed);
    if HELD.swap(0, Ordering::Relaxed) > 0 {
        // SAFETY: glibc does the same in the child of a process with threads; no other thread is here.
        unsafe { (next::_IO_list_resetlock.get())() };
    }
}
