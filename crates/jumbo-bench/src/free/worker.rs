//! The program that is measured: it takes memory, gives it back, and says how long that took and who did it.
//!
//! As in the heap's table it is the `jumbo` executable itself, in which nothing knows of jumbo's heap. Who freed
//! is read from the counters that the preload library shows to anybody who may look into the process.

use std::time::{Duration, Instant};

use jumbo::kernel::Root;
use jumbo::status::{Covered, Freeing};
use jumbo::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::memory::{Block, Mapping, Memory, Watch, base_pages_only};
use crate::stats::median;

/// What one run of [`free`] took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct FreeSample {
    /// From the call of `free` to its return.
    pub call_ms: f64,
    /// From the call until the memory was free; `None` where nobody asked, or it never was.
    pub back_ms: Option<f64>,
    /// What the block had before.
    pub memory: Memory,
    /// What the preload library counted; `None` where it is not in the process.
    pub freed: Option<Freeing>,
}

/// What one run of [`unmap_huge`] or [`unmap_small`] took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct UnmapSample {
    /// One `munmap`, or one of each size.
    pub unmap_us: f64,
    /// What the mapping had when it had least of it in huge pages.
    pub memory: Memory,
}

/// The sizes that [`unmap_small`] unmaps: what a program maps and unmaps all the time.
pub const SMALL: [Bytes; 7] = [
    Bytes(1 << 20),
    Bytes(2 << 20),
    Bytes(4 << 20),
    Bytes(8 << 20),
    Bytes(16 << 20),
    Bytes(32 << 20),
    Bytes(64 << 20),
];

/// For how long after a call that returns at once its work may still be counted.
const SETTLE: Duration = Duration::from_secs(5);

/// Allocates `size` bytes, touches them in base pages, and frees them; where `back` is set it waits until the
/// memory is free again.
///
/// # Errors
/// [`Error::BasePages`], [`Error::Malloc`], [`Error::File`].
pub fn free(size: Bytes, back: bool) -> Result<FreeSample, Error> {
    base_pages_only()?;
    let root = Root::host();
    let mut block = Block::allocate(size).ok_or(Error::Malloc(size))?;
    block.touch();
    let watch = back.then(|| Watch::new(&root, size)).transpose()?;
    let memory = Memory::read_of(&root, &block.addresses())?;

    let clock = Instant::now();
    block.free();
    let call = clock.elapsed();
    let back = match watch.map(|watch| watch.wait(clock)).transpose() {
        // Somebody else took it: that is no failure of this process, and the sample is worth another try.
        Err(Error::NotBack(_)) => None,
        back => back?,
    };

    let freed = settled(&root)?;
    Ok(FreeSample {
        call_ms: ms(call),
        back_ms: back.map(ms),
        memory,
        freed,
    })
}

/// Maps `size` bytes in huge pages, touches and unmaps them, so many times.
///
/// # Errors
/// [`Error::Map`], [`Error::File`].
pub fn unmap_huge(size: Bytes, times: usize) -> Result<UnmapSample, Error> {
    let root = Root::host();
    let mut least: Option<Memory> = None;
    let mut unmaps = Vec::with_capacity(times);
    for _ in 0..times {
        let mut mapping = Mapping::huge(size).map_err(Error::Map)?;
        mapping.touch();
        let memory = Memory::read_of(&root, &mapping.addresses())?;
        if least.is_none_or(|least| memory.huge < least.huge) {
            least = Some(memory);
        }
        unmaps.push(timed(mapping)?);
    }
    Ok(UnmapSample {
        unmap_us: median(&unmaps),
        memory: least.map_or_else(|| Memory::read(&root), Ok)?,
    })
}

/// Maps each of [`SMALL`] in base pages, touches and unmaps it, so many times.
///
/// # Errors
/// [`Error::BasePages`], [`Error::Map`], [`Error::File`].
pub fn unmap_small(times: usize) -> Result<UnmapSample, Error> {
    base_pages_only()?;
    let mut unmap_us = 0.0;
    for size in SMALL {
        let unmaps = (0..times).map(|_| {
            let mut mapping = Mapping::new(size).map_err(Error::Map)?;
            mapping.touch();
            timed(mapping)
        });
        unmap_us += median(&unmaps.collect::<Result<Vec<_>, Error>>()?);
    }
    // The largest once more: what it had is what they all had.
    let mut mapping = Mapping::new(SMALL[SMALL.len() - 1]).map_err(Error::Map)?;
    mapping.touch();
    let memory = Memory::read_of(&Root::host(), &mapping.addresses())?;
    Ok(UnmapSample { unmap_us, memory })
}

/// How long it takes to unmap.
fn timed(mapping: Mapping) -> Result<f64, Error> {
    let clock = Instant::now();
    let unmapped = mapping.unmap();
    let took = clock.elapsed().as_secs_f64() * 1e6;
    unmapped.map_err(Error::Map)?;
    Ok(took)
}

/// What was counted, when nothing is left to be counted.
fn settled(root: &Root) -> Result<Option<Freeing>, Error> {
    let clock = Instant::now();
    loop {
        let covered = Covered::read(root, std::process::id())?;
        let freed = covered.map(|covered| covered.free);
        let pending = freed.map_or(Bytes(0), |freed| freed.pending);
        if pending == Bytes(0) || clock.elapsed() > SETTLE {
            return Ok(freed);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_unmapped_and_timed() {
        let sample = unmap_small(1).unwrap();
        assert!(sample.unmap_us > 0.0 && !sample.memory.preloaded);
        assert!(sample.memory.resident >= SMALL[6], "{sample:?}");
        // Where it is refused there is no THP.
        if let Ok(sample) = unmap_huge(Bytes(4 << 20), 2) {
            assert!(sample.unmap_us > 0.0);
        }
    }
}
