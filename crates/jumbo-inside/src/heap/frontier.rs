//! Where the window grows: [`Frontier`], which maps whole huge pages and decides when.
//!
//! Memory is handed out seamlessly, page by page, so that no space is lost between neighbours and
//! nothing needs to be aligned: what lies inside the window is huge wherever it begins. Only the last
//! chunk (one PMD's worth) is partly handed out, and touching it on a huge page would make all of it
//! resident: [`crate::density`] decides whether it may be huge. Where memory is locked, it is mapped as
//! far as it is handed out, which the kernel cannot put a huge page across the end of.
//!
//! What a block that has to begin at a chunk would leave of the one before is not mapped either: such blocks' ends stay on base pages.
//!
//! Invariant: `next <= mapped`, `[next, mapped)` was never handed out, and `mapped` ends a chunk or is
//! `next`.

use core::ops::Range;

use rustix::io::{Errno, Result};

use super::backing::Backing;
use crate::density;

/// The growing end of a range of addresses.
#[derive(Debug)]
pub(super) struct Frontier {
    backing: Backing,
    next: usize,
    mapped: usize,
    limit: usize,
    pmd: usize,
    /// The last chunk has been handed out piece by piece, and stands on base pages.
    is_partial: bool,
}

/// What [`Frontier::take`] mapped, to be able to undo it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth {
    pub(super) start: usize,
    mapped: usize,
}

/// Gaps left when a mapping of the program's is in the way: room for what else may be around it.
const DETOUR_BYTES: usize = 1 << 30;

impl Frontier {
    pub(super) const fn new(backing: Backing) -> Self {
        Self {
            backing,
            next: 0,
            mapped: 0,
            limit: 0,
            pmd: 0,
            is_partial: false,
        }
    }

    /// Sets where growth begins and ends. `start` is a multiple of `pmd`.
    pub(super) fn place(&mut self, start: usize, limit: usize, pmd: usize) {
        *self = Self {
            next: start,
            mapped: start,
            limit,
            pmd,
            ..Self::new(self.backing)
        };
    }

    /// Hands out the next `size` bytes, fresh and zero. With `is_exact` nothing beyond them is mapped.
    ///
    /// # Errors
    /// `EEXIST` where a mapping of the program's is in the way ([`Frontier::skip`] passes it); `ERANGE`
    /// at the end of the range; else the kernel's, `ENOMEM` mostly. Nothing has changed then.
    pub(super) fn take(&mut self, size: usize, is_exact: bool) -> Result<Growth> {
        let start = self.next;
        let end = start
            .checked_add(size)
            .filter(|end| *end <= self.limit)
            .ok_or(Errno::RANGE)?;
        let whole = end.next_multiple_of(self.pmd);
        let growth = Growth {
            start,
            mapped: self.mapped,
        };
        if end > self.mapped {
            let to = if is_exact { end } else { whole };
            self.backing.map(self.mapped, to - self.mapped)?;
            let chunk = self.mapped & !(self.pmd - 1);
            if self.is_partial && to >= chunk + self.pmd {
                density::begin_on_base_pages(&(chunk..chunk + self.pmd));
            }
            self.is_partial = !to.is_multiple_of(self.pmd);
            self.mapped = to;
        }
        self.next = end;
        Ok(growth)
    }

    /// Takes the last [`Frontier::take`] back.
    ///
    /// # Safety
    /// Nothing uses what it gave.
    #[expect(unsafe_code, reason = "unmaps memory")]
    pub(super) unsafe fn undo(&mut self, growth: Growth) {
        let new = growth.mapped..self.mapped;
        // SAFETY: `take` mapped it, and the caller's promise.
        let unmap = |new: &Range<usize>| unsafe { self.backing.unmap(new.start, new.len(), None) };
        if !new.is_empty() && unmap(&new).is_ok() {
            self.mapped = growth.mapped;
            self.is_partial = !self.mapped.is_multiple_of(self.pmd);
        }
        self.next = growth.start;
    }

    /// Whether nothing is mapped beyond what was handed out.
    pub(super) fn is_at_edge(&self) -> bool {
        self.next == self.mapped
    }

    /// Leaves out what there is until `to`, the beginning of a chunk, where [`Frontier::is_at_edge`].
    pub(super) fn jump(&mut self, to: usize) {
        debug_assert!(self.is_at_edge() && self.next <= to && to.is_multiple_of(self.pmd));
        self.next = to;
        self.mapped = self.next;
        self.is_partial = false;
    }

    /// Where [`Frontier::skip`] would go on.
    pub(super) fn beyond(&self) -> usize {
        (self.mapped.next_multiple_of(self.pmd) + DETOUR_BYTES).min(self.limit)
    }

    /// Leaves the present place for the one [`Frontier::beyond`], and gives the range that was mapped
    /// and is left behind without having been handed out.
    pub(super) fn skip(&mut self) -> (usize, usize) {
        let left = (self.next, self.mapped);
        self.mapped = self.beyond();
        self.next = self.mapped;
        self.is_partial = false;
        left
    }
}
