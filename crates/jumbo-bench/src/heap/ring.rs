//! [`Ring`]: follows raw pointers, as a C program does. Pointers never leave this file.

use std::marker::PhantomData;
use std::ptr::NonNull;

use super::plan::{ChaseStop, STOP_BYTES};

/// An allocation from `malloc`, the global allocator of this program.
pub(super) type Object = Box<[u8]>;

#[repr(C)]
#[derive(Clone, Copy)]
struct Node {
    /// Next node; the last leads to the first.
    next: NonNull<Node>,
    /// Number of the stop, to detect lost memory.
    tag: u64,
}

const _: () =
    assert!(size_of::<Node>() == STOP_BYTES as usize && align_of::<Node>() <= STOP_BYTES as usize);

/// A ring of stops through objects; each stop knows the next one only.
pub(super) struct Ring<'o> {
    head: NonNull<Node>,
    objects: PhantomData<&'o mut [Object]>,
}

impl<'o> Ring<'o> {
    /// Links `objects` in the order of `stops`; `None` without stops, or if one is outside.
    pub(super) fn link(objects: &'o mut [Object], stops: &[ChaseStop]) -> Option<Self> {
        let (&first, &last) = (stops.first()?, stops.last()?);
        let head = place(objects, first)?;
        let mut previous = place(objects, last)?;
        for (tag, &stop) in (0..).zip(stops) {
            let place = place(objects, stop)?;
            // The first iteration writes the tag of the first node and the link of the last.
            // SAFETY: `place` guarantees that a node fits here, and `&mut` that no other code reads
            // it meanwhile.
            unsafe {
                (*place.as_ptr()).tag = tag;
                (*previous.as_ptr()).next = place;
            }
            previous = place;
        }
        let objects = PhantomData;
        Some(Self { head, objects })
    }

    /// Follows the ring for so many steps. Returns the sum of the tags if that ends at the start.
    pub(super) fn chase(&self, steps: usize) -> Option<u64> {
        let mut node = self.head;
        let mut sum = 0u64;
        for _ in 0..steps {
            // SAFETY: `link` wrote every node of the ring, and the objects are borrowed as long as
            // the ring lives.
            let Node { next, tag } = unsafe { node.read() };
            sum = sum.wrapping_add(tag);
            node = next;
        }
        (node == self.head).then_some(sum)
    }
}

/// Location of `stop`, if it is inside its object and aligned.
fn place(objects: &mut [Object], stop: ChaseStop) -> Option<NonNull<Node>> {
    let object = objects.get_mut(stop.object as usize)?;
    let (start, end) = (
        stop.offset as usize,
        stop.offset as usize + STOP_BYTES as usize,
    );
    let node = NonNull::from(object.get_mut(start..end)?).cast::<Node>();
    node.is_aligned().then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stop(object: u32, offset: u32) -> ChaseStop {
        ChaseStop { object, offset }
    }

    #[test]
    fn the_chase_visits_every_stop_and_returns() {
        let mut objects = [64, 16, 8192].map(|size| vec![0; size].into_boxed_slice());
        let stops = [stop(2, 4096), stop(0, 48), stop(1, 0), stop(2, 0)];
        let ring = Ring::link(&mut objects, &stops).unwrap();
        assert_eq!(ring.chase(4), Some(6), "tags 0 to 3");
        assert_eq!(ring.chase(8), Some(12), "two laps");
        assert_eq!(ring.chase(3), None, "not back yet");
    }

    #[test]
    fn a_stop_outside_of_its_object_is_rejected() {
        let mut objects = [vec![0; 64].into_boxed_slice()];
        for (object, offset) in [(0, 49), (0, 64), (0, u32::MAX), (1, 0), (0, 4)] {
            let bad = stop(object, offset);
            assert!(Ring::link(&mut objects, &[bad]).is_none(), "{bad:?}");
        }
        assert!(Ring::link(&mut objects, &[stop(0, 8)]).is_some());
        assert!(Ring::link(&mut objects, &[]).is_none());
    }
}
