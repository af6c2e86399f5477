//! [`Table`]: which compound page a page is in, and references to it, while other threads change that.
//!
//! A section is *optimised* or *described* ([`Kind`](super::words::Kind)). Of an optimised huge page all is in the section table; its
//! descriptors have no memory. In a described section each descriptor holds its page's [`Mark`]. Everything here is generic over the
//! [`Store`], so that tests search the interleavings of the code that runs.
//!
//! # Why a reader is right without a lock
//!
//! - **One word answers.** The section's [`State`] gives order and head of an optimised page; the page's own [`Mark`] those of any
//!   other. A compound page is aligned to its size, so the head is the page's number with its low bits cleared. No tail of an
//!   optimised page is read.
//! - **A mark counts only within one state.** A reader loads the state (Acquire), the mark (Acquire), and the state again; the Acquire on
//!   the mark keeps the second load behind it. Marks are stored with Release, and only after the state that ends the one
//!   before. So a reader that saw a mark of a later time sees a later state as well, and begins again. Zeroes that the kernel put there are
//!   no store; but the state is stored before the system call, which has interrupted each processor that had the page by the
//!   time the zeroes can be seen. States never repeat ([`State`]), so no change in between goes unseen, and a reader that begins
//!   again knows that another thread has finished a change: readers are lock-free.
//! - **A reference holds the page together.** A writer *freezes* a page: it replaces the owner's count of one by [`Counts::FROZEN`], which fails
//!   while any reference is out. Freezing and `get` are replacements of one word, so one of them is first. A `get` that is second
//!   finds no live count and looks again. A `get` that raised the count looks again as well: if the page is in another
//!   compound page by now, it lowers the count and begins again. Its raise (Acquire) saw the writer's last store to that word
//!   (Release), so the look sees what the writer published before.
//! - **No descriptor is written to once its memory is given back**, because even a replacement that fails would bring the memory back.
//!   Before a reader looks at a count in a descriptor, to raise it, it counts itself among the section's `users`; it replaces none but a
//!   live count. A writer freezes all heads of what it gives back, and then waits for `users` to be 0. All four are SeqCst: either
//!   the reader sees no live count, or the writer sees the reader. No head is live in a section that is not described. A put
//!   needs none of that: until it is done its reference keeps the section described.

use std::ops::Range;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::words::{Counts, Descriptor, Kind, Mark, Section, State, Word};
use super::{Error, Geometry};
use crate::units::Order;

/// The memory of a table: the mapped one, or in tests a model.
pub(super) trait Store {
    type Word: Word;

    fn section(&self, section: usize) -> &Section<Self::Word>;
    fn descriptor(&self, page: usize) -> &Descriptor<Self::Word>;
    /// Puts memory behind the descriptors of sections, or fails with nothing changed.
    fn populate(&self, sections: Range<usize>) -> Result<(), Error>;
    /// Takes it away: they hold zeroes from then on.
    fn give_back(&self, sections: Range<usize>) -> Result<(), Errno>;
    /// Runs `work` with all other writers of the same lock kept away.
    fn alone<R>(&self, lock: usize, work: impl FnOnce() -> R) -> R;
    /// Waits a moment for another thread, the longer the more often it was called.
    fn relax(&self, times: u32);
}

/// Pages by number, from the first one of the table's first 1 GiB on.
#[derive(Debug)]
pub(super) struct Table<S> {
    pub(super) store: S,
    pub(super) geometry: Geometry,
    /// The address of page 0.
    pub(super) origin: u64,
}

/// Where the words of a head are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the section table: an optimised page.
    Section(usize),
    /// In its descriptor.
    Descriptor(usize),
}

/// The compound page that a page was seen in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) head: usize,
    pub(super) order: u32,
    pub(super) place: Place,
    /// Of the page's section, not the head's.
    state: State,
}

impl Seen {
    /// All of its pages.
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

    /// The section that a page is in.
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

    /// The compound page that a page is in.
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

    /// The counts and the owner word of a head.
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

    /// Counts and owner word of the compound page that a page is in, each as of a moment at which it was in it.
    pub(super) fn read(&self, page: usize) -> Option<(Seen, Counts, u64)> {
        loop {
            let seen = self.look(page)?;
            let (counts, owner) = self.words(seen.place);
            let (counts, owner) = (
                counts.load(Ordering::Acquire),
                owner.load(Ordering::Acquire),
            );
            // The state too is the same, so no memory was given back in between.
            if self.look(page) == Some(seen) {
                return Some((seen, Counts(counts), owner));
            }
        }
    }

    /// Raises the counts of the compound page that a page is in, by `more` as it is for that one. It stays one until
    /// [`Table::lower`].
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

    /// Raises a head's counts, if the page is still in the compound page that it was seen in. False: look again.
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

    /// Takes back what [`Table::raise`] did, and gave.
    #[inline]
    pub(super) fn lower(&self, place: Place, less: u64) {
        self.words(place).0.fetch_sub(less, Ordering::Release);
    }
}
