//! Regions over the model: reserved, populated and freed pages.

use crate::books;

use jumbo::pool::{Error, Model, Placement, Pool, Populate};
use jumbo::units::Pages;

const PAGE: usize = 4096;

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
    pool.resize(Pages(persistent));
    pool.set_overcommit(Pages(overcommit));
    pool
}

#[test]
fn a_private_region_has_its_pages_side_by_side() {
    let pool = pool(4, 2);
    let mut region = pool.region(Pages(6), Populate::UpFront).unwrap();
    assert_eq!(tuple(&pool), [6, 0, 0, 2]);
    let bytes = region.bytes_mut(0..6).unwrap();
    assert_eq!(bytes.len(), 6 * PAGE);
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::try_from(at / PAGE).unwrap();
    }
    let part = region.bytes_mut(2..4).unwrap();
    assert!((part[0], part[2 * PAGE - 1]) == (2, 3));
    drop(region);
    assert_eq!(tuple(&pool), [4, 4, 0, 0]);
    // The pages are back and reusable.
    let mut pages: Vec<_> = (0..4).map(|_| pool.take().unwrap()).collect();
    for page in &mut pages {
        page.bytes_mut().fill(1);
    }
}

#[test]
fn a_region_takes_its_pages_when_they_are_asked_for() {
    let pool = pool(4, 0);
    let mut region = pool.region(Pages(3), Populate::OnTake).unwrap();
    assert_eq!(tuple(&pool), [4, 4, 3, 0]);
    region.bytes_mut(1..2).unwrap().fill(9);
    assert_eq!(tuple(&pool), [4, 3, 2, 0]);
    region.populate(0..3).unwrap();
    assert_eq!(tuple(&pool), [4, 1, 0, 0]);
    assert!(
        region
            .bytes_mut(1..2)
            .unwrap()
            .iter()
            .all(|byte| *byte == 9)
    );
    drop(region);
    assert_eq!(tuple(&pool), [4, 4, 0, 0]);
    assert!(matches!(
        pool.region(Pages(5), Populate::OnTake),
        Err(Error::Exhausted(_))
    ));
}
