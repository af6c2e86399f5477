//! The program that is measured: it allocates, follows pointers and frees, and says how long that took.

use std::hint::black_box;
use std::time::Instant;

use fastrand::Rng;
use jumbo::units::Bytes;
use jumbo_host::kernel::Root;

use super::plan::Plan;
use super::ring::{Object, Ring};
use crate::Error;
use crate::figures::{Figures, ms, with};
use crate::memory::had;
use crate::stats::median;

/// Of everything random in the workload; any number serves, as long as it is the same for all.
const SEED: u64 = 0x6a75_6d62;

/// All figures of [`load`], added.
pub(crate) const TOTAL: &str = "alloc_ms+chase_ms+free_ms";

/// [`Task::Load`](crate::task::Task::Load).
pub(crate) fn load(size: Bytes) -> Result<Figures, Error> {
    let mut rng = Rng::with_seed(SEED);
    let plan = Plan::new(size, &mut rng);
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
            "the tags of the objects sum up to {sum:?} and not to {expected}"
        )));
    }

    // Nothing has been freed yet: this is the peak.
    let had = had(&Root::host())?;
    rng.shuffle(&mut objects);
    let clock = Instant::now();
    drop(objects);
    let free = clock.elapsed();
    let figures = [
        ("alloc_ms", ms(alloc)),
        ("chase_ms", ms(chase)),
        ("free_ms", ms(free)),
    ];
    Ok(with(had, figures))
}

/// [`Task::SmallFree`](crate::task::Task::SmallFree).
pub(crate) fn small_free() -> Result<Figures, Error> {
    // So few that they fit the caches of any processor, its TLB too: the cost of the call is what is left, without
    // the gain from huge pages.
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
    Ok(with(had(&Root::host())?, [("free_ns", median(&nanos))]))
}

/// An allocation, each of its bytes written.
fn object(size: u32) -> Result<Object, Error> {
    let mut bytes = Vec::new();
    let had = bytes.try_reserve_exact(size as usize);
    had.map_err(|_| Error::Malloc(Bytes(size.into())))?;
    bytes.resize(size as usize, 0x5a);
    Ok(black_box(bytes.into_boxed_slice()))
}
