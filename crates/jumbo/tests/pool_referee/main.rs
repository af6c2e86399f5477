//! The kernel as the referee: random operations on a pool and on the kernel's own hugetlb, which must count the
//! same after every step.
//!
//! `take` is the touch of a MAP_NORESERVE mapping, `reserve` a shared mapping, `use` a touch in it, `give` an
//! munmap or a hole in its file, `resize` and `overcommit` the knobs of the kernel's pool. What is compared is (total, free,
//! reserved, surplus), and whether each operation succeeded.
//!
//! The pool of the first test has pages of the model source. In the second the same operations run on a pool of
//! hugetlb pages beside one of the model: the two must count the same, the kernel must have as many pages in use, and each
//! page must hold what its user wrote.
//!
//! `JUMBO_REFEREE_SEEDS` (a list) and `JUMBO_REFEREE_STEPS` ask for others than the usual ones. A sequence that
//! fails is made shorter as long as it fails, and printed with its seed.
#![allow(unsafe_code, reason = "the kernel's side maps and unmaps memory")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "../books/mod.rs"]
mod books;
#[path = "../pool/host.rs"]
#[allow(dead_code, reason = "shared with the pool's other tests")]
mod host;
mod kernels;
mod ours;
#[path = "../pool/random.rs"]
mod random;

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs;

use jumbo::pool::{Hugetlb, Model, Placement, Pool};
use jumbo::units::{PageSize, Pages};
use jumbo_host::kernel::Root;

use host::{Alone, Knobs, POOL, is_unused, kernel_counters, skip};
use kernels::Kernels;
use ours::Ours;
use random::Random;

const SEEDS: &[u64] = &[1, 2, 3, 5];
const STEPS: usize = 10_000;
/// How many of the kernel's pages a sequence may come to, at most: 8 GiB hosts must do.
const MOST: u64 = 24;
/// How often a sequence is run again when two runs do not say the same.
const RETRIES: u32 = 5;
/// How often a sequence that fails is run again to make it shorter.
const RUNS: u32 = 300;
/// The kernel's pool that hugetlb pages come from: less than a sequence may ask for.
const PERSISTENT: u64 = 10;
const SURPLUS: u64 = 6;

#[derive(Clone, Copy, Debug)]
enum Op {
    Take,
    Give(usize),
    /// A shared mapping of a file.
    Reserve(u64),
    /// A private mapping that reserves.
    ReservePrivate(u64),
    Use(usize),
    End(usize),
    Resize(u64),
    Overcommit(u64),
    /// Takes a part of a page, of this order; for one who knows no folios, a take where that splits a page.
    Folio(u32),
    /// Gives one back; for one who knows none, the page where it was the last of it.
    GiveFolio(usize),
    /// For one who knows no folios.
    Nothing,
}

impl Op {
    fn any(random: &mut Random) -> Self {
        match random.below(100) {
            0..20 => Self::Take,
            20..25 => Self::Folio(u32::try_from(4 + random.below(5)).unwrap()),
            25..47 => Self::Give(random.at(1 << 20)),
            47..53 => Self::GiveFolio(random.at(1 << 20)),
            53..63 => Self::Reserve(random.below(9)),
            63..67 => Self::ReservePrivate(1 + random.below(5)),
            67..82 => Self::Use(random.at(1 << 20)),
            82..92 => Self::End(random.at(1 << 20)),
            92..96 => Self::Resize(random.below(MOST / 2)),
            _ => Self::Overcommit(random.below(MOST / 2)),
        }
    }
}

/// What became of an operation that can fail; `None` where there was nothing to do.
type Answer = Option<Result<(), String>>;

/// One of the two that are compared.
trait Side {
    /// Carries an operation out. An error is what must not be.
    fn step(&mut self, op: Op) -> Result<Answer, String>;
    /// (total, free, reserved, surplus).
    fn counters(&self) -> [u64; 4];
}

fn text<E: ToString>(result: Result<(), E>) -> Result<(), String> {
    result.map_err(|error| error.to_string())
}

fn write(name: &str, value: u64) {
    fs::write(format!("{POOL}/{name}"), value.to_string()).unwrap();
}

/// What became of a sequence.
#[derive(Default)]
struct Outcome {
    /// The step that failed, and how.
    failed: Option<(usize, String)>,
    succeeded: usize,
    refused: usize,
}

impl Outcome {
    /// One step on both; `and` compares what else there is.
    fn step(
        &mut self,
        op: Op,
        ours: &mut Ours<'_>,
        other: &mut dyn Side,
        and: &dyn Fn(&Ours<'_>) -> Result<(), String>,
    ) -> Result<(), String> {
        let (answer, op) = ours.plainly(op)?;
        let same = other.step(op)?;
        match (&answer, &same) {
            (Some(Ok(())), Some(Ok(()))) => self.succeeded += 1,
            (Some(Err(_)), Some(Err(_))) => self.refused += 1,
            (None, None) => {}
            _ => return Err(format!("the pool says {answer:?}, the other {same:?}")),
        }
        let (pool, other) = (ours.counters(), other.counters());
        if pool != other {
            return Err(format!(
                "(total, free, reserved, surplus): the pool has {pool:?}, the other {other:?}"
            ));
        }
        and(ours)
    }

    /// The sequence, and in the end all is given back.
    fn run(
        ops: &[Op],
        ours: &mut Ours<'_>,
        other: &mut dyn Side,
        and: &dyn Fn(&Ours<'_>) -> Result<(), String>,
    ) -> Self {
        let mut outcome = Self::default();
        let mut ops = ops.iter().copied().enumerate();
        let mut last = 0;
        loop {
            let (at, op) = match ops.next() {
                Some((at, op)) => (at, op),
                None if !ours.folios.is_empty() => (last, Op::GiveFolio(0)),
                None if !ours.used.is_empty() => (last, Op::Give(0)),
                None if !ours.reserved.is_empty() => (last, Op::End(0)),
                None => return outcome,
            };
            last = at;
            if let Err(what) = outcome.step(op, ours, other, and) {
                outcome.failed = Some((at, what));
                return outcome;
            }
        }
    }
}

/// A pool beside the kernel.
fn beside_the_kernel(ops: &[Op]) -> Outcome {
    write("nr_overcommit_hugepages", 0);
    write("nr_hugepages", 0);
    // Programs of others on this host, which know nothing of the lock.
    is_unused();
    // More than a sequence can ask for: the kernel's buddy allocator has more, too.
    let model = Model::of_size(PageSize::SIZE_2M, &[512]).unwrap();
    let pool = Pool::new(model, Placement::ANYWHERE);
    Outcome::run(ops, &mut Ours::new(&pool), &mut Kernels::new(), &|_| Ok(()))
}

/// A pool of hugetlb pages beside one of the model.
fn of_hugetlb_pages(ops: &[Op]) -> Outcome {
    write("nr_overcommit_hugepages", 0);
    write("nr_hugepages", 0);
    is_unused();
    write("nr_hugepages", PERSISTENT);
    write("nr_overcommit_hugepages", SURPLUS);
    let most = PERSISTENT + SURPLUS;
    let source = Hugetlb::with_capacity(&Root::host(), PageSize::SIZE_2M, Pages(64)).unwrap();
    let pool = Pool::new(source, Placement::ANYWHERE);
    let model = Model::new(&[u32::try_from(most).unwrap()]).unwrap();
    let model = Pool::new(model, Placement::ANYWHERE);
    let kernels = |ours: &Ours<'_>| {
        let used = ours.pool.counters().total.0;
        let total = used.max(PERSISTENT);
        let expected = [total, total - used, 0, total - PERSISTENT];
        let kernels = kernel_counters();
        (kernels == expected).then_some(()).ok_or_else(|| {
            format!(
                "(total, free, reserved, surplus): the kernel has {kernels:?} and not {expected:?}"
            )
        })
    };
    Outcome::run(ops, &mut Ours::new(&pool), &mut Ours::new(&model), &kernels)
}

/// What became of a sequence, once two runs say the same; `None` where another process keeps taking and giving
/// pages of the kernel's pool.
fn run_undisturbed(ops: &[Op], run: fn(&[Op]) -> Outcome) -> Option<Outcome> {
    let mut before = None;
    for _ in 0..RETRIES {
        let outcome = run(ops);
        if outcome.failed.is_none() || outcome.failed == before {
            return Some(outcome);
        }
        before = outcome.failed;
    }
    None
}

/// The shortest sequence found that still fails: parts of it are left out, halves first, then less.
fn shrink(mut ops: Vec<Op>, run: fn(&[Op]) -> Outcome) -> (Vec<Op>, String) {
    let (mut what, mut runs) = (String::new(), 0);
    let mut fails = |ops: &mut Vec<Op>| {
        runs += 1;
        if runs > RUNS {
            return false;
        }
        let Some((at, why)) = run(ops).failed else {
            return false;
        };
        ops.truncate(at + 1);
        what = why;
        true
    };
    assert!(fails(&mut ops), "it failed once and not again");
    let mut parts: VecDeque<usize> =
        std::iter::successors(Some(ops.len() / 2), |n| (*n > 1).then_some(n / 2)).collect();
    // The last pass is repeated while it still finds something to leave out.
    while let Some(part) = parts.pop_front() {
        let (mut at, mut shorter) = (0, false);
        while at < ops.len() && part > 0 {
            let mut without = ops.clone();
            without.drain(at..(at + part).min(ops.len()));
            if fails(&mut without) {
                ops = without;
                shorter = true;
            } else {
                at += part;
            }
        }
        if part == 1 && shorter {
            parts.push_back(1);
        }
    }
    fails(&mut ops);
    (ops, what)
}

fn variable<T>(name: &str, parse: impl Fn(&str) -> T, usual: T) -> T {
    std::env::var(name).map_or(usual, |text| parse(&text))
}

#[test]
fn the_pool_counts_as_the_kernel_does() {
    referee(beside_the_kernel);
}

#[test]
fn hugetlb_pages_are_the_kernels_and_keep_what_they_hold() {
    referee(of_hugetlb_pages);
}

fn referee(run: fn(&[Op]) -> Outcome) {
    let _alone = Alone::new();
    if !rustix::process::geteuid().is_root() {
        return skip("needs root, for the kernel's pool");
    }
    if fs::metadata(POOL).is_err() {
        return skip("the kernel has no pool of 2M pages");
    }
    if !is_unused() {
        return skip("another process uses the kernel's pool of 2M pages");
    }
    let mut knobs = Knobs::new();
    for knob in ["nr_hugepages", "nr_overcommit_hugepages"] {
        assert!(knobs.set(format!("{POOL}/{knob}"), 0), "{knob}");
    }
    let number = |text: &str| text.trim().parse().expect("a number");
    let steps = variable(
        "JUMBO_REFEREE_STEPS",
        |text| usize::try_from(number(text)).unwrap(),
        STEPS,
    );
    let list = |text: &str| text.split(',').map(number).collect();
    for seed in variable("JUMBO_REFEREE_SEEDS", list, SEEDS.to_vec()) {
        let mut random = Random::new(seed);
        let ops: Vec<Op> = (0..steps).map(|_| Op::any(&mut random)).collect();
        let Some(outcome) = run_undisturbed(&ops, run) else {
            return skip("another process uses the kernel's pool of 2M pages meanwhile");
        };
        println!(
            "seed {seed}: {steps} operations; of those that can fail {} succeeded and {} were refused, on both sides",
            outcome.succeeded, outcome.refused
        );
        if let Some((at, what)) = outcome.failed {
            let (short, last) = shrink(ops[..(at + 1).min(ops.len())].to_vec(), run);
            let mut text = String::new();
            for op in &short {
                writeln!(text, "  {op:?}").unwrap();
            }
            drop(knobs);
            panic!(
                "seed {seed}, step {at}: {what}\nshortened to {} operations:\n{text}which ends in: {last}",
                short.len()
            );
        }
        assert!(
            outcome.refused * 20 > outcome.succeeded,
            "the limits were hardly met"
        );
    }
}
