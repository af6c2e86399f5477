//! Charges of the processes of a run against their common pool: [`Ledger::charge`].
//!
//! A process that ends does not return its charge. So a charge that finds the pool exhausted first
//! reclaims the charges of processes that are gone: their memory is freed, at the latest when they
//! have been waited for.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use super::{Ledger, Slot};
use crate::pool::Quota;
use crate::{sandbox, sync};
use jumbo_sys as sys;
use jumbo_sys::proc::{Path, number, read};

const RELAXED: Ordering = Ordering::Relaxed;

/// Minimum interval between futile reclaims: each opens a file for each charged process, with the
/// heap's lock held.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(100);
/// Time of the next reclaim, in nanoseconds since boot.
static NEXT_RECLAIM: AtomicU64 = AtomicU64::new(0);

impl Ledger {
    /// Charges `bytes` to the process of `slot`, all or none; false if the run's pool is exhausted.
    /// The caller holds a lock that excludes fork(2), so no child inherits a descriptor from here.
    pub(crate) fn charge(&self, slot: &Slot, bytes: u64) -> bool {
        let charged = self.pool.charge(bytes) || self.reclaim(slot) && self.pool.charge(bytes);
        if charged {
            // A process that ends between the two lowers the quota; it never raises it.
            slot.pool_charged.fetch_add(bytes, RELAXED);
        }
        charged
    }

    /// Returns `bytes` of the charge of `slot` to the pool, by [`Quota::uncharge`] or
    /// [`Quota::revert`].
    pub(crate) fn uncharge(&self, slot: &Slot, bytes: u64, by: fn(&Quota, u64)) {
        let less = |charged: u64| Some(charged.saturating_sub(bytes));
        let before = slot.pool_charged.fetch_update(RELAXED, RELAXED, less);
        by(&self.pool, before.unwrap_or(0).min(bytes));
    }

    /// Starts charging the process of `slot`, and reclaims the charge of its image before
    /// execve(2).
    pub(super) fn begin_charging(&self, slot: &Slot) {
        // Under the program's own filter no page is taken, and no file read.
        if self.pool.limit() == 0 || sandbox::is_entered_later() {
            return;
        }
        let Some(owner) = self_in_proc() else { return };
        let earlier = self
            .slots()
            .filter(|other| other.pool_owner.load(RELAXED) == owner);
        earlier.for_each(|other| self.reclaim_slot(other));
        slot.pool_owner.store(owner, RELAXED);
    }

    /// Reclaims the charges of processes that are gone; false if there is none.
    fn reclaim(&self, own: &Slot) -> bool {
        // The program's own filter may forbid file access.
        sys::unfiltered(|| self.reclaim_unfiltered(own)).unwrap_or(false)
    }

    fn reclaim_unfiltered(&self, own: &Slot) -> bool {
        if nanoseconds(sync::now()) < NEXT_RECLAIM.load(RELAXED) {
            return false;
        }
        let mut found = false;
        let others = self.slots().filter(|slot| !core::ptr::eq(*slot, own));
        for slot in others.filter(|slot| slot.pool_charged.load(RELAXED) > 0) {
            let same_namespace = slot.pid.load(RELAXED) == slot.pool_owner.load(RELAXED);
            let reaper =
                Some(slot.reaper_pid.load(RELAXED)).filter(|pid| *pid != 0 && same_namespace);
            // A reaper holds the memory of its process longer.
            if !has_memory(slot.pool_owner.load(RELAXED)) && !reaper.is_some_and(has_memory) {
                self.reclaim_slot(slot);
                found = true;
            }
        }
        if !found {
            NEXT_RECLAIM.store(nanoseconds(sync::now() + RECLAIM_INTERVAL), RELAXED);
        }
        found
    }

    fn reclaim_slot(&self, slot: &Slot) {
        self.pool.uncharge(slot.pool_charged.swap(0, RELAXED));
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the PID of this process in the namespace of /proc; `None` without /proc.
fn self_in_proc() -> Option<u32> {
    let mut buffer = [core::mem::MaybeUninit::uninit(); 16];
    let (link, _) = rustix::fs::readlinkat_raw(rustix::fs::CWD, c"/proc/self", &mut buffer).ok()?;
    u32::try_from(number(link)?).ok()
}

/// Reports whether a process has memory: it neither ended nor is a zombie. True if unknown.
fn has_memory(process: u32) -> bool {
    let mut path = Path::<32>::EMPTY;
    let Some(path) = path.write(format_args!("/proc/{process}/statm")) else {
        return true;
    };
    let mut text = [0u8; 32];
    match read(path, &mut text) {
        Ok(text) => number(text) != Some(0),
        Err(errno) => errno != rustix::io::Errno::NOENT && errno != rustix::io::Errno::SRCH,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_charge_of_a_dead_process_is_reclaimed() {
        let (ledger, _fd) = Ledger::create().unwrap();
        ledger.pool.set(10);
        let own = ledger.claim(std::process::id()).unwrap();
        ledger.begin_charging(own);
        assert!(ledger.charge(own, 4) && has_memory(std::process::id()));
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let other = ledger.claim(child.id()).unwrap();
        other.pool_owner.store(child.id(), RELAXED);
        assert!(ledger.charge(other, 6) && !ledger.charge(own, 1));
        child.kill().unwrap();
        // A zombie has no memory.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while has_memory(child.id()) && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        // The last reclaim was futile: the next one is due after the interval.
        while !ledger.charge(own, 5) && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        assert_eq!(own.pool_charged.load(RELAXED), 9);
        assert!(!ledger.charge(own, 2));
        child.wait().unwrap();
        assert!(!has_memory(child.id()));
        ledger.uncharge(own, 100, Quota::uncharge);
        assert_eq!((ledger.pool.charged(), ledger.pool.peak()), (0, 10));
    }
}
