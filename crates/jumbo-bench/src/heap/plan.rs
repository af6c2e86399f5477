//! [`LoadPlan`]: objects that the worker allocates, and the order in which it visits them.
//!
//! The plan is made before the measurement from one seed, so that every process does the same work.

use fastrand::Rng;
use jumbo::units::Bytes;

/// Sizes of half of the bytes, uniformly distributed: trees, strings, nodes.
const SMALL_OBJECT_BYTES: std::ops::RangeInclusive<u32> = 16..=1024;

/// Sizes of the other half, log-uniformly distributed, from glibc's mmap threshold on.
const LARGE_OBJECT_BYTES: std::ops::RangeInclusive<u32> = 128 << 10..=16 << 20;

/// Distance of the stops in a large object: one per base page.
const STOP_DISTANCE: u32 = 4096;

/// Size and alignment of a stop; `malloc` aligns to 16 anyway.
pub(super) const STOP_BYTES: u32 = 16;

pub(super) struct LoadPlan {
    /// Sizes of the objects, in the order of their allocation.
    pub(super) sizes: Vec<u32>,
    /// Stops, in the order of the visit: random over all objects.
    pub(super) stops: Vec<ChaseStop>,
}

/// A visited place: [`STOP_BYTES`] bytes at `offset` of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChaseStop {
    pub(super) object: u32,
    pub(super) offset: u32,
}

impl LoadPlan {
    pub(super) fn new(total: Bytes, rng: &mut Rng) -> Self {
        let half = total.0 / 2;
        let mut sizes = fill(half, || rng.u32(SMALL_OBJECT_BYTES));
        sizes.extend(fill(half, || log_uniform(rng)));
        rng.shuffle(&mut sizes);

        let mut stops = Vec::new();
        for (object, &size) in (0..).zip(&sizes) {
            for page in (0..size).step_by(STOP_DISTANCE as usize) {
                // A random place in the page: page starts would share a few cache sets.
                let room = (size - page).min(STOP_DISTANCE) / STOP_BYTES;
                if room > 0 {
                    let offset = page + rng.u32(0..room) * STOP_BYTES;
                    stops.push(ChaseStop { object, offset });
                }
            }
        }
        rng.shuffle(&mut stops);
        Self { sizes, stops }
    }
}

/// Draws sizes up to a sum of `total`; leaves out the last one that does not fit.
fn fill(total: u64, mut draw: impl FnMut() -> u32) -> Vec<u32> {
    let mut left = total;
    std::iter::from_fn(|| {
        let size = draw();
        left = left.checked_sub(u64::from(size))?;
        Some(size)
    })
    .collect()
}

/// Draws a log-uniformly distributed size of [`LARGE_OBJECT_BYTES`].
fn log_uniform(rng: &mut Rng) -> u32 {
    let doublings = LARGE_OBJECT_BYTES.end().ilog2() - LARGE_OBJECT_BYTES.start().ilog2();
    let start = LARGE_OBJECT_BYTES.start() << rng.u32(0..doublings);
    rng.u32(start..=start * 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_the_bytes_are_small_and_every_page_is_visited_once() {
        let total = Bytes(64 << 20);
        let plan = LoadPlan::new(total, &mut Rng::with_seed(1));
        let sum = |large: bool| -> u64 {
            let sizes = plan
                .sizes
                .iter()
                .filter(|&&size| (size >= *LARGE_OBJECT_BYTES.start()) == large);
            sizes.map(|&size| u64::from(size)).sum()
        };
        let half = total.0 / 2;
        assert!(half - 1024 < sum(false) && sum(false) <= half);
        assert!(half - (16 << 20) < sum(true) && sum(true) <= half);
        for &size in &plan.sizes {
            assert!(
                SMALL_OBJECT_BYTES.contains(&size) || LARGE_OBJECT_BYTES.contains(&size),
                "{size}"
            );
        }

        let mut stops = plan.stops.clone();
        assert!(!stops.is_sorted(), "the visit is in order of allocation");
        stops.sort_unstable();
        for pair in stops.windows(2) {
            let page = |stop: ChaseStop| (stop.object, stop.offset / STOP_DISTANCE);
            assert!(page(pair[0]) < page(pair[1]));
        }
        for stop in stops {
            assert!(stop.offset + STOP_BYTES <= plan.sizes[stop.object as usize]);
            assert_eq!(stop.offset % STOP_BYTES, 0);
        }
    }
}
