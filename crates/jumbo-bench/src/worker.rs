//! What a worker is told, what it answers, and where it begins: `Task`, `Figures`, `run`.
//!
//! A worker is the `jumbo` executable itself, started afresh: an ordinary, dynamically linked program whose only
//! allocator is the `malloc` that it finds at run time. Nothing in it knows of jumbo's heap.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use jumbo::kernel::Root;
use jumbo::status::Covered;
use jumbo::units::{Bytes, Pages};
use serde::{Deserialize, Serialize};

use crate::exit::End;
use crate::free::Freeing;
use crate::keeper::Kept;
use crate::pool::{self, Arrays, Source, Supply};
use crate::shmem::{self, Way};
use crate::text::Text;
use crate::vmemmap::{Huge, Kind};
use crate::{Error, child, exit, fork, free, heap, keeper, text, vmemmap};

/// The work of one process. On its command line it is one word of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Task {
    /// Objects of so many bytes allocated, chased and freed.
    Load(Bytes),
    /// A small object freed.
    SmallFree,
    /// Mappings of each size unmapped, of huge pages where that is set, so many times.
    Unmap(Vec<Bytes>, bool, usize),
    /// So many blocks of so many bytes freed.
    Blocks(Bytes, usize, Freeing),
    /// So many ranges of so many bytes given back: by `munmap` each, or by a `Gather` that hands over so many base pages
    /// at a time.
    Ranges(Bytes, usize, Option<u64>),
    /// So many bytes held until the end, and what that is; where that is set, beside a sibling.
    Hold(Bytes, bool, End),
    /// STREAM's kernels over three arrays of so many bytes in all, by so many threads, in so many passes.
    Stream(Arrays, Bytes, usize, usize),
    /// So many pages taken, each touched in all of its base pages, and given back, so many times.
    FirstUse(Supply, Pages, usize),
    /// A page had and given back, of a pool of so many where there is one, by so many threads, again and again.
    Exchange(Source, pool::Way, Pages, usize),
    /// Functions of a program with much text called.
    Text(Text),
    /// So many bytes, on base pages where that is set, in a process that forks.
    Fork(Bytes, bool),
    /// So many huge pages described by a table of a kind: prepared, looked up, released.
    Describe(Kind, Huge),
    /// So many described, and pinned.
    Pin(Kind, Huge),
    /// Pages of a pool taken and given back, described where that is set.
    TakeGive(bool),
    /// So many bytes of shared memory touched by so many threads; where that is set, one by one as well.
    Shared(Way, Bytes, usize, bool),
    /// Knobs of the kernel set as it is told, until the end of its input.
    Keep(Kept),
}

/// How long what the preload library does beside the program may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What one sample found, by names that end in their unit: what the task took, and what proves that it did what it was to
/// do ([`claim`](crate::claim)).
pub(crate) type Figures = BTreeMap<String, f64>;

/// `figures`, and these beside them.
pub(crate) fn with<const N: usize>(mut figures: Figures, more: [(&str, f64); N]) -> Figures {
    figures.extend(more.map(|(name, figure)| (name.to_owned(), figure)));
    figures
}

/// Does what `task` says, a JSON text, and prints what it took, another.
///
/// # Errors
/// [`Error`].
pub fn run(task: &str) -> Result<(), Error> {
    let task: Task = serde_json::from_str(task).map_err(io::Error::from)?;
    if !matches!(task, Task::Keep(_)) {
        // The process that gives back what it changed must outlive one that was killed.
        child::die_with_parent();
    }
    let figures = match task {
        Task::Load(size) => heap::load(size),
        Task::SmallFree => heap::small_free(),
        Task::Unmap(sizes, huge, times) => free::unmap(&sizes, huge, times),
        Task::Blocks(size, count, how) => free::blocks(size, count, how),
        Task::Ranges(size, count, flush) => free::ranges(size, count, flush),
        Task::Hold(size, reaper, end) => return exit::hold(size, reaper, end),
        Task::Stream(arrays, size, threads, passes) => pool::stream(arrays, size, threads, passes),
        Task::FirstUse(supply, pages, times) => pool::first_use(supply, pages, times),
        Task::Exchange(source, way, pages, threads) => pool::exchange(source, way, pages, threads),
        Task::Text(what) => return text::text(&what),
        Task::Fork(size, base) => fork::fork(size, base),
        Task::Describe(kind, huge) => vmemmap::describe(kind, huge),
        Task::Pin(kind, huge) => vmemmap::pin(kind, huge),
        Task::TakeGive(is_described) => vmemmap::take_give(is_described),
        Task::Shared(way, size, threads, timed) => shmem::touch(way, size, threads, timed),
        Task::Keep(kept) => return keeper::keep(kept),
    };
    say(&figures?)
}

/// Tells the process that measures.
pub(crate) fn say<T: Serialize>(what: &T) -> Result<(), Error> {
    let line = serde_json::to_string(what).map_err(io::Error::from)?;
    Ok(writeln!(io::stdout(), "{line}")?)
}

/// What `see` finds in what the preload library shows of this process, once it does; `None` where that takes too long, or
/// there is no such library.
pub(crate) fn shown<T>(
    root: &Root,
    see: impl Fn(Covered) -> Option<T>,
) -> Result<Option<T>, Error> {
    let clock = Instant::now();
    while let Some(covered) = Covered::read(root, std::process::id())?
        && clock.elapsed() < PATIENCE
    {
        if let Some(seen) = see(covered) {
            return Ok(Some(seen));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
}

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
