//! The check of the invariants: [`Pool::verify`].

use std::collections::HashSet;

use super::{NodeSet, Pool};

impl Pool {
    /// Checks the books against the lists that they count, for tests. Meant for a moment at which no other thread
    /// is inside.
    ///
    /// # Errors
    /// What does not agree.
    #[doc(hidden)]
    pub fn verify(&self) -> Result<(), String> {
        let all = self.exclusive();
        let inventory = &all.inventory;
        if inventory.overcommit.pending != 0 {
            return Err(format!("{} pages pending", inventory.overcommit.pending));
        }
        let mut seen = HashSet::new();
        for node in self.nodes().iter() {
            let books = inventory.node(node);
            let set = NodeSet::of(node);
            let (total, surplus) = (books.books.total(), books.books.surplus());
            let (listed, cached, held) = (inventory.listed(set), all.cached(set), self.held(set));
            let agree = |what: &str, fine: bool| {
                let numbers = format!(
                    "total {total}, surplus {surplus}, listed {listed}, cached {cached}, held {held}"
                );
                fine.then_some(())
                    .ok_or_else(|| format!("node {node}: {what}: {numbers}"))
            };
            agree("more surplus than pages", surplus <= total)?;
            agree("more free than pages", listed + cached + held <= total)?;
            agree(
                "pages and places differ",
                inventory.populated(node) == total,
            )?;
            let frames = books.free.peek(&self.links);
            agree("a list lies", frames.len() as u64 == listed)?;
            let caches = all.caches.iter().flatten();
            let cached = caches.flat_map(|cache| cache.peek());
            let cached = cached.filter(|(there, _)| *there == node);
            for (there, index) in frames.into_iter().chain(cached) {
                agree("a page on the wrong node's list", there == node)?;
                agree("a page in two places", seen.insert((there, index)))?;
            }
        }
        Ok(())
    }
}
