//! The measured program: it maps shared memory, touches it by several threads, and unmaps it.

use std::time::Instant;

use jumbo::units::PageSize;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::thp::Thp;
use jumbo_sys::collapse;

use super::mode::{LARGE_FOLIO_BYTES, SIZED_FOLIO_BYTES, TOUCH_FAULTS};
use crate::Error;
use crate::figures::{Figures, cpu_ms, figures, ms, with};
use crate::keeper::PAGE_2M;
use crate::memory::{RawBlock, base_pages_only, own_memory_in, own_usage};
use crate::task::{ShmemMode, TouchTask};
use crate::work::on_threads;

/// [`Task::Touch`](crate::task::Task::Touch): times, page faults, origin of the memory.
pub(crate) fn touch(task: &TouchTask) -> Result<Figures, Error> {
    let TouchTask {
        by: mode,
        size,
        threads,
    } = *task;
    if mode == ShmemMode::Base {
        base_pages_only()?;
    }
    let folios = FolioCounts::read()?;
    let (before, clock) = (own_usage()?, Instant::now());
    let mut memory = RawBlock::shared(size, mode == ShmemMode::Collapse)?;
    touch_all(memory.bytes(), mode, threads)?;
    let touched = clock.elapsed();
    let after = own_usage()?;
    let user = cpu_ms(after.ru_utime) - cpu_ms(before.ru_utime);
    let system = cpu_ms(after.ru_stime) - cpu_ms(before.ru_stime);

    let pages = size.0 as f64 / rustix::param::page_size() as f64;
    let mut figures = own_memory_in(&[memory.addresses()])?;
    figures.extend(FolioCounts::read()?.since(&folios, mode.block()));
    if memory
        .bytes()
        .iter()
        .step_by(rustix::param::page_size())
        .any(|&byte| byte != 1)
    {
        return Err(Error::Corrupt(
            "a touch of shared memory is lost".to_owned(),
        ));
    }
    let clock = Instant::now();
    memory.give_back()?;
    let unmapped = clock.elapsed();
    let taken = [
        ("touch_ms", ms(touched)),
        ("user_ms", user),
        ("system_ms", system),
        ("unmap_ms", ms(unmapped)),
        (TOUCH_FAULTS, (after.ru_minflt - before.ru_minflt) as f64),
        ("touch_faults/s", pages / touched.as_secs_f64()),
        ("touch_faults/s/CPU", pages / ((user + system) / 1e3)),
    ];
    Ok(with(figures, taken))
}

/// Touches each base page, in ascending order, by `threads` threads with a part each.
fn touch_all(memory: &mut [u8], mode: ShmemMode, threads: usize) -> Result<(), Error> {
    let huge = usize::try_from(PAGE_2M.bytes()).unwrap_or(usize::MAX);
    let part = memory.len().div_ceil(threads).next_multiple_of(huge);
    let work = |part: &mut [u8]| -> Result<(), Error> {
        for block in part
            .chunks_mut(huge)
            .filter(|_| mode == ShmemMode::Collapse)
        {
            block[0] = 1;
            collapse(block.as_ptr().addr(), block.len())?;
        }
        for page in part.chunks_mut(rustix::param::page_size()) {
            page[0] = 1;
        }
        Ok(())
    };
    on_threads(memory.chunks_mut(part), work)
}

/// Kernel counters of large folios in shared memory, by size, as bytes.
struct FolioCounts(Vec<(PageSize, u64)>);

impl FolioCounts {
    fn read() -> Result<Self, Error> {
        let sizes = Thp::read(&Root::host())?.map_or_else(Default::default, |thp| thp.sizes);
        let counted = sizes.into_iter().map(|(size, has)| {
            let count = has.stats.get("shmem_alloc").copied();
            (size, count.unwrap_or(0) * size.bytes())
        });
        Ok(Self(counted.collect()))
    }

    /// Bytes allocated since `before`: of all sizes, and of `sized`.
    fn since(&self, before: &Self, sized: PageSize) -> Figures {
        let more = self.0.iter().zip(&before.0);
        let more: Vec<_> = more
            .map(|(now, then)| (now.0, now.1.saturating_sub(then.1)))
            .collect();
        let all: u64 = more.iter().map(|(_, bytes)| bytes).sum();
        let own = more.iter().find(|(size, _)| *size == sized);
        let own = own.map_or(0, |own| own.1);
        figures([
            (LARGE_FOLIO_BYTES, all as f64),
            (SIZED_FOLIO_BYTES, own as f64),
        ])
    }
}
