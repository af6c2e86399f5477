//! Work of a measured process, as data: [`Task`], which [`worker`](crate::worker) executes.

use std::ops::Range;
use std::path::PathBuf;

use jumbo::units::{Bytes, PageSize, Pages};
use serde::{Deserialize, Serialize};

/// Work of one process, as its command line has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Task {
    /// Objects of so many bytes: allocated, filled, visited in random order, and freed.
    Load(Bytes),
    SmallFree,
    /// Pairs of malloc(3) and free(3) of a large block, in a thread besides the first.
    LargePairs,
    /// Memory allocated and touched, then freed or held.
    Memory(MemoryTask),
    /// STREAM: total bytes of the arrays, threads, passes.
    Stream(Arrays, Bytes, usize, usize),
    /// Pages of a pool of that size taken and given back one at a time.
    Exchange(PoolKind, PageCycle, Pages),
    /// Blocks of so many bytes in total, each allocated, touched and timed.
    Latency(Bytes),
    /// Free memory of so many bytes fragmented on request.
    Fragment(Bytes),
    Text(TextTask),
    /// A file mapped and read.
    File(FileTask),
    /// A block made resident by a call, in these pages.
    Populate(PopulateCall, PopulatePages, Bytes),
    Touch(TouchTask),
    Describe(DescribeTask),
    /// Kernel knobs set, and restored at the end.
    Keep(KnobSet),
}

/// Memory that a process allocates and touches, and the action that follows.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MemoryTask {
    pub(crate) by: AllocCall,
    /// Sizes of the blocks, allocated one after the other.
    pub(crate) sizes: Vec<Bytes>,
    pub(crate) times: usize,
    /// Base pages only, whatever the host gives an ordinary program.
    pub(crate) base: bool,
    pub(crate) then: Action,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum AllocCall {
    Malloc,
    Map,
    /// Aligned, and advised to be huge.
    MapHuge,
}

/// Call that makes a block resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PopulateCall {
    /// mmap(2) with MAP_POPULATE.
    Map,
    /// MADV_POPULATE_WRITE.
    Advise,
    /// mlock(2).
    Lock,
    /// io_uring_register(2).
    Register,
}

/// Pages of a populated block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PopulatePages {
    /// Base pages only.
    Base,
    /// Advised by the process.
    Advised,
    /// As `jumbo run` has them.
    Obtained,
}

/// Action after the first touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Action {
    Free,
    /// Freed, and watched until the memory is free again.
    FreeAndWatch,
    /// Copied by fork(2), and written to while the child shares it.
    Fork,
    /// Held until the process ends.
    End {
        by_reaper: bool,
    },
}

/// Memory of STREAM's arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Arrays {
    /// Memory from `calloc`, on base pages.
    Base,
    /// Memory from `calloc` on pages of `jumbo run --pool`, or a region of the program's THP pool.
    Supplied(PoolConfig),
}

/// A pool, and the origin of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolConfig(pub(crate) PoolKind, pub(crate) Provision);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PoolKind {
    /// Pages of the kernel's pool.
    Hugetlb,
    Thp,
}

/// Origin of a pool's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Provision {
    /// The pool holds them before the measurement.
    Held,
    /// Surplus pages of our pool and of the kernel's, allocated on demand.
    Surplus,
}

/// Method to obtain a page and give it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PageCycle {
    /// `take` and `give`, content unspecified.
    Take,
    /// `mmap`, a touch, and `munmap`. For THPs aligned and with MADV_HUGEPAGE.
    MapTouched,
}

/// Calls in the program with much text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TextTask {
    /// Size of the program's text.
    pub(crate) size: Bytes,
    /// Size of the text that it touches, by a call in each base page, in ascending order.
    pub(crate) touched: Bytes,
    pub(crate) calls: u64,
    /// Base pages only, whatever the page cache holds.
    pub(crate) base: bool,
    /// The process stays until the end of its input.
    pub(crate) stays: bool,
}

/// A file that is mapped, and the number of reads at random.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileTask {
    pub(crate) path: PathBuf,
    pub(crate) reads: u64,
}

/// Shared memory that several threads touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TouchTask {
    pub(crate) by: ShmemMode,
    pub(crate) size: Bytes,
    pub(crate) threads: usize,
}

/// Method that backs shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ShmemMode {
    /// Base pages, whatever the kernel's controls say.
    Base,
    /// `jumbo run`, where none of the kernel's controls allows a size.
    Disabled,
    /// Folios of this size, which the kernel's control allows to all programs.
    Kernel(PageSize),
    /// One touch per PMD, then MADV_COLLAPSE, by the program itself.
    Collapse,
    /// Pages of the kernel's pool, by `jumbo run --shm=hugetlb`.
    Hugetlb,
}

/// Huge pages, and the table that describes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DescribeTask {
    /// Over base pages of 4 KiB.
    pub(crate) order: u32,
    pub(crate) pages: usize,
    /// Descriptors of tail pages are freed; else all are present.
    pub(crate) optimised: bool,
    /// Pages are pinned and unpinned; else they are prepared, looked up and released.
    pub(crate) pinned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum KnobSet {
    Pool,
    /// The shared-memory control of each folio size.
    Shmem,
}

impl Task {
    /// One block of `size` bytes from `malloc`.
    pub(crate) fn block(size: Bytes, base: bool, then: Action) -> Self {
        Self::Memory(MemoryTask {
            by: AllocCall::Malloc,
            sizes: vec![size],
            times: 1,
            base,
            then,
        })
    }
}

impl DescribeTask {
    pub(crate) fn all(self) -> Range<usize> {
        0..self.pages << self.order
    }
}
