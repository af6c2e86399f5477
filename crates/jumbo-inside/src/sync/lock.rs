//! Lock that a signal handler may request: [`Lock`].
//!
//! `malloc` is not async-signal-safe, but programs call it in handlers, and mostly succeed. A plain
//! mutex would deadlock there. This lock refuses its owner, and the caller uses another way.
//!
//! Owner and lock are one word, consistent at any instruction: 0 when free, else [`Platform::me`]
//! of the owner, with the lowest bit set if a thread may sleep. `me` derives from the thread
//! pointer, which needs neither a system call nor a thread-local, and which the child of a fork
//! keeps.
//!
//! The owner may have ended: killed with its process, while a child of vfork(2) goes on with the
//! memory, or alone, as the process beside a program of one thread. So [`Lock::with`] refuses after a
//! while, as if the caller were the owner, and at once from then on, until the owner releases the lock
//! or another one has it.
//!
//! Threads whose pointers are 128 GiB apart have the same `me`: one of them may be refused
//! needlessly, which every caller handles.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use super::{Linux, Platform, Word};

const FREE: u32 = 0;
const HAS_SLEEPERS: u32 = 1;
/// Attempts of [`Lock::with_soon`]: tens of microseconds.
const MAX_ATTEMPTS: u32 = 2000;

/// Value behind a lock.
#[derive(Debug)]
pub struct Lock<T, P: Platform = Linux> {
    word: P::Word,
    /// Owner that did not release the lock for [`Platform::MAX_SLEEP`]; 0: none.
    abandoner: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: `with` passes the value to one caller at a time.
#[expect(unsafe_code, reason = "the lock makes the value shareable")]
unsafe impl<T: Send, P: Platform> Sync for Lock<T, P> where P::Word: Sync {}

impl<T> Lock<T> {
    /// Returns a free lock around `value`.
    pub const fn new(value: T) -> Self {
        Self::on(AtomicU32::new(FREE), value)
    }
}

impl<T, P: Platform> Lock<T, P> {
    /// Returns a lock on a word of the platform, which is 0.
    pub const fn on(word: P::Word, value: T) -> Self {
        Self {
            word,
            abandoner: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Runs `work` on the value; `None` if this thread holds the lock, or one that may have ended.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        // SAFETY: acquired here, by this thread.
        #[expect(unsafe_code, reason = "the lock is held")]
        self.acquire_within(P::MAX_SLEEP)
            .then(|| unsafe { self.run(work) })
    }

    /// Variant of [`Lock::with`] that waits without a bound: `None` if this thread holds the lock.
    pub fn with_always<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        // SAFETY: as in `with`.
        #[expect(unsafe_code, reason = "the lock is held")]
        self.acquire_always().then(|| unsafe { self.run(work) })
    }

    /// Runs `work` on the value; `None` if any thread keeps the lock: its owner may be suspended
    /// until the caller resumes it (a garbage collector).
    pub fn with_soon<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        let me = P::me();
        let take = |_| {
            let taken = self.word.compare_exchange(FREE, me, Ordering::Acquire);
            if taken.is_err() {
                core::hint::spin_loop();
            }
            taken.is_ok()
        };
        // SAFETY: as in `with`.
        #[expect(unsafe_code, reason = "the lock is held")]
        (0..MAX_ATTEMPTS)
            .any(take)
            .then(|| unsafe { self.run(work) })
    }

    /// Runs `work` on the value, and releases the lock.
    ///
    /// # Safety
    /// The calling thread has acquired the lock, and releases it only here.
    #[expect(unsafe_code, reason = "another thread may use the value afterwards")]
    unsafe fn run<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the lock is held and not re-entrant, so this is the only reference.
        let result = work(unsafe { &mut *self.value.get() });
        // SAFETY: the caller's promise.
        unsafe { self.release() };
        result
    }

    /// Acquires the lock without a value, for fork(2); false if this thread holds it, or one that may
    /// have ended: the child does without what it protects.
    pub fn acquire(&self) -> bool {
        self.acquire_within(P::MAX_SLEEP)
    }

    /// Variant of [`Lock::acquire`] that waits without a bound: false if this thread holds the lock.
    pub fn acquire_always(&self) -> bool {
        self.acquire_within(None)
    }

    /// Variant of [`Lock::acquire`]; false if the owner keeps the lock for twice `max`.
    fn acquire_within(&self, max: Option<Duration>) -> bool {
        let me = P::me();
        // Once this thread has slept, others may sleep unknown to it, so it keeps the bit set.
        let mut taken = me;
        let (mut spins, mut sleeps) = (0, 0);
        loop {
            let seen = self.word.load(Ordering::Relaxed);
            if seen & !HAS_SLEEPERS == me {
                return false;
            }
            if seen == FREE {
                if self
                    .word
                    .compare_exchange(FREE, taken, Ordering::Acquire)
                    .is_ok()
                {
                    if spins > 0 {
                        self.abandoner.store(FREE, Ordering::Relaxed);
                    }
                    return true;
                }
            } else if max.is_some()
                && self.abandoner.load(Ordering::Relaxed) == seen & !HAS_SLEEPERS
            {
                // The wake-up that brought this thread here was for all of them.
                if taken != me {
                    self.word.wake(1);
                }
                return false;
            } else if spins < P::MAX_SPINS {
                spins += 1;
                core::hint::spin_loop();
            } else {
                let marked = seen | HAS_SLEEPERS;
                let relaxed = Ordering::Relaxed;
                if seen == marked || self.word.compare_exchange(seen, marked, relaxed).is_ok() {
                    // Read the word again after a wake-up, a signal or a change.
                    let is_late = self.word.wait(marked, max);
                    taken = me | HAS_SLEEPERS;
                    let is_same = is_late && self.word.load(Ordering::Relaxed) == marked;
                    sleeps = if is_same { sleeps + 1 } else { 0 };
                    // All threads may have been stopped, and the first wait with them.
                    if sleeps > 1 {
                        let owner = marked & !HAS_SLEEPERS;
                        self.abandoner.store(owner, Ordering::Relaxed);
                    }
                }
            }
        }
    }

    /// Acquires the lock; false if any thread holds it.
    pub fn try_acquire(&self) -> bool {
        self.word
            .compare_exchange(FREE, P::me(), Ordering::Acquire)
            .is_ok()
    }

    /// Reports whether this thread holds the lock.
    pub fn is_own(&self) -> bool {
        self.word.load(Ordering::Relaxed) & !HAS_SLEEPERS == P::me()
    }

    /// Releases the lock of [`Lock::acquire`].
    ///
    /// # Safety
    /// The calling thread, or its original before a fork(2), acquired the lock with
    /// [`Lock::acquire`], [`Lock::acquire_always`] or [`Lock::try_acquire`], and has not released it since.
    #[expect(unsafe_code, reason = "another thread may use the value afterwards")]
    pub unsafe fn release(&self) {
        // The owner was slow, and has not ended.
        if self.abandoner.load(Ordering::Relaxed) != FREE {
            self.abandoner.store(FREE, Ordering::Relaxed);
        }
        if self.word.swap(FREE, Ordering::Release) & HAS_SLEEPERS != 0 {
            self.word.wake(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_excludes_threads_and_refuses_its_owner() {
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

    #[test]
    fn a_lock_whose_owner_has_ended_is_refused_and_not_waited_for() {
        static GONE: Lock<u64> = Lock::new(1);
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(GONE.acquire()));
        });
        // A second thread: the pointer of the first one may be used again.
        let refused = || {
            let start = std::time::Instant::now();
            (GONE.with(|gone| *gone), start.elapsed())
        };
        let (first, second) = (refused(), refused());
        let max = Linux::MAX_SLEEP.unwrap();
        assert!(
            first.0.is_none() && (max..max * 5).contains(&first.1),
            "{first:?}"
        );
        assert!(second.0.is_none() && second.1 < max, "{second:?}");
    }

    /// A fork of a large process holds locks for seconds.
    #[test]
    fn an_owner_that_was_slow_is_waited_for_again() {
        static SLOW: Lock<u64> = Lock::new(1);
        let (refused, was_refused) = std::sync::mpsc::channel();
        let step = &std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                SLOW.with(|_| {
                    step.wait();
                    was_refused.recv().unwrap();
                });
                SLOW.with(|_| {
                    step.wait();
                    std::thread::sleep(std::time::Duration::from_millis(100));
                });
            });
            step.wait();
            assert!(SLOW.with(|_| ()).is_none());
            refused.send(()).unwrap();
            step.wait();
            assert_eq!(SLOW.with(|slow| *slow), Some(1));
        });
    }

    #[test]
    fn with_soon_returns_none_while_another_thread_holds_the_lock() {
        static SOME: Lock<u64> = Lock::new(1);
        let other = || {
            std::thread::scope(|scope| scope.spawn(|| SOME.with_soon(|some| *some)).join().unwrap())
        };
        assert_eq!(SOME.with(|_| other()), Some(None));
        assert_eq!(other(), Some(1));
    }
}
