//! Locks and sleep for code inside wrapped programs: [`Lock`], [`Word`]; and [`Deadline`], [`BackOff`].
//!
//! It uses no other module. Nothing here allocates, has a thread-local or goes through libc. What sleeps does so on a [`Word`],
//! of a [`Platform`]: the kernel's futexes ([`Linux`]), or in tests a model of them, so that the code that
//! runs is the code whose interleavings are searched.

mod back_off;
mod deadline;
mod lock;

pub use back_off::BackOff;
pub use deadline::Deadline;
pub(crate) use deadline::{millis, now};
pub use lock::Lock;

use core::fmt::Debug;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex;

/// What threads meet on.
pub trait Platform: Debug {
    /// A number that can be slept on.
    type Word: Word;
    /// How often a taken lock is looked at before its asker sleeps.
    const SPINS: u32;
    /// This thread: the second lowest bit is set and the lowest is not, and not the same for two that live (but see [`Lock`]).
    fn me() -> u32;
}

/// An atomic number that threads can sleep on, as futex(2) has it.
pub trait Word: Debug {
    /// The value.
    fn load(&self, order: Ordering) -> u32;
    /// Replaces `current` by `new`; the value that was there instead is the error.
    fn compare_exchange(&self, current: u32, new: u32, success: Ordering) -> Result<u32, u32>;
    /// Replaces the value and gives the old one.
    fn swap(&self, new: u32, order: Ordering) -> u32;
    /// Adds, wrapping around, and gives the old value.
    fn fetch_add(&self, more: u32, order: Ordering) -> u32;
    /// Sleeps while the value is `expected`, until another thread wakes it, or for no reason. True where it was
    /// the time that ran out.
    fn wait(&self, expected: u32, time: Option<Duration>) -> bool;
    /// Wakes `count` of those asleep.
    fn wake(&self, count: u32);
}

/// The kernel that is there.
#[derive(Debug)]
pub struct Linux;

impl Platform for Linux {
    type Word = AtomicU32;
    /// About the length of the shortest critical section; past that it pays to sleep.
    const SPINS: u32 = 200;

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

/// [`Linux`], with words that lie elsewhere than what they guard: in the `one_page!`.
#[derive(Debug)]
pub struct Apart;

impl Platform for Apart {
    type Word = &'static AtomicU32;
    const SPINS: u32 = Linux::SPINS;

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

/// An identity of the calling thread: the thread pointer of the ABI, unique among live threads.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the one way to ask without a call")]
pub fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: on x86-64 Linux the first word of the thread control block, at fs:0, is its own address
    // (the psABI's TLS variant II), set up before any code of a library runs.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly));
    }
    pointer
}

/// An identity of the calling thread: the thread pointer of the ABI, unique among live threads.
#[cfg(target_arch = "aarch64")]
#[expect(unsafe_code, reason = "the one way to ask without a call")]
pub fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: reading tpidr_el0 has no side effect; it holds the thread pointer on arm64 Linux.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, nomem, preserves_flags));
    }
    pointer
}
