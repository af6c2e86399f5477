//! The program that is measured: it has pages from a pool, or from the kernel without one, and says how long that
//! took and whose pages they were.
//!
//! A pool is an object of a program, so here the program mostly knows of jumbo: it calls `jumbo::pool` where it
//! does not call `mmap`. Only STREAM under `jumbo run --pool` and the heap's load know of nothing.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jumbo::kernel::{Root, hugetlb};
use jumbo::pool::{Hugetlb, Page, Placement, Pool, Populate, Thp};
use jumbo::units::{Bytes, Pages};

use super::keeper::{self, say};
use super::task::{
    Arrays, Counted, ExchangeSample, FirstSample, Provision, Source, StreamSample, Supply, Task,
    Way,
};
use super::{SIZE, stream};
use crate::memory::{Mapping, Memory, Zeroed, base_pages_only, numbers};
use crate::stats::median;
use crate::{Error, child, heap};

/// For how long pages are had and given back: so many that the clock is no part of it.
pub(super) const SPAN: Duration = Duration::from_millis(50);

/// How many between two looks at the clock.
const BATCH: u64 = 32;

/// How many pages a pool has whose pages are had and given back.
pub(super) const EXCHANGED: Pages = Pages(64);

/// Does what `task` says, a JSON text, and prints what it took, another.
///
/// # Errors
/// [`Error`].
pub fn run(task: &str) -> Result<(), Error> {
    let task: Task = serde_json::from_str(task).map_err(|error| Error::Pipe(error.into()))?;
    if task != Task::Keep {
        // The one who gives back what it changed must outlive whoever was killed.
        child::die_with_parent();
    }
    match task {
        Task::Stream {
            arrays,
            size,
            threads,
            passes,
        } => say(&stream(arrays, size, threads, passes)?),
        Task::FirstUse {
            supply,
            pages,
            times,
        } => say(&first_use(supply, pages, times)?),
        Task::Exchange { way, threads } => say(&exchange(way, threads)?),
        Task::Load { size, .. } => say(&heap::worker::load(size)?),
        Task::Keep => keeper::keep(),
    }
}

/// The kernel's pool, before and since.
struct Kernel {
    root: Root,
    before: Option<hugetlb::Pool>,
}

/// A pool of ours, and pages of the kernel's that nobody shall have meanwhile.
struct Supplied {
    pool: Pool,
    _ballast: Option<Pool>,
}

fn stream(
    arrays: Arrays,
    size: Bytes,
    threads: usize,
    passes: usize,
) -> Result<StreamSample, Error> {
    let root = Root::host();
    match arrays {
        Arrays::BasePages | Arrays::Heap(_) => {
            if arrays == Arrays::BasePages {
                base_pages_only()?;
            }
            let _ballast = match arrays {
                Arrays::Heap(supply) => ballast(&root, supply)?,
                _ => None,
            };
            let kernel = Kernel::new(&root)?;
            let (faults, clock) = (faults(&root)?, Instant::now());
            let mut block = Zeroed::allocate(size).ok_or(Error::Malloc(size))?;
            let memory = block.bytes_mut();
            let run = Run::new(memory, faults, clock.elapsed(), threads, passes)?;
            run.sample(&root, kernel.counted(None)?)
        }
        Arrays::Region(supply) => {
            let pages = size.whole_pages(SIZE);
            let kernel = Kernel::new(&root)?;
            let supplied = supplied(&root, supply, pages)?;
            let pool = &supplied.pool;
            let (faults, clock) = (faults(&root)?, Instant::now());
            let mut region = pool.region(pages, Populate::UpFront)?;
            let all = 0..usize::try_from(pages.0).unwrap_or(usize::MAX);
            let memory = region.bytes_mut(all)?;
            let run = Run::new(memory, faults, clock.elapsed(), threads, passes)?;
            run.sample(&root, kernel.counted(Some(pool))?)
        }
    }
}

/// STREAM has run, and its arrays are still there.
struct Run {
    addresses: Range<u64>,
    faults_before: u64,
    allocation: Duration,
    times: stream::Times,
}

impl Run {
    fn new(
        memory: &mut [u8],
        faults_before: u64,
        allocation: Duration,
        threads: usize,
        passes: usize,
    ) -> Result<Self, Error> {
        let start = memory.as_ptr().addr() as u64;
        let addresses = start..start + memory.len() as u64;
        let times = stream::run(numbers(memory), threads, passes).map_err(|found| {
            Error::Corrupt(format!(
                "a number of STREAM's arrays is {found}, which is wrong"
            ))
        })?;
        Ok(Self {
            addresses,
            faults_before,
            allocation,
            times,
        })
    }

    fn sample(self, root: &Root, counted: Counted) -> Result<StreamSample, Error> {
        Ok(StreamSample {
            start_ms: (self.allocation + self.times.touch).as_secs_f64() * 1e3,
            kernel_ms: self.times.best.map(|best| best.as_secs_f64() * 1e3),
            faults: faults(root)?.saturating_sub(self.faults_before),
            memory: Memory::read_of(root, &self.addresses)?,
            counted,
        })
    }
}

fn first_use(supply: Supply, pages: Pages, times: usize) -> Result<FirstSample, Error> {
    let root = Root::host();
    let kernel = Kernel::new(&root)?;
    let supplied = supplied(&root, supply, pages)?;
    let pool = &supplied.pool;
    let mut taken: Vec<Page<'_>> = Vec::with_capacity(usize::try_from(pages.0).unwrap_or(0));
    let mut costs = Vec::with_capacity(times);
    let mut seen = None;
    for _ in 0..times {
        let clock = Instant::now();
        for _ in 0..pages.0 {
            let mut page = pool.take()?;
            for base in page.bytes_mut().chunks_mut(rustix::param::page_size()) {
                base[0] = 1;
            }
            taken.push(page);
        }
        costs.push(clock.elapsed().as_secs_f64() * 1e6 / pages.0 as f64);
        if seen.is_none() {
            seen = Some((Memory::read(&root)?, kernel.counted(Some(pool))?));
        }
        taken.clear();
    }
    let (memory, counted) = match seen {
        Some(seen) => seen,
        None => (Memory::read(&root)?, Counted::default()),
    };
    Ok(FirstSample {
        page_us: median(&costs),
        memory,
        counted,
    })
}

fn exchange(way: Way, threads: usize) -> Result<ExchangeSample, Error> {
    let root = Root::host();
    let held = |source| {
        let provision = Provision::Held;
        supplied(&root, Supply { source, provision }, EXCHANGED)
    };
    match way {
        Way::Take(source) | Way::TakeZeroed(source) => {
            let pool = held(source)?.pool;
            let take = || match way {
                Way::TakeZeroed(_) => pool.take_zeroed(),
                _ => pool.take(),
            };
            let page_ns = by_threads(threads, || {
                take()?.bytes_mut()[0] = 1;
                Ok(())
            })?;
            let kernel = Kernel::new(&root)?;
            let page = take()?;
            let counted = kernel.counted(Some(&pool))?;
            drop(page);
            Ok(ExchangeSample {
                page_ns,
                memory: Memory::read(&root)?,
                counted,
            })
        }
        Way::Map | Way::MapTouched | Way::MapThp => {
            let map = || {
                let mut mapping = match way {
                    Way::MapThp => Mapping::huge(Bytes(SIZE.bytes())),
                    _ => Mapping::hugetlb(SIZE),
                }
                .map_err(Error::Map)?;
                if way != Way::Map {
                    mapping.touch_first();
                }
                Ok::<_, Error>(mapping)
            };
            let page_ns = by_threads(threads, || map()?.unmap().map_err(Error::Map))?;
            let kernel = Kernel::new(&root)?;
            let mapping = map()?;
            let (memory, counted) = (Memory::read(&root)?, kernel.counted(None)?);
            mapping.unmap().map_err(Error::Map)?;
            Ok(ExchangeSample {
                page_ns,
                memory,
                counted,
            })
        }
    }
}

/// What one of many takes, in nanoseconds, when so many threads do it again and again.
fn by_threads(threads: usize, once: impl Fn() -> Result<(), Error> + Sync) -> Result<f64, Error> {
    // The first ones fill caches, and find the code.
    for _ in 0..BATCH {
        once()?;
    }
    let done = AtomicU64::new(0);
    let clock = Instant::now();
    std::thread::scope(|scope| {
        let threads = (0..threads).map(|_| {
            scope.spawn(|| {
                while clock.elapsed() < SPAN {
                    for _ in 0..BATCH {
                        once()?;
                    }
                    done.fetch_add(BATCH, Ordering::Relaxed);
                }
                Ok(())
            })
        });
        let threads: Vec<_> = threads.collect();
        let ended = threads.into_iter().map(|thread| {
            let died = || Err(Error::Corrupt("a thread died".to_owned()));
            thread.join().unwrap_or_else(|_| died())
        });
        ended.collect::<Result<(), Error>>()
    })?;
    let took = clock.elapsed().as_secs_f64() * 1e9;
    Ok(took / done.into_inner().max(1) as f64)
}

/// A pool that has, or can have, so many pages.
fn supplied(root: &Root, supply: Supply, pages: Pages) -> Result<Supplied, Error> {
    let pool = made(root, supply.source)?;
    match supply.provision {
        Provision::Held => grow(&pool, pages)?,
        Provision::Persistent => pool.set_overcommit(pages),
        Provision::Surplus => pool.set_overcommit(pages),
    }
    Ok(Supplied {
        pool,
        _ballast: ballast(root, supply)?,
    })
}

/// What the kernel's pool has unused and would give before it makes a surplus page, where such are wanted.
fn ballast(root: &Root, supply: Supply) -> Result<Option<Pool>, Error> {
    let wanted = Supply {
        source: Source::Hugetlb,
        provision: Provision::Surplus,
    };
    let unused = kernel_pool(root)?.map_or(Pages(0), |pool| pool.unused());
    if supply != wanted || unused == Pages(0) {
        return Ok(None);
    }
    let pool = made(root, Source::Hugetlb)?;
    grow(&pool, unused)?;
    Ok(Some(pool))
}

/// An empty pool.
fn made(root: &Root, source: Source) -> Result<Pool, Error> {
    let placement = Placement::of_thread().map_err(|errno| Error::Map(errno.into()))?;
    Ok(match source {
        Source::Hugetlb => Pool::new(Hugetlb::new(root, SIZE)?, placement),
        Source::Thp => Pool::new(Thp::new(root)?, placement),
    })
}

fn grow(pool: &Pool, pages: Pages) -> Result<(), Error> {
    match pool.resize(pages).stopped {
        Some(error) => Err(Error::Pool(error)),
        None => Ok(()),
    }
}

impl Kernel {
    fn new(root: &Root) -> Result<Self, Error> {
        Ok(Self {
            root: root.clone(),
            before: kernel_pool(root)?,
        })
    }

    /// Whose pages there are now.
    fn counted(&self, pool: Option<&Pool>) -> Result<Counted, Error> {
        let now = kernel_pool(&self.root)?;
        let more = |count: fn(&hugetlb::Pool) -> Pages| {
            let [before, now] =
                [&self.before, &now].map(|pool| pool.as_ref().map_or(0, |pool| count(pool).0));
            Pages(now.saturating_sub(before))
        };
        let counters = pool.map(Pool::counters).unwrap_or_default();
        Ok(Counted {
            used: counters.used(),
            surplus: counters.surplus,
            kernel_surplus: more(|pool| pool.surplus),
            kernel_reserved: more(|pool| pool.reserved),
        })
    }
}

/// The kernel's pool of [`SIZE`], where there is one.
pub(super) fn kernel_pool(root: &Root) -> Result<Option<hugetlb::Pool>, Error> {
    let pools = hugetlb::pools(root)?.unwrap_or_default();
    Ok(pools
        .into_iter()
        .find(|pool: &hugetlb::Pool| pool.size == SIZE))
}

/// The minor faults of this process.
fn faults(root: &Root) -> Result<u64, Error> {
    let stat = root.read("proc/self/stat")?;
    // The name may hold anything; behind it minflt is the eighth (proc_pid_stat(5)).
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest);
    let faults = fields.and_then(|rest| rest.split_whitespace().nth(7)?.parse().ok());
    faults.ok_or_else(|| Error::Corrupt(format!("/proc/self/stat: {stat}")))
}
