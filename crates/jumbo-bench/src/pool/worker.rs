//! The programs that are measured: they have pages from a pool, or from the kernel without one, and say how long that
//! took and whose pages they were.
//!
//! A pool is an object of a program, so here the program mostly knows of jumbo: it calls `jumbo::pool` where it
//! does not call `mmap`. Only STREAM under `jumbo run --pool` knows of nothing.

use std::time::{Duration, Instant};

use jumbo::pool::{Hugetlb, Page, Placement, Pool, Populate, Thp};
use jumbo::units::{Bytes, Order, Pages};
use jumbo_host::kernel::{Root, hugetlb, task};

use super::supply::{KERNEL_RESERVED, KERNEL_SURPLUS, SURPLUS, USED};
use super::{fixed, stream as kernels};
use crate::Error;
use crate::figures::{Figures, ms, with};
use crate::keeper::{SIZE, kernel_pool};
use crate::memory::{Block, base_pages_only, had, had_in, numbers};
use crate::stats::{least, median};
use crate::task::{Arrays, By, Provision, Source, Supply, Way};
use crate::work::by_threads;

/// The number and the length of the spans in which pages are had and given back, and how many of them come between two
/// looks at the clock. The quickest span counts, because whatever disturbs makes it slower.
const SPANS: usize = 10;
const SPAN: Duration = Duration::from_millis(5);
const BATCH: u64 = 32;

/// Whether a page of a pool can be had in folios.
pub(crate) const FOLIOS: &str = "folios_of_a_page";

/// [`Task::Stream`](crate::task::Task::Stream): the time from nothing until the arrays hold values, the best pass of
/// each kernel, and the minor page faults from nothing to the end.
pub(crate) fn stream(
    arrays: Arrays,
    size: Bytes,
    threads: usize,
    passes: usize,
) -> Result<Figures, Error> {
    let root = Root::host();
    let pages = size.whole_pages(SIZE);
    let mut _ballast = None;
    let mut supplied_pool = None;
    let kernel = kernel_pool(&root)?;
    match arrays {
        Arrays::Base | Arrays::StaticBase => base_pages_only()?,
        Arrays::Static => {}
        Arrays::Supplied(supply) if supply.0 == Source::Hugetlb => {
            _ballast = ballast(&root, supply)?;
        }
        Arrays::Supplied(supply) => supplied_pool = Some(supplied(&root, supply, pages)?.0),
    }
    let of_program = match arrays {
        Arrays::Static | Arrays::StaticBase => Some(fixed::arrays(&root, size)?),
        Arrays::Base | Arrays::Supplied(_) => None,
    };
    let faults = || Ok::<_, Error>(task::faults(&root, std::process::id())?.minor);

    let (before, clock) = (faults()?, Instant::now());
    let (mut block, mut region);
    let memory = match (of_program, &supplied_pool) {
        (Some(bss), _) => bss,
        (None, None) => {
            // By `calloc`.
            block = vec![0; usize::try_from(size.0).unwrap_or(usize::MAX)];
            &mut block[..]
        }
        (None, Some(pool)) => {
            region = pool.region(pages, Populate::UpFront)?;
            region.bytes_mut(0..usize::try_from(pages.0).unwrap_or(usize::MAX))?
        }
    };
    let allocated = clock.elapsed();
    let start = memory.as_ptr().addr() as u64;
    let addresses = start..start + memory.len() as u64;
    let times = kernels::run(numbers(memory), threads, passes).map_err(|found| {
        Error::Corrupt(format!(
            "a number of STREAM's arrays is {found}, which is wrong"
        ))
    })?;

    let faults = faults()?.saturating_sub(before);
    let had = had_in(&root, &[addresses])?;
    let mut figures = whose(had, kernel.as_ref(), supplied_pool.as_ref())?;
    let best = kernels::KERNELS.into_iter().zip(times.best);
    figures.extend(best.map(|(name, best)| (name.to_owned(), ms(best))));
    let start = ms(allocated + times.touch);
    let taken = [("start_ms", start), ("faults", faults as f64)];
    Ok(with(figures, taken))
}

/// [`Task::FirstUse`](crate::task::Task::FirstUse): the time of one page, and the memory of the process with all of
/// them in hand.
pub(crate) fn first_use(supply: Supply, pages: Pages, times: usize) -> Result<Figures, Error> {
    let root = Root::host();
    let kernel = kernel_pool(&root)?;
    let (pool, _ballast) = supplied(&root, supply, pages)?;
    let pool = &pool;
    let mut taken: Vec<Page<'_>> = Vec::with_capacity(usize::try_from(pages.0).unwrap_or(0));
    let mut costs = Vec::with_capacity(times);
    let mut seen = Figures::new();
    for nth in 0..times {
        let clock = Instant::now();
        for _ in 0..pages.0 {
            let mut page = pool.take()?;
            for base in page.bytes_mut().chunks_mut(rustix::param::page_size()) {
                base[0] = 1;
            }
            taken.push(page);
        }
        costs.push(ms(clock.elapsed()) * 1e3 / pages.0 as f64);
        if nth == 0 {
            seen = whose(had(&root)?, kernel.as_ref(), Some(pool))?;
        }
        taken.clear();
    }
    Ok(with(seen, [("page_us", median(&costs))]))
}

/// [`Task::Exchange`](crate::task::Task::Exchange): the time by the number of pages of all threads, and what the
/// process had with one page in hand.
pub(crate) fn exchange(
    source: Source,
    way: Way,
    pages: Pages,
    threads: usize,
) -> Result<Figures, Error> {
    let root = Root::host();
    let quickest = |once: &(dyn Fn() -> Result<(), Error> + Sync)| {
        let spans = (0..SPANS).map(|_| by_threads(threads, (SPAN, BATCH), once));
        Ok::<_, Error>(least(&spans.collect::<Result<Vec<_>, _>>()?))
    };
    if matches!(way, Way::Map | Way::MapTouched) {
        let map = || {
            let mut block = match source {
                Source::Thp => Block::take(By::MapHuge, Bytes(SIZE.bytes()))?,
                Source::Hugetlb => Block::hugetlb(SIZE)?,
            };
            if way == Way::MapTouched {
                block.bytes()[0] = 1;
            }
            Ok::<_, Error>(block)
        };
        let page_ns = quickest(&|| map()?.give_back())?;
        let kernel = kernel_pool(&root)?;
        let block = map()?;
        let figures = whose(had(&root)?, kernel.as_ref(), None)?;
        block.give_back()?;
        return Ok(with(figures, [("page_ns", page_ns)]));
    }
    let pool = match way {
        Way::TakePlain => Pool::without_folios(Thp::at(&root)?, Placement::of_thread()?),
        _ => made(&root, source)?,
    };
    grow(&pool, pages)?;
    let take = || match way {
        Way::TakeZeroed => pool.take_zeroed(),
        _ => pool.take(),
    };
    let page_ns = quickest(&|| {
        take()?.bytes_mut()[0] = 1;
        Ok(())
    })?;
    let kernel = kernel_pool(&root)?;
    let page = take()?;
    let figures = whose(had(&root)?, kernel.as_ref(), Some(&pool))?;
    drop(page);
    let folio = pool.take_folio(Order(0));
    let folios = folio.map_or(0, |_| pool.split().pages.0);
    Ok(with(
        figures,
        [("page_ns", page_ns), (FOLIOS, folios as f64)],
    ))
}

/// A pool that has, or can have, so many pages; and pages of the kernel's that no other pool shall have meanwhile.
fn supplied(root: &Root, supply: Supply, pages: Pages) -> Result<(Pool, Option<Pool>), Error> {
    let pool = made(root, supply.0)?;
    match supply.1 {
        Provision::Held => grow(&pool, pages)?,
        Provision::Persistent | Provision::Surplus => pool.set_overcommit(pages),
    }
    Ok((pool, ballast(root, supply)?))
}

/// The unused pages of the kernel's pool, which it would give before it makes a surplus page, where
/// such are wanted.
fn ballast(root: &Root, supply: Supply) -> Result<Option<Pool>, Error> {
    let unused = kernel_pool(root)?.map_or(Pages(0), |pool| pool.unused());
    if supply != Supply(Source::Hugetlb, Provision::Surplus) || unused == Pages(0) {
        return Ok(None);
    }
    let pool = made(root, Source::Hugetlb)?;
    grow(&pool, unused)?;
    Ok(Some(pool))
}

/// An empty pool.
fn made(root: &Root, source: Source) -> Result<Pool, Error> {
    let placement = Placement::of_thread()?;
    Ok(match source {
        Source::Hugetlb => Pool::new(Hugetlb::at(root, SIZE)?, placement),
        Source::Thp => Pool::new(Thp::at(root)?, placement),
    })
}

fn grow(pool: &Pool, pages: Pages) -> Result<(), Error> {
    pool.resize(pages)
        .stopped
        .map_or(Ok(()), |error| Err(error.into()))
}

/// Adds whose pages there are now, of our pool and of the kernel's, which was so before.
fn whose(
    figures: Figures,
    before: Option<&hugetlb::Pool>,
    pool: Option<&Pool>,
) -> Result<Figures, Error> {
    let now = kernel_pool(&Root::host())?;
    let more = |count: fn(&hugetlb::Pool) -> Pages| {
        let [before, now] = [before, now.as_ref()].map(|pool| pool.map_or(0, |pool| count(pool).0));
        now.saturating_sub(before) as f64
    };
    let counters = pool.map(Pool::counters).unwrap_or_default();
    let counted = [
        (USED, counters.used().0 as f64),
        (SURPLUS, counters.surplus.0 as f64),
        (KERNEL_SURPLUS, more(|pool| pool.surplus)),
        (KERNEL_RESERVED, more(|pool| pool.reserved)),
    ];
    Ok(with(figures, counted))
}
