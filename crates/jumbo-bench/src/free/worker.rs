//! The programs that are measured: they take memory, give it back, and say how long that took and who did it.
//!
//! Who freed is read from the counters that the preload library shows to every process that may look into this one.

use std::time::Instant;

use jumbo::gather::{Gather, Tunables};
use jumbo::units::{Bytes, Pages};
use jumbo_host::kernel::Root;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::figures::{Figures, ms, with};
use crate::memory::{Block, Mapping, Watch, base_pages_only, had, had_in};
use crate::stats::median;
use crate::work::{Work, shown};

/// Blocks: allocated, touched, and freed one after the other.
pub(crate) const BLOCKS: Work<Blocks> = Work::new("blocks", blocks);

/// Mappings of each size, in huge pages where that is set: touched and unmapped, so many times.
/// The time to unmap one of each, and what all of the mappings had.
pub(crate) const UNMAP: Work<(Vec<Bytes>, bool, usize)> = Work::new("unmap", unmap);

/// Ranges, so many of so many bytes, apart from each other and in base pages: touched and given
/// back, by `munmap` each, or by a `Gather` that hands over so many base pages at a time.
pub(crate) const RANGES: Work<(Bytes, usize, Option<u64>)> = Work::new("ranges", ranges);

/// Blocks, and how they are freed.
#[derive(Serialize, Deserialize)]
pub(crate) struct Blocks {
    pub(super) size: Bytes,
    pub(super) count: usize,
    /// On base pages, and not on the pages that the host gives an ordinary program.
    pub(super) base: bool,
    /// It is watched until the memory is free again.
    pub(super) back: bool,
}

fn blocks(told: Blocks) -> Result<Figures, Error> {
    if told.base {
        base_pages_only()?;
    }
    let root = Root::host();
    let blocks = (0..told.count).map(|_| Block::allocate(told.size));
    let mut blocks = blocks.collect::<Result<Vec<_>, _>>()?;
    blocks.iter_mut().for_each(Block::touch);
    let watch = Watch::new(&root, Bytes(told.size.0 * told.count as u64))?;
    let addresses: Vec<_> = blocks.iter().map(Block::addresses).collect();
    let had = had_in(&root, &addresses)?;

    let clock = Instant::now();
    drop(blocks);
    let mut figures = with(had, [("call_ms", ms(clock.elapsed()))]);
    if told.back {
        match watch.wait(clock) {
            Ok(back) => figures = with(figures, [("back_ms", ms(back))]),
            // Another program took it: that is no failure of this process, and the sample is worth another try.
            Err(Error::NotBack(_)) => {}
            Err(error) => return Err(error),
        }
    }
    // What was counted, when nothing is left to be counted.
    let freed = shown(&root, |covered| {
        (covered.free.pending == Bytes(0)).then_some(covered.free)
    })?;
    let Some(freed) = freed else {
        return Ok(figures);
    };
    let counted = [
        ("gathered_bytes", freed.gathered.0 as f64),
        ("background_bytes", freed.background.0 as f64),
        ("freeing_threads", freed.workers as f64),
    ];
    Ok(with(figures, counted))
}

fn unmap((sizes, huge, times): (Vec<Bytes>, bool, usize)) -> Result<Figures, Error> {
    let map = if huge { Mapping::huge } else { Mapping::new };
    if !huge {
        base_pages_only()?;
    }
    let root = Root::host();
    let (mut figures, mut unmap_us) = (Figures::new(), 0.0);
    for size in sizes {
        let mut unmaps = Vec::with_capacity(times);
        for _ in 0..times {
            let mut mapping = map(size)?;
            mapping.touch();
            for (name, had) in had_in(&root, &[mapping.addresses()])? {
                *figures.entry(name).or_default() += had;
            }
            let clock = Instant::now();
            mapping.unmap()?;
            unmaps.push(ms(clock.elapsed()) * 1e3);
        }
        unmap_us += median(&unmaps);
    }
    Ok(with(figures, [("unmap_us", unmap_us)]))
}

fn ranges((size, count, flush): (Bytes, usize, Option<u64>)) -> Result<Figures, Error> {
    base_pages_only()?;
    let ranges = (0..count).map(|_| Mapping::apart(size));
    let mut ranges = ranges.collect::<Result<Vec<_>, _>>()?;
    ranges.iter_mut().for_each(Mapping::touch);
    let had = had(&Root::host())?;
    let clock = Instant::now();
    match flush {
        None => ranges.into_iter().try_for_each(Mapping::unmap)?,
        Some(pages) => {
            let mut gather = Gather::new(Tunables {
                flush_pages: Pages(pages),
                ..Tunables::default()
            });
            let mut ranges = ranges.into_iter();
            ranges.try_for_each(|range| range.add_to(&mut gather))?;
            let finished = gather.finish();
            finished.map_err(|error| Error::Map(error.errno.into()))?;
        }
    }
    Ok(with(had, [("call_ms", ms(clock.elapsed()))]))
}
