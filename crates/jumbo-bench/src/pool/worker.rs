//! The programs that are measured: they have pages from a pool, or from the kernel without one, and say how long that
//! took and whose pages they were.
//!
//! A pool is an object of a program, so here the program mostly knows of jumbo: it calls `jumbo::pool` where it
//! does not call `mmap`. Only STREAM under `jumbo run --pool` knows of nothing.

use std::time::{Duration, Instant};

use jumbo::pool::{Hugetlb, Page, Placement, Pool, Populate, Thp};
use jumbo::units::{Bytes, Pages};
use jumbo_host::kernel::{Root, hugetlb, task};

use super::supply::{
    Arrays, KERNEL_RESERVED, KERNEL_SURPLUS, Provision, SURPLUS, Source, Supply, USED, Way,
};
use super::{fixed, stream as kernels};
use crate::Error;
use crate::figures::{Figures, ms, with};
use crate::keeper::{SIZE, kernel_pool};
use crate::memory::{Mapping, base_pages_only, had, had_in, numbers};
use crate::stats::median;
use crate::work::{Work, by_threads};

/// For how long pages are had and given back: so many that the clock is no part of it.
const SPAN: Duration = Duration::from_millis(50);

/// How many between two looks at the clock.
const BATCH: u64 = 32;

/// STREAM over arrays of so many bytes in all, by so many threads, in so many passes: the time from
/// nothing until they hold values, the best pass of each kernel, and the minor page faults from
/// nothing to the end.
pub(crate) const STREAM: Work<(Arrays, Bytes, usize, usize)> = Work::new("stream", stream);

/// Pages, so many, that are taken, each touched in all of its base pages, and given back, so many
/// times: the time of one, and the memory of the process with all of them in hand.
pub(crate) const FIRST_USE: Work<(Supply, Pages, usize)> = Work::new("first-use", first_use);

/// A page of a pool of so many had and given back, by so many threads: the time by the number of
/// pages of all threads, and what the process had with one page in hand.
pub(crate) const EXCHANGE: Work<(Source, Way, Pages, usize)> = Work::new("exchange", exchange);

fn stream(
    (arrays, size, threads, passes): (Arrays, Bytes, usize, usize),
) -> Result<Figures, Error> {
    let root = Root::host();
    let pages = size.whole_pages(SIZE);
    let mut _ballast = None;
    let mut supplied_pool = None;
    let kernel = kernel_pool(&root)?;
    match arrays {
        Arrays::Base | Arrays::StaticBase => base_pages_only()?,
        Arrays::Static => {}
        Arrays::Supplied(supply) if supply.source == Source::Hugetlb => {
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

fn first_use((supply, pages, times): (Supply, Pages, usize)) -> Result<Figures, Error> {
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

fn exchange((source, way, pages, threads): (Source, Way, Pages, usize)) -> Result<Figures, Error> {
    let root = Root::host();
    let figures = |page_ns, before, pool| {
        let figures = whose(had(&root)?, before, pool)?;
        Ok(with(figures, [("page_ns", page_ns)]))
    };
    if matches!(way, Way::Take | Way::TakeZeroed) {
        let (pool, _) = supplied(&root, Supply::of(source, Provision::Held), pages)?;
        let take = || match way {
            Way::TakeZeroed => pool.take_zeroed(),
            _ => pool.take(),
        };
        let page_ns = by_threads(threads, (SPAN, BATCH), || {
            take()?.bytes_mut()[0] = 1;
            Ok(())
        })?;
        let kernel = kernel_pool(&root)?;
        let _page = take()?;
        return figures(page_ns, kernel.as_ref(), Some(&pool));
    }
    let map = || {
        let mut mapping = match source {
            Source::Thp => Mapping::huge(Bytes(SIZE.bytes()))?,
            Source::Hugetlb => Mapping::hugetlb(SIZE)?,
        };
        if way == Way::MapTouched {
            mapping.bytes()[0] = 1;
        }
        Ok::<_, Error>(mapping)
    };
    let page_ns = by_threads(threads, (SPAN, BATCH), || map()?.unmap())?;
    let kernel = kernel_pool(&root)?;
    let mapping = map()?;
    let figures = figures(page_ns, kernel.as_ref(), None);
    mapping.unmap()?;
    figures
}

/// A pool that has, or can have, so many pages; and pages of the kernel's that no other pool shall have meanwhile.
fn supplied(root: &Root, supply: Supply, pages: Pages) -> Result<(Pool, Option<Pool>), Error> {
    let pool = made(root, supply.source)?;
    match supply.provision {
        Provision::Held => grow(&pool, pages)?,
        Provision::Persistent | Provision::Surplus => pool.set_overcommit(pages),
    }
    Ok((pool, ballast(root, supply)?))
}

/// The unused pages of the kernel's pool, which it would give before it makes a surplus page, where
/// such are wanted.
fn ballast(root: &Root, supply: Supply) -> Result<Option<Pool>, Error> {
    let unused = kernel_pool(root)?.map_or(Pages(0), |pool| pool.unused());
    if supply != Supply::of(Source::Hugetlb, Provision::Surplus) || unused == Pages(0) {
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
