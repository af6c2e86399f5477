//! Readers on all CPUs while a writer changes the descriptors.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jumbo::units::{Bytes, Order, PageSize};
use jumbo::vmemmap::{Error, Geometry, Vmemmap};
use jumbo_host::kernel::Root;

const HUGE_BYTES: u64 = 2 << 20;
const PAGES: u64 = 4;
const TEST_TIME: Duration = Duration::from_secs(3);

fn table() -> Vmemmap {
    let geometry = Geometry::new(PageSize::SIZE_4K, PageSize::SIZE_2M).unwrap();
    let vmemmap = Vmemmap::new(0..PAGES * HUGE_BYTES, geometry).unwrap();
    for page in 0..PAGES {
        vmemmap.prepare(page * HUGE_BYTES, Order(9)).unwrap();
    }
    vmemmap
}

fn descriptors(vmemmap: &Vmemmap) -> Bytes {
    vmemmap.resident(&Root::host()).unwrap().descriptors
}

/// A writer's round of all transitions of descriptors. A reader's reference may block it.
fn round(vmemmap: &Vmemmap, head: u64) -> u64 {
    let done = [
        vmemmap.restore(head),
        vmemmap.optimise(head).map(drop),
        vmemmap.split(head, Order(0)),
        vmemmap.merge(head, Order(9)).map(drop),
        vmemmap.split(head, Order(7)),
        vmemmap.split(head, Order(3)),
        vmemmap.merge(head, Order(8)).map(drop),
        vmemmap.merge(head, Order(9)).map(drop),
    ];
    let fine = |done: &Result<(), Error>| match done {
        Ok(()) => true,
        Err(Error::Busy { .. } | Error::Order { .. }) => false,
        Err(error) => panic!("{error}"),
    };
    done.iter().filter(|done| fine(done)).count() as u64
}

/// Merges a page that a round left split because of a reader's reference.
fn mend(vmemmap: &Vmemmap, head: u64) {
    if vmemmap.order_of(head) != Some(Order(9)) {
        // Readers of this test drop their references soon.
        while matches!(vmemmap.merge(head, Order(9)), Err(Error::Busy { .. })) {
            std::thread::yield_now();
        }
    }
}

#[test]
fn readers_are_right_while_pages_change() {
    let vmemmap = table();
    let stop = AtomicBool::new(false);
    let [changes, looks, holds] = [(); 3].map(|()| AtomicU64::new(0));
    std::thread::scope(|scope| {
        for seed in 1..=2u64 {
            let (vmemmap, stop, looks) = (&vmemmap, &stop, &looks);
            scope.spawn(move || {
                let mut at = seed;
                while !stop.load(Ordering::Relaxed) {
                    at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let address = (at >> 20) % (PAGES * HUGE_BYTES);
                    let seen = vmemmap
                        .head_of(address)
                        .expect("it is always a part of some page");
                    let size = 4096u64 << seen.order.0;
                    assert_eq!(seen.head, address / size * size);
                    assert!([0, 3, 7, 8, 9].contains(&seen.order.0), "{seen:?}");
                    looks.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(|| {
            let mut at = 99u64;
            while !stop.load(Ordering::Relaxed) {
                at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let address = (at >> 20) % (PAGES * HUGE_BYTES - HUGE_BYTES);
                if at & 1 << 60 == 0 {
                    let held = vmemmap.get(address).unwrap();
                    let page = held.compound();
                    for _ in 0..10 {
                        assert_eq!(vmemmap.head_of(address), Some(page));
                        assert_eq!(vmemmap.head_of(page.head), Some(page));
                    }
                } else {
                    let pinned = vmemmap.pin(address..address + HUGE_BYTES).unwrap();
                    assert!(vmemmap.users(address).unwrap().pins > 0);
                    drop(pinned);
                }
                holds.fetch_add(1, Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        let start = Instant::now();
        while start.elapsed() < TEST_TIME {
            for page in 0..PAGES {
                changes.fetch_add(round(&vmemmap, page * HUGE_BYTES), Ordering::Relaxed);
                mend(&vmemmap, page * HUGE_BYTES);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    for page in 0..PAGES {
        mend(&vmemmap, page * HUGE_BYTES);
        vmemmap.optimise(page * HUGE_BYTES).unwrap();
        assert_eq!(vmemmap.order_of(page * HUGE_BYTES + 5000), Some(Order(9)));
        let users = vmemmap.users(page * HUGE_BYTES).unwrap();
        assert_eq!((users.references, users.pins), (0, 0));
    }
    // A write to a descriptor after its release would have populated memory again.
    assert_eq!(descriptors(&vmemmap), Bytes(0));
    for counted in [changes, looks, holds] {
        assert!(counted.into_inner() > 100);
    }
}

#[test]
fn writers_of_several_threads_share_a_table() {
    let vmemmap = table();
    std::thread::scope(|scope| {
        for page in 0..PAGES {
            let vmemmap = &vmemmap;
            scope.spawn(move || {
                for _ in 0..500 {
                    assert_eq!(round(vmemmap, page * HUGE_BYTES), 8);
                }
            });
        }
    });
    assert_eq!(descriptors(&vmemmap), Bytes(0));
    // All threads at one page: each change succeeds in one thread.
    let done: u64 = std::thread::scope(|scope| {
        let all = [(); 4].map(|()| {
            scope.spawn(|| (0..500).filter(|_| vmemmap.release(0).is_ok()).count() as u64)
        });
        all.map(|thread| thread.join().unwrap()).iter().sum()
    });
    assert_eq!((done, vmemmap.head_of(0)), (1, None));
}
