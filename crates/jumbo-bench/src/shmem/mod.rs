//! `jumbo bench shmem`: what shared memory costs in folios of each size, and on each rung of the ladder.
//!
//! A program maps anonymous shared memory and touches all of it (`worker`), by one thread for each CPU
//! and by many, in each `Shared` way: the kernel's controls, size by size; `jumbo run` with all of them off; touch and collapse;
//! user-space population; hugetlb. PostgreSQL, whose buffers are such memory, is among the [`programs`](crate::programs).
//!
//! Each sample says how its memory came: by the page faults that the touches took, by the kernel's statistics of folios, by smaps.
//! The kernel's controls and its pool are set for each sample, and put back in the end, whatever end that is
//! (`keeper`). Without the right to set them the controls are as they are, and what needs them is left out.

mod way;
mod worker;

pub(crate) use worker::touch;

use jumbo::units::{Bytes, PageSize, counted};
use jumbo_host::kernel::Root;

use crate::figures::Figures;
use crate::group::{self, Group, rows};
use crate::keeper::{Keeper, Kernel, SIZE, sizes};
use crate::machine::cpus;
use crate::memory::{footprint, room};
use crate::stats::least;
use crate::table::Table;
use crate::task::{Kept, Shared, Task, Touch};
use crate::work::Worker;
use crate::{Error, Settings};

/// The least size: each of many threads touches whole huge pages.
pub const MIN_SIZE: Bytes = Bytes(64 << 20);

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

/// Measures the table, with `size` bytes of shared memory; without many threads where `quick` is set.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, size: Bytes, quick: bool) -> Result<Table, Error> {
    let root = Root::host();
    let size = size.whole_pages(SIZE).bytes(SIZE);
    // The memory, and the pages that the kernel's pool may hold for the next side.
    room(&root, footprint(size) + size)?;
    let mut table = Table::new("shmem", format!("{size} of shared memory"), settings)?;
    let knobs = Keeper::take(settings, Kept::Shmem);
    let knobs = table.found("folio sizes by the kernel's controls", knobs)?;
    let pool = Keeper::of_pool(settings, size.whole_pages(SIZE));
    let pool = table.found("pages of the kernel's pool (hugetlb)", pool)?;
    let kernel = Kernel { pool, knobs };
    let mut bench = Bench {
        settings,
        sizes: sizes(&root)?,
        kernel: &kernel,
        ways: Vec::new(),
    };
    bench.try_out(&mut table)?;
    let mut groups = vec![bench.touches(size, cpus(), "")];
    match quick {
        true => table.missing("32 threads", "left out with --quick"),
        false => groups.push(bench.touches(size, MANY, "_32_threads")),
    }
    if bench.ways.contains(&Shared::Disabled) {
        groups.push(bench.off(size, cpus()));
    }
    let table = group::measure(settings, table, groups)?;
    kernel.give_back()?;
    Ok(table)
}

/// The common parts of the sides.
struct Bench<'a> {
    settings: &'a Settings,
    /// The folio sizes that have a control of shared memory.
    sizes: Vec<PageSize>,
    kernel: &'a Kernel,
    /// The ways that are to be had here, beside base pages.
    ways: Vec<Shared>,
}

impl<'a> Bench<'a> {
    /// Tries out the ways that could be had with the kernel's controls and its pool.
    fn try_out(&mut self, table: &mut Table) -> Result<(), Error> {
        let folio = |kib: u64| PageSize::new(kib << 10).ok();
        let controlled = FOLIOS_KIB
            .into_iter()
            .filter_map(folio)
            .filter(|size| self.kernel.knobs.is_some() && self.sizes.contains(size));
        let ways = [Shared::Disabled, Shared::Collapse].into_iter();
        let ways = ways.chain(folio(BLOCK_KIB).map(Shared::User));
        let ways = ways.chain(controlled.map(Shared::Kernel));
        let ways = ways.chain(self.kernel.pool.as_ref().map(|_| Shared::Hugetlb));
        let mut found = Vec::new();
        for way in ways {
            let worker = self.worker(way, MIN_SIZE, 1, false);
            let tried = self.kernel.provide(&way.needs(MIN_SIZE, &self.sizes));
            let tried = tried.and_then(|_| worker.sample(self.settings, &way.claims(MIN_SIZE)));
            let tried = tried.map_err(|error| error.of_side(&way.to_string()));
            found.extend(table.found(way.rung(), tried)?.map(|_: Figures| way));
        }
        self.ways = found;
        Ok(())
    }

    fn worker(&self, by: Shared, size: Bytes, threads: usize, timed: bool) -> Worker {
        let touch = Touch {
            by,
            size,
            threads,
            timed,
        };
        Worker::new(by.launch(), Task::Touch(touch))
    }

    fn side(
        &self,
        group: &mut Group<'a>,
        way: Shared,
        (size, threads, timed): (Bytes, usize, bool),
    ) -> usize {
        let worker = self.worker(way, size, threads, timed);
        let side = group.worker(way.to_string(), worker, size, way.claims(size));
        group.needs(side, way.needs(size, &self.sizes))
    }

    /// All of the memory touched by so many threads: in base pages, in those again, and in each way.
    fn touches(&self, size: Bytes, threads: usize, suffix: &'static str) -> Group<'a> {
        let mut group = Group::new(self.settings, "touch")
            .on(self.kernel)
            .laps(LAPS, least);
        let by = counted(threads as u64, "thread");
        // Once is enough: one thread does it.
        let timed = suffix.is_empty();
        let columns = &COLUMNS[..if timed { 7 } else { 5 }];
        let side = |group: &mut Group<'a>, way: Shared| {
            let side = self.side(group, way, (size, threads, timed));
            for (column, figure) in columns {
                group.value(format!("{column}_{}{suffix}", way.key()), figure, side);
            }
            side
        };
        let base = side(&mut group, Shared::Base);
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
            if way != Shared::Disabled {
                rows! { group; name(&key) => touch, "touch_ms", base / side, published; }
            }
            if way == Shared::Collapse {
                let key = key.replace("collapse", "unmap");
                rows! { group; name(&key) => unmap, "unmap_ms", base / side; }
            }
        }
        group
    }

    /// The cost of `jumbo run` where no folio size is allowed, which is little.
    fn off(&self, size: Bytes, threads: usize) -> Group<'a> {
        let mut group = Group::new(self.settings, "sizes off").on(self.kernel);
        group = group.laps(LAPS_OFF, least);
        let [plain, off] = [Shared::Plain, Shared::Disabled]
            .map(|way| self.side(&mut group, way, (size, threads, false)));
        let what = &format!("touch of {size}, sizes off");
        rows! { group;
            "disabled_aa" => what, "touch_ms", plain / plain;
            "disabled" => what, "touch_ms", plain / off, Shared::Disabled.published();
        }
        group
    }
}
