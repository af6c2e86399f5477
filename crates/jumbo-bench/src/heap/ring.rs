//! The leaf that follows raw pointers, as a C program would: [`Ring`]. Pointers never leave this file.

use std::marker::PhantomData;
use std::ptr::NonNull;

use super::plan::{STOP, Stop};

/// An allocation, from `malloc`: that is what this program's allocator calls.
pub(super) type Object = Box<[u8]>;

/// The node at a stop of the chase.
#[repr(C)]
#[derive(Clone, Copy)]
struct Node {
    /// The next one; the last leads to the first.
    next: NonNull<Node>,
    /// Says which stop this is, so that memory that was lost or mixed up is noticed.
    tag: u64,
}

const _: () = assert!(size_of::<Node>() == STOP as usize && align_of::<Node>() <= STOP as usize);

/// A ring of stops through objects, each knowing the next one only.
pub(super) struct Ring<'o> {
    head: NonNull<Node>,
    objects: PhantomData<&'o mut [Object]>,
}

impl<'o> Ring<'o> {
    /// Links `objects` in the order of `stops`. A stop that is not inside an object, or an empty list of them, gives
    /// `None`.
    pub(super) fn link(objects: &'o mut [Object], stops: &[Stop]) -> Option<Self> {
        let (&first, &last) = (stops.first()?, stops.last()?);
        let head = place(objects, first)?;
        let mut previous = place(objects, last)?;
        for (tag, &stop) in (0..).zip(stops) {
            let place = place(objects, stop)?;
            // The tag of the first is written with the link of the last, below.
            // SAFETY: `place` vouches that a node fits here, and `&mut` that no other code reads it meanwhile.
            unsafe {
                (*place.as_ptr()).tag = tag;
                (*previous.as_ptr()).next = place;
            }
            previous = place;
        }
        let objects = PhantomData;
        Some(Self { head, objects })
    }

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

/// Where `stop` is, if it is inside its object and aligned.
fn place(objects: &mut [Object], stop: Stop) -> Option<NonNull<Node>> {
    let object = objects.get_mut(stop.object as usize)?;
    let (start, end) = (stop.offset as usize, stop.offset as usize + STOP as usize);
    let node = NonNull::from(object.get_mut(start..end)?).cast::<Node>();
    node.is_aligned().then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stop(object: u32, offset: u32) -> Stop {
        Stop { object, offset }
    }

    #[test]
    fn the_chase_visits_every_stop_and_comes_back() {
        let mut objects = [64, 16, 8192].map(|size| vec![0; size].into_boxed_slice());
        let stops = [stop(2, 4096), stop(0, 48), stop(1, 0), stop(2, 0)];
        let ring = Ring::link(&mut objects, &stops).unwrap();
        assert_eq!(ring.chase(4), Some(6), "tags 0 to 3");
        assert_eq!(ring.chase(8), Some(12), "two laps");
        assert_eq!(ring.chase(3), None, "not back yet");
    }

    #[test]
    fn a_stop_outside_of_its_object_is_refused() {
        let mut objects = [vec![0; 64].into_boxed_slice()];
        for (object, offset) in [(0, 49), (0, 64), (0, u32::MAX), (1, 0), (0, 4)] {
            let bad = stop(object, offset);
            assert!(Ring::link(&mut objects, &[bad]).is_none(), "{bad:?}");
        }
        assert!(Ring::link(&mut objects, &[stop(0, 8)]).is_some());
        assert!(Ring::link(&mut objects, &[]).is_none());
    }
}
