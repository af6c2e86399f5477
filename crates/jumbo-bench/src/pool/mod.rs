//! `jumbo bench pool`: costs of preallocated pages, of pages allocated on demand, and of pages
//! without a pool.
//!
//! - STREAM's kernels over arrays on base pages, on a preallocated pool, and on a dynamic one,
//!   which allocates pages on demand. An unmodified program gets the kernel's pages by `jumbo run
//!   --pool`; another program has its arrays in a region of a THP pool.
//! - `take` and `give`, compared with `mmap` and `munmap`.
//!
//! All for both kinds of pool that the host has; a missing kind is reported with its reason.
//! *Preallocated* and *dynamic* apply to our pool and to the kernel's behind it: the dynamic side
//! starts without a page in either, and its samples prove that every page is a surplus page of
//! both.
//!
//! The kernel's pool is set for each sample and always restored (`keeper`).

mod stream;
mod supply;
mod worker;

pub(crate) use worker::{exchange, stream};

use jumbo::pool::Thp;
use jumbo::units::{Bytes, Pages, counted};
use jumbo_host::kernel::Root;

use crate::claim;
use crate::group::{self, Group, rows};
use crate::keeper::{Keeper, KernelKnobs, PAGE_2M};
use crate::launch::Launch;
use crate::machine::cpus;
use crate::memory::check_available;
use crate::stats::minimum;
use crate::table::Table;
use crate::task::{Arrays, PageCycle, PoolConfig, PoolKind, Provision, Task};
use crate::work::Worker;
use crate::{Error, Settings};
use stream::KERNELS_MS;

/// Minimum size: the arrays must exceed most caches.
pub const MIN_SIZE: Bytes = Bytes(48 << 20);

/// Processes per sample, of which the fastest counts for each kernel, for arrays of at least
/// [`LARGE_ARRAYS`]: the host decides how fast the memory of one process is. Small arrays are for
/// quick measurements.
const LAPS: usize = 3;
const LARGE_ARRAYS: Bytes = Bytes(1 << 30);

/// Passes over the arrays, without and with `--quick`.
const PASSES: [usize; 2] = [6, 3];
/// Pages of the pool of the take-and-give rows.
const EXCHANGE_POOL_PAGES: [Pages; 2] = [Pages(64), Pages(16)];

/// Memory of a heap beyond the program's allocations.
const HEAP_OVERHEAD: Bytes = Bytes(64 << 20);

/// Measures the table, with `size` bytes for STREAM's three arrays. STREAM runs on a thread
/// per CPU. `quick` reduces the work.
pub fn measure(settings: &Settings, size: Bytes, quick: bool) -> Result<Table, Error> {
    let root = Root::host();
    let size = size.whole_pages(PAGE_2M).bytes(PAGE_2M);
    // The arrays, the pages that the kernel's pool may hold for the next side, and the program.
    check_available(size + size + Bytes(256 << 20))?;
    let max_threads = cpus();
    let what = format!(
        "three arrays of {size} in all, {}",
        counted(max_threads as u64, "thread")
    );
    let mut table = Table::new("pool", what, settings)?;

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
    };
    let groups = vec![bench.streams(size, max_threads), bench.exchanges()];
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
}

impl<'a> PoolBench<'a> {
    fn group(&self, what: &'static str) -> Group<'a> {
        Group::new(self.settings, what).on(self.kernel)
    }

    /// Base pages, and per kind of pool the preallocated and the dynamic side.
    fn streams(&self, size: Bytes, threads: usize) -> Group<'a> {
        let passes = PASSES[self.quick];
        let laps = if size >= LARGE_ARRAYS { LAPS } else { 1 };
        let mut group = self.group("STREAM").laps(laps, minimum);
        let on = |launch, arrays| Worker::new(launch, Task::Stream(arrays, size, threads, passes));
        let plain = on(Launch::Plain, Arrays::Base);
        let base = group.worker("base pages", plain, size, claim::base(size));
        let all = "all kernels";
        rows! { group; "stream_aa" => all, KERNELS_MS, base / base; }

        for &kind in &self.kinds {
            let mut side = |called, provision| {
                let config = PoolConfig(kind, provision);
                let pool = format!("{called} {}", kind.name());
                let (name, launch, taken, claims) = match kind {
                    PoolKind::Hugetlb => (
                        format!("jumbo run --pool, {pool}"),
                        on_pool(size),
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

            let name = |name: &str| format!("{name}{}", suffix(kind));
            let what = "arrays made and touched";
            rows! { group;
                name("preallocated_vs_baseline") => all, KERNELS_MS, base / held, "up to 1.444";
                name("dynamic_vs_preallocated") => all, KERNELS_MS, held / dynamic, "0.9987";
                name("start_dynamic") => what, "start_ms", base / dynamic;
                name("faults_dynamic") => "page faults", "faults", base / dynamic, "196";
            }
        }
        group
    }

    /// `take`, a touch and `give`, compared with `mmap`, a touch and `munmap`.
    fn exchanges(&self) -> Group<'a> {
        let mut group = self.group("take and give");
        let pages = EXCHANGE_POOL_PAGES[self.quick];
        for &kind in &self.kinds {
            let mut side = |cycle: PageCycle| {
                let worker = Worker::new(Launch::Plain, Task::Exchange(kind, cycle, pages));
                let claims = cycle.claims(kind, pages);
                let side = group.worker(cycle.name(kind), worker, pages.bytes(PAGE_2M), claims);
                group.needs(side, PoolConfig(kind, Provision::Held).needs(pages))
            };
            let [take, map] = [PageCycle::Take, PageCycle::MapTouched].map(&mut side);
            let what = "a page, and a touch";
            rows! { group;
                format!("mmap{}_aa", suffix(kind)) => what, "page_ns", map / map;
                format!("take_give_vs_mmap{}", suffix(kind)) => what, "page_ns", map / take;
            }
        }
        group
    }
}

/// `jumbo run --pool` for a program that allocates `size` bytes.
fn on_pool(size: Bytes) -> Launch {
    // No reaper: the pages must be free when the next sample begins.
    let mib = pool_of(size).0 >> 20;
    Launch::Jumbo(format!("--reaper=off --pool={mib}M,each,nofork"))
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
