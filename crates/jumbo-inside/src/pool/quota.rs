//! Bound that several users share: [`Quota`].

use core::sync::atomic::{AtomicU64, Ordering};

/// Bound on the charge of a group of users. It may lie in memory that processes share.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Quota {
    limit: AtomicU64,
    charged: AtomicU64,
    /// Highest charge before an [`Quota::uncharge`].
    peak: AtomicU64,
}

impl Quota {
    /// Creates a quota of `limit`.
    pub const fn new(limit: u64) -> Self {
        Self {
            limit: AtomicU64::new(limit),
            charged: AtomicU64::new(0),
            peak: AtomicU64::new(0),
        }
    }

    /// Sets the limit. A charge beyond it stays.
    pub fn set(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Returns the limit.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Returns the present charge.
    pub fn charged(&self) -> u64 {
        self.charged.load(Ordering::Relaxed)
    }

    /// Returns the highest charge so far.
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed).max(self.charged())
    }

    /// Charges all of `more`, or nothing and returns false.
    pub fn charge(&self, more: u64) -> bool {
        let limit = self.limit();
        let fits = |charged: u64| charged.checked_add(more).filter(|sum| *sum <= limit);
        let relaxed = Ordering::Relaxed;
        self.charged.fetch_update(relaxed, relaxed, fits).is_ok()
    }

    /// Ends a charge.
    pub fn uncharge(&self, less: u64) {
        self.peak.fetch_max(self.charged(), Ordering::Relaxed);
        self.revert(less);
    }

    /// Reverts a charge for what could not be had, which is no part of the highest one.
    pub fn revert(&self, less: u64) {
        let relaxed = Ordering::Relaxed;
        // In shared memory another process can write any number.
        let down = |charged: u64| Some(charged.saturating_sub(less));
        let _ = self.charged.fetch_update(relaxed, relaxed, down);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_or_nothing_up_to_the_limit() {
        let quota = Quota::new(5);
        assert!(quota.charge(3) && !quota.charge(3) && quota.charge(2));
        assert!(!quota.charge(u64::MAX));
        quota.uncharge(4);
        quota.set(0);
        assert!(!quota.charge(1));
        assert_eq!((quota.charged(), quota.peak()), (1, 5));
        quota.set(9);
        assert!(quota.charge(8));
        quota.revert(8);
        assert_eq!((quota.charged(), quota.peak()), (1, 5));
    }
}
