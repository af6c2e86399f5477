//! The program that is measured: it allocates, follows pointers and frees, and prints how long that took.
//!
//! It is the `jumbo` executable itself, started afresh: an ordinary, dynamically linked program whose only
//! allocator is the `malloc` that it finds at run time. Nothing in it knows of jumbo's heap.

use std::time::Instant;

use fastrand::Rng;
use jumbo::kernel::Root;
use jumbo::units::Bytes;
use serde::{Deserialize, Serialize};

use super::plan::Plan;
use super::raw::{Objects, time_frees};
use crate::Error;
use crate::memory::Memory;
use crate::stats::median;

/// Of everything random in the workload; any number serves, as long as it is the same for all.
const SEED: u64 = 0x6a75_6d62;

/// What one run of [`load`] took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LoadSample {
    /// Allocating all objects and writing each byte of them.
    pub alloc_ms: f64,
    /// Linking them in random order, and following the links.
    pub chase_ms: f64,
    /// Freeing them in another random order.
    pub free_ms: f64,
    /// What the process had when all objects were there.
    pub memory: Memory,
}

/// What one run of [`small_free`] took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct FreeSample {
    /// Freeing one small object.
    pub free_ns: f64,
    /// What the process had.
    pub memory: Memory,
}

impl LoadSample {
    /// All phases.
    pub fn total_ms(&self) -> f64 {
        self.alloc_ms + self.chase_ms + self.free_ms
    }
}

/// Allocates objects of `size` bytes in all, follows pointers through them, and frees them.
///
/// # Errors
/// [`Error::Malloc`], [`Error::Corrupt`], [`Error::File`].
pub fn load(size: Bytes) -> Result<LoadSample, Error> {
    let mut rng = Rng::with_seed(SEED);
    let plan = Plan::new(size, &mut rng);
    let mut objects = Objects::new(&plan.sizes);

    let clock = Instant::now();
    objects.allocate().map_err(malloc_failed)?;
    let alloc_ms = elapsed_ms(clock);

    let clock = Instant::now();
    let ring = objects
        .link(&plan.stops)
        .ok_or_else(|| Error::Corrupt("malloc returned an unaligned pointer".to_owned()))?;
    let sum = ring.chase(plan.stops.len());
    let chase_ms = elapsed_ms(clock);
    let expected = (0..plan.stops.len() as u64).sum::<u64>();
    if sum != Some(expected) {
        return Err(Error::Corrupt(format!(
            "the tags of the objects sum up to {sum:?} and not to {expected}"
        )));
    }

    // Nothing has been freed yet: this is the peak.
    let memory = Memory::read(&Root::host())?;
    let doomed = objects.doom(&mut rng);
    let clock = Instant::now();
    doomed.free();
    let free_ms = elapsed_ms(clock);
    Ok(LoadSample {
        alloc_ms,
        chase_ms,
        free_ms,
        memory,
    })
}

/// Frees small objects, many times.
///
/// # Errors
/// [`Error::Malloc`], [`Error::File`].
pub fn small_free() -> Result<FreeSample, Error> {
    // So few that they fit the caches of any processor, its TLB too: the cost of the call is what is left, without
    // the gain from huge pages.
    const OBJECTS: usize = 400;
    const BATCHES: usize = 2_000;
    let times = time_frees(BATCHES, OBJECTS, 64).map_err(malloc_failed)?;
    // The first batches grow the heap and warm the caches.
    let nanos: Vec<f64> = times[BATCHES / 10..]
        .iter()
        .map(|time| time.as_secs_f64() * 1e9 / OBJECTS as f64)
        .collect();
    Ok(FreeSample {
        free_ns: median(&nanos),
        memory: Memory::read(&Root::host())?,
    })
}

fn elapsed_ms(clock: Instant) -> f64 {
    clock.elapsed().as_secs_f64() * 1e3
}

fn malloc_failed(size: u32) -> Error {
    Error::Malloc(Bytes(size.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_runs_and_holds_what_it_says() {
        let size = Bytes(32 << 20);
        let sample = load(size).unwrap();
        // The last object of each half that did not fit is left out.
        assert!(sample.memory.resident.0 >= size.0 / 2, "{sample:?}");
        assert!(sample.alloc_ms > 0.0 && sample.chase_ms > 0.0 && sample.free_ms > 0.0);
        assert!(!sample.memory.preloaded);
    }

    #[test]
    fn small_frees_are_timed() {
        assert!(small_free().unwrap().free_ns > 0.0);
    }
}
