//! Tests of the memory bound: a sparse program uses as little memory under jumbo as in plain, plus
//! 16 MiB or the limit of `--max-waste`.
//!
//! The measure is the peak of a memory cgroup per run. Each test prints its table, even when it
//! passes.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::pool::group::Group;
use crate::support::{Compiled, MIB, Program, Ran, Source, compile, host, sample};

/// Huge memory that may be sparse, whatever the size of the program.
pub(crate) const MIN_WASTE_BYTES: u64 = 16 * MIB;
/// Memory of the library, its ledger and the kernel's per-CPU batches: 0.4 to 1 MiB as measured.
const OVERHEAD_BYTES: u64 = 4 * MIB;
/// Memory limit above the plain peak with which a program must survive.
const HEADROOM_BYTES: u64 = 4 * MIB;
/// The same for programs that leave small blocks of many sizes everywhere: slabs hold one size each.
const MIXED_HEADROOM_BYTES: u64 = 24 * MIB;
const MIXED: [&str; 5] = [
    "small-phases",
    "strings",
    "cache",
    "small-then-smaller",
    "small-then-smallest",
];
/// Maximum number of runs of a program.
const MAX_RUNS: usize = 5;
/// Programs that run at the same time: most of them sleep, and the largest take some GiB without a
/// bound.
const MAX_PARALLEL: usize = 3;

/// A sparse program.
struct Case {
    name: String,
    program: Program,
}

impl Case {
    fn new(name: &str, program: Program) -> Self {
        Self {
            name: name.to_owned(),
            program,
        }
    }
}

/// One line of a table.
struct Row {
    name: String,
    plain: u64,
    jumbo: u64,
    allowed: u64,
}

impl Row {
    fn new(name: &str, [plain, jumbo]: [u64; 2]) -> Self {
        let allowed = plain + MIN_WASTE_BYTES.max(plain / 20) + OVERHEAD_BYTES;
        Self {
            name: name.to_owned(),
            plain,
            jumbo,
            allowed,
        }
    }
}

#[test]
fn a_sparse_program_takes_little_more_than_without() {
    let Some((_held, files)) = prepared() else {
        return;
    };
    check_bound(&sample(cases(&files), 5).collect::<Vec<_>>());
}

#[test]
fn a_sparse_program_lives_where_it_lives_without() {
    let Some((_held, files)) = prepared() else {
        return;
    };
    check_limits(&sample(cases(&files), 5).collect::<Vec<_>>());
}

/// The allowance for jumbo itself suffices, and hides no waste.
#[test]
fn jumbo_itself_takes_little() {
    let Some((_held, files)) = prepared() else {
        return;
    };
    let nothing = Case::new("nothing", Program::new(files.path("bound")).arg("nothing"));
    let row = compare(&nothing);
    eprintln!("{} bytes plain, {} under jumbo", row.plain, row.jumbo);
    assert!(row.jumbo <= row.plain + OVERHEAD_BYTES);
}

/// Each process of a group has a credit: together they do not exceed the group's room.
#[test]
fn processes_that_share_a_limit_share_the_credit() {
    assert_crowd_lives("250", 512 * MIB);
}

/// Behind a filter no scanner runs, so the room is read before.
#[test]
fn a_filter_does_not_lift_the_bound_of_a_group() {
    assert_crowd_lives("filtered", 6 * MIB);
}

fn assert_crowd_lives(words: &str, limit: u64) {
    let (Some(_held), Some(group)) = (host::with_thp(), Group::of_memory(limit)) else {
        return;
    };
    let files = compile(&[Source::C("crowd", &[])]);
    let program = Program::new(files.path("crowd")).arg(words);
    jumbo(&program.around(group.enter())).ok();
    // At the limit the kernel kills, or falls back to base pages.
    let peak = group.peak();
    assert!(peak.is_none_or(|peak| peak < limit / 4 * 3), "{peak:?}");
}

/// Locks the host's state and compiles the programs; `None` if memory cannot be counted or nothing
/// would be huge.
fn prepared() -> Option<(host::Held, Compiled)> {
    let held = host::with_thp()?;
    if host::thp_is_always() {
        host::skip("THP is `always` on this host: programs are as large without jumbo");
        return None;
    }
    let group = Group::of_memory(u64::MAX >> 4)?;
    if group.peak().is_none() || group.usage().is_none() {
        host::skip("this kernel does not say the peak of a memory cgroup");
        return None;
    }
    let sources = [Source::C("bound", &[]), Source::C("bound_bss", &[])];
    Some((held, compile(&sources)))
}

fn cases(files: &Compiled) -> Vec<Case> {
    let bound = Program::new(files.path("bound"));
    let listed = bound.plain().ok().stdout;
    let of_mode = |mode| Case::new(mode, bound.clone().arg(mode));
    let bss = Case::new("bss", Program::new(files.path("bound_bss")));
    listed.lines().map(of_mode).chain([bss]).collect()
}

/// Runs the cases; fails if one exceeds its allowance.
fn check_bound(cases: &[Case]) {
    let rows = at_once(cases, compare);
    let mut table = format!(
        "\n{:<30} {:>8} {:>8} {:>8}\n",
        "MiB", "plain", "jumbo", "allowed"
    );
    for row in rows.iter() {
        let bytes = [row.plain, row.jumbo, row.allowed];
        let [plain, jumbo, allowed] = bytes.map(|bytes| bytes as f64 / MIB as f64);
        let over = if row.jumbo > row.allowed {
            "  OVER"
        } else {
            ""
        };
        let name = &row.name;
        writeln!(
            table,
            "{name:<30} {plain:>8.1} {jumbo:>8.1} {allowed:>8.1}{over}"
        )
        .unwrap();
    }
    show(&table);
    let over: Vec<&str> = rows
        .iter()
        .filter(|row| row.jumbo > row.allowed)
        .map(|row| row.name.as_str())
        .collect();
    assert!(over.is_empty(), "more than is allowed: {over:#?}");
}

/// Runs each case in a memory cgroup with little above its plain peak.
fn check_limits(cases: &[Case]) {
    let outcomes = at_once(cases, |case| {
        let plain = run(case, u64::MAX >> 4, Program::plain).1;
        let headroom = match MIXED.contains(&case.name.as_str()) {
            true => MIXED_HEADROOM_BYTES,
            false => HEADROOM_BYTES,
        };
        let (ran, peak) = run(case, plain + headroom, jumbo);
        ([plain, plain + headroom, peak], ran)
    });
    let mut table = format!(
        "\n{:<30} {:>8} {:>8} {:>8}\n",
        "MiB", "plain", "limit", "jumbo"
    );
    let mut killed = Vec::new();
    for (case, (bytes, ran)) in cases.iter().zip(&outcomes) {
        let [plain, limit, jumbo] = bytes.map(|bytes| bytes as f64 / MIB as f64);
        let end = if ran.status.success() { "" } else { "  KILLED" };
        let name = &case.name;
        writeln!(
            table,
            "{name:<30} {plain:>8.1} {limit:>8.1} {jumbo:>8.1}{end}"
        )
        .unwrap();
        if !ran.status.success() {
            killed.push((name, ran));
        }
    }
    show(&table);
    assert!(killed.is_empty(), "lived in plain: {killed:#?}");
}

/// Measures the peaks, plain and under jumbo, with the files in the page cache. Peaks of programs
/// with many threads vary: after an excess both sides run again, and the maxima count.
fn compare(case: &Case) -> Row {
    case.program.plain().ok();
    let mut peaks = [0; 2];
    for _ in 0..MAX_RUNS {
        for (peak, how) in peaks.iter_mut().zip([Program::plain, jumbo]) {
            let (ran, this) = run(case, u64::MAX >> 4, how);
            ran.ok();
            *peak = this.max(*peak);
        }
        let row = Row::new(&case.name, peaks);
        if row.jumbo <= row.allowed {
            break;
        }
    }
    Row::new(&case.name, peaks)
}

fn jumbo(program: &Program) -> Ran {
    program.jumbo_with(&["-q"])
}

/// Runs the case in a group of its own and returns the peak in bytes.
fn run(case: &Case, limit: u64, how: fn(&Program) -> Ran) -> (Ran, u64) {
    let group = Group::of_memory(limit).unwrap();
    let program = case
        .program
        .clone()
        .env("BOUND_USAGE", group.usage().unwrap());
    let ran = how(&program.around(group.enter()));
    (ran, group.peak().unwrap())
}

/// Calls `work` for each case, several at a time; returns the results in the order of the cases.
fn at_once<T: Send>(cases: &[Case], work: impl Fn(&Case) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let answers = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..MAX_PARALLEL {
            scope.spawn(|| {
                while let Some((at, case)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    cases.get(at).map(|case| (at, case))
                } {
                    let answer = work(case);
                    answers.lock().unwrap().push((at, answer));
                }
            });
        }
    });
    let mut answers = answers.into_inner().unwrap();
    answers.sort_unstable_by_key(|(at, _)| *at);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Prints a table to stderr directly, since libtest captures the output of tests that pass.
fn show(table: &str) {
    let _ = std::io::stderr().write_all(table.as_bytes());
}
