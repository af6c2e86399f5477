//! The programs that are measured: they take memory, give it back, and say how long that took and who did it.
//!
//! Who freed is read from the counters that the preload library shows to every process that may look into this one.

use std::time::Instant;

use jumbo::gather::{Gather, Tunables};
use jumbo::kernel::Root;
use jumbo::units::{Bytes, Pages};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::memory::{Block, Mapping, Watch, base_pages_only, had, had_in};
use crate::stats::median;
use crate::worker::{Figures, ms, shown, with};

/// How blocks are freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Freeing {
    /// By an ordinary program: on what pages they are is the host's business.
    AsFound,
    /// From base pages.
    Base,
    /// From base pages, and until the memory is free again.
    BaseAndBack,
}

/// Allocates `count` blocks of `size` bytes, touches them, and frees one after the other.
pub(crate) fn blocks(size: Bytes, count: usize, how: Freeing) -> Result<Figures, Error> {
    if how != Freeing::AsFound {
        base_pages_only()?;
    }
    let root = Root::host();
    let blocks = (0..count).map(|_| Block::allocate(size));
    let mut blocks = blocks.collect::<Result<Vec<_>, _>>()?;
    blocks.iter_mut().for_each(Block::touch);
    let watch = Watch::new(&root, Bytes(size.0 * count as u64))?;
    let addresses: Vec<_> = blocks.iter().map(Block::addresses).collect();
    let had = had_in(&root, &addresses)?;

    let clock = Instant::now();
    drop(blocks);
    let mut figures = with(had, [("call_ms", ms(clock.elapsed()))]);
    if how == Freeing::BaseAndBack {
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
    Ok(match freed {
        None => figures,
        Some(freed) => with(
            figures,
            [
                ("gathered_bytes", freed.gathered.0 as f64),
                ("background_bytes", freed.background.0 as f64),
                ("freeing_threads", freed.workers as f64),
            ],
        ),
    })
}

/// Maps each of `sizes`, in huge pages or in base pages, touches and unmaps it, so many times. Says how long it takes to
/// unmap one of each, and what all of the mappings had.
pub(crate) fn unmap(sizes: &[Bytes], huge: bool, times: usize) -> Result<Figures, Error> {
    let map = if huge { Mapping::huge } else { Mapping::new };
    if !huge {
        base_pages_only()?;
    }
    let root = Root::host();
    let (mut figures, mut unmap_us) = (Figures::new(), 0.0);
    for &size in sizes {
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

/// Maps `count` ranges of `size` bytes, apart from each other and in base pages, touches them and gives them back: by `munmap`,
/// or by a gather that hands over so many base pages at a time.
pub(crate) fn ranges(size: Bytes, count: usize, flush: Option<u64>) -> Result<Figures, Error> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_ranges_are_freed_and_timed() {
        let size = Bytes(4 << 20);
        let mut samples = vec![blocks(size, 3, Freeing::AsFound).unwrap()];
        samples.extend([None, Some(1), Some(1 << 20)].map(|flush| ranges(size, 3, flush).unwrap()));
        for figures in samples {
            assert!(figures["call_ms"] > 0.0, "{figures:?}");
            assert!(figures["resident_bytes"] >= f64::from(12 << 20));
        }
    }

    #[test]
    fn mappings_are_unmapped_and_timed() {
        let sizes = [Bytes(1 << 20), Bytes(4 << 20)];
        let figures = unmap(&sizes, false, 2).unwrap();
        assert!(figures["unmap_us"] > 0.0 && figures["preload_libraries"] == 0.0);
        assert!(
            figures["resident_bytes"] >= f64::from(10 << 20),
            "{figures:?}"
        );
        // Where it is refused there is no THP.
        if let Ok(figures) = unmap(&sizes, true, 2) {
            assert!(figures["unmap_us"] > 0.0);
        }
    }
}
