//! `jumbo bench free`: giving back a large block with one thread, with several, and without waiting for it.
//!
//! The block comes from `malloc` and goes by `free`, touched in base pages: that is where time is lost. The rows on what
//! must not become slower (huge-mapped ranges, small ones) go by `munmap`, which is where jumbo looks at each
//! range that a program gives back.
//!
//! That several threads freed is not concluded from the time: each sample has the preload library's own count of
//! them, and is refused where it is not what the row says.

mod worker;

pub(crate) use worker::{BLOCKS, RANGES, UNMAP};

use std::num::NonZeroU32;

use jumbo::units::Bytes;
use jumbo_host::kernel::{Root, thp};

use crate::claim::{self, Claim, within};
use crate::group::{self, Group, rows};
use crate::launch::Launch;
use crate::machine::cpus;
use crate::memory::{footprint, room};
use crate::stats::median;
use crate::table::Table;
use crate::work::Worker;
use crate::{Error, Settings};
use worker::Blocks;

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

/// The sizes that a program maps and unmaps all the time, in MiB.
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
        true => [(true, 6, 2), (false, 15, 3)],
        false => [(true, 1, 1), (false, 3, 1)],
    };
    let sizes = vec![HUGE.min(size)];
    let huge = unmaps(
        settings,
        ("huge_inline", "munmap of huge pages"),
        sizes,
        huge,
    );
    let sizes = SMALL.map(|mib| Bytes(mib << 20)).to_vec();
    let small = unmaps(
        settings,
        ("small_inline", "munmap of 1 to 64 MiB"),
        sizes,
        small,
    );
    let table = Table::new("free", format!("{size} in base pages"), settings)?;
    let (frees, found) = (frees(settings, size, workers), found(settings, size));
    let groups = vec![frees, huge, small, found, gathers(settings, size)];
    group::measure(settings, table, groups)
}

fn frees<'a>(settings: &'a Settings, size: Bytes, workers: &[NonZeroU32]) -> Group<'a> {
    let mut group = Group::new(settings, "free");
    let side = |group: &mut Group<'a>, launch, back, freed| {
        let claims = [claim::base(size), freed].concat();
        let blocks = Blocks {
            size,
            count: 1,
            base: true,
            back,
        };
        group.work(launch, (&BLOCKS, &blocks), size, claims)
    };
    let is_back = claim::at_least("back_ms", 0);
    let plain = side(&mut group, Launch::Plain, true, vec![is_back.clone()]);
    rows! { group; "free_aa" => "free", "call_ms", plain / plain; }
    for workers in workers {
        let launch = Launch::Jumbo(format!("--free=sync --free-workers={workers}"));
        let by = side(
            &mut group,
            launch,
            false,
            freed_by(workers.get(), size, cpus()),
        );
        let (measure, published) = match workers.get() {
            1 => ("free by 1 thread".to_owned(), Some("1.21")),
            n => (format!("free by up to {n} threads"), published(n)),
        };
        rows! { group;
            format!("free_{workers}_workers") => measure, "call_ms", plain / by, published;
        }
    }
    let launch = Launch::Jumbo("--free=background".to_owned());
    let later = vec![
        claim::part_of("background_bytes", MOST_FREED, size),
        is_back,
    ];
    let later = side(&mut group, launch, true, later);
    rows! { group;
        "free_background_call" => "free, until it returns", "call_ms", plain / later;
        "free_background_back" => "free, until the memory is back", "back_ms", plain / later;
    }
    group.value("background_call_ms", "call_ms", later);
    group
}

/// The least part of a block that must have been freed the way the side's name says, in percent:
/// its ends are the caller's.
const MOST_FREED: u64 = 90;

/// Blocks of `size` bytes were freed by up to so many threads, on a machine with so many CPUs.
fn freed_by(threads: u32, size: Bytes, cpus: usize) -> Vec<Claim> {
    let (most, cpus) = (u64::from(threads), cpus as u64);
    if threads == 1 {
        return vec![within("freeing_threads", 0..=1)];
    }
    // Threads that find no CPU find nothing left to free.
    let at_work = within("freeing_threads", cpus.min(most)..=most);
    vec![at_work, claim::part_of("gathered_bytes", MOST_FREED, size)]
}

/// The figures of the series "mm: parallel free" of 2017, with so many threads.
const fn published(workers: u32) -> Option<&'static str> {
    match workers {
        2 => Some("1.91"),
        4 => Some("2.23"),
        8 => Some("2.26"),
        16 => Some("2.23"),
        32 => Some("1.74"),
        _ => None,
    }
}

/// Blocks as large as jumbo looks at where the host brings no huge pages, with the host as it is found: where huge pages are
/// to be had jumbo's side is on them.
fn found(settings: &Settings, size: Bytes) -> Group<'_> {
    let root = Root::host();
    let is_never = thp::pmd_size(&root).is_ok_and(|pmd| thp::is_never(&root, pmd));
    let never = "free of blocks, host as found (THP never)";
    let (measure, claims) = match is_never {
        true => (never, freed_by(u32::MAX, size, cpus())),
        false => ("free of blocks, host as found (THP not never)", Vec::new()),
    };
    let count = usize::try_from(size.0 / BLOCK.0).unwrap_or(1);
    let blocks = Blocks {
        size: BLOCK,
        count,
        base: false,
        back: false,
    };
    let mut group = Group::new(settings, measure);
    let plain = group.work(Launch::Plain, (&BLOCKS, &blocks), size, Vec::new());
    let jumbo = group.work(Launch::JUMBO, (&BLOCKS, &blocks), size, claims);
    rows! { group;
        "blocks_found_aa" => measure, "call_ms", plain / plain;
        "blocks_found" => measure, "call_ms", plain / jumbo;
    }
    group
}

/// Many ranges by a `Gather` of the program's own, by how much it hands over at a time.
fn gathers(settings: &Settings, size: Bytes) -> Group<'_> {
    let count = usize::try_from(size.0 / RANGE.0).unwrap_or(1);
    let mut group = Group::new(settings, "Gather");
    let side = |group: &mut Group<'_>, name: String, flush| {
        let worker = Worker::new(Launch::Plain, &RANGES, &(RANGE, count, flush));
        group.named(name, worker, size, claim::base(size))
    };
    let plain = side(&mut group, "munmap".to_owned(), None);
    let each = "ranges of 1 MiB, munmap each";
    rows! { group; "gather_aa" => each, "call_ms", plain / plain; }
    for pages in FLUSHES {
        let by = side(&mut group, format!("flush_pages {pages}"), Some(pages));
        let measure = format!("ranges of 1 MiB, Gather with {pages} flush_pages");
        rows! { group; format!("gather_{pages}_pages") => measure, "call_ms", plain / by; }
    }
    group
}

/// A row on mappings of these sizes, of huge pages where that is set, unmapped by so many
/// processes, each so many times.
fn unmaps<'a>(
    settings: &'a Settings,
    (name, measure): (&str, &'static str),
    sizes: Vec<Bytes>,
    (huge, processes, times): (bool, usize, usize),
) -> Group<'a> {
    let mut group = Group::new(settings, measure).laps(processes, median);
    if huge {
        group.optional = Error::is_of_host;
    }
    let all = Bytes(sizes.iter().map(|size| size.0).sum::<u64>() * times as u64);
    let largest = sizes.iter().copied().max().unwrap_or_default();
    let unmap = (&UNMAP, &(sizes, huge, times));
    let claims = if huge { claim::huge } else { claim::base }(all);
    let plain = group.work(Launch::Plain, unmap, largest, claims.clone());
    let jumbo = group.work(Launch::JUMBO, unmap, largest, claims);
    rows! { group;
        format!("{name}_aa") => measure, "unmap_us", plain / plain;
        name => measure, "unmap_us", plain / jumbo;
    }
    group
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::figures;

    #[test]
    fn a_side_that_freed_in_another_way_is_refused() {
        let size = Bytes(1000);
        let by = |threads| freed_by(threads, size, 2);
        let later = vec![claim::part_of("background_bytes", MOST_FREED, size)];
        let (one, four) = (by(1), by(4));
        for (claims, gathered, background, threads, fine) in [
            (&one, 0, 0, 0, true),
            (&one, 1000, 0, 1, true),
            (&one, 1000, 0, 2, false),
            (&four, 950, 0, 4, true),
            (&four, 950, 0, 3, true),
            (&four, 950, 0, 1, false),
            (&four, 950, 0, 5, false),
            (&four, 500, 0, 4, false),
            (&four, 0, 0, 0, false),
            (&later, 1000, 1000, 2, true),
            (&later, 1000, 100, 2, false),
            (&vec![claim::at_least("back_ms", 0)], 0, 0, 0, false),
        ] {
            let figures = figures([
                ("gathered_bytes", f64::from(gathered)),
                ("background_bytes", f64::from(background)),
                ("freeing_threads", f64::from(threads)),
                ("preload_libraries", 1.0),
            ]);
            let checked = claim::check(claims, &Launch::JUMBO, &figures);
            assert_eq!(checked.is_ok(), fine, "{claims:?} {figures:?} {checked:?}");
        }
    }
}
