//! How pages leave the pool and come back: [`Pool::collect_pages`], [`Pool::give_frame`].
//!
//! The source is asked with no lock held; what came is counted in under the lock, or goes back when it is not needed any more.

use super::error::{Error, SourceError};
use super::frame::Frame;
use super::inventory::Inventory;
use super::{NodeSet, Placement, Pool, lock};
use crate::units::NodeId;

/// What pages are collected for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To be used: they are not free any more.
    Use,
    /// To be promised: they are free and reserved.
    Promise,
}

/// Pages that were collected.
pub(super) struct Collected {
    pub(super) frames: Vec<Frame>,
    /// How many of them, from the top, the source has just made: they are zeroed.
    pub(super) fresh: u64,
}

impl Pool {
    /// A free page, or one more surplus page; and whether the source has just made it.
    pub(super) fn take_frame(&self, placement: Placement) -> Result<(Frame, bool), Error> {
        if self.source.is_here() {
            // Without an allocation.
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

    /// `wanted` pages at once or none: free ones, and for the rest surplus pages.
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
        // Made by the source for this call, and counted in `pending`.
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
                    // What this call has made itself is no part of the error.
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
                        // One more look at what was given back meanwhile, and then the error.
                        stopped = Some(error);
                        break;
                    }
                }
            }
        }
    }

    /// Takes what is free, then what was made, which joins the pool by that.
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

    /// Has the source make one page, on the nodes of the placement in their order.
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

    /// Has the source make one page on a node; `None` where the node's window is full.
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

    /// Gives pages that are in no list and no count any more back to the source.
    pub(super) fn return_made(&self, mut frames: Vec<Frame>) {
        while let Some(frame) = frames.pop() {
            self.return_one(frame);
        }
    }

    fn return_one(&self, frame: Frame) {
        self.let_go(&frame);
        lock(&self.inventory).push_hole(frame);
    }

    /// Takes a page back: to the lists, or where its node has surplus on to the source.
    pub(super) fn give_frame(&self, frame: Frame) {
        let leaves = lock(&self.inventory).give(frame);
        if let Some(frame) = leaves {
            self.return_one(frame);
        }
    }

    /// Takes back pages that were promised and not used.
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

    /// An error for more pages than could ever be, before they are added to anything.
    pub(super) fn check_fits(&self, wanted: u64) -> Result<(), Error> {
        let capacity = self.source.window().capacity();
        if wanted <= capacity.0 * u64::from(self.nodes().len()) {
            Ok(())
        } else {
            Err(Error::Window { capacity })
        }
    }

    /// An error in a child of fork(2) that has not inherited the pages.
    pub(super) fn check_here(&self) -> Result<(), Error> {
        if self.source.is_here() {
            Ok(())
        } else {
            Err(Error::Forked)
        }
    }
}
