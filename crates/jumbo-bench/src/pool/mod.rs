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
//! The kernel's pool is set for each sample and put back in the end, whatever end that is (`keeper`).

mod keeper;
mod stream;
mod supply;
mod worker;

pub(crate) use keeper::keep;
pub(crate) use supply::{Arrays, Counted, Supply, Way};
pub(crate) use worker::{exchange, first_use, stream};

use std::cell::RefCell;
use std::num::NonZeroUsize;

use jumbo::kernel::Root;
use jumbo::pool::Thp;
use jumbo::units::{Bytes, PageSize, Pages, counted};

use crate::child::{Launch, ask};
use crate::group::Group;
use crate::heap::TOTAL;
use crate::machine::Machine;
use crate::memory::room;
use crate::stats::least;
use crate::table::Table;
use crate::worker::Task;
use crate::{Error, Progress, Settings, group};
use keeper::{Host, Wanted};
use stream::{ALL, KERNELS};
use supply::{Expected, Provision, Source};

/// The size of the pages.
const SIZE: PageSize = PageSize::SIZE_2M;

/// The large arrays are larger than the small ones at least, and than most caches.
pub const MIN_SIZE: Bytes = Bytes(48 << 20);

/// The small arrays, all three: what a large cache holds, and what the TLB holds with huge pages only.
const SMALL: Bytes = Bytes(24 << 20);

/// A process's arrays lie in memory that is as fast as the host made it, so of STREAM the best of so many processes is a
/// sample, for each kernel, from arrays of this size on: who measures small ones wants to know soon.
const LAPS: usize = 3;
const LARGE: Bytes = Bytes(1 << 30);

/// How many pages are used for the first time, and how often that is repeated.
const FIRST: Pages = Pages(128);
const TIMES: usize = 5;

/// How many pages a pool has whose pages are had and given back.
const EXCHANGED: Pages = Pages(64);

/// What a heap takes beside what the program asks for.
const BESIDE: Bytes = Bytes(64 << 20);

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
    // The arrays, the pages that the kernel's pool may hold for the next side, and the program around.
    room(&root, size + size + Bytes(256 << 20))?;
    let threads: Vec<usize> = load.threads.iter().map(|n| n.get()).collect();
    let most = threads.iter().copied().max().unwrap_or(1);
    let what = format!(
        "three arrays of {SMALL} and of {size} in all, {}",
        counted(most as u64, "thread")
    );
    let mut table = Table::new("pool", what, settings, machine);

    let mut bench = Bench {
        settings,
        host: RefCell::new(None),
        sources: Vec::new(),
    };
    match host(settings, size.whole_pages(SIZE))? {
        Ok(host) => {
            bench.host = RefCell::new(Some(host));
            bench.sources.push(Source::Hugetlb);
        }
        Err(why) => table.missing("pages of the kernel's pool (hugetlb)", why),
    }
    match Thp::new(&root) {
        Ok(_) => bench.sources.push(Source::Thp),
        Err(why) => table.missing("transparent huge pages (thp)", why.to_string()),
    }
    let groups = vec![
        bench.streams(size, most),
        bench.streams(SMALL, most),
        bench.first_uses(),
        bench.exchanges(&threads),
        bench.loads(size),
    ];
    let table = group::measure(settings, progress, table, groups)?;
    if let Some(host) = bench.host.take() {
        host.give_back()?;
    }
    Ok(table)
}

/// The kernel's pool, if it can have so many pages more; else why not.
fn host(settings: &Settings, pages: Pages) -> Result<Result<Host, String>, Error> {
    let mut host = match Host::take(settings)? {
        Ok(host) => host,
        Err(why) => return Ok(Err(why)),
    };
    // What cannot be had is better known now than in the middle.
    let wanted = Wanted {
        persistent: pages,
        overcommit: pages,
    };
    Ok(host.provide(wanted)?.map(|()| host))
}

/// What the sides have in common.
struct Bench<'a> {
    settings: &'a Settings,
    /// `None` where the kernel's pool is not to be had.
    host: RefCell<Option<Host>>,
    /// The sources that are to be had.
    sources: Vec<Source>,
}

impl<'a> Bench<'a> {
    /// Adds a side whose programs need that of the kernel's pool, take `size` bytes and must show what is expected.
    fn side(
        &'a self,
        group: &mut Group<'a>,
        name: String,
        (launch, task): (Launch, Task),
        (wanted, size): (Wanted, Bytes),
        expected: Expected,
    ) -> usize {
        group.side(name, size, move || {
            if let Some(host) = &mut *self.host.borrow_mut() {
                host.provide(wanted)?.map_err(Error::Kernel)?;
            }
            let sample = ask(&launch, self.settings, &task)?;
            expected.check(&launch, &sample)?;
            Ok(sample.figures)
        })
    }

    /// The baseline, the baseline again, and for each source the preallocated and the dynamic side.
    fn streams(&'a self, size: Bytes, threads: usize) -> Group<'a> {
        let (small, arrays, passes) = match size {
            SMALL => ("_small", "small", 200),
            _ => ("", "large", 6),
        };
        let laps = if size >= LARGE { LAPS } else { 1 };
        let mut group = Group::new("STREAM").laps(laps, least);
        let on = |arrays| Task::Stream {
            arrays,
            size,
            threads,
            passes,
        };
        let what = (Launch::Plain, on(Arrays::BasePages));
        let expected = Expected {
            size,
            ..Expected::default()
        };
        let name = "base pages".to_owned();
        let base = self.side(&mut group, name, what, (Wanted::default(), size), expected);
        let again = group.again(base);
        let (all, measure) = (ALL, format!("all kernels, {arrays} arrays"));
        let aa = (format!("stream{small}_aa"), format!("{measure}, A/A"));
        group.ratio(aa.0, aa.1, all, [base, again]);

        for &source in &self.sources {
            let sides = [
                ("preallocated", Provision::Held),
                ("dynamic", Provision::Surplus),
            ];
            let [held, dynamic] = sides.map(|(called, provision)| {
                let supply = Supply::of(source, provision);
                let pool = format!("{called} {}", source.name());
                let (name, what, pages, expected) = match source {
                    Source::Hugetlb => (
                        format!("jumbo run --pool, {pool}"),
                        (on_pool(size, ""), on(Arrays::Heap(supply))),
                        pool_of(size),
                        supply.expected_of_heap(size),
                    ),
                    Source::Thp => (
                        format!("region of a {pool} pool"),
                        (Launch::Plain, on(Arrays::Region(supply))),
                        size,
                        supply.expected(size.whole_pages(SIZE)),
                    ),
                };
                let wanted = supply.wanted(pages.whole_pages(SIZE));
                self.side(&mut group, name, what, (wanted, size), expected)
            });
            let name = |name: &str| format!("{name}{}{small}", suffix(source));
            let is_large = small.is_empty();
            for (called, sides, published) in [
                ("preallocated_vs_baseline", [base, held], "up to 1.46"),
                ("dynamic_vs_preallocated", [held, dynamic], "0.994"),
            ] {
                let row = group.ratio(name(called), measure.as_str(), all, sides);
                if is_large {
                    row.published(published);
                }
            }
            // One source shows which kernel gains what.
            for figure in KERNELS.into_iter().filter(|_| source == self.sources[0]) {
                let kernel = figure.trim_end_matches("_ms");
                let measure = format!("{kernel}, {arrays} arrays");
                let [before, after] =
                    ["preallocated", "dynamic"].map(|p| name(&format!("{kernel}_{p}")));
                group.ratio(before, measure.as_str(), figure, [base, held]);
                group.ratio(after, measure, figure, [held, dynamic]);
            }
            if is_large {
                let measure = "arrays made and touched";
                group.ratio(
                    name("start_preallocated"),
                    measure,
                    "start_ms",
                    [base, held],
                );
                group.ratio(name("start_dynamic"), measure, "start_ms", [base, dynamic]);
                group
                    .ratio(
                        name("faults_dynamic"),
                        "page faults",
                        "faults",
                        [base, dynamic],
                    )
                    .published("196");
            }
        }
        group
    }

    fn first_uses(&'a self) -> Group<'a> {
        let mut group = Group::new("first use");
        for &source in &self.sources {
            let mut side = |called: &str, provision| {
                let supply = Supply::of(source, provision);
                let task = Task::FirstUse {
                    supply,
                    pages: FIRST,
                    times: TIMES,
                };
                let needs = (supply.wanted(FIRST), FIRST.bytes(SIZE));
                let name = format!("{called} ({})", source.name());
                let what = (Launch::Plain, task);
                self.side(&mut group, name, what, needs, supply.expected(FIRST))
            };
            let held = side("held", Provision::Held);
            let surplus = side("surplus", Provision::Surplus);
            if source == Source::Hugetlb {
                let persistent = side("persistent", Provision::Persistent);
                let again = group.again(persistent);
                let measure = "first use of a page";
                let aa = format!("{measure}, A/A");
                group.ratio("first_use_aa", aa, "page_us", [persistent, again]);
                group.ratio(
                    "surplus_vs_persistent",
                    measure,
                    "page_us",
                    [persistent, surplus],
                );
            }
            let name = format!("held_vs_surplus{}", suffix(source));
            group.ratio(name, "use of a page", "page_us", [surplus, held]);
        }
        group
    }

    fn exchanges(&'a self, threads: &[usize]) -> Group<'a> {
        let mut group = Group::new("take and give");
        for (&source, &threads) in self
            .sources
            .iter()
            .flat_map(|s| threads.iter().map(move |n| (s, n)))
        {
            let (by, called) = match threads {
                1 => (String::new(), "by 1 thread".to_owned()),
                _ => (
                    format!("_{threads}_threads"),
                    format!("by {threads} threads"),
                ),
            };
            let mut side = |way: Way| {
                let task = Task::Exchange { way, threads };
                let size = EXCHANGED.bytes(SIZE);
                let wanted = Supply::of(source, Provision::Held).wanted(EXCHANGED);
                let expected = way.expected(EXCHANGED);
                let what = (Launch::Plain, task);
                self.side(&mut group, way.name(), what, (wanted, size), expected)
            };
            let take = side(Way::Take(source));
            let zeroed = side(Way::TakeZeroed(source));
            let (first, rows) = match source {
                Source::Hugetlb => {
                    let (map, touched) = (side(Way::Map), side(Way::MapTouched));
                    let rows = vec![
                        (
                            "take_give_vs_mmap",
                            "a page, content unspecified",
                            [map, take],
                        ),
                        (
                            "take_give_vs_mmap_touched",
                            "a page, and a touch",
                            [touched, take],
                        ),
                        (
                            "take_give_zeroed_vs_mmap",
                            "a page of zeroes",
                            [touched, zeroed],
                        ),
                    ];
                    (map, rows)
                }
                Source::Thp => {
                    let map = side(Way::MapThp);
                    let rows = vec![
                        ("take_give_vs_mmap_thp", "a page, and a touch", [map, take]),
                        (
                            "take_give_zeroed_vs_mmap_thp",
                            "a page of zeroes",
                            [map, zeroed],
                        ),
                    ];
                    (map, rows)
                }
            };
            if threads == 1 {
                let again = group.again(first);
                let (name, measure) = (
                    format!("mmap{}_aa", suffix(source)),
                    format!("a page, {called}, A/A"),
                );
                group.ratio(name, measure, "page_ns", [first, again]);
            }
            for (name, measure, sides) in rows {
                group.ratio(
                    format!("{name}{by}"),
                    format!("{measure}, {called}"),
                    "page_ns",
                    sides,
                );
            }
        }
        group
    }

    /// The load of the heap's table: plain, plain again, and on a pool of each source.
    fn loads(&'a self, size: Bytes) -> Group<'a> {
        let mut group = Group::new("heap");
        let mut side = |name: String, launch, wanted, source, size_on_it| {
            let expected = Expected {
                source,
                size: size_on_it,
                ..Expected::default()
            };
            let what = (launch, Task::Load { size });
            self.side(&mut group, name, what, (wanted, size), expected)
        };
        let plain = side(
            "plain".to_owned(),
            Launch::Plain,
            Wanted::default(),
            None,
            Bytes(0),
        );
        let on_pools = self.sources.iter().map(|&source| {
            let name = format!("jumbo run --heap=mimalloc --pool, {}", source.name());
            // What alignment wastes.
            let most = Bytes(size.0 / 4 * 5);
            let held = pool_of(most).whole_pages(SIZE);
            let wanted = Supply::of(source, Provision::Held).wanted(held);
            (
                source,
                side(
                    name,
                    on_pool(most, "--heap=mimalloc"),
                    wanted,
                    Some(source),
                    size,
                ),
            )
        });
        let on_pools: Vec<_> = on_pools.collect();
        let again = group.again(plain);
        let measure = "objects allocated, chased, freed";
        group.ratio("heap_aa", format!("{measure}, A/A"), TOTAL, [plain, again]);
        for (source, side) in on_pools {
            let name = format!("heap_pool_vs_plain{}", suffix(source));
            group.ratio(name, measure, TOTAL, [plain, side]);
        }
        group
    }
}

/// `jumbo run --pool` for a program that asks for `size` bytes.
fn on_pool(size: Bytes, heap: &str) -> Launch {
    // The pages must be back when the next sample begins: no reaper.
    let mib = pool_of(size).0 >> 20;
    Launch::Jumbo(format!("--reaper=off {heap} --pool={mib}M,nofork"))
}

/// What `--pool` is told: what the program asks for, and what its allocator needs beside that.
fn pool_of(size: Bytes) -> Bytes {
    (size + BESIDE).whole_pages(SIZE).bytes(SIZE)
}

/// What is added to the names of rows on a source. The kernel's pool is what the mechanism was made for.
fn suffix(source: Source) -> &'static str {
    match source {
        Source::Hugetlb => "",
        Source::Thp => "_thp",
    }
}
