//! A source for tests: [`Model`], with any number of nodes, and failures on demand.
//!
//! Its pages are private memory of any size, which costs only the touched part.

use std::sync::Arc;

use jumbo_inside::pool::Quota;
use rustix::io::Errno;

use super::super::NodeSet;
use super::super::error::{SetupError, SourceError};
use super::super::frame::Frame;
use super::super::window::Window;
use super::Source;
use crate::units::{NodeId, PageSize, Pages};

/// Simulated pages.
#[derive(Debug)]
pub struct Model {
    window: Window,
    supply: Arc<Supply>,
}

/// Supply of a [`Model`], by which a test sets its failures.
#[derive(Debug)]
pub struct Supply {
    /// Pages of each node, charged while populated.
    nodes: Vec<Quota>,
    /// Number of populations that succeed.
    populations: Quota,
}

impl Model {
    /// Creates a source of 4 KiB pages with `supply[n]` of them on node `n`.
    ///
    /// # Errors
    /// [`SetupError::Window`].
    pub fn new(supply: &[u32]) -> Result<Self, SetupError> {
        Self::of_size(PageSize::SIZE_4K, supply)
    }

    /// Same as [`Model::new`], with pages of `size`.
    ///
    /// # Errors
    /// Same as [`Model::new`].
    pub fn of_size(size: PageSize, supply: &[u32]) -> Result<Self, SetupError> {
        let nodes: NodeSet = (0u32..).map(NodeId).take(supply.len()).collect();
        let capacity = supply.iter().copied().max().unwrap_or(1);
        let node = |pages: &u32| Quota::new((*pages).into());
        Ok(Self {
            window: Window::reserve(size, nodes, Pages(capacity.into()))?,
            supply: Arc::new(Supply {
                nodes: supply.iter().map(node).collect(),
                populations: Quota::new(u64::MAX),
            }),
        })
    }

    /// Returns the supply, for use after the pool has the model.
    pub fn supply(&self) -> Arc<Supply> {
        Arc::clone(&self.supply)
    }
}

impl Supply {
    /// Lets `successes` more populations succeed; later ones fail.
    pub fn fail_after(&self, successes: u32) {
        let done = self.populations.charged();
        self.populations.set(done + u64::from(successes));
    }

    /// Ends the failures, except those of an empty node.
    pub fn heal(&self) {
        self.populations.set(u64::MAX);
    }

    /// Returns the number of populated pages of a node, for comparison with the pool.
    pub fn out(&self, node: NodeId) -> u64 {
        self.node(node).map_or(0, Quota::charged)
    }

    fn node(&self, node: NodeId) -> Option<&Quota> {
        self.nodes.get(usize::try_from(node.0).ok()?)
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
        if !self.supply.populations.charge(1) {
            return Err(error(Errno::NOMEM, "told to fail"));
        }
        let open = self.window.open(frame);
        open.map_err(|errno| error(errno, "the page cannot be opened"))?;
        if !node.charge(1) {
            self.window.close(frame);
            return Err(error(Errno::NOMEM, "the node is empty"));
        }
        Ok(())
    }

    fn release(&self, frame: &Frame) {
        let _ = self.window.discard(frame);
        self.window.close(frame);
        if let Some(node) = self.supply.node(frame.node()) {
            node.uncharge(1);
        }
    }
}
