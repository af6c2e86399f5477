//! What keeps threads apart: [`Shards`], caches of free pages, each behind a lock of its own.
//!
//! A thread takes from and gives to the cache of its CPU, and meets no other thread there. A cached page is free like any
//! other: it is counted as free, and who needs it locks all caches ([`super::Pool::exclusive`]). So the
//! counters are exact and no page is out of reach.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::NodeSet;
use super::frame::Frame;
use crate::units::NodeId;

/// How many caches there can be. More threads than that share some.
pub(super) const SHARDS: usize = 32;
/// How many pages a cache keeps.
const CAPACITY: usize = 32;
/// How many it is filled up with at once, at most.
pub(super) const BATCH: u64 = 16;

/// The pages of a CPU. A line of its own for each, and its neighbour, which processors fetch along.
#[derive(Debug)]
#[repr(align(128))]
struct Shard(Mutex<Cache>);

/// Free pages, last in first out.
#[derive(Debug)]
pub(super) struct Cache {
    frames: [Option<Frame>; CAPACITY],
    length: usize,
    /// Nodes whose pages must not be put here, because they may have surplus. It may name too many.
    pub(super) draining: NodeSet,
}

/// All caches.
#[derive(Debug)]
pub(super) struct Shards {
    shards: [Shard; SHARDS],
    /// How many are in use: a power of two.
    active: usize,
}

/// A lock whatever became of its last holder: nothing in this module panics halfway.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shards {
    /// Caches for as many threads as can run at a time here.
    pub(super) fn new() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            shards: [const { Shard(Mutex::new(Cache::new())) }; SHARDS],
            active: threads.next_power_of_two().min(SHARDS),
        }
    }

    pub(super) fn active(&self) -> usize {
        self.active
    }

    /// That of the CPU on which the thread is: no two threads run on one CPU, so they hardly ever meet, and
    /// it takes neither a thread-local nor a system call (getcpu is in the vDSO). A thread that is moved to
    /// another CPU meanwhile may have to wait a moment and nothing else.
    pub(super) fn own(&self) -> MutexGuard<'_, Cache> {
        let at = rustix::thread::sched_getcpu() & (self.active - 1);
        lock(&self.shards[at].0)
    }

    /// All of them, locked in one order.
    pub(super) fn all(&self) -> [Option<MutexGuard<'_, Cache>>; SHARDS] {
        std::array::from_fn(|at| (at < self.active).then(|| lock(&self.shards[at].0)))
    }
}

impl Cache {
    const fn new() -> Self {
        Self {
            frames: [const { None }; CAPACITY],
            length: 0,
            draining: NodeSet::NONE,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// A page of one of `nodes`.
    pub(super) fn pop(&mut self, nodes: NodeSet) -> Option<Frame> {
        let held = self.frames.get(..self.length)?;
        let fits = |frame: &Option<Frame>| {
            frame
                .as_ref()
                .is_some_and(|frame| nodes.contains(frame.node()))
        };
        let at = held.iter().rposition(fits)?;
        self.length -= 1;
        self.frames.swap(at, self.length);
        self.frames[self.length].take()
    }

    /// Puts a page here; gives it back where there is no room, or where its node is draining.
    pub(super) fn push(&mut self, frame: Frame) -> Result<(), Frame> {
        if self.draining.contains(frame.node()) {
            return Err(frame);
        }
        match self.frames.get_mut(self.length) {
            Some(place) => {
                *place = Some(frame);
                self.length += 1;
                Ok(())
            }
            None => Err(frame),
        }
    }

    /// Takes pages out until `left` are left.
    pub(super) fn drain(&mut self, left: usize) -> impl Iterator<Item = Frame> + '_ {
        std::iter::from_fn(move || {
            (self.length > left)
                .then(|| self.pop(NodeSet::ALL))
                .flatten()
        })
    }

    /// The pages as (node, index), for the check of the invariants.
    pub(super) fn peek(&self) -> impl Iterator<Item = (NodeId, u32)> + '_ {
        let held = self.frames.iter().take(self.length).flatten();
        held.map(|frame| (frame.node(), frame.index()))
    }
}
