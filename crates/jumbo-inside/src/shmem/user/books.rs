//! What the rung knows: [`Books`], and where it is kept: [`GROUND`].
#![expect(unsafe_code, reason = "stacks of threads")]

use core::cell::UnsafeCell;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};

use super::budget::Budget;
use super::streams::Streams;
pub(super) use crate::density::table::PAGE_BYTES as PAGE;
use crate::density::table::{RangeSlot, RangeTable, Span};
use crate::sync::Lock;
use crate::sys::Thread;

/// The most threads that answer: one for each CPU, for each fills on its own.
pub(super) const MAX_THREADS: usize = 4;
const MAX_RANGES: usize = 64;
const STACK_BYTES: usize = 64 << 10;

/// All of it, on pages of its own: the kernel empties them in the child of a fork, however that was
/// made, which so knows of no thread and no range. Its memory is registered nowhere, either.
#[repr(C)]
pub(super) struct Ground {
    pub(super) books: Books,
    /// A page that is touched to call a thread of ours.
    pub(super) bell: Page<[AtomicU32; 1024]>,
    stacks: [Page<UnsafeCell<[u8; STACK_BYTES]>>; MAX_THREADS],
}

#[repr(C, align(4096))]
pub(super) struct Page<T>(pub(super) T);

// SAFETY: a stack is its thread's alone; the rest are atomics and a lock.
unsafe impl Sync for Ground {}

crate::one_page::table! {
    /// Zeroes that no page stands for before there is a range.
    pub(super) static GROUND: Ground = Ground {
        books: Books::new(),
        bell: Page([const { AtomicU32::new(0) }; 1024]),
        stacks: [const { Page(UnsafeCell::new([0; STACK_BYTES])) }; MAX_THREADS],
    };
}

impl Ground {
    /// Where the stack of a thread begins, and its size.
    pub(super) fn stack(&self, thread: usize) -> (usize, usize) {
        let stack = self.stacks.get(thread).map(core::ptr::from_ref);
        (stack.map_or(0, <*const _>::expose_provenance), STACK_BYTES)
    }

    pub(super) fn bell(&self) -> usize {
        core::ptr::from_ref(&self.bell).expose_provenance()
    }
}

/// What all threads read and write. Zeroes are what it is in a new process.
#[repr(C, align(4096))]
pub(super) struct Books {
    /// How many ranges there are. The first word, for machine code to look at.
    pub(super) count: AtomicUsize,
    ranges: RangeTable<Filling, MAX_RANGES>,
    pub(super) streams: Streams,
    pub(super) budget: Budget,
    /// Held by who changes ranges or calls a thread of ours, with signals blocked.
    pub(super) lock: Lock<()>,
    pub(super) threads: [Thread; MAX_THREADS],
    /// The process that made them: a child that shares the memory (vfork(2)) is another.
    pub(super) maker: AtomicI32,
    /// What became of the start: 0, [`READY`], or an errno and [`FAILED`].
    pub(super) started: AtomicU32,
    /// The threads are to leave.
    pub(super) ending: AtomicBool,
    /// None is to be made any more.
    pub(super) over: AtomicBool,
    /// What a thread is called for, with what, and its answer.
    pub(super) call: AtomicU32,
    pub(super) address: AtomicUsize,
    pub(super) length: AtomicUsize,
    pub(super) answer: AtomicU32,
}

/// It is done, or serves.
pub(super) const READY: u32 = 1;
/// Added to an errno.
pub(super) const FAILED: u32 = 2;

/// Calls: [`Books::call`].
pub(super) const REGISTER: u32 = 1;
pub(super) const FILL: u32 = 2;
pub(super) const DROP: u32 = 3;
pub(super) const END: u32 = 4;

/// The bytes of a range that came in.
pub(super) struct Filling {
    /// The size of the range's blocks.
    block: AtomicUsize,
    /// How much of it was brought in.
    pub(super) filled: AtomicUsize,
}

impl Filling {
    pub(super) fn block(&self) -> usize {
        self.block.load(Ordering::Relaxed).max(PAGE)
    }
}

/// A place of a range.
pub(super) type Entry<'t> = RangeSlot<'t, Filling>;

impl Books {
    const fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            ranges: RangeTable::new(
                [const {
                    Filling {
                        block: AtomicUsize::new(0),
                        filled: AtomicUsize::new(0),
                    }
                }; MAX_RANGES],
            ),
            streams: Streams::new(),
            budget: Budget::new(),
            lock: Lock::new(()),
            threads: [const { Thread::none() }; MAX_THREADS],
            maker: AtomicI32::new(0),
            started: AtomicU32::new(0),
            ending: AtomicBool::new(false),
            over: AtomicBool::new(false),
            call: AtomicU32::new(0),
            address: AtomicUsize::new(0),
            length: AtomicUsize::new(0),
            answer: AtomicU32::new(0),
        }
    }

    /// The ranges. One that has just ended may be found: nothing is ever filled that is not
    /// registered with the kernel.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (Entry<'_>, Span)> {
        self.ranges.each()
    }

    /// How much of all ranges has not come in yet.
    pub(super) fn remaining(&self) -> usize {
        let left = |(entry, span): (Entry<'_>, Span)| {
            let filled = entry.note.filled.load(Ordering::Relaxed);
            span.range().len().saturating_sub(filled)
        };
        self.ranges().map(left).fold(0, usize::saturating_add)
    }

    /// Ends a range, by whatever thread.
    pub(super) fn end(&self, entry: &Entry<'_>, span: &Span) {
        if entry.end(span, |_| ()) {
            self.count.fetch_sub(1, Ordering::Release);
        }
    }

    /// Adds a range, where none is. False where there are too many. Under the lock.
    pub(super) fn add(&self, range: &Range<usize>, block: usize, filled: usize) -> bool {
        let is_added = Span::new(range).is_some_and(|span| {
            self.ranges.add(&span, |filling| {
                filling.block.store(block, Ordering::Relaxed);
                filling.filled.store(filled, Ordering::Relaxed);
            })
        });
        if is_added {
            self.count.fetch_add(1, Ordering::Release);
        }
        is_added
    }

    /// The part of a registered range that goes, so that a range of whole pages does: all behind it as
    /// well, where there is no place for one more. Under the lock.
    pub(super) fn cut(&self, range: &Range<usize>, registered: &Range<usize>) -> Range<usize> {
        let start = range.start.max(registered.start);
        let end = range.end.min(registered.end);
        let is_in_the_middle = registered.start < start && start < end && end < registered.end;
        if is_in_the_middle && !self.ranges.has_place() {
            return start..registered.end;
        }
        start..end
    }

    /// Removes what [`Books::cut`] gave for a range. Under the lock.
    pub(super) fn remove(&self, entry: &Entry<'_>, registered: &Span, cut: &Range<usize>) {
        let Range { start, end } = registered.range();
        let (before, after) = (Span::new(&(start..cut.start)), Span::new(&(cut.end..end)));
        match (before, after) {
            (None, None) => self.end(entry, registered),
            (None, Some(after)) => drop(entry.replace(registered, &after)),
            (Some(before), after) => {
                if entry.replace(registered, &before)
                    && let Some(after) = after
                {
                    // Which part was brought in is not known: the one before first.
                    let filled = entry.note.filled.load(Ordering::Relaxed);
                    let behind = filled.saturating_sub(before.range().len());
                    let block = entry.note.block();
                    self.add(&after.range(), block, behind);
                }
            }
        }
    }
}
