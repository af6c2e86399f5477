//! The work of a process that is measured, as data: [`Task`]. [`worker`](crate::worker) does it.

use std::ops::Range;

use jumbo::units::{Bytes, PageSize, Pages};
use serde::{Deserialize, Serialize};

/// The work of one process, as its command line has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Task {
    /// Objects of so many bytes in all: allocated, each byte of them written, chased through by
    /// pointers in random order, and freed in another.
    Load(Bytes),
    /// Small objects freed, many times.
    SmallFree,
    /// Memory taken and touched, and given back or held.
    Memory(Memory),
    /// STREAM over arrays of so many bytes in all, by so many threads, in so many passes.
    Stream(Arrays, Bytes, usize, usize),
    /// Pages of a pool, so many, that are taken, each touched in all of its base pages, and given
    /// back, so many times.
    FirstUse(Supply, Pages, usize),
    /// A page of a pool of so many had and given back, by so many threads.
    Exchange(Source, Way, Pages, usize),
    /// Blocks of so many bytes in all, each allocated, touched and timed by itself.
    Latency(Bytes),
    /// Free memory of so many bytes broken into pieces, again and again.
    Break(Bytes),
    /// Functions called.
    Text(Text),
    /// Shared memory touched.
    Touch(Touch),
    /// Huge pages described.
    Describe(Huge),
    /// Knobs of the kernel kept, and put back in the end.
    Keep(Kept),
}

/// Memory that a process takes and touches, and what it does then.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Memory {
    pub(crate) by: By,
    /// One after the other.
    pub(crate) sizes: Vec<Bytes>,
    /// How often each.
    pub(crate) times: usize,
    /// On base pages, whatever the host gives an ordinary program.
    pub(crate) base: bool,
    pub(crate) then: Then,
}

/// The call by which memory is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum By {
    Malloc,
    Map,
    /// Aligned, and advised to be huge.
    MapHuge,
}

/// The use of memory once it was touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Then {
    Free,
    /// Given back, and watched until it is free again.
    FreeAndWatch,
    /// Copied by fork(2), and written to while the child has it too.
    Fork,
    /// Held until the process ends that way; where that is set, beside a sibling that gives it back.
    End(End, bool),
}

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum End {
    /// It calls `exit(0)`.
    Exit,
    /// It calls `abort()`, and leaves no core.
    Crash,
    /// It gets SIGKILL.
    Kill,
}

/// Where STREAM's arrays are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Arrays {
    /// In memory from `calloc`, on base pages.
    Base,
    /// In memory from `calloc`, of whose supply from the kernel's pool (`jumbo run --pool`) the
    /// program knows nothing; or in a region of a pool of THPs, which it asks for it.
    Supplied(Supply),
    /// In static memory, on base pages.
    StaticBase,
    /// In static memory, on the pages that it has.
    Static,
}

/// A pool, and how it comes by its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Supply(pub(crate) Source, pub(crate) Provision);

/// The kind of a pool's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Source {
    /// Pages of the kernel's pool.
    Hugetlb,
    /// Transparent huge pages.
    Thp,
}

/// How pages come to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Provision {
    /// The pool holds them before the clock runs.
    Held,
    /// The kernel's pool holds them before; ours takes them from there when they are wanted.
    Persistent,
    /// No pool holds them: they are surplus pages, of our pool and of the kernel's, made when they
    /// are wanted.
    Surplus,
}

/// How a page is had and given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Way {
    /// `take` and `give`, its content unspecified.
    Take,
    /// The same of a pool that describes no page.
    TakePlain,
    /// The same as the first, with zeroes in it.
    TakeZeroed,
    /// `mmap` and `munmap` of MAP_HUGETLB: the page is promised and never touched.
    Map,
    /// The same with a touch, on which the kernel clears the page; of THPs `mmap`, aligned,
    /// MADV_HUGEPAGE, a touch, `munmap`.
    MapTouched,
}

/// The calls of the program with much text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Text {
    /// Of all of its text.
    pub(crate) size: Bytes,
    /// Of that, what it touches: a call in each base page, in their order.
    pub(crate) touched: Bytes,
    /// How often it calls a function then, at random...
    pub(crate) calls: u64,
    /// ... of all that it touched, and not only of those by which it did.
    pub(crate) any: bool,
    /// On base pages, whatever the page cache has.
    pub(crate) base: bool,
    /// It stays until the end of its input.
    pub(crate) stays: bool,
}

/// Shared memory of so many bytes that so many threads touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Touch {
    pub(crate) by: Shared,
    pub(crate) size: Bytes,
    pub(crate) threads: usize,
    /// The slowest of a hundred first touches is looked for as well.
    pub(crate) timed: bool,
}

/// How shared memory comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Shared {
    /// In base pages, whatever the kernel's controls are.
    Base,
    /// As the kernel's controls have it, and they allow no size.
    Plain,
    /// The same under `jumbo run`.
    Disabled,
    /// In folios of this size, which the kernel's control allows to all programs.
    Kernel(PageSize),
    /// A touch for each PMD, then MADV_COLLAPSE, by the program itself.
    Collapse,
    /// In blocks of this size, by `jumbo run --shm=user`.
    User(PageSize),
    /// In pages of the kernel's pool, by `jumbo run --shm=hugetlb`.
    Hugetlb,
}

/// Huge pages, and the table that describes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Huge {
    /// Over base pages of 4 KiB.
    pub(crate) order: u32,
    pub(crate) pages: usize,
    /// The descriptors of huge pages are given back; else all are there.
    pub(crate) optimised: bool,
    /// All but the first and the last base page are pinned and unpinned; else all pages are
    /// prepared, looked up and released.
    pub(crate) pinned: bool,
}

/// The knobs of one keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kept {
    /// The kernel's pool of 2 MiB pages.
    Pool,
    /// The control of shared memory of each folio size.
    Shmem,
    /// Whether hugetlb pages give their metadata back.
    Hvo,
}

impl Huge {
    /// The base pages.
    pub(crate) fn all(self) -> Range<usize> {
        0..self.pages << self.order
    }
}
