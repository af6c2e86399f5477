//! `jumbo bench shmem`: costs of shared memory in folios of each size, and by each method.
//!
//! A program maps anonymous shared memory and touches all of it (`worker`), with one thread per CPU,
//! in each `ShmemMode`: the kernel's controls, size by size; `jumbo run` with all of
//! them off; touch and collapse; hugetlb. PostgreSQL with its shared buffers
//! is among the [`programs`](crate::programs).
//!
//! Each sample proves the origin of its memory by page faults, the kernel's folio statistics and
//! smaps. The kernel's controls and its pool are set for each sample and always restored
//! (`keeper`). Without the right to set them, the rows that need them are missing.

mod mode;
mod worker;

pub(crate) use worker::touch;

use jumbo::units::{Bytes, PageSize, counted};
use jumbo_host::kernel::Root;

use crate::figures::Figures;
use crate::group::{self, Group, rows};
use crate::keeper::{Keeper, KernelKnobs, PAGE_2M, sizes};
use crate::machine::cpus;
use crate::memory::{check_available, footprint};
use crate::stats::minimum;
use crate::table::Table;
use crate::task::{KnobSet, ShmemMode, Task, TouchTask};
use crate::work::Worker;
use crate::{Error, Settings};

/// Minimum size: each thread touches whole huge pages.
pub const MIN_SIZE: Bytes = Bytes(64 << 20);

/// Laps per sample, whose minimum counts: one touch may take 1.5 times as long as the next.
const LAPS: usize = 3;

const FOLIOS_KIB: [u64; 4] = [16, 64, 256, 2048];

/// Columns of the published table.
const COLUMNS: [(&str, &str); 4] = [
    ("user_ms", "user_ms"),
    ("system_ms", "system_ms"),
    ("faults_per_s_per_cpu", "touch_faults/s/CPU"),
    ("faults_per_s", "touch_faults/s"),
];

/// Measures the table, with `size` bytes of shared memory.
pub fn measure(settings: &Settings, size: Bytes) -> Result<Table, Error> {
    let root = Root::host();
    let size = size.whole_pages(PAGE_2M).bytes(PAGE_2M);
    // The memory, and the pages that the kernel's pool may hold for the next side.
    check_available(footprint(size) + size)?;
    let mut table = Table::new("shmem", format!("{size} of shared memory"), settings)?;
    let knobs = Keeper::take(settings, KnobSet::Shmem);
    let knobs = table.available("folio sizes by the kernel's controls", knobs)?;
    let pool = Keeper::of_pool(settings, size.whole_pages(PAGE_2M));
    let pool = table.available("pages of the kernel's pool (hugetlb)", pool)?;
    let kernel = KernelKnobs { pool, knobs };
    let mut bench = ShmemBench {
        settings,
        sizes: sizes(&root)?,
        kernel: &kernel,
        modes: Vec::new(),
    };
    bench.try_out(&mut table)?;
    let groups = vec![bench.touches(size)];
    let table = group::measure(settings, table, groups)?;
    kernel.give_back()?;
    Ok(table)
}

struct ShmemBench<'a> {
    settings: &'a Settings,
    /// Folio sizes that have a control for shared memory.
    sizes: Vec<PageSize>,
    kernel: &'a KernelKnobs,
    modes: Vec<ShmemMode>,
}

impl<'a> ShmemBench<'a> {
    /// Tries all modes that the kernel's controls and its pool may allow.
    fn try_out(&mut self, table: &mut Table) -> Result<(), Error> {
        let folio = |kib: u64| PageSize::new(kib << 10).ok();
        let controlled = FOLIOS_KIB
            .into_iter()
            .filter_map(folio)
            .filter(|size| self.kernel.knobs.is_some() && self.sizes.contains(size));
        let modes = [ShmemMode::Disabled, ShmemMode::Collapse].into_iter();
        let modes = modes.chain(controlled.map(ShmemMode::Kernel));
        let modes = modes.chain(self.kernel.pool.as_ref().map(|_| ShmemMode::Hugetlb));
        let mut available = Vec::new();
        for mode in modes {
            let worker = self.worker(mode, MIN_SIZE);
            let result = self.kernel.provide(&mode.needs(MIN_SIZE, &self.sizes));
            let result = result.and_then(|_| worker.sample(self.settings, &mode.claims(MIN_SIZE)));
            let result = result.map_err(|error| error.of_side(&mode.to_string()));
            available.extend(
                table
                    .available(mode.method(), result)?
                    .map(|_: Figures| mode),
            );
        }
        self.modes = available;
        Ok(())
    }

    fn worker(&self, by: ShmemMode, size: Bytes) -> Worker {
        let touch = TouchTask {
            by,
            size,
            threads: cpus(),
        };
        Worker::new(by.launch(), Task::Touch(touch))
    }

    fn side(&self, group: &mut Group<'a>, mode: ShmemMode, size: Bytes) -> usize {
        let worker = self.worker(mode, size);
        let side = group.worker(mode.to_string(), worker, size, mode.claims(size));
        group.needs(side, mode.needs(size, &self.sizes))
    }

    /// Touches of all the memory: on base pages, again, and in each mode.
    fn touches(&self, size: Bytes) -> Group<'a> {
        let mut group = Group::new(self.settings, "touch")
            .on(self.kernel)
            .laps(LAPS, minimum);
        let by = counted(cpus() as u64, "thread");
        let side = |group: &mut Group<'a>, mode: ShmemMode| {
            let side = self.side(group, mode, size);
            for (column, figure) in COLUMNS {
                group.value(format!("{column}_{}", mode.key()), figure, side);
            }
            side
        };
        let base = side(&mut group, ShmemMode::Base);
        let (touch, unmap) = (
            &format!("touch of {size}, {by}"),
            &format!("unmap of {size}"),
        );
        rows! { group;
            "touch_aa" => touch, "touch_ms", base / base;
            "unmap_aa" => unmap, "unmap_ms", base / base;
        }
        for &mode in &self.modes {
            let side = side(&mut group, mode);
            let (key, published) = (mode.key(), mode.published());
            rows! { group; key.as_str() => touch, "touch_ms", base / side, published; }
            if mode == ShmemMode::Collapse {
                let key = key.replace("collapse", "unmap");
                rows! { group; key => unmap, "unmap_ms", base / side; }
            }
        }
        group
    }
}
