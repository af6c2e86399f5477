//! What a program and its sibling tell each other: [`Control`], and the stacks they run on.
//!
//! All of it lies in the library's own image, so that it costs no mapping, and is there to the end: the
//! sibling unmaps every file but that one. A fork's child has a copy of its own, which [`Control::clear`]
//! makes empty.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::ledger::Slot;

/// The most threads that give memory back at once. Each has a stack in the library's image, which a
/// program that locks its memory pays for.
pub(super) const MAX_WORKERS: usize = 4;

/// The words that both look at.
#[derive(Debug)]
pub(super) struct Control {
    /// The sibling's process ID. The kernel zeroes it, and wakes who waits for it, when the sibling has
    /// ended.
    pub(super) alive: AtomicU32,
    /// The process that makes the sibling, and ends then.
    pub(super) intermediate: AtomicU32,
    /// What stands at `tid_word` while the program's main thread runs: its ID.
    pub(super) program: AtomicU32,
    /// What became of the start: a code of [`super::State`]; 0 while it is under way.
    pub(super) ready: AtomicU32,
    /// Not 0: the sibling is to end, and free nothing.
    pub(super) retire: AtomicU32,
    /// Where the kernel tells the end of the program's main thread.
    pub(super) tid_word: AtomicUsize,
    /// Where the sibling counts what it did.
    pub(super) slot: AtomicPtr<Slot>,
    /// How many threads give memory back.
    pub(super) workers: AtomicUsize,
    /// The addresses of the image that this code is in, from the first to the one past the last.
    pub(super) image: [AtomicUsize; 2],
    /// The base page, in bytes.
    pub(super) page: AtomicUsize,
    /// At its start the program could not become another user.
    pub(super) identity_is_fixed: AtomicBool,
    /// The program may become another user: the kernel is to count the threads of the sibling.
    pub(super) counts_threads: AtomicBool,
    /// The CPUs that the program was started on, as sched_setaffinity(2) takes them; all 0: not known.
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
    /// There is no sibling: the parent's is not the child's.
    pub(super) fn clear(&self) {
        self.alive.store(0, Ordering::Relaxed);
        self.ready.store(0, Ordering::Relaxed);
        self.retire.store(0, Ordering::Relaxed);
    }
}

/// Memory for a stack.
#[repr(C, align(64))]
pub(super) struct Stack<const SIZE: usize>(UnsafeCell<[u8; SIZE]>);

#[expect(unsafe_code, reason = "only the kernel is given its address")]
// SAFETY: nothing here reads or writes it; one task at a time runs on it, as `launch` and `zap` see to.
unsafe impl<const SIZE: usize> Sync for Stack<SIZE> {}

impl<const SIZE: usize> Stack<SIZE> {
    pub(super) const fn new() -> Self {
        Self(UnsafeCell::new([0; SIZE]))
    }

    /// The address of its lowest byte, and how many there are.
    pub(super) fn place(&self) -> (usize, usize) {
        (self.0.get().expose_provenance(), SIZE)
    }
}
