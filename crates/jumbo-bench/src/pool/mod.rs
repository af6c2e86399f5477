//! `jumbo bench pool`: what pages cost that are there beforehand, that come on demand, and that come from no pool.
//!
//! - STREAM's kernels over arrays on base pages, on a preallocated pool and on a dynamic one, which has no page
//!   until it is asked: an unmodified program, whose pages come from the kernel's pool by `jumbo run --pool`; and one
//!   whose arrays are a region of a pool of THPs;
//! - the first use of a surplus page against that of a persistent one;
//! - `take` and `give` against `mmap` and `munmap`, by several threads;
//! - a whole heap on a pool, with mimalloc over it, against the plain one.
//!
//! Each for both sources of a pool, as far as they are to be had here; what is not to be had is named with the
//! reason. *Preallocated* and *dynamic* hold for our pool and for the kernel's behind it: the dynamic
//! side begins with no page in either, and every page of it is a surplus page of both, which its sample proves.
//!
//! The kernel's pool is set for each sample and put back in the end, whatever end that is (`host`).

mod host;
mod keeper;
mod plan;
mod stream;
mod task;
pub mod worker;

use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Command;

use jumbo::kernel::Root;
use jumbo::pool::Thp;
use jumbo::units::{Bytes, PageSize, Pages, counted};

use crate::child::{self, answer};
use crate::heap::worker::LoadSample;
use crate::machine::Machine;
use crate::memory::{TRIES, Warmer, room};
use crate::rounds::alternate_all;
use crate::table::{Row, Table, Unit};
use crate::{Error, Progress, Settings};
use host::Host;
use plan::Side;
use stream::KERNELS;
use task::{
    Arrays, ExchangeSample, FirstSample, Provision, Sample, Source, StreamSample, Supply, Task, Way,
};

/// The size of the pages.
const SIZE: PageSize = PageSize::SIZE_2M;

/// The large arrays are larger than the small ones at least, and than most caches.
pub const MIN_SIZE: Bytes = Bytes(48 << 20);

/// The small arrays, all three: what a large cache holds, and what the TLB holds with huge pages only.
const SMALL: Bytes = Bytes(24 << 20);

/// How often STREAM runs over large arrays, and over small ones, which take less time.
const PASSES: [usize; 2] = [6, 200];

/// How many pages are used for the first time, and how often that is repeated.
const FIRST: Pages = Pages(128);
const TIMES: usize = 5;

/// A process's arrays lie in memory that is as fast as the host made it, so of STREAM the best of so many processes is a
/// sample, for each kernel, from arrays of this size on: whoever measures small ones wants to know soon.
const LAPS: usize = 3;
const LARGE: Bytes = Bytes(1 << 30);

/// What is measured.
#[derive(Clone, Debug)]
pub struct Load {
    /// The bytes of STREAM's three arrays.
    pub size: Bytes,
    /// How many threads take and give: a row for each. STREAM runs with the most of them.
    pub threads: Vec<NonZeroUsize>,
}

/// Measures the table.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, load: &Load, progress: &dyn Progress) -> Result<Table, Error> {
    let root = Root::host();
    let machine = Machine::read(&root)?;
    let size = load.size.whole_pages(SIZE).bytes(SIZE);
    room(&root, footprint(size))?;
    let rounds = settings.rounds.get();
    let threads: Vec<usize> = load.threads.iter().map(|n| n.get()).collect();
    let most = threads.iter().copied().max().unwrap_or(1);
    let what = format!(
        "three arrays of {SMALL} and of {size} in all, {}",
        counted(most as u64, "thread")
    );
    let mut table = Table::new("pool", what, rounds, machine);

    let mut bench = Bench {
        settings,
        progress,
        warmer: Warmer::new(&root),
        host: None,
        sources: Vec::new(),
    };
    match host(settings, size.whole_pages(SIZE))? {
        Ok(host) => {
            bench.host = Some(host);
            bench.sources.push(Source::Hugetlb);
        }
        Err(why) => table.missing("pages of the kernel's pool (hugetlb)", why),
    }
    match Thp::new(&root) {
        Ok(_) => bench.sources.push(Source::Thp),
        Err(why) => table.missing("transparent huge pages (thp)", why.to_string()),
    }

    let streams = [(size, PASSES[0]), (SMALL, PASSES[1])]
        .map(|(size, passes)| stream_sides(&bench.sources, size, most, passes));
    let laps = [if size >= LARGE { LAPS } else { 1 }, 1];
    let firsts = first_sides(&bench.sources);
    let exchanges = exchange_sides(&bench.sources, &threads);
    let loads = load_sides(&bench.sources, size);
    let groups = streams.iter().chain([&firsts, &exchanges, &loads]);
    let steps = groups.map(Vec::len).sum::<usize>() * (rounds + 1);
    let more = streams[0].len() * rounds * (laps[0] - 1);
    progress.begin(steps + more);

    for ((sides, laps), small) in streams.iter().zip(laps).zip(["", "_small"]) {
        let samples = bench.laps(laps, "STREAM", sides)?;
        push_streams(&mut table, &bench.sources, sides, &samples, small);
    }
    let samples = bench.rounds::<FirstSample>("first use", &firsts)?;
    push_firsts(&mut table, &bench.sources, &firsts, &samples);
    let samples = bench.rounds::<ExchangeSample>("take and give", &exchanges)?;
    push_exchanges(&mut table, &bench.sources, &exchanges, &samples, &threads);
    let samples = bench.rounds::<LoadSample>("heap", &loads)?;
    push_loads(&mut table, &bench.sources, &loads, &samples);
    table.set_hit(bench.warmer.hit());
    if let Some(host) = bench.host.take() {
        host.give_back()?;
    }
    Ok(table)
}

/// The kernel's pool, if it can have so many pages more; else why not.
fn host(settings: &Settings, pages: Pages) -> Result<Result<Host, String>, Error> {
    let mut host = match Host::take(&settings.jumbo)? {
        Ok(host) => host,
        Err(why) => return Ok(Err(why)),
    };
    // What cannot be had is better known now than in the middle.
    let wanted = keeper::Wanted {
        persistent: pages,
        overcommit: pages,
    };
    let provided = host.provide(wanted)?;
    Ok(provided.map(|()| host))
}

/// The command that starts a worker on the task of a side.
fn worker_command(jumbo: &Path, side: &Side) -> Command {
    let task = serde_json::to_string(&side.task).unwrap_or_default();
    child::worker(side.launch(), jumbo, &["pool", &task])
}

/// A measurement under way.
struct Bench<'a> {
    settings: &'a Settings,
    progress: &'a dyn Progress,
    warmer: Warmer,
    host: Option<Host>,
    /// The sources that are to be had.
    sources: Vec<Source>,
}

impl Bench<'_> {
    /// The samples of each side, one a round; those of a first round that warms up are left out.
    fn rounds<T: Sample>(&mut self, what: &str, sides: &[Side]) -> Result<Vec<Vec<T>>, Error> {
        self.alternate(self.settings.rounds.get(), what, sides)
    }

    /// The same where a sample is the best of so many, each side's in turn.
    fn laps(
        &mut self,
        laps: usize,
        what: &str,
        sides: &[Side],
    ) -> Result<Vec<Vec<StreamSample>>, Error> {
        let rounds = self.settings.rounds.get() * laps;
        let samples = self.alternate::<StreamSample>(rounds, what, sides)?;
        let best = |some: &[StreamSample]| some.iter().copied().reduce(StreamSample::best);
        let of_side = |samples: Vec<StreamSample>| samples.chunks(laps).filter_map(best).collect();
        Ok(samples.into_iter().map(of_side).collect())
    }

    fn alternate<T: Sample>(
        &mut self,
        rounds: usize,
        what: &str,
        sides: &[Side],
    ) -> Result<Vec<Vec<T>>, Error> {
        let mut samples = alternate_all(rounds + 1, sides.len(), |round, side| {
            let side = &sides[side];
            let what = format!("{what}: {}", side.name());
            self.progress.step(&match round {
                0 => format!("warm-up: {what}"),
                _ => format!("round {round} of {rounds}: {what}"),
            });
            self.sample(&what, side)
        })?;
        for samples in &mut samples {
            samples.remove(0);
        }
        Ok(samples)
    }

    fn sample<T: Sample>(&mut self, what: &str, side: &Side) -> Result<T, Error> {
        let (settings, host) = (self.settings, &mut self.host);
        self.warmer.sample((what, side.size()), TRIES, || {
            if let Some(host) = host {
                let wanted = side.wanted().unwrap_or_default();
                host.provide(wanted)?.map_err(Error::Kernel)?;
            }
            let sample: T = answer(&mut worker_command(&settings.jumbo, side))?;
            side.check(sample.memory(), sample.counted())?;
            Ok(sample)
        })
    }
}

/// The baseline, the baseline again, and for each source the preallocated and the dynamic side.
fn stream_sides(sources: &[Source], size: Bytes, threads: usize, passes: usize) -> Vec<Side> {
    let on = |arrays| Task::Stream {
        arrays,
        size,
        threads,
        passes,
    };
    let mut sides = vec![
        Side::new(on(Arrays::BasePages)),
        Side::again(on(Arrays::BasePages)),
    ];
    for &source in sources {
        for provision in [Provision::Held, Provision::Surplus] {
            let supply = Supply { source, provision };
            sides.push(Side::new(on(match source {
                Source::Hugetlb => Arrays::Heap(supply),
                Source::Thp => Arrays::Region(supply),
            })));
        }
    }
    sides
}

fn first_sides(sources: &[Source]) -> Vec<Side> {
    let of = |source, provision| Task::FirstUse {
        supply: Supply { source, provision },
        pages: FIRST,
        times: TIMES,
    };
    let mut sides = Vec::new();
    for &source in sources {
        if source == Source::Hugetlb {
            sides.push(Side::new(of(source, Provision::Persistent)));
            sides.push(Side::again(of(source, Provision::Persistent)));
        }
        sides.push(Side::new(of(source, Provision::Held)));
        sides.push(Side::new(of(source, Provision::Surplus)));
    }
    sides
}

fn exchange_sides(sources: &[Source], threads: &[usize]) -> Vec<Side> {
    let mut sides = Vec::new();
    for &source in sources {
        let maps: &[Way] = match source {
            Source::Hugetlb => &[Way::Map, Way::MapTouched],
            Source::Thp => &[Way::MapThp],
        };
        let ways = maps.iter().copied();
        let ways: Vec<_> = ways
            .chain([Way::Take(source), Way::TakeZeroed(source)])
            .collect();
        for &threads in threads {
            let of = |way| Task::Exchange { way, threads };
            sides.extend(ways.iter().map(|&way| Side::new(of(way))));
            if threads == 1 {
                sides.push(Side::again(of(ways[0])));
            }
        }
    }
    sides
}

/// Plain, plain again, and on a pool of each source.
fn load_sides(sources: &[Source], size: Bytes) -> Vec<Side> {
    let of = |pool| Task::Load { size, pool };
    let mut sides = vec![Side::new(of(None)), Side::again(of(None))];
    sides.extend(sources.iter().map(|&source| Side::new(of(Some(source)))));
    sides
}

/// Rows of one group: sides found by what they do, with one figure of their samples.
struct Rows<'a, T> {
    sides: &'a [Side],
    samples: &'a [Vec<T>],
}

impl<T> Rows<'_, T> {
    /// A row that holds two sides against each other; none where one of them was not measured.
    fn push(
        &self,
        table: &mut Table,
        (name, measure, unit): (String, String, Unit),
        [baseline, candidate]: [Side; 2],
        figure: impl Fn(&T) -> f64,
        published: Option<&'static str>,
    ) {
        let side = |side: Side| {
            let at = self.sides.iter().position(|other| *other == side)?;
            Some((
                side.name(),
                self.samples[at].iter().map(&figure).collect::<Vec<_>>(),
            ))
        };
        if let (Some((before, baseline)), Some((after, candidate))) =
            (side(baseline), side(candidate))
        {
            let row = Row::ratio(
                (name, measure, unit),
                (before, &baseline[..]),
                (after, &candidate[..]),
            );
            table.push(match published {
                Some(figure) => row.published(figure),
                None => row,
            });
        }
    }
}

/// What is added to the names of rows on a source. The kernel's pool is what the mechanism was made for.
fn suffix(source: Source) -> &'static str {
    match source {
        Source::Hugetlb => "",
        Source::Thp => "_thp",
    }
}

fn push_streams(
    table: &mut Table,
    sources: &[Source],
    sides: &[Side],
    samples: &[Vec<StreamSample>],
    small: &str,
) {
    let rows = Rows { sides, samples };
    let arrays = if small.is_empty() { "large" } else { "small" };
    let (baseline, again) = (sides[0], sides[1]);
    let all = StreamSample::kernels_ms;
    let what = format!("all kernels, {arrays} arrays");
    rows.push(
        table,
        (
            format!("stream{small}_aa"),
            format!("{what}, A/A"),
            Unit::Ms,
        ),
        [baseline, again],
        all,
        None,
    );
    for (&source, pair) in sources.iter().zip(sides[2..].chunks_exact(2)) {
        let (held, dynamic) = (pair[0], pair[1]);
        let name = |name: &str| format!("{name}{}{small}", suffix(source));
        let [published_held, published_dynamic] = match small {
            "" => [Some("up to 1.46"), Some("0.994")],
            _ => [None, None],
        };
        rows.push(
            table,
            (name("preallocated_vs_baseline"), what.clone(), Unit::Ms),
            [baseline, held],
            all,
            published_held,
        );
        rows.push(
            table,
            (name("dynamic_vs_preallocated"), what.clone(), Unit::Ms),
            [held, dynamic],
            all,
            published_dynamic,
        );
        let kernels = KERNELS.iter().enumerate();
        // One source shows which kernel gains what.
        for (kernel, called) in kernels.filter(|_| source == sources[0]) {
            let time = |sample: &StreamSample| sample.kernel_ms[kernel];
            let what = format!("{called}, {arrays} arrays");
            rows.push(
                table,
                (
                    name(&format!("{called}_preallocated")),
                    what.clone(),
                    Unit::Ms,
                ),
                [baseline, held],
                time,
                None,
            );
            rows.push(
                table,
                (name(&format!("{called}_dynamic")), what, Unit::Ms),
                [held, dynamic],
                time,
                None,
            );
        }
        if !small.is_empty() {
            continue;
        }
        let start = |sample: &StreamSample| sample.start_ms;
        let what = "arrays made and touched".to_owned();
        rows.push(
            table,
            (name("start_preallocated"), what.clone(), Unit::Ms),
            [baseline, held],
            start,
            None,
        );
        rows.push(
            table,
            (name("start_dynamic"), what, Unit::Ms),
            [baseline, dynamic],
            start,
            None,
        );
        rows.push(
            table,
            (
                name("faults_dynamic"),
                "page faults".to_owned(),
                Unit::Faults,
            ),
            [baseline, dynamic],
            |sample| sample.faults as f64,
            Some("196"),
        );
    }
}

fn push_firsts(
    table: &mut Table,
    sources: &[Source],
    sides: &[Side],
    samples: &[Vec<FirstSample>],
) {
    let rows = Rows { sides, samples };
    let first = first_sides(sources);
    let find = |source, provision| {
        first.iter().copied().find(|side| {
            matches!(side.task, Task::FirstUse { supply, .. } if supply == Supply { source, provision })
        })
    };
    let time = |sample: &FirstSample| sample.page_us;
    for &source in sources {
        let name = |name: &str| format!("{name}{}", suffix(source));
        let (held, surplus) = (
            find(source, Provision::Held),
            find(source, Provision::Surplus),
        );
        if let (Some(persistent), Some(surplus)) = (find(source, Provision::Persistent), surplus) {
            let again = Side::again(persistent.task);
            let what = "first use of a page".to_owned();
            rows.push(
                table,
                (name("first_use_aa"), format!("{what}, A/A"), Unit::Us),
                [persistent, again],
                time,
                None,
            );
            rows.push(
                table,
                (name("surplus_vs_persistent"), what, Unit::Us),
                [persistent, surplus],
                time,
                None,
            );
        }
        if let (Some(held), Some(surplus)) = (held, surplus) {
            rows.push(
                table,
                (
                    name("held_vs_surplus"),
                    "use of a page".to_owned(),
                    Unit::Us,
                ),
                [surplus, held],
                time,
                None,
            );
        }
    }
}

fn push_exchanges(
    table: &mut Table,
    sources: &[Source],
    sides: &[Side],
    samples: &[Vec<ExchangeSample>],
    threads: &[usize],
) {
    let rows = Rows { sides, samples };
    let time = |sample: &ExchangeSample| sample.page_ns;
    let of = |way, threads| Task::Exchange { way, threads };
    for &source in sources {
        for &number in threads {
            let (by, called) = match number {
                1 => (String::new(), "by 1 thread".to_owned()),
                _ => (format!("_{number}_threads"), format!("by {number} threads")),
            };
            let (take, zeroed) = (Way::Take(source), Way::TakeZeroed(source));
            let compared: &[(&str, &str, Way, Way)] = match source {
                Source::Hugetlb => &[
                    (
                        "take_give_vs_mmap",
                        "a page, content unspecified",
                        Way::Map,
                        take,
                    ),
                    (
                        "take_give_vs_mmap_touched",
                        "a page, and a touch",
                        Way::MapTouched,
                        take,
                    ),
                    (
                        "take_give_zeroed_vs_mmap",
                        "a page of zeroes",
                        Way::MapTouched,
                        zeroed,
                    ),
                ],
                Source::Thp => &[
                    (
                        "take_give_vs_mmap_thp",
                        "a page, and a touch",
                        Way::MapThp,
                        take,
                    ),
                    (
                        "take_give_zeroed_vs_mmap_thp",
                        "a page of zeroes",
                        Way::MapThp,
                        zeroed,
                    ),
                ],
            };
            let first = compared[0].2;
            rows.push(
                table,
                (
                    format!("mmap{}_aa", suffix(source)),
                    format!("a page, {called}, A/A"),
                    Unit::Ns,
                ),
                [Side::new(of(first, number)), Side::again(of(first, number))],
                time,
                None,
            );
            for &(name, measure, before, after) in compared {
                rows.push(
                    table,
                    (
                        format!("{name}{by}"),
                        format!("{measure}, {called}"),
                        Unit::Ns,
                    ),
                    [before, after].map(|way| Side::new(of(way, number))),
                    time,
                    None,
                );
            }
        }
    }
}

fn push_loads(table: &mut Table, sources: &[Source], sides: &[Side], samples: &[Vec<LoadSample>]) {
    let rows = Rows { sides, samples };
    let all = LoadSample::total_ms;
    let what = "objects allocated, chased, freed".to_owned();
    rows.push(
        table,
        ("heap_aa".to_owned(), format!("{what}, A/A"), Unit::Ms),
        [sides[0], sides[1]],
        all,
        None,
    );
    for (&source, &side) in sources.iter().zip(&sides[2..]) {
        let name = format!("heap_pool_vs_plain{}", suffix(source));
        rows.push(
            table,
            (name, what.clone(), Unit::Ms),
            [sides[0], side],
            all,
            None,
        );
    }
}

/// What the arrays take beside the pages that the kernel's pool may hold for the next side, and the program around.
fn footprint(size: Bytes) -> Bytes {
    size + size + Bytes(256 << 20)
}
