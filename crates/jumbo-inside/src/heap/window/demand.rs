//! Retention of freed memory that the program soon allocates again: [`Demand`].
//!
//! A program that works in rounds frees memory and allocates as much again; memory returned to the
//! kernel in between faults in again. So memory that is allocated again within [`REUSE_MILLIS`] of
//! its return raises the retained bytes. A low-water mark lowers them: free memory that stays
//! unused for a whole [`WINDOW_MILLIS`] is returned.
//!
//! Pure: times are arguments, in milliseconds. Invariant: only memory that was returned and
//! allocated again is retained.

/// Memory allocated again within this time should have been retained.
const REUSE_MILLIS: u64 = 1000;
/// Interval of the low-water mark.
const WINDOW_MILLIS: u64 = 1000;
/// Free memory that stays where the process has reached its former peak.
const MIN_KEEP_BYTES: usize = 4 << 20;
/// Pauses after blocks that are not resident as a whole.
const MIN_SPARSE_PAUSE_MILLIS: u64 = 1000;
const MAX_SPARSE_PAUSE_MILLIS: u64 = 64_000;
/// Fewer retained bytes do not justify a thread's scans.
const MIN_KEPT_BYTES: usize = 1 << 20;

/// Freed memory retained by demand, in bytes.
#[derive(Debug)]
pub(super) struct Demand {
    kept: usize,
    /// Upper bound on allocated and free memory together: beyond, the process would exceed its
    /// former peak.
    max_total: usize,
    /// Bytes returned recently, and the time of the last return.
    returned: usize,
    returned_millis: u64,
    /// Nothing is retained until then; the pause after the next sparse block.
    paused_until_millis: u64,
    sparse_pause_millis: u64,
    /// Low-water mark of free memory in this window, and the start of the window.
    min_free: usize,
    window_start_millis: u64,
}

impl Demand {
    pub(super) const fn new() -> Self {
        Self {
            kept: 0,
            max_total: usize::MAX,
            returned: 0,
            returned_millis: 0,
            paused_until_millis: 0,
            sparse_pause_millis: MIN_SPARSE_PAUSE_MILLIS,
            min_free: 0,
            window_start_millis: 0,
        }
    }

    pub(super) const fn kept(&self) -> usize {
        self.kept
    }

    /// Returns the bytes of free memory to keep while `live` bytes are allocated; without demand
    /// they are `base`.
    pub(super) fn keep(&self, base: usize, live: usize) -> usize {
        let max = self.max_total.saturating_sub(live);
        base.saturating_add(self.kept)
            .min(max.max(MIN_KEEP_BYTES.min(base)))
    }

    pub(super) const fn limit(&mut self, max_total: usize) {
        self.max_total = max_total;
    }

    pub(super) const fn has_returned(&self) -> bool {
        self.returned > 0
    }

    /// Records a return of `bytes` to the kernel.
    pub(super) fn returned(&mut self, bytes: usize, now: u64) {
        self.forget_old(now);
        self.returned = self.returned.saturating_add(bytes);
        self.returned_millis = now;
    }

    /// Records an allocation of `bytes` that no free memory served.
    pub(super) fn missed(&mut self, bytes: usize, now: u64) {
        self.forget_old(now);
        let again = bytes.min(self.returned);
        if again > 0 && now >= self.paused_until_millis {
            if self.kept == 0 {
                self.begin_window(0, now);
            }
            self.returned -= again;
            self.kept = self.kept.saturating_add(again);
        }
    }

    /// Records that `free` bytes are left after an allocation from free memory.
    pub(super) fn used(&mut self, free: usize) {
        self.min_free = self.min_free.min(free);
    }

    /// Lowers the retained bytes at the end of a window; of `free` bytes, `base_keep` stay anyway.
    pub(super) fn age(&mut self, free: usize, base_keep: usize, now: u64) {
        self.min_free = self.min_free.min(free);
        if now.saturating_sub(self.window_start_millis) >= WINDOW_MILLIS {
            let unused = self.min_free.saturating_sub(base_keep);
            // All retained memory may be in use for a while and never return.
            let max = free.saturating_sub(base_keep).max(self.kept / 2);
            self.kept = self.kept.saturating_sub(unused).min(max);
            // A second of blocks that were all filled.
            self.sparse_pause_millis = (self.sparse_pause_millis / 2).max(MIN_SPARSE_PAUSE_MILLIS);
            if self.kept < MIN_KEPT_BYTES {
                self.kept = 0;
            }
            self.begin_window(free, now);
        }
    }

    pub(super) fn end(&mut self) {
        *self = Self {
            paused_until_millis: self.paused_until_millis,
            sparse_pause_millis: self.sparse_pause_millis,
            ..Self::new()
        };
    }

    /// Ends the retention, for longer each time: the program fills only parts of its blocks.
    pub(super) fn end_for_sparse(&mut self, now: u64) {
        self.end();
        self.paused_until_millis = now + self.sparse_pause_millis;
        self.sparse_pause_millis = (self.sparse_pause_millis * 2).min(MAX_SPARSE_PAUSE_MILLIS);
    }

    /// Lowers the bound until the next call of [`Demand::limit`]: the program may fill `bytes`.
    pub(super) const fn expect_growth(&mut self, bytes: usize) {
        self.max_total = self.max_total.saturating_sub(bytes);
    }

    /// Lowers the retained bytes: the program is about to fill `bytes` of other memory. The heap has
    /// `total` bytes of allocated and free memory.
    pub(super) fn lower(&mut self, bytes: usize, total: usize) {
        self.kept = self.kept.min(total).saturating_sub(bytes);
        self.max_total = self.max_total.saturating_sub(bytes);
        if self.kept < MIN_KEPT_BYTES {
            self.kept = 0;
        }
    }

    fn begin_window(&mut self, free: usize, now: u64) {
        self.min_free = free;
        self.window_start_millis = now;
    }

    fn forget_old(&mut self, now: u64) {
        if now.saturating_sub(self.returned_millis) > REUSE_MILLIS {
            self.returned = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn memory_allocated_again_at_once_is_retained() {
        let mut demand = Demand::new();
        demand.missed(100 * MIB, 0);
        assert_eq!(demand.kept(), 0, "it was never given back");
        demand.returned(100 * MIB, 10);
        demand.missed(60 * MIB, 20);
        demand.missed(60 * MIB, 30);
        assert_eq!(demand.kept(), 100 * MIB);
    }

    #[test]
    fn memory_filled_elsewhere_is_not_retained() {
        let mut demand = Demand::new();
        demand.returned(100 * MIB, 0);
        demand.missed(100 * MIB, 1);
        demand.lower(10 * MIB, 200 * MIB);
        assert_eq!(demand.kept(), 90 * MIB);
        demand.lower(10 * MIB, 50 * MIB);
        assert_eq!(demand.kept(), 40 * MIB);
        demand.lower(60 * MIB, 50 * MIB);
        assert_eq!(demand.kept(), 0);
    }

    #[test]
    fn a_limit_leaves_the_demand_for_later() {
        let mut demand = Demand::new();
        demand.returned(100 * MIB, 0);
        demand.missed(100 * MIB, 1);
        demand.limit(150 * MIB);
        assert_eq!(demand.keep(16 * MIB, 10 * MIB), 116 * MIB);
        assert_eq!(demand.keep(16 * MIB, 120 * MIB), 30 * MIB);
        assert_eq!(demand.keep(16 * MIB, 200 * MIB), MIN_KEEP_BYTES);
        assert_eq!(demand.keep(0, 200 * MIB), 0);
    }

    #[test]
    fn nothing_is_retained_in_a_pause() {
        let mut demand = Demand::new();
        let round = |demand: &mut Demand, now| {
            demand.returned(100 * MIB, now);
            demand.missed(100 * MIB, now);
            demand.kept()
        };
        assert_eq!(round(&mut demand, 1), 100 * MIB);
        demand.end_for_sparse(1000);
        demand.end_for_sparse(1000);
        let end = 1000 + 2 * MIN_SPARSE_PAUSE_MILLIS;
        assert_eq!(round(&mut demand, end - 1), 0, "the second pause is longer");
        assert_eq!(round(&mut demand, end), 100 * MIB);
    }

    #[test]
    fn memory_allocated_later_is_not() {
        let mut demand = Demand::new();
        demand.returned(100 * MIB, 0);
        demand.missed(100 * MIB, REUSE_MILLIS + 1);
        assert_eq!(demand.kept(), 0);
    }

    #[test]
    fn memory_unused_for_a_window_is_returned() {
        let mut demand = Demand::new();
        demand.returned(100 * MIB, 0);
        demand.missed(100 * MIB, 1);
        // In use, then free; and used again down to 30 MiB.
        demand.age(80 * MIB, 10 * MIB, 100);
        demand.used(30 * MIB);
        demand.age(110 * MIB, 10 * MIB, 1 + WINDOW_MILLIS);
        demand.used(30 * MIB);
        demand.age(110 * MIB, 10 * MIB, 1 + 2 * WINDOW_MILLIS);
        assert_eq!(demand.kept(), 80 * MIB, "20 of 30 are beyond the base");
        demand.age(90 * MIB, 10 * MIB, 1 + 3 * WINDOW_MILLIS);
        demand.age(10 * MIB, 10 * MIB, 1 + 4 * WINDOW_MILLIS);
        assert!(demand.kept() < 10 * MIB, "{}", demand.kept());
    }
}
