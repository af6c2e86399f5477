//! `jumbo bench pool`: what pages cost that are there beforehand, that come on demand, and that come from no pool.
//!
//! - STREAM's kernels over arrays on base pages, on a preallocated pool and on a dynamic one, which has no page
//!   until it is asked: an unmodified program, whose pages come from the kernel's pool by `jumbo run --pool`; and one
//!   whose arrays are a region of a pool of THPs; and one whose arrays are static, as in the original, plain and under
//!   `jumbo run --data`;
//! - the first use of a surplus page against that of a persistent one;
//! - `take` and `give` against `mmap` and `munmap`, by several threads;
//! - a whole heap on a pool, with mimalloc over it, against the plain one.
//!
//! Each for both sources of a pool, as far as they are to be had here; what is not to be had is named with the
//! reason. *Preallocated* and *dynamic* hold for our pool and for the kernel's behind it: the dynamic
//! side begins with no page in either, and every page of it is a surplus page of both, which its sample proves.
//!
//! The kernel's pool is set for each sample and put back in the end, whatever end that is (`keeper`).

#[expect(unsafe_code, reason = "refers to static memory that has no name")]
mod fixed;
mod stream;
mod supply;
mod worker;

pub(crate) use worker::{FOLIOS, exchange, first_use, stream};

use std::fs::File;

use jumbo::pool::Thp;
use jumbo::units::{Bytes, Pages, counted};
use jumbo_host::kernel::Root;

use crate::claim;
use crate::elf::path_of;
use crate::group::{self, Group, rows};
use crate::heap::TOTAL;
use crate::keeper::{Keeper, Kernel, SIZE};
use crate::launch::Launch;
use crate::machine::cpus;
use crate::memory::room;
use crate::stats::least;
use crate::table::Table;
use crate::task::{Arrays, Provision, Source, Supply, Task, Way};
use crate::work::Worker;
use crate::{Error, Settings};
use stream::{ALL, KERNELS};

/// The large arrays are larger than the small ones at least, and than most caches.
pub const MIN_SIZE: Bytes = Bytes(48 << 20);

/// The small arrays, all three: what a large cache holds, and what the TLB holds with huge pages only.
const SMALL: Bytes = Bytes(24 << 20);

/// A process's arrays lie in memory that is as fast as the host made it, so of STREAM the best of so many processes is a
/// sample, for each kernel, from arrays of this size on: who measures small ones wants to know soon.
const LAPS: usize = 3;
const LARGE: Bytes = Bytes(1 << 30);

/// Passes over the small arrays, and over the large ones; each with `--quick`, too.
const PASSES: [[usize; 2]; 2] = [[200, 6], [50, 3]];
/// How many pages are used for the first time, how often, and how many a pool has whose pages are had and given back.
const FIRST: [Pages; 2] = [Pages(128), Pages(16)];
const TIMES: usize = 5;
const EXCHANGED: [Pages; 2] = [Pages(64), Pages(16)];

/// The memory of a heap beside what the program asks for.
const BESIDE: Bytes = Bytes(64 << 20);

/// Measures the table, with STREAM's three arrays of `size` bytes in all. 1, 2, 4 and more threads, up to one for each
/// CPU, take and give; STREAM runs with the most of them. With less work where `quick` is set.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, size: Bytes, quick: bool) -> Result<Table, Error> {
    let root = Root::host();
    let size = size.whole_pages(SIZE).bytes(SIZE);
    // The arrays, the pages that the kernel's pool may hold for the next side, and the program around.
    room(&root, size + size + Bytes(256 << 20))?;
    let most = cpus();
    let what = format!(
        "three arrays of {SMALL} and of {size} in all, {}",
        counted(most as u64, "thread")
    );
    let mut table = Table::new("pool", what, settings)?;

    let fixed = table.found("static arrays", fixed::program(&settings.jumbo, size))?;
    let pool = Keeper::of_pool(settings, size.whole_pages(SIZE));
    let pool = table.found("pages of the kernel's pool (hugetlb)", pool)?;
    let thp = Thp::at(&root).map_err(Error::from);
    let thp = table.found("transparent huge pages (thp)", thp)?;
    let hugetlb = pool.as_ref().map(|_| Source::Hugetlb);
    let kernel = Kernel { pool, knobs: None };
    let bench = Bench {
        settings,
        kernel: &kernel,
        quick: usize::from(quick),
        sources: [hugetlb, thp.map(|_| Source::Thp)]
            .into_iter()
            .flatten()
            .collect(),
        fixed,
    };
    let powers = (0..).map(|power| 1 << power);
    let mut threads: Vec<usize> = powers.take_while(|n| *n < most).chain([most]).collect();
    let mut groups = vec![bench.streams(size, most)];
    if quick {
        let what = "small arrays, and pages taken by more threads";
        table.missing(what, "--quick leaves them out");
        threads.truncate(1);
    } else {
        groups.push(bench.streams(SMALL, most));
    }
    groups.extend([
        bench.first_uses(),
        bench.exchanges(&threads),
        bench.loads(size),
    ]);
    let table = group::measure(settings, table, groups)?;
    kernel.give_back()?;
    Ok(table)
}

/// The common parts of the sides.
struct Bench<'a> {
    settings: &'a Settings,
    kernel: &'a Kernel,
    /// 1 where there is less work.
    quick: usize,
    /// The sources that are to be had.
    sources: Vec<Source>,
    /// The program with static arrays, where it can be made.
    fixed: Option<File>,
}

impl<'a> Bench<'a> {
    fn group(&self, what: &'static str) -> Group<'a> {
        Group::new(self.settings, what).on(self.kernel)
    }

    /// The baseline, the baseline again, static arrays, and for each source the preallocated and the dynamic side.
    fn streams(&self, size: Bytes, threads: usize) -> Group<'a> {
        let (small, kind) = match size {
            SMALL => ("_small", "small"),
            _ => ("", "large"),
        };
        let is_large = small.is_empty();
        let passes = PASSES[self.quick][usize::from(is_large)];
        let laps = if size >= LARGE { LAPS } else { 1 };
        let mut group = self.group("STREAM").laps(laps, least);
        let on = |launch, arrays| Worker::new(launch, Task::Stream(arrays, size, threads, passes));
        let plain = on(Launch::Plain, Arrays::Base);
        let base = group.worker("base pages", plain, size, claim::base(size));
        let all = &format!("all kernels, {kind} arrays");
        rows! { group; format!("stream{small}_aa") => all, ALL, base / base; }

        if let Some(program) = &self.fixed {
            // Static arrays: on base pages, and advised as `jumbo run --data` advises bss.
            let mut side = |name, launch, arrays, claims| {
                group.worker(name, on(launch, arrays).of(path_of(program)), size, claims)
            };
            let (plain, arrays) = (Launch::Plain, Arrays::StaticBase);
            let fixed = side("static, base pages", plain, arrays, claim::base(size));
            let (data, claims) = (Launch::at_once(DATA_ALONE), claim::huge(size));
            let advised = side("static, jumbo run --data", data, Arrays::Static, claims);
            let all = format!("all kernels, static {kind} arrays");
            rows! { group; format!("static{small}") => all, ALL, fixed / advised; }
            if is_large {
                rows! { group;
                    "start_static" => "static arrays touched", "start_ms", fixed / advised;
                    "faults_static" => "page faults, static arrays", "faults", fixed / advised;
                }
            }
        }

        for &source in &self.sources {
            let mut side = |called, provision| {
                let supply = Supply(source, provision);
                let pool = format!("{called} {}", source.name());
                let (name, launch, taken, claims) = match source {
                    Source::Hugetlb => (
                        format!("jumbo run --pool, {pool}"),
                        on_pool(size, ""),
                        pool_of(size),
                        supply.claims_of_heap(size),
                    ),
                    Source::Thp => (
                        format!("region of a {pool} pool"),
                        Launch::Plain,
                        size,
                        supply.claims(size.whole_pages(SIZE)),
                    ),
                };
                let worker = on(launch, Arrays::Supplied(supply));
                let side = group.worker(name, worker, size, claims);
                group.needs(side, supply.needs(taken.whole_pages(SIZE)))
            };
            let held = side("preallocated", Provision::Held);
            let dynamic = side("dynamic", Provision::Surplus);

            let name = |name: &str| format!("{name}{}{small}", suffix(source));
            let published = |figure| Some(figure).filter(|_| is_large);
            rows! { group;
                name("preallocated_vs_baseline") => all, ALL, base / held, published("up to 1.46");
                name("dynamic_vs_preallocated") => all, ALL, held / dynamic, published("0.994");
            }
            // One source shows which kernel gains what.
            for figure in KERNELS.into_iter().filter(|_| source == self.sources[0]) {
                let kernel = figure.trim_end_matches("_ms");
                let what = format!("{kernel}, {kind} arrays");
                rows! { group;
                    name(&format!("{kernel}_preallocated")) => &what, figure, base / held;
                    name(&format!("{kernel}_dynamic")) => &what, figure, held / dynamic;
                }
            }
            if is_large {
                let what = "arrays made and touched";
                rows! { group;
                    name("start_preallocated") => what, "start_ms", base / held;
                    name("start_dynamic") => what, "start_ms", base / dynamic;
                    name("faults_dynamic") => "page faults", "faults", base / dynamic, "196";
                }
            }
        }
        group
    }

    fn first_uses(&self) -> Group<'a> {
        let mut group = self.group("first use");
        let pages = FIRST[self.quick];
        for &source in &self.sources {
            let mut side = |called: &str, provision| {
                let supply = Supply(source, provision);
                let name = format!("{called} ({})", source.name());
                let worker = Worker::new(Launch::Plain, Task::FirstUse(supply, pages, TIMES));
                let side = group.worker(name, worker, pages.bytes(SIZE), supply.claims(pages));
                group.needs(side, supply.needs(pages))
            };
            let held = side("held", Provision::Held);
            let surplus = side("surplus", Provision::Surplus);
            if source == Source::Hugetlb {
                let persistent = side("persistent", Provision::Persistent);
                let what = "first use of a page";
                rows! { group;
                    "first_use_aa" => what, "page_us", persistent / persistent;
                    "surplus_vs_persistent" => what, "page_us", persistent / surplus;
                }
            }
            let name = format!("held_vs_surplus{}", suffix(source));
            rows! { group; name => "use of a page", "page_us", surplus / held; }
        }
        group
    }

    fn exchanges(&self, threads: &[usize]) -> Group<'a> {
        let mut group = self.group("take and give");
        let all = self.sources.iter();
        for (&source, &threads) in all.flat_map(|source| threads.iter().map(move |n| (source, n))) {
            self.exchange(&mut group, source, threads);
        }
        group
    }

    fn exchange(&self, group: &mut Group<'a>, source: Source, threads: usize) {
        let (by, called) = match threads {
            1 => (String::new(), "by 1 thread".to_owned()),
            n => (format!("_{n}_threads"), format!("by {n} threads")),
        };
        let pages = EXCHANGED[self.quick];
        let mut side = |way: Way| {
            let worker = Worker::new(Launch::Plain, Task::Exchange(source, way, pages, threads));
            let claims = way.claims(source, pages);
            let side = group.worker(way.name(source), worker, pages.bytes(SIZE), claims);
            group.needs(side, Supply(source, Provision::Held).needs(pages))
        };
        let [take, zeroed] = [Way::Take, Way::TakeZeroed].map(&mut side);
        let touched = side(Way::MapTouched);
        let what = |what: &str| format!("{what}, {called}");
        let name = |name: &str| format!("{name}{by}");
        // Of the kernel's ways the one without a touch, where that gives a page.
        let mut kernel = touched;
        if source == Source::Hugetlb {
            kernel = side(Way::Map);
            let content = what("a page, content unspecified");
            rows! { group; name("take_give_vs_mmap") => content, "page_ns", kernel / take; }
        }
        if threads == 1 {
            let name = format!("mmap{}_aa", suffix(source));
            rows! { group; name => what("a page"), "page_ns", kernel / kernel; }
        }
        let [touch, zeroes] = match source {
            Source::Hugetlb => ["take_give_vs_mmap_touched", "take_give_zeroed_vs_mmap"],
            Source::Thp => ["take_give_vs_mmap_thp", "take_give_zeroed_vs_mmap_thp"],
        };
        rows! { group;
            name(touch) => what("a page, and a touch"), "page_ns", touched / take;
            name(zeroes) => what("a page of zeroes"), "page_ns", touched / zeroed;
        }
    }

    /// The load of the heap's table: plain, plain again, and on a pool of each source.
    fn loads(&self, size: Bytes) -> Group<'a> {
        let mut group = self.group("heap");
        let plain = group.work(Launch::Plain, Task::Load(size), size, claim::no_huge());
        let what = "objects allocated, chased, freed";
        rows! { group; "heap_aa" => what, TOTAL, plain / plain; }
        for &source in &self.sources {
            let name = format!("jumbo run --heap=mimalloc --pool, {}", source.name());
            // With what alignment wastes.
            let most = Bytes(size.0 / 4 * 5);
            let worker = Worker::new(on_pool(most, "--heap=mimalloc"), Task::Load(size));
            let pooled = group.worker(name, worker, size, source.claims(size));
            let held = pool_of(most).whole_pages(SIZE);
            group.needs(pooled, Supply(source, Provision::Held).needs(held));
            let name = format!("heap_pool_vs_plain{}", suffix(source));
            rows! { group; name => what, TOTAL, plain / pooled; }
        }
        group
    }
}

/// Nothing but data differs.
const DATA_ALONE: &str = "--data=on --text=off --heap=off --maps=off --free=off --reaper=off";

/// `jumbo run --pool` for a program that asks for `size` bytes.
fn on_pool(size: Bytes, heap: &str) -> Launch {
    // The pages must be back when the next sample begins: no reaper.
    let mib = pool_of(size).0 >> 20;
    Launch::Jumbo(format!("--reaper=off {heap} --pool={mib}M,each,nofork"))
}

/// The size for `--pool`: the memory that the program asks for, and that its allocator needs.
fn pool_of(size: Bytes) -> Bytes {
    (size + BESIDE).whole_pages(SIZE).bytes(SIZE)
}

/// The end of the names of rows on a source. The mechanism was made for the kernel's pool.
fn suffix(source: Source) -> &'static str {
    match source {
        Source::Hugetlb => "",
        Source::Thp => "_thp",
    }
}
