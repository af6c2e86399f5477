//! Takes pages from the pool and returns them: [`Pool::collect_pages`], [`Pool::give_frame`].
//!
//! The source makes pages without the lock. They are added under the lock, or released if they are
//! not needed any more.

use super::error::{Error, SourceError};
use super::frame::Frame;
use super::inventory::Inventory;
use super::{NodeSet, Placement, Pool, lock};
use crate::units::NodeId;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Use: the pages are not free any more.
    Use,
    /// Promise: the pages are free and reserved.
    Promise,
}

pub(super) struct Collected {
    pub(super) frames: Vec<Frame>,
    /// Number of new pages at the end of `frames`: they are zeroed.
    pub(super) fresh: u64,
}

impl Pool {
    /// Takes a free page, or a new surplus page; true for a new one.
    pub(super) fn take_frame(&self, placement: Placement) -> Result<(Frame, bool), Error> {
        if self.source.is_here() {
            // No allocation.
            let free = lock(&self.inventory).pop_placed(placement);
            if let Some(frame) = free {
                return Ok((frame, false));
            }
        }
        let mut collected = self.collect_pages(1, placement, Purpose::Use)?;
        let frame = collected.frames.pop();
        frame
            .map(|frame| (frame, collected.fresh > 0))
            .ok_or(Error::Placement)
    }

    /// Collects all of the `wanted` pages or none: free ones first, then surplus pages.
    pub(super) fn collect_pages(
        &self,
        wanted: u64,
        placement: Placement,
        purpose: Purpose,
    ) -> Result<Collected, Error> {
        self.check_here()?;
        self.check_fits(wanted)?;
        let allowed = placement.allowed().and(self.nodes());
        if allowed.is_empty() {
            return Err(Error::Placement);
        }
        // New pages of this call, counted in `pending`.
        let mut made = Vec::new();
        let mut stopped = None;
        loop {
            let mut inventory = lock(&self.inventory);
            let free = inventory.listed(allowed);
            let shortage = wanted.saturating_sub(free + made.len() as u64);
            if shortage == 0 {
                inventory.overcommit.pending -= made.len() as u64;
                let collected = self.commit(&mut inventory, wanted, placement, purpose, &mut made);
                drop(inventory);
                self.return_made(made);
                return Ok(collected);
            }
            let beyond = |inventory: &Inventory| {
                let surplus = inventory.surplus(NodeSet::ALL);
                !inventory.overcommit.admits(surplus, shortage)
            };
            let refused = match stopped {
                Some(error) => Some(error),
                None if beyond(&inventory) => {
                    // The error does not count the pages of this call.
                    inventory.overcommit.pending -= made.len() as u64;
                    let counters = inventory.exhausted(wanted, allowed);
                    inventory.overcommit.pending += made.len() as u64;
                    Some(Error::Exhausted(counters))
                }
                None => None,
            };
            if let Some(error) = refused {
                inventory.overcommit.pending -= made.len() as u64;
                drop(inventory);
                self.return_made(made);
                return Err(error);
            }
            inventory.overcommit.pending += shortage;
            drop(inventory);
            for missing in (1..=shortage).rev() {
                match self.make(placement) {
                    Ok(frame) => made.push(frame),
                    Err(error) => {
                        lock(&self.inventory).overcommit.pending -= missing;
                        // Other threads may have returned pages: check once more before the error.
                        stopped = Some(error);
                        break;
                    }
                }
            }
        }
    }

    /// Takes free pages, then new ones, which so join the pool.
    fn commit(
        &self,
        inventory: &mut Inventory,
        wanted: u64,
        placement: Placement,
        purpose: Purpose,
        made: &mut Vec<Frame>,
    ) -> Collected {
        let mut collected = Collected {
            frames: Vec::new(),
            fresh: 0,
        };
        while (collected.frames.len() as u64) < wanted {
            let frame = match inventory.pop_placed(placement) {
                Some(frame) => frame,
                None => match made.pop() {
                    Some(frame) => {
                        inventory.join_surplus(frame.node());
                        collected.fresh += 1;
                        frame
                    }
                    None => break,
                },
            };
            if purpose == Purpose::Promise {
                inventory.hold(frame.node());
            }
            collected.frames.push(frame);
        }
        collected
    }

    /// Makes a page on the first possible node of the placement.
    pub(super) fn make(&self, placement: Placement) -> Result<Frame, Error> {
        let mut last = None;
        for node in placement
            .tiers(self.nodes())
            .into_iter()
            .flat_map(NodeSet::iter)
        {
            match self.make_on(node) {
                Some(Ok(frame)) => return Ok(frame),
                Some(Err(error)) => last = Some(error),
                None => {}
            }
        }
        Err(last.map_or(
            Error::Window {
                capacity: self.source.window().capacity(),
            },
            Error::Source,
        ))
    }

    /// Makes a page on a node; `None` if the node's window is full.
    pub(super) fn make_on(&self, node: NodeId) -> Option<Result<Frame, SourceError>> {
        let frame = lock(&self.inventory).pop_hole(node)?;
        Some(match self.populate(&frame) {
            Ok(()) => Ok(frame),
            Err(error) => {
                lock(&self.inventory).push_hole(frame);
                Err(error)
            }
        })
    }

    /// Releases pages that are in no list and no counter.
    pub(super) fn return_made(&self, mut frames: Vec<Frame>) {
        while let Some(frame) = frames.pop() {
            self.return_one(frame);
        }
    }

    fn return_one(&self, frame: Frame) {
        self.let_go(&frame);
        lock(&self.inventory).push_hole(frame);
    }

    /// Returns a page to the lists, or releases it if its node has surplus.
    pub(super) fn give_frame(&self, frame: Frame) {
        let leaves = lock(&self.inventory).give(frame);
        if let Some(frame) = leaves {
            self.return_one(frame);
        }
    }

    /// Returns promised pages that were not used.
    pub(super) fn give_held(&self, mut frames: Vec<Frame>) {
        let mut surplus = Vec::new();
        let mut inventory = lock(&self.inventory);
        while let Some(frame) = frames.pop() {
            inventory.unhold(frame.node());
            if let Some(frame) = inventory.give(frame) {
                surplus.push(frame);
            }
        }
        drop(inventory);
        self.return_made(surplus);
    }

    /// Checks that a number of pages fits the window, so that sums cannot overflow.
    pub(super) fn check_fits(&self, wanted: u64) -> Result<(), Error> {
        let capacity = self.source.window().capacity();
        if wanted <= self.capacity().0 {
            Ok(())
        } else {
            Err(Error::Window { capacity })
        }
    }

    /// Fails in a child of fork(2) that has not inherited the pages.
    pub(super) fn check_here(&self) -> Result<(), Error> {
        if self.source.is_here() {
            Ok(())
        } else {
            Err(Error::Forked)
        }
    }
}
