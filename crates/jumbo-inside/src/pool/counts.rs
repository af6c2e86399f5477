//! How many pages a pool has: [`PageCounts`], and how many more it may have: [`Overcommit`].

/// The pages of a pool, or of one node of it, by the rules of the kernel's hugetlb pools
/// (Documentation/mm/hugetlbfs_reserv.rst, mm/hugetlb.c).
///
/// Invariant: `surplus <= total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    total: u64,
    surplus: u64,
}

impl PageCounts {
    /// No page.
    pub const fn new() -> Self {
        Self {
            total: 0,
            surplus: 0,
        }
    }

    /// Every page, in use or free.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Pages that go when demand is gone.
    pub const fn surplus(&self) -> u64 {
        self.surplus
    }

    /// Pages that stay.
    pub const fn persistent(&self) -> u64 {
        self.total - self.surplus
    }

    /// Pages join that stay.
    pub const fn join(&mut self, pages: u64) {
        self.total += pages;
    }

    /// Pages join that go when demand is gone.
    pub const fn join_surplus(&mut self, pages: u64) {
        self.total += pages;
        self.surplus += pages;
    }

    /// A page is given back. True where it leaves the pool, because the pool has a surplus; else it is free now.
    pub const fn give(&mut self) -> bool {
        let leaves = self.surplus > 0;
        if leaves {
            self.leave(1);
        }
        leaves
    }

    /// Pages leave the pool: surplus ones as far as there are any.
    pub const fn leave(&mut self, pages: u64) {
        self.total -= pages;
        self.surplus = self.surplus.saturating_sub(pages);
    }

    /// A persistent page leaves.
    pub const fn shed(&mut self) {
        self.total -= 1;
    }

    /// A surplus page becomes persistent.
    pub const fn keep(&mut self) {
        self.surplus -= 1;
    }

    /// A persistent page becomes surplus.
    pub const fn unkeep(&mut self) {
        self.surplus += 1;
    }
}

/// How many surplus pages a pool may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overcommit {
    /// The max of them.
    pub max: u64,
    /// Those that are just being asked of the source, and in no [`PageCounts`] yet.
    pub pending: u64,
}

impl Overcommit {
    /// Whether `more` surplus pages may join where there are `surplus`.
    pub const fn admits(&self, surplus: u64, more: u64) -> bool {
        more == 0 || surplus.saturating_add(self.pending).saturating_add(more) <= self.max
    }
}
