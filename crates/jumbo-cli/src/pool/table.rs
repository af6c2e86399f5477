//! The table of the kernel's pools, as `jumbo pool show` and `jumbo status` print it.

use std::io;

use jumbo::units::{NodeId, PageSize};
use jumbo_host::kernel::hugetlb::{NodePool, Pool};

use crate::view::{NONE, View};

/// A row for each pool, and below it one for each of its nodes.
pub(crate) fn show(view: &mut View, pools: &[&Pool]) -> io::Result<()> {
    let rows = |pool: &&Pool| {
        let nodes = pool.nodes.iter();
        let nodes = nodes.map(|(node, pages)| of_node(pool.size, *node, pages));
        std::iter::once(of_all(pool))
            .chain(nodes)
            .collect::<Vec<_>>()
    };
    view.heading("hugetlb pools")?;
    view.table(
        "<SIZE|>NODE|>TOTAL|>PERSISTENT|>SURPLUS|>OVERCOMMIT|>USED|>FREE|>RESERVED|>MEMORY",
        pools.iter().flat_map(rows),
    )
}

fn of_all(pool: &Pool) -> [String; 10] {
    [
        pool.size.to_string(),
        "all".to_owned(),
        pool.total.to_string(),
        pool.persistent().to_string(),
        pool.surplus.to_string(),
        pool.overcommit.to_string(),
        pool.used().to_string(),
        pool.free.to_string(),
        pool.reserved.to_string(),
        pool.total.bytes(pool.size).to_string(),
    ]
}

/// Overcommit and reservations belong to no node.
fn of_node(size: PageSize, node: NodeId, pages: &NodePool) -> [String; 10] {
    [
        String::new(),
        node.to_string(),
        pages.total.to_string(),
        pages.persistent().to_string(),
        pages.surplus.to_string(),
        NONE.to_owned(),
        pages.used().to_string(),
        pages.free.to_string(),
        NONE.to_owned(),
        pages.total.bytes(size).to_string(),
    ]
}
