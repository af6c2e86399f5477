//! The measured program: it allocates, follows pointers and frees, and reports the times.

use std::hint::black_box;
use std::panic::resume_unwind;
use std::thread;
use std::time::Instant;

use fastrand::Rng;
use jumbo::units::Bytes;

use super::plan::LoadPlan;
use super::ring::{Object, Ring};
use crate::Error;
use crate::figures::{Figures, ms, with};
use crate::memory::own_memory;
use crate::stats::median;

/// Seed of all random choices: the same for all processes.
const SEED: u64 = 0x6a75_6d62;

/// Sum of all times of [`load`].
pub(crate) const TOTAL_MS: &str = "alloc_ms+chase_ms+free_ms";

pub(crate) fn load(size: Bytes) -> Result<Figures, Error> {
    let mut rng = Rng::with_seed(SEED);
    let plan = LoadPlan::new(size, &mut rng);
    let mut objects = Vec::with_capacity(plan.sizes.len());

    let clock = Instant::now();
    for &size in &plan.sizes {
        objects.push(object(size)?);
    }
    let alloc = clock.elapsed();

    let clock = Instant::now();
    let ring = Ring::link(&mut objects, &plan.stops)
        .ok_or_else(|| Error::Corrupt("malloc returned an unaligned pointer".to_owned()))?;
    let sum = ring.chase(plan.stops.len());
    let chase = clock.elapsed();
    let expected = (0..plan.stops.len() as u64).sum::<u64>();
    if sum != Some(expected) {
        return Err(Error::Corrupt(format!(
            "the tags of the objects sum up to {sum:?} instead of {expected}"
        )));
    }

    // Nothing has been freed yet.
    let peak = own_memory()?;
    rng.shuffle(&mut objects);
    let clock = Instant::now();
    drop(objects);
    let free = clock.elapsed();
    let figures = [
        ("alloc_ms", ms(alloc)),
        ("chase_ms", ms(chase)),
        ("free_ms", ms(free)),
    ];
    Ok(with(peak, figures))
}

pub(crate) fn small_free() -> Result<Figures, Error> {
    // They fit any cache and TLB: the cost of the call remains, without the gain of huge pages.
    const OBJECTS: usize = 400;
    const BATCHES: usize = 2_000;
    let mut nanos = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        let objects = (0..OBJECTS).map(|_| object(64));
        let objects = objects.collect::<Result<Vec<_>, _>>()?;
        let clock = Instant::now();
        for object in objects {
            drop(object);
        }
        nanos.push(ms(clock.elapsed()) * 1e6 / OBJECTS as f64);
    }
    // The first batches grow the heap and warm the caches.
    nanos.drain(..BATCHES / 10);
    Ok(with(own_memory()?, [("free_ns", median(&nanos))]))
}

/// Blocks of a server's buffers, which come and go in turn: their pages stay resident.
pub(crate) fn large_pairs() -> Result<Figures, Error> {
    const BLOCKS: usize = 8;
    const BYTES: usize = 200 << 10;
    const PAIRS: usize = 1_000;
    const BATCHES: usize = 200;
    let pairs = || {
        let mut blocks: [Vec<u8>; BLOCKS] = Default::default();
        let batch = |_| {
            let clock = Instant::now();
            for pair in 0..PAIRS {
                let block = &mut blocks[pair % BLOCKS];
                *block = Vec::new();
                *block = Vec::with_capacity(BYTES + pair % 5 * 4096);
                block.push(1);
                black_box(&mut *block);
            }
            ms(clock.elapsed()) * 1e6 / PAIRS as f64
        };
        (0..BATCHES).map(batch).collect::<Vec<_>>()
    };
    let mut nanos = thread::scope(|scope| scope.spawn(pairs).join())
        .unwrap_or_else(|panic| resume_unwind(panic));
    nanos.drain(..BATCHES / 10);
    Ok(with(own_memory()?, [("pair_ns", median(&nanos))]))
}

/// Allocates an object and writes to each byte of it.
fn object(size: u32) -> Result<Object, Error> {
    let mut bytes = Vec::new();
    let reserved = bytes.try_reserve_exact(size as usize);
    reserved.map_err(|_| Error::Malloc(Bytes(size.into())))?;
    bytes.resize(size as usize, 0x5a);
    Ok(black_box(bytes.into_boxed_slice()))
}
