//! Frees memory with several threads, or in the background: [`Gather`], [`unmap`], [`discard`].
//!
//! The kernel frees an address range on one thread. MADV_DONTNEED takes the mmap lock shared, so
//! several threads can zap a range in parallel. Then munmap(2) is fast.
//!
//! - [`Gather`] collects ranges in a `batch`, for programs that use it directly.
//! - [`unmap`], [`discard`] and [`PendingFree`] serve the preload library and [`crate::heap`]:
//!   munmap(2), MADV_DONTNEED and large `free`s of unmodified programs. A range to unmap first
//!   moves to a `staging` area.
//! - `queue` has the jobs, `handover` the lock and the futexes around it, `workers` the threads,
//!   `memory` the calls that free. Background mode checks [`crate::headroom`] beforehand.
//!
//! Small and huge-mapped ranges are left to the kernel, on the caller's thread: threads must never
//! make a free slower. So are ranges with other than private anonymous mappings, of which the
//! kernel could refuse a part. So is everything under a seccomp filter, and in a process that
//! shares or copied this memory without fork(3).
//!
//! Signals are blocked while a lock is held or memory is freed. Another thread may need the lock
//! for a handler of this thread to return, and a handler may never return here (siglongjmp(3)).
//!
//! Lock order: heap, `staging`, queue. No lock is held while memory is freed or a thread made.

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
use crate::ledger::{Slot, stats};
use crate::{headroom, sandbox};
use jumbo_sys::{self as sys, Blocked, process};

pub use batch::{FreeError, Operation};
pub use collect::{Freed, Gather, Mode, Tunables};
pub(crate) use memory::is_whole_and_unlocked;
pub(crate) use unmap::alignment;
pub use unmap::{PendingFree, discard, prepare, unmap};

static HANDOVER: Handover = Handover::new();

/// Minimum length of a range that is examined: one thread frees less in a few milliseconds, even on
/// base pages. Ranges that may be huge-mapped have 16 times this minimum.
pub const MIN_BYTES: usize = 128 << 20;

/// Configuration of [`unmap`], [`discard`] and [`PendingFree`].
#[derive(Clone, Copy, Debug)]
pub struct GatherSettings {
    /// Time at which a free returns.
    pub mode: Mode,
    /// Maximum threads that free at once; 0: the CPUs of this process, at most 4.
    pub threads: u32,
    /// Minimum length of a range that is examined: [`MIN_BYTES`], except in tests.
    pub min_bytes: usize,
    /// The host provides no huge pages, whatever the advice.
    pub small_pages: bool,
}

/// Minimum length of a free that is handled; `usize::MAX` before the start.
static ACTIVE_MIN_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
static MAX_THREADS: AtomicU32 = AtomicU32::new(0);
static BACKGROUND: AtomicBool = AtomicBool::new(false);
/// [`GatherSettings::small_pages`].
static SMALL_PAGES: AtomicBool = AtomicBool::new(false);
static HAS_MERGED_PAGES: AtomicBool = AtomicBool::new(false);
crate::one_page! {
    /// Process that owns the locks, since [`start`] or [`forked`].
    static OWNER_PROCESS: AtomicI32 = AtomicI32::new(0);
    /// Word that the kernel clears in a copy of this memory until [`is_own`] sets it there. Null
    /// before the first use, and on kernels without MADV_WIPEONFORK.
    static COPY_MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
    /// [`COPY_MARK`] is to be set, before this process holds a lock or has a worker.
    static IS_UNMARKED: AtomicBool = AtomicBool::new(false);
}

/// Starts [`unmap`], [`discard`] and [`PendingFree`]; before, they leave all ranges to the kernel.
pub fn start(settings: GatherSettings) {
    let threads = match settings.threads {
        0 => default_threads(),
        some => some,
    };
    // Read once, since it is set at boot: a read would double the cost of each free's checks.
    let later = settings.mode == Mode::Background && !headroom::is_promise_strict();
    set_owner(process());
    BACKGROUND.store(later, Ordering::Relaxed);
    SMALL_PAGES.store(settings.small_pages, Ordering::Relaxed);
    MAX_THREADS.store(threads, Ordering::Relaxed);
    // A single thread that waits for itself gains nothing.
    if later || threads > 1 {
        ACTIVE_MIN_BYTES.store(settings.min_bytes, Ordering::Relaxed);
    }
}

/// Reports whether a range is long enough for [`unmap`] or [`discard`].
#[inline(always)]
pub fn is_large(length: usize) -> bool {
    length >= ACTIVE_MIN_BYTES.load(Ordering::Relaxed)
}

/// Makes a process the owner of the locks.
fn set_owner(process: i32) {
    IS_UNMARKED.store(true, Ordering::Relaxed);
    OWNER_PROCESS.store(process, Ordering::Relaxed);
}

/// Reports whether this process owns the locks. False in a process that shares or copied this
/// memory without fork(3): by vfork(2), or a bare clone(2). There missing threads may hold the
/// locks, and no thread frees pending memory.
///
/// A copy is recognized by its cleared word, because it may have the same ID (1, in a PID namespace
/// of its own). A process that shares the memory is recognized by its ID.
pub(crate) fn is_own() -> bool {
    let owner = OWNER_PROCESS.load(Ordering::Relaxed);
    if IS_UNMARKED.load(Ordering::Relaxed) && owner == process() {
        memory::mark(&COPY_MARK);
        IS_UNMARKED.store(false, Ordering::Release);
    }
    let is_copy = || memory::word(&COPY_MARK).is_some_and(|word| word.load(Ordering::Relaxed) == 0);
    owner == 0 || !is_copy() && owner == process()
}

/// Returns the CPUs of this thread, at most 4.
pub(crate) fn default_threads() -> u32 {
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count());
    cpus.clamp(1, 4)
}

/// Frees all pending memory and ends the workers; false if they still run after ten seconds. For
/// calls that fail with several threads (unshare(2), setns(2)), or that change one thread only
/// (capset(2), seccomp(2)). The next large free makes new workers.
///
/// Makes no call behind a filter: [`Mechanism::confining`] has ended the workers.
pub fn end_workers() -> bool {
    sandbox::is_entered() || workers::end(false)
}

/// Reports whether [`is_pending`] may be true: one comparison.
#[inline(always)]
pub fn may_be_pending() -> bool {
    HANDOVER.pending() != 0
}

/// Reports whether memory is being freed in the background.
#[inline(always)]
pub fn is_pending() -> bool {
    may_be_pending() && is_own()
}

/// Helps to free pending memory, and waits. True if there was any: an allocation may succeed.
#[cold]
pub fn drain() -> bool {
    if !is_pending() {
        return false;
    }
    let _blocked = Blocked::new();
    let waited = HANDOVER.help(&Kernel);
    if waited {
        Slot::add(&stats::slot().free_waits, 1);
    }
    waited
}

/// Notes an allocation of `bytes`. While memory is pending, the program may allocate the memory
/// available beyond it; then it waits.
#[inline(always)]
pub fn about_to_allocate(bytes: usize) {
    if is_pending() {
        unmap::spend(bytes);
    }
}

#[cold]
fn clear(address: usize, length: usize) {
    if ACTIVE_MIN_BYTES.load(Ordering::Relaxed) == usize::MAX || sandbox::is_entered() || !is_own()
    {
        return;
    }
    let _blocked = Blocked::new();
    staging::STAGING.with(|staging| staging.avoid(address, length));
    HANDOVER.clear(&Kernel);
}

/// Ends idle workers before a fork, while no lock is held: some programs warn of other threads then
/// (CPython 3.12).
pub fn end_idle_workers() {
    if workers::were_made() && HANDOVER.has_workers() && is_own() {
        let _blocked = Blocked::new();
        if HANDOVER.is_idle() {
            workers::end(false);
        }
    }
}

/// Takes both locks before fork(2): no staging range is incomplete, no thread is in the queue.
/// Returns which locks were taken.
pub fn before_fork() -> [bool; 2] {
    [staging::STAGING.acquire_always(), HANDOVER.before_fork()]
}

/// Releases the locks after fork(2), in both processes.
///
/// # Safety
/// `held` is the result of this thread's last [`before_fork`], used once per process.
#[expect(unsafe_code, reason = "releases locks")]
pub unsafe fn after_fork([staging, queue]: [bool; 2]) {
    // SAFETY: the caller's promise: this thread holds these locks.
    unsafe {
        if queue {
            HANDOVER.after_fork();
        }
        if staging {
            staging::STAGING.release();
        }
    }
}

/// Resets the state in the child of a fork, `process`: no workers, no pending memory.
///
/// # Safety
/// The process is the child of a fork(2), and has had one thread only.
#[expect(unsafe_code, reason = "forgets workers of the parent")]
pub unsafe fn forked(process: i32) {
    if OWNER_PROCESS.load(Ordering::Relaxed) != 0 {
        set_owner(process);
    }
    // SAFETY: the caller's promise.
    unsafe { workers::forked() };
    HANDOVER.forked();
}

/// Events about memory that is being freed, and its threads.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    // Otherwise the program's mapping would be taken for pending memory.
    #[inline(always)]
    fn mapping_at(address: usize, length: usize) {
        if staging::overlaps(address, length) {
            clear(address, length);
        }
    }

    #[inline(always)]
    #[expect(unsafe_code, reason = "passes on the caller's promise")]
    unsafe fn unmap(address: usize, length: usize) -> bool {
        // SAFETY: the caller's promise.
        is_large(length) && sys::guarded(|| unsafe { unmap(address, length) })
    }

    // A move would first unshare merged pages, which takes time and memory.
    fn advising(_address: usize, _length: usize, advice: i32) {
        if advice == libc::MADV_MERGEABLE {
            HAS_MERGED_PAGES.store(true, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    #[expect(unsafe_code, reason = "passes on the caller's promise")]
    unsafe fn advise(address: usize, length: usize, advice: i32) -> Option<Result<(), i32>> {
        if advice != libc::MADV_DONTNEED || !is_large(length) {
            return None;
        }
        // SAFETY: the caller's promise.
        let answer = sys::guarded(|| unsafe { discard(address, length) })?;
        Some(answer.map_err(rustix::io::Errno::raw_os_error))
    }

    fn locking(_address: usize, length: usize) {
        about_to_allocate(length);
    }

    // Pending memory must not be locked. The workers' stacks, 64 KiB each, would be.
    fn locking_all() {
        end_workers();
    }

    // The process must end with the program's last thread, so no worker may be made any more.
    fn first_thread_ends() {
        if !sandbox::is_entered() {
            workers::end(true);
        }
    }

    fn changing_privilege() {
        end_workers();
    }

    fn confining(is_first: bool) {
        // An existing worker would run without the filter. After the mark none is made.
        if is_first {
            workers::end(false);
        }
    }
}
