//! The processes of a host by the memory that can be huge: [`Tasks`].

use std::cmp::Reverse;

use serde::Serialize;

use crate::kernel::process::ProcessState;
use crate::kernel::smaps::Smaps;
use crate::kernel::{FileError, Root, aside, base_page, task};
use crate::policy::Reach;
use crate::policy::elf::{Executable, Machine};
use crate::units::Bytes;

use super::library::LIBRARY;
use super::{Missing, Sibling, siblings};

/// Summary of one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Task {
    /// Process ID.
    pub pid: u32,
    /// Name as in ps(1).
    pub name: String,
    /// Command line, quoted for a shell.
    pub command: String,
    /// Memory by kind.
    #[serde(flatten)]
    pub memory: task::Memory,
    /// Memory mapped by PMD; `None` without permission.
    pub huge: Option<Huge>,
    /// True where `jumbo bench` or `jumbo compare` measures it. Set only for listed tasks.
    pub measured: bool,
    /// True where it maps the preload library. Set only for readable ones of the largest tasks.
    pub covered: bool,
    /// Reason why LD_PRELOAD does not reach it; `None` where it does, or unknown. Set only for
    /// listed tasks.
    pub unreached: Option<String>,
    /// Age in seconds; `None` where unknown.
    pub age: Option<f64>,
}

/// Memory of a process mapped by PMD.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Huge {
    /// Anonymous memory.
    pub anon: Bytes,
    /// Shared memory.
    pub shmem: Bytes,
    /// File mappings.
    pub file: Bytes,
}

/// The largest processes, and the holders of hugetlb pages.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Tasks {
    /// Processes with the most memory that can be huge, largest first.
    pub largest: Vec<Task>,
    /// Processes with hugetlb pages, largest first.
    pub pool_holders: Vec<Task>,
    /// Hugetlb pages of all processes, counted for each process that maps them.
    pub hugetlb: Bytes,
    /// Number of processes with memory.
    pub count: usize,
    /// Processes with PR_SET_THP_DISABLE, largest first.
    pub thp_disabled: Vec<Task>,
    /// Reapers of living programs. No other field counts them, because their memory is the
    /// program's.
    pub siblings: Vec<Sibling>,
    /// Unavailable data with reasons.
    pub missing: Vec<Missing>,
}

impl Task {
    /// Memory that can be huge, including hugetlb.
    pub fn candidate(&self) -> Bytes {
        self.memory.anon + self.memory.shmem + self.memory.hugetlb
    }

    /// Anonymous memory that is not mapped by PMD; `None` where unknown.
    pub fn small_anon(&self) -> Option<Bytes> {
        let huge = self.huge?.anon.0;
        Some(Bytes(self.memory.anon.0.saturating_sub(huge)))
    }

    /// Shared memory that is not mapped by PMD; `None` where unknown.
    pub fn small_shmem(&self) -> Option<Bytes> {
        let huge = self.huge?.shmem.0;
        Some(Bytes(self.memory.shmem.0.saturating_sub(huge)))
    }
}

impl Huge {
    /// Reads smaps_rollup, which walks the page tables of the process.
    fn of_each(root: &Root, pids: &[u32]) -> Vec<Result<Self, FileError>> {
        let sum = |rollup: Smaps| {
            let sums = rollup.mappings().next();
            sums.map_or_else(Self::default, |sums| Self {
                anon: sums.anon_huge_pages,
                shmem: sums.shmem_pmd_mapped,
                file: sums.file_pmd_mapped,
            })
        };
        let rollups = aside::texts(root, pids, "smaps_rollup").into_iter();
        rollups.map(|text| text.map(Smaps::of).map(sum)).collect()
    }
}

impl Tasks {
    /// Reads every process, and the details of the `top` largest. Omits processes that end
    /// meanwhile.
    pub fn read(root: &Root, top: usize) -> Self {
        let mut tasks = Self::default();
        let pids =
            Missing::or_default(task::all(root), "processes", &mut tasks.missing).into_iter();
        let mut all: Vec<_> = pids.filter_map(|pid| brief(root, pid)).collect();
        tasks.siblings = siblings_among(root, &all);
        all.retain(|task| !tasks.siblings.iter().any(|sibling| sibling.pid == task.pid));
        tasks.count = all.len();
        tasks.hugetlb = all.iter().map(|task| task.memory.hugetlb).sum();
        all.sort_by_key(|task| Reverse(task.memory.hugetlb));
        let holds = |task: &&Task| task.memory.hugetlb > Bytes(0);
        tasks.pool_holders = all.iter().filter(holds).take(top).cloned().collect();

        all.sort_by_key(|task| Reverse(task.candidate()));
        let disabled = |task: &&Task| task.memory.thp_enabled == Some(false);
        tasks.thp_disabled = all.iter().filter(disabled).take(top).cloned().collect();
        all.truncate(top);
        let pids: Vec<_> = all.iter().map(|task| task.pid).collect();
        let mut refused = Vec::new();
        for (task, huge) in all.iter_mut().zip(Huge::of_each(root, &pids)) {
            match huge {
                Ok(huge) => task.huge = Some(huge),
                Err(error) if error.is_denied() => refused.push(error),
                Err(error) if error.is_missing() => {}
                Err(error) => {
                    let what = format!("huge memory of process {}", task.pid);
                    tasks.missing.push(Missing::new(what, &error));
                }
            }
        }
        if let Some(error) = refused.first() {
            let what = format!("huge memory of {} of the largest processes", refused.len());
            let missing = Missing::for_lack_of(what, error, "their user, or CAP_SYS_PTRACE");
            tasks.missing.push(missing);
        }
        tasks.largest = all;
        // Only listed tasks: the kernel reads a command line from the process's memory.
        for list in [
            &mut tasks.largest,
            &mut tasks.pool_holders,
            &mut tasks.thp_disabled,
        ] {
            let pids: Vec<_> = list.iter().map(|task| task.pid).collect();
            let details = task::commands(root, &pids).into_iter();
            let details = details.zip(unreached(root, &pids));
            for (task, (command, unreached)) in list.iter_mut().zip(details) {
                task.command = command;
                task.measured = is_measured(root, task.pid);
                task.unreached = unreached;
            }
        }
        let covered = task::map_each(root, &pids, LIBRARY);
        for (task, covered) in tasks.largest.iter_mut().zip(covered) {
            task.covered = covered;
        }
        tasks
    }
}

/// The reapers among `tasks`. The name excludes nearly all tasks without further reads.
fn siblings_among(root: &Root, tasks: &[Task]) -> Vec<Sibling> {
    let pids = || tasks.iter().map(|task| task.pid);
    let named = tasks.iter().filter(|task| siblings::is_name(&task.name));
    named
        .filter_map(|task| siblings::program_of(root, task.pid, pids()))
        .collect()
}

/// Reports whether `jumbo bench` or `jumbo compare` is an ancestor of `pid`.
fn is_measured(root: &Root, mut pid: u32) -> bool {
    // Bounded, because reused PIDs may form a cycle.
    const MAX_ANCESTORS: usize = 64;
    for _ in 0..MAX_ANCESTORS {
        let Ok(ProcessState { parent, .. }) = ProcessState::read(root, pid) else {
            return false;
        };
        let measures = || {
            let arguments = task::arguments(root, parent).unwrap_or_default();
            let command = arguments.get(1).map(String::as_str);
            matches!(command, Some("bench" | "compare"))
        };
        if parent > 1 && task::name(root, parent).is_ok_and(|name| name == "jumbo") && measures() {
            return true;
        }
        pid = parent;
    }
    false
}

/// Bytes of an executable that are read: the headers that tell how it is loaded are at its start.
const HEADERS_BYTES: usize = 64 << 10;

/// Reason why LD_PRELOAD does not reach the program of each process; `None` where it does, or
/// unreadable.
fn unreached(root: &Root, pids: &[u32]) -> Vec<Option<String>> {
    if let Some(reach) = Reach::on_base_pages(base_page(root)) {
        return vec![reach.reason(); pids.len()];
    }
    // The C library of a static program is irrelevant here.
    let reason = |bytes: Vec<u8>| {
        let executable = Executable::read(&bytes[..]).ok()?;
        Reach::of(Ok(&executable), Machine::OWN, None).reason()
    };
    let executables = aside::executables(root, pids, HEADERS_BYTES).into_iter();
    executables.map(|read| reason(read.ok()?)).collect()
}

fn brief(root: &Root, pid: u32) -> Option<Task> {
    let memory = task::memory(root, pid).ok()??;
    Some(Task {
        pid,
        name: task::name(root, pid).ok()?,
        memory,
        age: task::age(root, pid),
        ..Task::default()
    })
}
