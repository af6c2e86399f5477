//! Consistency check of a pool's counters.

use jumbo::pool::{Counters, Pool};

/// Checks the counters of each node, and that their sums are those of the pool. No other thread may
/// use the pool meanwhile.
pub(crate) fn check(pool: &Pool) {
    let tuple = |counters: &Counters| {
        [
            counters.total.0,
            counters.free.0,
            counters.reserved.0,
            counters.surplus.0,
        ]
    };
    let mut sums = [0; 4];
    for node in pool.nodes().iter() {
        let counters = pool.node_counters(node);
        let [total, free, reserved, surplus] = tuple(&counters);
        assert!(
            reserved <= free && free <= total && surplus <= total,
            "node {node}: {counters:?}"
        );
        for (sum, pages) in sums.iter_mut().zip(tuple(&counters)) {
            *sum += pages;
        }
    }
    assert_eq!(sums, tuple(&pool.counters()));
}
