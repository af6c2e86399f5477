//! `jumbo bench free`: giving back a large block with one thread, with several, and without waiting for it.
//!
//! The block comes from `malloc` and goes by `free`, touched in base pages: that is where time is lost. The rows on what
//! must not become slower (huge-mapped ranges, small ones) go by `munmap`, which is where jumbo looks at each
//! range that a program gives back.
//!
//! That several threads freed is not concluded from the time: each sample has the preload library's own count of
//! them, and is refused where it is not what the row says.

mod worker;

pub(crate) use worker::{release, unmap};

use std::num::NonZeroU32;

use jumbo::kernel::Root;
use jumbo::status::Freeing;
use jumbo::units::{Bytes, counted};

use crate::child::{Launch, ask};
use crate::claim::{self, DRY_RUN, percent};
use crate::group::Group;
use crate::machine::Machine;
use crate::memory::{footprint, room};
use crate::stats::median;
use crate::table::Table;
use crate::worker::Task;
use crate::{Error, Progress, Settings, group};

/// The least size of the block: below, jumbo leaves it to the caller.
pub const MIN_SIZE: Bytes = Bytes(256 << 20);

/// The size of the huge-mapped range: so large that jumbo looks at it before it leaves it to the kernel.
const HUGE: Bytes = Bytes(2 << 30);

/// What a program maps and unmaps all the time, in MiB.
const SMALL: [u64; 7] = [1, 2, 4, 8, 16, 32, 64];

/// So much of a huge-mapped range must be in huge pages, and of the block must have been freed the way the side's name
/// says, in percent: its ends are the caller's.
const MOST: u64 = 90;

/// Measures the table, with a block of `size` bytes and with so many threads.
///
/// # Errors
/// [`Error`].
pub fn measure(
    settings: &Settings,
    size: Bytes,
    workers: &[NonZeroU32],
    progress: &dyn Progress,
) -> Result<Table, Error> {
    let root = Root::host();
    let machine = Machine::read(&root)?;
    room(&root, footprint(size))?;
    let frees = frees(settings, size, workers, machine.cores as u64);

    // A `munmap` takes microseconds and must be compared within a hundredth, so each round looks at many, by many
    // processes in turn: such a machine is slow or fast for half a second at a time. Who measures a small block wants
    // to know soon.
    let [huge, small] = match size >= HUGE {
        true => [(6, 2), (15, 3)],
        false => [(1, 1), (3, 1)],
    };
    let names = ("huge_inline", "munmap of huge pages");
    let huge = unmaps(settings, names, (vec![HUGE], true), huge).optional(names.1);
    let sizes = SMALL.map(|mib| Bytes(mib << 20)).to_vec();
    let names = ("small_inline", "munmap of 1 to 64 MiB");
    let small = unmaps(settings, names, (sizes, false), small);
    let table = Table::new("free", format!("{size} in base pages"), settings, machine);
    group::measure(settings, progress, table, vec![frees, huge, small])
}

/// How a side must have freed the block.
#[derive(Clone, Copy, Debug)]
enum Freed {
    /// As the kernel does.
    Plainly,
    /// With up to so many threads.
    By(u32),
    /// In the background.
    Later,
}

fn frees<'a>(settings: &'a Settings, size: Bytes, workers: &[NonZeroU32], cpus: u64) -> Group<'a> {
    let mut group = Group::new("free");
    let mut side = |launch: Launch, expected: Freed, back| {
        group.side(launch.name(), size, move || {
            let sample = ask(&launch, settings, &Task::Release(size, back))?;
            claim::base_pages(&launch, &sample.memory, size)?;
            if let Some(found) = expected.found_wrong(sample.freed, size, cpus) {
                return Err(Error::claim(found, DRY_RUN));
            }
            if back && !sample.figures.contains_key("back_ms") {
                return Err(Error::NotBack(size));
            }
            Ok(sample.figures)
        })
    };
    let plain = side(Launch::Plain, Freed::Plainly, true);
    let by = workers.iter().map(|workers| {
        let workers = workers.get();
        let launch = Launch::Jumbo(format!("--free=sync --free-workers={workers}"));
        (workers, side(launch, Freed::By(workers), false))
    });
    let by: Vec<_> = by.collect();
    let background = Launch::Jumbo("--free=background".to_owned());
    let background = side(background, Freed::Later, true);
    group.against_itself("free_aa", "free", "call_ms", plain);
    for (workers, side) in by {
        let measure = match workers {
            1 => "free by 1 thread".to_owned(),
            _ => format!("free by up to {workers} threads"),
        };
        let name = format!("free_{workers}_workers");
        let row = group.ratio(name, measure, "call_ms", [plain, side]);
        if workers > 1 {
            row.published("1.86 by default, 2.26 at best");
        }
    }
    let sides = [plain, background];
    group.ratio(
        "free_background_call",
        "free, until it returns",
        "call_ms",
        sides,
    );
    let measure = "free, until the memory is back";
    group.ratio("free_background_back", measure, "back_ms", sides);
    group
}

/// A row on mappings of these sizes, unmapped by so many processes, each so many times.
fn unmaps<'a>(
    settings: &'a Settings,
    (name, measure): (&str, &'static str),
    (sizes, huge): (Vec<Bytes>, bool),
    (processes, times): (usize, usize),
) -> Group<'a> {
    let mut group = Group::new(measure).laps(processes, median);
    let all = Bytes(sizes.iter().map(|size| size.0).sum::<u64>() * times as u64);
    let largest = sizes.iter().copied().max().unwrap_or_default();
    let task = Task::Unmap(sizes, huge, times);
    let [plain, jumbo] = [Launch::Plain, Launch::JUMBO].map(|launch| {
        let task = task.clone();
        group.side(launch.name(), largest, move || {
            room(&Root::host(), footprint(largest))?;
            let sample = ask(&launch, settings, &task)?;
            if huge {
                claim::launched(&launch, &sample.memory)?;
                claim::huge_pages(&sample.memory, MOST, all)?;
            } else {
                claim::base_pages(&launch, &sample.memory, all)?;
            }
            Ok(sample.figures)
        })
    });
    group.against_itself(format!("{name}_aa"), measure, "unmap_us", plain);
    group.ratio(name, measure, "unmap_us", [plain, jumbo]);
    group
}

impl Freed {
    fn found_wrong(self, freed: Option<Freeing>, size: Bytes, cpus: u64) -> Option<String> {
        let freed = freed.unwrap_or_default();
        let most = percent(MOST, size);
        match self {
            Self::Later if freed.background < most => Some(format!(
                "{} of {size} were freed in the background",
                freed.background
            )),
            Self::By(2..) if freed.gathered < most => Some(format!(
                "{} of {size} were freed by several threads",
                freed.gathered
            )),
            // Threads that find no CPU find nothing left to free.
            Self::By(asked)
                if freed.workers > asked.into()
                    || (asked > 1 && freed.workers < cpus.min(asked.into())) =>
            {
                Some(format!("{} freed", counted(freed.workers, "thread")))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_that_freed_in_another_way_is_refused() {
        for (side, gathered, background, workers, fine) in [
            (Freed::By(1), 0, 0, 0, true),
            (Freed::By(1), 1000, 0, 1, true),
            (Freed::By(1), 1000, 0, 2, false),
            (Freed::By(4), 950, 0, 4, true),
            (Freed::By(4), 950, 0, 3, true),
            (Freed::By(4), 950, 0, 1, false),
            (Freed::By(4), 950, 0, 5, false),
            (Freed::By(4), 500, 0, 4, false),
            (Freed::By(4), 0, 0, 0, false),
            (Freed::Later, 1000, 1000, 2, true),
            (Freed::Later, 1000, 100, 2, false),
            (Freed::Plainly, 0, 0, 0, true),
        ] {
            let freed = Freeing {
                gathered: Bytes(gathered),
                background: Bytes(background),
                workers,
                ..Freeing::default()
            };
            let found = side.found_wrong(Some(freed), Bytes(1000), 2);
            assert_eq!(found.is_none(), fine, "{side:?} {freed:?}");
        }
    }
}
