//! `jumbo bench free`: freeing a large block by one thread, by several, and in the background.
//!
//! The block comes from `malloc` on base pages, and `free` releases it: the expensive case. Cases
//! that must not become slower (huge-mapped ranges, small ones) use `munmap`, where jumbo examines
//! each range.
//!
//! The number of freeing threads is not inferred from the time: each sample contains the preload
//! library's count, and is rejected if that differs from the row.

use std::num::NonZeroU32;

use jumbo::units::Bytes;

use crate::claim::{self, Claim, within};
use crate::group::{self, Group, rows};
use crate::launch::Launch;
use crate::machine::cpus;
use crate::memory::{check_available, footprint};
use crate::stats::median;
use crate::table::Table;
use crate::task::{Action, AllocCall, MemoryTask, Task};
use crate::{Error, Settings};

/// Minimum size of the block: jumbo leaves smaller ones to the caller.
pub const MIN_SIZE: Bytes = Bytes(256 << 20);

/// Maximum size of the huge-mapped range: jumbo examines it before it leaves it to the kernel.
const HUGE_RANGE_BYTES: Bytes = Bytes(2 << 30);

/// Sizes that programs map and unmap often, in MiB.
const SMALL_RANGES_MIB: [u64; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Minimum share of a block that must be freed as claimed: the caller frees its ends.
const MIN_FREED_PERCENT: u64 = 90;

/// Figures of the series "mm: parallel free" of 2017, by number of threads.
const PUBLISHED: [(u32, &str); 6] = [
    (1, "1.21"),
    (2, "1.91"),
    (4, "2.23"),
    (8, "2.26"),
    (16, "2.23"),
    (32, "1.74"),
];

/// Measures the table, with a block of `size` bytes and these numbers of threads.
pub fn measure(settings: &Settings, size: Bytes, workers: &[NonZeroU32]) -> Result<Table, Error> {
    check_available(footprint(size))?;
    // `munmap` takes microseconds and must be compared within a percent, so each round has many
    // calls by several processes: a virtual machine is slow or fast for half a second at a time.
    // Small blocks are for quick measurements.
    let [huge, small] = match size >= HUGE_RANGE_BYTES {
        true => [(6, 2), (15, 3)],
        false => [(1, 1), (3, 1)],
    };
    let what = ("huge_inline", "munmap of huge pages");
    let sizes = vec![HUGE_RANGE_BYTES.min(size)];
    let huge = unmaps(settings, what, (AllocCall::MapHuge, sizes), huge);
    let what = ("small_inline", "munmap of 1 to 64 MiB");
    let sizes = SMALL_RANGES_MIB.map(|mib| Bytes(mib << 20)).to_vec();
    let small = unmaps(settings, what, (AllocCall::Map, sizes), small);
    let table = Table::new("free", format!("{size} in base pages"), settings)?;
    let groups = vec![frees(settings, size, workers), huge, small];
    group::measure(settings, table, groups)
}

fn frees<'a>(settings: &'a Settings, size: Bytes, workers: &[NonZeroU32]) -> Group<'a> {
    let mut group = Group::new(settings, "free");
    let side = |group: &mut Group<'a>, launch, then, freed| {
        let claims = [claim::base(size), freed].concat();
        group.work(launch, Task::block(size, true, then), size, claims)
    };
    let is_back = claim::at_least("back_ms", 0);
    let watched = vec![is_back.clone()];
    let plain = side(&mut group, Launch::Plain, Action::FreeAndWatch, watched);
    rows! { group; "free_aa" => "free", "call_ms", plain / plain; }
    for workers in workers.iter().map(|workers| workers.get()) {
        let launch = Launch::at_once(&format!("--free=sync --free-workers={workers}"));
        let freed = freed_by(workers, size, cpus());
        let by = side(&mut group, launch, Action::Free, freed);
        let measure = match workers {
            1 => "free by 1 thread".to_owned(),
            n => format!("free by up to {n} threads"),
        };
        let published = PUBLISHED.iter().find(|published| published.0 == workers);
        let published = published.map(|published| published.1);
        rows! { group;
            format!("free_{workers}_workers") => measure, "call_ms", plain / by, published;
        }
    }
    let freed = claim::at_least_percent("background_bytes", MIN_FREED_PERCENT, size);
    let launch = Launch::at_once("--free=background");
    let freed = vec![freed, is_back];
    let later = side(&mut group, launch, Action::FreeAndWatch, freed);
    rows! { group;
        "free_background_call" => "free, until it returns", "call_ms", plain / later;
        "free_background_back" => "free, until the memory is back", "back_ms", plain / later;
    }
    group.value("background_call_ms", "call_ms", later);
    group
}

/// Claims that up to `threads` threads freed blocks of `size` bytes, with so many CPUs.
fn freed_by(threads: u32, size: Bytes, cpus: usize) -> Vec<Claim> {
    let (max_threads, cpus) = (u64::from(threads), cpus as u64);
    if threads == 1 {
        return vec![within("freeing_threads", 0..=1)];
    }
    // Threads without a CPU find nothing left to free.
    let at_work = within("freeing_threads", cpus.min(max_threads)..=max_threads);
    vec![
        at_work,
        claim::at_least_percent("gathered_bytes", MIN_FREED_PERCENT, size),
    ]
}

/// Rows on mappings of these sizes, unmapped by several processes, several times each.
fn unmaps<'a>(
    settings: &'a Settings,
    (name, measure): (&str, &'static str),
    (by, sizes): (AllocCall, Vec<Bytes>),
    (processes, times): (usize, usize),
) -> Group<'a> {
    let mut group = Group::new(settings, measure).laps(processes, median);
    let all = Bytes(sizes.iter().map(|size| size.0).sum::<u64>() * times as u64);
    let largest = sizes.iter().copied().max().unwrap_or_default();
    let (base, claims) = match by {
        AllocCall::MapHuge => {
            group.optional = Error::is_of_host;
            (false, claim::huge(all))
        }
        _ => (true, claim::base(all)),
    };
    let task = Task::Memory(MemoryTask {
        by,
        sizes,
        times,
        base,
        then: Action::Free,
    });
    let plain = group.work(Launch::Plain, task.clone(), largest, claims.clone());
    let jumbo = group.work(Launch::JUMBO, task, largest, claims);
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
    fn a_wrong_number_of_freeing_threads_is_rejected() {
        let size = Bytes(1000);
        let by = |threads| freed_by(threads, size, 2);
        let later = vec![claim::at_least_percent(
            "background_bytes",
            MIN_FREED_PERCENT,
            size,
        )];
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
