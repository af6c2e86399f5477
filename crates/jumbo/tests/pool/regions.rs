//! Regions over the model: what is reserved, what is in place, and what comes back.

#![allow(unsafe_code, reason = "hands a region's file on")]

use crate::books;
use std::sync::atomic::Ordering;

use jumbo::pool::{Error, Mapped, Model, Placement, Pool, Populate};
use jumbo::units::{NodeId, Pages};

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
    // The pages are where they were, and serve again.
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

#[test]
fn a_region_of_a_subpool_is_charged_to_it() {
    let pool = pool(8, 0);
    let subpool = pool.subpool(Some(Pages(4)), Pages(2)).unwrap();
    let reservation = subpool.reserve(Pages(4)).unwrap();
    let region = reservation.into_region(Populate::UpFront).unwrap();
    assert_eq!((subpool.charged(), tuple(&pool)), (Pages(4), [8, 4, 0, 0]));
    assert!(matches!(subpool.take(), Err(Error::Quota { .. })));
    drop(region);
    assert_eq!((subpool.charged(), tuple(&pool)), (Pages(0), [8, 8, 2, 0]));
}

#[test]
fn a_shared_region_is_counted_like_its_pages() {
    let pool = pool(4, 4);
    let mut region = pool
        .shared_region(c"jumbo-test", Pages(6), Populate::OnTake)
        .unwrap();
    assert_eq!(tuple(&pool), [6, 6, 6, 2]);
    region.page(1).unwrap()[7].store(42, Ordering::Relaxed);
    region.page(5).unwrap()[0].store(43, Ordering::Relaxed);
    assert_eq!(tuple(&pool), [6, 4, 4, 2]);
    assert!(region.page(6).is_err());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains("/memfd:jumbo-test"), "no name in {maps}");
    // SAFETY: no hole is punched into the file.
    let handed = unsafe { region.file() }.try_clone_to_owned().unwrap();
    // SAFETY: as above.
    let other = unsafe { Mapped::of(handed) }.unwrap();
    let seen = other.bytes(PAGE..2 * PAGE).unwrap();
    assert_eq!(seen[7].load(Ordering::Relaxed), 42);
    assert!(other.bytes(0..6 * PAGE + 1).is_err());
    drop(region);
    assert_eq!(tuple(&pool), [4, 4, 0, 0]);
    // What was handed over is there until it is let go.
    let seen = other.bytes(5 * PAGE..6 * PAGE).unwrap();
    assert_eq!(seen[0].load(Ordering::Relaxed), 43);
}

#[test]
fn a_shared_region_that_cannot_be_had_changes_nothing() {
    let model = Model::new(&[64]).unwrap();
    let supply = model.supply();
    let pool = Pool::new(model, Placement::ANYWHERE);
    pool.resize(Pages(4));
    let error = pool.shared_region(c"x", Pages(5), Populate::OnTake);
    assert!(matches!(error, Err(Error::Exhausted(_))));
    assert_eq!(tuple(&pool), [4, 4, 0, 0]);
    // A page that does not come back from the kernel is missing from the total, and nowhere else.
    let region = pool
        .shared_region(c"x", Pages(3), Populate::UpFront)
        .unwrap();
    assert_eq!((tuple(&pool), supply.out(NodeId(0))), ([4, 1, 0, 0], 1));
    supply.fail_after(2);
    drop(region);
    assert_eq!((tuple(&pool), supply.out(NodeId(0))), ([3, 3, 0, 0], 3));
}

#[test]
fn a_file_that_could_be_cut_short_is_refused() {
    let file = rustix::fs::memfd_create(c"x", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, PAGE as u64).unwrap();
    // SAFETY: no hole is punched into the file.
    assert!(unsafe { Mapped::of(file) }.is_err());
}
