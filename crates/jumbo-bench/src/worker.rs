//! What a worker is told, what it answers, and where it begins: `Task`, `Sample`, `run`.
//!
//! A worker is the `jumbo` executable itself, started afresh: an ordinary, dynamically linked program whose only
//! allocator is the `malloc` that it finds at run time. Nothing in it knows of jumbo's heap.

use std::io::{self, Write as _};
use std::time::Duration;

use jumbo::status::Freeing;
use jumbo::units::{Bytes, Pages};
use serde::{Deserialize, Serialize};

use crate::group::Figures;
use crate::memory::Memory;
use crate::pool::{Counted, Supply, Way};
use crate::{Error, child, exit, free, heap, pool};

/// The work of one process. On its command line it is one word of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Task {
    /// Objects of so many bytes allocated, chased and freed.
    Load(Bytes),
    /// A small object freed.
    SmallFree,
    /// A block of so many bytes freed; where that is set, until its memory is free.
    Release(Bytes, bool),
    /// Mappings of each size unmapped, of huge pages where that is set, so many times.
    Unmap(Vec<Bytes>, bool, usize),
    /// So many blocks of so many bytes freed, by a program that says nothing of huge pages.
    Blocks(Bytes, usize),
    /// So many ranges of so many bytes given back: by `munmap` each, or by a `Gather` that hands over so many base pages
    /// at a time.
    Ranges(Bytes, usize, Option<u64>),
    /// So many bytes held until the end; where that is set, beside a sibling.
    Hold(Bytes, bool),
    /// STREAM's kernels over three arrays of so many bytes in all, by so many threads, in so many passes: on base pages;
    /// under `jumbo run --pool`, on pages of the kernel's pool, of which the program knows nothing; or on a region of
    /// a pool of THPs, which it asks for it.
    Stream(Option<Supply>, Bytes, usize, usize),
    /// So many pages taken, each touched in all of its base pages, and given back, so many times.
    FirstUse(Supply, Pages, usize),
    /// A page had and given back by so many threads, again and again.
    Exchange(Way, usize),
    /// The kernel's pool set as it is told, until the end of its input.
    Keep,
}

/// What a task took, and the proof that it did what it was to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) figures: Figures,
    /// What the process, or what was measured of it, had when it had most.
    pub(crate) memory: Memory,
    /// Whose pages it had.
    pub(crate) counted: Counted,
    /// What the preload library counted; `None` where it is not in the process, or was not asked.
    pub(crate) freed: Option<Freeing>,
}

impl Sample {
    pub(crate) fn new<const N: usize>(figures: [(&str, f64); N], memory: Memory) -> Self {
        let figures = figures.map(|(name, figure)| (name.to_owned(), figure));
        Self {
            figures: figures.into(),
            memory,
            counted: Counted::default(),
            freed: None,
        }
    }
}

/// Does what `task` says, a JSON text, and prints what it took, another.
///
/// # Errors
/// [`Error`].
pub fn run(task: &str) -> Result<(), Error> {
    let task: Task = serde_json::from_str(task).map_err(|error| Error::Pipe(error.into()))?;
    if task != Task::Keep {
        // The process that gives back what it changed must outlive one that was killed.
        child::die_with_parent();
    }
    let sample = match task {
        Task::Load(size) => heap::load(size),
        Task::SmallFree => heap::small_free(),
        Task::Release(size, back) => free::release(size, back),
        Task::Unmap(sizes, huge, times) => free::unmap(&sizes, huge, times),
        Task::Blocks(size, count) => free::blocks(size, count),
        Task::Ranges(size, count, flush) => free::ranges(size, count, flush),
        Task::Hold(size, reaper) => return exit::hold(size, reaper),
        Task::Stream(supply, size, threads, passes) => pool::stream(supply, size, threads, passes),
        Task::FirstUse(supply, pages, times) => pool::first_use(supply, pages, times),
        Task::Exchange(way, threads) => pool::exchange(way, threads),
        Task::Keep => return pool::keep(),
    };
    say(&sample?)
}

/// Tells the process that measures.
pub(crate) fn say(what: &impl Serialize) -> Result<(), Error> {
    let line = serde_json::to_string(what).map_err(|error| Error::Pipe(error.into()))?;
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").map_err(Error::Pipe)?;
    out.flush().map_err(Error::Pipe)
}

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
