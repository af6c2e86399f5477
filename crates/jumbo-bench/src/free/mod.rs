//! `jumbo bench free`: giving back a large block with one thread, with several, and without waiting for it.
//!
//! The block comes from `malloc` and goes by `free`, touched in base pages: that is where time is lost. The rows on what
//! must not become slower (huge-mapped ranges, small ones) go by `munmap`, which is where jumbo looks at each
//! range that a program gives back.
//!
//! That several threads freed is not concluded from the time: each sample has the preload library's own count of
//! them, and is refused where it is not what the row says.

mod plan;
pub mod worker;

use std::num::NonZeroU32;

use jumbo::kernel::Root;
use jumbo::units::Bytes;

use crate::child::{self, Launch, answer};
use crate::machine::Machine;
use crate::memory::{TRIES, Warmer, room};
use crate::rounds::{alternate, alternate_all};
use crate::stats::median;
use crate::table::{Row, Table, Unit};
use crate::{Error, Progress, Settings, claim};
use plan::{Back, Side};
use worker::{FreeSample, SMALL, UnmapSample};

/// The least size of the block: below, jumbo leaves it to the caller.
pub const MIN_SIZE: Bytes = Bytes(256 << 20);

/// The size of the huge-mapped range: so large that jumbo looks at it before it leaves it to the kernel.
const HUGE: Bytes = Bytes(2 << 30);

/// So much of a huge-mapped range must be in huge pages, in percent.
const MOST: u64 = 90;

/// A `munmap` takes microseconds and must be compared within a hundredth, so each round looks at many, by many
/// processes in turn: such a machine is slow or fast for half a second at a time.
const SMALL_EFFORT: Effort = Effort {
    processes: 15,
    times: 3,
};
/// The same of huge-mapped ranges, which take longer to map.
const HUGE_EFFORT: Effort = Effort {
    processes: 6,
    times: 2,
};

/// How much of a round an inline row is.
#[derive(Clone, Copy)]
struct Effort {
    processes: usize,
    /// In each process.
    times: usize,
}

impl Effort {
    /// Whoever measures a small block wants to know soon.
    const fn beside(self, block: Bytes) -> Self {
        if block.0 >= HUGE.0 {
            return self;
        }
        Self {
            processes: self.processes.div_ceil(5),
            times: 1,
        }
    }
}

/// What an inline row compares: the baseline twice.
const INLINE: [Launch; 3] = [Launch::Plain, Launch::Plain, Launch::JUMBO];

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
    let mut warmer = Warmer::new(&root);
    let rounds = settings.rounds.get();
    let sides = plan::sides(workers);
    let no_room = room(&root, footprint(HUGE)).err();
    let inline_rows = 1 + usize::from(no_room.is_none());
    progress.begin(sides.len() * (rounds + 1) + inline_rows * rounds);

    // As in the heap's table the first round is the warm-up.
    let mut frees = alternate_all(rounds + 1, sides.len(), |round, side| {
        let side = &sides[side];
        progress.step(&match round {
            0 => format!("warm-up: {}", side.name()),
            _ => format!("round {round} of {rounds}: {}", side.name()),
        });
        let name = side.name();
        warmer.sample((&name, size), TRIES, || {
            free(settings, side, size, machine.cores)
        })
    })?;
    for samples in &mut frees {
        samples.remove(0);
    }
    let small = inline(
        settings,
        SMALL_EFFORT.beside(size),
        (&mut warmer, SMALL[SMALL.len() - 1]),
        progress,
        "small ranges",
        |launch, times| unmap_small(settings, launch, times),
    )?;
    let huge = match no_room {
        None => inline(
            settings,
            HUGE_EFFORT.beside(size),
            (&mut warmer, HUGE),
            progress,
            "huge-mapped ranges",
            |launch, times| unmap_huge(settings, launch, times),
        ),
        Some(why) => Err(why),
    };

    let mut table = Table::new("free", format!("{size} in base pages"), rounds, machine);
    push_frees(&mut table, &sides, &frees);
    match huge {
        Ok(huge) => push_inline(&mut table, "huge_inline", "munmap of huge pages", &huge),
        // What the other rows say is as true without it.
        Err(why) if why.is_of_host() => table.missing("munmap of huge pages", why.to_string()),
        Err(why) => return Err(why),
    }
    push_inline(&mut table, "small_inline", "munmap of 1 to 64 MiB", &small);
    table.set_hit(warmer.hit());
    Ok(table)
}

fn push_frees(table: &mut Table, sides: &[Side], frees: &[Vec<FreeSample>]) {
    let call = |side: usize| -> Vec<f64> { frees[side].iter().map(|s| s.call_ms).collect() };
    let back = |side: usize| -> Vec<f64> { frees[side].iter().filter_map(|s| s.back_ms).collect() };
    let baseline = sides[0].name();
    for (index, side) in sides.iter().enumerate().skip(1) {
        let what = (side.key(), side.measure(), Unit::Ms);
        let (before, after) = ((baseline.clone(), &*call(0)), (side.name(), &*call(index)));
        let mut row = Row::ratio(what, before, after);
        if let Some(figure) = side.published() {
            row = row.published(figure);
        }
        table.push(row);
        if side.back == Back::Asked && side.is_jumbo() {
            table.push(Row::ratio(
                (
                    "free_background_back",
                    "free, until the memory is back",
                    Unit::Ms,
                ),
                (baseline.clone(), &back(0)),
                (side.name(), &back(index)),
            ));
        }
    }
}

fn push_inline(
    table: &mut Table,
    name: &'static str,
    measure: &'static str,
    rounds: &[[f64; INLINE.len()]],
) {
    let samples = |side: usize| rounds.iter().map(|round| round[side]).collect::<Vec<_>>();
    let [plain, again, jumbo] = [0, 1, 2].map(samples);
    table.push(Row::ratio(
        (format!("{name}_aa"), format!("{measure}, A/A"), Unit::Us),
        ("plain", &plain),
        ("plain again", &again),
    ));
    table.push(Row::ratio(
        (name, measure, Unit::Us),
        ("plain", &plain),
        ("jumbo run", &jumbo),
    ));
}

/// The medians of each of [`INLINE`], of samples that alternate, round by round.
fn inline(
    settings: &Settings,
    effort: Effort,
    (warmer, size): (&mut Warmer, Bytes),
    progress: &dyn Progress,
    what: &str,
    measure: impl Fn(Launch, usize) -> Result<f64, Error>,
) -> Result<Vec<[f64; INLINE.len()]>, Error> {
    let rounds = settings.rounds.get();
    let mut told = 0;
    let samples: [Vec<f64>; INLINE.len()] = alternate(rounds * effort.processes, |lap, side| {
        let round = lap / effort.processes + 1;
        if round > told {
            told = round;
            progress.step(&format!("round {round} of {rounds}: {what}"));
        }
        let (launch, again) = (INLINE[side], if side == 1 { " again" } else { "" });
        let name = format!("{what}: {}{again}", launch.name());
        warmer.sample((&name, size), TRIES, || measure(launch, effort.times))
    })?;
    let of_round = |round: usize| {
        let first = round * effort.processes;
        samples
            .each_ref()
            .map(|samples| median(&samples[first..first + effort.processes]))
    };
    Ok((0..rounds).map(of_round).collect())
}

/// One sample of `free`.
fn free(settings: &Settings, side: &Side, size: Bytes, cpus: usize) -> Result<FreeSample, Error> {
    let bytes = size.0.to_string();
    let mut words = vec!["release", bytes.as_str()];
    if side.back == Back::Asked {
        words.push("--back");
    }
    let sample: FreeSample = answer(&mut child::worker(side.launch, &settings.jumbo, &words))?;
    claim::base_pages(side.launch, &sample.memory, size)?;
    side.check(&sample, size, cpus)?;
    if side.back == Back::Asked && sample.back_ms.is_none() {
        return Err(Error::NotBack(size));
    }
    Ok(sample)
}

fn unmap_huge(settings: &Settings, launch: Launch, times: usize) -> Result<f64, Error> {
    let size = HUGE;
    let words = ["unmap-huge", &size.0.to_string(), &times.to_string()];
    let sample: UnmapSample = answer(&mut child::worker(launch, &settings.jumbo, &words))?;
    claim::launched(launch, &sample.memory)?;
    if sample.memory.huge.0 < size.0 / 100 * MOST {
        let found = format!("{} of {size} are in huge pages", sample.memory.huge);
        return claim::refuse(launch, found, claim::DOCTOR);
    }
    Ok(sample.unmap_us)
}

fn unmap_small(settings: &Settings, launch: Launch, times: usize) -> Result<f64, Error> {
    let size = SMALL[SMALL.len() - 1];
    let words = ["unmap-small", &times.to_string()];
    let sample: UnmapSample = answer(&mut child::worker(launch, &settings.jumbo, &words))?;
    claim::base_pages(launch, &sample.memory, size)?;
    Ok(sample.unmap_us)
}

/// What a block of `size` bytes takes with its page tables and the program around it.
fn footprint(size: Bytes) -> Bytes {
    size + Bytes(size.0 / 50) + Bytes(64 << 20)
}
