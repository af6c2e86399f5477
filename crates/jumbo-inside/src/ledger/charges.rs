//! What each process of a run is charged with of the pool that all of them share: [`Ledger::charge`].
//!
//! A process that ends gives nothing back by itself. So a charge that finds the pool used up looks whether processes are
//! gone that were charged, and takes their part first. A process counts as gone when its memory is: at the latest when it
//! has been waited for.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use super::{Ledger, Slot};
use crate::{headroom, sandbox, sync};

const RELAXED: Ordering = Ordering::Relaxed;

/// How long there is no look after one that found no process gone: it opens a file for each process that has pages, with
/// the heap's lock held.
const PAUSE: Duration = Duration::from_millis(100);
/// Until when, in nanoseconds since the machine started.
static PAUSED_UNTIL: AtomicU64 = AtomicU64::new(0);

impl Ledger {
    /// Charges the process of `slot` with so many bytes more, all or none; false where the run's pool is used up. Called
    /// with a lock held that keeps fork(2) away, so that no child has a descriptor of this.
    pub(crate) fn charge(&self, slot: &Slot, bytes: u64) -> bool {
        let charged = self.pool.charge(bytes) || self.reclaim(slot) && self.pool.charge(bytes);
        if charged {
            // Should the process end between these two, the run has a little less; never more.
            slot.pool_charged.fetch_add(bytes, RELAXED);
        }
        charged
    }

    /// The process of `slot` has given so many bytes back.
    pub(crate) fn uncharge(&self, slot: &Slot, bytes: u64) {
        let less = |charged: u64| Some(charged.saturating_sub(bytes));
        let before = slot.pool_charged.fetch_update(RELAXED, RELAXED, less);
        self.pool.uncharge(before.unwrap_or(0).min(bytes));
    }

    /// Begins to charge the process of `slot`. What an earlier image of it (execve(2)) was charged with is gone.
    pub(super) fn begin_charging(&self, slot: &Slot) {
        // Behind a filter that the program installed no page is taken, and no file read.
        if self.pool.limit() == 0 || sandbox::is_entered_later() {
            return;
        }
        let Some(owner) = self_in_proc() else { return };
        let earlier = self
            .slots()
            .filter(|other| other.pool_owner.load(RELAXED) == owner);
        earlier.for_each(|other| self.take_back(other));
        slot.pool_owner.store(owner, RELAXED);
    }

    /// Takes back what processes were charged with that are gone; true where that was something.
    fn reclaim(&self, own: &Slot) -> bool {
        // A filter that the program installed may not let us read files.
        if sandbox::is_entered_later() || nanoseconds(sync::now()) < PAUSED_UNTIL.load(RELAXED) {
            return false;
        }
        let mut found = false;
        let others = self.slots().filter(|slot| !core::ptr::eq(*slot, own));
        for slot in others.filter(|slot| slot.pool_charged.load(RELAXED) > 0) {
            let same_namespace = slot.pid.load(RELAXED) == slot.pool_owner.load(RELAXED);
            let reaper =
                Some(slot.reaper_pid.load(RELAXED)).filter(|pid| *pid != 0 && same_namespace);
            // A reaper holds the memory of its process a little longer.
            if !has_memory(slot.pool_owner.load(RELAXED)) && !reaper.is_some_and(has_memory) {
                self.take_back(slot);
                found = true;
            }
        }
        if !found {
            PAUSED_UNTIL.store(nanoseconds(sync::now() + PAUSE), RELAXED);
        }
        found
    }

    fn take_back(&self, slot: &Slot) {
        self.pool.uncharge(slot.pool_charged.swap(0, RELAXED));
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The PID of this process, as /proc has it; `None` where there is no /proc.
fn self_in_proc() -> Option<u32> {
    let mut buffer = [core::mem::MaybeUninit::uninit(); 16];
    let (link, _) = rustix::fs::readlinkat_raw(rustix::fs::CWD, c"/proc/self", &mut buffer).ok()?;
    u32::try_from(headroom::number(link)?).ok()
}

/// Whether a process is there that has memory: neither ended nor about to be waited for. True where that cannot be seen.
fn has_memory(process: u32) -> bool {
    let (mut path, mut digits) = ([0; headroom::MAX_PATH_BYTES], [0; 10]);
    let digits = headroom::decimal(process, &mut digits);
    let Some(path) = headroom::joined(&mut path, [b"/proc/", digits, b"/statm\0"]) else {
        return true;
    };
    let mut text = [0u8; 32];
    match headroom::read(path, &mut text) {
        Ok(text) => headroom::number(text) != Some(0),
        Err(errno) => errno != rustix::io::Errno::NOENT && errno != rustix::io::Errno::SRCH,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_had_that_is_gone_can_be_charged_again() {
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
        // Not waited for yet: a zombie has no memory.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while has_memory(child.id()) && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        // The last look was in vain: the next one is due after the pause.
        while !ledger.charge(own, 5) && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        assert_eq!(own.pool_charged.load(RELAXED), 9);
        assert!(!ledger.charge(own, 2));
        child.wait().unwrap();
        assert!(!has_memory(child.id()));
        ledger.uncharge(own, 100);
        assert_eq!((ledger.pool.charged(), ledger.pool.peak()), (0, 10));
    }
}
