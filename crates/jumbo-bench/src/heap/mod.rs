//! `jumbo bench heap`: what the heap gains, and what the launcher and the wrapped `free` cost.
//!
//! One load ([`worker::load`]) in four variants: plain glibc, plain glibc once more (the A/A row), glibc with its own
//! switch for huge pages, and `jumbo run`. A run without huge pages that was to have them, or with some that was
//! to have none, is an error and no figure.

mod plan;
#[expect(
    unsafe_code,
    reason = "measures malloc and free themselves, called by name on raw pointers"
)]
mod raw;
pub mod worker;

use std::ffi::OsStr;
use std::time::Instant;

use jumbo::kernel::Root;
use jumbo::units::Bytes;

use crate::child::{self, Launch, answer, run};
use crate::claim;
use crate::machine::Machine;
use crate::memory::{Memory, TRIES, Warmer, room};
use crate::rounds::alternate;
use crate::stats::median;
use crate::table::{Row, Table, Unit};
use crate::{Error, Progress, Settings};
use worker::{FreeSample, LoadSample};

/// The least size of the load: below, the bookkeeping of the measurement would weigh as much as what is measured.
pub const MIN_SIZE: Bytes = Bytes(32 << 20);

/// The variants of each measurement, the baseline twice.
const LOADS: [Launch; 4] = [Launch::Plain, Launch::Plain, Launch::Tunable, Launch::JUMBO];
const COSTS: [Launch; 3] = [Launch::Plain, Launch::Plain, Launch::JUMBO];

/// A start takes a millisecond and a `free` a few nanoseconds, so the differences drown in noise unless each round
/// looks at many.
const STARTS_A_ROUND: usize = 40;
const FREES_A_ROUND: usize = 5;

/// How often the tunable is tried: where every second start ignores it, one measurement in a thousand fails.
const TUNABLE_TRIES: usize = 15;

/// Names the second run of the baseline.
const AGAIN: &str = "plain again";

/// Measures the table, with a load of `size` bytes.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, size: Bytes, progress: &dyn Progress) -> Result<Table, Error> {
    let root = Root::host();
    let machine = Machine::read(&root)?;
    room(&root, footprint(size))?;
    let mut warmer = Warmer::new(&root);
    let rounds = settings.rounds.get();
    progress.begin(LOADS.len() * (rounds + 1) + 2 * rounds);

    // The warm-up is a whole round, in which the host of a virtual machine backs the memory of the rounds to come.
    let load = |round: usize, variant: usize| {
        let launch = LOADS[variant];
        progress.step(&match round {
            0 => format!("warm-up: {}", launch.name()),
            _ => format!("round {round} of {rounds}: {}", launch.name()),
        });
        run_load(settings, &mut warmer, launch, size)
    };
    let loads: [Vec<LoadSample>; 4] = alternate(rounds + 1, load)?;
    let (mut starts, mut frees) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        progress.step(&format!("round {round} of {rounds}: start-up"));
        starts.push(round_of(STARTS_A_ROUND, |launch| {
            let side = format!("start-up: {}", launch.name());
            warmer.sample((&side, Bytes(0)), TRIES, || time_start(settings, launch))
        })?);
        progress.step(&format!("round {round} of {rounds}: free"));
        frees.push(round_of(FREES_A_ROUND, |launch| {
            let side = format!("free: {}", launch.name());
            warmer.sample((&side, Bytes(0)), TRIES, || time_free(settings, launch))
        })?);
    }

    let mut table = Table::new("heap", format!("{size} of objects"), rounds, machine);
    push_loads(&mut table, &loads.map(|mut samples| samples.split_off(1)));
    push_costs(&mut table, &starts, &frees);
    table.set_hit(warmer.hit());
    Ok(table)
}

/// A figure of every load, as a cost.
type Figure = fn(&LoadSample) -> f64;

fn push_loads(table: &mut Table, loads: &[Vec<LoadSample>; 4]) {
    const NAMES: [&str; 4] = ["plain", AGAIN, "hugetlb=1", "jumbo run"];
    let [plain, again, tunable, jumbo] = [0, 1, 2, 3];
    let row = |name, measure, unit, figure: Figure, baseline: usize, candidate: usize| {
        let samples = |side: usize| loads[side].iter().map(figure).collect::<Vec<_>>();
        Row::ratio(
            (name, measure, unit),
            (NAMES[baseline], &samples(baseline)),
            (NAMES[candidate], &samples(candidate)),
        )
    };
    let (total, resident): (Figure, Figure) =
        (LoadSample::total_ms, |load| load.memory.resident.0 as f64);

    table.push(row(
        "heap_aa",
        "all phases, A/A",
        Unit::Ms,
        total,
        plain,
        again,
    ));
    table.push(
        row(
            "heap_tunable",
            "all phases",
            Unit::Ms,
            total,
            plain,
            tunable,
        )
        .published("1.77"),
    );
    table.push(
        row("heap_total", "all phases", Unit::Ms, total, plain, jumbo)
            .published("mimalloc 1.75, tcmalloc 1.73, jemalloc 1.54"),
    );
    table.push(row(
        "heap_vs_tunable",
        "all phases",
        Unit::Ms,
        total,
        tunable,
        jumbo,
    ));
    let phases: [(&str, &str, &str, Figure); 3] = [
        (
            "heap_alloc",
            "heap_alloc_vs_tunable",
            "allocate and write",
            |load| load.alloc_ms,
        ),
        (
            "heap_chase",
            "heap_chase_vs_tunable",
            "link and chase",
            |load| load.chase_ms,
        ),
        ("heap_free", "heap_free_vs_tunable", "free", |load| {
            load.free_ms
        }),
    ];
    for (name, vs_tunable, measure, figure) in phases {
        table.push(row(name, measure, Unit::Ms, figure, plain, jumbo));
        table.push(row(vs_tunable, measure, Unit::Ms, figure, tunable, jumbo));
    }
    table.push(row(
        "rss",
        "resident memory",
        Unit::Bytes,
        resident,
        plain,
        jumbo,
    ));
}

fn push_costs(table: &mut Table, starts: &[[f64; 3]], frees: &[[f64; 3]]) {
    let mut push =
        |name, measure, unit, rounds: &[[f64; 3]], baseline, candidate: (&'static str, usize)| {
            let samples = |side: usize| rounds.iter().map(|round| round[side]).collect::<Vec<_>>();
            table.push(Row::difference(
                (name, measure, unit),
                (baseline, &samples(0)),
                (candidate.0, &samples(candidate.1)),
            ));
        };
    push(
        "startup_aa_ms",
        "start of `true`, A/A",
        Unit::Ms,
        starts,
        "direct",
        ("direct again", 1),
    );
    push(
        "startup_ms",
        "start of `true`",
        Unit::Ms,
        starts,
        "direct",
        ("jumbo run", 2),
    );
    push(
        "small_free_aa_ns",
        "free of 64 bytes, A/A",
        Unit::Ns,
        frees,
        "plain",
        (AGAIN, 1),
    );
    push(
        "small_free_ns",
        "free of 64 bytes",
        Unit::Ns,
        frees,
        "plain",
        ("jumbo run", 2),
    );
}

/// A sample of the load. glibc 2.36 ignores its own tunable in some starts (it compares a text that it has
/// not terminated); such a run is plain, is no sample of the tunable, and is repeated.
fn run_load(
    settings: &Settings,
    warmer: &mut Warmer,
    launch: Launch,
    size: Bytes,
) -> Result<LoadSample, Error> {
    let tries = match launch {
        Launch::Tunable => TUNABLE_TRIES,
        _ => TRIES,
    };
    warmer.sample((&launch.name(), size), tries, || {
        let sample: LoadSample = worker_answer(settings, launch, &["load", &size.0.to_string()])?;
        check_claim(launch, &sample.memory)?;
        check_huge(launch, &sample.memory)?;
        Ok(sample)
    })
}

fn time_free(settings: &Settings, launch: Launch) -> Result<f64, Error> {
    let sample: FreeSample = worker_answer(settings, launch, &["free"])?;
    check_claim(launch, &sample.memory)?;
    Ok(sample.free_ns)
}

/// Starts a program that does nothing and waits for its end.
fn time_start(settings: &Settings, launch: Launch) -> Result<f64, Error> {
    let mut command = launch.command(&settings.jumbo, OsStr::new("true"));
    let clock = Instant::now();
    run(&mut command)?;
    Ok(clock.elapsed().as_secs_f64() * 1e3)
}

/// The median of each of [`COSTS`], of so many alternating samples.
fn round_of(
    samples: usize,
    mut measure: impl FnMut(Launch) -> Result<f64, Error>,
) -> Result<[f64; COSTS.len()], Error> {
    let samples = alternate(samples, |_, variant| measure(COSTS[variant]))?;
    Ok(samples.map(|samples: Vec<f64>| median(&samples)))
}

fn worker_answer<T: serde::de::DeserializeOwned>(
    settings: &Settings,
    launch: Launch,
    words: &[&str],
) -> Result<T, Error> {
    answer(&mut child::worker(launch, &settings.jumbo, words))
}

/// Whether the process was started the way it should have been, as far as every worker can tell.
fn check_claim(launch: Launch, memory: &Memory) -> Result<(), Error> {
    claim::launched(launch, memory)?;
    match launch {
        Launch::Plain => claim::no_huge_pages(launch, memory),
        _ => Ok(()),
    }
}

/// Whether a process that was to have huge pages has them.
fn check_huge(launch: Launch, memory: &Memory) -> Result<(), Error> {
    // Alignment and small remainders cost a few percent; with half on base pages it is another program.
    if launch == Launch::Plain || memory.huge.0 >= memory.resident.0 / 2 {
        return Ok(());
    }
    claim::refuse(
        launch,
        format!(
            "{} of its {} are in huge pages, less than half",
            memory.huge, memory.resident
        ),
        claim::DOCTOR,
    )
}

/// What a load of `size` bytes takes with its bookkeeping, and with what alignment wastes.
fn footprint(size: Bytes) -> Bytes {
    size + Bytes(size.0 / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(huge: u64, preloaded: bool) -> Memory {
        Memory {
            resident: Bytes(100),
            huge: Bytes(huge),
            hugetlb: Bytes(0),
            preloaded,
        }
    }

    #[test]
    fn a_side_that_is_not_what_it_claims_is_refused() {
        for (launch, memory, fine) in [
            (Launch::Plain, memory(0, false), true),
            (Launch::Plain, memory(1, false), false),
            (Launch::Plain, memory(0, true), false),
            (Launch::Tunable, memory(90, false), true),
            (Launch::Tunable, memory(90, true), false),
            (Launch::JUMBO, memory(90, true), true),
            (Launch::JUMBO, memory(90, false), false),
        ] {
            assert_eq!(
                check_claim(launch, &memory).is_ok(),
                fine,
                "{launch:?} {memory:?}"
            );
        }
    }
}
