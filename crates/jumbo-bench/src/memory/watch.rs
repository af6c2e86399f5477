//! [`FreeWatch`]: waits until memory is free again.
//!
//! It reads the free memory of the whole machine, which the next program needs, and which can be
//! read on all sides: an ended process has no counters.

use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::{FileError, Root};

use crate::Error;

/// Share of the memory that need not become free, in percent.
const TOLERANCE_PERCENT: u64 = 1;

/// Minimum of that share in bytes: the fluctuation by other programs.
const MIN_TOLERANCE_BYTES: u64 = 8 << 20;

/// Maximum share of a CPU for the checks: one part in so many. They delay the freeing threads: the
/// kernel holds the zone lock while it prints a zone.
const CHECK_TIME_DIVISOR: u32 = 40;

/// Time after which another program must have taken the memory, plus a second per GiB.
const FREE_TIMEOUT: Duration = Duration::from_secs(5);

const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Waits until memory that was in use at its creation is free.
pub(crate) struct FreeWatch {
    root: Root,
    /// Amount of free memory to reach.
    level: Bytes,
    bound: Duration,
}

impl FreeWatch {
    /// Creates a watch, right before `size` bytes are freed: earlier changes do not count.
    pub(crate) fn new(root: &Root, size: Bytes) -> Result<Self, Error> {
        let tolerated = (size.0 / 100 * TOLERANCE_PERCENT).max(MIN_TOLERANCE_BYTES);
        let expected = Bytes(size.0.saturating_sub(tolerated));
        Ok(Self {
            root: root.clone(),
            level: free(root)? + expected,
            bound: FREE_TIMEOUT + Duration::from_secs(size.0 >> 30),
        })
    }

    /// Checks once: `None` if the memory is free, else the time until the next check.
    fn check(&self, since: Instant) -> Result<Option<Duration>, Error> {
        let clock = Instant::now();
        let free = free(&self.root)?;
        if free >= self.level {
            return Ok(None);
        }
        if since.elapsed() > self.bound {
            return Err(Error::NotBack(Bytes(self.level.0 - free.0)));
        }
        Ok(Some(
            (clock.elapsed() * CHECK_TIME_DIVISOR).max(MIN_CHECK_INTERVAL),
        ))
    }

    /// Waits until the memory is free, and returns the time `since` then.
    pub(crate) fn wait(&self, since: Instant) -> Result<Duration, Error> {
        while let Some(pause) = self.check(since)? {
            std::thread::sleep(pause);
        }
        Ok(since.elapsed())
    }
}

/// Memory that a program can get at once: free pages, those in per-CPU lists (up to an eighth of a
/// zone, not in MemFree), and the page cache, which changes all the time.
fn free(root: &Root) -> Result<Bytes, FileError> {
    let zones = root.read("proc/zoneinfo")?;
    let pages: u64 = zones.lines().filter_map(pages).sum();
    Ok(Bytes(pages * rustix::param::page_size() as u64))
}

/// Pages that a line of /proc/zoneinfo counts, if it is relevant.
fn pages(line: &str) -> Option<u64> {
    let (name, count) = line.trim_start().split_once(char::is_whitespace)?;
    ["nr_free_pages", "nr_file_pages", "count:"]
        .contains(&name)
        .then(|| count.trim().parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake(zones: &str) -> (tempfile::TempDir, Root) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        std::fs::write(folder.path().join("proc/zoneinfo"), zones).unwrap();
        let root = Root::at(folder.path());
        (folder, root)
    }

    const ZONES: &str = "\
Node 0, zone      DMA
  per-node stats
      nr_file_pages 7
      nr_free_cma  9
  pages free     1000
      nr_free_pages 1000
      nr_free_pages_blocks 512
  pagesets
    cpu: 0
              count:    20
              high:     378
    cpu: 1
              count:    0
Node 0, zone   Normal
      nr_free_pages 300
";

    #[test]
    fn free_pages_include_all_zones_and_per_cpu_lists() {
        let (_folder, root) = fake(ZONES);
        let page = rustix::param::page_size() as u64;
        assert_eq!(free(&root).unwrap(), Bytes(1327 * page));
        assert!(free(&Root::host()).unwrap() > Bytes(1 << 20));
    }

    #[test]
    fn memory_is_free_within_one_percent() {
        let (folder, root) = fake(ZONES);
        let page = rustix::param::page_size() as u64;
        let zones =
            |left: u64| ZONES.replace("nr_free_pages 300", &format!("nr_free_pages {left}"));
        std::fs::write(folder.path().join("proc/zoneinfo"), zones(500_000)).unwrap();
        let watch = FreeWatch::new(&root, Bytes(500_000 * page)).unwrap();
        let now = Instant::now();
        for (left, back) in [(1_000_000, true), (995_000, true), (994_999, false)] {
            let zones = zones(left);
            std::fs::write(folder.path().join("proc/zoneinfo"), zones).unwrap();
            assert_eq!(watch.check(now).unwrap().is_none(), back, "{left}");
        }
        let long_ago = now.checked_sub(FREE_TIMEOUT * 2).unwrap();
        assert!(matches!(watch.check(long_ago), Err(Error::NotBack(_))));
    }
}
