//! A source for tests: [`Model`], any number of nodes, and failures on demand.
//!
//! Its pages are base pages of private memory, or of any other size, which costs only what is touched.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use rustix::io::Errno;

use super::super::NodeSet;
use super::super::error::{SetupError, SourceError};
use super::super::frame::Frame;
use super::super::window::Window;
use super::Source;
use crate::units::{NodeId, PageSize, Pages};

/// Pages out of nothing.
#[derive(Debug)]
pub struct Model {
    window: Window,
    supply: Arc<Supply>,
}

/// What a [`Model`] has, and the handle by which a test says when it fails.
#[derive(Debug)]
pub struct Supply {
    nodes: Vec<Node>,
    /// How many more populations succeed before one fails; negative: all do.
    until_failure: AtomicI64,
}

#[derive(Debug)]
struct Node {
    left: AtomicI64,
    out: AtomicI64,
}

impl Model {
    /// A source of 4 KiB pages with `supply[n]` of them on node `n`.
    ///
    /// # Errors
    /// [`SetupError::Window`].
    pub fn new(supply: &[u32]) -> Result<Self, SetupError> {
        Self::of_size(PageSize::SIZE_4K, supply)
    }

    /// The same with pages of `size`.
    ///
    /// # Errors
    /// As [`Model::new`].
    pub fn of_size(size: PageSize, supply: &[u32]) -> Result<Self, SetupError> {
        let nodes: NodeSet = (0u32..).map(NodeId).take(supply.len()).collect();
        let capacity = supply.iter().copied().max().unwrap_or(1);
        let node = |pages: &u32| Node {
            left: AtomicI64::new((*pages).into()),
            out: AtomicI64::new(0),
        };
        Ok(Self {
            window: Window::reserve(size, nodes, Pages(capacity.into()))?,
            supply: Arc::new(Supply {
                nodes: supply.iter().map(node).collect(),
                until_failure: AtomicI64::new(-1),
            }),
        })
    }

    /// The handle to it, for after it was given to a pool.
    pub fn supply(&self) -> Arc<Supply> {
        Arc::clone(&self.supply)
    }
}

impl Supply {
    /// Lets so many more populations succeed, and fails those that come after.
    pub fn fail_after(&self, successes: u32) {
        let left = &self.until_failure;
        left.store(successes.into(), Ordering::SeqCst);
    }

    /// No more failures but those of an empty node.
    pub fn heal(&self) {
        self.until_failure.store(-1, Ordering::SeqCst);
    }

    /// How many pages of a node are out: what the pool must agree with.
    pub fn out(&self, node: NodeId) -> u64 {
        let out = self.node(node).map(|node| node.out.load(Ordering::SeqCst));
        out.and_then(|out| u64::try_from(out).ok()).unwrap_or(0)
    }

    /// How many pages of a node are left.
    pub fn left(&self, node: NodeId) -> u64 {
        let left = self.node(node).map(|node| node.left.load(Ordering::SeqCst));
        left.and_then(|left| u64::try_from(left).ok()).unwrap_or(0)
    }

    fn node(&self, node: NodeId) -> Option<&Node> {
        self.nodes.get(usize::try_from(node.0).ok()?)
    }

    /// True where this population is told to fail.
    fn is_told(&self) -> bool {
        let order = Ordering::SeqCst;
        let told = self
            .until_failure
            .fetch_update(order, order, |left| (left > 0).then(|| left - 1));
        told == Err(0)
    }
}

impl Source for Model {
    fn window(&self) -> &Window {
        &self.window
    }

    fn populate(&self, frame: &Frame) -> Result<(), SourceError> {
        let error = |errno, why| SourceError {
            node: frame.node(),
            operation: "model",
            errno,
            why,
        };
        let Some(node) = self.supply.node(frame.node()) else {
            return Err(error(Errno::NODEV, "no such node"));
        };
        if self.supply.is_told() {
            return Err(error(Errno::NOMEM, "told to fail"));
        }
        let open = self.window.open(frame);
        open.map_err(|errno| error(errno, "the page cannot be opened"))?;
        let order = Ordering::SeqCst;
        let less = |left| (left > 0).then(|| left - 1);
        if node.left.fetch_update(order, order, less).is_err() {
            self.window.close(frame);
            return Err(error(Errno::NOMEM, "the node is empty"));
        }
        node.out.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn release(&self, frame: &Frame) {
        let _ = self.window.discard(frame);
        self.window.close(frame);
        if let Some(node) = self.supply.node(frame.node()) {
            node.left.fetch_add(1, Ordering::SeqCst);
            node.out.fetch_sub(1, Ordering::SeqCst);
        }
    }
}
