//! `jumbo bench heap`: what the heap gains, and what the launcher and the wrapped `free` cost.
//!
//! One load ([`load`]) in four variants: plain glibc, plain glibc once more (the A/A row), glibc with its own
//! switch for huge pages, and `jumbo run`. A run without huge pages that was to have them, or with some that was
//! to have none, is an error and no figure.

mod load;
mod plan;
#[expect(unsafe_code, reason = "follows raw pointers, as a C program would")]
mod ring;

pub(crate) use load::{TOTAL, load, small_free};

use std::ffi::OsStr;
use std::process::Stdio;
use std::time::Instant;

use jumbo::kernel::Root;
use jumbo::units::Bytes;

use crate::child::{Launch, Talk, ask};
use crate::group::{Figures, Group};
use crate::machine::Machine;
use crate::memory::{Memory, room};
use crate::stats::median;
use crate::table::Table;
use crate::worker::{Task, ms};
use crate::{Error, Progress, Settings, claim, group};

/// The least size of the load: below, the bookkeeping of the measurement would weigh as much as what is measured.
pub const MIN_SIZE: Bytes = Bytes(32 << 20);

/// A start takes a millisecond and a `free` a few nanoseconds, so the differences drown in noise unless each round
/// looks at many.
const STARTS_A_ROUND: usize = 40;
const FREES_A_ROUND: usize = 5;

/// How often the tunable is tried. glibc 2.36 ignores its own tunable in some starts (it compares a text that it has
/// not terminated); such a run is plain and no sample of the tunable. Where every second start ignores it, one
/// measurement in a thousand fails.
const TUNABLE_TRIES: usize = 15;

/// Measures the table, with a load of `size` bytes.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, size: Bytes, progress: &dyn Progress) -> Result<Table, Error> {
    let root = Root::host();
    let machine = Machine::read(&root)?;
    // With its bookkeeping, and with what alignment wastes.
    room(&root, size + Bytes(size.0 / 4))?;
    let table = Table::new("heap", format!("{size} of objects"), settings, machine);
    let groups = vec![loads(settings, size), starts(settings), frees(settings)];
    group::measure(settings, progress, table, groups)
}

fn loads(settings: &Settings, size: Bytes) -> Group<'_> {
    let mut group = Group::new("load");
    let sides = [Launch::Plain, Launch::Tunable, Launch::JUMBO];
    let [plain, tunable, jumbo] = sides.map(|launch| {
        group.side(launch.name(), size, move || {
            let sample = ask(&launch, settings, &Task::Load(size))?;
            check(&launch, &sample.memory)?;
            if launch != Launch::Plain {
                // Alignment and small remainders cost a few percent; with half on base pages it is another program.
                claim::huge_pages(&sample.memory, 50, sample.memory.resident)?;
            }
            let mut figures = sample.figures;
            let resident = sample.memory.resident.0 as f64;
            figures.insert("resident_bytes".to_owned(), resident);
            Ok(figures)
        })
    });
    group.tries(tunable, TUNABLE_TRIES);

    let all = "all phases";
    group.against_itself("heap_aa", all, TOTAL, plain);
    group
        .ratio("heap_tunable", all, TOTAL, [plain, tunable])
        .published("1.77");
    group
        .ratio("heap_total", all, TOTAL, [plain, jumbo])
        .published("mimalloc 1.75, tcmalloc 1.73, jemalloc 1.54");
    group.ratio("heap_vs_tunable", all, TOTAL, [tunable, jumbo]);
    for (name, measure, figure) in [
        ("heap_alloc", "allocate and write", "alloc_ms"),
        ("heap_chase", "link and chase", "chase_ms"),
        ("heap_free", "free", "free_ms"),
    ] {
        group.ratio(name, measure, figure, [plain, jumbo]);
        group.ratio(
            format!("{name}_vs_tunable"),
            measure,
            figure,
            [tunable, jumbo],
        );
    }
    group.ratio("rss", "resident memory", "resident_bytes", [plain, jumbo]);
    group
}

/// The start and the end of a program that does nothing.
fn starts(settings: &Settings) -> Group<'_> {
    let time = |launch: Launch| {
        move || {
            let command = launch.command(&settings.jumbo, OsStr::new("true"));
            let clock = Instant::now();
            Talk::start(command, Stdio::piped())?.end()?;
            Ok(Figures::from([(
                "start_ms".to_owned(),
                ms(clock.elapsed()),
            )]))
        }
    };
    let mut group = Group::new("start-up").laps(STARTS_A_ROUND, median);
    let direct = group.side("direct", Bytes(0), time(Launch::Plain));
    let jumbo = group.side("jumbo run", Bytes(0), time(Launch::JUMBO));
    let again = group.again(direct);
    group.difference(
        "startup_aa_ms",
        "start of `true`, A/A",
        "start_ms",
        [direct, again],
    );
    group.difference("startup_ms", "start of `true`", "start_ms", [direct, jumbo]);
    group
}

fn frees(settings: &Settings) -> Group<'_> {
    let mut group = Group::new("free").laps(FREES_A_ROUND, median);
    let [plain, jumbo] = [Launch::Plain, Launch::JUMBO].map(|launch| {
        group.side(launch.name(), Bytes(0), move || {
            let sample = ask(&launch, settings, &Task::SmallFree)?;
            check(&launch, &sample.memory)?;
            Ok(sample.figures)
        })
    });
    let again = group.again(plain);
    group.difference(
        "small_free_aa_ns",
        "free of 64 bytes, A/A",
        "free_ns",
        [plain, again],
    );
    group.difference(
        "small_free_ns",
        "free of 64 bytes",
        "free_ns",
        [plain, jumbo],
    );
    group
}

/// Whether the process was started the way it should have been, as far as every worker can tell.
fn check(launch: &Launch, memory: &Memory) -> Result<(), Error> {
    claim::launched(launch, memory)?;
    match launch {
        Launch::Plain => claim::no_huge_pages(memory),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_that_is_not_what_it_claims_is_refused() {
        for (launch, huge, preloaded, fine) in [
            (Launch::Plain, 0, false, true),
            (Launch::Plain, 1, false, false),
            (Launch::Plain, 0, true, false),
            (Launch::Tunable, 90, false, true),
            (Launch::Tunable, 90, true, false),
            (Launch::JUMBO, 90, true, true),
            (Launch::JUMBO, 90, false, false),
        ] {
            let memory = Memory {
                resident: Bytes(100),
                huge: Bytes(huge),
                preloaded,
                ..Memory::default()
            };
            assert_eq!(
                check(&launch, &memory).is_ok(),
                fine,
                "{launch:?} {memory:?}"
            );
        }
    }
}
