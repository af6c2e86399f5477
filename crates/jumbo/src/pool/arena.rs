//! Addresses for an allocator: [`Arena`].
//!
//! An allocator of an unmodified program must give its memory to the children of fork(2) as any memory is given
//! to them: as a copy. So an arena is private memory of its own, which in the pool's books stands for as many pages
//! (`claim`), and not a view of the pool's window.
//!
//! With [`super::Hugetlb`] the kernel keeps the parent's promise at the child's cost: where it has no page for a
//! copy, it takes the page away from the child, which dies if it touches it. A program that goes on in a forked
//! child is better served by [`super::Thp`].

use std::ops::Range;

use super::claim::Claim;
use super::window::Mapping;
use super::{Error, Pool, Populate, source};
use crate::units::Pages;

/// Zeroed pages at consecutive addresses, private, and copied by fork(2).
///
/// While it lives the pool counts its pages: as reserved until they are populated, as used from then on.
#[derive(Debug)]
pub struct Arena<'p> {
    // Before the claim: the kernel must have this memory back when the pool asks for its own again.
    mapping: Mapping,
    populated: Box<[bool]>,
    page: usize,
    claim: Claim<'p>,
}

impl Pool {
    /// Makes an arena of `pages`, by the rules of [`Pool::reserve`]. With a source that cannot reserve
    /// ([`super::Thp`]) they are populated up front in any case.
    ///
    /// # Errors
    /// As [`Pool::shared_region`].
    pub fn arena(&self, pages: Pages, populate: Populate) -> Result<Arena<'_>, Error> {
        let (mapping, length) = self.addresses(pages)?;
        let ((), claim) = self.claim(pages, || {
            self.source.open_private(&mapping, length)?;
            self.bind(&mapping, length)
        })?;
        let mut arena = Arena {
            mapping,
            populated: (0..pages.0).map(|_| false).collect(),
            page: self.source.window().page(),
            claim,
        };
        if populate == Populate::UpFront || !self.source.promises() {
            arena.populate(0..arena.populated.len())?;
        }
        Ok(arena)
    }
}

impl Arena<'_> {
    /// How many pages it has.
    pub fn pages(&self) -> Pages {
        Pages(self.populated.len() as u64)
    }

    /// Populates the pages of `range` that are not.
    ///
    /// # Errors
    /// [`Error::Source`]: a cgroup's limit, or no page for a source that does not promise. Those before it are there.
    pub fn populate(&mut self, range: Range<usize>) -> Result<(), Error> {
        let within = self.populated.iter_mut().enumerate();
        for (at, populated) in within.take(range.end).skip(range.start) {
            if !*populated {
                let slot = source::Slot {
                    mapping: &self.mapping,
                    offset: at * self.page,
                };
                self.claim.pool.source.touch(&slot)?;
                *populated = true;
                self.claim.use_one();
            }
        }
        Ok(())
    }

    /// The bytes of the pages of `range`, which are populated where they were not.
    ///
    /// # Errors
    /// As [`Arena::populate`].
    ///
    /// # Panics
    /// Where `range` is not within the arena, as slices do.
    #[expect(unsafe_code, reason = "references into the arena's own mapping")]
    pub fn bytes_mut(&mut self, range: Range<usize>) -> Result<&mut [u8], Error> {
        assert!(
            range.start <= range.end && range.end <= self.populated.len(),
            "pages {range:?} of an arena of {}",
            self.populated.len()
        );
        self.populate(range.clone())?;
        let (offset, length) = (range.start * self.page, range.len() * self.page);
        // SAFETY: the pages are populated, readable and writable until the arena is dropped; it is borrowed
        // mutably, and nobody else knows their addresses.
        Ok(unsafe { self.mapping.bytes_mut(offset, length) })
    }
}
