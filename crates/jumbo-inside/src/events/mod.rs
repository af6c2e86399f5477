//! The one door: the events of a program that mechanisms hear, and the order in which they hear them.
//!
//! A [`Mechanism`] has a function for each event, and overrides those of the events that concern it. A list of mechanisms
//! is one itself: a nest of pairs, `(A, (B, (C, ())))`, which [`list!`](list) writes. Its functions call those of
//! its members in the order of the list, and are inlined; an event that no member hears costs nothing.
//!
//! The preload library has the one list, and turns each call of the program into events: a function of the C library and
//! the system call of the same name (`syscall(2)`) share one piece of code, so both reach the same mechanisms.
//!
//! # Fork
//! 1. [`Mechanism::about_to_fork`], in the order of the list. No lock is held: threads of ours end here, and may be
//!    waited for.
//! 2. [`Mechanism::lock_for_fork`], in the order of the list: each mechanism takes its locks, so that the child finds them
//!    free. The order of the list therefore is the order of all locks that are held together.
//! 3. fork(2).
//! 4. [`Mechanism::unlock_after_fork`], in the reverse order, in both processes.
//! 5. [`Mechanism::has_forked`] in the parent, [`Mechanism::is_forked`] in the child, in the order of the list.
//!
//! A signal handler may fork between two of these steps: a mechanism that cannot take a lock because its thread has it
//! notes that, and gives back only what it took.
//!
//! # Confinement
//! Before a change after which the process can do less, [`Mechanism::before_confinement`] is heard by all while everything
//! is still allowed. Then [`Mechanism::changing_privilege`] ends the threads that would keep what the program gives up.
#![expect(unsafe_code, reason = "two events have preconditions")]

use core::ffi::c_int;

/// A process after fork(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The process that forked.
    Parent,
    /// The new process. It has one thread.
    Child,
}

/// A mapping that the program has made: the arguments of mmap(2), and its result.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    /// The first address; -1 (`MAP_FAILED`) where the kernel refused.
    pub address: usize,
    /// Bytes, as the program asked.
    pub length: usize,
    /// `PROT_*`.
    pub protection: c_int,
    /// `MAP_*`.
    pub flags: c_int,
    /// The file; meaningless with `MAP_ANONYMOUS`.
    pub descriptor: c_int,
}

/// A part of jumbo that hears events. All functions are called on the program's threads, under its locks and in its signal
/// handlers: they take no lock that can be held while the program runs, except a [`Lock`](crate::sync::Lock).
#[allow(unused_variables, reason = "the defaults hear nothing")]
pub trait Mechanism {
    /// The program unmaps a range, or moves it away. Its pages are still there.
    #[inline(always)]
    fn unmapping(address: usize, length: usize) {}

    /// The program maps memory at an address of its choice, which replaces what is there (`MAP_FIXED`).
    #[inline(always)]
    fn mapping_at(address: usize, length: usize) {
        Self::unmapping(address, length);
    }

    /// The program moves, grows or shrinks a mapping (mremap(2)). `new` is its new length in bytes.
    #[inline(always)]
    fn moving(address: usize, old: usize, new: usize) {
        // A length of 0 makes a second mapping of shared pages.
        Self::unmapping(address, old.max(1));
    }

    /// The mapping has been moved `to` another address, grown or shrunk.
    #[inline(always)]
    fn moved(address: usize, old: usize, to: usize, new: usize) {}

    /// The program has made a range accessible or not (mprotect(2)).
    #[inline(always)]
    fn protected(address: usize, length: usize, protection: c_int) {}

    /// Unmaps a range in place of the kernel. True where that was done: then the call is over.
    ///
    /// # Safety
    /// The program gives up the range.
    #[inline(always)]
    unsafe fn unmap(address: usize, length: usize) -> bool {
        false
    }

    /// Makes a call that may change what is mapped as text.
    #[inline(always)]
    fn around_change<T>(call: impl FnOnce() -> T) -> T {
        call()
    }

    /// The program has made a mapping, or could not.
    #[inline(always)]
    fn mapped(mapping: &Mapping) {}

    /// The program advises a range (madvise(2)).
    #[inline(always)]
    fn advising(address: usize, length: usize, advice: c_int) {}

    /// Follows advice in place of the kernel: `Ok` or the errno, and `None` where the kernel is to.
    ///
    /// # Safety
    /// The program accepts what the advice does to the range: some drops what it holds.
    #[inline(always)]
    unsafe fn advise(address: usize, length: usize, advice: c_int) -> Option<Result<(), c_int>> {
        None
    }

    /// The program locks a range into memory (mlock(2)).
    #[inline(always)]
    fn locking(address: usize, length: usize) {}

    /// The program locks all its memory (mlockall(2)).
    #[inline(always)]
    fn locking_all() {}

    /// The kernel has accepted mlockall(2) or munlockall(2): whether future mappings are locked.
    #[inline(always)]
    fn locked_all(future: bool) {}

    /// The program punches a hole into a file (fallocate(2), MADV_REMOVE).
    #[inline(always)]
    fn punching() {}

    /// The program makes a thread.
    #[inline(always)]
    fn before_thread() {}

    /// The first thread ends while others go on.
    #[inline(always)]
    fn first_thread_ends() {}

    /// The program is about to confine itself: a seccomp filter, another root. System calls are still allowed.
    #[inline(always)]
    fn before_confinement() {}

    /// The program changes its user, groups, capabilities, namespaces or the like. Heard before the call, and after it where
    /// another thread may have made one of ours meanwhile.
    #[inline(always)]
    fn changing_privilege() {}

    /// A seccomp filter is about to be installed, and [`crate::sandbox::enter`] has been called. `is_first`: none was
    /// there before.
    #[inline(always)]
    fn confining(is_first: bool) {}

    /// The kernel has accepted the filter, or refused it.
    #[inline(always)]
    fn confined(is_installed: bool) {}

    /// The process has another root folder, or the call failed.
    #[inline(always)]
    fn rooted() {}

    /// Step 1 of a fork.
    #[inline(always)]
    fn about_to_fork() {}

    /// Step 2 of a fork.
    #[inline(always)]
    fn lock_for_fork() {}

    /// Step 4 of a fork.
    ///
    /// # Safety
    /// The last event of this thread's fork that concerns locks was [`Mechanism::lock_for_fork`].
    #[inline(always)]
    unsafe fn unlock_after_fork(side: Side) {}

    /// Step 5 of a fork, in the parent.
    #[inline(always)]
    fn has_forked() {}

    /// Step 5 of a fork, in the child, process `pid`.
    ///
    /// # Safety
    /// This is the child, with one thread, and [`Mechanism::unlock_after_fork`] was heard by all.
    #[inline(always)]
    unsafe fn is_forked(pid: u32) {}
}

/// The end of a list.
impl Mechanism for () {}

/// Functions of a list without a result: the first member, then the rest.
macro_rules! in_order {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {$(
        #[inline(always)]
        fn $name($($argument: $type),*) {
            A::$name($($argument),*);
            B::$name($($argument),*);
        }
    )*};
}

impl<A: Mechanism, B: Mechanism> Mechanism for (A, B) {
    in_order! {
        unmapping(address: usize, length: usize);
        mapping_at(address: usize, length: usize);
        moving(address: usize, old: usize, new: usize);
        moved(address: usize, old: usize, to: usize, new: usize);
        protected(address: usize, length: usize, protection: c_int);
        mapped(mapping: &Mapping);
        advising(address: usize, length: usize, advice: c_int);
        locking(address: usize, length: usize);
        locking_all();
        locked_all(future: bool);
        punching();
        before_thread();
        first_thread_ends();
        before_confinement();
        changing_privilege();
        confining(is_first: bool);
        confined(is_installed: bool);
        rooted();
        about_to_fork();
        lock_for_fork();
        has_forked();
    }

    #[inline(always)]
    unsafe fn unmap(address: usize, length: usize) -> bool {
        // SAFETY: the caller's promise.
        unsafe { A::unmap(address, length) || B::unmap(address, length) }
    }

    #[inline(always)]
    fn around_change<T>(call: impl FnOnce() -> T) -> T {
        A::around_change(|| B::around_change(call))
    }

    #[inline(always)]
    unsafe fn advise(address: usize, length: usize, advice: c_int) -> Option<Result<(), c_int>> {
        // SAFETY: the caller's promise.
        unsafe { A::advise(address, length, advice).or_else(|| B::advise(address, length, advice)) }
    }

    #[inline(always)]
    unsafe fn unlock_after_fork(side: Side) {
        // SAFETY: the caller's promise.
        unsafe {
            B::unlock_after_fork(side);
            A::unlock_after_fork(side);
        }
    }

    #[inline(always)]
    unsafe fn is_forked(pid: u32) {
        // SAFETY: the caller's promise.
        unsafe {
            A::is_forked(pid);
            B::is_forked(pid);
        }
    }
}

/// The type of a list of mechanisms, in the order in which they hear events.
#[macro_export]
#[doc(hidden)]
macro_rules! mechanisms {
    () => { () };
    ($first:ty $(, $rest:ty)* $(,)?) => { ($first, $crate::events::list!($($rest),*)) };
}

pub use mechanisms as list;

/// Steps 1 and 2 of a fork.
pub fn before_fork<All: Mechanism>() {
    All::about_to_fork();
    All::lock_for_fork();
}

/// Steps 4 and 5, in the parent.
///
/// # Safety
/// [`before_fork`] was the last call of this thread's that concerns this fork.
pub unsafe fn after_fork<All: Mechanism>() {
    // SAFETY: the caller's promise.
    unsafe { All::unlock_after_fork(Side::Parent) };
    All::has_forked();
}

/// Steps 4 and 5, in the child, process `pid`.
///
/// # Safety
/// As for [`after_fork`], and this is the child, with one thread.
pub unsafe fn after_fork_child<All: Mechanism>(pid: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        All::unlock_after_fork(Side::Child);
        All::is_forked(pid);
    }
}

/// The locks that forks hold, for a mechanism whose locks refuse a thread that has them: one bit a lock.
///
/// A fork inside a fork (a signal handler forks between two steps) is refused all locks, and gives none back.
#[derive(Debug, Default)]
pub struct Held {
    locks: core::sync::atomic::AtomicU32,
    nested: core::sync::atomic::AtomicU32,
}

impl Held {
    /// No fork is under way.
    pub const fn new() -> Self {
        Self {
            locks: core::sync::atomic::AtomicU32::new(0),
            nested: core::sync::atomic::AtomicU32::new(0),
        }
    }

    /// Notes what a fork has taken. Called with these locks held, so by one thread at a time.
    pub fn took(&self, locks: u32) {
        use core::sync::atomic::Ordering::Relaxed;
        match locks {
            // Only the thread that holds all is refused all: it is in a fork already.
            0 => {
                self.nested.fetch_add(1, Relaxed);
            }
            _ => self.locks.store(locks, Relaxed),
        }
    }

    /// The locks that the end of a fork gives back.
    pub fn give_back(&self) -> u32 {
        use core::sync::atomic::Ordering::Relaxed;
        if self.nested.load(Relaxed) > 0 {
            self.nested.fetch_sub(1, Relaxed);
            return 0;
        }
        self.locks.swap(0, Relaxed)
    }
}

#[cfg(test)]
mod tests;
