//! Rules about programs.

use std::collections::BTreeMap;

use super::{Cost, Finding, LARGE_BYTES, Snapshot, THP_FOLDER};
use crate::kernel::mounts::DEV_SHM;
use crate::kernel::task::quoted;
use crate::kernel::thp::Choice;
use crate::status::Task;
use crate::units::Bytes;

pub(super) fn rules(snapshot: &Snapshot) -> Vec<Finding> {
    let heaps = snapshot.tasks.largest.iter();
    let heaps = heaps.filter_map(small_heap);
    let disabled = snapshot.tasks.thp_disabled.iter().filter_map(disabled);
    heaps
        .chain(disabled)
        .chain(small_shared(snapshot))
        .chain(dev_shm(snapshot))
        .collect()
}

/// Name and PID. A process chooses its own name.
fn label(task: &Task) -> String {
    let name = task.name.replace(char::is_control, "\u{fffd}");
    format!("{name} ({})", task.pid)
}

/// Maximum length of a program's arguments in a hint.
const MAX_COMMAND_CHARS: usize = 60;

/// Command that starts a program, by `with`, as its user. Root may copy it into a shell, so it has one
/// line: arguments from the first long or strange one on are left out. The program stays, of any
/// length.
fn start(task: &Task, with: &str) -> String {
    let is_strange = |c: char| c.is_control() || c == '`';
    let words = shlex::split(&task.command).unwrap_or_default();
    // sudo(8) takes `NAME=VALUE` for a variable.
    let is_program = words.first().is_some_and(|word| !word.contains('='));
    let mut words = words
        .iter()
        .map(String::as_str)
        .filter(|_| is_program)
        .peekable();
    let mut shown = Vec::from_iter(words.next_if(|word| !word.contains(is_strange)));
    let mut left = MAX_COMMAND_CHARS;
    while let Some(word) = words.next_if(|word| word.len() < left && !word.contains(is_strange)) {
        left -= word.len() + 1;
        shown.push(word);
    }
    let more = if words.peek().is_some() { " ..." } else { "" };
    let user = match task.memory.uid {
        uid if [0, rustix::process::geteuid().as_raw()].contains(&uid) => String::new(),
        uid => format!("sudo -u '#{uid}' -- "),
    };
    format!("{user}{with}{}{more}", quoted(shown))
}

/// Reports whether a task is jumbo itself or measured by it. `jumbo bench` makes its own
/// conditions, and the memory of a waiting `jumbo run` is its program's.
fn is_jumbo(task: &Task) -> bool {
    task.name == "jumbo" || task.measured
}

/// Maximum age in seconds that a finding names: the program may end soon, or its memory still grows.
const YOUNG_SECONDS: f64 = 10.0;

/// Note on a program that has just started.
fn youth(task: &Task) -> String {
    let young = task.age.filter(|age| *age < YOUNG_SECONDS);
    young.map_or_else(String::new, |age| format!(", {age:.0} s after its start"))
}

/// Memory of the finding `small-heap` about a task; `None` without one.
pub(super) fn reported(task: &Task) -> Option<Bytes> {
    let is_candidate = !is_jumbo(task) && task.memory.thp_enabled != Some(false);
    task.small_anon()
        .filter(|small| *small >= LARGE_BYTES && is_candidate)
}

fn small_heap(task: &Task) -> Option<Finding> {
    let small = reported(task)?;
    Some(
        Finding::new(
            "small-heap",
            Cost::Slow(small),
            format!(
                "{} has {small} of anonymous memory on small pages{}",
                label(task),
                youth(task)
            ),
        )
        .process_evidence(task.pid, "status RssAnon", task.memory.anon)
        .process_evidence(
            task.pid,
            "smaps_rollup AnonHugePages",
            task.huge.map_or(Bytes(0), |huge| huge.anon),
        )
        .hint(match (task.covered, &task.unreached) {
            (true, _) => format!(
                "it runs under `jumbo run` already: `jumbo status -p {}` shows what keeps it small",
                task.pid
            ),
            (false, Some(reason)) => format!(
                "LD_PRELOAD does not reach it ({reason}): `jumbo promote {0}` puts its memory on huge pages from \
                 outside; `jumbo status -p {0}` shows what keeps it small",
                task.pid
            ),
            (false, None) => format!(
                "start it with `{}`, or `jumbo promote {1}` as it runs; `jumbo status -p {1}` shows \
                 what keeps it small",
                start(task, "jumbo run -- "),
                task.pid
            ),
        }),
    )
}

fn disabled(task: &Task) -> Option<Finding> {
    let small = task.memory.anon;
    (small >= LARGE_BYTES && !is_jumbo(task)).then(|| {
        let hint = if task.name == "redis-server" {
            "Redis does it to itself: put `disable-thp no` into its configuration, and start it again"
                .to_owned()
        } else {
            let (verb, with) = match task.unreached {
                Some(_) => ("start ", ""),
                None => ("", "jumbo run -- "),
            };
            format!(
                "it or a parent of it asked for that, and children inherit it: {verb}`{}` \
                 from a shell whose /proc/self/status says `THP_enabled: 1`; for a service of systemd 260 or \
                 later look at MemoryTHP=",
                start(task, with)
            )
        };
        Finding::new(
            "thp-disabled",
            Cost::Slow(small),
            format!("{} has THP switched off for itself (PR_SET_THP_DISABLE){}", label(task), youth(task)),
        )
        .process_evidence(task.pid, "status THP_enabled", 0)
        .process_evidence(task.pid, "status RssAnon", small)
        .hint(hint)
    })
}

/// A program with large shared memory on base pages, while shmem_enabled allows huge pages and
/// /dev/shm does not. The part of the memory that is in /dev/shm is unknown.
fn dev_shm(snapshot: &Snapshot) -> Option<Finding> {
    let host = &snapshot.host;
    let thp = host.thp.as_ref()?;
    let mut mounts = host.tmpfs.iter().filter(|mount| mount.path == DEV_SHM);
    let mount = mounts.next().filter(|mount| mount.huge == "never")?;
    let choice = thp.shared(thp.pmd_size)?;
    // With `never` the kernel gives shared memory no huge pages; `deny` and `force` overrule
    // mounts.
    let overruled = ["never", "deny", "force"]
        .iter()
        .any(|word| choice.is(word));
    let tasks = snapshot.tasks.largest.iter();
    let tasks = tasks.filter(|task| !is_jumbo(task));
    let small = tasks.map(|task| (task.small_shmem().unwrap_or(task.memory.shmem), task));
    let (small, task) = small.max_by_key(|(small, _)| *small)?;
    (small >= LARGE_BYTES && !overruled).then(|| {
        Finding::new(
            "dev-shm",
            Cost::Unknown,
            format!(
                "files of {DEV_SHM} (shm_open) stay on small pages, whatever shmem_enabled says; {} may have some",
                label(task)
            ),
        )
        .evidence(format!("/proc/self/mountinfo {DEV_SHM} huge"), &mount.huge)
        .evidence(format!("{THP_FOLDER}/shmem_enabled"), &choice.current)
        .process_evidence(task.pid, "status RssShmem", task.memory.shmem)
        .hint(format!("`mount -o remount,huge=within_size {DEV_SHM}`: files that are made from then on obey it"))
    })
}

/// Programs with large shared memory on base pages, while shmem_enabled allows only those.
/// Processes of one name mostly share the same memory, so the largest represents them.
fn small_shared(snapshot: &Snapshot) -> Vec<Finding> {
    let thp = snapshot.host.thp.as_ref();
    let shared = thp.and_then(|thp| Some((thp, thp.shared(thp.pmd_size)?)));
    let is_off = |choice: &Choice| choice.is("never") || choice.is("deny");
    let Some((thp, choice)) = shared.filter(|(_, choice)| is_off(choice)) else {
        return Vec::new();
    };
    let mut largest: BTreeMap<&str, (&Task, Bytes)> = BTreeMap::new();
    for task in snapshot.tasks.largest.iter().filter(|task| !is_jumbo(task)) {
        let small = task.small_shmem().unwrap_or(task.memory.shmem);
        let entry = largest.entry(&task.name).or_insert((task, small));
        if small > entry.1 {
            *entry = (task, small);
        }
    }
    let own = thp
        .sizes
        .get(&thp.pmd_size)
        .and_then(|control| control.shmem_enabled.as_ref());
    // The size's own knob applies unless it inherits, or the top-level knob is `deny`.
    let (knob, name) = match own {
        Some(own) if own.is("never") && !choice.is("deny") => (
            format!(
                "{THP_FOLDER}/hugepages-{}kB/shmem_enabled",
                thp.pmd_size.kib()
            ),
            format!("{}.shmem", thp.pmd_size),
        ),
        _ => (format!("{THP_FOLDER}/shmem_enabled"), "shmem".to_owned()),
    };
    largest
        .into_values()
        .filter(|(_, small)| *small >= LARGE_BYTES)
        .map(|(task, small)| {
            Finding::new(
                "small-shared",
                Cost::Slow(small),
                format!("{} has {small} of shared memory on small pages", label(task)),
            )
            .process_evidence(task.pid, "status RssShmem", task.memory.shmem)
            .evidence(knob.clone(), &choice.current)
            .hint(format!(
                "`jumbo thp set {name}=within_size`, then start {} again: memory that is there stays as it is",
                task.name
            ))
        })
        .collect()
}
