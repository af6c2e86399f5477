//! Writers: they prepare and release pages, optimise and restore, split and merge.
//!
//! A writer holds the lock of its 1 GiB, which contains the whole compound page. It allocates
//! memory before it changes anything, freezes the heads of all changed pages, publishes, and
//! unfreezes the page with the first head last. Memory is freed after that, so no reader waits for
//! a system call. [`table`](super::table) has the argument for concurrent readers.
//!
//! Invariants: a head that ends or becomes a tail stays frozen, or is cleared; it is live again
//! when it is a head again. When a section becomes described, all words of its descriptors are
//! written: nothing depends on the earlier content, even if the kernel refused to free it.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::Error;
use super::geometry::{Saving, Unsaved};
use super::table::{Place, Seen, Store, Table};
use super::words::{Counts, Kind, Mark, Section, State, Word};
use crate::units::{Order, Pages};

/// Stores a value if it differs: a cache line that is only read stays shared.
fn set(word: &impl Word, value: u64) {
    if word.load(Ordering::Relaxed) != value {
        word.store(value, Ordering::Release);
    }
}

fn state_of<W: Word>(section: &Section<W>) -> State {
    State(section.state.load(Ordering::Relaxed))
}

fn publish<W: Word>(section: &Section<W>, next: impl FnOnce(State) -> State) {
    let next = next(state_of(section));
    section.state.store(next.0, Ordering::Release);
}

impl<S: Store> Table<S> {
    fn alone<R>(&self, page: usize, work: impl FnOnce() -> R) -> R {
        let lock = page >> self.geometry.largest().0;
        self.store.alone(lock, work)
    }

    fn sections_of(&self, pages: &Range<usize>) -> Range<usize> {
        self.section_of(pages.start)..self.section_of(pages.end - 1) + 1
    }

    fn pages_of(&self, section: usize) -> Range<usize> {
        let order = self.section_order();
        section << order..(section + 1) << order
    }

    fn saving(&self, order: u32) -> Saving {
        self.geometry.saving(Order(order))
    }

    fn taken(&self, page: usize) -> Error {
        let address = self.address(page);
        Error::Taken { address }
    }

    /// Looks up the compound page with its head at `page`.
    fn headed(&self, page: usize) -> Result<Seen, Error> {
        let seen = self.look(page).ok_or_else(|| self.absent(page))?;
        if seen.head != page {
            let (address, head) = (self.address(page), self.address(seen.head));
            return Err(Error::Tail { address, head });
        }
        Ok(seen)
    }

    fn set_counts(&self, place: Place, counts: Counts) {
        set(self.words(place).0, counts.0);
    }

    fn owner_of(&self, place: Place) -> u64 {
        self.words(place).1.load(Ordering::Relaxed)
    }

    fn freeze(&self, seen: &Seen) -> Result<(), Error> {
        let counts = self.words(seen.place).0;
        let frozen = counts.replace(Counts::OWNED.0, Counts::FROZEN.0);
        frozen.map(drop).map_err(|now| self.busy(seen, Counts(now)))
    }

    fn busy(&self, seen: &Seen, counts: Counts) -> Error {
        Error::Busy {
            address: self.address(seen.head),
            references: counts.references().saturating_sub(1),
            pins: counts.pins(),
        }
    }

    /// Describes `pages` as compound pages of order `to`, except the counts of the first head: it
    /// stays frozen or invisible until all is written.
    ///
    /// A reader that finds the same mark of a head twice accepts the owner that it read in between.
    /// So the words of a head are written before its mark, and those of a new tail cleared after
    /// its mark.
    fn write(&self, pages: Range<usize>, to: u32, owner: u64) {
        let first = pages.start;
        for page in pages {
            let descriptor = self.store.descriptor(page);
            if page & ((1 << to) - 1) == 0 {
                set(&descriptor.owner, owner);
                if page != first {
                    set(&descriptor.counts, Counts::OWNED.0);
                }
                set(&descriptor.mark, Mark::of(to).0);
            } else {
                set(&descriptor.mark, Mark::of(to).0);
                set(&descriptor.counts, Counts::NONE.0);
                set(&descriptor.owner, 0);
            }
        }
    }

    fn clear(&self, pages: Range<usize>) {
        for page in pages {
            let descriptor = self.store.descriptor(page);
            set(&descriptor.mark, Mark::NONE.0);
            set(&descriptor.counts, Counts::NONE.0);
            set(&descriptor.owner, 0);
        }
    }

    /// Frees the descriptors of sections that are not described any more.
    fn forget(&self, sections: Range<usize>, order: u32) -> Saving {
        for at in sections.clone() {
            let mut times = 0;
            while self.store.section(at).users.load(Ordering::SeqCst) != 0 {
                times += 1;
                self.store.relax(times);
            }
        }
        let saving = self.saving(order);
        match self.store.give_back(sections) {
            Ok(()) => saving,
            Err(errno) => Saving {
                pages: Pages(0),
                why: Some(Unsaved::Refused(errno)),
                ..saving
            },
        }
    }

    /// Makes a compound page, optimised if possible.
    pub(super) fn prepare(&self, page: usize, order: u32) -> Result<Saving, Error> {
        let pages = page..page + (1 << order);
        self.alone(page, || {
            if order < self.section_order() {
                self.prepare_described(pages, order)?;
                return Ok(self.saving(order));
            }
            let sections = self.sections_of(&pages);
            for at in sections.clone() {
                if state_of(self.store.section(at)).kind() != Kind::Absent {
                    return Err(self.taken(at << self.section_order()));
                }
            }
            let head = self.store.section(sections.start);
            set(&head.owner, 0);
            set(&head.counts, Counts::OWNED.0);
            for at in sections {
                publish(self.store.section(at), |state| state.optimised(order));
            }
            Ok(self.saving(order))
        })
    }

    fn prepare_described(&self, pages: Range<usize>, order: u32) -> Result<(), Error> {
        let (page, count) = (pages.start, 1 << order);
        let at = self.section_of(page);
        let section = self.store.section(at);
        let state = state_of(section);
        match state.kind() {
            Kind::Optimised => return Err(self.taken(page)),
            Kind::Described => {
                let mut taken = pages.clone();
                let is_taken = |page: &usize| {
                    let mark = &self.store.descriptor(*page).mark;
                    mark.load(Ordering::Relaxed) != Mark::NONE.0
                };
                if let Some(taken) = taken.find(is_taken) {
                    return Err(self.taken(taken));
                }
            }
            Kind::Absent => {
                self.store.populate(at..at + 1)?;
                self.clear(self.pages_of(at));
            }
        }
        self.write(pages, order, 0);
        self.set_counts(Place::Descriptor(page), Counts::OWNED);
        publish(section, |state| state.described(state.present() + count));
        Ok(())
    }

    /// Ends a compound page.
    pub(super) fn release(&self, page: usize) -> Result<(), Error> {
        self.alone(page, || {
            let seen = self.headed(page)?;
            self.freeze(&seen)?;
            let sections = self.sections_of(&seen.pages());
            let Place::Descriptor(_) = seen.place else {
                for at in sections {
                    publish(self.store.section(at), State::absent);
                }
                return Ok(());
            };
            // Whole sections, or a part of one.
            let count = 1 << seen.order.min(self.section_order());
            let left = state_of(self.store.section(sections.start)).present() - count;
            if left > 0 {
                self.clear(seen.pages());
                let section = self.store.section(sections.start);
                publish(section, |state| state.described(left));
                return Ok(());
            }
            for at in sections.clone() {
                publish(self.store.section(at), State::absent);
            }
            // If the kernel refuses, the memory stays for the next described page.
            let _ = self.forget(sections, seen.order);
            Ok(())
        })
    }

    /// Frees the descriptors of a compound page.
    pub(super) fn optimise(&self, page: usize) -> Result<Saving, Error> {
        self.alone(page, || {
            let seen = self.headed(page)?;
            if seen.order < self.section_order() || matches!(seen.place, Place::Section(_)) {
                return Ok(self.saving(seen.order));
            }
            self.freeze(&seen)?;
            let sections = self.sections_of(&seen.pages());
            let head = self.store.section(sections.start);
            set(&head.owner, self.owner_of(seen.place));
            set(&head.counts, Counts::OWNED.0);
            for at in sections.clone() {
                publish(self.store.section(at), |state| state.optimised(seen.order));
            }
            Ok(self.forget(sections, seen.order))
        })
    }

    /// Allocates the descriptors of a compound page, and describes it.
    pub(super) fn restore(&self, page: usize) -> Result<(), Error> {
        self.alone(page, || {
            let seen = self.headed(page)?;
            match seen.place {
                Place::Section(_) => self.describe(&seen, seen.order),
                Place::Descriptor(_) => Ok(()),
            }
        })
    }

    /// Describes an optimised page as compound pages of order `to`.
    fn describe(&self, seen: &Seen, to: u32) -> Result<(), Error> {
        let now = Counts(self.words(seen.place).0.load(Ordering::Relaxed));
        if now != Counts::OWNED {
            return Err(self.busy(seen, now));
        }
        let sections = self.sections_of(&seen.pages());
        self.store.populate(sections.clone())?;
        if let Err(error) = self.freeze(seen) {
            let _ = self.store.give_back(sections);
            return Err(error);
        }
        self.write(seen.pages(), to, self.owner_of(seen.place));
        self.set_counts(Place::Descriptor(seen.head), Counts::OWNED);
        // The head's section is published first: a reader of a later one finds the head.
        for at in sections {
            publish(self.store.section(at), |state| {
                state.described(1 << self.section_order())
            });
        }
        Ok(())
    }

    /// Splits a compound page into pages of order `to`.
    pub(super) fn split(&self, page: usize, to: u32) -> Result<(), Error> {
        self.alone(page, || {
            let seen = self.headed(page)?;
            if to >= seen.order {
                return Err(self.order_error(page, to));
            }
            match seen.place {
                Place::Section(_) if to < self.section_order() => return self.describe(&seen, to),
                Place::Section(first) => {
                    self.freeze(&seen)?;
                    let owner = self.owner_of(seen.place);
                    for at in self.sections_of(&seen.pages()) {
                        let section = self.store.section(at);
                        let is_head = (at << self.section_order()) & ((1 << to) - 1) == 0;
                        if is_head && at != first {
                            set(&section.owner, owner);
                            set(&section.counts, Counts::OWNED.0);
                        }
                        publish(section, |state| state.optimised(to));
                    }
                }
                Place::Descriptor(_) => {
                    self.freeze(&seen)?;
                    self.write(seen.pages(), to, self.owner_of(seen.place));
                }
            }
            self.set_counts(seen.place, Counts::OWNED);
            Ok(())
        })
    }

    /// Merges compound pages, with the owner word of the first; optimised if possible.
    pub(super) fn merge(&self, page: usize, order: u32) -> Result<Saving, Error> {
        let pages = page..page + (1 << order);
        self.alone(page, || {
            let first = self.headed(page)?;
            self.freeze_parts(&pages, order)?;
            let owner = self.owner_of(first.place);
            if order < self.section_order() {
                self.write(pages, order, owner);
                self.set_counts(first.place, Counts::OWNED);
                return Ok(self.saving(order));
            }
            let sections = self.sections_of(&pages);
            let mut is_described = false;
            let head = Place::Section(sections.start);
            set(self.words(head).1, owner);
            for at in sections.clone() {
                let section = self.store.section(at);
                is_described |= state_of(section).kind() == Kind::Described;
                publish(section, |state| state.optimised(order));
            }
            self.set_counts(head, Counts::OWNED);
            match is_described {
                true => Ok(self.forget(sections, order)),
                false => Ok(self.saving(order)),
            }
        })
    }

    /// Freezes all compound pages of `pages`, or none.
    fn freeze_parts(&self, pages: &Range<usize>, order: u32) -> Result<(), Error> {
        let mut page = pages.start;
        while page < pages.end {
            let frozen = match self.headed(page) {
                Ok(part) if part.order >= order => Err(self.order_error(page, order)),
                Ok(part) => self.freeze(&part).map(|()| part),
                Err(error) => Err(error),
            };
            match frozen {
                Ok(part) => page = part.pages().end,
                Err(error) => {
                    self.unfreeze_parts(pages.start..page);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn unfreeze_parts(&self, pages: Range<usize>) {
        let mut page = pages.start;
        while page < pages.end
            && let Some(part) = self.look(page)
        {
            self.set_counts(part.place, Counts::OWNED);
            page = part.pages().end;
        }
    }
}
