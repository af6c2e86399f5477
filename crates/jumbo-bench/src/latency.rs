//! `jumbo bench latency`: how long the first touch of an allocation takes, in the median and at its worst.
//!
//! A process allocates blocks of 1 MiB and touches all base pages of each. Each block is timed by itself, and kept. On a
//! host as it is found, and on one whose free memory is in pieces: where a huge page has to be made by compaction, the
//! program that wants it may wait.
//!
//! The pieces are made by a process that stays while samples are taken. It fills free memory with base pages, and
//! frees all but a few of each block that could be a huge page. They can be moved, as those of most programs can. The
//! blocks that are free as a whole in spite of that it keeps, but for a few. Before each sample it does so anew, because
//! the sample before left huge pages behind; that is also what touches the memory before the sample.
//!
//! In a virtual machine the whole blocks would measure something else: a hypervisor takes them back while they are free
//! (free page reporting, Linux 5.7), and a first touch waits until it has found memory anew.
//!
//! No side but plain claims a share of huge pages: the share is a result.

use std::cell::RefCell;
use std::io;
use std::process::Stdio;
use std::rc::Rc;
use std::time::Instant;

use jumbo::units::Bytes;
use jumbo_host::kernel::memory::Zone;
use jumbo_host::kernel::{FileError, Root, base_page};

use crate::claim;
use crate::figures::{Figures, ms, with};
use crate::group::{self, Group, rows};
use crate::keeper::SIZE;
use crate::launch::Launch;
use crate::memory::{Block, available, footprint, had, room};
use crate::stats::quantile;
use crate::table::Table;
use crate::talk::{Talk, say};
use crate::task::{By, Task};
use crate::work::Worker;
use crate::{Error, Settings};

/// The least size: a hundredth of all blocks is one at least.
pub const MIN_SIZE: Bytes = Bytes(128 << 20);

/// The size of an allocation.
const BLOCK: Bytes = Bytes(1 << 20);

/// The figures of a sample, by what stands in the names of rows.
const FIGURES: [(&str, &str); 4] = [
    ("p50", "p50_us"),
    ("p99", "p99_us"),
    ("p999", "p999_us"),
    ("max", "max_us"),
];

/// The part of free memory that is in blocks as large as a huge page when a sample begins, in percent.
const WHOLE: &str = "free_whole_percent";

/// How much of free memory is to be in pieces, at most: so many bytes, with `--quick` too, and so many percent.
const PIECES: [Bytes; 2] = [Bytes(12 << 30), Bytes(2 << 30)];
const PERCENT: u64 = 60;

/// Of each block of so many bytes one base page is kept for each of so many.
const HUGE: usize = 2 << 20;
const KEPT: usize = HUGE / 4;
/// Memory that stays free in whole blocks.
const WHOLE_LEFT: Bytes = Bytes(64 << 20);

/// Measures the table, with `size` bytes in all; with less memory in pieces where `quick` is set.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, size: Bytes, quick: bool) -> Result<Table, Error> {
    let root = Root::host();
    room(&root, footprint(size))?;
    let share = Bytes(available(&root)?.0 / 100 * PERCENT);
    let pieces = PIECES[usize::from(quick)].min(share);
    let what = format!("{size} in blocks of {BLOCK}; {pieces} in pieces");
    let table = Table::new("latency", what, settings)?;
    let groups = [None, Some(pieces)].map(|pieces| group_of(settings, size, pieces));
    group::measure(settings, table, groups.into())
}

/// Rows on the host as found, or with so many bytes in pieces.
fn group_of(settings: &Settings, size: Bytes, pieces: Option<Bytes>) -> Group<'_> {
    let (suffix, host) = match pieces {
        None => ("", "host as found"),
        Some(_) => ("_fragmented", "memory in pieces"),
    };
    let mut group = Group::new(settings, host);
    // What is not to be had here leaves the other rows as true as they are.
    group.optional = Error::is_of_host;
    // Compaction takes system time as well as the host does.
    group.is_even = pieces.is_none();
    let breaker = Rc::new(RefCell::new(None));
    let mut side = |launch: Launch| {
        let claims = match launch {
            Launch::Plain => claim::no_huge(),
            _ => Vec::new(),
        };
        let (name, worker) = (launch.name(), Worker::new(launch, Task::Latency(size)));
        let breaker = Rc::clone(&breaker);
        let prepare = move || match pieces {
            None => Ok(size),
            Some(pieces) => broken(settings, pieces, &breaker).map(|()| Bytes(0)),
        };
        group.prepared(name, prepare, move || worker.sample(settings, &claims))
    };
    let plain = side(Launch::Plain);
    let others = [
        ("tunable", Launch::Tunable),
        ("jumbo", Launch::JUMBO),
        ("unbounded", Launch::at_once("")),
    ];
    let others = others.map(|(key, launch)| (key, side(launch)));
    for (part, figure) in FIGURES {
        let measure = &format!("first touch of {BLOCK}, {part}, {host}");
        rows! { group; format!("{part}{suffix}_aa") => measure, figure, plain / plain; }
        for (key, side) in others {
            rows! { group; format!("{key}_{part}{suffix}") => measure, figure, plain / side; }
        }
    }
    for (key, side) in [("plain", plain)].into_iter().chain(others) {
        for figure in ["huge_percent", WHOLE] {
            group.value(format!("{key}_{figure}{suffix}"), figure, side);
        }
    }
    group
}

/// Has the free memory in pieces.
fn broken(settings: &Settings, size: Bytes, breaker: &RefCell<Option<Talk>>) -> Result<(), Error> {
    let mut breaker = breaker.borrow_mut();
    let talk = match &mut *breaker {
        Some(talk) => talk,
        none => {
            room(&Root::host(), footprint(size))?;
            let worker = Worker::new(Launch::Plain, Task::Break(size));
            none.insert(worker.start(settings, Stdio::piped())?)
        }
    };
    talk.say(&())?;
    talk.hear()
}

/// [`Task::Break`]: at each line of the standard input it breaks free memory of `size` bytes anew, and answers.
pub(crate) fn break_up(size: Bytes) -> Result<(), Error> {
    let root = Root::host();
    let (page, mut block) = (rustix::param::page_size(), Block::take(By::Map, size)?);
    block.advise(libc::MADV_NOHUGEPAGE)?;
    let mut held = None;
    for line in io::stdin().lines() {
        line?;
        held.take().map_or(Ok(()), Block::give_back)?;
        let length = block.bytes().len();
        // Those that were kept lie together by now, where compaction moved them.
        block.let_go(0..length)?;
        block.touch_by_two();
        for kept in (0..length).step_by(KEPT) {
            block.let_go((kept + page).min(length)..(kept + KEPT).min(length))?;
        }
        // Where that is more than was broken, the host is too large to be in pieces.
        let whole = free(&root)?[1].0.saturating_sub(WHOLE_LEFT.0);
        let mut rest = Block::take(By::MapHuge, Bytes(whole.clamp(HUGE as u64, size.0)))?;
        rest.touch();
        held = Some(rest);
        say(&())?;
    }
    Ok(())
}

/// Free memory of the host, and that in blocks as large as a huge page.
fn free(root: &Root) -> Result<[Bytes; 2], FileError> {
    let (zones, base) = (Zone::read_all(root)?, base_page(root));
    let whole = |zone: &Zone| Some(zone.whole(SIZE, base)?.bytes(SIZE));
    let all = zones.iter().map(|zone| zone.free(base)).sum();
    Ok([all, zones.iter().filter_map(whole).sum()])
}

/// The figure [`WHOLE`].
fn whole_percent(root: &Root) -> Result<f64, FileError> {
    let [all, whole] = free(root)?;
    Ok(100.0 * whole.0 as f64 / all.0.max(1) as f64)
}

/// [`Task::Latency`]: quantiles over all blocks, and the memory of the process with all of them.
pub(crate) fn latency(size: Bytes) -> Result<Figures, Error> {
    let root = Root::host();
    let whole = whole_percent(&root)?;
    let count = usize::try_from(size.0 / BLOCK.0).unwrap_or(usize::MAX);
    let (mut blocks, mut times) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for _ in 0..count {
        let clock = Instant::now();
        let mut block = Block::take(By::Malloc, BLOCK)?;
        block.touch();
        times.push(ms(clock.elapsed()) * 1e3);
        blocks.push(block);
    }
    let had = with(had(&root)?, [(WHOLE, whole)]);
    blocks.into_iter().try_for_each(Block::give_back)?;
    let parts = [0.5, 0.99, 0.999, 1.0].map(|part| quantile(&times, part));
    let figures = FIGURES.map(|(_, figure)| figure).into_iter().zip(parts);
    let figures = figures.map(|(figure, time)| (figure.to_owned(), time));
    Ok(had.into_iter().chain(figures).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_in_whole_blocks_is_told_from_pieces() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        let zones = "Node 0, zone      DMA   512 0 0 0 0 0 0 0 0 1 0\n\
                     Node 0, zone   Normal     0 256 0 0 0 0 0 0 0 0 1\n";
        std::fs::write(folder.path().join("proc/buddyinfo"), zones).unwrap();
        assert_eq!(whole_percent(&Root::at(folder.path())).unwrap(), 60.0);
        let host = whole_percent(&Root::host()).unwrap();
        assert!((0.0..=100.0).contains(&host));
    }
}
