//! `jumbo promote`: huge pages for processes that run already.
//!
//! The command line, the processes that it names, and the rounds of `--follow` are here. [`show`]:
//! the results. [`watch`]: signals and progress. [`attend`]: `jumbo run` starts it for a program that its
//! library does not reach.

mod attend;
mod show;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use jumbo::units::Bytes;
use jumbo_host::kernel::{Root, cgroup, task};
use jumbo_host::promote::{
    Access, Outcome, Pace, PromotePlan, Refusal, Selection, Split, Target, promote, split,
};
use jumbo_host::status;
use jumbo_inside::orders::MaxWaste;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::knobs::EXIT_PARTIAL;
use crate::signal::end_by;
pub(crate) use attend::{Promoted, attend};
use watch::Watch;

/// Put processes that run already on huge pages
///
/// The kernel collapses the memory of a process into huge pages while it runs, in blocks that are
/// at least half full. Nothing of the process changes but where its memory lies. Without --heap,
/// --text and --shm it is the heap.
///
/// As root (CAP_SYS_NICE and CAP_SYS_PTRACE) by process_madvise. Else, where this user may trace the
/// process (ptrace), a thread of it makes the call: it is stopped for about a millisecond each time,
/// and no system call of it ends early. It is not done to a process under seccomp.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo promote --dry-run redis-server
  jumbo promote --rate 256M --shm --heap 4711
  jumbo promote --follow --cgroup system.slice/api.service
  jumbo promote --undo 4711

Exit status: 0 all that was planned is huge; 3 a part; 1 nothing, or no such process; 2 wrong usage; \
128+N signal N ended it, and what is huge stays so.")]
pub(crate) struct Args {
    /// Private memory: heap, bss, thread stacks
    #[arg(long)]
    heap: bool,

    /// Program text, where the kernel collapses it (CONFIG_READ_ONLY_THP_FOR_FS)
    #[arg(long)]
    text: bool,

    /// Shared memory
    #[arg(long)]
    shm: bool,

    /// Go on as the processes grow, with 5 % of a CPU at most; ends with them, or by Ctrl-C
    #[arg(long, conflicts_with_all = ["undo", "dry_run"])]
    follow: bool,

    /// Memory to collapse a second; 0: as fast as it goes
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "256M",
        conflicts_with = "undo",
        allow_hyphen_values = true
    )]
    rate: Bytes,

    /// From the start of the process, for `jumbo run`
    #[arg(long, hide = true, requires = "follow")]
    from_start: bool,

    /// The memory that blocks may be filled up with, in percent of the resident memory (16M at least; 0: none)
    /// or `unbounded`
    #[arg(long, value_name = "PERCENT", default_value_t = MaxWaste::DEFAULT, conflicts_with = "undo",
        allow_negative_numbers = true)]
    max_waste: MaxWaste,

    /// Split all that is huge in the processes, whatever made it so
    #[arg(long)]
    undo: bool,

    /// Print the plan and change nothing
    #[arg(long)]
    dry_run: bool,

    /// Print JSON; with --follow a line a round
    #[arg(long)]
    json: bool,

    /// The processes of a control group and of the groups in it: a folder, or a path as in /proc/PID/cgroup
    #[arg(long, value_name = "PATH")]
    cgroup: Vec<PathBuf>,

    /// The processes; a name can match several
    #[arg(value_name = "PID|NAME", required_unless_present = "cgroup")]
    processes: Vec<String>,
}

/// The JSON.
#[derive(Default, Serialize)]
struct PromotePage {
    dry_run: bool,
    processes: Vec<ProcessResult>,
}

/// The result of one process.
#[derive(Default, Serialize)]
struct ProcessResult {
    pid: u32,
    name: String,
    /// Why nothing was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'static str>,
    /// The method.
    #[serde(skip_serializing_if = "Option::is_none")]
    reach: Option<Access>,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<PromotePlan>,
    /// The result of the plan; none of a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<Outcome>,
    /// The result of `--undo`.
    #[serde(skip_serializing_if = "Option::is_none")]
    split: Option<Split>,
    /// It ended while it was named, and looked for: one of many need not be there.
    #[serde(skip)]
    gone: bool,
}

/// A process that the command line names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Named {
    pid: u32,
    /// The moment of its start, so that no other is taken for it; `None`: it is gone.
    started: Option<u64>,
}

/// The processes of the PIDs that the command line has, as they were at first.
type Typed = BTreeMap<u32, Option<u64>>;

impl Args {
    fn wish(&self) -> Selection {
        let all_but_named = !(self.heap || self.text || self.shm);
        Selection {
            heap: self.heap || all_but_named,
            text: self.text || self.undo && all_but_named,
            shm: self.shm || self.undo && all_but_named,
            max_waste: self.max_waste,
        }
    }
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    let root = Root::host();
    let mut typed = Typed::new();
    let all = named(&root, &args, &mut typed)?;
    if let (true, [process]) = (args.from_start, all.as_slice()) {
        return attend(process.pid, args.max_waste).map(|()| ExitCode::SUCCESS);
    }
    let mut watch = Watch::new().context("cannot read signals from a descriptor")?;
    if args.follow {
        return follow(&root, &args, watch, &mut typed);
    }
    let mut page = PromotePage {
        dry_run: args.dry_run,
        ..PromotePage::default()
    };
    let alone = all.len() == 1;
    for process in all {
        let done = one(&root, process, &args, Bytes(0), &mut watch);
        if alone || !done.gone || typed.contains_key(&done.pid) {
            page.processes.push(done);
        }
        if watch.ended_by().is_some() {
            break;
        }
    }
    let ended_by = watch.finish();
    show::page(&page, args.json)?;
    Ok(match ended_by {
        Some(signal) => end_by(signal),
        None => status_of(&page),
    })
}

/// The processes that the command line names. Of several that a name or a group has, this one is none.
fn named(root: &Root, args: &Args, typed: &mut Typed) -> anyhow::Result<Vec<Named>> {
    let own = std::process::id();
    let of = |pid| Named {
        pid,
        started: task::started(root, pid).ok(),
    };
    let mut all = Vec::new();
    for text in &args.processes {
        let found = status::find(root, text)?;
        let is_number = text.parse::<u32>().is_ok();
        let found: Vec<_> = found
            .into_iter()
            .filter(|pid| is_number || *pid != own)
            .collect();
        if found.is_empty() && !is_number {
            bail!(
                "no process is `{text}`, neither by PID nor by name\n\
                 hint: names are those of `ps -e`, whole: `jumbo status` lists the largest processes"
            );
        }
        // A thread has a number and is no process: say so. A PID that another process has by now is none.
        if let Ok(pid) = text.parse() {
            let now = of(pid);
            let is_it = *typed.entry(pid).or_insert(now.started) == now.started;
            all.extend(is_it.then_some(now));
        } else {
            all.extend(found.into_iter().map(of));
        }
    }
    for path in &args.cgroup {
        let members = cgroup::members(root, path);
        let members = members.with_context(|| format!("no control group is {}", path.display()))?;
        all.extend(members.into_iter().filter(|pid| *pid != own).map(of));
    }
    all.sort_unstable();
    all.dedup();
    if all.is_empty() {
        bail!("no process is in that control group");
    }
    Ok(all)
}

/// Plans for one process, and does it.
fn one(root: &Root, process: Named, args: &Args, spent: Bytes, watch: &mut Watch) -> ProcessResult {
    let mut done = ProcessResult {
        pid: process.pid,
        ..ProcessResult::default()
    };
    if let Err(refusal) = work(root, process, args, spent, watch, &mut done) {
        done.gone = matches!(refusal, Refusal::Gone | Refusal::Zombie { .. });
        done.hint = refusal.hint();
        done.refusal = Some(refusal.to_string());
    }
    done
}

fn work(
    root: &Root,
    process: Named,
    args: &Args,
    spent: Bytes,
    watch: &mut Watch,
    done: &mut ProcessResult,
) -> Result<(), Refusal> {
    let target = Target::open(root, process.pid)?;
    // Since it was named it may have ended, and another may have got its PID.
    if task::started(root, process.pid).ok() != process.started {
        return Err(Refusal::Gone);
    }
    done.name = target.name().to_owned();
    let wish = args.wish();
    watch.begin(&target);
    if args.undo {
        let reach = done.reach.insert(Access::find(&target)?);
        done.split = Some(split(&target, reach, &wish, args.dry_run, watch)?);
        return Ok(());
    }
    let plan = done.plan.insert(PromotePlan::new(&target, &wish, spent)?);
    // After the plan: what it needs to see is less than what it takes to do it.
    let reach = done.reach.insert(Access::find(&target)?);
    if !args.dry_run {
        let mut pace = Pace::new(&target, Some(args.rate));
        done.outcome = Some(promote(&target, reach, plan, &mut pace, watch));
    }
    Ok(())
}

/// The share of a CPU that `--follow` takes is one part of so many.
const CPU_DIVISOR: u32 = 20;
/// Between two rounds.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
const MAX_INTERVAL: Duration = Duration::from_secs(10);

/// Rounds until all processes have ended, or a signal comes.
fn follow(
    root: &Root,
    args: &Args,
    mut watch: Watch,
    typed: &mut Typed,
) -> anyhow::Result<ExitCode> {
    let mut spent: BTreeMap<Named, Bytes> = BTreeMap::new();
    let (mut refused, mut interval) = (BTreeSet::new(), MIN_INTERVAL);
    let mut any = false;
    loop {
        let began = cpu_time(root);
        // New ones have come, and others have gone.
        let Ok(all) = named(root, args, typed) else {
            break;
        };
        let mut page = PromotePage::default();
        let (mut is_any_left, mut has_grown) = (false, false);
        for process in all.iter().copied() {
            let before = spent.get(&process).copied().unwrap_or_default();
            let done = one(root, process, args, before, &mut watch);
            is_any_left |= done.refusal.is_none();
            any |= done.refusal.is_none();
            if let Some(outcome) = &done.outcome {
                *spent.entry(process).or_default() += outcome.cost;
                has_grown |= outcome.obtained > Bytes(0);
            }
            let is_news = done
                .outcome
                .as_ref()
                .is_some_and(|outcome| outcome.planned > Bytes(0));
            let is_told = !done.gone || process.started.is_none();
            if is_news || done.refusal.is_some() && is_told && refused.insert(process) {
                page.processes.push(done);
            }
            if watch.ended_by().is_some() {
                break;
            }
        }
        show::round(&page, args.json)?;
        if !is_any_left || watch.ended_by().is_some() {
            break;
        }
        interval = if has_grown {
            MIN_INTERVAL
        } else {
            (interval * 2).min(MAX_INTERVAL)
        };
        let share = (cpu_time(root).saturating_sub(began)) * (CPU_DIVISOR - 1);
        watch.rest(interval.max(share), || {
            all.iter().any(|process| lives(root, *process))
        });
    }
    match watch.finish() {
        Some(signal) => Ok(end_by(signal)),
        None if any => Ok(ExitCode::SUCCESS),
        None => Ok(ExitCode::FAILURE),
    }
}

/// Whether a process has memory still.
fn lives(root: &Root, process: Named) -> bool {
    task::started(root, process.pid).ok() == process.started
        && task::memory(root, process.pid).is_ok_and(|memory| memory.is_some())
}

/// The CPU time of this process and of its children so far.
fn cpu_time(root: &Root) -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let children = task::children_cpu(root, std::process::id());
    Duration::try_from(time).unwrap_or_default() + children.unwrap_or_default()
}

fn status_of(page: &PromotePage) -> ExitCode {
    // Whether all of it was done, and whether any.
    let done = |done: &ProcessResult| match (&done.outcome, &done.split) {
        _ if done.refusal.is_some() => [false; 2],
        (Some(outcome), _) => [outcome.is_whole(), outcome.obtained > Bytes(0)],
        (_, Some(split)) => [split.left.is_none(), split.after < split.before],
        _ => [true; 2],
    };
    let is_whole = |it: &ProcessResult| done(it)[0];
    let is_any = |it: &ProcessResult| done(it).contains(&true);
    match () {
        // All that a group or a name had have ended.
        () if page.processes.is_empty() => ExitCode::FAILURE,
        () if page.processes.iter().all(is_whole) => ExitCode::SUCCESS,
        () if page.processes.iter().any(is_any) => ExitCode::from(EXIT_PARTIAL),
        () => ExitCode::FAILURE,
    }
}
