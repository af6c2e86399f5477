//! Where the window grows: [`Frontier`], which maps whole huge pages and decides which to advise.
//!
//! Memory is handed out seamlessly, page by page, so that no space is lost between neighbours and
//! nothing needs to be aligned: what lies inside the window is huge wherever it begins. Only the last
//! chunk (one PMD's worth) is partly handed out, and touching it would make all of it resident. So it is
//! advised at once only if what it adds stays within the allowed waste; otherwise it begins on base pages
//! and is collapsed when it has filled up.
//!
//! Invariant: `next <= mapped`, `mapped` is a multiple of the PMD size, and `[next, mapped)` was never
//! handed out.

use rustix::io::{Errno, Result};

use super::memory;

/// The growing end of a range of addresses.
#[derive(Debug)]
pub(super) struct Frontier {
    next: usize,
    mapped: usize,
    limit: usize,
    pmd: usize,
    /// The last chunk stands on base pages for now.
    plain_tail: bool,
}

/// Gaps left when somebody else's mapping is in the way: room for what else may be around it.
const SKIP: usize = 1 << 30;

impl Frontier {
    pub(super) const fn new() -> Self {
        Self {
            next: 0,
            mapped: 0,
            limit: 0,
            pmd: 0,
            plain_tail: false,
        }
    }

    /// Sets where growth begins and ends. `start` is a multiple of `pmd`.
    pub(super) fn place(&mut self, start: usize, limit: usize, pmd: usize) {
        *self = Self {
            next: start,
            mapped: start,
            limit,
            pmd,
            plain_tail: false,
        };
    }

    /// The first address that was never handed out.
    pub(super) const fn next(&self) -> usize {
        self.next
    }

    /// Hands out the next `size` bytes, fresh and zero. `allowed` is how many bytes may become resident
    /// beyond what is handed out.
    ///
    /// # Errors
    /// `EEXIST` where somebody else's mapping is in the way ([`Frontier::skip`] passes it); else the
    /// kernel's, `ENOMEM` mostly. Nothing has changed then.
    pub(super) fn take(&mut self, size: usize, allowed: usize) -> Result<usize> {
        let start = self.next;
        let end = start
            .checked_add(size)
            .filter(|end| *end <= self.limit)
            .ok_or(Errno::NOMEM)?;
        let whole = end & !(self.pmd - 1);
        let covered = end.next_multiple_of(self.pmd);
        let wasteful = covered - end > allowed;

        let fresh = self.mapped;
        if covered > fresh {
            memory::map(fresh, covered - fresh)?;
        }
        if self.plain_tail && (end >= fresh || !wasteful) {
            self.plain_tail = false;
            if memory::advise(fresh - self.pmd, self.pmd).is_ok() {
                memory::collapse(fresh - self.pmd, self.pmd);
            }
        }
        if covered > fresh {
            let advised = if wasteful { whole.max(fresh) } else { covered };
            if advised > fresh {
                // A refusal is counted by `advise`; the memory is as good as the program's own would be.
                let _ = memory::advise(fresh, advised - fresh);
            }
            self.plain_tail = advised < covered;
            self.mapped = covered;
        }
        self.next = end;
        Ok(start)
    }

    /// Leaves the present place for one further on, and gives the range that was mapped and is left
    /// behind without having been handed out.
    pub(super) fn skip(&mut self) -> (usize, usize) {
        let left = (self.next, self.mapped);
        self.mapped = (self.mapped + SKIP).min(self.limit);
        self.next = self.mapped;
        self.plain_tail = false;
        left
    }
}
