//! Real programs: `groups`.
//!
//! Their text moves to huge pages if that costs nothing, or after they have run for a while; so the
//! rows mostly show that they do not become slower.

use std::iter;

use jumbo::units::Bytes;

use crate::Settings;
use crate::figures::figures;
use crate::group::{Group, rows};
use crate::launch::{Launch, on_path};
use crate::stats::{median, minimum};
use crate::table::Table;
use crate::work;

/// Work for a real program: row name, program, arguments, standard input.
#[derive(Clone, Copy)]
struct RealProgram(
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static str,
);

/// Work of less than a second, and of some seconds, for programs with much text.
const PROGRAMS: [RealProgram; 4] = [
    RealProgram("short_time", "node", &["-e", "1"], ""),
    RealProgram(
        "short_time",
        "g++",
        &["-S", "-o", "/dev/null", "-x", "c++", "-"],
        "int main() {}",
    ),
    RealProgram("real_time", "node", &["-"], include_str!("work/words.js")),
    RealProgram(
        "real_time",
        "g++",
        &["-O2", "-S", "-o", "/dev/null", "-x", "c++", "-"],
        include_str!("work/maps.cpp"),
    ),
];

/// Runs of short work over all rounds, without and with `--quick`.
const SHORT_RUNS: [usize; 2] = [50, 5];

/// Runs of long work per round, of which the best counts: other programs disturb most runs of a
/// second. With three, a program differed from itself by a tenth.
const LONG_RUNS: usize = 8;

/// Options under which only text differs from plain.
const TEXT_ONLY: &str =
    "--quiet --text=auto --heap=off --maps=off --free=off --reaper=off --data=on";
const TEXT_OFF: &str = "--text=off --heap=off --maps=off --free=off --reaper=off --data=off";

type Fold = fn(&[f64]) -> f64;

/// Groups of the programs that this host has; `quick`: only the start of one of them.
pub(super) fn groups<'a>(settings: &'a Settings, quick: bool, table: &mut Table) -> Vec<Group<'a>> {
    let starts = SHORT_RUNS[usize::from(quick)].div_ceil(settings.rounds.get());
    let kinds = [
        ("short_time", starts, median as Fold),
        ("real_time", LONG_RUNS, minimum),
    ];
    let (kinds, max_programs) = if quick {
        (&kinds[..1], 1)
    } else {
        (&kinds[..], 2)
    };
    let mut groups = Vec::new();
    for &(key, laps, fold) in kinds {
        let is_here =
            |work: &RealProgram| work.0 == key && on_path(work.1, iter::empty()).is_some();
        let here = PROGRAMS.into_iter().filter(is_here);
        for (work, suffix) in here.zip(["", "_2"]).take(max_programs) {
            groups.push(group(
                settings,
                work,
                &format!("{key}{suffix}"),
                (laps, fold),
            ));
        }
    }
    if groups.is_empty() {
        table.missing("real programs", "neither `node` nor `g++` is installed");
    }
    groups
}

fn group<'a>(
    settings: &'a Settings,
    work: RealProgram,
    name: &str,
    (laps, fold): (usize, Fold),
) -> Group<'a> {
    let RealProgram(_, program, arguments, input) = work;
    let mut group = Group::new(settings, program).laps(laps, fold);
    let mut side = |name: &str, launch: Launch| {
        group.side(name, Bytes(0), move || {
            let time = work::time(&launch, settings, program, arguments, input)?;
            Ok(figures([("work_ms", time)]))
        })
    };
    let plain = side("plain", Launch::Plain);
    let off = side("--text=off alone", Launch::Jumbo(TEXT_OFF.to_owned()));
    let auto = side("--text=auto alone", Launch::Jumbo(TEXT_ONLY.to_owned()));
    let jumbo = side("jumbo run", Launch::JUMBO);
    let measure = &format!("{program} {}", arguments.join(" "));
    let row = |suffix: &str| format!("{name}{suffix}");
    rows! { group;
        row("_aa") => measure, "work_ms", plain / plain;
        row("") => measure, "work_ms", off / auto;
        row("_vs_plain") => measure, "work_ms", plain / auto;
        row("_jumbo_run") => measure, "work_ms", plain / jumbo;
    }
    group
}
