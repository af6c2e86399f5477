//! `jumbo wait`: waits until the memory of ended programs is free.
//!
//! A reaper process ([`jumbo_inside::reaper`]) frees memory after its program has ended. The
//! command waits for programs and reapers by pidfd.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use jumbo_host::kernel::process::Process;
use jumbo_host::kernel::{Root, task};
use jumbo_host::promote::DESCRIPTORS_HINT;
use jumbo_host::status::{REAPER, is_sibling, reapers_of_the_ended, siblings_of};
use jumbo_sys::raise_descriptors;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use serde_json::json;

use crate::pool::EXIT_TIMED_OUT;
use crate::signal::poll;
use crate::value::{process, seconds};
use crate::view::{self, tell};

/// Wait until the memory of ended programs is free
///
/// The memory of a program with a reaper (`jumbo run --reaper`) is freed after its end, by the
/// reaper, another process. A script that needs that memory, say to restart the program, waits with
/// this command.
///
/// With PIDs of programs or of reapers, it waits until all of these have ended, and the reapers of
/// these programs. Where a program has ended before, jumbo cannot tell which reaper was its own: it
/// waits until no reaper of any program that has ended is left. So a PID may be one that is gone.
///
/// Without a PID, it waits until there is no reaper of a program that has ended. It does not wait
/// for the reapers of programs that live. A program that was killed a moment ago may still count as
/// living: name it.
///
/// Without a PID, it waits for the reapers of the caller's own processes; for root, of all users'
/// processes. It knows a reaper by the library that it runs in: this jumbo's, whatever the file is
/// called.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kill -9 4711; jumbo wait --timeout 60 4711 && ./server
  jumbo kill \"$(cat db.pid)\"; jumbo wait && ./start-db
  jumbo wait --timeout 0 || echo \"memory is still being given back\"

Exit status: 0 it is back; 124 it was not within the timeout; 1 a process cannot be waited for; 2 wrong usage.")]
pub(crate) struct Args {
    /// Timeout in seconds; 0 checks once
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_hyphen_values = true, default_value = "60")]
    timeout: Duration,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Programs, or reapers
    #[arg(value_name = "PID", value_parser = process, allow_negative_numbers = true)]
    pids: Vec<u32>,
}

/// Interval between scans for reapers. A new reaper may appear to belong to an ended program, so
/// one scan is not enough.
const RESCAN_INTERVAL: Duration = Duration::from_secs(1);

/// Processes to wait for.
#[derive(Default)]
struct Awaited {
    alive: BTreeMap<u32, Process>,
    /// PIDs of all processes so far.
    seen: BTreeSet<u32>,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    // A descriptor is held for each process.
    raise_descriptors();
    let (root, begin) = (Root::host(), Instant::now());
    let mut awaited = Awaited::default();
    // Reapers without a known program may exist: scan for them once the named processes are gone.
    let mut scans = args.pids.is_empty();
    let siblings = siblings_of(&root, &args.pids);
    for pid in &args.pids {
        let its = siblings.iter().filter(|sibling| sibling.program == *pid);
        let has_reaper = its.clone().any(|sibling| sibling.role == REAPER);
        scans |= !has_reaper && !is_sibling(&root, *pid);
        // Only on a terminal: a typed PID may be wrong, a script's process may be gone.
        if !awaited.add(&root, *pid)? && std::io::stderr().is_terminal() {
            tell(&format!(
                "there is no process {pid}; waiting for the memory of programs that have ended"
            ));
        }
        // The last process that shares the memory frees it.
        for sibling in its {
            awaited.add(&root, sibling.pid)?;
        }
    }
    let gone = wait(&root, args, &mut awaited, scans, begin)?;
    let left: Vec<_> = awaited
        .alive
        .keys()
        .map(|pid| {
            let memory = task::memory(&root, *pid).ok().flatten().unwrap_or_default();
            (
                *pid,
                task::name(&root, *pid).unwrap_or_default(),
                memory.anon,
            )
        })
        .collect();
    let seconds = begin.elapsed().as_secs_f64();
    if args.json {
        let left = left.iter();
        view::json(&json!({
            "gone": gone,
            "seconds": seconds,
            "waited_for": awaited.seen,
            "left": left.map(|(pid, name, anon)| json!({"pid": pid, "name": name, "anon": anon}))
                .collect::<Vec<_>>(),
        }))?;
    } else if !gone {
        let left = left.iter();
        let left =
            left.map(|(pid, name, anon)| format!("{} ({pid}) with {anon}", view::clean(name)));
        let left: Vec<_> = left.collect();
        tell(&format!(
            "after {seconds:.1} s there are still {}",
            left.join(", ")
        ));
    }
    Ok(ExitCode::from(if gone { 0 } else { EXIT_TIMED_OUT }))
}

/// Returns false after a timeout. `scans`: other reapers of ended programs are waited for, too.
fn wait(
    root: &Root,
    args: &Args,
    awaited: &mut Awaited,
    scans: bool,
    begin: Instant,
) -> anyhow::Result<bool> {
    let mut are_named = true;
    loop {
        let left = args.timeout.saturating_sub(begin.elapsed());
        awaited.wait(if are_named {
            left
        } else {
            left.min(RESCAN_INTERVAL)
        })?;
        if awaited.alive.is_empty() || !are_named {
            if !scans {
                return Ok(true);
            }
            are_named = false;
            awaited.alive.clear();
            for pid in reapers_of_the_ended(root)? {
                awaited.add(root, pid)?;
            }
            if awaited.alive.is_empty() {
                return Ok(true);
            }
        }
        if left.is_zero() {
            return Ok(false);
        }
    }
}

impl Awaited {
    /// Adds a process unless it has ended. Returns false if the process does not exist.
    fn add(&mut self, root: &Root, pid: u32) -> anyhow::Result<bool> {
        match Process::open(root, pid) {
            Ok(process) if process.is_gone() => {}
            Ok(process) => {
                self.alive.insert(pid, process);
                self.seen.insert(pid);
            }
            Err(Errno::SRCH) => return Ok(false),
            Err(Errno::INVAL | Errno::NOENT) => {
                anyhow::bail!("cannot wait for {pid}: that is one thread of a process")
            }
            Err(errno) => {
                anyhow::bail!("cannot wait for {pid}: {errno}\nhint: {DESCRIPTORS_HINT}")
            }
        }
        Ok(true)
    }

    /// Waits until a process has ended, at most for `timeout`.
    fn wait(&mut self, timeout: Duration) -> anyhow::Result<()> {
        if self.alive.is_empty() {
            return Ok(());
        }
        let processes = self.alive.values();
        let mut ready: Vec<_> = processes
            .map(|process| PollFd::new(process, PollFlags::IN))
            .collect();
        poll(&mut ready, Some(timeout))?;
        self.alive.retain(|_, process| !process.is_gone());
        Ok(())
    }
}
