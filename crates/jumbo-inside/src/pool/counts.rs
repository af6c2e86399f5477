//! Numbers of pages: [`PageCounts`], [`Overcommit`].

/// Pages of a pool or of one of its nodes, counted as in the kernel's hugetlb pools
/// (Documentation/mm/hugetlbfs_reserv.rst, mm/hugetlb.c).
///
/// Invariant: `surplus <= total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    total: u64,
    surplus: u64,
}

impl PageCounts {
    /// Creates the counts of an empty pool.
    pub const fn new() -> Self {
        Self {
            total: 0,
            surplus: 0,
        }
    }

    /// Returns all pages, in use or free.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Returns the pages that leave once they are free.
    pub const fn surplus(&self) -> u64 {
        self.surplus
    }

    /// Returns the pages that stay when they are free.
    pub const fn persistent(&self) -> u64 {
        self.total - self.surplus
    }

    /// Adds persistent pages.
    pub const fn add_persistent(&mut self, pages: u64) {
        self.total += pages;
    }

    /// Adds surplus pages.
    pub const fn add_surplus(&mut self, pages: u64) {
        self.total += pages;
        self.surplus += pages;
    }

    /// Counts a page that becomes free. True if it leaves the pool, because there is a surplus.
    pub const fn release_one(&mut self) -> bool {
        let is_surplus = self.surplus > 0;
        if is_surplus {
            self.remove(1);
        }
        is_surplus
    }

    /// Removes pages, surplus ones first.
    pub const fn remove(&mut self, pages: u64) {
        self.total -= pages;
        self.surplus = self.surplus.saturating_sub(pages);
    }

    /// Removes a persistent page.
    pub const fn remove_persistent(&mut self) {
        self.total -= 1;
    }

    /// Turns a surplus page into a persistent one.
    pub const fn make_persistent(&mut self) {
        self.surplus -= 1;
    }

    /// Turns a persistent page into a surplus one.
    pub const fn make_surplus(&mut self) {
        self.surplus += 1;
    }
}

/// Bound on the surplus pages of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overcommit {
    /// Maximum number of surplus pages.
    pub max: u64,
    /// Pages requested from the source, and in no [`PageCounts`] yet.
    pub pending: u64,
}

impl Overcommit {
    /// Reports whether `more` surplus pages may join `surplus` ones.
    pub const fn admits(&self, surplus: u64, more: u64) -> bool {
        more == 0 || surplus.saturating_add(self.pending).saturating_add(more) <= self.max
    }
}
