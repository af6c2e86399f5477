//! Giving memory back with several threads, or later: [`Gather`], [`unmap`], [`discard`].
//!
//! The kernel frees an address range on one thread. But MADV_DONTNEED takes the address space's lock
//! shared, so several threads that each zap a part of a range do work at the same time, and one
//! munmap(2) of what is empty then takes a moment.
//!
//! - [`Gather`] is for programs that know what they free: it collects ranges in a `batch`.
//! - [`unmap`], [`discard`] and [`Leaving`] are for the preload library and for [`crate::heap`]: munmap(2),
//!   MADV_DONTNEED and large `free`s of programs that know nothing. What is unmapped moves to a `staging` range of
//!   ours first.
//! - `queue` is the book of what is being freed, `handover` the lock and the sleep around it, `workers` the
//!   threads, `memory` the leaf that frees; background mode asks [`crate::headroom`] beforehand.
//!
//! A range that is small or huge-mapped is left to the kernel, on the caller's thread: threads must never
//! make a free slower. So is everything that is not one private anonymous mapping, of which the kernel could
//! refuse a part half way; and everything where a seccomp filter is at work, and in a process that shares or copied our memory behind the C library's back.
//!
//! While one of the locks is held, or memory is being freed, the thread's signals wait: another thread may need the lock
//! to let a handler return that this thread is in, and a handler may never return here (siglongjmp(3)).
//!
//! Lock order: the heap's, the lock of `staging`, the queue's. None is held while memory is freed or a thread made.

mod batch;
mod collect;
mod handover;
mod memory;
#[cfg(test)]
mod model;
#[cfg(test)]
pub(crate) use model::Number;
mod queue;
mod staging;
mod unmap;
mod workers;

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use handover::Handover;
use memory::Kernel;

use crate::events::Mechanism;
use crate::sys::{Blocked, process};
use crate::{headroom, sandbox};

pub use batch::{FreeError, Operation};
pub use collect::{Freed, Gather, Mode, Tunables};
pub(crate) use memory::is_whole_and_unlocked;
pub(crate) use unmap::alignment;
pub use unmap::{Leaving, discard, prepare, unmap};

static HANDOVER: Handover = Handover::new();

/// What is smaller is left to the kernel without a look: even on base pages one thread frees it in a few
/// milliseconds. Where huge pages may be it is sixteen times that, or the looking would show.
pub const LEAST: usize = 128 << 20;

/// How [`unmap`], [`discard`] and [`Leaving`] work.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// When a free returns.
    pub mode: Mode,
    /// How many threads may free at once; 0: as many as there are CPUs for this process, at most 4.
    pub threads: u32,
    /// From which size on a range is looked at, in bytes: [`LEAST`], but for tests.
    pub least: usize,
    /// The host brings no huge pages, whatever is advised.
    pub small_pages: bool,
}

/// From which size on frees are ours; at first none are.
static FROM: AtomicUsize = AtomicUsize::new(usize::MAX);
static MOST: AtomicU32 = AtomicU32::new(0);
static BACKGROUND: AtomicBool = AtomicBool::new(false);
/// [`Settings::small_pages`].
static SMALL_PAGES: AtomicBool = AtomicBool::new(false);
static MERGED: AtomicBool = AtomicBool::new(false);
crate::one_page! {
    /// The owner of these locks: this process, from [`start`] or [`forked`] on.
    static OWNER: AtomicI32 = AtomicI32::new(0);
    /// A word that the kernel clears in a copy of this memory, as long as [`is_own`] has not set it there. Null where
    /// there is none yet, or the kernel has none.
    static COPY: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
    /// This process has not set that word yet: it does when it first asks, before it holds a lock or has a worker.
    static IS_UNMARKED: AtomicBool = AtomicBool::new(false);
}

/// Has [`unmap`], [`discard`] and [`Leaving`] work from now on; before, they leave all to the kernel.
pub fn start(settings: Settings) {
    let threads = match settings.threads {
        0 => default_threads(),
        some => some,
    };
    // Asked once: it is set when a machine is set up, and to ask before each free costs as much as its other looks.
    let later = settings.mode == Mode::Background && !headroom::is_promise_strict();
    own(process());
    BACKGROUND.store(later, Ordering::Relaxed);
    SMALL_PAGES.store(settings.small_pages, Ordering::Relaxed);
    MOST.store(threads, Ordering::Relaxed);
    // One thread that waits for itself is what the kernel does.
    if later || threads > 1 {
        FROM.store(settings.least, Ordering::Relaxed);
    }
}

/// Whether a range of that length is worth a call of [`unmap`] or [`discard`].
#[inline(always)]
pub fn is_large(length: usize) -> bool {
    length >= FROM.load(Ordering::Relaxed)
}

/// The locks are this process's now.
fn own(process: i32) {
    IS_UNMARKED.store(true, Ordering::Relaxed);
    OWNER.store(process, Ordering::Relaxed);
}

/// False in a process that has this memory, or a copy of it, but was not made by fork(3): by vfork(2), or a bare
/// clone(2). Locks may be held there by threads that it does not have, and no thread frees what is pending.
///
/// A copy is told by its word, since it may have the same ID (1, in a PID namespace of its own); who shares the memory
/// by its ID.
fn is_own() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    if IS_UNMARKED.load(Ordering::Relaxed) && owner == process() {
        memory::mark(&COPY);
        IS_UNMARKED.store(false, Ordering::Release);
    }
    let is_copy = || memory::word(&COPY).is_some_and(|word| word.load(Ordering::Relaxed) == 0);
    owner == 0 || !is_copy() && owner == process()
}

/// The program has had pages merged (MADV_MERGEABLE): to move those the kernel would take them apart first,
/// which takes time and memory. What is unmapped from now on is the kernel's business.
pub fn merged() {
    MERGED.store(true, Ordering::Relaxed);
}

/// The CPUs that this thread may run on, at most 4.
fn default_threads() -> u32 {
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count());
    cpus.clamp(1, 4)
}

/// Finishes what is being freed in the background and ends the workers, so that the process has no
/// thread of ours: for calls that the kernel refuses to a process of several threads (unshare(2),
/// setns(2)), or that change one thread alone (capset(2), seccomp(2)). The next large free makes new ones.
/// False where they have not ended within ten seconds.
///
/// Behind a filter there is none, and no call is made: [`confine`] has ended them.
pub fn end_workers() -> bool {
    sandbox::is_entered() || confine()
}

/// [`end_workers`], at the moment when a filter is about to be installed.
pub fn confine() -> bool {
    workers::end(false)
}

/// [`end_workers`], and no worker is made any more: the main thread is about to end by itself
/// (pthread_exit(3)), and the process is to end with its own last thread.
pub fn end_workers_for_good() -> bool {
    if sandbox::is_entered() {
        return true;
    }
    workers::end(true)
}

/// True while memory is being freed in the background.
#[inline(always)]
pub fn is_pending() -> bool {
    HANDOVER.pending() != 0 && is_own()
}

/// Helps to free what is being freed in the background, and waits until it is. True if there was
/// anything: what could not be allocated may be had now.
#[cold]
pub fn drain() -> bool {
    if !is_pending() {
        return false;
    }
    let _blocked = Blocked::new();
    let waited = HANDOVER.help(&Kernel);
    if waited {
        use crate::ledger::{Slot, stats};
        Slot::add(&stats::slot().free_waits, 1);
    }
    waited
}

/// The program is about to allocate `bytes`. While memory is freed in the background it may have, in sum,
/// what could be had beyond that memory; then it waits.
#[inline(always)]
pub fn about_to_allocate(bytes: usize) {
    if is_pending() {
        unmap::spend(bytes);
    }
}

/// The program is about to map at addresses of its own choice (MAP_FIXED): what is being freed there, where it was moved to, is
/// not to be taken for the program's. So it is freed before.
#[inline(always)]
pub fn about_to_map_at(address: usize, length: usize) {
    if staging::overlaps(address, length) {
        clear(address, length);
    }
}

#[cold]
fn clear(address: usize, length: usize) {
    if FROM.load(Ordering::Relaxed) == usize::MAX || sandbox::is_entered() || !is_own() {
        return;
    }
    let _blocked = Blocked::new();
    staging::STAGING.with(|staging| staging.avoid(address, length));
    HANDOVER.clear(&Kernel);
}

/// A fork is about to be made, and no lock is held yet: idle workers leave.
pub fn end_idle_workers() {
    if workers::were_made() && HANDOVER.has_workers() && is_own() {
        let _blocked = Blocked::new();
        workers::end_idle();
    }
}

/// Before fork(2): no staging range is half made, and no thread is in the queue. Says which of both locks were taken.
pub fn before_fork() -> [bool; 2] {
    [staging::STAGING.acquire(), HANDOVER.before_fork()]
}

/// After fork(2), in both processes.
///
/// # Safety
/// `held` is what this thread's last [`before_fork`] gave, and no other call has had it in this process.
#[expect(unsafe_code, reason = "gives locks back")]
pub unsafe fn after_fork([staging, queue]: [bool; 2]) {
    // SAFETY: the caller's promise: this thread holds what it says.
    unsafe {
        if queue {
            HANDOVER.after_fork();
        }
        if staging {
            staging::STAGING.release();
        }
    }
}

/// In the child of a fork, which is `process` now: it has no workers, and nothing of what its parent was freeing.
///
/// # Safety
/// This is the child of a fork(2), and has not had another thread yet.
#[expect(
    unsafe_code,
    reason = "forgets workers that another process could not have"
)]
pub unsafe fn forked(process: i32) {
    if OWNER.load(Ordering::Relaxed) != 0 {
        own(process);
    }
    // SAFETY: the caller's promise.
    unsafe { workers::forked() };
    HANDOVER.forked();
}

/// The events that concern memory which is being freed, and the threads that free it.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    #[inline(always)]
    fn mapping_at(address: usize, length: usize) {
        about_to_map_at(address, length);
    }

    #[inline(always)]
    #[expect(unsafe_code, reason = "the caller's promise is passed on")]
    unsafe fn unmap(address: usize, length: usize) -> bool {
        // SAFETY: the caller's promise.
        is_large(length) && unsafe { unmap(address, length) }
    }

    fn advising(_address: usize, _length: usize, advice: i32) {
        if advice == libc::MADV_MERGEABLE {
            merged();
        }
    }

    #[inline(always)]
    #[expect(unsafe_code, reason = "the caller's promise is passed on")]
    unsafe fn advise(address: usize, length: usize, advice: i32) -> Option<Result<(), i32>> {
        if advice != libc::MADV_DONTNEED || !is_large(length) {
            return None;
        }
        // SAFETY: the caller's promise.
        let answer = unsafe { discard(address, length) }?;
        Some(answer.map_err(rustix::io::Errno::raw_os_error))
    }

    fn locking(_address: usize, length: usize) {
        about_to_allocate(length);
    }

    // What is being freed is not to be locked, nor to count. The workers' stacks, 64 KiB each, do count.
    fn locking_all() {
        end_workers();
    }

    fn first_thread_ends() {
        end_workers_for_good();
    }

    fn changing_privilege() {
        end_workers();
    }

    fn confining(is_first: bool) {
        // A worker that was there before would run in the program's memory without the filter; and from the mark on none
        // is made.
        if is_first {
            confine();
        }
    }
}
