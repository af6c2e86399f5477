//! [`Plan`]: which objects the worker allocates, and in which order it visits them.
//!
//! It is made before any clock runs, and from one seed, so that every process does the same work.

use fastrand::Rng;
use jumbo::units::Bytes;

/// Half of the bytes are in objects of these sizes, all equally likely: what trees, strings and nodes take.
const SMALL: std::ops::RangeInclusive<u32> = 16..=1024;

/// The other half, each doubling of the size equally likely: buffers, tables, images. The lower bound is
/// glibc's threshold for a mapping of its own.
const LARGE: std::ops::RangeInclusive<u32> = 128 << 10..=16 << 20;

/// A large object is visited this often: once in each base page, since a program that has a buffer of
/// megabytes does not use its first bytes only.
const STRIDE: u32 = 4096;

/// The size and the alignment of a stop of the chase; `malloc` aligns to 16 anyway.
pub(super) const STOP: u32 = 16;

/// The plan of the worker.
pub(super) struct Plan {
    /// The sizes of the objects, in the order of their allocation.
    pub(super) sizes: Vec<u32>,
    /// The stops of the chase, in the order of the visit: random over all objects.
    pub(super) stops: Vec<Stop>,
}

/// A place that the chase comes through: [`STOP`] bytes at `offset` of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stop {
    pub(super) object: u32,
    pub(super) offset: u32,
}

impl Plan {
    /// The plan for objects of `total` bytes.
    pub(super) fn new(total: Bytes, rng: &mut Rng) -> Self {
        let half = total.0 / 2;
        let mut sizes = fill(half, || rng.u32(SMALL));
        sizes.extend(fill(half, || log_uniform(rng)));
        rng.shuffle(&mut sizes);

        let mut stops = Vec::new();
        for (object, &size) in (0..).zip(&sizes) {
            for page in (0..size).step_by(STRIDE as usize) {
                // Anywhere in the page: were it always the start, all stops would share a few cache sets.
                let room = (size - page).min(STRIDE) / STOP;
                if room > 0 {
                    let offset = page + rng.u32(0..room) * STOP;
                    stops.push(Stop { object, offset });
                }
            }
        }
        rng.shuffle(&mut stops);
        Self { sizes, stops }
    }
}

/// Sizes from `draw` until they come to `total`; the last one that does not fit is left out.
fn fill(total: u64, mut draw: impl FnMut() -> u32) -> Vec<u32> {
    let mut left = total;
    std::iter::from_fn(|| {
        let size = draw();
        left = left.checked_sub(u64::from(size))?;
        Some(size)
    })
    .collect()
}

/// A size of [`LARGE`], each doubling equally likely.
fn log_uniform(rng: &mut Rng) -> u32 {
    let doublings = LARGE.end().ilog2() - LARGE.start().ilog2();
    let start = LARGE.start() << rng.u32(0..doublings);
    rng.u32(start..=start * 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_the_bytes_are_small_and_every_page_is_visited_once() {
        let total = Bytes(64 << 20);
        let plan = Plan::new(total, &mut Rng::with_seed(1));
        let sum = |large: bool| -> u64 {
            let sizes = plan
                .sizes
                .iter()
                .filter(|&&size| (size >= *LARGE.start()) == large);
            sizes.map(|&size| u64::from(size)).sum()
        };
        let half = total.0 / 2;
        assert!(half - 1024 < sum(false) && sum(false) <= half);
        assert!(half - (16 << 20) < sum(true) && sum(true) <= half);
        for &size in &plan.sizes {
            assert!(SMALL.contains(&size) || LARGE.contains(&size), "{size}");
        }

        let mut stops = plan.stops.clone();
        assert!(!stops.is_sorted(), "the visit is in order of allocation");
        stops.sort_unstable();
        for pair in stops.windows(2) {
            let page = |stop: Stop| (stop.object, stop.offset / STRIDE);
            assert!(page(pair[0]) < page(pair[1]));
        }
        for stop in stops {
            assert!(stop.offset + STOP <= plan.sizes[stop.object as usize]);
            assert_eq!(stop.offset % STOP, 0);
        }
    }
}
