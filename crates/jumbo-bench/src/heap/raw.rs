//! The leaf that calls `malloc` and `free` by name and follows raw pointers, as a C program would.
//!
//! [`Objects`] owns the allocations and keeps the rest of the crate safe: pointers never leave this file.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::plan::{STOP, Stop};

/// What stands at a stop of the chase.
#[repr(C)]
#[derive(Clone, Copy)]
struct Node {
    /// The next one; the last leads to the first.
    next: NonNull<Node>,
    /// Says which stop this is, so that memory that was lost or mixed up is noticed.
    tag: u64,
}

const _: () = assert!(size_of::<Node>() == STOP as usize && align_of::<Node>() <= STOP as usize);

/// Allocated objects, all of their bytes written.
pub(super) struct Objects<'p> {
    starts: Vec<NonNull<u8>>,
    sizes: &'p [u32],
}

/// A ring of stops through [`Objects`], each knowing the next one only.
pub(super) struct Ring<'o> {
    head: NonNull<Node>,
    objects: PhantomData<&'o mut Objects<'o>>,
}

/// Objects that are to be freed in the order in which they stand.
pub(super) struct Doomed(Vec<NonNull<u8>>);

impl<'p> Objects<'p> {
    /// Room for objects of these sizes; nothing is allocated yet.
    pub(super) fn new(sizes: &'p [u32]) -> Self {
        Self {
            starts: Vec::with_capacity(sizes.len()),
            sizes,
        }
    }

    /// Allocates the objects and writes each of their bytes; the size that could not be had is the error.
    pub(super) fn allocate(&mut self) -> Result<(), u32> {
        for &size in &self.sizes[self.starts.len()..] {
            // SAFETY: malloc may be called with any size.
            let start = unsafe { libc::malloc(size as usize) }.cast::<u8>();
            let start = NonNull::new(start).ok_or(size)?;
            // SAFETY: `start` is the start of `size` bytes that nobody else knows of.
            unsafe { start.write_bytes(0x5a, size as usize) };
            self.starts.push(start);
        }
        Ok(())
    }

    /// Links the objects in the order of `stops`. A stop that is not inside an object, or an empty list of them,
    /// gives `None`.
    pub(super) fn link(&mut self, stops: &[Stop]) -> Option<Ring<'_>> {
        let places = stops.iter().map(|&stop| self.place(stop));
        let (&first, &last) = (stops.first()?, stops.last()?);
        let mut previous = self.place(last)?;
        for (tag, place) in (0..).zip(places) {
            let place = place?;
            // The tag of the first is written with the link of the last, below.
            // SAFETY: `place` vouches that a node fits here, and `&mut self` that nobody reads it meanwhile.
            unsafe {
                (*place.as_ptr()).tag = tag;
                (*previous.as_ptr()).next = place;
            }
            previous = place;
        }
        Some(Ring {
            head: self.place(first)?,
            objects: PhantomData,
        })
    }

    /// Where `stop` is, if it is inside its object and aligned.
    fn place(&self, stop: Stop) -> Option<NonNull<Node>> {
        let start = *self.starts.get(stop.object as usize)?;
        let size = *self.sizes.get(stop.object as usize)?;
        let fits = stop.offset.checked_add(STOP)? <= size;
        // SAFETY: the offset is below the size of the object (checked by `fits` before it runs).
        let place = fits.then(|| unsafe { start.add(stop.offset as usize) })?;
        place.cast::<Node>().is_aligned().then(|| place.cast())
    }

    /// The objects in a random order, to be freed.
    pub(super) fn doom(mut self, rng: &mut Rng) -> Doomed {
        rng.shuffle(&mut self.starts);
        Doomed(self.starts)
    }
}

impl Ring<'_> {
    /// Follows the ring for so many steps, each of which needs the one before. Returns the sum of the tags, if the
    /// chase ended where it began.
    pub(super) fn chase(&self, steps: usize) -> Option<u64> {
        let mut node = self.head;
        let mut sum = 0u64;
        for _ in 0..steps {
            // SAFETY: `link` made every node of the ring, and the objects are borrowed as long as the ring lives.
            let Node { next, tag } = unsafe { node.read() };
            sum = sum.wrapping_add(tag);
            node = next;
        }
        (node == self.head).then_some(sum)
    }
}

impl Doomed {
    /// Frees them all.
    pub(super) fn free(self) {
        for start in self.0 {
            // SAFETY: `start` came from malloc, and it is in no list but this one, which ends here.
            unsafe { libc::free(start.as_ptr().cast()) };
        }
    }
}

/// How long it takes to free `objects` objects of `size` bytes, for each of `batches` batches.
pub(super) fn time_frees(batches: usize, objects: usize, size: u32) -> Result<Vec<Duration>, u32> {
    let sizes = vec![size; objects];
    (0..batches)
        .map(|_| {
            let mut batch = Objects::new(&sizes);
            batch.allocate()?;
            let doomed = Doomed(batch.starts);
            let start = Instant::now();
            doomed.free();
            Ok(start.elapsed())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stop(object: u32, offset: u32) -> Stop {
        Stop { object, offset }
    }

    #[test]
    fn the_chase_visits_every_stop_and_comes_back() {
        let sizes = [64, 16, 8192];
        let mut objects = Objects::new(&sizes);
        objects.allocate().unwrap();
        let ring = objects
            .link(&[stop(2, 4096), stop(0, 48), stop(1, 0), stop(2, 0)])
            .unwrap();
        assert_eq!(ring.chase(4), Some(6), "tags 0 to 3");
        assert_eq!(ring.chase(8), Some(12), "two laps");
        assert_eq!(ring.chase(3), None, "not back yet");
        objects.doom(&mut Rng::with_seed(1)).free();
    }

    #[test]
    fn a_stop_outside_of_its_object_is_refused() {
        let sizes = [64];
        let mut objects = Objects::new(&sizes);
        objects.allocate().unwrap();
        for bad in [
            stop(0, 49),
            stop(0, 64),
            stop(0, 8),
            stop(0, u32::MAX),
            stop(1, 0),
        ] {
            let aligned_for_a_node = bad == stop(0, 8);
            assert_eq!(
                objects.link(&[bad]).is_some(),
                aligned_for_a_node,
                "{bad:?}"
            );
        }
        assert!(objects.link(&[]).is_none());
        objects.doom(&mut Rng::with_seed(1)).free();
    }

    #[test]
    fn each_batch_is_timed() {
        assert_eq!(time_frees(3, 100, 64).unwrap().len(), 3);
    }
}
