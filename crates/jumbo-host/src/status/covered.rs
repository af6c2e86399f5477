//! What the preload library does in a process, read out of that process's memory: [`Covered`].
//!
//! The library counts in a [`Slot`], and exports a [`Locator`] that leads to it. It is where this command's own library has
//! it: in another copy of that too, and a library without it there is of another version. All that is read is the process's own word: numbers, and pointers that are followed only where that cannot block ([`Peek`]). A
//! file of the library's name on any other device than this command's own library is not read at all.

use std::mem::offset_of;

use serde::{Deserialize, Serialize};

use crate::kernel::peek::Peek;
use crate::kernel::smaps::{Mapping, Smaps};
use crate::kernel::{FileError, Root, aside};
use crate::units::Bytes;
use jumbo_inside::ledger::{Counts, Locator, Slot};
use jumbo_inside::reaper::State;

use super::library::{self, LIBRARY, Library};

/// The names of the threads that free begin with this.
const THREADS: &str = "jumbo-";

/// What the preload library does in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Covered {
    /// How large frees are done.
    pub free: Freeing,
    /// What its pool gives it.
    pub pool: Pooled,
    /// What gives the memory back at the end.
    pub reaper: Reaping,
}

/// What `gather` did and does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freeing {
    /// Its threads now, at work or asleep (a count).
    pub threads: usize,
    /// Now waiting to be freed in the background.
    pub pending: Bytes,
    /// Freed by several threads at once.
    pub gathered: Bytes,
    /// Large ranges that the caller freed alone.
    pub inline: Bytes,
    /// The part of `gathered` that was freed after the call had returned.
    pub background: Bytes,
    /// The most threads that freed at once (a count).
    pub workers: u64,
    /// Allocations that waited for memory being freed in the background (a count).
    pub waits: u64,
}

/// What a pool gives and gave (`--pool`): all zero where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pooled {
    /// Hugetlb pages that it holds now.
    pub hugetlb: Bytes,
    /// The most of them it ever held.
    pub hugetlb_peak: Bytes,
    /// THPs of the pool that it holds now.
    pub thp: Bytes,
    /// The most of them it ever held.
    pub thp_peak: Bytes,
    /// Asked for while there was a pool, and served without it.
    pub beyond: Bytes,
    /// Moved from hugetlb pages to THPs, before a fork or a thread.
    pub moved: Bytes,
    /// Should have been moved, and could not be.
    pub stuck: Bytes,
}

/// What became of the reaper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Reaping {
    /// One word.
    pub state: &'static str,
    /// A sentence.
    pub reason: &'static str,
    /// The sibling's process, as the process's namespace has it; `None` where none was started.
    pub pid: Option<u32>,
}

impl Covered {
    /// What jumbo does in `pid`; `None` where the preload library is not in it.
    ///
    /// # Errors
    /// [`FileError::Io`]: the process is gone, or this user may not trace it, or it holds its memory back.
    /// [`FileError::Content`]: its library is another version of jumbo than this one, or another file than this
    /// command's own, in a place that may not be read.
    pub fn read(root: &Root, pid: u32) -> Result<Option<Self>, FileError> {
        let maps = aside::maps(root, pid)?;
        let counts = is_in(&maps).then(|| counts_of_each(root, &[(pid, &maps)]).pop());
        let Some(counts) = counts.flatten().transpose()? else {
            return Ok(None);
        };
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

/// Whether a mapping is the first of a file that is called as the library is.
fn is_first(mapping: &Mapping<'_>) -> bool {
    mapping.offset == 0 && library::is_named(mapping)
}

/// Whether these are the mappings of a process that has the library.
pub(super) fn is_in(maps: &Smaps) -> bool {
    maps.mappings().any(|mapping| is_first(&mapping))
}

/// The processes that are read together: so many files are open at once, twice.
const TOGETHER: usize = 256;

/// The library's counters in each of these processes, which have these mappings. Where there are many, a few children read
/// all of them.
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
    for processes in processes.chunks(TOGETHER) {
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

/// Where to read next in a process, and how many bytes.
type Place = Result<(Peek, u64, usize), FileError>;

/// Reads at these places, and gives the places that the bytes there lead to.
fn follow(
    places: Vec<Place>,
    next: impl Fn(&Peek, &[u8]) -> Result<(u64, usize), FileError>,
) -> Vec<Place> {
    let place = |read: Result<(Peek, Vec<u8>), FileError>| {
        let (peek, bytes) = read?;
        let (at, length) = next(&peek, &bytes)?;
        Ok((peek, at, length))
    };
    read_each(places).into_iter().map(place).collect()
}

fn read_each(places: Vec<Place>) -> Vec<Result<(Peek, Vec<u8>), FileError>> {
    let wanted = places.iter().flatten();
    let wanted: Vec<_> = wanted
        .map(|(peek, at, length)| (peek, *at, *length))
        .collect();
    let mut read = Peek::read_each(&wanted).into_iter();
    let bytes = places.into_iter().map(|place| {
        let (peek, ..) = place?;
        let bytes = read
            .next()
            .unwrap_or_else(|| Err(strange(&peek, "was not read")))?;
        Ok((peek, bytes))
    });
    bytes.collect()
}

/// Where a process has the [`Locator`] of its library.
fn find(root: &Root, pid: u32, maps: &Smaps) -> Place {
    let named: Vec<_> = maps.mappings().filter(is_first).collect();
    let found = Library::of_this_command().and_then(|ours| {
        let mapping = named.iter().find(|mapping| ours.has_device_of(mapping))?;
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

/// The threads of `pid` that are jumbo's.
fn threads(root: &Root, pid: u32) -> Result<usize, FileError> {
    let folder = format!("proc/{pid}/task");
    let names = root.list(&folder)?;
    // The first thread may be named anything, `jumbo-app` too.
    let others = names.iter().filter(|thread| **thread != pid.to_string());
    Ok(others
        .filter(|thread| {
            // A thread that ends meanwhile is none.
            root.read(format!("{folder}/{thread}/comm"))
                .is_ok_and(|name| name.starts_with(THREADS))
        })
        .count())
}

/// The eight bytes at `offset`, as this machine orders them; 0 where there are none.
fn word(bytes: &[u8], offset: usize) -> u64 {
    let word = bytes.get(offset..).and_then(<[u8]>::first_chunk);
    word.map_or(0, |word| u64::from_ne_bytes(*word))
}

/// The four bytes at `offset`.
fn half(bytes: &[u8], offset: usize) -> u32 {
    let half = bytes.get(offset..).and_then(<[u8]>::first_chunk);
    half.map_or(0, |half| u32::from_ne_bytes(*half))
}
