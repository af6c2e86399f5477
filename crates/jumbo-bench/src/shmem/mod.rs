//! `jumbo bench shmem`: what shared memory costs in folios of each size, and on each rung of the ladder.
//!
//! Two things are measured. A program that maps anonymous shared memory and touches all of it (`worker`), by one thread for each CPU
//! and by many, in each `Way`: the kernel's controls, size by size; `jumbo run` with all of them off; touch and collapse;
//! user-space population; hugetlb. And PostgreSQL (`postgres`), whose buffers are such memory.
//!
//! Each sample says how its memory came: by the page faults that the touches took, by the kernel's statistics of folios, by smaps.
//! The kernel's controls and its pool are set for each sample, and put back in the end, whatever end that is
//! (`keeper`). Without the right to set them the controls are as they are, and what needs them is left out.

mod postgres;
mod way;
mod worker;

pub(crate) use worker::TOUCH;

use std::cell::RefCell;

use jumbo::units::{Bytes, PageSize, Pages, counted};
use jumbo_host::kernel::Root;
use jumbo_host::knobs::{Knob, Value};

use crate::figures::Figures;
use crate::group::{self, Grid, Group, rows};
use crate::keeper::{Host, Keeper, Kept, SIZE, Wanted, sizes};
use crate::machine::cpus;
use crate::memory::{footprint, room};
use crate::stats::least;
use crate::table::Table;
use crate::work::Worker;
use crate::{Error, Settings};
use postgres::{Buffers, Database};
use way::Way;

/// The least size: each of many threads touches whole huge pages.
pub const MIN_SIZE: Bytes = Bytes(64 << 20);

const POSTGRES: &str = "PostgreSQL";

/// As many threads as the published figures were measured with.
const MANY: usize = 32;

/// How often all the memory is touched for a sample, the least of which counts: one touch can take half as long again as the
/// next. And for a sample of what `jumbo run` costs without folios.
const LAPS: usize = 3;
const LAPS_OFF: usize = 6;

/// The sizes of folios that have rows.
const FOLIOS_KIB: [u64; 4] = [16, 64, 256, 2048];
/// The size of the blocks of user-space population.
const BLOCK_KIB: u64 = 64;

/// The columns of the published table, and those beside it here.
const COLUMNS: [(&str, &str); 7] = [
    ("user_ms", "user_ms"),
    ("system_ms", "system_ms"),
    ("faults_per_s_per_cpu", "touch_faults/s/CPU"),
    ("faults_per_s", "touch_faults/s"),
    ("unmap_ms", "unmap_ms"),
    ("first_touch_p99_us", "first_touch_p99_us"),
    ("bloat", "resident_x"),
];

/// Measures the table, with `size` bytes of shared memory; without PostgreSQL and without many threads where `quick` is set.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, size: Bytes, quick: bool) -> Result<Table, Error> {
    let root = Root::host();
    let size = size.whole_pages(SIZE).bytes(SIZE);
    // The memory, and the pages that the kernel's pool may hold for the next side; of a database the page cache too.
    room(&root, footprint(size) + size)?;
    let mut table = Table::new("shmem", format!("{size} of shared memory"), settings)?;
    let mut bench = Bench {
        settings,
        sizes: sizes(&root)?,
        controls: RefCell::new(None),
        host: RefCell::new(None),
        ways: Vec::new(),
    };
    bench.take(size, &mut table)?;
    let mut database = None;
    match quick {
        true => {
            table.missing(POSTGRES, "left out with --quick");
            table.missing("32 threads", "left out with --quick");
        }
        false => match Database::make(settings, size) {
            Ok(made) => database = Some(made),
            Err(error) => table.missing(POSTGRES, error.to_string()),
        },
    }
    let mut groups = vec![bench.touches(size, cpus(), "")];
    if !quick {
        groups.push(bench.touches(size, MANY, "_32_threads"));
    }
    if bench.ways.contains(&Way::Disabled) {
        groups.push(bench.off(size, cpus()));
    }
    groups.extend(database.as_ref().map(|database| bench.queries(database)));
    let table = group::measure(settings, table, groups)?;
    let Bench { controls, host, .. } = bench;
    controls.into_inner().map_or(Ok(()), Keeper::give_back)?;
    host.into_inner().map_or(Ok(()), Host::give_back)?;
    Ok(table)
}

/// The common parts of the sides.
struct Bench<'a> {
    settings: &'a Settings,
    /// The folio sizes that have a control of shared memory.
    sizes: Vec<PageSize>,
    /// `None` where these cannot be set.
    controls: RefCell<Option<Keeper>>,
    /// `None` where the kernel's pool cannot be set.
    host: RefCell<Option<Host>>,
    /// The ways that are to be had here, beside base pages.
    ways: Vec<Way>,
}

impl<'a> Bench<'a> {
    /// Takes the kernel's controls and its pool, with pages for `size` bytes, and tries out the
    /// ways that could be had with them.
    fn take(&mut self, size: Bytes, table: &mut Table) -> Result<(), Error> {
        let folio = |kib: u64| PageSize::new(kib << 10).ok();
        let mut ways = vec![Way::Disabled, Way::Collapse];
        ways.extend(folio(BLOCK_KIB).map(Way::User));
        let controls = Keeper::take(self.settings, Kept::Shmem);
        let controls = table.found("folio sizes by the kernel's controls", controls)?;
        if controls.is_some() {
            let sizes = FOLIOS_KIB.into_iter().filter_map(folio);
            let sizes = sizes.filter(|size| self.sizes.contains(size));
            ways.extend(sizes.map(Way::Kernel));
        }
        let host = Host::take(self.settings, pages_of(size));
        let host = table.found("pages of the kernel's pool (hugetlb)", host)?;
        ways.extend(host.as_ref().map(|_| Way::Hugetlb));
        self.controls = RefCell::new(controls);
        self.host = RefCell::new(host);
        for way in ways {
            let tried = self.sample(way, MIN_SIZE, 1, false);
            let tried = tried.map_err(|error| error.of_side(&way.to_string()));
            self.ways
                .extend(table.found(way.rung(), tried)?.map(|_| way));
        }
        Ok(())
    }

    fn sample(&self, way: Way, size: Bytes, threads: usize, timed: bool) -> Result<Figures, Error> {
        self.provide(way.controls(&self.sizes), way.pages(size))?;
        let worker = Worker::new(way.launch(), &TOUCH, &(way, size, threads, timed));
        worker.sample(self.settings, &way.claims(size))
    }

    /// Sets the kernel's controls and its pool, where that is allowed.
    fn provide(&self, controls: Vec<(Knob, Value)>, pages: Wanted) -> Result<(), Error> {
        if let Some(keeper) = &mut *self.controls.borrow_mut() {
            keeper.set(controls)?;
        }
        if let Some(host) = &mut *self.host.borrow_mut() {
            host.provide(pages)?;
        }
        Ok(())
    }

    /// All of the memory touched by so many threads: in base pages, in those again, and in each way.
    fn touches(&'a self, size: Bytes, threads: usize, suffix: &'static str) -> Group<'a> {
        let mut group = Group::new(self.settings, "touch").laps(LAPS, least);
        let by = counted(threads as u64, "thread");
        // Once is enough: one thread does it.
        let timed = suffix.is_empty();
        let mut lines = Vec::new();
        let mut side = |group: &mut Group<'a>, way: Way| {
            let side = group.side(way.to_string(), size, move || {
                self.sample(way, size, threads, timed)
            });
            lines.push((side, way.key()));
            side
        };
        let base = side(&mut group, Way::Base);
        let name = |name: &str| format!("{name}{suffix}");
        let (touch, unmap) = (
            &format!("touch of {size}, {by}"),
            &format!("unmap of {size}"),
        );
        rows! { group;
            name("touch_aa") => touch, "touch_ms", base / base;
            name("unmap_aa") => unmap, "unmap_ms", base / base;
        }
        for &way in &self.ways {
            let side = side(&mut group, way);
            let (key, published) = (way.key(), way.published());
            if way != Way::Disabled {
                rows! { group; name(&key) => touch, "touch_ms", base / side, published; }
            }
            if way == Way::Collapse {
                let key = key.replace("collapse", "unmap");
                rows! { group; name(&key) => unmap, "unmap_ms", base / side; }
            }
        }
        group.grid = Some(Grid {
            columns: &COLUMNS[..if timed { 7 } else { 5 }],
            lines,
            suffix,
        });
        group
    }

    /// The cost of `jumbo run` where no folio size is allowed, which is little.
    fn off(&'a self, size: Bytes, threads: usize) -> Group<'a> {
        let mut group = Group::new(self.settings, "sizes off").laps(LAPS_OFF, least);
        let [plain, off] = [Way::Plain, Way::Disabled].map(|way| {
            let name = way.to_string();
            group.side(name, size, move || self.sample(way, size, threads, false))
        });
        let (what, published) = (
            &format!("touch of {size}, sizes off"),
            Way::Disabled.published(),
        );
        rows! { group;
            "disabled_aa" => what, "touch_ms", plain / plain;
            "disabled" => what, "touch_ms", plain / off, published;
        }
        group
    }

    /// `pgbench -S`: plain, plain again, under `jumbo run`, and on PostgreSQL's own huge pages.
    fn queries(&'a self, database: &'a Database) -> Group<'a> {
        let mut group = Group::new(self.settings, POSTGRES);
        group.optional = Error::is_of_host;
        let mut side = |buffers: Buffers| {
            group.side(buffers.name(), database.size, move || {
                let pages = match buffers {
                    Buffers::Own => Wanted::persistent(pages_of(database.shared())),
                    Buffers::Plain | Buffers::Jumbo => Wanted::default(),
                };
                // As found by default: none allowed, and the PMD size as the top says.
                self.provide(Way::Collapse.controls(&self.sizes), pages)?;
                database.sample(self.settings, buffers)
            })
        };
        let (plain, jumbo) = (side(Buffers::Plain), side(Buffers::Jumbo));
        let own = self.host.borrow().is_some().then(|| side(Buffers::Own));
        let what = "pgbench -S, a query";
        rows! { group;
            "pgbench_aa" => what, "query_us", plain / plain;
            "pgbench" => what, "query_us", plain / jumbo;
        }
        if let Some(own) = own {
            rows! { group; "pgbench_vs_own" => what, "query_us", own / jumbo; }
        }
        group
    }
}

fn pages_of(size: Bytes) -> Pages {
    size.whole_pages(SIZE)
}
