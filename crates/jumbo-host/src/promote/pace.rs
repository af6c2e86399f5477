//! Limits on the speed of collapses: [`Pace`].

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::Target;
use crate::kernel::memory::{Memory, Zone};
use crate::kernel::pressure::memory_in;
use crate::kernel::{Root, base_page, cgroup};
use crate::units::{Bytes, PageSize};

/// Interval between reads of pressure. The kernel sums up stall time every two seconds.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// Age of an unchanged total that means no stalls: more than the kernel's interval.
const MAX_TOTAL_AGE: Duration = Duration::from_millis(2500);
/// Part of the time in which some task waited, from which on collapses pause.
const STALL_THRESHOLD: f64 = 0.1;
/// Maximum number of collapses between counts of free huge pages.
const MAX_BATCH_BLOCKS: u64 = 16;
/// Divisor of the host's memory: this part of it stays free, as each zone has a reserve.
const RESERVE_DIVISOR: u64 = 64;

/// Reason for a pause between collapses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pause {
    /// Memory pressure on the host.
    Host,
    /// Memory pressure in the target's control group.
    Group,
}

impl std::fmt::Display for Pause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Host => "the host stalls for memory (PSI)",
            Self::Group => "its control group stalls for memory (PSI)",
        })
    }
}

/// Rate limit, pressure gauges and reserve of free memory.
#[derive(Debug)]
pub struct Pace {
    root: Root,
    /// Bytes a second.
    rate: Option<Bytes>,
    /// Time of the next block.
    due: Instant,
    gauges: Vec<Gauge>,
    /// Memory that stays free.
    reserve: Bytes,
}

/// Reader of one pressure file.
#[derive(Debug)]
struct Gauge {
    pause: Pause,
    file: PathBuf,
    read: Instant,
    /// Time of the last change of `total`.
    changed: Instant,
    /// Sum of all stalls.
    total: Duration,
    /// Part of the time in which some task waited.
    part: f64,
}

impl Pace {
    /// Limits collapses to `rate` bytes a second, and to times without memory pressure.
    pub fn new(target: &Target, rate: Option<Bytes>) -> Self {
        let root = &target.root;
        let group = cgroup::pressure_file(root, target.pid());
        let host = (Pause::Host, PathBuf::from("proc/pressure/memory"));
        let files = [Some(host), group.map(|file| (Pause::Group, file))];
        let gauge = |(pause, file)| Gauge::new(root, pause, file);
        let total = Memory::read(root).map_or(Bytes(0), |memory| memory.total);
        Self {
            gauges: files.into_iter().flatten().filter_map(gauge).collect(),
            root: root.clone(),
            rate: rate.filter(|rate| *rate > Bytes(0)),
            due: Instant::now(),
            reserve: Bytes(total.0 / RESERVE_DIVISOR),
        }
    }

    /// Returns the time until the next block by the rate.
    pub(super) fn wait(&self) -> Duration {
        self.due.saturating_duration_since(Instant::now())
    }

    /// Adds collapsed memory. Unused time does not accumulate, to avoid bursts.
    pub(super) fn count(&mut self, bytes: Bytes) {
        if let Some(rate) = self.rate {
            let now = Instant::now();
            let takes = Duration::from_secs_f64(bytes.0 as f64 / rate.0 as f64);
            self.due = self.due.max(now.checked_sub(takes).unwrap_or(now)) + takes;
        }
    }

    /// Returns the reason to pause now.
    pub(super) fn stall(&mut self) -> Option<Pause> {
        let root = &self.root;
        let mut gauges = self.gauges.iter_mut();
        gauges.find_map(|gauge| gauge.stalls(root).then_some(gauge.pause))
    }

    /// Counts the huge pages that the next collapses may allocate, at least one.
    ///
    /// # Errors
    /// The shortage, in words.
    pub fn room(&self, target: &Target, huge: PageSize) -> Result<u64, String> {
        let free = self.free_pages(huge).min(MAX_BATCH_BLOCKS);
        if free == 0 {
            let why = "no huge page is free, and the kernel would have to move memory for one; \
                       `jumbo doctor` has more";
            return Err(String::from(why));
        }
        let Some(limit) = cgroup::memory_limit(&self.root, target.pid()) else {
            return Ok(free);
        };
        // Each collapse may charge a whole huge page.
        match free.min(limit.spare().0 / huge.bytes()) {
            0 => Err(format!(
                "its control group has {} left of {}, which it may need to grow",
                limit.room(),
                limit.limit
            )),
            free => Ok(free),
        }
    }

    /// Returns the number of huge pages that are free without compaction, less the reserve.
    fn free_pages(&self, huge: PageSize) -> u64 {
        let zones = Zone::read_all(&self.root).unwrap_or_default();
        let whole = zones
            .iter()
            .filter_map(|zone| zone.whole(huge, base_page(&self.root)));
        let free: u64 = whole.map(|pages| pages.0).sum();
        free.saturating_sub(self.reserve.0 / huge.bytes())
    }
}

impl Gauge {
    fn new(root: &Root, pause: Pause, file: PathBuf) -> Option<Self> {
        // With psi=0 the kernel has the file, but reads fail.
        let total = memory_in(root, &file).ok()??.some;
        let now = Instant::now();
        Some(Self {
            pause,
            file,
            read: now,
            changed: now,
            total,
            part: 0.0,
        })
    }

    fn stalls(&mut self, root: &Root) -> bool {
        let now = Instant::now();
        if now - self.read >= SAMPLE_INTERVAL {
            self.read = now;
            let total = memory_in(root, &self.file).ok().flatten();
            self.sample(now, total.map_or(self.total, |pressure| pressure.some));
        }
        self.part >= STALL_THRESHOLD
    }

    fn sample(&mut self, now: Instant, total: Duration) {
        let elapsed = now.saturating_duration_since(self.changed);
        if total == self.total && elapsed < MAX_TOTAL_AGE {
            return;
        }
        let stalled = total.saturating_sub(self.total).as_secs_f64();
        self.part = stalled / elapsed.max(SAMPLE_INTERVAL).as_secs_f64();
        (self.changed, self.total) = (now, total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stall_is_detected_and_ends() {
        let start = Instant::now();
        let mut gauge = Gauge {
            pause: Pause::Host,
            file: PathBuf::new(),
            read: start,
            changed: start,
            total: Duration::ZERO,
            part: 0.0,
        };
        let at = |ms| start + Duration::from_millis(ms);
        gauge.sample(at(2000), Duration::from_millis(1000));
        assert!((gauge.part - 0.5).abs() < 1e-9);
        // The kernel has not updated its sum since.
        gauge.sample(at(3000), Duration::from_millis(1000));
        assert!(gauge.part > STALL_THRESHOLD);
        gauge.sample(at(4600), Duration::from_millis(1000));
        assert!(gauge.part < STALL_THRESHOLD);
    }
}
