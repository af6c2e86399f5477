//! A lock that may be asked for inside a signal handler: [`Lock`].
//!
//! `malloc` is not async-signal-safe, but programs call it in handlers and mostly get away with it. A
//! plain mutex would turn "mostly" into a deadlock. This one knows its owner, by the thread pointer (the
//! one thread identity that needs neither a system call nor a thread-local, and that stays the same in
//! the child of a fork), and refuses where the owner asks again; the caller then takes another way.
//!
//! Invariant: `owner` is written by the holder alone, so it equals a thread's own pointer only if that
//! thread holds the lock.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rustix::thread::futex;

use super::memory::thread_pointer;

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;
/// About the length of the shortest critical section; past that it pays to sleep.
const SPINS: u32 = 100;

/// A value that one thread at a time may touch.
#[derive(Debug)]
pub(super) struct Lock<T> {
    word: AtomicU32,
    owner: AtomicUsize,
    value: UnsafeCell<T>,
}

// SAFETY: `with` gives out the value to one caller at a time.
#[expect(unsafe_code, reason = "a lock is what makes the value shareable")]
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(super) const fn new(value: T) -> Self {
        Self {
            word: AtomicU32::new(FREE),
            owner: AtomicUsize::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Runs `work` on the value, or gives `None` where this thread holds the lock already.
    pub(super) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        if !self.acquire() {
            return None;
        }
        #[expect(unsafe_code, reason = "the lock is held")]
        // SAFETY: the lock is held and not re-entrant, so this is the only reference.
        let result = work(unsafe { &mut *self.value.get() });
        self.release();
        Some(result)
    }

    /// Takes the lock without a value, for fork(2). False where this thread holds it already.
    pub(super) fn acquire(&self) -> bool {
        let me = thread_pointer();
        if self.owner.load(Ordering::Relaxed) == me {
            return false;
        }
        for _ in 0..SPINS {
            if self.try_word(FREE, HELD) {
                self.owner.store(me, Ordering::Relaxed);
                return true;
            }
            std::hint::spin_loop();
        }
        while self.word.swap(CONTENDED, Ordering::Acquire) != FREE {
            // A wake-up, a signal or a changed word all mean: look again.
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, CONTENDED, None);
        }
        self.owner.store(me, Ordering::Relaxed);
        true
    }

    /// Gives back what [`Lock::acquire`] took.
    pub(super) fn release(&self) {
        self.owner.store(0, Ordering::Relaxed);
        if self.word.swap(FREE, Ordering::Release) == CONTENDED {
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
        }
    }

    fn try_word(&self, from: u32, to: u32) -> bool {
        self.word
            .compare_exchange_weak(from, to, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_excludes_threads_and_refuses_its_owner() {
        static COUNT: Lock<u64> = Lock::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        COUNT.with(|count| *count += 1).unwrap();
                    }
                });
            }
        });
        let seen = COUNT.with(|count| {
            assert!(COUNT.with(|_| ()).is_none(), "the owner got in twice");
            *count
        });
        assert_eq!(seen, Some(160_000));
    }
}
