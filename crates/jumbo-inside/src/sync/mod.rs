//! Locks and futexes inside wrapped programs: [`Lock`], [`Word`], [`Deadline`], `BackOff`.
//!
//! The module uses `jumbo-sys` alone, does not allocate, and has no thread-local and no call of libc.
//! Threads sleep on a [`Word`] of a [`Platform`]: a futex ([`Linux`]), or in tests a model of it,
//! so that tests search the interleavings of the real code.

mod back_off;
mod lock;

pub(crate) use back_off::BackOff;
pub use jumbo_sys::Deadline;
pub(crate) use jumbo_sys::{millis, now, thread_pointer};
pub use lock::Lock;

use core::fmt::Debug;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex;

/// Provider of futex words and thread identities.
pub trait Platform: Debug {
    /// Futex word.
    type Word: Word;
    /// Spins on a taken lock before sleeping.
    const MAX_SPINS: u32;
    /// Time of a sleep after which a lock counts as abandoned; `None`: never.
    const MAX_SLEEP: Option<Duration>;
    /// Returns the identity of this thread: the lowest bit is clear, the next one set. Unique among
    /// live threads, except as [`Lock`] states.
    fn me() -> u32;
}

/// Atomic word that threads can sleep on. futex(2).
pub trait Word: Debug {
    /// Loads the value.
    fn load(&self, order: Ordering) -> u32;
    /// Replaces `current` by `new`; returns the old value, as an error if it differs.
    fn compare_exchange(&self, current: u32, new: u32, success: Ordering) -> Result<u32, u32>;
    /// Replaces the value; returns the old one.
    fn swap(&self, new: u32, order: Ordering) -> u32;
    /// Adds with wrap-around; returns the old value.
    fn fetch_add(&self, more: u32, order: Ordering) -> u32;
    /// Sleeps while the value is `expected`, until a wake-up, possibly spurious. True on a timeout.
    fn wait(&self, expected: u32, time: Option<Duration>) -> bool;
    /// Wakes `count` sleepers.
    fn wake(&self, count: u32);
}

/// Platform of the running kernel.
#[derive(Debug)]
pub struct Linux;

impl Platform for Linux {
    type Word = AtomicU32;
    /// About the length of the shortest critical section.
    const MAX_SPINS: u32 = 200;
    /// Locks are held for microseconds, and while a page fault waits for compaction or swap.
    const MAX_SLEEP: Option<Duration> = Some(Duration::from_secs(1));

    fn me() -> u32 {
        // Thread control blocks are aligned to 64 bytes.
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a hash of the pointer is enough"
        )]
        let bits = (thread_pointer() >> 5) as u32;
        (bits & !1) | 2
    }
}

/// [`Linux`] with words apart from the guarded values: in the `one_page!`.
#[derive(Debug)]
pub struct Apart;

impl Platform for Apart {
    type Word = &'static AtomicU32;
    const MAX_SPINS: u32 = Linux::MAX_SPINS;
    const MAX_SLEEP: Option<Duration> = Linux::MAX_SLEEP;

    fn me() -> u32 {
        Linux::me()
    }
}

impl<W: Word> Word for &W {
    fn load(&self, order: Ordering) -> u32 {
        (**self).load(order)
    }

    fn compare_exchange(&self, current: u32, new: u32, success: Ordering) -> Result<u32, u32> {
        (**self).compare_exchange(current, new, success)
    }

    fn swap(&self, new: u32, order: Ordering) -> u32 {
        (**self).swap(new, order)
    }

    fn fetch_add(&self, more: u32, order: Ordering) -> u32 {
        (**self).fetch_add(more, order)
    }

    fn wait(&self, expected: u32, time: Option<Duration>) -> bool {
        (**self).wait(expected, time)
    }

    fn wake(&self, count: u32) {
        (**self).wake(count);
    }
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    fn compare_exchange(&self, current: u32, new: u32, success: Ordering) -> Result<u32, u32> {
        self.compare_exchange(current, new, success, Ordering::Relaxed)
    }

    fn swap(&self, new: u32, order: Ordering) -> u32 {
        self.swap(new, order)
    }

    fn fetch_add(&self, more: u32, order: Ordering) -> u32 {
        self.fetch_add(more, order)
    }

    fn wait(&self, expected: u32, time: Option<Duration>) -> bool {
        let time = time.and_then(|time| time.try_into().ok());
        let woken = futex::wait(self, futex::Flags::PRIVATE, expected, time.as_ref());
        woken == Err(Errno::TIMEDOUT)
    }

    fn wake(&self, count: u32) {
        let _ = futex::wake(self, futex::Flags::PRIVATE, count);
    }
}
