//! State of user-space population: [`STATE`], which has the [`Registry`] of ranges.
#![expect(unsafe_code, reason = "stacks of threads")]

use core::cell::UnsafeCell;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};

use super::budget::Budget;
use super::readahead::Readahead;
pub(super) use crate::density::table::PAGE_BYTES as PAGE;
use crate::density::table::{RangeSlot, RangeTable, Span};
use crate::sync::Lock;
use crate::sys::Thread;

/// Maximum number of threads that resolve faults: one for each CPU, because each fills on its own.
pub(super) const MAX_THREADS: usize = 4;
const MAX_RANGES: usize = 64;
const STACK_BYTES: usize = 64 << 10;

/// All state, on pages of its own. The kernel zeroes them in the child of a fork, whatever call
/// made it, so a child has no thread and no range. These pages are never registered themselves.
#[repr(C)]
pub(super) struct State {
    pub(super) registry: Registry,
    /// A registered page: a touch of it calls a thread.
    pub(super) doorbell: Page<[AtomicU32; 1024]>,
    stacks: [Page<UnsafeCell<[u8; STACK_BYTES]>>; MAX_THREADS],
}

#[repr(C, align(4096))]
pub(super) struct Page<T>(pub(super) T);

// SAFETY: a stack belongs to one thread; the rest are atomics and a lock.
unsafe impl Sync for State {}

crate::one_page::table! {
    /// Zeroes, without physical pages until a range is registered.
    pub(super) static STATE: State = State {
        registry: Registry::new(),
        doorbell: Page([const { AtomicU32::new(0) }; 1024]),
        stacks: [const { Page(UnsafeCell::new([0; STACK_BYTES])) }; MAX_THREADS],
    };
}

impl State {
    /// Returns the address and the size of a thread's stack.
    pub(super) fn stack(&self, thread: usize) -> (usize, usize) {
        let stack = self.stacks.get(thread).map(core::ptr::from_ref);
        (stack.map_or(0, <*const _>::expose_provenance), STACK_BYTES)
    }

    pub(super) fn doorbell(&self) -> usize {
        core::ptr::from_ref(&self.doorbell).expose_provenance()
    }
}

/// Ranges, threads, and the one request to a thread. All zeroes in a new process.
#[repr(C, align(4096))]
pub(super) struct Registry {
    /// Number of ranges. The first word, because machine code reads it.
    pub(super) range_count: AtomicUsize,
    ranges: RangeTable<Progress, MAX_RANGES>,
    pub(super) readahead: Readahead,
    pub(super) budget: Budget,
    /// Held, with signals blocked, to change ranges or to call a thread.
    pub(super) lock: Lock<()>,
    pub(super) threads: [Thread; MAX_THREADS],
    /// PID of the process that started the threads: a vfork(2) child shares this memory.
    pub(super) owner: AtomicI32,
    /// Result of the start: 0 while it runs, [`READY`], or [`FAILED`] plus an errno.
    pub(super) started: AtomicU32,
    /// The threads must exit.
    pub(super) is_stopping: AtomicBool,
    /// No thread may be started any more.
    pub(super) is_disabled: AtomicBool,
    /// The request to a thread: [`REGISTER`], [`FILL`], [`DROP`] or [`END`].
    pub(super) request: AtomicU32,
    /// Range of the request.
    pub(super) address: AtomicUsize,
    pub(super) length: AtomicUsize,
    /// Result of the request: 0 until a thread takes it, [`READY`], or [`FAILED`] plus an errno.
    pub(super) reply: AtomicU32,
}

/// Code of success.
pub(super) const READY: u32 = 1;
/// Code of a failure: this plus the errno.
pub(super) const FAILED: u32 = 2;

pub(super) const REGISTER: u32 = 1;
pub(super) const FILL: u32 = 2;
pub(super) const DROP: u32 = 3;
pub(super) const END: u32 = 4;

/// Block size and populated bytes of a range.
pub(super) struct Progress {
    block: AtomicUsize,
    pub(super) filled: AtomicUsize,
}

impl Progress {
    pub(super) fn block(&self) -> usize {
        self.block.load(Ordering::Relaxed).max(PAGE)
    }
}

/// A range's slot in the table.
pub(super) type Entry<'t> = RangeSlot<'t, Progress>;

impl Registry {
    const fn new() -> Self {
        Self {
            range_count: AtomicUsize::new(0),
            ranges: RangeTable::new(
                [const {
                    Progress {
                        block: AtomicUsize::new(0),
                        filled: AtomicUsize::new(0),
                    }
                }; MAX_RANGES],
            ),
            readahead: Readahead::new(),
            budget: Budget::new(),
            lock: Lock::new(()),
            threads: [const { Thread::none() }; MAX_THREADS],
            owner: AtomicI32::new(0),
            started: AtomicU32::new(0),
            is_stopping: AtomicBool::new(false),
            is_disabled: AtomicBool::new(false),
            request: AtomicU32::new(0),
            address: AtomicUsize::new(0),
            length: AtomicUsize::new(0),
            reply: AtomicU32::new(0),
        }
    }

    /// Returns the ranges. One that has just ended may be among them: the kernel fills registered
    /// memory only.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (Entry<'_>, Span)> {
        self.ranges.each()
    }

    /// Returns the unpopulated bytes of all ranges.
    pub(super) fn remaining(&self) -> usize {
        let missing = |(entry, span): (Entry<'_>, Span)| {
            let filled = entry.note.filled.load(Ordering::Relaxed);
            span.range().len().saturating_sub(filled)
        };
        self.ranges().map(missing).fold(0, usize::saturating_add)
    }

    /// Ends a range. Callable from any thread, without the lock.
    pub(super) fn end(&self, entry: &Entry<'_>, span: &Span) {
        if entry.end(span, |_| ()) {
            self.range_count.fetch_sub(1, Ordering::Release);
        }
    }

    /// Adds a range that overlaps no other; false if the table is full. Under the lock.
    pub(super) fn add(&self, range: &Range<usize>, block: usize, filled: usize) -> bool {
        let is_added = Span::new(range).is_some_and(|span| {
            self.ranges.add(&span, |filling| {
                filling.block.store(block, Ordering::Relaxed);
                filling.filled.store(filled, Ordering::Relaxed);
            })
        });
        if is_added {
            self.range_count.fetch_add(1, Ordering::Release);
        }
        is_added
    }

    /// Returns the part of a registered range to remove for `range`, in whole pages. It extends to
    /// the end of the registered range where the table has no slot for the rest. Under the lock.
    pub(super) fn cut(&self, range: &Range<usize>, registered: &Range<usize>) -> Range<usize> {
        let start = range.start.max(registered.start);
        let end = range.end.min(registered.end);
        let is_in_the_middle = registered.start < start && start < end && end < registered.end;
        if is_in_the_middle && !self.ranges.has_place() {
            return start..registered.end;
        }
        start..end
    }

    /// Removes the result of [`Registry::cut`] from a registered range. Under the lock.
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
                    // The populated part is unknown: assume the one before the cut.
                    let filled = entry.note.filled.load(Ordering::Relaxed);
                    let behind = filled.saturating_sub(before.range().len());
                    let block = entry.note.block();
                    self.add(&after.range(), block, behind);
                }
            }
        }
    }
}
