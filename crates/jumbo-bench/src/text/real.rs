//! Programs as they are: `groups`.
//!
//! Their text is on huge pages where that costs nothing, or once they have shown that they live; so most of what is measured here is
//! that they do not lose.

use std::ffi::OsStr;
use std::io::Write as _;
use std::iter;
use std::process::Stdio;
use std::time::Instant;

use jumbo::units::Bytes;

use crate::figures::{Figures, figures, ms};
use crate::group::{Group, rows};
use crate::launch::{Launch, on_path};
use crate::stats::{least, median};
use crate::table::Table;
use crate::talk::Talk;
use crate::{Error, Settings};

/// Work for a program that a host may have.
struct Work {
    program: &'static str,
    arguments: &'static [&'static str],
    /// Its standard input.
    input: &'static str,
}

/// Work of some seconds, in a program with much text.
const LONG: [Work; 2] = [
    Work {
        program: "node",
        arguments: &["-"],
        input: include_str!("work/words.js"),
    },
    Work {
        program: "g++",
        arguments: &["-O2", "-S", "-o", "/dev/null", "-x", "c++", "-"],
        input: include_str!("work/maps.cpp"),
    },
];

/// Of so many runs in a round the best one counts: another program disturbs most of those that take a second. With three of them
/// a program differed from itself by a tenth.
const RUNS: usize = 8;

/// Work of less than a second, and how often.
const SHORT: [Work; 2] = [
    Work {
        program: "node",
        arguments: &["-e", "1"],
        input: "",
    },
    Work {
        program: "g++",
        arguments: &["-S", "-o", "/dev/null", "-x", "c++", "-"],
        input: "int main() {}",
    },
];
const STARTS: [usize; 2] = [50, 5];

/// Nothing but text differs.
const TEXT: &str = "--quiet --text=auto --heap=off --maps=off --free=off --reaper=off --data=on";
const NO_TEXT: &str = "--text=off --heap=off --maps=off --free=off --reaper=off --data=off";

/// The figure of a round, from its laps.
type Fold = fn(&[f64]) -> f64;

/// The groups of the programs that this host has; of one of them, and of its start alone, where it is to be `quick`.
pub(super) fn groups<'a>(settings: &'a Settings, quick: bool, table: &mut Table) -> Vec<Group<'a>> {
    let rounds = settings.rounds.get();
    let most = if quick { 1 } else { LONG.len() };
    // As many starts in all rounds together.
    let starts = STARTS[usize::from(quick)].div_ceil(rounds);
    let mut groups = Vec::new();
    let kinds = [
        ("short", &SHORT, (starts, median as Fold)),
        ("real", &LONG, (RUNS, least)),
    ];
    for (kind, all, laps) in kinds.into_iter().take(if quick { 1 } else { 2 }) {
        let here: Vec<_> = all
            .iter()
            .filter(|work| on_path(work.program, iter::empty()).is_some())
            .collect();
        for (work, suffix) in here.iter().zip(["", "_2"]).take(most) {
            groups.push(group(settings, work, &format!("{kind}_time{suffix}"), laps));
        }
        if here.is_empty() {
            table.missing("real programs", "neither `node` nor `g++` is installed");
        }
    }
    groups
}

fn group<'a>(
    settings: &'a Settings,
    work: &'static Work,
    name: &str,
    (laps, fold): (usize, Fold),
) -> Group<'a> {
    let mut group = Group::new(settings, work.program).laps(laps, fold);
    let mut side = |name: &str, launch: Launch| {
        group.side(name, Bytes(0), move || work.run(settings, &launch))
    };
    let plain = side("plain", Launch::Plain);
    let off = side("--text=off alone", Launch::Jumbo(NO_TEXT.to_owned()));
    let auto = side("--text=auto alone", Launch::Jumbo(TEXT.to_owned()));
    let jumbo = side("jumbo run", Launch::JUMBO);
    let measure = &format!("{} {}", work.program, work.arguments.join(" "));
    let row = |suffix: &str| format!("{name}{suffix}");
    rows! { group;
        row("_aa") => measure, "work_ms", plain / plain;
        row("") => measure, "work_ms", off / auto;
        row("_vs_plain") => measure, "work_ms", plain / auto;
        row("_jumbo_run") => measure, "work_ms", plain / jumbo;
    }
    group
}

impl Work {
    fn run(&self, settings: &Settings, launch: &Launch) -> Result<Figures, Error> {
        let mut command = launch.command(&settings.jumbo, OsStr::new(self.program));
        command.args(self.arguments);
        let clock = Instant::now();
        let mut talk = Talk::start(command, Stdio::piped())?;
        if let Some(mut input) = talk.child.stdin.take() {
            input.write_all(self.input.as_bytes())?;
        }
        talk.end()?;
        Ok(figures([("work_ms", ms(clock.elapsed()))]))
    }
}
