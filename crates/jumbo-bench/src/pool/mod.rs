//! `jumbo bench pool`: costs of preallocated pages, of pages allocated on demand, and of pages
//! without a pool.
//!
//! - STREAM's kernels over arrays on base pages, on a preallocated pool, and on a dynamic one,
//!   which allocates pages on demand. An unmodified program gets the kernel's pages by `jumbo run
//!   --pool`; another program has its arrays in a region of a THP pool; a third has static arrays,
//!   as in the original, plain and under `jumbo run --data`.
//! - First use of a surplus page and of a persistent one.
//! - `take` and `give`, compared with `mmap` and `munmap`, by several threads.
//! - A whole heap on a pool (mimalloc), compared with the plain heap.
//!
//! All for both kinds of pool that the host has; a missing kind is reported with its reason.
//! *Preallocated* and *dynamic* apply to our pool and to the kernel's behind it: the dynamic side
//! starts without a page in either, and its samples prove that every page is a surplus page of
//! both.
//!
//! The kernel's pool is set for each sample and always restored (`keeper`).

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
use crate::heap::TOTAL_MS;
use crate::keeper::{Keeper, KernelKnobs, PAGE_2M};
use crate::launch::Launch;
use crate::machine::cpus;
use crate::memory::check_available;
use crate::stats::minimum;
use crate::table::Table;
use crate::task::{Arrays, PageCycle, PoolConfig, PoolKind, Provision, Task};
use crate::work::Worker;
use crate::{Error, Settings};
use stream::{KERNELS, KERNELS_MS};

/// Minimum size: the large arrays must exceed the small ones, and most caches.
pub const MIN_SIZE: Bytes = Bytes(48 << 20);

/// Size of all three small arrays: within a large cache, and within the TLB only on huge pages.
const SMALL_ARRAYS: Bytes = Bytes(24 << 20);

/// Processes per sample, of which the fastest counts for each kernel, for arrays of at least
/// [`LARGE_ARRAYS`]: the host decides how fast the memory of one process is. Small arrays are for
/// quick measurements.
const LAPS: usize = 3;
const LARGE_ARRAYS: Bytes = Bytes(1 << 30);

/// Passes over the small and the large arrays, without and with `--quick`.
const PASSES: [[usize; 2]; 2] = [[200, 6], [50, 3]];
/// Pages of the first-use rows, repetitions, and pages of the pool of the take-and-give rows.
const FIRST_USE_PAGES: [Pages; 2] = [Pages(128), Pages(16)];
const FIRST_USE_REPETITIONS: usize = 5;
const EXCHANGE_POOL_PAGES: [Pages; 2] = [Pages(64), Pages(16)];

/// Memory of a heap beyond the program's allocations.
const HEAP_OVERHEAD: Bytes = Bytes(64 << 20);

/// Measures the table, with `size` bytes for STREAM's three arrays. Take and give run on 1, 2, 4
/// ... threads, up to one per CPU, and STREAM on one per CPU. `quick` reduces the work.
pub fn measure(settings: &Settings, size: Bytes, quick: bool) -> Result<Table, Error> {
    let root = Root::host();
    let size = size.whole_pages(PAGE_2M).bytes(PAGE_2M);
    // The arrays, the pages that the kernel's pool may hold for the next side, and the program.
    check_available(size + size + Bytes(256 << 20))?;
    let max_threads = cpus();
    let what = format!(
        "three arrays of {SMALL_ARRAYS} and of {size} in all, {}",
        counted(max_threads as u64, "thread")
    );
    let mut table = Table::new("pool", what, settings)?;

    let fixed = table.available("static arrays", fixed::program(&settings.jumbo, size))?;
    let pool = Keeper::of_pool(settings, size.whole_pages(PAGE_2M));
    let pool = table.available("pages of the kernel's pool (hugetlb)", pool)?;
    let thp = Thp::at(&root).map_err(Error::from);
    let thp = table.available("transparent huge pages (thp)", thp)?;
    let hugetlb = pool.as_ref().map(|_| PoolKind::Hugetlb);
    let kernel = KernelKnobs { pool, knobs: None };
    let bench = PoolBench {
        settings,
        kernel: &kernel,
        quick: usize::from(quick),
        kinds: [hugetlb, thp.map(|_| PoolKind::Thp)]
            .into_iter()
            .flatten()
            .collect(),
        fixed,
    };
    let powers = (0..).map(|power| 1 << power);
    let mut threads: Vec<usize> = powers
        .take_while(|n| *n < max_threads)
        .chain([max_threads])
        .collect();
    let mut groups = vec![bench.streams(size, max_threads)];
    if quick {
        let what = "small arrays, and pages taken by more threads";
        table.missing(what, "--quick leaves them out");
        threads.truncate(1);
    } else {
        groups.push(bench.streams(SMALL_ARRAYS, max_threads));
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

struct PoolBench<'a> {
    settings: &'a Settings,
    kernel: &'a KernelKnobs,
    /// Index of `--quick`: 1 for less work.
    quick: usize,
    kinds: Vec<PoolKind>,
    /// The program with static arrays, if it can be built.
    fixed: Option<File>,
}

impl<'a> PoolBench<'a> {
    fn group(&self, what: &'static str) -> Group<'a> {
        Group::new(self.settings, what).on(self.kernel)
    }

    /// Base pages, static arrays, and per kind of pool the preallocated and the dynamic side.
    fn streams(&self, size: Bytes, threads: usize) -> Group<'a> {
        let (small, scale) = match size {
            SMALL_ARRAYS => ("_small", "small"),
            _ => ("", "large"),
        };
        let is_large = small.is_empty();
        let passes = PASSES[self.quick][usize::from(is_large)];
        let laps = if size >= LARGE_ARRAYS { LAPS } else { 1 };
        let mut group = self.group("STREAM").laps(laps, minimum);
        let on = |launch, arrays| Worker::new(launch, Task::Stream(arrays, size, threads, passes));
        let plain = on(Launch::Plain, Arrays::Base);
        let base = group.worker("base pages", plain, size, claim::base(size));
        let all = &format!("all kernels, {scale} arrays");
        rows! { group; format!("stream{small}_aa") => all, KERNELS_MS, base / base; }

        if let Some(program) = &self.fixed {
            // Static arrays on base pages, and under `jumbo run --data`.
            let mut side = |name, launch, arrays, claims| {
                group.worker(name, on(launch, arrays).of(path_of(program)), size, claims)
            };
            let (plain, arrays) = (Launch::Plain, Arrays::StaticBase);
            let fixed = side("static, base pages", plain, arrays, claim::base(size));
            let (data, claims) = (Launch::at_once(DATA_ONLY), claim::huge(size));
            let advised = side("static, jumbo run --data", data, Arrays::Static, claims);
            let all = format!("all kernels, static {scale} arrays");
            rows! { group; format!("static{small}") => all, KERNELS_MS, fixed / advised; }
            if is_large {
                rows! { group;
                    "start_static" => "static arrays touched", "start_ms", fixed / advised;
                    "faults_static" => "page faults, static arrays", "faults", fixed / advised;
                }
            }
        }

        for &kind in &self.kinds {
            let mut side = |called, provision| {
                let config = PoolConfig(kind, provision);
                let pool = format!("{called} {}", kind.name());
                let (name, launch, taken, claims) = match kind {
                    PoolKind::Hugetlb => (
                        format!("jumbo run --pool, {pool}"),
                        on_pool(size, ""),
                        pool_of(size),
                        config.claims_of_heap(size),
                    ),
                    PoolKind::Thp => (
                        format!("region of a {pool} pool"),
                        Launch::Plain,
                        size,
                        config.claims(size.whole_pages(PAGE_2M)),
                    ),
                };
                let worker = on(launch, Arrays::Supplied(config));
                let side = group.worker(name, worker, size, claims);
                group.needs(side, config.needs(taken.whole_pages(PAGE_2M)))
            };
            let held = side("preallocated", Provision::Held);
            let dynamic = side("dynamic", Provision::Surplus);

            let name = |name: &str| format!("{name}{}{small}", suffix(kind));
            let published = |figure| Some(figure).filter(|_| is_large);
            rows! { group;
                name("preallocated_vs_baseline") => all, KERNELS_MS, base / held, published("up to 1.444");
                name("dynamic_vs_preallocated") => all, KERNELS_MS, held / dynamic, published("0.9987");
            }
            // One kind of pool is enough to show the gain of each kernel.
            for figure in KERNELS.into_iter().filter(|_| kind == self.kinds[0]) {
                let kernel = figure.trim_end_matches("_ms");
                let what = format!("{kernel}, {scale} arrays");
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
        let pages = FIRST_USE_PAGES[self.quick];
        for &kind in &self.kinds {
            let mut side = |called: &str, provision| {
                let config = PoolConfig(kind, provision);
                let name = format!("{called} ({})", kind.name());
                let worker = Worker::new(
                    Launch::Plain,
                    Task::FirstUse(config, pages, FIRST_USE_REPETITIONS),
                );
                let side = group.worker(name, worker, pages.bytes(PAGE_2M), config.claims(pages));
                group.needs(side, config.needs(pages))
            };
            let held = side("held", Provision::Held);
            let surplus = side("surplus", Provision::Surplus);
            if kind == PoolKind::Hugetlb {
                let persistent = side("persistent", Provision::Persistent);
                let what = "first use of a page";
                rows! { group;
                    "first_use_aa" => what, "page_us", persistent / persistent;
                    "surplus_vs_persistent" => what, "page_us", persistent / surplus;
                }
            }
            let name = format!("held_vs_surplus{}", suffix(kind));
            rows! { group; name => "use of a page", "page_us", surplus / held; }
        }
        group
    }

    fn exchanges(&self, threads: &[usize]) -> Group<'a> {
        let mut group = self.group("take and give");
        let all = self.kinds.iter();
        for (&kind, &threads) in all.flat_map(|kind| threads.iter().map(move |n| (kind, n))) {
            self.exchange(&mut group, kind, threads);
        }
        group
    }

    fn exchange(&self, group: &mut Group<'a>, kind: PoolKind, threads: usize) {
        let (by, called) = match threads {
            1 => (String::new(), "by 1 thread".to_owned()),
            n => (format!("_{n}_threads"), format!("by {n} threads")),
        };
        let pages = EXCHANGE_POOL_PAGES[self.quick];
        let mut side = |cycle: PageCycle| {
            let worker = Worker::new(Launch::Plain, Task::Exchange(kind, cycle, pages, threads));
            let claims = cycle.claims(kind, pages);
            let side = group.worker(cycle.name(kind), worker, pages.bytes(PAGE_2M), claims);
            group.needs(side, PoolConfig(kind, Provision::Held).needs(pages))
        };
        let [take, zeroed] = [PageCycle::Take, PageCycle::TakeZeroed].map(&mut side);
        let touched = side(PageCycle::MapTouched);
        let what = |what: &str| format!("{what}, {called}");
        let name = |name: &str| format!("{name}{by}");
        // The kernel's fastest method: without a touch, if that yields a page.
        let mut kernel = touched;
        if kind == PoolKind::Hugetlb {
            kernel = side(PageCycle::Map);
            let content = what("a page, content unspecified");
            rows! { group; name("take_give_vs_mmap") => content, "page_ns", kernel / take; }
        }
        if threads == 1 {
            let name = format!("mmap{}_aa", suffix(kind));
            rows! { group; name => what("a page"), "page_ns", kernel / kernel; }
        }
        let [touch, zeroes] = match kind {
            PoolKind::Hugetlb => ["take_give_vs_mmap_touched", "take_give_zeroed_vs_mmap"],
            PoolKind::Thp => ["take_give_vs_mmap_thp", "take_give_zeroed_vs_mmap_thp"],
        };
        rows! { group;
            name(touch) => what("a page, and a touch"), "page_ns", touched / take;
            name(zeroes) => what("a page of zeroes"), "page_ns", touched / zeroed;
        }
    }

    /// The load of the heap's table: plain, plain again, and on each kind of pool.
    fn loads(&self, size: Bytes) -> Group<'a> {
        let mut group = self.group("heap");
        let plain = group.work(Launch::Plain, Task::Load(size), size, claim::no_huge());
        let what = "objects allocated, chased, freed";
        rows! { group; "heap_aa" => what, TOTAL_MS, plain / plain; }
        for &kind in &self.kinds {
            let name = format!("jumbo run --heap=mimalloc --pool, {}", kind.name());
            // Waste by alignment included.
            let max_size = Bytes(size.0 / 4 * 5);
            let worker = Worker::new(on_pool(max_size, "--heap=mimalloc"), Task::Load(size));
            let pooled = group.worker(name, worker, size, kind.claims(size));
            let held = pool_of(max_size).whole_pages(PAGE_2M);
            group.needs(pooled, PoolConfig(kind, Provision::Held).needs(held));
            let name = format!("heap_pool_vs_plain{}", suffix(kind));
            rows! { group; name => what, TOTAL_MS, plain / pooled; }
        }
        group
    }
}

const DATA_ONLY: &str = "--data=on --text=off --heap=off --maps=off --free=off --reaper=off";

/// `jumbo run --pool` for a program that allocates `size` bytes.
fn on_pool(size: Bytes, heap: &str) -> Launch {
    // No reaper: the pages must be free when the next sample begins.
    let mib = pool_of(size).0 >> 20;
    Launch::Jumbo(format!("--reaper=off {heap} --pool={mib}M,each,nofork"))
}

/// Size for `--pool`: the program's allocations and the overhead of its allocator.
fn pool_of(size: Bytes) -> Bytes {
    (size + HEAP_OVERHEAD).whole_pages(PAGE_2M).bytes(PAGE_2M)
}

/// Suffix of the row names of a kind of pool; empty for the kernel's.
fn suffix(kind: PoolKind) -> &'static str {
    match kind {
        PoolKind::Hugetlb => "",
        PoolKind::Thp => "_thp",
    }
}
