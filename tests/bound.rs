//! The bound on memory: a program that touches little of its memory takes as little
//! under jumbo, but for 16 MiB or what `--max-waste` allows.
//!
//! The memory is the peak that the kernel counts for a memory cgroup of each run. Each test prints
//! its table, also when it passes.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::pool::group::Group;
use crate::support::{Compiled, MIB, Program, Ran, Source, compile, host};

/// What may be on huge pages without being dense, whatever the size of the program.
pub(crate) const LEAST_WASTE: u64 = 16 * MIB;
/// The library, its ledger and what the kernel counts ahead for each CPU: 0.4 to 1 MiB as measured.
const OWN: u64 = 4 * MIB;
/// More than a program's peak in plain, for a limit in which it lives.
const ROOM: u64 = 24 * MIB;
/// The most runs of a program.
const RUNS: usize = 5;
/// Programs that run at the same time: most of them wait, and the largest take some GiB under no bound.
const AT_ONCE: usize = 3;

/// A program that is to take little memory.
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
        let allowed = plain + LEAST_WASTE.max(plain / 20) + OWN;
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
    check_bound(&cases(&files));
}

#[test]
fn a_sparse_program_lives_where_it_lives_without() {
    let Some((_held, files)) = prepared() else {
        return;
    };
    check_limits(&cases(&files));
}

/// The allowance for jumbo itself is enough for it, and is no waste in disguise.
#[test]
fn jumbo_itself_takes_little() {
    let Some((_held, files)) = prepared() else {
        return;
    };
    let nothing = Case::new("nothing", Program::new(files.path("bound")).arg("nothing"));
    let row = compare(&nothing);
    eprintln!("{} bytes plain, {} under jumbo", row.plain, row.jumbo);
    assert!(row.jumbo <= row.plain + OWN);
}

/// The host's state held, and the programs; `None` where memory cannot be counted or nothing would be huge.
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

/// Runs the cases, and fails where one takes more than is allowed.
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

/// Runs each case in a memory cgroup with little more room than it takes in plain.
fn check_limits(cases: &[Case]) {
    let outcomes = at_once(cases, |case| {
        let plain = run(case, u64::MAX >> 4, Program::plain).1;
        let (ran, peak) = run(case, plain + ROOM, jumbo);
        (plain, peak, ran)
    });
    let mut table = format!(
        "\n{:<30} {:>8} {:>8} {:>8}\n",
        "MiB", "plain", "limit", "jumbo"
    );
    let mut killed = Vec::new();
    for (case, (plain, jumbo, ran)) in cases.iter().zip(&outcomes) {
        let bytes = [*plain, plain + ROOM, *jumbo];
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

/// The peak, plain and under jumbo; the files are in the page cache before. Programs of many threads have another peak in
/// each run: where one is over, both sides run again, and their highest peaks are compared.
fn compare(case: &Case) -> Row {
    case.program.plain().ok();
    let mut peaks = [0; 2];
    for _ in 0..RUNS {
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

/// One run in a group of its own, and the bytes of its peak.
fn run(case: &Case, limit: u64, how: fn(&Program) -> Ran) -> (Ran, u64) {
    let group = Group::of_memory(limit).unwrap();
    let program = case
        .program
        .clone()
        .env("BOUND_USAGE", group.usage().unwrap());
    let ran = how(&program.around(group.enter()));
    (ran, group.peak().unwrap())
}

/// Does `work` for each case, a few at a time; the answers are in the order of the cases.
fn at_once<T: Send>(cases: &[Case], work: impl Fn(&Case) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let answers = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
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

/// Prints a table past libtest, which keeps what a test prints to itself when the test passes.
fn show(table: &str) {
    let _ = std::io::stderr().write_all(table.as_bytes());
}
