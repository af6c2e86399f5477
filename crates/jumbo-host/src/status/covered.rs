//! Counters of the preload library in a process, read from that process's memory: [`Covered`].
//!
//! The library counts in a [`Slot`], and exports a [`Locator`] with its address. The locator is at
//! the same offset as in this command's library; a library without it there is another version. The
//! process controls all these numbers and pointers. Pointers are followed only where the read
//! cannot block ([`Peek`]). A file of the library's name on another device is not read.

use std::mem::offset_of;

use serde::{Deserialize, Serialize};

use crate::kernel::peek::Peek;
use crate::kernel::smaps::{Mapping, Smaps};
use crate::kernel::{FileError, Root, aside, task};
use crate::units::Bytes;
use jumbo_inside::ledger::{Counts, Locator, Slot};
use jumbo_inside::reaper::State;

use super::library::{self, LIBRARY, Library};

/// Prefix of the names of jumbo's threads.
const THREAD_PREFIX: &str = "jumbo-";

/// Counters of the preload library in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Covered {
    /// Large frees.
    pub free: Freeing,
    /// Pages of the pool.
    pub pool: Pooled,
    /// The reaper process.
    pub reaper: Reaping,
}

/// Counters of `gather`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freeing {
    /// Current number of threads.
    pub threads: usize,
    /// Memory pending free in the background.
    pub pending: Bytes,
    /// Memory freed by several threads at once.
    pub gathered: Bytes,
    /// Large ranges that the caller freed alone.
    pub inline: Bytes,
    /// The part of `gathered` that was freed after the call returned.
    pub background: Bytes,
    /// Maximum number of threads that freed at once.
    pub workers: u64,
    /// Number of allocations that waited for a free in the background.
    pub waits: u64,
}

/// Counters of a pool (`--pool`), all zero without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pooled {
    /// Hugetlb pages now.
    pub hugetlb: Bytes,
    /// Peak of `hugetlb`.
    pub hugetlb_peak: Bytes,
    /// THPs of the pool now.
    pub thp: Bytes,
    /// Peak of `thp`.
    pub thp_peak: Bytes,
    /// Memory requested while there was a pool, and served without it.
    pub beyond: Bytes,
    /// Memory moved from hugetlb pages to THPs, before a fork or a thread.
    pub moved: Bytes,
    /// Memory that could not be moved.
    pub stuck: Bytes,
}

/// State of the reaper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Reaping {
    /// State in one word.
    pub state: &'static str,
    /// Explanation of the state in a sentence.
    pub reason: &'static str,
    /// PID of the reaper in the process's namespace; `None` where none was started.
    pub pid: Option<u32>,
}

impl Covered {
    /// Reads the counters in `pid`; `None` where it does not map the preload library.
    ///
    /// # Errors
    /// [`FileError::Io`]: the process is gone, may not be traced, or holds its memory back.
    /// [`FileError::Content`]: its library is of another version, or a file on another device.
    pub fn read(root: &Root, pid: u32) -> Result<Option<Self>, FileError> {
        let maps = aside::maps(root, pid)?;
        let counts = is_in(&maps).then(|| counts_of_each(root, &[(pid, &maps)]).pop());
        let Some(counts) = counts.flatten().transpose()? else {
            return Ok(None);
        };
        let memory = task::memory(root, pid).ok().flatten();
        let counts = memory.map_or(counts, |memory| within(counts, &memory));
        let state = State::from_code(counts.reaper).unwrap_or_default();
        Ok(Some(Self {
            free: Freeing {
                threads: threads(root, pid)?,
                pending: Bytes(counts.free_pending),
                gathered: Bytes(counts.free_gathered),
                inline: Bytes(counts.free_inline),
                background: Bytes(counts.free_background),
                workers: counts.free_workers,
                waits: counts.free_waits,
            },
            pool: Pooled {
                hugetlb: Bytes(counts.pool_hugetlb),
                hugetlb_peak: Bytes(counts.pool_hugetlb_peak),
                thp: Bytes(counts.pool_thp),
                thp_peak: Bytes(counts.pool_thp_peak),
                beyond: Bytes(counts.pool_beyond),
                moved: Bytes(counts.pool_moved),
                stuck: Bytes(counts.pool_stuck),
            },
            reaper: Reaping {
                state: state.name(),
                reason: state.text(),
                pid: Some(counts.reaper_pid).filter(|pid| *pid != 0),
            },
        }))
    }
}

/// Bounds counters by the kernel's figures: the program can write any value.
pub(super) fn within(mut counts: Counts, memory: &task::Memory) -> Counts {
    let (anon, size) = (memory.anon.0, memory.size.0);
    for (counter, most) in [
        (&mut counts.huge, anon),
        (&mut counts.untouched, anon),
        (&mut counts.data_moved, anon),
        (&mut counts.pool_thp, anon + memory.shmem.0),
        (&mut counts.pool_hugetlb, memory.hugetlb.0),
        (&mut counts.large_live, size),
        (&mut counts.free_pending, size),
        (&mut counts.text, size),
        (&mut counts.text_file, size),
        (&mut counts.text_shared, size),
    ] {
        *counter = (*counter).min(most);
    }
    counts
}

/// Reports whether a mapping is the first one of a file with the library's name.
fn is_first(mapping: &Mapping<'_>) -> bool {
    mapping.offset == 0 && library::is_named(mapping)
}

/// Reports whether the library is among these mappings.
pub(super) fn is_in(maps: &Smaps) -> bool {
    maps.mappings().any(|mapping| is_first(&mapping))
}

/// Number of processes per batch, with two open files for each.
const BATCH_PROCESSES: usize = 256;

/// Reads the library's counters in each of these processes, by a few children for all of them.
pub(super) fn counts_of_each(
    root: &Root,
    processes: &[(u32, &Smaps)],
) -> Vec<Result<Counts, FileError>> {
    let ours = Locator::new();
    let pointer = |peek: &Peek, locator: &[u8]| {
        let is_ours = half(locator, offset_of!(Locator, magic)) == ours.magic
            && half(locator, offset_of!(Locator, size)) == ours.size;
        is_ours
            .then(|| (word(locator, offset_of!(Locator, slot)), 8))
            .ok_or_else(|| strange(peek, "is of another version than this command"))
    };
    let mut all = Vec::new();
    for processes in processes.chunks(BATCH_PROCESSES) {
        let locators = processes.iter().map(|(pid, maps)| find(root, *pid, maps));
        let pointers = follow(locators.collect(), pointer);
        let slots = follow(pointers, |_, pointer| {
            Ok((word(pointer, 0), size_of::<Slot>()))
        });
        let counts = read_each(slots).into_iter();
        all.extend(counts.map(|read| read.map(|(_, slot)| Counts::read(&slot))));
    }
    all
}

/// The next range to read in a process: address and length.
type Target = Result<(Peek, u64, usize), FileError>;

/// Reads these targets. `next` computes the following target from the bytes.
fn follow(
    targets: Vec<Target>,
    next: impl Fn(&Peek, &[u8]) -> Result<(u64, usize), FileError>,
) -> Vec<Target> {
    let target = |read: Result<(Peek, Vec<u8>), FileError>| {
        let (peek, bytes) = read?;
        let (at, length) = next(&peek, &bytes)?;
        Ok((peek, at, length))
    };
    read_each(targets).into_iter().map(target).collect()
}

fn read_each(targets: Vec<Target>) -> Vec<Result<(Peek, Vec<u8>), FileError>> {
    let wanted = targets.iter().flatten();
    let wanted: Vec<_> = wanted
        .map(|(peek, at, length)| (peek, *at, *length))
        .collect();
    let mut read = Peek::read_each(&wanted).into_iter();
    let bytes = targets.into_iter().map(|target| {
        let (peek, ..) = target?;
        let bytes = read
            .next()
            .unwrap_or_else(|| Err(strange(&peek, "was not read")))?;
        Ok((peek, bytes))
    });
    bytes.collect()
}

/// Address of the [`Locator`] of a process's library.
fn find(root: &Root, pid: u32, maps: &Smaps) -> Target {
    let named: Vec<_> = maps.mappings().filter(is_first).collect();
    let found = Library::of_this_command().and_then(|ours| {
        let mapping = named
            .iter()
            .find(|mapping| mapping.device == ours.device())?;
        Some((ours, mapping, Library::locator()?))
    });
    let (ours, library, offset) = found.ok_or_else(|| FileError::Content {
        path: root.path(format!("proc/{pid}/maps")),
        what: format!(
            "{} is not the library of this command, nor beside it on its device",
            named.first().map_or(LIBRARY, |mapping| mapping.path)
        ),
    })?;
    let peek = Peek::open(root, pid, maps, ours.device())?;
    Ok((
        peek,
        library.start.wrapping_add(offset),
        size_of::<Locator>(),
    ))
}

fn strange(peek: &Peek, what: &str) -> FileError {
    peek.misread(format!("{LIBRARY} in it {what}"))
}

/// Number of jumbo's threads in `pid`.
fn threads(root: &Root, pid: u32) -> Result<usize, FileError> {
    let folder = format!("proc/{pid}/task");
    let names = root.list(&folder)?;
    // The first thread may have any name, even `jumbo-app`.
    let others = names.iter().filter(|thread| **thread != pid.to_string());
    let is_ours = |thread: &&String| {
        let name = root.read(format!("{folder}/{thread}/comm"));
        name.is_ok_and(|name| name.starts_with(THREAD_PREFIX))
    };
    Ok(others.filter(is_ours).count())
}

/// The eight bytes at `offset` in native byte order; 0 beyond the end.
fn word(bytes: &[u8], offset: usize) -> u64 {
    let word = bytes.get(offset..).and_then(<[u8]>::first_chunk);
    word.map_or(0, |word| u64::from_ne_bytes(*word))
}

/// The four bytes at `offset` in native byte order; 0 beyond the end.
fn half(bytes: &[u8], offset: usize) -> u32 {
    let half = bytes.get(offset..).and_then(<[u8]>::first_chunk);
    half.map_or(0, |half| u32::from_ne_bytes(*half))
}
