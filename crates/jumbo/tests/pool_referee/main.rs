//! Comparison with the kernel: random operations on a pool and on hugetlb, whose counters must be
//! equal after every step.
//!
//! `take` is a touch of a MAP_NORESERVE mapping, `reserve` a shared mapping, `use` a touch in it,
//! `give` an munmap or a hole in its file, `resize` and `overcommit` the knobs of the kernel's
//! pool. The test compares (total, free, reserved, surplus) and the success of each operation.
//!
//! The pool of the first test has model pages. The second runs the same operations on a pool of
//! hugetlb pages and a model pool: their counters must be equal, the kernel must have as many pages
//! in use, and each page must keep its contents.
//!
//! `JUMBO_REFEREE_SEEDS` (a list) and `JUMBO_REFEREE_STEPS` override the defaults. A failing
//! sequence is shortened while it still fails, and printed with its seed.
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
/// Maximum number of kernel pages in a sequence, for hosts with 8 GiB.
const MAX_PAGES: u64 = 24;
/// Maximum repetitions of a sequence until two runs agree.
const MAX_RETRIES: u32 = 5;
/// Maximum runs to shorten a failing sequence.
const MAX_SHRINK_RUNS: u32 = 300;
/// Kernel pool of the hugetlb pages: less than a sequence may request.
const PERSISTENT_PAGES: u64 = 10;
const SURPLUS_PAGES: u64 = 6;

#[derive(Clone, Copy, Debug)]
enum Op {
    Take,
    Give(usize),
    /// A shared mapping of a file.
    Reserve(u64),
    /// A private mapping with a reservation.
    ReservePrivate(u64),
    Use(usize),
    End(usize),
    Resize(u64),
    Overcommit(u64),
    /// Takes a part of a page, of this order; without folio support a page, if one was split.
    Folio(u32),
    /// Frees a folio; without folio support the page, if it was the last folio.
    GiveFolio(usize),
    /// No operation, for a side without folio support.
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
            92..96 => Self::Resize(random.below(MAX_PAGES / 2)),
            _ => Self::Overcommit(random.below(MAX_PAGES / 2)),
        }
    }
}

/// Result of an operation that can fail; `None` if there was nothing to do.
type Answer = Option<Result<(), String>>;

/// One side of the comparison.
trait Side {
    /// Executes an operation. The error is a failure of the test.
    fn step(&mut self, op: Op) -> Result<Answer, String>;
    /// Returns (total, free, reserved, surplus).
    fn counters(&self) -> [u64; 4];
}

fn text<E: ToString>(result: Result<(), E>) -> Result<(), String> {
    result.map_err(|error| error.to_string())
}

fn write(name: &str, value: u64) {
    fs::write(format!("{POOL}/{name}"), value.to_string()).unwrap();
}

/// Result of a sequence.
#[derive(Default)]
struct Outcome {
    /// Number of the failing step, and its error.
    failed: Option<(usize, String)>,
    succeeded: usize,
    refused: usize,
}

impl Outcome {
    /// Executes one step on both sides; `and` compares further state.
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

    /// Runs the sequence and finally frees everything.
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

/// Runs a pool and the kernel.
fn beside_the_kernel(ops: &[Op]) -> Outcome {
    write("nr_overcommit_hugepages", 0);
    write("nr_hugepages", 0);
    // Other programs of this host do not know the lock.
    is_unused();
    // More pages than a sequence requests: the kernel's buddy allocator has more, too.
    let model = Model::of_size(PageSize::SIZE_2M, &[512]).unwrap();
    let pool = Pool::new(model, Placement::ANYWHERE);
    Outcome::run(ops, &mut Ours::new(&pool), &mut Kernels::new(), &|_| Ok(()))
}

/// Runs a pool of hugetlb pages and a model pool.
fn of_hugetlb_pages(ops: &[Op]) -> Outcome {
    write("nr_overcommit_hugepages", 0);
    write("nr_hugepages", 0);
    is_unused();
    write("nr_hugepages", PERSISTENT_PAGES);
    write("nr_overcommit_hugepages", SURPLUS_PAGES);
    let most = PERSISTENT_PAGES + SURPLUS_PAGES;
    let source = Hugetlb::with_capacity(&Root::host(), PageSize::SIZE_2M, Pages(64)).unwrap();
    let pool = Pool::new(source, Placement::ANYWHERE);
    let model = Model::new(&[u32::try_from(most).unwrap()]).unwrap();
    let model = Pool::new(model, Placement::ANYWHERE);
    let kernels = |ours: &Ours<'_>| {
        let used = ours.pool.counters().total.0;
        let total = used.max(PERSISTENT_PAGES);
        let expected = [total, total - used, 0, total - PERSISTENT_PAGES];
        let kernels = kernel_counters();
        (kernels == expected).then_some(()).ok_or_else(|| {
            format!(
                "(total, free, reserved, surplus): the kernel has {kernels:?} and not {expected:?}"
            )
        })
    };
    Outcome::run(ops, &mut Ours::new(&pool), &mut Ours::new(&model), &kernels)
}

/// Returns the result of a sequence once two runs agree; `None` if another process keeps using the
/// kernel's pool.
fn run_undisturbed(ops: &[Op], run: fn(&[Op]) -> Outcome) -> Option<Outcome> {
    let mut before = None;
    for _ in 0..MAX_RETRIES {
        let outcome = run(ops);
        if outcome.failed.is_none() || outcome.failed == before {
            return Some(outcome);
        }
        before = outcome.failed;
    }
    None
}

/// Returns the shortest failing sequence found by omitting parts, halves first.
fn shrink(mut ops: Vec<Op>, run: fn(&[Op]) -> Outcome) -> (Vec<Op>, String) {
    let (mut what, mut runs) = (String::new(), 0);
    let mut fails = |ops: &mut Vec<Op>| {
        runs += 1;
        if runs > MAX_SHRINK_RUNS {
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
    // The last pass repeats while it finds a part to omit.
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
