//! Pages of a pool that have their memory elsewhere: [`Claim`].
//!
//! A region with memory of its own (a file, or a mapping of which a forked child has a copy) stands for as many
//! pages of the pool. The source reserves the region's memory first, then the free pages that it stands for
//! are given back, and at the end the other way round; so the kernel sees no page too few, and one too
//! many only for that moment.

use super::error::SourceError;
use super::frame::{Frame, List};
use super::inventory::Inventory;
use super::{Error, NodeSet, Pool, lock};
use crate::units::Pages;

/// Pages that are in the pool's books and whose places have no memory. Dropping it, after the memory that
/// they stand for is gone, gives them back.
#[derive(Debug)]
pub(super) struct Claim<'p> {
    pub(super) pool: &'p Pool,
    /// Those that count as reserved.
    promised: List,
    /// Those that count as used.
    used: List,
}

/// The places that a claim begins with.
struct Places {
    /// With memory, which is to be given back.
    free: List,
    /// Without.
    surplus: List,
}

impl Pool {
    /// Claims `pages`, all or none, by the rules of [`Pool::reserve`], for memory that `open` makes.
    ///
    /// # Errors
    /// As [`Pool::reserve`], and what `open` says. Free pages that were given back for it and cannot be had again
    /// are missing from the pool's total then.
    pub(super) fn claim<T>(
        &self,
        pages: Pages,
        open: impl Fn() -> Result<T, SourceError>,
    ) -> Result<(T, Claim<'_>), Error> {
        self.check_here()?;
        self.check_fits(pages.0)?;
        let mut places = self.claim_places(pages.0)?;
        let mut released = List::new();
        // The free pages stay until there is other memory, so that no other process takes them away in between; but where
        // there is no room for both they go first.
        let opened = match open() {
            Err(_) if places.free.len() > 0 => {
                self.release_all(&mut places.free, &mut released);
                open()
            }
            opened => opened,
        };
        self.release_all(&mut places.free, &mut released);
        released.move_to(&mut places.surplus, pages.0, &self.links);
        let claim = Claim {
            pool: self,
            promised: places.surplus,
            used: List::new(),
        };
        Ok((opened?, claim))
    }

    /// Takes pages out of the books for a region: free ones, and places for surplus ones.
    fn claim_places(&self, wanted: u64) -> Result<Places, Error> {
        let allowed = self.placement.allowed().and(self.nodes());
        let mut claim = Places {
            free: List::new(),
            surplus: List::new(),
        };
        let mut inventory = lock(&self.inventory);
        let free = inventory.listed(allowed);
        let shortage = wanted.saturating_sub(free);
        let surplus = inventory.surplus(NodeSet::ALL);
        if !inventory.overcommit.admits(surplus, shortage) {
            return Err(Error::Exhausted(inventory.exhausted(wanted, allowed)));
        }
        for _ in 0..shortage {
            match self.claim_hole(&mut inventory) {
                Some(frame) => claim.surplus.push(&self.links, frame),
                None => {
                    while let Some(frame) = claim.surplus.pop(&self.links) {
                        inventory.push_hole(frame, &self.links);
                    }
                    return Err(Error::Window {
                        capacity: self.source.window().capacity(),
                    });
                }
            }
        }
        for _ in 0..wanted - shortage {
            if let Some(frame) = inventory.pop_placed(self.placement, &self.links) {
                inventory.hold(frame.node());
                claim.free.push(&self.links, frame);
            }
        }
        let mut counted = List::new();
        while let Some(frame) = claim.surplus.pop(&self.links) {
            inventory.join_surplus(frame.node());
            inventory.hold(frame.node());
            counted.push(&self.links, frame);
        }
        claim.surplus = counted;
        Ok(claim)
    }

    fn claim_hole(&self, inventory: &mut Inventory) -> Option<Frame> {
        let mut nodes = self.placement.tiers(self.nodes()).into_iter();
        nodes.find_map(|tier| {
            let mut tier = tier.iter();
            tier.find_map(|node| inventory.pop_hole(node, &self.links))
        })
    }

    fn release_all(&self, frames: &mut List, released: &mut List) {
        while let Some(frame) = frames.pop(&self.links) {
            self.let_go(&frame);
            released.push(&self.links, frame);
        }
    }

    /// Takes back a place without memory: it goes where its node has surplus, or in a child of fork(2) that has not
    /// inherited the places; else it is populated again.
    fn restore(&self, frame: Frame, promised: bool) {
        let mut inventory = lock(&self.inventory);
        if promised {
            inventory.unhold(frame.node());
        }
        if inventory.node(frame.node()).books.surplus() > 0 || !self.source.is_here() {
            inventory.lose(frame, &self.links);
            return;
        }
        drop(inventory);
        match self.populate(&frame) {
            Ok(()) => self.give_frame(frame),
            Err(_) => lock(&self.inventory).lose(frame, &self.links),
        }
    }
}

impl Claim<'_> {
    /// One more of the pages is in use.
    pub(super) fn use_one(&mut self) {
        // Which of them it is does not matter: they are all alike, and without memory.
        if let Some(frame) = self.promised.pop(&self.pool.links) {
            lock(&self.pool.inventory).unhold(frame.node());
            self.used.push(&self.pool.links, frame);
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        while let Some(frame) = self.promised.pop(&self.pool.links) {
            self.pool.restore(frame, true);
        }
        while let Some(frame) = self.used.pop(&self.pool.links) {
            self.pool.restore(frame, false);
        }
    }
}
