//! Tests with many threads: no page has two owners, no available page is refused, no page is lost.

use crate::books;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

use jumbo::pool::{Error, Model, Page, Placement, Pool, Region, Reservation, Supply};
use jumbo::units::{NodeId, Pages};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const THREADS: u64 = 6;

/// A xorshift generator with its own seed per thread.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

const _: () = {
    const fn between_threads<T: Send + Sync>() {}
    between_threads::<Pool>();
    between_threads::<Page>();
    between_threads::<Reservation>();
    between_threads::<Region>();
};

/// Returns the rounds per thread: by default a hundred thousand operations in all.
fn rounds() -> u64 {
    let asked = std::env::var("JUMBO_POOL_ROUNDS").ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(8_000)
}

/// Yields at random, so that threads interleave with few CPUs, too.
fn mix(random: &mut Random) {
    if random.below(8) == 0 {
        thread::yield_now();
    }
}

/// A page with its owner's mark at both ends.
struct Marked<'p> {
    page: Page<'p>,
    mark: u64,
}

impl<'p> Marked<'p> {
    fn new(mut page: Page<'p>, mark: u64) -> Self {
        let length = page.bytes().len();
        page.bytes_mut()[..8].copy_from_slice(&mark.to_ne_bytes());
        page.bytes_mut()[length - 8..].copy_from_slice(&mark.to_ne_bytes());
        Self { page, mark }
    }
}

impl Drop for Marked<'_> {
    fn drop(&mut self) {
        let bytes = self.page.bytes();
        let mark = self.mark.to_ne_bytes();
        assert!(
            bytes[..8] == mark && bytes[bytes.len() - 8..] == mark,
            "another thread wrote to this page"
        );
    }
}

fn out(supply: &Supply, nodes: u32) -> u64 {
    (0..nodes).map(|node| supply.out(NodeId(node))).sum()
}

#[test]
fn no_page_has_two_owners_and_none_is_lost() {
    let model = Model::new(&[200, 200]).unwrap();
    let supply = model.supply();
    let pool = Pool::new(model, Placement::ANYWHERE);
    pool.resize(Pages(48));
    pool.set_overcommit(Pages(24));
    let marks = AtomicU64::new(1);
    let work = |seed: u64| {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut pages: Vec<Marked> = Vec::new();
        let mut reservations = Vec::new();
        let mark = |page| Marked::new(page, marks.fetch_add(1, Ordering::Relaxed));
        for _ in 0..rounds() {
            mix(&mut random);
            match random.below(14) {
                0..5 => pages.extend(pool.take().map(mark)),
                5..10 => {
                    if !pages.is_empty() {
                        let at = random.below(pages.len() as u64);
                        pages.swap_remove(usize::try_from(at).unwrap());
                    }
                }
                10 => reservations.extend(pool.reserve(Pages(random.below(6)))),
                11 => drop(reservations.pop()),
                12 => {
                    let last = reservations.last_mut();
                    pages.extend(last.and_then(|one| one.take()).map(mark));
                }
                _ => {
                    let counters = pool.counters();
                    assert!(counters.reserved <= counters.free);
                    assert!(counters.free <= counters.total);
                    assert!(counters.surplus <= counters.total);
                }
            }
            if pages.len() > 12 || reservations.len() > 4 {
                pages.clear();
                reservations.clear();
            }
        }
    };
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let resizer = scope.spawn(|| {
            let mut random = Random(77);
            while !done.load(Ordering::Relaxed) {
                pool.resize(Pages(32 + random.below(32)));
                thread::yield_now();
            }
        });
        let workers: Vec<_> = (1..=THREADS)
            .map(|seed| scope.spawn(move || work(seed)))
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        resizer.join().unwrap();
    });
    books::check(&pool);
    let counters = pool.counters();
    assert_eq!((counters.used(), counters.reserved), (Pages(0), Pages(0)));
    assert_eq!(out(&supply, 2), counters.total.0);
    drop(pool);
    assert_eq!(out(&supply, 2), 0);
}

#[test]
fn what_one_cpu_gives_back_is_there_for_all() {
    let allowed = sched_getaffinity(None).unwrap();
    let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let model = Model::new(&[64]).unwrap();
    let supply = model.supply();
    let pool = Pool::new(model, Placement::ANYWHERE);
    pool.resize(Pages(24));
    pool.set_overcommit(Pages(8));
    thread::scope(|scope| {
        for cpu in cpus {
            let (pool, supply) = (&pool, &supply);
            let turn = scope.spawn(move || {
                let mut here = CpuSet::new();
                here.set(cpu);
                sched_setaffinity(None, &here).unwrap();
                let pages: Vec<Page> = (0..24).map(|_| pool.take().unwrap()).collect();
                assert_eq!(supply.out(NodeId(0)), 24, "a surplus page was made");
                drop(pages);
                assert_eq!(pool.counters().free, Pages(24));
                assert!(pool.reserve(Pages(24)).is_ok());
                drop((0..24).map(|_| pool.take().unwrap()).collect::<Vec<_>>());
            });
            turn.join().unwrap();
        }
    });
    books::check(&pool);
    assert_eq!(pool.counters().surplus, Pages(0));
}

#[test]
fn nothing_is_refused_and_nothing_made_while_a_page_is_free() {
    const PAGES_EACH: usize = 3;
    let pages = THREADS * PAGES_EACH as u64;
    let model = Model::new(&[64]).unwrap();
    let supply = model.supply();
    let pool = Pool::new(model, Placement::ANYWHERE);
    pool.resize(Pages(pages));
    // A free page must be found before a surplus page is allocated, so none ever is.
    pool.set_overcommit(Pages(8));
    thread::scope(|scope| {
        for seed in 1..=THREADS {
            let pool = &pool;
            let supply = &supply;
            scope.spawn(move || {
                let mut random = Random(seed);
                let mut held: Vec<Page> = Vec::new();
                for _ in 0..rounds() {
                    mix(&mut random);
                    if held.len() < PAGES_EACH && random.below(2) == 0 {
                        held.push(pool.take().unwrap());
                    } else {
                        held.pop();
                    }
                    assert_eq!(supply.out(NodeId(0)), pages);
                }
            });
        }
    });
    books::check(&pool);
    let counters = pool.counters();
    let seen = (counters.total.0, counters.free.0, counters.surplus.0);
    assert_eq!(seen, (pages, pages, 0));
}

#[test]
fn the_overcommit_limit_holds_and_all_surplus_goes_back() {
    let model = Model::new(&[64]).unwrap();
    let supply = model.supply();
    let pool = Pool::new(model, Placement::ANYWHERE);
    pool.resize(Pages(8));
    pool.set_overcommit(Pages(4));
    let (taken, refused) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for seed in 1..=THREADS {
            let (pool, taken, refused) = (&pool, &taken, &refused);
            scope.spawn(move || {
                let mut random = Random(seed);
                let mut held: Vec<Page> = Vec::new();
                for _ in 0..rounds() {
                    mix(&mut random);
                    if random.below(2) == 0 {
                        match pool.take() {
                            Ok(page) => {
                                let now = taken.fetch_add(1, Ordering::SeqCst) + 1;
                                assert!(now <= 12, "{now} pages are out");
                                held.push(page);
                            }
                            Err(Error::Exhausted(counters)) => {
                                refused.fetch_add(1, Ordering::SeqCst);
                                assert!(counters.surplus.0 <= 4 && counters.persistent.0 == 8);
                            }
                            Err(error) => panic!("{error}"),
                        }
                    } else if let Some(page) = held.pop() {
                        taken.fetch_sub(1, Ordering::SeqCst);
                        drop(page);
                    }
                }
                taken.fetch_sub(held.len() as u64, Ordering::SeqCst);
            });
        }
    });
    assert!(
        refused.load(Ordering::SeqCst) > 0,
        "the limit was never met"
    );
    books::check(&pool);
    let counters = pool.counters();
    let seen = (counters.total.0, counters.free.0, counters.surplus.0);
    assert_eq!((seen, supply.out(NodeId(0))), ((8, 8, 0), 8));
}

#[test]
fn pages_that_one_thread_takes_and_another_gives_come_round() {
    let pool = Pool::new(Model::new(&[64]).unwrap(), Placement::ANYWHERE);
    pool.resize(Pages(40));
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::sync_channel::<Page>(20);
        scope.spawn(|| {
            for page in receiver {
                drop(page);
            }
        });
        // At most 22 pages are in use at a time, so none may be refused.
        for _ in 0..rounds() {
            sender.send(pool.take().unwrap()).unwrap();
        }
        drop(sender);
    });
    books::check(&pool);
    assert_eq!(pool.counters().free, Pages(40));
}
