//! `jumbo pool auto`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use jumbo::host_pools::{self, AutoSize, Bounds, Plan, Seen, Shortage, Wish, steer};
use jumbo::kernel::memory::Memory;
use jumbo::kernel::{Root, hvo};
use jumbo::knobs::{Boot, Doing, Group, Knob, Steering, Watcher as _, Written};
use jumbo::units::{Bytes, PageSize, Pages};
use serde_json::json;

use super::amount::Amount;
use super::change::OfPool;
use crate::knobs::change::{self, Change, tell_shortage};
use crate::knobs::terminal::Terminal;
use crate::knobs::{
    Manner, PART, all_or_part, command_line, failed, failure, journal, refused, unrecorded, usage,
};
use crate::value::{interval, seconds};
use crate::view::{self, in_words, tell};

/// Keep a pool as large as it is needed, within bounds
///
/// Looks at the pool again and again. What is mapped or reserved, and some headroom, is made persistent
/// ahead of the next mapping; a page goes back when it was not needed for the idle time. A mapping
/// larger than the headroom gets surplus pages, which the kernel makes at once, within the same bounds.
/// Memory available on the host is never taken below --keep-free, and where others take it below, pages
/// that no program needs go back at once. Each step is told on stderr with its reason.
///
/// Runs until it is stopped by SIGINT or SIGTERM, and puts back what was before: pages in use then go
/// back when they are free. After SIGKILL `jumbo pool --undo` puts back, and so does the next `auto` when it ends.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo pool auto 2M --min 64 --max 16G
  jumbo pool auto 2M --min 0 --max 8G --idle 300 --keep-free 4G")]
pub(crate) struct Args {
    /// The page size: 2M, 1G
    #[arg(value_name = "SIZE")]
    size: PageSize,

    /// The least persistent pages
    #[arg(long, value_name = "PAGES|BYTES", allow_hyphen_values = true)]
    min: Amount,

    /// The most pages, surplus included
    #[arg(long, value_name = "PAGES|BYTES", allow_hyphen_values = true)]
    max: Amount,

    /// Pages kept ready beyond what is needed [default: a sixteenth of the maximum, at least 1]
    #[arg(long, value_name = "PAGES|BYTES", allow_hyphen_values = true)]
    headroom: Option<Amount>,

    /// How long pages are not needed before they go back, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_hyphen_values = true, default_value = "60")]
    idle: Duration,

    /// What stays available on the host (MemAvailable) [default: a sixteenth of its memory]
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true)]
    keep_free: Option<Bytes>,

    /// Make no surplus pages: mappings larger than the headroom fail
    #[arg(long)]
    no_overcommit: bool,

    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", value_parser = interval, allow_hyphen_values = true, default_value = "0.2")]
    interval: Duration,

    /// Look once, take one step and leave it, as `set` would
    #[arg(long, conflicts_with = "for_seconds")]
    once: bool,

    /// Print each step as JSON too, one object a line
    #[arg(long)]
    json: bool,

    /// End after so many seconds
    #[arg(long = "for", value_name = "SECONDS", value_parser = seconds, allow_hyphen_values = true)]
    for_seconds: Option<Duration>,
}

pub(super) fn main(root: &Root, args: &Args) -> anyhow::Result<ExitCode> {
    let size = args.size;
    let memory = Memory::read(root)?;
    let max = args.max.pages(size);
    let headroom = args
        .headroom
        .map_or(Pages((max.0 / 16).max(1)), |amount| amount.pages(size));
    let slow = hvo::surplus_is_slow(root);
    let bounds = Bounds {
        min: args.min.pages(size),
        max,
        headroom,
        // One look has seen no idle time.
        idle: if args.once { Duration::ZERO } else { args.idle },
        keep_free: args.keep_free.unwrap_or(Bytes(memory.total.0 / 16)),
        overcommit: !args.no_overcommit && !slow,
    };
    if bounds.min > bounds.max {
        usage(&format!(
            "--min {} is more than --max {max}\nhint: both are pages of {size}, or bytes with a unit",
            bounds.min
        ));
    }
    if args.once {
        return once(root, args, bounds);
    }
    let journal = journal(root)?;
    let locked = journal
        .lock(&Group::pool(size), &command_line())
        .map_err(unrecorded)?;
    let mut terminal = Terminal::new(root)?;
    let before = super::pool(root, size)?;
    let steering = match steer(root, &locked, &before, &command_line(), true) {
        Ok(steering) => steering,
        Err(error) => {
            terminal.done();
            return Err(failed(error));
        }
    };
    let goes_on_for = steering.goes_on_for();
    let mut auto = Auto {
        root,
        size,
        auto_size: AutoSize::new(bounds),
        begin: Instant::now(),
        steering,
        terminal: &mut terminal,
        json: args.json,
    };
    if slow && !args.no_overcommit {
        auto.tell("HVO is on, and surplus pages wait milliseconds each for it on this kernel: none are made");
    }
    if let Some(pid) = goes_on_for {
        auto.tell(&format!(
            "goes on for process {pid}, which has not put back what was before it: that is done at the end"
        ));
    }
    let ended = auto.run(args);
    let end = auto.end();
    // Being stopped is how this ends, not a failure.
    terminal.done();
    match (end, ended) {
        // Something is left changed, which the error alone would deny.
        (Ok(code), Err(error)) if code == ExitCode::from(PART) => {
            tell(&in_words(&error));
            Ok(code)
        }
        (end, ended) => end.and_then(|code| ended.map(|()| code)),
    }
}

/// What one look says, as a change like that of `set`.
fn once(root: &Root, args: &Args, bounds: Bounds) -> anyhow::Result<ExitCode> {
    let manner = Manner {
        dry_run: false,
        force: false,
        json: args.json,
    };
    change::change(root, &manner, || {
        let pool = super::pool(root, args.size)?;
        let seen = Seen {
            at: Duration::ZERO,
            pool: pool.clone(),
            available: Memory::read(root)?.available,
        };
        let decision = AutoSize::new(bounds).decide(&seen);
        let wish = Wish {
            persistent: decision.persistent.map(host_pools::Amount::To),
            overcommit: decision.overcommit,
            node: None,
        };
        let plan = Plan::new(&pool, &wish)?;
        let notes = wish.persistent.map(|_| decision.reason);
        let notes = notes.into_iter().collect();
        let mut change = Change::new(plan.writes, Boot::default(), notes);
        change.pool = Some(OfPool::new(pool, plan.effect));
        Ok(change)
    })
}

struct Auto<'a> {
    root: &'a Root,
    size: PageSize,
    auto_size: AutoSize,
    begin: Instant,
    steering: Steering<'a>,
    terminal: &'a mut Terminal,
    json: bool,
}

impl Auto<'_> {
    /// Until its time is over, or it is stopped.
    fn run(&mut self, args: &Args) -> anyhow::Result<()> {
        loop {
            if self.step()? {
                break;
            }
            let over = args
                .for_seconds
                .is_some_and(|long| self.begin.elapsed() >= long);
            if over {
                return Ok(());
            }
            let left = args
                .for_seconds
                .map(|long| long.saturating_sub(self.begin.elapsed()));
            let pause = left.map_or(args.interval, |left| left.min(args.interval));
            if self.terminal.pause(pause)? {
                break;
            }
        }
        self.tell("stopped");
        Ok(())
    }

    /// Puts back what was before.
    fn end(self) -> anyhow::Result<ExitCode> {
        let undone = match self.steering.put_back(self.terminal) {
            Ok(undone) => undone,
            Err(error) => return failure(error),
        };
        if undone.complete {
            tell("auto: put back what was before");
        } else {
            tell("auto: not all could be put back; `jumbo pool --undo` tries again");
        }
        if let Some(shortage) = Shortage::of(self.root, &undone.steps, false) {
            tell_shortage(&shortage);
        }
        Ok(all_or_part(undone.complete))
    }

    /// One look, and what follows from it; true where it was stopped meanwhile.
    fn step(&mut self) -> anyhow::Result<bool> {
        let seen = Seen {
            at: self.begin.elapsed(),
            pool: super::pool(self.root, self.size)?,
            available: Memory::read(self.root)?.available,
        };
        let decision = self.auto_size.decide(&seen);
        let (overcommit, reason) = (decision.overcommit, decision.reason);
        let lends =
            "what may be made at once within the maximum and what is kept available".to_owned();
        let mut writes: Vec<_> = [
            decision
                .persistent
                .map(|to| (Knob::persistent(self.size, None), "persistent", to, reason)),
            overcommit.map(|to| (Knob::overcommit(self.size), "overcommit", to, lends)),
        ]
        .into_iter()
        .flatten()
        .collect();
        // What is lent and what is there together never pass the maximum, so the one that falls is first.
        if overcommit.is_some_and(|to| to < seen.pool.overcommit) {
            writes.reverse();
        }
        for (knob, what, to, reason) in writes {
            let written = self.steering.set(&knob, to, self.terminal);
            let Written { step, stopped, .. } = written.map_err(refused)?;
            let before = &step.before;
            let after = step.after.as_ref().unwrap_or(before);
            if step.missing() > 0 && !stopped {
                let pause = self.auto_size.fell_short(seen.at).as_secs_f64();
                let why = format!("{what} {before} -> {after}, not the {to} asked: {reason}");
                self.tell(&why);
                if let Some(shortage) = Shortage::of(self.root, std::slice::from_ref(&step), false)
                {
                    let why = shortage.reasons.join("; ");
                    self.tell(&format!(
                        "{why}; the next try is in {pause} s at the earliest"
                    ));
                }
            } else {
                if what == "persistent" {
                    self.auto_size.grew();
                }
                self.tell(&format!("{what} {before} -> {after}: {reason}"));
            }
            if self.json {
                // One write, and what was seen when it was decided.
                view::json_line(&json!({
                    "seconds": seen.at.as_secs_f64(),
                    "size": self.size,
                    "what": what,
                    "before": before,
                    "to": to,
                    "after": after,
                    "reason": reason,
                    "used": seen.pool.used(),
                    "reserved": seen.pool.reserved,
                    "available": seen.available,
                }))?;
            }
            if stopped {
                return Ok(true);
            }
        }
        Ok(self.terminal.look(&Doing::Nothing).is_break())
    }

    fn tell(&self, message: &str) {
        let seconds = self.begin.elapsed().as_secs_f64();
        tell(&format!("auto: {seconds:8.1} s: {}: {message}", self.size));
    }
}
