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
mod host;
mod stream;
mod supply;
mod worker;

pub(crate) use host::{Host, Wanted};
pub(crate) use supply::{Arrays, Source, Supply, Way};
pub(crate) use worker::{exchange, first_use, stream};

use std::cell::RefCell;
use std::fs::File;
use std::num::NonZeroUsize;

use jumbo::kernel::Root;
use jumbo::pool::Thp;
use jumbo::units::{Bytes, Pages, counted};

use crate::child::{Launch, ask_in};
use crate::claim::{self, Claim};
use crate::elf::path_of;
use crate::group::Group;
use crate::heap::TOTAL;
use crate::keeper::SIZE;
use crate::memory::room;
use crate::stats::least;
use crate::table::{Missing, Table};
use crate::worker::Task;
use crate::{Error, Settings, group};
use stream::{ALL, KERNELS};
use supply::Provision;

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

/// What a heap takes beside what the program asks for.
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

    let mut missing = |what, why| table.missing.push(Missing { what, why });
    let mut bench = Bench {
        settings,
        work: WORK[usize::from(quick)],
        host: RefCell::new(None),
        sources: Vec::new(),
        fixed: None,
    };
    match fixed::program(&settings.jumbo, size) {
        Ok(program) => bench.fixed = Some(program),
        Err(error @ Error::Program(..)) => missing("static arrays", error.to_string()),
        Err(error) => return Err(error),
    }
    match Host::take(settings, size.whole_pages(SIZE)) {
        Ok(host) => {
            bench.host = RefCell::new(Some(host));
            bench.sources.push(Source::Hugetlb);
        }
        Err(Error::Kernel(_, why)) => missing("pages of the kernel's pool (hugetlb)", why),
        Err(error) => return Err(error),
    }
    match Thp::at(&root) {
        Ok(_) => bench.sources.push(Source::Thp),
        Err(why) => missing("transparent huge pages (thp)", why.to_string()),
    }
    // What takes the most time and says the least.
    let exchanging = match (quick, threads.as_slice()) {
        (true, [first, _, ..]) => std::slice::from_ref(first),
        (_, all) => all,
    };
    let mut groups = vec![bench.streams(size, most)];
    match quick {
        true => missing(
            "small arrays, and pages taken by more threads",
            String::from("--quick leaves them out"),
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

/// What the sides have in common.
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
        name: String,
        (launch, task): (Launch, Task),
        (wanted, size): (Wanted, Bytes),
        claims: Vec<Claim>,
    ) -> usize {
        let program = match (&task, &self.fixed) {
            (Task::Stream(Arrays::Static | Arrays::StaticBase, ..), Some(program)) => {
                path_of(program)
            }
            _ => self.settings.jumbo.clone(),
        };
        group.side(name, size, move || {
            if let Some(host) = &mut *self.host.borrow_mut() {
                host.provide(wanted)?;
            }
            let program = program.as_os_str();
            ask_in(program, self.settings, (&launch, &task), &claims)
        })
    }

    /// The baseline, the baseline again, static arrays, and for each source the preallocated and the dynamic side.
    fn streams(&'a self, size: Bytes, threads: usize) -> Group<'a> {
        let (small, arrays) = named(size);
        let passes = self.work.passes[usize::from(size != SMALL)];
        let laps = if size >= LARGE { LAPS } else { 1 };
        let mut group = Group::new(self.settings, "STREAM").laps(laps, least);
        let on = |arrays| Task::Stream(arrays, size, threads, passes);
        let plain = (Launch::Plain, on(Arrays::Base));
        let name = "base pages".to_owned();
        let needs = (Wanted::default(), size);
        let base = self.side(&mut group, name, plain, needs, claim::base(size));
        let all = format!("all kernels, {arrays} arrays");
        group.against_itself((&format!("stream{small}_aa"), &all, ALL), base);

        if self.fixed.is_some() {
            self.fixed(&mut group, size, &on);
        }

        for &source in &self.sources {
            let mut side = |called, provision| {
                let supply = Supply::of(source, provision);
                let pool = format!("{called} {}", source.name());
                let (name, what, taken, claims) = match source {
                    Source::Hugetlb => (
                        format!("jumbo run --pool, {pool}"),
                        (on_pool(size, ""), on(Arrays::Supplied(supply))),
                        pool_of(size),
                        supply.claims_of_heap(size),
                    ),
                    Source::Thp => (
                        format!("region of a {pool} pool"),
                        (Launch::Plain, on(Arrays::Supplied(supply))),
                        size,
                        supply.claims(size.whole_pages(SIZE)),
                    ),
                };
                let wanted = supply.wanted(taken.whole_pages(SIZE));
                self.side(&mut group, name, what, (wanted, size), claims)
            };
            let held = side("preallocated", Provision::Held);
            let dynamic = side("dynamic", Provision::Surplus);

            let is_large = small.is_empty();
            let mut row = |name: &str, what: &str, figure, sides, published: Option<_>| {
                let name = format!("{name}{}{small}", suffix(source));
                let row = group.ratio((&name, what, figure), sides);
                row.published = published.filter(|_| is_large);
            };
            let (gain, cost) = ([base, held], [held, dynamic]);
            row(
                "preallocated_vs_baseline",
                &all,
                ALL,
                gain,
                Some("up to 1.46"),
            );
            row("dynamic_vs_preallocated", &all, ALL, cost, Some("0.994"));
            // One source shows which kernel gains what.
            for figure in KERNELS.into_iter().filter(|_| source == self.sources[0]) {
                let kernel = figure.trim_end_matches("_ms");
                let what = format!("{kernel}, {arrays} arrays");
                row(&format!("{kernel}_preallocated"), &what, figure, gain, None);
                row(&format!("{kernel}_dynamic"), &what, figure, cost, None);
            }
            if is_large {
                let (what, sides) = ("arrays made and touched", [base, dynamic]);
                row("start_preallocated", what, "start_ms", gain, None);
                row("start_dynamic", what, "start_ms", sides, None);
                row(
                    "faults_dynamic",
                    "page faults",
                    "faults",
                    sides,
                    Some("196"),
                );
            }
        }
        group
    }

    /// Static arrays: on base pages, and advised as `jumbo run --data` advises bss.
    fn fixed(&'a self, group: &mut Group<'a>, size: Bytes, on: &dyn Fn(Arrays) -> Task) {
        let (small, arrays) = named(size);
        let needs = (Wanted::default(), size);
        let plain = (Launch::Plain, on(Arrays::StaticBase));
        let name = "static, base pages".to_owned();
        let base = self.side(group, name, plain, needs, claim::base(size));
        let data = (Launch::Jumbo(DATA_ALONE.to_owned()), on(Arrays::Static));
        let name = "static, jumbo run --data".to_owned();
        let advised = self.side(group, name, data, needs, claim::huge(size));
        let mut row = |name: &str, what: &str, figure| {
            let name = format!("{name}static{small}");
            group.ratio((&name, what, figure), [base, advised]);
        };
        row("", &format!("all kernels, static {arrays} arrays"), ALL);
        if small.is_empty() {
            row("start_", "static arrays touched", "start_ms");
            row("faults_", "page faults, static arrays", "faults");
        }
    }

    fn first_uses(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "first use");
        for &source in &self.sources {
            let mut side = |called: &str, provision| {
                let supply = Supply::of(source, provision);
                let first = self.work.first;
                let what = (Launch::Plain, Task::FirstUse(supply, first, TIMES));
                let needs = (supply.wanted(first), first.bytes(SIZE));
                let name = format!("{called} ({})", source.name());
                self.side(&mut group, name, what, needs, supply.claims(first))
            };
            let held = side("held", Provision::Held);
            let surplus = side("surplus", Provision::Surplus);
            if source == Source::Hugetlb {
                let persistent = side("persistent", Provision::Persistent);
                let (what, sides) = ("first use of a page", [persistent, surplus]);
                group.against_itself(("first_use_aa", what, "page_us"), persistent);
                group.ratio(("surplus_vs_persistent", what, "page_us"), sides);
            }
            let name = format!("held_vs_surplus{}", suffix(source));
            group.ratio((&name, "use of a page", "page_us"), [surplus, held]);
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
        let mut side = |way: Way| {
            let pages = self.work.exchanged;
            let what = (Launch::Plain, Task::Exchange(source, way, pages, threads));
            let wanted = Supply::of(source, Provision::Held).wanted(pages);
            let needs = (wanted, pages.bytes(SIZE));
            let claims = way.claims(source, pages);
            self.side(group, way.name(source), what, needs, claims)
        };
        let (take, zeroed) = (side(Way::Take), side(Way::TakeZeroed));
        // The kernel's ways: without a touch, if that gives a page, and with it.
        let map = (source == Source::Hugetlb).then(|| side(Way::Map));
        let touched = side(Way::MapTouched);
        if threads == 1 {
            let (name, what) = (
                format!("mmap{}_aa", suffix(source)),
                format!("a page, {called}"),
            );
            group.against_itself((&name, &what, "page_ns"), map.unwrap_or(touched));
        }
        let mut row = |name: &str, what: &str, sides| {
            let (name, what) = (format!("{name}{by}"), format!("{what}, {called}"));
            group.ratio((&name, &what, "page_ns"), sides);
        };
        if let Some(map) = map {
            row(
                "take_give_vs_mmap",
                "a page, content unspecified",
                [map, take],
            );
        }
        let [touch, zeroes] = match source {
            Source::Hugetlb => ["take_give_vs_mmap_touched", "take_give_zeroed_vs_mmap"],
            Source::Thp => ["take_give_vs_mmap_thp", "take_give_zeroed_vs_mmap_thp"],
        };
        row(touch, "a page, and a touch", [touched, take]);
        row(zeroes, "a page of zeroes", [touched, zeroed]);
    }

    /// The load of the heap's table: plain, plain again, and on a pool of each source.
    fn loads(&'a self, size: Bytes) -> Group<'a> {
        let mut group = Group::new(self.settings, "heap");
        let load = || Task::Load(size);
        let (name, plain) = ("plain".to_owned(), (Launch::Plain, load()));
        let needs = (Wanted::default(), size);
        let plain = self.side(&mut group, name, plain, needs, claim::no_huge());
        let what = "objects allocated, chased, freed";
        group.against_itself(("heap_aa", what, TOTAL), plain);
        for &source in &self.sources {
            let name = format!("jumbo run --heap=mimalloc --pool, {}", source.name());
            // With what alignment wastes.
            let most = Bytes(size.0 / 4 * 5);
            let held = pool_of(most).whole_pages(SIZE);
            let needs = (Supply::of(source, Provision::Held).wanted(held), size);
            let pooled = (on_pool(most, "--heap=mimalloc"), load());
            let side = self.side(&mut group, name, pooled, needs, source.claims(size));
            let name = format!("heap_pool_vs_plain{}", suffix(source));
            group.ratio((&name, what, TOTAL), [plain, side]);
        }
        group
    }
}

/// What is added to the names of rows about STREAM's arrays, and what those are called.
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
