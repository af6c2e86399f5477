//! [`Peak`]: the most memory that a program and those it started had at a time, and how much of it was on huge pages.
//!
//! Of hugetlb pages, which wait4(2) does not count, it has the most on its own.
//!
//! To look costs the program time (its memory map is locked meanwhile), so this is done in a run that is not counted,
//! or while nothing is timed.

use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::process::tree;
use jumbo_host::kernel::smaps::Smaps;

/// A pause is so many times what the look before it took, and within these bounds.
const PAUSE: u32 = 10;
const SHORTEST: Duration = Duration::from_millis(3);
const LONGEST: Duration = Duration::from_millis(200);

/// The largest sample so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peak {
    /// Memory that several processes share counts once.
    pub(super) bytes: Bytes,
    /// On huge pages, in percent of what is resident.
    pub(super) huge_percent: f64,
    /// The most that one of them had of hugetlb pages, whenever that was.
    pub(super) hugetlb: Bytes,
}

impl Peak {
    /// Looks at `pid` and those that it started, and says how long to wait until the next look.
    ///
    /// Twice, and the lesser counts: where one ends between the looks at two that share memory, the other's share
    /// grows meanwhile, and the same pages count for both.
    pub(super) fn look(&mut self, root: &Root, pid: u32) -> Duration {
        let clock = Instant::now();
        let looks = [(); 2].map(|()| Self::at(root, pid));
        self.hugetlb = looks
            .iter()
            .fold(self.hugetlb, |most, look| most.max(look.hugetlb));
        if let Some(least) = looks.iter().min_by_key(|look| look.bytes)
            && least.bytes > self.bytes
        {
            (self.bytes, self.huge_percent) = (least.bytes, least.huge_percent);
        }
        (clock.elapsed() * PAUSE / 2).clamp(SHORTEST, LONGEST)
    }

    /// What they have now, one after the other.
    fn at(root: &Root, pid: u32) -> Self {
        let mut now = Self::default();
        let (mut resident, mut huge, mut shared_hugetlb) = (Bytes(0), Bytes(0), Bytes(0));
        let mut left = vec![pid];
        while let Some(pid) = left.pop() {
            left.extend(tree::children(root, pid));
            // One that ends meanwhile has nothing.
            let Ok(rollup) = Smaps::read_rollup(root, pid) else {
                continue;
            };
            let hugetlb = rollup.mappings().map(|mapping| mapping.hugetlb()).sum();
            now.hugetlb = now.hugetlb.max(hugetlb);
            for mapping in rollup.mappings() {
                // Of hugetlb pages the kernel does not say with how many they are shared: with all of them.
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

    #[test]
    fn the_most_of_hugetlb_pages_counts_whenever_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let process = folder.path().join("proc/7");
        std::fs::create_dir_all(&process).unwrap();
        let mut peak = Peak::default();
        for (pss, hugetlb) in [(100, 4096), (900_000, 2048)] {
            let rollup = format!(
                "400000-800000 ---p 00000000 00:00 0 [rollup]\n\
                 Rss: {pss} kB\nPss: {pss} kB\nPrivate_Hugetlb: {hugetlb} kB\n"
            );
            std::fs::write(process.join("smaps_rollup"), rollup).unwrap();
            peak.look(&Root::at(folder.path()), 7);
        }
        assert_eq!(peak.hugetlb, Bytes(4096 << 10));
        assert_eq!(peak.bytes, Bytes((900_000 + 2048) << 10));
    }

    #[test]
    fn hugetlb_pages_that_processes_share_count_once() {
        let folder = tempfile::tempdir().unwrap();
        for (pid, children) in [("7", "8 9"), ("8", ""), ("9", "")] {
            let process = folder.path().join("proc").join(pid);
            std::fs::create_dir_all(process.join("task").join(pid)).unwrap();
            std::fs::write(process.join("task").join(pid).join("children"), children).unwrap();
            let rollup = "400000-800000 ---p 00000000 00:00 0 [rollup]\n\
                          Rss: 300 kB\nPss: 100 kB\nShared_Hugetlb: 4096 kB\nPrivate_Hugetlb: 2048 kB\n";
            std::fs::write(process.join("smaps_rollup"), rollup).unwrap();
        }
        let mut peak = Peak::default();
        peak.look(&Root::at(folder.path()), 7);
        assert_eq!(peak.bytes, Bytes((3 * (100 + 2048) + 4096) << 10));
    }

    #[test]
    fn a_look_sees_the_process_and_keeps_the_most() {
        let mut peak = Peak::default();
        let pause = peak.look(&Root::host(), std::process::id());
        assert!(peak.bytes > Bytes(1 << 20) && pause >= SHORTEST);
        let before = peak.bytes;
        peak.look(&Root::host(), u32::MAX);
        assert_eq!(peak.bytes, before);
    }
}
