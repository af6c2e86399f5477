//! Events: the calls of the program that mechanisms hear, and their order.
//!
//! A [`Mechanism`] has a function for each event, and overrides those that concern it. A list of
//! mechanisms is a mechanism, too: nested pairs, `(A, (B, (C, ())))`, written by [`list!`](list).
//! It calls its members in order. The calls are inlined: an event without listeners is free.
//!
//! The preload library has the only list, and turns each call of the program into events. A
//! function of the C library and its system call (`syscall(2)`) share one piece of code, so both
//! reach the same mechanisms.
//!
//! # Fork
//! 1. [`Mechanism::about_to_fork`], in the order of the list. No lock is held: jumbo's threads end
//!    here, and may be waited for.
//! 2. [`Mechanism::lock_for_fork`], in the order of the list: each mechanism takes its locks, so
//!    that the child finds them free. The list is the lock order of all locks held together.
//! 3. fork(2).
//! 4. [`Mechanism::unlock_after_fork`], in reverse order, in both processes.
//! 5. [`Mechanism::has_forked`] in the parent, [`Mechanism::is_forked`] in the child, in order.
//!
//! A signal handler may fork between two steps. A mechanism whose lock is held by the same thread
//! records that, and releases only the locks it took.
//!
//! # Confinement
//! Before a change that restricts the process, all mechanisms hear
//! [`Mechanism::before_confinement`] while all calls are allowed. Then
//! [`Mechanism::changing_privilege`] ends the threads that would keep the privilege.
#![expect(unsafe_code, reason = "two events have preconditions")]

use core::ffi::c_int;
use core::sync::atomic::{AtomicU32, Ordering};

/// Process after fork(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Parent, which called fork(2).
    Parent,
    /// Child. It has one thread.
    Child,
}

/// Mapping made by the program: arguments and result of mmap(2).
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    /// First address; -1 (`MAP_FAILED`) on failure.
    pub address: usize,
    /// Length in bytes, as requested.
    pub length: usize,
    /// `PROT_*`.
    pub protection: c_int,
    /// `MAP_*`.
    pub flags: c_int,
    /// File descriptor; meaningless with `MAP_ANONYMOUS`.
    pub descriptor: c_int,
}

/// Listener of events. All functions run on the program's threads, under its locks and in its
/// signal handlers. They take no lock that can be held while the program runs, except a
/// [`Lock`](crate::sync::Lock).
#[allow(unused_variables, reason = "the defaults do nothing")]
pub trait Mechanism {
    /// The program is about to unmap or move a range, whose pages are still mapped.
    #[inline(always)]
    fn unmapping(address: usize, length: usize) {}

    /// The program is about to map at a fixed address, which replaces mappings (`MAP_FIXED`).
    #[inline(always)]
    fn mapping_at(address: usize, length: usize) {
        Self::unmapping(address, length);
    }

    /// The program is about to move or resize a mapping (mremap(2)); lengths are in bytes.
    #[inline(always)]
    fn moving(address: usize, old: usize, new: usize) {
        // A length of 0 makes a second mapping of shared pages.
        Self::unmapping(address, old.max(1));
    }

    /// A mapping has been moved `to` another address or resized.
    #[inline(always)]
    fn moved(address: usize, old: usize, to: usize, new: usize) {}

    /// The program has changed the protection of a range (mprotect(2)), or another property that
    /// outlives its content, with a protection of 0.
    #[inline(always)]
    fn protected(address: usize, length: usize, protection: c_int) {}

    /// Unmaps a range in place of the kernel; true if done.
    ///
    /// # Safety
    /// The program gives up the range.
    #[inline(always)]
    unsafe fn unmap(address: usize, length: usize) -> bool {
        false
    }

    /// Wraps a call that may change mapped text.
    #[inline(always)]
    fn around_change<T>(call: impl FnOnce() -> T) -> T {
        call()
    }

    /// The program has called mmap(2), with or without success.
    #[inline(always)]
    fn mapped(mapping: &Mapping) {}

    /// The program is about to advise a range (madvise(2)).
    #[inline(always)]
    fn advising(address: usize, length: usize, advice: c_int) {}

    /// Applies advice in place of the kernel: `Ok` or the errno; `None` leaves it to the kernel.
    ///
    /// # Safety
    /// The program accepts the effect of the advice, which may drop the content of the range.
    #[inline(always)]
    unsafe fn advise(address: usize, length: usize, advice: c_int) -> Option<Result<(), c_int>> {
        None
    }

    /// The program is about to lock a range (mlock(2)).
    #[inline(always)]
    fn locking(address: usize, length: usize) {}

    /// The program is about to lock all its memory (mlockall(2)).
    #[inline(always)]
    fn locking_all() {}

    /// The kernel has accepted mlockall(2) or munlockall(2). `future`: locks future mappings.
    #[inline(always)]
    fn locked_all(future: bool) {}

    /// The program punches a hole into a file (fallocate(2), MADV_REMOVE).
    #[inline(always)]
    fn punching() {}

    /// The program is about to make a thread.
    #[inline(always)]
    fn before_thread() {}

    /// The first thread ends while others go on.
    #[inline(always)]
    fn first_thread_ends() {}

    /// The program is about to install a seccomp filter or change its root. Calls are allowed.
    #[inline(always)]
    fn before_confinement() {}

    /// The program changes its user, groups, capabilities or namespaces. Called before the change,
    /// and again after it if another thread may have started a jumbo thread meanwhile.
    #[inline(always)]
    fn changing_privilege() {}

    /// A seccomp filter is about to be installed, after [`crate::sandbox::enter`].
    #[inline(always)]
    fn confining(is_first: bool) {}

    /// The kernel has accepted or refused the filter.
    #[inline(always)]
    fn confined(is_installed: bool) {}

    /// The process has changed its root, or failed to.
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
    /// [`Mechanism::lock_for_fork`] was this thread's last event about locks.
    #[inline(always)]
    unsafe fn unlock_after_fork(side: Side) {}

    /// Step 5 of a fork, in the parent.
    #[inline(always)]
    fn has_forked() {}

    /// Step 5 of a fork, in the child, process `pid`.
    ///
    /// # Safety
    /// The process is the child, has one thread, and all mechanisms have heard
    /// [`Mechanism::unlock_after_fork`].
    #[inline(always)]
    unsafe fn is_forked(pid: u32) {}
}

/// End of a list.
impl Mechanism for () {}

/// Defines functions without a result: the first member, then the rest.
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

/// Type of a list of mechanisms, in the order of their calls.
#[macro_export]
#[doc(hidden)]
macro_rules! mechanisms {
    () => { () };
    ($first:ty $(, $rest:ty)* $(,)?) => { ($first, $crate::events::list!($($rest),*)) };
}

pub use mechanisms as list;

/// Runs steps 1 and 2 of a fork.
pub fn before_fork<All: Mechanism>() {
    All::about_to_fork();
    All::lock_for_fork();
}

/// Runs steps 4 and 5 in the parent.
///
/// # Safety
/// [`before_fork`] was this thread's last call about this fork.
pub unsafe fn after_fork<All: Mechanism>() {
    // SAFETY: the caller's promise.
    unsafe { All::unlock_after_fork(Side::Parent) };
    All::has_forked();
}

/// Runs steps 4 and 5 in the child, process `pid`.
///
/// # Safety
/// As for [`after_fork`]; the process is the child, with one thread.
pub unsafe fn after_fork_child<All: Mechanism>(pid: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        All::unlock_after_fork(Side::Child);
        All::is_forked(pid);
    }
}

/// Locks held during forks, as bits, for locks that refuse their owner.
///
/// A nested fork, by a signal handler between two steps, takes and releases none.
#[derive(Debug, Default)]
pub struct Held {
    locks: AtomicU32,
    nested: AtomicU32,
}

impl Held {
    /// Returns a value without a fork in progress.
    pub const fn new() -> Self {
        Self {
            locks: AtomicU32::new(0),
            nested: AtomicU32::new(0),
        }
    }

    /// Records the locks that a fork took. The caller holds them, so one thread calls at a time.
    pub fn took(&self, locks: u32) {
        match locks {
            // Only a thread that already holds all locks in a fork is refused all.
            0 => {
                self.nested.fetch_add(1, Ordering::Relaxed);
            }
            _ => self.locks.store(locks, Ordering::Relaxed),
        }
    }

    /// Returns the locks to release at the end of a fork.
    pub fn give_back(&self) -> u32 {
        if self.nested.load(Ordering::Relaxed) > 0 {
            self.nested.fetch_sub(1, Ordering::Relaxed);
            return 0;
        }
        self.locks.swap(0, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
