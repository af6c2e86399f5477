//! What a worker is told to do, and what it answers: [`Task`], and a sample of each kind.

use jumbo::units::{Bytes, Pages};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::stream::KERNELS;
use crate::heap::worker::LoadSample;
use crate::memory::Memory;

/// The work of one process. On its command line it is one word of JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Task {
    /// STREAM's kernels over three arrays of `size` bytes in all: [`StreamSample`].
    Stream {
        arrays: Arrays,
        size: Bytes,
        threads: usize,
        passes: usize,
    },
    /// So many pages taken, each touched in all of its base pages, and given back, so many times:
    /// [`FirstSample`].
    FirstUse {
        supply: Supply,
        pages: Pages,
        times: usize,
    },
    /// A page had and given back, by so many threads, for as long as [`super::worker::SPAN`]: [`ExchangeSample`].
    Exchange { way: Way, threads: usize },
    /// The heap's load ([`crate::heap::worker::load`]), plain or with its heap on a pool: [`LoadSample`].
    Load { size: Bytes, pool: Option<Source> },
    /// Sets the kernel's pool as it is told, until the end of its input.
    Keep,
}

/// Where the arrays of STREAM are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Arrays {
    /// From the program's own `calloc`, and kept on base pages.
    BasePages,
    /// From the same `calloc`, under `jumbo run --pool`: the program knows of nothing.
    Heap(Supply),
    /// A region of a pool, which the program asks for it.
    Region(Supply),
}

/// A pool, and how it comes by its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Supply {
    pub(super) source: Source,
    pub(super) provision: Provision,
}

/// What a pool's pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Source {
    /// Pages of the kernel's pool.
    Hugetlb,
    /// Transparent huge pages.
    Thp,
}

/// How pages come to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Provision {
    /// The pool holds them before the clock runs.
    Held,
    /// The kernel's pool holds them before; ours takes them from there when they are wanted.
    Persistent,
    /// Nobody holds them: they are surplus pages, of our pool and of the kernel's, made when they are wanted.
    Surplus,
}

/// How a page is had and given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Way {
    /// `take` and `give`, its content unspecified.
    Take(Source),
    /// The same, with zeroes in it.
    TakeZeroed(Source),
    /// `mmap` and `munmap` of MAP_HUGETLB: the page is promised and never touched.
    Map,
    /// The same with a touch, on which the kernel clears the page.
    MapTouched,
    /// `mmap`, aligned, MADV_HUGEPAGE, a touch, `munmap`.
    MapThp,
}

/// Where pages came from, by the counters of both pools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Counted {
    /// Pages taken from our pool.
    pub(super) used: Pages,
    /// Surplus pages of our pool.
    pub(super) surplus: Pages,
    /// Surplus pages of the kernel's pool of 2 MiB pages, more than before.
    pub(super) kernel_surplus: Pages,
    /// Pages of it that were promised, more than before.
    pub(super) kernel_reserved: Pages,
}

/// What [`Task::Stream`] took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct StreamSample {
    /// From nothing until all arrays hold values.
    pub(super) start_ms: f64,
    /// The best pass of each kernel.
    pub(super) kernel_ms: [f64; KERNELS.len()],
    /// Page faults from nothing to the end, minor ones.
    pub(super) faults: u64,
    /// What the arrays had.
    pub(super) memory: Memory,
    pub(super) counted: Counted,
}

impl StreamSample {
    /// The better of two in each of what they took.
    pub(super) fn best(self, other: Self) -> Self {
        let kernel = |at: usize| self.kernel_ms[at].min(other.kernel_ms[at]);
        Self {
            start_ms: self.start_ms.min(other.start_ms),
            kernel_ms: std::array::from_fn(kernel),
            ..self
        }
    }

    /// All kernels.
    pub(super) fn kernels_ms(&self) -> f64 {
        self.kernel_ms.iter().sum()
    }
}

/// What [`Task::FirstUse`] took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct FirstSample {
    /// One page.
    pub(super) page_us: f64,
    /// What the process had with all pages taken.
    pub(super) memory: Memory,
    pub(super) counted: Counted,
}

/// What [`Task::Exchange`] took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct ExchangeSample {
    /// One page had and given back by any of the threads: the time by the number of pages of all threads.
    pub(super) page_ns: f64,
    /// What the process had with one page in hand.
    pub(super) memory: Memory,
    pub(super) counted: Counted,
}

/// What every worker says beside its figures.
pub(super) trait Sample: DeserializeOwned {
    fn memory(&self) -> &Memory;
    fn counted(&self) -> Counted;
}

impl Sample for StreamSample {
    fn memory(&self) -> &Memory {
        &self.memory
    }
    fn counted(&self) -> Counted {
        self.counted
    }
}

impl Sample for FirstSample {
    fn memory(&self) -> &Memory {
        &self.memory
    }
    fn counted(&self) -> Counted {
        self.counted
    }
}

impl Sample for ExchangeSample {
    fn memory(&self) -> &Memory {
        &self.memory
    }
    fn counted(&self) -> Counted {
        self.counted
    }
}

impl Sample for LoadSample {
    fn memory(&self) -> &Memory {
        &self.memory
    }
    /// It does not count: its memory says enough.
    fn counted(&self) -> Counted {
        Counted::default()
    }
}
