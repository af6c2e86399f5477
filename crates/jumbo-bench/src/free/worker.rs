//! The programs that are measured: they take memory, give it back, and say how long that took and who did it.
//!
//! Who freed is read from the counters that the preload library shows to every process that may look into this one.

use std::time::{Duration, Instant};

use jumbo::gather::{Gather, Tunables};
use jumbo::kernel::Root;
use jumbo::status::{Covered, Freeing};
use jumbo::units::{Bytes, Pages};

use crate::Error;
use crate::memory::{Block, Mapping, Memory, Watch, base_pages_only};
use crate::stats::median;
use crate::worker::{Sample, ms};

/// For how long after a call that returns at once its work may still be counted.
const FREED_WITHIN: Duration = Duration::from_secs(5);

/// Allocates `size` bytes, touches them in base pages, and frees them; where `back` is set it waits until the
/// memory is free again.
pub(crate) fn release(size: Bytes, back: bool) -> Result<Sample, Error> {
    base_pages_only()?;
    let root = Root::host();
    let mut block = Block::allocate(size).ok_or(Error::Malloc(size))?;
    block.touch();
    let watch = back.then(|| Watch::new(&root, size)).transpose()?;
    let memory = Memory::read_of(&root, &block.addresses())?;

    let clock = Instant::now();
    drop(block);
    let call = clock.elapsed();
    let back = match watch.map(|watch| watch.wait(clock)).transpose() {
        // Another program took it: that is no failure of this process, and the sample is worth another try.
        Err(Error::NotBack(_)) => None,
        back => back?,
    };
    let mut sample = Sample::new([("call_ms", ms(call))], memory);
    if let Some(back) = back {
        sample.figures.insert("back_ms".to_owned(), ms(back));
    }
    sample.freed = when_freed(&root)?;
    Ok(sample)
}

/// Maps each of `sizes`, in huge pages or in base pages, touches and unmaps it, so many times. Says how long it takes to
/// unmap one of each, and what all of the mappings had.
pub(crate) fn unmap(sizes: &[Bytes], huge: bool, times: usize) -> Result<Sample, Error> {
    let map = if huge { Mapping::huge } else { Mapping::new };
    if !huge {
        base_pages_only()?;
    }
    let root = Root::host();
    let (mut had, mut unmap_us) = (Vec::new(), 0.0);
    for &size in sizes {
        let mut unmaps = Vec::with_capacity(times);
        for _ in 0..times {
            let mut mapping = map(size).map_err(Error::Map)?;
            mapping.touch();
            had.push(Memory::read_of(&root, &mapping.addresses())?);
            let clock = Instant::now();
            mapping.unmap().map_err(Error::Map)?;
            unmaps.push(ms(clock.elapsed()) * 1e3);
        }
        unmap_us += median(&unmaps);
    }
    Ok(Sample::new([("unmap_us", unmap_us)], Memory::sum(had)))
}

/// Allocates `count` blocks of `size` bytes, touches them, and frees one after the other. It is an ordinary program: on what
/// pages they are is the host's business.
pub(crate) fn blocks(size: Bytes, count: usize) -> Result<Sample, Error> {
    let root = Root::host();
    let blocks = (0..count).map(|_| Block::allocate(size).ok_or(Error::Malloc(size)));
    let mut blocks = blocks.collect::<Result<Vec<_>, _>>()?;
    blocks.iter_mut().for_each(Block::touch);
    let had = blocks
        .iter()
        .map(|block| Memory::read_of(&root, &block.addresses()));
    let had = had.collect::<Result<Vec<_>, _>>()?;
    let clock = Instant::now();
    blocks.into_iter().for_each(drop);
    let mut sample = Sample::new([("call_ms", ms(clock.elapsed()))], Memory::sum(had));
    sample.freed = when_freed(&root)?;
    Ok(sample)
}

/// Maps `count` ranges of `size` bytes, apart from each other and in base pages, touches them and gives them back: by `munmap`,
/// or by a gather that hands over so many base pages at a time.
pub(crate) fn ranges(size: Bytes, count: usize, flush: Option<u64>) -> Result<Sample, Error> {
    base_pages_only()?;
    let root = Root::host();
    let ranges = (0..count).map(|_| Mapping::apart(size).map_err(Error::Map));
    let mut ranges = ranges.collect::<Result<Vec<_>, _>>()?;
    ranges.iter_mut().for_each(Mapping::touch);
    let memory = Memory::read(&root)?;
    let clock = Instant::now();
    match flush {
        None => {
            for range in ranges {
                range.unmap().map_err(Error::Map)?;
            }
        }
        Some(pages) => {
            let mut gather = Gather::new(Tunables {
                flush_pages: Pages(pages),
                ..Tunables::default()
            });
            for range in ranges {
                let added = range.add_to(&mut gather);
                added.map_err(|error| Error::Map(error.errno.into()))?;
            }
            let finished = gather.finish();
            finished.map_err(|error| Error::Map(error.errno.into()))?;
        }
    }
    Ok(Sample::new([("call_ms", ms(clock.elapsed()))], memory))
}

/// What was counted, when nothing is left to be counted.
fn when_freed(root: &Root) -> Result<Option<Freeing>, Error> {
    let clock = Instant::now();
    loop {
        let covered = Covered::read(root, std::process::id())?;
        let freed = covered.map(|covered| covered.free);
        let pending = freed.map_or(Bytes(0), |freed| freed.pending);
        if pending == Bytes(0) || clock.elapsed() > FREED_WITHIN {
            return Ok(freed);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_ranges_are_freed_and_timed() {
        let size = Bytes(4 << 20);
        let sample = blocks(size, 3).unwrap();
        assert!(sample.figures["call_ms"] > 0.0 && sample.memory.resident >= Bytes(12 << 20));
        for flush in [None, Some(1), Some(1 << 20)] {
            let sample = ranges(size, 3, flush).unwrap();
            assert!(sample.figures["call_ms"] > 0.0 && sample.memory.resident >= Bytes(12 << 20));
        }
    }

    #[test]
    fn mappings_are_unmapped_and_timed() {
        let sizes = [Bytes(1 << 20), Bytes(4 << 20)];
        let sample = unmap(&sizes, false, 2).unwrap();
        assert!(sample.figures["unmap_us"] > 0.0 && !sample.memory.preloaded);
        assert!(sample.memory.resident >= Bytes(10 << 20), "{sample:?}");
        // Where it is refused there is no THP.
        if let Ok(sample) = unmap(&sizes, true, 2) {
            assert!(sample.figures["unmap_us"] > 0.0);
        }
    }
}
