//! When the next block may be collapsed: [`Pace`].

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::Target;
use crate::kernel::memory::{Memory, Zone};
use crate::kernel::pressure::memory_in;
use crate::kernel::{Root, base_page, cgroup};
use crate::units::{Bytes, PageSize};

/// The time between two readings of pressure. The kernel adds up the time every two seconds.
const LOOK: Duration = Duration::from_millis(100);
/// A figure that has not changed for so long stands for now.
const SETTLED: Duration = Duration::from_millis(2500);
/// Tasks stall where some waited for so large a part of the time.
const STALL_PART: f64 = 0.1;
/// Free blocks are scarce below this part of the host's memory: each zone keeps some back.
const SCARCE_PART: u64 = 64;

/// Why nothing is collapsed for a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pause {
    /// Processes of the host wait for memory.
    Host,
    /// Processes of the target's control group do.
    Group,
    /// No thread of it could be stopped without a trace.
    Thread,
}

impl std::fmt::Display for Pause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Host => "the host stalls for memory (PSI)",
            Self::Group => "its control group stalls for memory (PSI)",
            Self::Thread => "no thread is where it can be stopped",
        })
    }
}

/// Rate, pressure and free huge pages.
#[derive(Debug)]
pub struct Pace {
    root: Root,
    /// Bytes a second.
    rate: Option<Bytes>,
    /// When the next block is due.
    due: Instant,
    gauges: Vec<Gauge>,
    scarce: Bytes,
}

/// One file of pressure.
#[derive(Debug)]
struct Gauge {
    pause: Pause,
    file: PathBuf,
    read: Instant,
    /// When the total last changed, and what it is since.
    changed: Instant,
    total: Duration,
    part: f64,
}

impl Pace {
    /// At most so many bytes a second, while neither the host nor the target's control group stalls.
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
            scarce: Bytes(total.0 / SCARCE_PART),
        }
    }

    /// The time until the next block is due by the rate.
    pub(super) fn wait(&self) -> Duration {
        self.due.saturating_duration_since(Instant::now())
    }

    /// Counts what was collapsed. Time that was not used is lost: after a pause there is no rush.
    pub(super) fn count(&mut self, bytes: Bytes) {
        if let Some(rate) = self.rate {
            let now = Instant::now();
            let takes = Duration::from_secs_f64(bytes.0 as f64 / rate.0 as f64);
            self.due = self.due.max(now.checked_sub(takes).unwrap_or(now)) + takes;
        }
    }

    /// Why to pause now.
    pub(super) fn stall(&mut self) -> Option<Pause> {
        let root = &self.root;
        let mut gauges = self.gauges.iter_mut();
        gauges.find_map(|gauge| gauge.stalls(root).then_some(gauge.pause))
    }

    /// The number of huge pages that can be had without moving memory, less those that the host should keep.
    pub(super) fn free_pages(&self, huge: PageSize) -> u64 {
        let zones = Zone::read_all(&self.root).unwrap_or_default();
        let whole = zones
            .iter()
            .filter_map(|zone| zone.whole(huge, base_page(&self.root)));
        let free: u64 = whole.map(|pages| pages.0).sum();
        free.saturating_sub(self.scarce.0 / huge.bytes())
    }
}

impl Gauge {
    fn new(root: &Root, pause: Pause, file: PathBuf) -> Option<Self> {
        // A kernel may have the file and refuse to count (psi=0).
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
        if now - self.read >= LOOK {
            self.read = now;
            let total = memory_in(root, &self.file).ok().flatten();
            self.sample(now, total.map_or(self.total, |pressure| pressure.some));
        }
        self.part >= STALL_PART
    }

    fn sample(&mut self, now: Instant, total: Duration) {
        let elapsed = now.saturating_duration_since(self.changed);
        if total == self.total && elapsed < SETTLED {
            return;
        }
        let stalled = total.saturating_sub(self.total).as_secs_f64();
        self.part = stalled / elapsed.as_secs_f64().max(LOOK.as_secs_f64());
        (self.changed, self.total) = (now, total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_seen_and_passes() {
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
        // The kernel has not added up since.
        gauge.sample(at(3000), Duration::from_millis(1000));
        assert!(gauge.part > STALL_PART);
        gauge.sample(at(4600), Duration::from_millis(1000));
        assert!(gauge.part < STALL_PART);
    }
}
