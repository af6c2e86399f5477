//! `jumbo promote`: huge pages for processes that run already.
//!
//! The command line, the processes that it names, and the rounds of `--follow` are here. [`show`]:
//! the results. [`watch`]: signals and progress. [`attend`]: for programs that the library of
//! `jumbo run` does not reach.

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
use crate::value::no_process;
use crate::view;
pub(crate) use attend::{Promoted, attend};
use watch::Watch;

/// Put processes that run already on huge pages
///
/// The kernel collapses the memory of a process into huge pages while it runs, in blocks that are
/// at least half full. Only the placement of its memory changes. Without --heap, --text, --files and
/// --shm it is the heap.
///
/// It calls process_madvise, as root (CAP_SYS_NICE, and CAP_SYS_PTRACE for processes of other
/// users). Without that privilege it does nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo promote --dry-run redis-server
  jumbo promote --rate 256M --shm --heap 4711
  jumbo promote --follow --cgroup system.slice/api.service
  jumbo promote --undo 4711

Exit status: 0 all that was planned is huge; 3 a part; 1 nothing, or no such process; 2 wrong usage; \
128+N signal N ended it; huge pages stay.")]
pub(crate) struct Args {
    /// Private memory: heap, bss, thread stacks
    #[arg(long)]
    heap: bool,

    /// Program text: with CONFIG_READ_ONLY_THP_FOR_FS, or from Linux 7.0 on if the file system has huge folios
    #[arg(long)]
    text: bool,

    /// Other files that it maps, such as weights or an index: as for --text
    #[arg(long)]
    files: bool,

    /// Shared memory
    #[arg(long)]
    shm: bool,

    /// Continue as the processes grow, with 5 % of a CPU at most; ends with them, or by Ctrl-C
    #[arg(long, conflicts_with_all = ["undo", "dry_run"])]
    follow: bool,

    /// Memory to collapse a second; 0: unlimited
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "256M",
        conflicts_with = "undo",
        allow_hyphen_values = true
    )]
    rate: Bytes,

    /// Promote from the start of the process, for `jumbo run`
    #[arg(long, hide = true, requires = "follow")]
    from_start: bool,

    /// Maximum memory added to blocks, in percent of the resident memory (16M at least; 0: none) or
    /// `unbounded`
    #[arg(long, value_name = "PERCENT", default_value_t = MaxWaste::DEFAULT, conflicts_with = "undo",
        allow_negative_numbers = true)]
    max_waste: MaxWaste,

    /// Split all huge pages of the processes, whatever made them
    #[arg(long)]
    undo: bool,

    /// Print the plan and change nothing
    #[arg(long)]
    dry_run: bool,

    /// Print JSON; with --follow a line a round
    #[arg(long)]
    json: bool,

    /// The processes of a control group and of the groups in it: a folder, or a path as in
    /// /proc/PID/cgroup
    #[arg(long, value_name = "PATH")]
    cgroup: Vec<PathBuf>,

    /// The processes; a name can match several
    #[arg(value_name = "PID|NAME", required_unless_present = "cgroup")]
    processes: Vec<String>,
}

#[derive(Default, Serialize)]
struct PromotePage {
    dry_run: bool,
    processes: Vec<ProcessResult>,
}

#[derive(Default, Serialize)]
struct ProcessResult {
    pid: u32,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reach: Option<Access>,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<PromotePlan>,
    /// In a dry run, the reason why nothing could be put on huge pages now.
    #[serde(skip_serializing_if = "Option::is_none")]
    obstacle: Option<String>,
    /// Result of the plan; `None` in a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<Outcome>,
    #[serde(skip_serializing_if = "Option::is_none")]
    split: Option<Split>,
    /// The process ended between its lookup and its plan: no failure for one of several.
    #[serde(skip)]
    gone: bool,
}

/// A process that the command line names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Named {
    pid: u32,
    /// Start time, so that a reused PID is detected; `None`: the process is gone.
    started: Option<u64>,
}

/// PIDs on the command line, with their first start times.
type TypedPids = BTreeMap<u32, Option<u64>>;

impl Args {
    fn wish(&self) -> Selection {
        let none_named = !(self.heap || self.text || self.files || self.shm);
        Selection {
            heap: self.heap || none_named,
            text: self.text || self.undo && none_named,
            // The kernel reads files in huge folios by itself.
            files: self.files,
            shm: self.shm || self.undo && none_named,
            max_waste: self.max_waste,
        }
    }
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    let root = Root::host();
    let mut typed = TypedPids::new();
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
        let done = promote_one(&root, process, &args, Bytes(0), &mut watch);
        if alone || !done.gone || typed.contains_key(&done.pid) {
            page.processes.push(done);
        }
        if watch.ended_by().is_some() {
            break;
        }
    }
    let ended_by = watch.finish();
    view::page(args.json, &page, show::show)?;
    Ok(match ended_by {
        Some(signal) => end_by(signal),
        None => status_of(&page),
    })
}

/// Finds the processes that the command line names. Names and groups do not match this process.
fn named(root: &Root, args: &Args, typed: &mut TypedPids) -> anyhow::Result<Vec<Named>> {
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
            return Err(no_process(text));
        }
        // A thread ID stays, for its own error. A reused PID is dropped.
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
        let is_program = |pid: &u32| *pid != own && !task::is_kernel(root, *pid);
        all.extend(members.into_iter().filter(is_program).map(of));
    }
    all.sort_unstable();
    all.dedup();
    if all.is_empty() {
        bail!("no process is in that control group");
    }
    Ok(all)
}

/// Plans and executes the promotion of one process.
fn promote_one(
    root: &Root,
    process: Named,
    args: &Args,
    spent: Bytes,
    watch: &mut Watch,
) -> ProcessResult {
    let mut done = ProcessResult {
        pid: process.pid,
        ..ProcessResult::default()
    };
    if let Err(refusal) = try_promote(root, process, args, spent, watch, &mut done) {
        done.gone = matches!(refusal, Refusal::Gone | Refusal::Zombie { .. });
        done.hint = refusal.hint();
        done.refusal = Some(refusal.to_string());
    }
    done
}

fn try_promote(
    root: &Root,
    process: Named,
    args: &Args,
    spent: Bytes,
    watch: &mut Watch,
    done: &mut ProcessResult,
) -> Result<(), Refusal> {
    let target = Target::open(root, process.pid)?;
    // The PID may have been reused since the lookup.
    let started = task::started(root, process.pid).map_err(Refusal::unread)?;
    if Some(started) != process.started {
        return Err(Refusal::Gone);
    }
    done.name = target.name().to_owned();
    let wish = args.wish();
    watch.begin(&target);
    if args.undo {
        done.reach = Some(Access::find(&target)?);
        done.split = Some(split(&target, &wish, args.dry_run, watch)?);
        return Ok(());
    }
    let plan = done.plan.insert(PromotePlan::new(&target, &wish, spent)?);
    // After the plan, which needs fewer privileges: a dry run without them shows it.
    done.reach = Some(Access::find(&target)?);
    let mut pace = Pace::new(&target, Some(args.rate));
    if args.dry_run {
        let room = (!plan.is_empty()).then(|| pace.room(&target, plan.huge_page));
        done.obstacle = room.and_then(Result::err);
    } else {
        done.outcome = Some(promote(&target, plan, &mut pace, watch));
    }
    Ok(())
}

/// Reciprocal of the CPU share of `--follow`.
const CPU_DIVISOR: u32 = 20;
const MIN_INTERVAL: Duration = Duration::from_secs(1);
const MAX_INTERVAL: Duration = Duration::from_secs(10);

/// Runs rounds until all processes have ended, or a signal arrives.
fn follow(
    root: &Root,
    args: &Args,
    mut watch: Watch,
    typed: &mut TypedPids,
) -> anyhow::Result<ExitCode> {
    let mut spent: BTreeMap<Named, Bytes> = BTreeMap::new();
    let (mut refused, mut interval) = (BTreeSet::new(), MIN_INTERVAL);
    let mut any_promoted = false;
    loop {
        let began = cpu_time(root);
        // Each time: names and groups may match other processes now.
        let Ok(all) = named(root, args, typed) else {
            break;
        };
        let mut page = PromotePage::default();
        let (mut any_left, mut has_grown) = (false, false);
        for process in all.iter().copied() {
            let before = spent.get(&process).copied().unwrap_or_default();
            let done = promote_one(root, process, args, before, &mut watch);
            any_left |= done.refusal.is_none();
            any_promoted |= done.refusal.is_none();
            if let Some(outcome) = &done.outcome {
                *spent.entry(process).or_default() += outcome.cost;
                has_grown |= outcome.obtained > Bytes(0);
            }
            let outcome = done.outcome.as_ref();
            let has_plan = outcome.is_some_and(|outcome| outcome.planned > Bytes(0));
            let is_shown = !done.gone || process.started.is_none();
            if has_plan || done.refusal.is_some() && is_shown && refused.insert(process) {
                page.processes.push(done);
            }
            if watch.ended_by().is_some() {
                break;
            }
        }
        if !args.json {
            view::page(false, &page, show::show)?;
        } else if !page.processes.is_empty() {
            view::json_line(&page)?;
        }
        if !any_left || watch.ended_by().is_some() {
            break;
        }
        interval = if has_grown {
            MIN_INTERVAL
        } else {
            (interval * 2).min(MAX_INTERVAL)
        };
        let share = (cpu_time(root).saturating_sub(began)) * (CPU_DIVISOR - 1);
        watch.rest(interval.max(share), || {
            all.iter().any(|process| is_alive(root, *process))
        });
    }
    match watch.finish() {
        Some(signal) => Ok(end_by(signal)),
        None if any_promoted => Ok(ExitCode::SUCCESS),
        None => Ok(ExitCode::FAILURE),
    }
}

/// Reports whether a process still has memory.
fn is_alive(root: &Root, process: Named) -> bool {
    task::started(root, process.pid).ok() == process.started
        && task::memory(root, process.pid).is_ok_and(|memory| memory.is_some())
}

fn cpu_time(root: &Root) -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let children = task::children_cpu(root, std::process::id());
    Duration::try_from(time).unwrap_or_default() + children.unwrap_or_default()
}

fn status_of(page: &PromotePage) -> ExitCode {
    // [complete, at least partial].
    let done = |done: &ProcessResult| match (&done.outcome, &done.split) {
        _ if done.refusal.is_some() || done.obstacle.is_some() => [false; 2],
        (Some(outcome), _) => [outcome.is_whole(), outcome.obtained > Bytes(0)],
        (_, Some(split)) => [split.left.is_none(), split.after < split.before],
        _ => [true; 2],
    };
    let is_whole = |it: &ProcessResult| done(it)[0];
    let is_any = |it: &ProcessResult| done(it).contains(&true);
    match () {
        // All processes of a name or group have ended.
        () if page.processes.is_empty() => ExitCode::FAILURE,
        () if page.processes.iter().all(is_whole) => ExitCode::SUCCESS,
        () if page.processes.iter().any(is_any) => ExitCode::from(EXIT_PARTIAL),
        () => ExitCode::FAILURE,
    }
}
