//! The measured programs: they obtain pages with and without a pool, and report the times and the
//! origin of the pages.
//!
//! A pool is an object of its program, so these programs call `jumbo::pool`. Only STREAM under
//! `jumbo run --pool` is unaware of jumbo.

use std::time::{Duration, Instant};

use jumbo::pool::{Hugetlb, Placement, Pool, Populate, Thp};
use jumbo::units::{Bytes, Pages};
use jumbo_host::kernel::{Root, hugetlb};

use super::stream as kernels;
use super::supply::{KERNEL_SURPLUS, SURPLUS, USED};
use crate::Error;
use crate::figures::{Figures, ms, with};
use crate::keeper::{PAGE_2M, kernel_pool};
use crate::memory::{RawBlock, base_pages_only, numbers, own_memory, own_memory_in, own_usage};
use crate::stats::minimum;
use crate::task::{AllocCall, Arrays, PageCycle, PoolConfig, PoolKind, Provision};
use crate::work::ns_per_call;

/// Number and duration of the intervals for take and give, and the iterations between two reads of
/// the clock. The fastest interval counts: disturbances only slow it down.
const INTERVALS: usize = 10;
const INTERVAL: Duration = Duration::from_millis(5);
const BATCH: u64 = 32;

/// [`Task::Stream`](crate::task::Task::Stream): time of the start and of the best passes, faults.
pub(crate) fn stream(
    arrays: Arrays,
    size: Bytes,
    threads: usize,
    passes: usize,
) -> Result<Figures, Error> {
    let pages = size.whole_pages(PAGE_2M);
    let mut _ballast = None;
    let mut pool = None;
    let kernel = kernel_pool()?;
    match arrays {
        Arrays::Base => base_pages_only()?,
        Arrays::Supplied(config) if config.0 == PoolKind::Hugetlb => {
            _ballast = ballast(config)?;
        }
        Arrays::Supplied(PoolConfig(kind, provision)) => {
            let supplied = pool.insert(empty_pool(kind)?);
            match provision {
                Provision::Held => grow(supplied, pages)?,
                Provision::Surplus => supplied.set_overcommit(pages),
            }
        }
    }

    let (before, clock) = (own_usage()?.ru_minflt, Instant::now());
    let (mut block, mut region);
    let memory = match &pool {
        None => {
            // `vec!` of zeroes calls `calloc`.
            block = vec![0; usize::try_from(size.0).unwrap_or(usize::MAX)];
            &mut block[..]
        }
        Some(pool) => {
            region = pool.region(pages, Populate::UpFront)?;
            region.bytes_mut(0..usize::try_from(pages.0).unwrap_or(usize::MAX))?
        }
    };
    let allocated = clock.elapsed();
    let start = memory.as_ptr().addr() as u64;
    let addresses = start..start + memory.len() as u64;
    let times = kernels::run(numbers(memory), threads, passes).map_err(|found| {
        Error::Corrupt(format!("STREAM's arrays contain a wrong number: {found}"))
    })?;

    let faults = own_usage()?.ru_minflt - before;
    let usage = own_memory_in(&[addresses])?;
    let mut figures = add_origin(usage, kernel.as_ref(), pool.as_ref())?;
    let best = kernels::KERNELS.into_iter().zip(times.best);
    figures.extend(best.map(|(name, best)| (name.to_owned(), ms(best))));
    let start = ms(allocated + times.touch);
    let taken = [("start_ms", start), ("faults", faults as f64)];
    Ok(with(figures, taken))
}

/// [`Task::Exchange`](crate::task::Task::Exchange): time per page, and memory with one page.
pub(crate) fn exchange(kind: PoolKind, cycle: PageCycle, pages: Pages) -> Result<Figures, Error> {
    let quickest = |once: &dyn Fn() -> Result<(), Error>| {
        let spans = (0..INTERVALS).map(|_| ns_per_call((INTERVAL, BATCH), once));
        Ok::<_, Error>(minimum(&spans.collect::<Result<Vec<_>, _>>()?))
    };
    if cycle == PageCycle::MapTouched {
        let map = || {
            let mut block = match kind {
                PoolKind::Thp => RawBlock::take(AllocCall::MapHuge, Bytes(PAGE_2M.bytes()))?,
                PoolKind::Hugetlb => RawBlock::hugetlb(PAGE_2M)?,
            };
            block.bytes()[0] = 1;
            Ok::<_, Error>(block)
        };
        let page_ns = quickest(&|| map()?.give_back())?;
        let kernel = kernel_pool()?;
        let block = map()?;
        let figures = add_origin(own_memory()?, kernel.as_ref(), None)?;
        block.give_back()?;
        return Ok(with(figures, [("page_ns", page_ns)]));
    }
    let pool = empty_pool(kind)?;
    grow(&pool, pages)?;
    let page_ns = quickest(&|| {
        pool.take()?.bytes_mut()[0] = 1;
        Ok(())
    })?;
    let kernel = kernel_pool()?;
    let _page = pool.take()?;
    let figures = add_origin(own_memory()?, kernel.as_ref(), Some(&pool))?;
    Ok(with(figures, [("page_ns", page_ns)]))
}

/// Occupies unused pages of the kernel's pool, if it shall allocate surplus pages.
fn ballast(config: PoolConfig) -> Result<Option<Pool>, Error> {
    let unused = kernel_pool()?.map_or(Pages(0), |pool| pool.unused());
    if config != PoolConfig(PoolKind::Hugetlb, Provision::Surplus) || unused == Pages(0) {
        return Ok(None);
    }
    let pool = empty_pool(PoolKind::Hugetlb)?;
    grow(&pool, unused)?;
    Ok(Some(pool))
}

fn empty_pool(kind: PoolKind) -> Result<Pool, Error> {
    let placement = Placement::of_thread()?;
    Ok(match kind {
        PoolKind::Hugetlb => Pool::new(Hugetlb::at(&Root::host(), PAGE_2M)?, placement),
        PoolKind::Thp => Pool::new(Thp::at(&Root::host())?, placement),
    })
}

fn grow(pool: &Pool, pages: Pages) -> Result<(), Error> {
    pool.resize(pages)
        .stopped
        .map_or(Ok(()), |error| Err(error.into()))
}

/// Adds the origin of the pages: counters of our pool, and growth of the kernel's.
fn add_origin(
    figures: Figures,
    before: Option<&hugetlb::Pool>,
    pool: Option<&Pool>,
) -> Result<Figures, Error> {
    let now = kernel_pool()?;
    let more = |count: fn(&hugetlb::Pool) -> Pages| {
        let [before, now] = [before, now.as_ref()].map(|pool| pool.map_or(0, |pool| count(pool).0));
        now.saturating_sub(before) as f64
    };
    let counters = pool.map(Pool::counters).unwrap_or_default();
    let counted = [
        (USED, counters.used().0 as f64),
        (SURPLUS, counters.surplus.0 as f64),
        (KERNEL_SURPLUS, more(|pool| pool.surplus)),
    ];
    Ok(with(figures, counted))
}
