//! One test for each rule of docs/design/pool.md.

use crate::books;
use jumbo::pool::{Error, Model, NodeSet, Page, Placement, Pool, Quota};
use jumbo::units::{NodeId, Pages};

/// Returns (total, free, reserved, surplus).
fn tuple(pool: &Pool) -> [u64; 4] {
    books::check(pool);
    let counters = pool.counters();
    [
        counters.total,
        counters.free,
        counters.reserved,
        counters.surplus,
    ]
    .map(|pages| pages.0)
}

fn pool(persistent: u64, overcommit: u64) -> Pool {
    let pool = Pool::new(Model::new(&[64]).unwrap(), Placement::ANYWHERE);
    let resized = pool.resize(Pages(persistent));
    assert_eq!(
        (resized.persistent, resized.stopped),
        (Pages(persistent), None)
    );
    pool.set_overcommit(Pages(overcommit));
    pool
}

#[test]
fn a_new_pool_is_empty_and_says_so() {
    let pool = Pool::new(Model::new(&[8]).unwrap(), Placement::ANYWHERE);
    assert_eq!(tuple(&pool), [0; 4]);
    assert!(matches!(pool.take(), Err(Error::Exhausted(_))));
}

#[test]
fn eight_pages_and_an_overcommit_of_four_are_twelve() {
    let pool = pool(8, 4);
    let pages: Vec<Page> = (0..12).map(|_| pool.take().unwrap()).collect();
    assert_eq!(tuple(&pool), [12, 0, 0, 4]);
    assert_eq!(
        pool.take().unwrap_err().to_string(),
        "pool exhausted: 8 pages, overcommit 4: 12 taken; 1 wanted"
    );
    drop(pages);
    assert_eq!(tuple(&pool), [8, 8, 0, 0]);
}

#[test]
fn a_reservation_is_all_or_none() {
    let pool = pool(8, 4);
    let taken = pool.take().unwrap();
    assert_eq!(
        pool.reserve(Pages(12)).unwrap_err().to_string(),
        "pool exhausted: 8 pages, overcommit 4: 1 taken; 12 wanted"
    );
    assert_eq!(tuple(&pool), [8, 7, 0, 0]);
    let mut reservation = pool.reserve(Pages(11)).unwrap();
    assert_eq!(tuple(&pool), [12, 11, 11, 4]);
    let error = pool.take().unwrap_err();
    assert_eq!(
        error.to_string(),
        "pool exhausted: 8 pages, overcommit 4: 1 taken, 11 reserved; 1 wanted"
    );
    let page = reservation.take().unwrap();
    assert_eq!(tuple(&pool), [12, 10, 10, 4]);
    drop(reservation);
    // Ten pages were not used; four of them are surplus.
    assert_eq!(tuple(&pool), [8, 6, 0, 0]);
    drop((page, taken));
    assert_eq!(tuple(&pool), [8, 8, 0, 0]);
}

#[test]
fn a_reservation_can_be_parted() {
    let pool = pool(6, 0);
    let mut all = pool.reserve(Pages(6)).unwrap();
    let mut part = all.split_off(Pages(4));
    assert_eq!((all.left(), part.left()), (Pages(2), Pages(4)));
    let pages: Vec<Page> = std::iter::from_fn(|| part.take()).collect();
    assert_eq!((pages.len(), tuple(&pool)), (4, [6, 2, 2, 0]));
    drop(all);
    assert_eq!(tuple(&pool), [6, 2, 0, 0]);
}

#[test]
fn growing_keeps_surplus_first() {
    let pool = pool(2, 4);
    let pages: Vec<Page> = (0..6).map(|_| pool.take().unwrap()).collect();
    pool.resize(Pages(5));
    assert_eq!(tuple(&pool), [6, 0, 0, 1]);
    pool.resize(Pages(8));
    assert_eq!(tuple(&pool), [8, 2, 0, 0]);
    drop(pages);
    assert_eq!(tuple(&pool), [8, 8, 0, 0]);
}

#[test]
fn growing_keeps_what_it_got() {
    let model = Model::new(&[5]).unwrap();
    let supply = model.supply();
    let pool = Pool::new(model, Placement::ANYWHERE);
    supply.fail_after(3);
    let resized = pool.resize(Pages(5));
    assert_eq!((resized.before, resized.persistent), (Pages(0), Pages(3)));
    assert!(matches!(resized.stopped, Some(Error::Source(_))));
    supply.heal();
    assert_eq!(pool.resize(Pages(9)).persistent, Pages(5));
    assert_eq!(tuple(&pool), [5, 5, 0, 0]);
}

#[test]
fn shrinking_leaves_what_is_reserved_or_used() {
    let pool = pool(10, 0);
    let pages: Vec<Page> = (0..4).map(|_| pool.take().unwrap()).collect();
    let reservation = pool.reserve(Pages(2)).unwrap();
    let resized = pool.resize(Pages(3));
    assert_eq!((resized.persistent, resized.surplus), (Pages(3), Pages(3)));
    assert_eq!(tuple(&pool), [6, 2, 2, 3]);
    drop(pages);
    assert_eq!(tuple(&pool), [3, 3, 2, 0]);
    drop(reservation);
    assert_eq!(tuple(&pool), [3, 3, 0, 0]);
}

#[test]
fn a_quota_bounds_what_several_users_have_of_a_pool() {
    let (pool, quota) = (pool(6, 0), Quota::new(3));
    let take = || quota.charge(1).then(|| pool.take().unwrap());
    let mut pages: Vec<Page> = std::iter::from_fn(take).collect();
    assert_eq!((pages.len(), quota.charged()), (3, 3));
    assert_eq!(tuple(&pool), [6, 3, 0, 0]);
    pages.pop();
    quota.uncharge(1);
    pages.extend(take());
    assert_eq!((pages.len(), quota.peak()), (3, 3));
}

#[test]
fn placement_keeps_pages_to_its_nodes() {
    let nodes = |numbers: &[u32]| -> NodeSet { numbers.iter().copied().map(NodeId).collect() };
    let pool = Pool::new(Model::new(&[8, 8, 8]).unwrap(), Placement::ANYWHERE);
    assert_eq!(pool.resize(Pages(6)).persistent, Pages(6));
    for node in pool.nodes().iter() {
        assert_eq!(pool.node_counters(node).total, Pages(2), "spread evenly");
    }
    pool.set_overcommit(Pages(1));
    let only = Placement::on(nodes(&[1]));
    let pages: Vec<Page> = (0..3).map(|_| pool.take_placed(only).unwrap()).collect();
    assert!(pages.iter().all(|page| page.node() == NodeId(1)));
    assert_eq!(tuple(&pool), [7, 4, 0, 1]);
    assert_eq!(
        pool.take_placed(only).unwrap_err().to_string(),
        "pool exhausted: 6 pages, overcommit 1: 3 taken, 4 free on nodes not allowed; 1 wanted"
    );
    assert!(matches!(
        pool.take_placed(Placement::on(nodes(&[5]))),
        Err(Error::Placement)
    ));
    // A page of another node stays in the pool: its node has no surplus.
    drop(pool.take_placed(Placement::on(nodes(&[2]))).unwrap());
    assert_eq!(tuple(&pool), [7, 4, 0, 1]);
    let preferring = Placement::ANYWHERE.preferring(nodes(&[2]));
    let preferred: Vec<Page> = (0..3)
        .map(|_| pool.take_placed(preferring).unwrap())
        .collect();
    let on: Vec<u32> = preferred.iter().map(|page| page.node().0).collect();
    assert_eq!(on, [2, 2, 0]);
    drop((pages, preferred));
    assert_eq!(tuple(&pool), [6, 6, 0, 0]);
    assert_eq!(pool.resize_node(NodeId(1), Pages(0)).persistent, Pages(0));
    assert_eq!(pool.node_counters(NodeId(1)).total, Pages(0));
    assert_eq!(tuple(&pool), [4, 4, 0, 0]);
}

#[test]
fn a_source_that_fails_halfway_changes_nothing() {
    let model = Model::new(&[16]).unwrap();
    let supply = model.supply();
    let pool = Pool::new(model, Placement::ANYWHERE);
    pool.resize(Pages(2));
    pool.set_overcommit(Pages(8));
    supply.fail_after(3);
    let error = pool.reserve(Pages(6)).unwrap_err();
    assert!(error.to_string().contains("told to fail"), "{error}");
    assert_eq!((tuple(&pool), supply.out(NodeId(0))), ([2, 2, 0, 0], 2));
    supply.heal();
    assert_eq!(pool.reserve(Pages(6)).unwrap().left(), Pages(6));
}

#[test]
fn a_full_window_is_an_error() {
    let pool = pool(60, 100);
    let four = pool.reserve(Pages(64)).unwrap();
    assert!(matches!(pool.take(), Err(Error::Window { .. })));
    drop(four);
    assert_eq!(tuple(&pool), [60, 60, 0, 0]);
}

#[test]
fn a_page_holds_what_is_written_and_zeroes_on_request() {
    let pool = pool(1, 0);
    let mut page = pool.take().unwrap();
    page.bytes_mut().fill(7);
    assert!(page.bytes().iter().all(|byte| *byte == 7));
    drop(page);
    let page = pool.take_zeroed().unwrap();
    assert!(page.bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn everything_goes_back_to_the_source() {
    let model = Model::new(&[4, 4]).unwrap();
    let supply = model.supply();
    let pool = Pool::new(model, Placement::ANYWHERE);
    pool.resize(Pages(6));
    drop(pool.take().unwrap());
    assert_eq!(supply.out(NodeId(0)) + supply.out(NodeId(1)), 6);
    drop(pool);
    assert_eq!(supply.out(NodeId(0)) + supply.out(NodeId(1)), 0);
}
