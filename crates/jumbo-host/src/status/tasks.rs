//! The processes of a host by the memory that could be huge: [`Tasks`].

use std::cmp::Reverse;

use object::read::ReadCache;
use serde::Serialize;

use crate::kernel::process::Standing;
use crate::kernel::{FileError, Root, aside, base_page, task};
use crate::policy::Reach;
use crate::policy::elf::Executable;
use crate::units::Bytes;

use super::library::LIBRARY;
use super::{Missing, Sibling, siblings};

/// One process, in short.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Task {
    /// The process.
    pub pid: u32,
    /// Its name, as ps(1) shows it.
    pub name: String,
    /// Its command line, quoted as for a shell.
    pub command: String,
    /// Its memory by kind.
    #[serde(flatten)]
    pub memory: task::Memory,
    /// How much of that is mapped by PMD; `None` where this user may not look.
    pub huge: Option<Huge>,
    /// `jumbo bench` or `jumbo compare` has started it, to measure it. Known of tasks that are listed.
    pub measured: bool,
    /// The preload library is in it. Known of the largest tasks, of those that this user may look into.
    pub covered: bool,
    /// The reason why LD_PRELOAD does not get into it; `None` where it does, or that is not known. Known of the largest tasks, and
    /// of those with THP switched off.
    pub unreached: Option<String>,
    /// Its age in seconds; `None` where that is not known.
    pub age: Option<f64>,
}

/// What a process maps by PMD.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Huge {
    /// Of anonymous memory.
    pub anon: Bytes,
    /// Of shared memory.
    pub shmem: Bytes,
    /// Of file mappings.
    pub file: Bytes,
}

/// The largest processes, and who holds hugetlb pages.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Tasks {
    /// The processes with the most memory of a kind that can be huge, largest first.
    pub largest: Vec<Task>,
    /// Those with hugetlb pages, largest first.
    pub pool_holders: Vec<Task>,
    /// hugetlb pages of all processes together, those that several map counted for each.
    pub hugetlb: Bytes,
    /// How many processes with memory there are.
    pub count: usize,
    /// Those that have THP switched off by PR_SET_THP_DISABLE.
    pub thp_disabled: Vec<Task>,
    /// Reapers of programs that live, which no other field counts: their memory is the program's.
    pub siblings: Vec<Sibling>,
    /// What is not shown, and why.
    pub missing: Vec<Missing>,
}

impl Task {
    /// Memory of a kind that can be huge, hugetlb included.
    pub fn candidate(&self) -> Bytes {
        self.memory.anon + self.memory.shmem + self.memory.hugetlb
    }

    /// Anonymous memory that is not mapped by PMD, where that is known.
    pub fn small_anon(&self) -> Option<Bytes> {
        let huge = self.huge?.anon.0;
        Some(Bytes(self.memory.anon.0.saturating_sub(huge)))
    }

    /// Shared memory that is not mapped by PMD, where that is known.
    pub fn small_shmem(&self) -> Option<Bytes> {
        let huge = self.huge?.shmem.0;
        Some(Bytes(self.memory.shmem.0.saturating_sub(huge)))
    }
}

impl Huge {
    /// All of it.
    pub fn total(&self) -> Bytes {
        self.anon + self.shmem + self.file
    }

    /// From smaps_rollup, which walks the page tables of the process.
    fn read(root: &Root, pid: u32) -> Result<Self, FileError> {
        let rollup = aside::rollup(root, pid)?;
        let sums = rollup.mappings().next();
        Ok(sums.map_or_else(Self::default, |sums| Self {
            anon: sums.anon_huge_pages,
            shmem: sums.shmem_pmd_mapped,
            file: sums.file_pmd_mapped,
        }))
    }
}

impl Tasks {
    /// Looks at every process, and closely at the `top` largest. Processes that end meanwhile are left
    /// out.
    pub fn read(root: &Root, top: usize) -> Self {
        let mut tasks = Self::default();
        let mut all = match task::all(root) {
            Ok(pids) => pids
                .into_iter()
                .filter_map(|pid| brief(root, pid))
                .collect::<Vec<_>>(),
            Err(error) => {
                tasks.missing.push(Missing::new("processes", &error));
                return tasks;
            }
        };
        tasks.siblings = siblings_among(root, &all);
        all.retain(|task| !tasks.siblings.iter().any(|sibling| sibling.pid == task.pid));
        tasks.count = all.len();
        let disabled = |task: &&Task| task.memory.thp_enabled == Some(false);
        tasks.thp_disabled = all.iter().filter(disabled).cloned().collect();

        tasks.hugetlb = all.iter().map(|task| task.memory.hugetlb).sum();
        all.sort_by_key(|task| Reverse(task.memory.hugetlb));
        let holds = |task: &&Task| task.memory.hugetlb > Bytes(0);
        tasks.pool_holders = all.iter().filter(holds).take(top).cloned().collect();

        all.sort_by_key(|task| Reverse(task.candidate()));
        all.truncate(top);
        let mut refused = Vec::new();
        for task in &mut all {
            match Huge::read(root, task.pid) {
                Ok(huge) => task.huge = Some(huge),
                Err(error) if error.is_denied() => refused.push(error),
                Err(error) if error.is_held_back() => {
                    let what = format!("what is huge in {}", task.pid);
                    tasks.missing.push(Missing::new(what, &error));
                }
                Err(_) => {}
            }
        }
        if let Some(error) = refused.first() {
            let what = format!("what is huge in {} of the largest processes", refused.len());
            let missing = Missing::for_lack_of(what, error, "their user, or CAP_SYS_PTRACE");
            tasks.missing.push(missing);
        }
        tasks.largest = all;
        // The kernel reads a command line out of the process's memory: only for those that are shown.
        for list in [
            &mut tasks.largest,
            &mut tasks.pool_holders,
            &mut tasks.thp_disabled,
        ] {
            for task in list {
                task.command = task::command(root, task.pid).unwrap_or_default();
                task.measured = is_measured(root, task.pid);
                task.unreached = unreached(root, task.pid);
            }
        }
        let pids: Vec<_> = tasks.largest.iter().map(|task| task.pid).collect();
        let covered = task::map_each(root, &pids, LIBRARY);
        for (task, covered) in tasks.largest.iter_mut().zip(covered) {
            task.covered = covered;
        }
        tasks
    }
}

/// The reapers among `tasks`; nearly always there are none by the name, and nothing more is read.
fn siblings_among(root: &Root, tasks: &[Task]) -> Vec<Sibling> {
    let pids = || tasks.iter().map(|task| task.pid);
    let named = tasks.iter().filter(|task| siblings::is_name(&task.name));
    named
        .filter_map(|task| siblings::program_of(root, task.pid, pids()))
        .collect()
}

/// Whether a process that measures has started `pid`, through whatever generations.
fn is_measured(root: &Root, mut pid: u32) -> bool {
    // What is read of processes that come and go may lead in a circle.
    for _ in 0..64 {
        let Ok(Standing { parent, .. }) = Standing::read(root, pid) else {
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

/// The reason why LD_PRELOAD does not get into the program that `pid` runs; what cannot be read is taken for one that it gets into.
fn unreached(root: &Root, pid: u32) -> Option<String> {
    if let Some(reach) = Reach::on_base_pages(base_page(root)) {
        return reach.reason();
    }
    let read = |path: String| {
        let file = std::fs::File::open(root.path(path)).ok()?;
        Executable::read(&ReadCache::new(file)).ok()
    };
    let executable = read(format!("proc/{pid}/exe"))?;
    let own = read("proc/self/exe".to_owned()).map_or(executable.machine, |own| own.machine);
    // Of a static program it does not matter here whose C library is linked into it.
    Reach::of(Ok(&executable), own, None, || true).reason()
}

fn brief(root: &Root, pid: u32) -> Option<Task> {
    let memory = task::memory(root, pid).ok()??;
    Some(Task {
        pid,
        name: task::name(root, pid).ok()?,
        command: String::new(),
        memory,
        huge: None,
        measured: false,
        covered: false,
        unreached: None,
        age: task::age(root, pid),
    })
}
