//! `jumbo bench free`: giving back a large block with one thread, with several, and without waiting for it.
//!
//! The block comes from `malloc` and goes by `free`, touched in base pages: that is where time is lost. The rows on what
//! must not become slower (huge-mapped ranges, small ones) go by `munmap`, which is where jumbo looks at each
//! range that a program gives back.
//!
//! That several threads freed is not concluded from the time: each sample has the preload library's own count of
//! them, and is refused where it is not what the row says.

mod worker;

pub(crate) use worker::{Freeing, blocks, ranges, unmap};

use std::num::NonZeroU32;

use jumbo::kernel::{Root, thp};
use jumbo::units::Bytes;

use crate::child::{Launch, ask};
use crate::claim;
use crate::group::Group;
use crate::memory::{footprint, room};
use crate::stats::median;
use crate::table::Table;
use crate::worker::Task;
use crate::{Error, Settings, group};

/// The least size of the block: below, jumbo leaves it to the caller.
pub const MIN_SIZE: Bytes = Bytes(256 << 20);

/// The size of the huge-mapped range, or that of the block where that is smaller: so large that jumbo looks at it before it leaves it to
/// the kernel.
const HUGE: Bytes = Bytes(2 << 30);

/// A block of the row on the host as it is found.
const BLOCK: Bytes = Bytes(128 << 20);

/// A range of a `Gather`, and how many base pages one hands over at a time: the last is what it does by default.
const RANGE: Bytes = Bytes(1 << 20);
const FLUSHES: [u64; 3] = [1 << 10, 32 << 10, 256 << 10];

/// What a program maps and unmaps all the time, in MiB.
const SMALL: [u64; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Measures the table, with a block of `size` bytes and with so many threads.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, size: Bytes, workers: &[NonZeroU32]) -> Result<Table, Error> {
    room(&Root::host(), footprint(size))?;

    // A `munmap` takes microseconds and must be compared within a hundredth, so each round looks at many, by many
    // processes in turn: such a machine is slow or fast for half a second at a time. Who measures a small block wants
    // to know soon.
    let [huge, small] = match size >= HUGE {
        true => [(6, 2), (15, 3)],
        false => [(1, 1), (3, 1)],
    };
    let names = ("huge_inline", "munmap of huge pages");
    let mut huge = unmaps(settings, names, (vec![HUGE.min(size)], true), huge);
    huge.optional = Error::is_of_host;
    let sizes = SMALL.map(|mib| Bytes(mib << 20)).to_vec();
    let names = ("small_inline", "munmap of 1 to 64 MiB");
    let small = unmaps(settings, names, (sizes, false), small);
    let table = Table::new("free", format!("{size} in base pages"), settings)?;
    let (frees, found) = (frees(settings, size, workers), found(settings, size));
    let groups = vec![frees, huge, small, found, gathers(settings, size)];
    group::measure(settings, table, groups)
}

fn frees<'a>(settings: &'a Settings, size: Bytes, workers: &[NonZeroU32]) -> Group<'a> {
    let mut group = Group::new(settings, "free");
    let mut side = |launch, how, freed| {
        let claims = [claim::base(size), freed].concat();
        group.asks(launch, Task::Blocks(size, 1, how), size, claims)
    };
    let plain = side(Launch::Plain, Freeing::BaseAndBack, vec![claim::back()]);
    let by: Vec<_> = workers
        .iter()
        .map(|workers| {
            let launch = Launch::Jumbo(format!("--free=sync --free-workers={workers}"));
            let claims = freed_by(workers.get(), size);
            (workers.get(), side(launch, Freeing::Base, claims))
        })
        .collect();
    let background = Launch::Jumbo("--free=background".to_owned());
    let later = vec![claim::freed_later(size), claim::back()];
    let background = side(background, Freeing::BaseAndBack, later);
    group.against_itself(("free_aa", "free", "call_ms"), plain);
    for (workers, side) in by {
        let measure = match workers {
            1 => "free by 1 thread".to_owned(),
            _ => format!("free by up to {workers} threads"),
        };
        let name = format!("free_{workers}_workers");
        let row = group.ratio((&name, &measure, "call_ms"), [plain, side]);
        row.published = published(workers);
    }
    let sides = [plain, background];
    let what = ("free_background_call", "free, until it returns", "call_ms");
    group.ratio(what, sides);
    group.value("background_call_ms", "call_ms", background);
    let measure = "free, until the memory is back";
    group.ratio(("free_background_back", measure, "back_ms"), sides);
    group
}

fn freed_by(threads: u32, size: Bytes) -> Vec<claim::Claim> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    claim::freed_by(threads, size, cpus as u64)
}

/// Blocks as large as jumbo looks at where the host brings no huge pages, with the host as it is found: where huge pages are
/// to be had jumbo's side is on them.
fn found(settings: &Settings, size: Bytes) -> Group<'_> {
    let root = Root::host();
    let is_never = thp::pmd_size(&root).is_ok_and(|pmd| thp::is_never(&root, pmd));
    let (measure, claims) = match is_never {
        true => (
            "free of blocks, host as found (THP never)",
            freed_by(u32::MAX, size),
        ),
        false => ("free of blocks, host as found (THP not never)", Vec::new()),
    };
    let count = usize::try_from(size.0 / BLOCK.0).unwrap_or(1);
    let mut group = Group::new(settings, measure);
    let task = Task::Blocks(BLOCK, count, Freeing::AsFound);
    let plain = group.asks(Launch::Plain, task.clone(), size, Vec::new());
    let jumbo = group.asks(Launch::JUMBO, task, size, claims);
    group.against_itself(("blocks_found_aa", measure, "call_ms"), plain);
    group.ratio(("blocks_found", measure, "call_ms"), [plain, jumbo]);
    group
}

/// Many ranges by a `Gather` of the program's own, by how much it hands over at a time.
fn gathers(settings: &Settings, size: Bytes) -> Group<'_> {
    let count = usize::try_from(size.0 / RANGE.0).unwrap_or(1);
    let mut group = Group::new(settings, "Gather");
    let mut side = |name: String, flush| {
        let what = (Launch::Plain, Task::Ranges(RANGE, count, flush));
        let claims = claim::base(size);
        group.side(name, size, move || ask(settings, &what, &claims))
    };
    let plain = side("munmap".to_owned(), None);
    let by = FLUSHES.map(|pages| (pages, side(format!("flush_pages {pages}"), Some(pages))));
    let measure = "ranges of 1 MiB, munmap each";
    group.against_itself(("gather_aa", measure, "call_ms"), plain);
    for (pages, side) in by {
        let measure = format!("ranges of 1 MiB, Gather with {pages} flush_pages");
        let name = format!("gather_{pages}_pages");
        group.ratio((&name, &measure, "call_ms"), [plain, side]);
    }
    group
}

/// What the series "mm: parallel free" of 2017 came to with so many threads.
const fn published(workers: u32) -> Option<&'static str> {
    match workers {
        1 => Some("1.21"),
        2 => Some("1.91"),
        4 => Some("2.23"),
        8 => Some("2.26"),
        16 => Some("2.23"),
        32 => Some("1.74"),
        _ => None,
    }
}

/// A row on mappings of these sizes, unmapped by so many processes, each so many times.
fn unmaps<'a>(
    settings: &'a Settings,
    (name, measure): (&str, &'static str),
    (sizes, huge): (Vec<Bytes>, bool),
    (processes, times): (usize, usize),
) -> Group<'a> {
    let mut group = Group::new(settings, measure).laps(processes, median);
    let all = Bytes(sizes.iter().map(|size| size.0).sum::<u64>() * times as u64);
    let largest = sizes.iter().copied().max().unwrap_or_default();
    let [plain, jumbo] = [Launch::Plain, Launch::JUMBO].map(|launch| {
        let task = Task::Unmap(sizes.clone(), huge, times);
        let (name, what) = (launch.name(), (launch, task));
        let claims = if huge {
            claim::huge(all)
        } else {
            claim::base(all)
        };
        group.side(name, largest, move || {
            room(&Root::host(), footprint(largest))?;
            ask(settings, &what, &claims)
        })
    });
    group.against_itself((&format!("{name}_aa"), measure, "unmap_us"), plain);
    group.ratio((name, measure, "unmap_us"), [plain, jumbo]);
    group
}
