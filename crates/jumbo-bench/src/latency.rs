//! `jumbo bench latency`: the time of the first touch of an allocation, median and tail.
//!
//! A process allocates blocks of 1 MiB, touches all base pages of each, and keeps them. Each block
//! is timed. The host is measured as found, and with fragmented free memory: there a huge page
//! needs compaction, for which the program may wait.
//!
//! The fragmenter is a process that stays while samples are taken. It fills free memory with base
//! pages, and frees all but a few of each huge-page-sized block. The kept pages are movable, as in
//! most programs. It also occupies most blocks that are still free as a whole. It repeats this
//! before each sample, because the previous sample left huge pages behind; this also warms the
//! memory for the sample.
//!
//! In a virtual machine whole free blocks would measure something else: the hypervisor takes them
//! back (free page reporting, Linux 5.7), and the first touch waits for new memory.
//!
//! Only plain claims a share of huge pages (none): on other sides the share is a result.

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
use crate::json_child::{JsonChild, send};
use crate::keeper::PAGE_2M;
use crate::launch::Launch;
use crate::memory::{RawBlock, available, check_available, footprint, own_memory};
use crate::stats::quantile;
use crate::table::Table;
use crate::task::{AllocCall, Task};
use crate::work::Worker;
use crate::{Error, Settings};

/// Minimum size: 1 % of all blocks must be at least one.
pub const MIN_SIZE: Bytes = Bytes(128 << 20);

const BLOCK_BYTES: Bytes = Bytes(1 << 20);

/// Times of a sample: percentiles and the maximum.
const FIGURES: [&str; 4] = ["p50_us", "p99_us", "p999_us", "max_us"];

/// Share of free memory in huge-page-sized blocks at the start of a sample, in percent.
const FREE_WHOLE: &str = "free_whole_percent";

/// Maximum of fragmented memory: without and with `--quick`, and in percent of what is available.
const MAX_FRAGMENTED: [Bytes; 2] = [Bytes(12 << 30), Bytes(2 << 30)];
const MAX_FRAGMENTED_PERCENT: u64 = 60;

/// One base page per so many bytes of a huge page stays allocated.
const HUGE_PAGE: usize = 2 << 20;
const KEPT_PAGE_DISTANCE: usize = HUGE_PAGE / 4;
/// Memory that stays free in whole blocks.
const MAX_WHOLE_BYTES: usize = 64 << 20;

/// Measures the table, with `size` bytes in total; with less fragmented memory if `quick` is set.
pub fn measure(settings: &Settings, size: Bytes, quick: bool) -> Result<Table, Error> {
    check_available(footprint(size))?;
    let share = Bytes(available()?.0 / 100 * MAX_FRAGMENTED_PERCENT);
    let pieces = MAX_FRAGMENTED[usize::from(quick)].min(share);
    let what = format!("{size} in blocks of {BLOCK_BYTES}; {pieces} in pieces");
    let table = Table::new("latency", what, settings)?;
    let groups = [None, Some(pieces)].map(|pieces| group_of(settings, size, pieces));
    group::measure(settings, table, groups.into())
}

/// Rows on the host as found, or with `pieces` bytes fragmented.
fn group_of(settings: &Settings, size: Bytes, pieces: Option<Bytes>) -> Group<'_> {
    let (suffix, host) = match pieces {
        None => ("", "host as found"),
        Some(_) => ("_fragmented", "memory in pieces"),
    };
    let mut group = Group::new(settings, host);
    // The other rows do not depend on it.
    group.optional = Error::is_of_host;
    // Compaction takes system time, too.
    group.is_even = pieces.is_none();
    let fragmenter = Rc::new(RefCell::new(None));
    let mut side = |launch: Launch| {
        let claims = match launch {
            Launch::Plain => claim::no_huge(),
            _ => Vec::new(),
        };
        let (name, worker) = (launch.name(), Worker::new(launch, Task::Latency(size)));
        let fragmenter = Rc::clone(&fragmenter);
        let prepare = move || match pieces {
            None => Ok(size),
            Some(pieces) => fragment(settings, pieces, &fragmenter).map(|()| Bytes(0)),
        };
        group.prepared(name, prepare, move || worker.sample(settings, &claims))
    };
    let plain = side(Launch::Plain);
    let others = [("jumbo", Launch::JUMBO), ("unbounded", Launch::at_once(""))];
    let others = others.map(|(key, launch)| (key, side(launch)));
    for figure in FIGURES {
        let part = figure.trim_end_matches("_us");
        let measure = &format!("first touch of {BLOCK_BYTES}, {part}, {host}");
        rows! { group; format!("{part}{suffix}_aa") => measure, figure, plain / plain; }
        for (key, side) in others {
            rows! { group; format!("{key}_{part}{suffix}") => measure, figure, plain / side; }
        }
    }
    for (key, side) in [("plain", plain)].into_iter().chain(others) {
        for figure in ["huge_percent", FREE_WHOLE] {
            group.value(format!("{key}_{figure}{suffix}"), figure, side);
        }
    }
    group
}

/// Makes the fragmenter fragment free memory, and starts it at first.
fn fragment(
    settings: &Settings,
    size: Bytes,
    fragmenter: &RefCell<Option<JsonChild>>,
) -> Result<(), Error> {
    let mut fragmenter = fragmenter.borrow_mut();
    let child = match &mut *fragmenter {
        Some(child) => child,
        none => {
            check_available(footprint(size))?;
            let worker = Worker::new(Launch::Plain, Task::Fragment(size));
            none.insert(worker.start(settings, Stdio::piped())?)
        }
    };
    child.send(&())?;
    child.receive()
}

/// [`Task::Fragment`]: fragments `size` bytes of free memory at each line of input.
pub(crate) fn run_fragmenter(size: Bytes) -> Result<(), Error> {
    let root = Root::host();
    let (page, mut block) = (
        rustix::param::page_size(),
        RawBlock::take(AllocCall::Map, size)?,
    );
    block.advise(libc::MADV_NOHUGEPAGE)?;
    let mut held = None;
    for line in io::stdin().lines() {
        line?;
        held.take().map_or(Ok(()), RawBlock::give_back)?;
        let length = block.bytes().len();
        // Compaction moved the kept pages together.
        block.let_go(0..length)?;
        block.touch_by_two();
        for kept in (0..length).step_by(KEPT_PAGE_DISTANCE) {
            block.let_go((kept + page).min(length)..(kept + KEPT_PAGE_DISTANCE).min(length))?;
        }
        // If more is free than was fragmented, the host is too large to fragment.
        let whole = Bytes(free(&root)?[1].0.clamp(HUGE_PAGE as u64, size.0));
        let mut rest = RawBlock::take(AllocCall::MapHuge, whole)?;
        rest.touch();
        // Touched, so that a hypervisor has the memory of the blocks that stay free.
        let length = rest.bytes().len();
        rest.let_go(0..MAX_WHOLE_BYTES.min(length))?;
        held = Some(rest);
        send(&())?;
    }
    Ok(())
}

/// Free memory of the host, and the part of it in huge-page-sized blocks.
fn free(root: &Root) -> Result<[Bytes; 2], FileError> {
    let (zones, base) = (Zone::read_all(root)?, base_page(root));
    let whole = |zone: &Zone| Some(zone.whole(PAGE_2M, base)?.bytes(PAGE_2M));
    let all = zones.iter().map(|zone| zone.free(base)).sum();
    Ok([all, zones.iter().filter_map(whole).sum()])
}

fn whole_percent(root: &Root) -> Result<f64, FileError> {
    let [all, whole] = free(root)?;
    Ok(100.0 * whole.0 as f64 / all.0.max(1) as f64)
}

/// [`Task::Latency`]: quantiles over all blocks, and the memory of the process.
pub(crate) fn latency(size: Bytes) -> Result<Figures, Error> {
    let whole = whole_percent(&Root::host())?;
    let count = usize::try_from(size.0 / BLOCK_BYTES.0).unwrap_or(usize::MAX);
    let (mut blocks, mut times) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for _ in 0..count {
        let clock = Instant::now();
        let mut block = RawBlock::take(AllocCall::Malloc, BLOCK_BYTES)?;
        block.touch();
        times.push(ms(clock.elapsed()) * 1e3);
        blocks.push(block);
    }
    let memory = with(own_memory()?, [(FREE_WHOLE, whole)]);
    blocks.into_iter().try_for_each(RawBlock::give_back)?;
    let parts = [0.5, 0.99, 0.999, 1.0].map(|part| quantile(&times, part));
    let figures = FIGURES.into_iter().zip(parts);
    let figures = figures.map(|(figure, time)| (figure.to_owned(), time));
    Ok(memory.into_iter().chain(figures).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_free_blocks_are_counted() {
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
