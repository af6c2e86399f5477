//! The growing end of the window: [`Frontier`], which maps whole huge pages.
//!
//! Memory is handed out contiguously, without alignment: a block on advised memory is huge wherever
//! it begins. Only the last chunk (one PMD) is partly handed out, and a touch on a huge page makes
//! all of it resident: [`crate::density`] decides whether it may be huge. Locked memory is mapped
//! only as far as it is handed out; the kernel forms no huge page across its end. The rest of a
//! chunk before a block that is aligned to chunks is not mapped either.
//!
//! Invariant: `next <= mapped`; `[next, mapped)` was never handed out; `mapped` ends a chunk or
//! equals `next`.

use core::ops::Range;

use rustix::io::{Errno, Result};

use super::backing::Backing;
use crate::density;

/// Growing end of an address range.
#[derive(Debug)]
pub(super) struct Frontier {
    backing: Backing,
    next: usize,
    mapped: usize,
    limit: usize,
    pmd: usize,
    /// The last chunk is mapped in parts, on base pages.
    is_partial: bool,
}

/// Result of [`Frontier::take`], for [`Frontier::undo`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth {
    pub(super) start: usize,
    mapped: usize,
}

/// Addresses skipped after a mapping of the program, which may have neighbours.
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

    /// Sets the start and the limit of growth. `start` is a multiple of `pmd`.
    pub(super) fn place(&mut self, start: usize, limit: usize, pmd: usize) {
        *self = Self {
            next: start,
            mapped: start,
            limit,
            pmd,
            ..Self::new(self.backing)
        };
    }

    /// Hands out the next `size` bytes, fresh and zero. With `is_exact`, maps nothing beyond them.
    ///
    /// # Errors
    /// `EEXIST`: a mapping of the program is in the way ([`Frontier::skip`] passes it); `ERANGE`:
    /// the end of the range; else mmap(2)'s, mostly `ENOMEM`. Nothing has changed then.
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

    /// Reverts the last [`Frontier::take`].
    ///
    /// # Safety
    /// Nothing uses the memory.
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

    /// Reports whether nothing is mapped beyond the handed-out memory.
    pub(super) fn is_at_edge(&self) -> bool {
        self.next == self.mapped
    }

    /// Skips to `to`, the start of a chunk. Requires [`Frontier::is_at_edge`].
    pub(super) fn jump(&mut self, to: usize) {
        debug_assert!(self.is_at_edge() && self.next <= to && to.is_multiple_of(self.pmd));
        self.next = to;
        self.mapped = self.next;
        self.is_partial = false;
    }

    /// Returns the address at which [`Frontier::skip`] continues.
    pub(super) fn beyond(&self) -> usize {
        (self.mapped.next_multiple_of(self.pmd) + DETOUR_BYTES).min(self.limit)
    }

    /// Continues at [`Frontier::beyond`], and returns the range that stays mapped and was never
    /// handed out.
    pub(super) fn skip(&mut self) -> (usize, usize) {
        let left = (self.next, self.mapped);
        self.mapped = self.beyond();
        self.next = self.mapped;
        self.is_partial = false;
        left
    }
}
