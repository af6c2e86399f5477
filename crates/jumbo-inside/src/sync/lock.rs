//! A lock that may be asked for inside a signal handler: [`Lock`].
//!
//! `malloc` is not async-signal-safe, but programs call it in handlers and mostly get away with it. A
//! plain mutex would turn "mostly" into a deadlock. This one knows its owner and refuses where the
//! owner asks again; the caller then takes another way.
//!
//! Owner and lock are one word, so that a signal at any instruction finds them in agreement: 0 when
//! free, else [`Platform::me`] of the holder, with the lowest bit set when a thread may be asleep. `me` is
//! made of the thread pointer: the one thread identity that needs neither a system call nor a
//! thread-local, and that stays the same in the child of a fork. Two threads whose pointers are 128 GiB
//! apart would look the same; the one is then refused without need, which is what every caller is
//! prepared for.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering};

use super::{Linux, Platform, Word};

const FREE: u32 = 0;
const ASLEEP: u32 = 1;
/// How often [`Lock::with_soon`] asks: for some tens of microseconds.
const SOON: u32 = 2000;

/// A value that one thread at a time may touch.
#[derive(Debug)]
pub struct Lock<T, P: Platform = Linux> {
    word: P::Word,
    value: UnsafeCell<T>,
}

// SAFETY: `with` gives out the value to one caller at a time.
#[expect(unsafe_code, reason = "a lock is what makes the value shareable")]
unsafe impl<T: Send, P: Platform> Sync for Lock<T, P> where P::Word: Sync {}

impl<T> Lock<T> {
    /// A free lock around `value`.
    pub const fn new(value: T) -> Self {
        Self::on(AtomicU32::new(FREE), value)
    }
}

impl<T, P: Platform> Lock<T, P> {
    /// A lock on a word of the platform's, which is 0.
    pub const fn on(word: P::Word, value: T) -> Self {
        Self {
            word,
            value: UnsafeCell::new(value),
        }
    }

    /// Runs `work` on the value, or gives `None` where this thread holds the lock already.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        // SAFETY: taken here, by this thread, for this alone.
        #[expect(unsafe_code, reason = "the lock is held")]
        self.acquire().then(|| unsafe { self.run(work) })
    }

    /// As [`Lock::with`], and `None` where another thread has the lock and keeps it: it may be suspended, and its resumption
    /// be up to the caller (a garbage collector).
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
        (0..SOON).any(take).then(|| unsafe { self.run(work) })
    }

    /// Runs `work` on the value, and gives the lock back.
    ///
    /// # Safety
    /// The calling thread has taken the lock, and gives it back by this alone.
    #[expect(unsafe_code, reason = "another thread may be at the value afterwards")]
    unsafe fn run<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the lock is held and not re-entrant, so this is the only reference.
        let result = work(unsafe { &mut *self.value.get() });
        // SAFETY: the caller's promise.
        unsafe { self.release() };
        result
    }

    /// Takes the lock without a value, for fork(2). False where this thread holds it already.
    pub fn acquire(&self) -> bool {
        let me = P::me();
        // What the word becomes: once this thread has slept, others may sleep too, and it cannot know.
        let mut taken = me;
        let mut spins = 0;
        loop {
            let seen = self.word.load(Ordering::Relaxed);
            if seen & !ASLEEP == me {
                return false;
            }
            if seen == FREE {
                if self
                    .word
                    .compare_exchange(FREE, taken, Ordering::Acquire)
                    .is_ok()
                {
                    return true;
                }
            } else if spins < P::SPINS {
                spins += 1;
                core::hint::spin_loop();
            } else {
                let asleep = seen | ASLEEP;
                let relaxed = Ordering::Relaxed;
                if seen == asleep || self.word.compare_exchange(seen, asleep, relaxed).is_ok() {
                    // A wake-up, a signal or a changed word all mean: look again.
                    self.word.wait(asleep, None);
                    taken = me | ASLEEP;
                }
            }
        }
    }

    /// As [`Lock::acquire`], and false where any thread holds it.
    pub fn try_acquire(&self) -> bool {
        self.word
            .compare_exchange(FREE, P::me(), Ordering::Acquire)
            .is_ok()
    }

    /// Whether this thread holds it.
    pub fn is_own(&self) -> bool {
        self.word.load(Ordering::Relaxed) & !ASLEEP == P::me()
    }

    /// Gives back what [`Lock::acquire`] took.
    ///
    /// # Safety
    /// The calling thread, or the thread that it is the copy of after a fork(2), took the lock with [`Lock::acquire`]
    /// or [`Lock::try_acquire`], and has not given it back since.
    #[expect(unsafe_code, reason = "another thread may be at the value afterwards")]
    pub unsafe fn release(&self) {
        if self.word.swap(FREE, Ordering::Release) & ASLEEP != 0 {
            self.word.wake(1);
        }
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

    #[test]
    fn who_does_not_wait_is_refused_while_another_thread_has_it() {
        static SOME: Lock<u64> = Lock::new(1);
        let other = || {
            std::thread::scope(|scope| scope.spawn(|| SOME.with_soon(|some| *some)).join().unwrap())
        };
        assert_eq!(SOME.with(|_| other()), Some(None));
        assert_eq!(other(), Some(1));
    }
}
