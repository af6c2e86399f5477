//! [`Table`]: the compound page of each page, and references to it, during changes by other
//! threads.
//!
//! A section is *optimised* or *described* ([`Kind`](super::words::Kind)). The section table has
//! all data of an optimised huge page; its descriptors have no memory. In a described section each
//! descriptor holds its page's [`Mark`]. All code here is generic over the [`Store`], so that tests
//! search the interleavings of the code that runs.
//!
//! # Correctness of lock-free readers
//!
//! - **One word suffices.** The section's [`State`] has the order of an optimised page, the page's
//!   own [`Mark`] that of any other. A compound page is aligned to its size, so the head is the
//!   page's number with its low bits cleared. No tail of an optimised page is read.
//! - **A mark is valid within one state only.** A reader loads the state (Acquire), the mark
//!   (Acquire), and the state again; the Acquire on the mark orders the second load after it. Marks
//!   are stored with Release, after the state that ends the previous one. So a reader of a later
//!   mark sees a later state, and restarts. Zeroes of the kernel are no store; but the state is
//!   stored before the system call, which has interrupted all processors with the page before its
//!   zeroes become visible. States never repeat ([`State`]), so no change is missed. A restart
//!   means that another thread has finished a change: readers are lock-free.
//! - **A reference keeps the page whole.** A writer *freezes* a page: it replaces the owner's count
//!   of one by [`Counts::FROZEN`], which fails while other references exist. Freeze and `get`
//!   replace the same word, so one comes first. A second `get` finds no live count and retries. A
//!   `get` that raised the count checks the page again: if it is in another compound page by now,
//!   the `get` lowers the count and restarts. Its raise (Acquire) saw the writer's last store to
//!   that word (Release), so the check sees the writer's earlier stores.
//! - **No descriptor is written after its memory is freed**: even a failed replacement would
//!   allocate the memory again. Before a reader loads a count in a descriptor to raise it, it
//!   increments the section's `users`; it replaces only a live count. A writer freezes all heads of
//!   the freed descriptors, and then waits for `users` to be 0. All four operations are SeqCst:
//!   either the reader sees no live count, or the writer sees the reader. No head in a descriptor
//!   is live unless its section is described. A put needs none of that: its reference keeps the
//!   section described.

use std::ops::Range;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::words::{Counts, Descriptor, Kind, Mark, Section, State, Word};
use super::{Error, Geometry};
use crate::units::Order;

/// Memory of a table: mapped, or in tests a model.
pub(super) trait Store {
    type Word: Word;

    fn section(&self, section: usize) -> &Section<Self::Word>;
    fn descriptor(&self, page: usize) -> &Descriptor<Self::Word>;
    /// Allocates the descriptors of sections; changes nothing on failure.
    fn populate(&self, sections: Range<usize>) -> Result<(), Error>;
    /// Frees the descriptors of sections, which then read as zeroes.
    fn give_back(&self, sections: Range<usize>) -> Result<(), Errno>;
    /// Runs `work` under a lock of writers.
    fn alone<R>(&self, lock: usize, work: impl FnOnce() -> R) -> R;
    /// Waits for another thread; `times` is the number of earlier calls.
    fn relax(&self, times: u32);
}

/// A table of pages, numbered from the start of its first 1 GiB.
#[derive(Debug)]
pub(super) struct Table<S> {
    pub(super) store: S,
    pub(super) geometry: Geometry,
    /// Address of page 0.
    pub(super) origin: u64,
}

/// Location of a head's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The section table: an optimised page.
    Section(usize),
    /// The descriptor of a page.
    Descriptor(usize),
}

/// The compound page of a page at the time of a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) head: usize,
    pub(super) order: u32,
    pub(super) place: Place,
    /// State of the page's section, not the head's.
    state: State,
}

impl Seen {
    pub(super) fn pages(&self) -> Range<usize> {
        self.head..self.head + (1 << self.order)
    }

    fn is_same_page(&self, other: &Self) -> bool {
        (self.head, self.order, self.place) == (other.head, other.order, other.place)
    }
}

impl<S: Store> Table<S> {
    pub(super) fn section_order(&self) -> u32 {
        self.geometry.section().0
    }

    pub(super) fn section_of(&self, page: usize) -> usize {
        page >> self.section_order()
    }

    pub(super) fn address(&self, page: usize) -> u64 {
        self.origin + page as u64 * self.geometry.base().bytes()
    }

    pub(super) fn absent(&self, page: usize) -> Error {
        let address = self.address(page);
        Error::Absent { address }
    }

    pub(super) fn order_error(&self, page: usize, order: u32) -> Error {
        Error::Order {
            address: self.address(page),
            order: Order(order),
        }
    }

    /// Looks up the compound page of a page.
    #[inline]
    pub(super) fn look(&self, page: usize) -> Option<Seen> {
        let at = self.section_of(page);
        let section = self.store.section(at);
        loop {
            let state = State(section.state.load(Ordering::Acquire));
            let (order, is_described) = match state.kind() {
                Kind::Absent => return None,
                Kind::Optimised => (state.order(), false),
                Kind::Described => {
                    let mark = self.store.descriptor(page).mark.load(Ordering::Acquire);
                    if section.state.load(Ordering::Relaxed) != state.0 {
                        continue;
                    }
                    (Mark(mark).order()?, true)
                }
            };
            let head = page & !((1 << order) - 1);
            let place = match is_described {
                true => Place::Descriptor(head),
                false => Place::Section(self.section_of(head)),
            };
            return Some(Seen {
                head,
                order,
                place,
                state,
            });
        }
    }

    /// Returns the counts and the owner word of a head.
    pub(super) fn words(&self, place: Place) -> (&S::Word, &S::Word) {
        match place {
            Place::Section(at) => {
                let section = self.store.section(at);
                (&section.counts, &section.owner)
            }
            Place::Descriptor(head) => {
                let descriptor = self.store.descriptor(head);
                (&descriptor.counts, &descriptor.owner)
            }
        }
    }

    /// Reads the counts and the owner word of a page's compound page, each at a time when the page
    /// was in it.
    pub(super) fn read(&self, page: usize) -> Option<(Seen, Counts, u64)> {
        loop {
            let seen = self.look(page)?;
            let (counts, owner) = self.words(seen.place);
            let (counts, owner) = (
                counts.load(Ordering::Acquire),
                owner.load(Ordering::Acquire),
            );
            // The state is the same too, so no memory was freed in between.
            if self.look(page) == Some(seen) {
                return Some((seen, Counts(counts), owner));
            }
        }
    }

    /// Raises the counts of a page's compound page, by the value of `more` for it. The page stays
    /// whole until [`Table::lower`].
    #[inline]
    pub(super) fn raise(&self, page: usize, more: impl Fn(&Seen) -> u64) -> Result<Seen, Error> {
        let mut times = 0;
        loop {
            let seen = self.look(page).ok_or_else(|| self.absent(page))?;
            let more = more(&seen);
            let raised = match seen.place {
                Place::Section(at) => {
                    self.raise_at(page, &seen, &self.store.section(at).counts, more)
                }
                Place::Descriptor(head) => self.raise_described(page, &seen, head, more),
            };
            if raised? {
                return Ok(seen);
            }
            times += 1;
            self.store.relax(times);
        }
    }

    fn raise_described(
        &self,
        page: usize,
        seen: &Seen,
        head: usize,
        more: u64,
    ) -> Result<bool, Error> {
        let section = self.store.section(self.section_of(head));
        section.users.fetch_add(1, Ordering::SeqCst);
        let counts = &self.store.descriptor(head).counts;
        let raised = self.raise_at(page, seen, counts, more);
        section.users.fetch_sub(1, Ordering::Release);
        raised
    }

    /// Raises a head's counts, if the page is still in that compound page; false to retry.
    fn raise_at(
        &self,
        page: usize,
        seen: &Seen,
        counts: &S::Word,
        more: u64,
    ) -> Result<bool, Error> {
        let mut now = Counts(counts.load(Ordering::SeqCst));
        loop {
            if !now.is_live() {
                return Ok(false);
            }
            let address = self.address(seen.head);
            let raised = now.with(more).ok_or(Error::Overflow { address })?;
            match counts.replace(now.0, raised.0) {
                Ok(_) => break,
                Err(other) => now = Counts(other),
            }
        }
        if self
            .look(page)
            .is_some_and(|again| again.is_same_page(seen))
        {
            return Ok(true);
        }
        counts.fetch_sub(more, Ordering::Release);
        Ok(false)
    }

    /// Reverts [`Table::raise`].
    #[inline]
    pub(super) fn lower(&self, place: Place, less: u64) {
        self.words(place).0.fetch_sub(less, Ordering::Release);
    }
}
