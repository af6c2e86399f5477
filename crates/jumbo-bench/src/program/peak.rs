//! [`MemoryPeak`]: peak memory of a program and its descendants, and the share of it on huge pages.
//!
//! Also their peak of hugetlb pages, which wait4(2) does not count.
//!
//! Sampling locks the program's memory map and slows it down, so it happens in runs that are not
//! counted, or while nothing is timed.

use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::process::tree;
use jumbo_host::kernel::smaps::Smaps;

/// Interval between two samples: a multiple of the time of a sample, within these bounds.
const SAMPLE_INTERVAL_FACTOR: u32 = 10;
const MIN_SAMPLE_INTERVAL: Duration = Duration::from_millis(3);
const MAX_SAMPLE_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemoryPeak {
    /// Shared memory counts once.
    pub(super) bytes: Bytes,
    /// Share of the resident memory on huge pages, in percent.
    pub(super) huge_percent: f64,
    /// Peak of hugetlb pages of one process, at any time.
    pub(super) hugetlb: Bytes,
}

impl MemoryPeak {
    /// Samples `pid` and its descendants, and returns the time until the next sample.
    ///
    /// It samples twice and takes the smaller result: when one of two processes that share memory
    /// ends between their reads, the same pages count for both.
    pub(super) fn sample(&mut self, root: &Root, pid: u32) -> Duration {
        let clock = Instant::now();
        let samples = [(); 2].map(|()| Self::at(root, pid));
        self.hugetlb = samples
            .iter()
            .fold(self.hugetlb, |most, look| most.max(look.hugetlb));
        // While the memory stays at its peak, base pages become huge.
        if let Some(least) = samples.iter().min_by_key(|look| look.bytes)
            && least.bytes.0 >= self.bytes.0 - self.bytes.0 / 64
        {
            self.bytes = self.bytes.max(least.bytes);
            self.huge_percent = least.huge_percent;
        }
        (clock.elapsed() * SAMPLE_INTERVAL_FACTOR / 2)
            .clamp(MIN_SAMPLE_INTERVAL, MAX_SAMPLE_INTERVAL)
    }

    /// Sums up the processes, one after the other.
    fn at(root: &Root, pid: u32) -> Self {
        let mut now = Self::default();
        let (mut resident, mut huge, mut shared_hugetlb) = (Bytes(0), Bytes(0), Bytes(0));
        let mut left = vec![pid];
        while let Some(pid) = left.pop() {
            left.extend(tree::children(root, pid));
            // A process that ended meanwhile has no memory.
            let Ok(rollup) = Smaps::read_rollup(root, pid) else {
                continue;
            };
            let hugetlb = rollup.mappings().map(|mapping| mapping.hugetlb()).sum();
            now.hugetlb = now.hugetlb.max(hugetlb);
            for mapping in rollup.mappings() {
                // The number of sharing processes is unknown: assume all of them.
                shared_hugetlb = shared_hugetlb.max(mapping.shared_hugetlb);
                now.bytes += mapping.pss + mapping.private_hugetlb;
                resident += mapping.rss + mapping.hugetlb();
                huge += mapping.pmd_mapped() + mapping.hugetlb();
            }
        }
        now.bytes += shared_hugetlb;
        now.huge_percent = 100.0 * huge.0 as f64 / resident.0.max(1) as f64;
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the peak of samples of a process in KiB: all memory, and that of a field of smaps.
    fn peak(field: &str, samples: &[(u64, u64)]) -> MemoryPeak {
        let folder = tempfile::tempdir().unwrap();
        let process = folder.path().join("proc/7");
        std::fs::create_dir_all(&process).unwrap();
        let mut peak = MemoryPeak::default();
        for (pss, other) in samples {
            let rollup = format!(
                "400000-800000 ---p 00000000 00:00 0 [rollup]\n\
                 Rss: {pss} kB\nPss: {pss} kB\n{field}: {other} kB\n"
            );
            std::fs::write(process.join("smaps_rollup"), rollup).unwrap();
            peak.sample(&Root::at(folder.path()), 7);
        }
        peak
    }

    #[test]
    fn the_peak_of_hugetlb_pages_is_independent() {
        let peak = peak("Private_Hugetlb", &[(100, 4096), (900_000, 2048)]);
        assert_eq!(peak.hugetlb, Bytes(4096 << 10));
        assert_eq!(peak.bytes, Bytes((900_000 + 2048) << 10));
    }

    #[test]
    fn a_collapse_at_the_peak_counts() {
        let peak = peak("AnonHugePages", &[(10_000, 0), (9_990, 9_000), (5_000, 0)]);
        assert_eq!(peak.bytes, Bytes(10_000 << 10));
        assert!(peak.huge_percent > 90.0, "{peak:?}");
    }

    #[test]
    fn shared_hugetlb_pages_count_once() {
        let folder = tempfile::tempdir().unwrap();
        for (pid, children) in [("7", "8 9"), ("8", ""), ("9", "")] {
            let process = folder.path().join("proc").join(pid);
            std::fs::create_dir_all(process.join("task").join(pid)).unwrap();
            std::fs::write(process.join("task").join(pid).join("children"), children).unwrap();
            let rollup = "400000-800000 ---p 00000000 00:00 0 [rollup]\n\
                          Rss: 300 kB\nPss: 100 kB\nShared_Hugetlb: 4096 kB\nPrivate_Hugetlb: 2048 kB\n";
            std::fs::write(process.join("smaps_rollup"), rollup).unwrap();
        }
        let mut peak = MemoryPeak::default();
        peak.sample(&Root::at(folder.path()), 7);
        assert_eq!(peak.bytes, Bytes((3 * (100 + 2048) + 4096) << 10));
    }

    #[test]
    fn a_sample_keeps_the_peak() {
        let mut peak = MemoryPeak::default();
        let pause = peak.sample(&Root::host(), std::process::id());
        assert!(peak.bytes > Bytes(1 << 20) && pause >= MIN_SAMPLE_INTERVAL);
        let before = peak.bytes;
        peak.sample(&Root::host(), u32::MAX);
        assert_eq!(peak.bytes, before);
    }
}
