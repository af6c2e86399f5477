//! State shared by the program and its reaper: [`Control`], and the reaper's stacks.
//!
//! All of it is in the library's image, which needs no extra mapping and which the reaper never
//! unmaps. A fork's child has its own copy, which [`Control::clear`] resets.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::ledger::Slot;

/// Maximum number of threads that free memory. Each has a stack in the library's image, which
/// locked memory includes.
pub(super) const MAX_WORKERS: usize = 4;

/// Variables shared by the program and the reaper.
#[derive(Debug)]
pub(super) struct Control {
    /// Process ID of the reaper. At its end the kernel zeroes the word and wakes waiters.
    pub(super) alive: AtomicU32,
    /// Process ID of the intermediate process that makes the reaper.
    pub(super) intermediate: AtomicU32,
    /// Value at `tid_word` while the program's main thread runs: its ID.
    pub(super) program: AtomicU32,
    /// Code of the [`super::State`] after the start; 0 during the start.
    pub(super) ready: AtomicU32,
    /// Nonzero if the reaper must end without freeing memory.
    pub(super) retire: AtomicU32,
    /// Address of the word that the kernel zeroes at the end of the program's main thread.
    pub(super) tid_word: AtomicUsize,
    /// Slot of the reaper's counters.
    pub(super) slot: AtomicPtr<Slot>,
    /// Number of threads that free memory.
    pub(super) workers: AtomicUsize,
    /// Start and end of the image that contains this code.
    pub(super) image: [AtomicUsize; 2],
    /// Base page size in bytes.
    pub(super) page: AtomicUsize,
    /// Set if the program could not change its user ID when it started.
    pub(super) identity_is_fixed: AtomicBool,
    /// Set if the kernel must limit the reaper's threads, since the program may change its user ID.
    pub(super) counts_threads: AtomicBool,
    /// CPUs of the program at its start, for sched_setaffinity(2); all 0 if not known.
    pub(super) cpus: [AtomicU64; 16],
}

crate::one_page! {
    pub(super) static CONTROL: Control = Control {
        alive: AtomicU32::new(0),
        intermediate: AtomicU32::new(0),
        program: AtomicU32::new(0),
        ready: AtomicU32::new(0),
        retire: AtomicU32::new(0),
        tid_word: AtomicUsize::new(0),
        slot: AtomicPtr::new(core::ptr::null_mut()),
        workers: AtomicUsize::new(1),
        image: [const { AtomicUsize::new(0) }; 2],
        page: AtomicUsize::new(0),
        identity_is_fixed: AtomicBool::new(false),
        counts_threads: AtomicBool::new(false),
        cpus: [const { AtomicU64::new(0) }; 16],
    };
}

impl Control {
    /// Resets the state: no reaper.
    pub(super) fn clear(&self) {
        self.alive.store(0, Ordering::Relaxed);
        self.ready.store(0, Ordering::Relaxed);
        self.retire.store(0, Ordering::Relaxed);
    }
}

/// Memory of a stack.
#[repr(C, align(64))]
pub(super) struct Stack<const SIZE: usize>(UnsafeCell<[u8; SIZE]>);

#[expect(unsafe_code, reason = "only the kernel gets its address")]
// SAFETY: nothing here reads or writes it; `launch` and `zap` run one task at a time on it.
unsafe impl<const SIZE: usize> Sync for Stack<SIZE> {}

impl<const SIZE: usize> Stack<SIZE> {
    pub(super) const fn new() -> Self {
        Self(UnsafeCell::new([0; SIZE]))
    }

    /// Returns start and size.
    pub(super) fn place(&self) -> (usize, usize) {
        (self.0.get().expose_provenance(), SIZE)
    }
}
