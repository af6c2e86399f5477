//! All processes with the preload library, and its counters there: [`Census`].
//!
//! It is cheap enough to run every few seconds on a host with hundreds of them. It walks no page
//! tables (smaps), and uses the counters of the kernel and the library. A few children (`aside`)
//! read the files of all processes whose read can block.

use std::time::{Duration, Instant};

use jumbo_inside::ledger::Counts;

use crate::kernel::groups::Workload;
use crate::kernel::smaps::Smaps;
use crate::kernel::{FileError, Root, aside, task};

use super::covered::{counts_of_each, is_in, within};
use super::library::LIBRARY;
use super::siblings;

/// Number of processes whose mappings are in memory at once. Each process decides on their length.
const BATCH_PROCESSES: usize = 16;
/// Maximum length of the mappings of a process: some 40,000.
const MAX_MAPS_BYTES: usize = 4 << 20;
/// Maximum length of the mappings of all processes.
const MAX_TOTAL_BYTES: usize = 64 << 20;
/// Maximum time. A process that holds its mappings back costs up to a second more.
const MAX_TIME: Duration = Duration::from_secs(2);

/// A process with the library.
#[derive(Clone, Debug)]
pub struct Member {
    /// Name as in ps(1).
    pub name: String,
    /// Unit, pod and container of the process.
    pub workload: Workload,
    /// Memory by kind.
    pub memory: task::Memory,
    /// Counters of the library.
    pub counts: Counts,
}

/// The processes of a host with the library.
#[derive(Clone, Debug, Default)]
pub struct Census {
    /// Readable processes by PID, without reapers, whose memory is that of their programs.
    pub members: Vec<Member>,
    /// Number of processes that this user may not read, with or without the library.
    pub denied: usize,
    /// Number of processes that held mappings or memory back, or have too many mappings.
    pub held_back: usize,
    /// Number of processes that were not read, because the others took the time or the memory.
    pub left_out: usize,
    /// Number of processes with a library of another version, or at another path.
    pub other: usize,
}

impl Census {
    /// Reads all processes, in a bounded time and memory.
    pub fn take(root: &Root) -> Result<Self, FileError> {
        let budget = aside::Budget {
            each: MAX_MAPS_BYTES,
            bytes: MAX_TOTAL_BYTES,
            until: Some(Instant::now() + MAX_TIME),
        };
        Self::within(root, budget)
    }

    fn within(root: &Root, mut budget: aside::Budget) -> Result<Self, FileError> {
        let mut census = Self::default();
        for pids in task::all(root)?.chunks(BATCH_PROCESSES) {
            census.add(root, pids, &mut budget);
        }
        Ok(census)
    }

    fn add(&mut self, root: &Root, pids: &[u32], budget: &mut aside::Budget) {
        let mut covered = Vec::new();
        let texts = aside::texts_within(root, pids, "maps", budget);
        for (pid, text) in pids.iter().zip(texts) {
            match text {
                // Few texts contain the name. The others need not be parsed.
                Ok(text) if text.contains(LIBRARY) => covered.push((*pid, Smaps::of(text))),
                Ok(_) => {}
                Err(error) => self.miss(&error),
            }
        }
        covered.retain(|(_, maps)| is_in(maps));
        let maps: Vec<_> = covered.iter().map(|(pid, maps)| (*pid, maps)).collect();
        for ((pid, _), counts) in maps.iter().zip(counts_of_each(root, &maps)) {
            match counts {
                // A process that ended meanwhile is omitted.
                Ok(counts) => self.members.extend(member(root, *pid, counts)),
                Err(error) => self.miss(&error),
            }
        }
    }

    fn miss(&mut self, error: &FileError) {
        match error {
            error if error.is_denied() => self.denied += 1,
            error if error.is_held_back() => self.held_back += 1,
            error if error.is_beyond_budget() => self.left_out += 1,
            error if error.is_missing() => {}
            _ => self.other += 1,
        }
    }
}

fn member(root: &Root, pid: u32, counts: Counts) -> Option<Member> {
    let (name, memory) = task::named_memory(root, pid).ok()??;
    if siblings::is_name(&name) {
        return None;
    }
    Some(Member {
        workload: Workload::of_process(root, pid).ok()?,
        name,
        counts: within(counts, &memory),
        memory,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_kept_and_what_it_leaves_out_is_counted() {
        let line = "1000-2000 r--p 00000000 00:00 0 \n";
        let (long, longer) = (line.repeat(100), line.repeat(200));
        let files = ["proc/1/maps", "proc/2/maps", "proc/3/maps"];
        let files = files.map(|file| (file, &*long));
        let all = [
            ("proc/4/maps", &*longer),
            ("proc/5/maps", ""),
            files[0],
            files[1],
            files[2],
        ];
        let (_folder, root) = crate::kernel::fake::host(&all);
        let left_out = |bytes, time| {
            let until = Some(Instant::now() + Duration::from_secs(time));
            let each = 150 * line.len();
            let census = Census::within(&root, aside::Budget { each, bytes, until }).unwrap();
            (census.left_out, census.held_back)
        };
        assert_eq!(left_out(usize::MAX, 60), (0, 1));
        // Two of the files of 1, 2 and 3 fit, and nothing is read after that.
        assert_eq!(left_out(250 * line.len(), 60), (3, 0));
        assert_eq!(left_out(usize::MAX, 0), (5, 0));
    }

    /// The program can write any value.
    #[test]
    fn counters_are_bounded_by_the_kernel_s_figures() {
        let mut counts = Counts::default();
        (counts.huge, counts.untouched, counts.pool_hugetlb) = (1 << 56, 1 << 56, 1 << 56);
        (counts.free_pending, counts.large_live) = (5, 1 << 56);
        let memory = task::Memory {
            size: crate::units::Bytes(30),
            anon: crate::units::Bytes(20),
            ..task::Memory::default()
        };
        let counts = within(counts, &memory);
        assert_eq!(
            (counts.huge, counts.untouched, counts.pool_hugetlb),
            (20, 20, 0)
        );
        assert_eq!((counts.free_pending, counts.large_live), (5, 30));
    }
}
