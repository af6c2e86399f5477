//! The way that takes and gives go when a thread's own cache cannot serve them.
//!
//! With all locks held ([`Pool::exclusive`]) the pool is what its sequential rules say; only there are surplus
//! pages counted in, so none can be made while a page is free. The source is asked in between, with no lock
//! held; what came is counted in under all locks again, or goes back when it is not needed any more.

use std::sync::MutexGuard;

use super::error::{Error, SourceError};
use super::frame::{Frame, List};
use super::inventory::Inventory;
use super::shard::{BATCH, Cache, SHARDS, lock};
use super::{NodeSet, Placement, Pool};
use crate::units::NodeId;

/// What pages are collected for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To be used: they are not free any more.
    Use,
    /// To be promised: they are free and reserved.
    Promise,
}

/// The pool with no other thread in it.
pub(super) struct Exclusive<'p> {
    pool: &'p Pool,
    pub(super) inventory: MutexGuard<'p, Inventory>,
    pub(super) caches: [Option<MutexGuard<'p, Cache>>; SHARDS],
}

/// Pages that were collected.
pub(super) struct Collected {
    pub(super) frames: List,
    /// How many of them, from the top, the source has just made: they are zeroed.
    pub(super) fresh: u64,
}

impl Exclusive<'_> {
    /// How many free pages of `nodes` caches hold.
    pub(super) fn cached(&self, nodes: NodeSet) -> u64 {
        let pages = self.caches.iter().flatten().flat_map(|cache| cache.peek());
        pages.filter(|(node, _)| nodes.contains(*node)).count() as u64
    }

    /// Empties the caches, so that all free pages are on the lists.
    pub(super) fn empty_caches(&mut self) {
        for cache in self.caches.iter_mut().flatten() {
            for frame in cache.drain(0) {
                self.inventory.push_free(frame, &self.pool.links);
            }
        }
    }

    /// Closes the caches to pages of nodes that have surplus, before another thread can come in again.
    pub(super) fn close_caches(&mut self) {
        let draining = self.inventory.draining();
        for cache in self.caches.iter_mut().flatten() {
            cache.draining = draining;
        }
    }
}

impl Pool {
    /// Locks everything, in one order: the books, then the caches.
    pub(super) fn exclusive(&self) -> Exclusive<'_> {
        Exclusive {
            pool: self,
            inventory: lock(&self.inventory),
            caches: self.shards.all(),
        }
    }

    /// A free page, or one more surplus page; and whether the source has just made it.
    pub(super) fn take_frame(&self, placement: Placement) -> Result<(Frame, bool), Error> {
        self.check_here()?;
        let [first, rest] = placement.tiers(self.nodes());
        let first = if first.is_empty() { rest } else { first };
        if let Some(frame) = self.shards.own().pop(first) {
            return Ok((frame, false));
        }
        if let Some(frame) = self.refill(first) {
            return Ok((frame, false));
        }
        let mut collected = self.collect_pages(1, placement, Purpose::Use)?;
        let frame = collected.frames.pop(&self.links);
        frame
            .map(|frame| (frame, collected.fresh > 0))
            .ok_or(Error::Placement)
    }

    /// A page from the lists, and a few more for the thread's own cache.
    fn refill(&self, nodes: NodeSet) -> Option<Frame> {
        let mut inventory = lock(&self.inventory);
        let frame = inventory.pop_free(nodes, &self.links)?;
        // No more than a fair part: what one cache holds, the others must lock everything for.
        let caches = self.shards.active() as u64 * 2;
        let spare = (inventory.node(frame.node()).free.len() / caches).min(BATCH);
        if spare > 0 {
            let mut own = self.shards.own();
            for _ in 0..spare {
                let Some(frame) = inventory.node_mut(frame.node()).free.pop(&self.links) else {
                    break;
                };
                if let Err(frame) = own.push(frame) {
                    inventory.push_free(frame, &self.links);
                    break;
                }
            }
        }
        Some(frame)
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
        let mut made = List::new();
        let mut stopped = None;
        loop {
            let mut all = self.exclusive();
            all.empty_caches();
            let free = all.inventory.listed(allowed);
            let shortage = wanted.saturating_sub(free + made.len());
            if shortage == 0 {
                all.inventory.overcommit.pending -= made.len();
                let collected = self.commit(&mut all, wanted, placement, purpose, &mut made);
                drop(all);
                self.return_made(made);
                return Ok(collected);
            }
            let beyond = |inventory: &Inventory| {
                let surplus = inventory.surplus(NodeSet::ALL);
                !inventory.overcommit.admits(surplus, shortage)
            };
            let refused = match stopped {
                Some(error) => Some(error),
                None if beyond(&all.inventory) => {
                    let held = self.held(NodeSet::ALL);
                    // What this call has made itself is no part of the error.
                    all.inventory.overcommit.pending -= made.len();
                    let counters = all.inventory.exhausted(wanted, held, allowed);
                    all.inventory.overcommit.pending += made.len();
                    Some(Error::Exhausted(counters))
                }
                None => None,
            };
            if let Some(error) = refused {
                all.inventory.overcommit.pending -= made.len();
                drop(all);
                self.return_made(made);
                return Err(error);
            }
            all.inventory.overcommit.pending += shortage;
            drop(all);
            for missing in (1..=shortage).rev() {
                match self.make(placement) {
                    Ok(frame) => made.push(&self.links, frame),
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
        all: &mut Exclusive<'_>,
        wanted: u64,
        placement: Placement,
        purpose: Purpose,
        made: &mut List,
    ) -> Collected {
        let mut collected = Collected {
            frames: List::new(),
            fresh: 0,
        };
        while collected.frames.len() < wanted {
            let frame = match all.inventory.pop_placed(placement, &self.links) {
                Some(frame) => frame,
                None => match made.pop(&self.links) {
                    Some(frame) => {
                        all.inventory.join_surplus(frame.node());
                        collected.fresh += 1;
                        frame
                    }
                    None => break,
                },
            };
            if purpose == Purpose::Promise {
                self.hold(frame.node());
            }
            collected.frames.push(&self.links, frame);
        }
        if collected.fresh > 0 {
            all.close_caches();
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
        let frame = lock(&self.inventory).pop_hole(node, &self.links)?;
        Some(match self.populate(&frame) {
            Ok(()) => Ok(frame),
            Err(error) => {
                lock(&self.inventory).push_hole(frame, &self.links);
                Err(error)
            }
        })
    }

    /// Gives pages that are in no list and no count any more back to the source.
    pub(super) fn return_made(&self, mut frames: List) {
        while let Some(frame) = frames.pop(&self.links) {
            self.return_one(frame);
        }
    }

    fn return_one(&self, frame: Frame) {
        self.let_go(&frame);
        lock(&self.inventory).push_hole(frame, &self.links);
    }

    /// Takes a page back: to the thread's own cache, to the lists, or on to the source.
    pub(super) fn give_frame(&self, frame: Frame) {
        let Err(frame) = self.shards.own().push(frame) else {
            return;
        };
        let mut inventory = lock(&self.inventory);
        if let Some(frame) = inventory.give(frame, &self.links) {
            drop(inventory);
            self.return_one(frame);
            return;
        }
        // The node has no surplus (any more), or the cache was full.
        let draining = inventory.draining();
        let mut own = self.shards.own();
        own.draining = draining;
        let half = own.len() / 2;
        if half as u64 >= BATCH {
            for frame in own.drain(half) {
                inventory.push_free(frame, &self.links);
            }
        }
    }

    /// Takes back pages that were promised and not used.
    pub(super) fn give_held(&self, mut frames: List) {
        let mut surplus = List::new();
        let mut inventory = lock(&self.inventory);
        while let Some(frame) = frames.pop(&self.links) {
            self.unhold(frame.node());
            if let Some(frame) = inventory.give(frame, &self.links) {
                surplus.push(&self.links, frame);
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
