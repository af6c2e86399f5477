//! All processes that the preload library is in, with what it counted there: [`Census`].
//!
//! It is cheap, so that it can be taken every few seconds on a host with hundreds of them. No page table is walked (smaps):
//! the kernel's counters and the library's own have to do. And a few children (`aside`) read the files that a process can hold
//! back, of all processes: no process has a child of its own.

use jumbo_inside::ledger::Counts;

use crate::kernel::groups::Workload;
use crate::kernel::smaps::Smaps;
use crate::kernel::{FileError, Root, aside, task};

use super::covered::{counts_of_each, is_in};
use super::library::LIBRARY;
use super::siblings;

/// Processes that are read together: their mappings are in memory at once, and each process decides on their length.
const TOGETHER: usize = 16;

/// A process that the library is in.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its name, as ps(1) shows it.
    pub name: String,
    /// The unit, pod and container that it belongs to.
    pub workload: Workload,
    /// Its memory by kind.
    pub memory: task::Memory,
    /// The library's counters.
    pub counts: Counts,
}

/// The processes of a host that the library is in.
#[derive(Clone, Debug, Default)]
pub struct Census {
    /// Those that could be read, by PID. Reapers are none: their memory is their programs'.
    pub members: Vec<Member>,
    /// Processes that this user may not look into, whether the library is in them or not.
    pub denied: usize,
    /// Processes that held their mappings or memory back, or whose mappings are too long to be read.
    pub held_back: usize,
    /// Processes with a library of another version, or of another place.
    pub other: usize,
}

impl Census {
    /// Looks at every process.
    ///
    /// # Errors
    /// [`FileError`] where /proc cannot be listed.
    pub fn take(root: &Root) -> Result<Self, FileError> {
        let mut census = Self::default();
        for pids in task::all(root)?.chunks(TOGETHER) {
            census.add(root, pids);
        }
        Ok(census)
    }

    fn add(&mut self, root: &Root, pids: &[u32]) {
        let mut covered = Vec::new();
        for (pid, text) in pids.iter().zip(aside::texts(root, pids, "maps")) {
            match text {
                // Few have the name in them: the others are not looked at by line.
                Ok(text) if text.contains(LIBRARY) => covered.push((*pid, Smaps::of(text))),
                Ok(_) => {}
                Err(error) => self.miss(&error),
            }
        }
        covered.retain(|(_, maps)| is_in(maps));
        let maps: Vec<_> = covered.iter().map(|(pid, maps)| (*pid, maps)).collect();
        for ((pid, _), counts) in maps.iter().zip(counts_of_each(root, &maps)) {
            match counts {
                // One that ends meanwhile is left out.
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
            // It has ended.
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
