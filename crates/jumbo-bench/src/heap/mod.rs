//! `jumbo bench heap`: gains of the heap, and costs of the launcher and of the wrapped `free`.
//!
//! One load (`load`) on three sides: plain glibc, plain again (the A/A row), and `jumbo run`. A
//! sample without the huge pages that its side claims, or with some
//! where it claims none, is an error.

mod load;
mod plan;
#[expect(unsafe_code, reason = "follows raw pointers, as a C program would")]
mod ring;

pub(crate) use load::{TOTAL_MS, large_pairs, load, small_free};

use jumbo::units::Bytes;

use crate::claim;
use crate::figures::figures;
use crate::group::{self, Group, rows};
use crate::launch::Launch;
use crate::memory::check_available;
use crate::stats::median;
use crate::table::Table;
use crate::task::Task;
use crate::work;
use crate::{Error, Settings};

/// Minimum size of the load: below, the bookkeeping of the measurement has a comparable size.
pub const MIN_SIZE: Bytes = Bytes(32 << 20);

/// Laps per round. A start takes a millisecond, a `free` nanoseconds: one is lost in noise.
const STARTS_PER_ROUND: usize = 40;
const FREES_PER_ROUND: usize = 5;

/// Measures the table, with a load of `size` bytes.
pub fn measure(settings: &Settings, size: Bytes) -> Result<Table, Error> {
    // The bookkeeping, and waste by alignment, included.
    check_available(size + Bytes(size.0 / 4))?;
    let table = Table::new("heap", format!("{size} of objects"), settings)?;
    let groups = vec![
        loads(settings, size),
        starts(settings),
        frees(settings),
        pairs(settings),
    ];
    group::measure(settings, table, groups)
}

fn loads(settings: &Settings, size: Bytes) -> Group<'_> {
    let mut group = Group::new(settings, "load");
    let mut side = |launch, claims| group.work(launch, Task::Load(size), size, claims);
    let plain = side(Launch::Plain, claim::no_huge());
    let jumbo = side(Launch::JUMBO, claim::half_huge());
    let (all, peers) = ("all phases", "mimalloc 1.75, tcmalloc 1.73, jemalloc 1.54");
    let [write, chase, free] = ["allocate and write", "link and chase", "free"];
    rows! { group;
        "heap_aa" => all, TOTAL_MS, plain / plain;
        "heap_total" => all, TOTAL_MS, plain / jumbo, peers;
        "heap_alloc" => write, "alloc_ms", plain / jumbo;
        "heap_chase" => chase, "chase_ms", plain / jumbo;
        "heap_free" => free, "free_ms", plain / jumbo;
        "rss" => "resident memory", "resident_bytes", plain / jumbo;
    }
    group
}

/// Start and end of a program that does nothing.
fn starts(settings: &Settings) -> Group<'_> {
    let time = |launch: Launch| {
        move || {
            let time = work::time(&launch, settings, "true")?;
            Ok(figures([("start_ms", time)]))
        }
    };
    let mut group = Group::new(settings, "start-up").laps(STARTS_PER_ROUND, median);
    let direct = group.side("direct", Bytes(0), time(Launch::Plain));
    let jumbo = group.side("jumbo run", Bytes(0), time(Launch::JUMBO));
    let what = "start of `true`";
    rows! { group;
        "startup_aa_ms" => what, "start_ms", direct - direct;
        "startup_ms" => what, "start_ms", jumbo - direct;
    }
    group
}

fn pairs(settings: &Settings) -> Group<'_> {
    let mut group = Group::new(settings, "pairs").laps(FREES_PER_ROUND, median);
    let mut side = |launch, claims| group.work(launch, Task::LargePairs, Bytes(0), claims);
    let plain = side(Launch::Plain, claim::no_huge());
    let jumbo = side(Launch::JUMBO, Vec::new());
    let what = "malloc and free of 200 KiB, in a further thread";
    rows! { group;
        "large_pair_aa" => what, "pair_ns", plain / plain;
        "large_pair" => what, "pair_ns", plain / jumbo;
    }
    group
}

fn frees(settings: &Settings) -> Group<'_> {
    let mut group = Group::new(settings, "free").laps(FREES_PER_ROUND, median);
    let mut side = |launch, claims| group.work(launch, Task::SmallFree, Bytes(0), claims);
    let plain = side(Launch::Plain, claim::no_huge());
    let jumbo = side(Launch::JUMBO, Vec::new());
    let what = "free of 64 bytes";
    rows! { group;
        "small_free_aa_ns" => what, "free_ns", plain - plain;
        "small_free_ns" => what, "free_ns", jumbo - plain;
    }
    group
}
