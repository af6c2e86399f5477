//! All processes with the preload library, and its counters there: [`Census`].
//!
//! It is cheap enough to run every few seconds on a host with hundreds of them. It walks no page
//! tables (smaps), and uses the counters of the kernel and the library. A few children (`aside`)
//! read the files of all processes whose read can block.

use jumbo_inside::ledger::Counts;

use crate::kernel::groups::Workload;
use crate::kernel::smaps::Smaps;
use crate::kernel::{FileError, Root, aside, task};

use super::covered::{counts_of_each, is_in};
use super::library::LIBRARY;
use super::siblings;

/// Number of processes whose mappings are in memory at once. Each process decides on their length.
const BATCH_PROCESSES: usize = 16;

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
    /// Number of processes with a library of another version, or at another path.
    pub other: usize,
}

impl Census {
    /// Reads all processes.
    pub fn take(root: &Root) -> Result<Self, FileError> {
        let mut census = Self::default();
        for pids in task::all(root)?.chunks(BATCH_PROCESSES) {
            census.add(root, pids);
        }
        Ok(census)
    }

    fn add(&mut self, root: &Root, pids: &[u32]) {
        let mut covered = Vec::new();
        for (pid, text) in pids.iter().zip(aside::texts(root, pids, "maps")) {
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
            FileError::Content { .. } => self.other += 1,
            // The process ended.
            _ => {}
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
        memory,
        counts,
    })
}
