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
//! The kernel's pool is set for each sample and put back in the end, whatever end that is (`host`).

#[expect(unsafe_code, reason = "refers to static memory that has no name")]
mod fixed;
mod stream;
mod supply;
mod worker;

pub(crate) use worker::{EXCHANGE, FIRST_USE, STREAM};

use std::cell::RefCell;
use std::fs::File;
use std::num::NonZeroUsize;

use jumbo::pool::Thp;
use jumbo::units::{Bytes, Pages, counted};
use jumbo_host::kernel::Root;

use crate::claim::{self, Claim};
use crate::elf::path_of;
use crate::group::{self, Group, rows};
use crate::heap::{LOAD, TOTAL};
use crate::keeper::{Host, SIZE, Wanted};
use crate::launch::Launch;
use crate::memory::room;
use crate::stats::least;
use crate::table::Table;
use crate::work::Worker;
use crate::{Error, Settings};
use stream::{ALL, KERNELS};
use supply::{Arrays, Provision, Source, Supply, Way};

/// The large arrays are larger than the small ones at least, and than most caches.
pub const MIN_SIZE: Bytes = Bytes(48 << 20);

/// The small arrays, all three: what a large cache holds, and what the TLB holds with huge pages only.
const SMALL: Bytes = Bytes(24 << 20);

/// A process's arrays lie in memory that is as fast as the host made it, so of STREAM the best of so many processes is a
/// sample, for each kernel, from arrays of this size on: who measures small ones wants to know soon.
const LAPS: usize = 3;
const LARGE: Bytes = Bytes(1 << 30);

/// How much is done.
#[derive(Clone, Copy)]
struct Work {
    /// Passes over the small arrays, and over the large ones.
    passes: [usize; 2],
    /// How many pages are used for the first time.
    first: Pages,
    /// How many pages a pool has whose pages are had and given back.
    exchanged: Pages,
}

/// All of it, and less, to be done soon.
const WORK: [Work; 2] = [
    Work {
        passes: [200, 6],
        first: Pages(128),
        exchanged: Pages(64),
    },
    Work {
        passes: [50, 3],
        first: Pages(16),
        exchanged: Pages(16),
    },
];

/// How often the first use of pages is repeated.
const TIMES: usize = 5;

/// The memory of a heap beside what the program asks for.
const BESIDE: Bytes = Bytes(64 << 20);

/// Measures the table, with STREAM's three arrays of `size` bytes in all. So many threads take and give, a row for each
/// number; STREAM runs with the most of them. With less work where `quick` is set.
///
/// # Errors
/// [`Error`].
pub fn measure(
    settings: &Settings,
    size: Bytes,
    threads: &[NonZeroUsize],
    quick: bool,
) -> Result<Table, Error> {
    let root = Root::host();
    let size = size.whole_pages(SIZE).bytes(SIZE);
    // The arrays, the pages that the kernel's pool may hold for the next side, and the program around.
    room(&root, size + size + Bytes(256 << 20))?;
    let threads: Vec<usize> = threads.iter().map(|n| n.get()).collect();
    let most = threads.iter().copied().max().unwrap_or(1);
    let what = format!(
        "three arrays of {SMALL} and of {size} in all, {}",
        counted(most as u64, "thread")
    );
    let mut table = Table::new("pool", what, settings)?;

    let fixed = table.found("static arrays", fixed::program(&settings.jumbo, size))?;
    let host = Host::take(settings, size.whole_pages(SIZE));
    let host = table.found("pages of the kernel's pool (hugetlb)", host)?;
    let thp = Thp::at(&root).map_err(Error::from);
    let thp = table.found("transparent huge pages (thp)", thp)?;
    let hugetlb = host.as_ref().map(|_| Source::Hugetlb);
    let bench = Bench {
        settings,
        work: WORK[usize::from(quick)],
        host: RefCell::new(host),
        sources: hugetlb
            .into_iter()
            .chain(thp.map(|_| Source::Thp))
            .collect(),
        fixed,
    };
    // What takes the most time and says the least.
    let exchanging = match (quick, threads.as_slice()) {
        (true, [first, _, ..]) => std::slice::from_ref(first),
        (_, all) => all,
    };
    let mut groups = vec![bench.streams(size, most)];
    match quick {
        true => table.missing(
            "small arrays, and pages taken by more threads",
            "--quick leaves them out",
        ),
        false => groups.push(bench.streams(SMALL, most)),
    }
    groups.extend([
        bench.first_uses(),
        bench.exchanges(exchanging),
        bench.loads(size),
    ]);
    let table = group::measure(settings, table, groups)?;
    bench.host.take().map_or(Ok(()), Host::give_back)?;
    Ok(table)
}

/// The common parts of the sides.
struct Bench<'a> {
    settings: &'a Settings,
    work: Work,
    /// `None` where the kernel's pool is not to be had.
    host: RefCell<Option<Host>>,
    /// The sources that are to be had.
    sources: Vec<Source>,
    /// The program with static arrays, where it can be made.
    fixed: Option<File>,
}

impl<'a> Bench<'a> {
    /// Adds a side whose programs need that of the kernel's pool, take `size` bytes and must show that.
    fn side(
        &'a self,
        group: &mut Group<'a>,
        name: impl Into<String>,
        worker: Worker,
        (wanted, size): (Wanted, Bytes),
        claims: Vec<Claim>,
    ) -> usize {
        group.side(name, size, move || {
            if let Some(host) = &mut *self.host.borrow_mut() {
                host.provide(wanted)?;
            }
            worker.sample(self.settings, &claims)
        })
    }

    /// The baseline, the baseline again, static arrays, and for each source the preallocated and the dynamic side.
    fn streams(&'a self, size: Bytes, threads: usize) -> Group<'a> {
        let (small, kind) = named(size);
        let passes = self.work.passes[usize::from(size != SMALL)];
        let laps = if size >= LARGE { LAPS } else { 1 };
        let mut group = Group::new(self.settings, "STREAM").laps(laps, least);
        let on = |launch, arrays| Worker::new(launch, &STREAM, &(arrays, size, threads, passes));
        let plain = on(Launch::Plain, Arrays::Base);
        let needs = (Wanted::default(), size);
        let base = self.side(&mut group, "base pages", plain, needs, claim::base(size));
        let all = &format!("all kernels, {kind} arrays");
        rows! { group; format!("stream{small}_aa") => all, ALL, base / base; }

        if let Some(program) = &self.fixed {
            // Static arrays: on base pages, and advised as `jumbo run --data` advises bss.
            let mut fixed = |name, launch, arrays, claims| {
                let worker = on(launch, arrays).of(path_of(program));
                self.side(&mut group, name, worker, needs, claims)
            };
            let (name, data) = ("static, base pages", Launch::Jumbo(DATA_ALONE.to_owned()));
            let fixed_base = fixed(name, Launch::Plain, Arrays::StaticBase, claim::base(size));
            let name = "static, jumbo run --data";
            let advised = fixed(name, data, Arrays::Static, claim::huge(size));
            let all = format!("all kernels, static {kind} arrays");
            rows! { group; format!("static{small}") => all, ALL, fixed_base / advised; }
            if small.is_empty() {
                let (touched, faults) = ("static arrays touched", "page faults, static arrays");
                rows! { group;
                    "start_static" => touched, "start_ms", fixed_base / advised;
                    "faults_static" => faults, "faults", fixed_base / advised;
                }
            }
        }

        for &source in &self.sources {
            let mut side = |called, provision| {
                let supply = Supply::of(source, provision);
                let arrays = Arrays::Supplied(supply);
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
                let wanted = supply.wanted(taken.whole_pages(SIZE));
                self.side(&mut group, name, on(launch, arrays), (wanted, size), claims)
            };
            let held = side("preallocated", Provision::Held);
            let dynamic = side("dynamic", Provision::Surplus);

            let name = |name: &str| format!("{name}{}{small}", suffix(source));
            let published = |figure| Some(figure).filter(|_| small.is_empty());
            let (gain, cost) = (published("up to 1.46"), published("0.994"));
            rows! { group;
                name("preallocated_vs_baseline") => all, ALL, base / held, gain;
                name("dynamic_vs_preallocated") => all, ALL, held / dynamic, cost;
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
            if small.is_empty() {
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

    fn first_uses(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "first use");
        let pages = self.work.first;
        for &source in &self.sources {
            let mut side = |called: &str, provision| {
                let supply = Supply::of(source, provision);
                let needs = (supply.wanted(pages), pages.bytes(SIZE));
                let name = format!("{called} ({})", source.name());
                let worker = Worker::new(Launch::Plain, &FIRST_USE, &(supply, pages, TIMES));
                self.side(&mut group, name, worker, needs, supply.claims(pages))
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

    fn exchanges(&'a self, threads: &[usize]) -> Group<'a> {
        let mut group = Group::new(self.settings, "take and give");
        for &source in &self.sources {
            for &threads in threads {
                self.exchange(&mut group, source, threads);
            }
        }
        group
    }

    fn exchange(&'a self, group: &mut Group<'a>, source: Source, threads: usize) {
        let (by, called) = match threads {
            1 => (String::new(), "by 1 thread".to_owned()),
            n => (format!("_{n}_threads"), format!("by {n} threads")),
        };
        let pages = self.work.exchanged;
        let side = |group: &mut Group<'a>, way: Way| {
            let told = (source, way, pages, threads);
            let worker = Worker::new(Launch::Plain, &EXCHANGE, &told);
            let wanted = Supply::of(source, Provision::Held).wanted(pages);
            let needs = (wanted, pages.bytes(SIZE));
            self.side(
                group,
                way.name(source),
                worker,
                needs,
                way.claims(source, pages),
            )
        };
        let (take, zeroed) = (side(group, Way::Take), side(group, Way::TakeZeroed));
        let touched = side(group, Way::MapTouched);
        let mut kernel = touched;
        // Of the kernel's ways the one without a touch, where that gives a page.
        if source == Source::Hugetlb {
            kernel = side(group, Way::Map);
            let (name, what) = (
                format!("take_give_vs_mmap{by}"),
                "a page, content unspecified",
            );
            rows! { group; name => format!("{what}, {called}"), "page_ns", kernel / take; }
        }
        if threads == 1 {
            let name = format!("mmap{}_aa", suffix(source));
            rows! { group; name => format!("a page, {called}"), "page_ns", kernel / kernel; }
        }
        let [touch, zeroes] = match source {
            Source::Hugetlb => ["take_give_vs_mmap_touched", "take_give_zeroed_vs_mmap"],
            Source::Thp => ["take_give_vs_mmap_thp", "take_give_zeroed_vs_mmap_thp"],
        };
        let name = |name: &str| format!("{name}{by}");
        rows! { group;
            name(touch) => format!("a page, and a touch, {called}"), "page_ns", touched / take;
            name(zeroes) => format!("a page of zeroes, {called}"), "page_ns", touched / zeroed;
        }
    }

    /// The load of the heap's table: plain, plain again, and on a pool of each source.
    fn loads(&'a self, size: Bytes) -> Group<'a> {
        let mut group = Group::new(self.settings, "heap");
        let plain = Worker::new(Launch::Plain, &LOAD, &size);
        let needs = (Wanted::default(), size);
        let plain = self.side(&mut group, "plain", plain, needs, claim::no_huge());
        let what = "objects allocated, chased, freed";
        rows! { group; "heap_aa" => what, TOTAL, plain / plain; }
        for &source in &self.sources {
            let name = format!("jumbo run --heap=mimalloc --pool, {}", source.name());
            // With what alignment wastes.
            let most = Bytes(size.0 / 4 * 5);
            let held = pool_of(most).whole_pages(SIZE);
            let needs = (Supply::of(source, Provision::Held).wanted(held), size);
            let worker = Worker::new(on_pool(most, "--heap=mimalloc"), &LOAD, &size);
            let pooled = self.side(&mut group, name, worker, needs, source.claims(size));
            let name = format!("heap_pool_vs_plain{}", suffix(source));
            rows! { group; name => what, TOTAL, plain / pooled; }
        }
        group
    }
}

/// The end of the names of rows about STREAM's arrays, and the name of those arrays.
fn named(size: Bytes) -> (&'static str, &'static str) {
    match size {
        SMALL => ("_small", "small"),
        _ => ("", "large"),
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
