//! `jumbo wait`: until the memory of programs that have ended is back.
//!
//! A program with a reaper ([`jumbo_inside::reaper`]) is gone before its memory is. What is waited
//! for are processes, by descriptor: the programs, and the reapers that outlive them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use jumbo_host::kernel::{Root, task};
use jumbo_host::status::{is_reaper, reaper_of, reapers_of_the_ended};
use jumbo_host::teardown::Process;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use serde_json::json;

use crate::pool::TIMED_OUT;
use crate::signal::poll;
use crate::value::{process, seconds};
use crate::view::{self, tell};

/// Wait until the memory of programs that have ended is back
///
/// A program that ran with a reaper (`jumbo run --reaper`) is gone before its memory is: the
/// reaper, another process, still gives it back, in parallel. A script that needs that memory at
/// once, say to start the program again, waits with this command.
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
    /// How long at most, in seconds; 0 looks once
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_hyphen_values = true, default_value = "60")]
    timeout: Duration,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Programs, or reapers
    #[arg(value_name = "PID", value_parser = process, allow_negative_numbers = true)]
    pids: Vec<u32>,
}

/// A reaper that was only just made may look like one whose program has ended: so there is another
/// look.
const LOOK: Duration = Duration::from_secs(1);

/// The processes to wait for, by ID.
#[derive(Default)]
struct Awaited {
    there: BTreeMap<u32, Process>,
    /// All that were.
    seen: BTreeSet<u32>,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let (root, begin) = (Root::host(), Instant::now());
    let mut awaited = Awaited::default();
    // Whether there may be reapers that are not known yet, when those that are named are gone.
    let mut looks = args.pids.is_empty();
    for pid in &args.pids {
        let reaper = reaper_of(&root, *pid);
        looks |= reaper.is_none() && !is_reaper(&root, *pid);
        // A script names a process that may be gone; a number that is typed may be wrong.
        if !awaited.add(&root, *pid)? && std::io::stderr().is_terminal() {
            tell(&format!(
                "there is no process {pid}; waiting for the memory of programs that have ended"
            ));
        }
        if let Some(reaper) = reaper {
            awaited.add(&root, reaper)?;
        }
    }
    let gone = wait(&root, args, &mut awaited, looks, begin)?;
    let left: Vec<_> = awaited
        .there
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
            // All the processes that were waited for, and those of them that are there.
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
    Ok(match gone {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(TIMED_OUT),
    })
}

/// False where they were not gone in time. `looks`: there may be reapers that are not among them
/// yet.
fn wait(
    root: &Root,
    args: &Args,
    awaited: &mut Awaited,
    looks: bool,
    begin: Instant,
) -> anyhow::Result<bool> {
    let mut are_named = true;
    loop {
        let left = args.timeout.saturating_sub(begin.elapsed());
        awaited.wait(if are_named { left } else { left.min(LOOK) })?;
        if awaited.there.is_empty() || !are_named {
            if !looks {
                return Ok(true);
            }
            are_named = false;
            awaited.there.clear();
            for pid in reapers_of_the_ended(root)? {
                awaited.add(root, pid)?;
            }
            if awaited.there.is_empty() {
                return Ok(true);
            }
        }
        if left.is_zero() {
            return Ok(false);
        }
    }
}

impl Awaited {
    /// One more, if it is there and has not ended. False where there is no such process.
    fn add(&mut self, root: &Root, pid: u32) -> anyhow::Result<bool> {
        match Process::open(root, pid) {
            Ok(process) if process.is_gone() => {}
            Ok(process) => {
                self.there.insert(pid, process);
                self.seen.insert(pid);
            }
            Err(Errno::SRCH) => return Ok(false),
            Err(Errno::INVAL | Errno::NOENT) => {
                anyhow::bail!("cannot wait for {pid}: that is one thread of a process")
            }
            Err(errno) => anyhow::bail!("cannot wait for {pid}: {errno}"),
        }
        Ok(true)
    }

    /// Until one has ended, if there is any, or `most` has passed.
    fn wait(&mut self, most: Duration) -> anyhow::Result<()> {
        if self.there.is_empty() {
            return Ok(());
        }
        let processes = self.there.values();
        let mut ready: Vec<_> = processes
            .map(|process| PollFd::new(process, PollFlags::IN))
            .collect();
        poll(&mut ready, Some(most))?;
        self.there.retain(|_, process| !process.is_gone());
        Ok(())
    }
}
