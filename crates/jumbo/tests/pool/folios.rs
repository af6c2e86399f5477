//! Folios of split pages, compared with a map of base pages, with the pool's counters and with the
//! kernel's.

use crate::books;
use std::collections::HashSet;
use std::ptr::NonNull;

use jumbo::pool::{Error, Folio, Model, Page, Placement, Pool};
use jumbo::units::{Order, Pages};
use proptest::prelude::*;

use crate::sources::{BYTES, KernelPool, hugetlb, thp, tuple, with_thp};

/// Base pages per huge page.
const BASE_PAGES: usize = 512;
const BASE_BYTES: usize = BYTES / BASE_PAGES;
/// Pages in the pool.
const MAX_PAGES: u64 = 3;

#[derive(Clone, Debug)]
enum Op {
    Folio(u32),
    GiveFolio(usize),
    Take,
    Give(usize),
}

fn operations() -> impl Strategy<Value = Vec<Op>> {
    let order = prop_oneof![2 => 0..4u32, 2 => 4..9u32, 1 => Just(8u32)];
    let op = prop_oneof![
        8 => order.prop_map(Op::Folio),
        6 => any::<usize>().prop_map(Op::GiveFolio),
        1 => Just(Op::Take),
        2 => any::<usize>().prop_map(Op::Give),
    ];
    prop::collection::vec(op, 1..120)
}

fn number(address: NonNull<u8>) -> usize {
    address.addr().get() / BASE_BYTES
}

/// A folio in use: its first base page and its contents.
struct Out<'p> {
    folio: Folio<'p>,
    first: usize,
    mark: u64,
}

impl<'p> Out<'p> {
    fn new(mut folio: Folio<'p>, mark: u64) -> Self {
        for base in folio.bytes_mut().chunks_mut(BASE_BYTES) {
            base[..8].copy_from_slice(&mark.to_ne_bytes());
        }
        let first = number(folio.as_ptr());
        Self { folio, first, mark }
    }

    fn order(&self) -> u32 {
        self.folio.order().0
    }

    fn check(&self, pool: &Pool) {
        let bytes = self.folio.bytes();
        assert_eq!(bytes.len(), BASE_BYTES << self.order());
        assert!(self.first.is_multiple_of(1 << self.order()));
        let mut bases = bytes.chunks(BASE_BYTES);
        assert!(bases.all(|base| base[..8] == self.mark.to_ne_bytes()));
        let last = NonNull::from(&bytes[bytes.len() - 1]);
        let seen = pool.compound_of(last).unwrap();
        let found = (usize::try_from(seen.head).unwrap() / BASE_BYTES, seen.order);
        assert_eq!(found, (self.first, Order(self.order())));
    }
}

/// Reports whether a huge page has a free aligned part of this order; `used` has the base pages in
/// use.
fn has_room(used: &HashSet<usize>, page: usize, order: u32) -> bool {
    let parts = (page..page + BASE_PAGES).step_by(1 << order);
    parts
        .into_iter()
        .any(|first| (first..first + (1 << order)).all(|base| !used.contains(&base)))
}

#[derive(Default)]
struct State<'p> {
    folios: Vec<Out<'p>>,
    pages: Vec<Page<'p>>,
    marks: u64,
}

impl<'p> State<'p> {
    fn used(&self) -> HashSet<usize> {
        let bases = |out: &Out<'_>| out.first..out.first + (1 << out.order());
        self.folios.iter().flat_map(bases).collect()
    }

    /// Returns the split pages: those with a folio in use.
    fn split(&self) -> HashSet<usize> {
        let page = |out: &Out<'_>| out.first / BASE_PAGES * BASE_PAGES;
        self.folios.iter().map(page).collect()
    }

    fn apply(&mut self, pool: &'p Pool, op: &Op) {
        let taken = (self.pages.len() + self.split().len()) as u64;
        match *op {
            Op::Folio(order) => {
                let used = self.used();
                let room = self
                    .split()
                    .iter()
                    .any(|page| has_room(&used, *page, order));
                let folio = pool.take_folio(Order(order));
                assert_eq!(folio.is_ok(), room || taken < MAX_PAGES, "{folio:?}");
                if let Ok(folio) = folio {
                    let split = self.split();
                    self.marks += 1;
                    let out = Out::new(folio, self.marks);
                    let bases = out.first..out.first + (1 << order);
                    assert!(bases.into_iter().all(|base| !used.contains(&base)));
                    // No page is split while another has room.
                    assert_eq!(split.contains(&(out.first / BASE_PAGES * BASE_PAGES)), room);
                    self.folios.push(out);
                }
            }
            Op::GiveFolio(nth) if !self.folios.is_empty() => {
                drop(self.folios.swap_remove(nth % self.folios.len()));
            }
            Op::Take => match pool.take() {
                Ok(page) => self.pages.push(page),
                Err(error) => assert!(taken == MAX_PAGES, "{error}"),
            },
            Op::Give(nth) if !self.pages.is_empty() => {
                drop(self.pages.swap_remove(nth % self.pages.len()));
            }
            Op::GiveFolio(_) | Op::Give(_) => {}
        }
        self.check(pool);
    }

    /// A split page counts as one used page in all counters.
    fn check(&self, pool: &Pool) {
        books::check(pool);
        let (split, used) = (self.split().len(), self.used().len());
        let taken = (self.pages.len() + split) as u64;
        let counters = pool.counters();
        assert_eq!(counters.used(), Pages(taken));
        assert_eq!(
            (counters.total, counters.reserved),
            (Pages(MAX_PAGES), Pages(0))
        );
        let counts = pool.split();
        let expected = [split, used, split * BASE_PAGES - used].map(|n| Pages(n as u64));
        assert_eq!([counts.pages, counts.used, counts.free], expected);
        for out in &self.folios {
            out.check(pool);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn folios_are_parts_of_as_few_pages_as_can_be(operations in operations()) {
        if let Some(_alone) = with_thp() {
            let pool = thp(8);
            assert_eq!(pool.resize(Pages(MAX_PAGES)).stopped, None);
            let mut state = State::default();
            for op in &operations {
                state.apply(&pool, op);
            }
            drop(state);
            assert_eq!(tuple(&pool), [MAX_PAGES, MAX_PAGES, 0, 0]);
        }
    }
}

/// Surplus: the split page comes on demand, and is freed with its last folio.
#[test]
fn a_split_page_is_a_page_that_is_taken() {
    let Some(_kernel) = KernelPool::with(4, 0) else {
        return;
    };
    let pool = hugetlb();
    pool.set_overcommit(Pages(1));
    let mut folios: Vec<_> = (0..8).map(|_| pool.take_folio(Order(6)).unwrap()).collect();
    assert_eq!(tuple(&pool), [1, 0, 0, 1]);
    for (nth, folio) in (1..).zip(&mut folios) {
        folio.bytes_mut().fill(nth);
        assert_eq!(folio.order(), Order(6));
    }
    assert!(matches!(
        pool.take_folio(Order(0)),
        Err(Error::Exhausted(_))
    ));
    assert!(matches!(
        pool.take_folio(Order(9)),
        Err(Error::Order { .. })
    ));
    for (nth, folio) in (1..).zip(&folios) {
        assert!(folio.bytes().iter().all(|byte| *byte == nth));
    }
    let mut last = folios.pop().unwrap();
    let address = last.as_ptr();
    assert_eq!(pool.compound_of(address).unwrap().order, Order(6));
    drop(folios);
    assert_eq!(tuple(&pool), [1, 0, 0, 1]);
    drop(last);
    assert_eq!(tuple(&pool), [0; 4]);
    assert_eq!(pool.compound_of(address), None);
    // The page is whole again.
    assert_eq!(pool.take().unwrap().bytes().len(), BYTES);
}

#[test]
fn threads_share_split_pages() {
    let Some(_alone) = with_thp() else {
        return;
    };
    let pool = thp(16);
    pool.set_overcommit(Pages(16));
    let work = |seed: u64| {
        let pool = &pool;
        move || {
            let (mut held, mut at) = (Vec::new(), seed);
            for mark in 0..3000u64 {
                at = at
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(seed);
                if let Ok(folio) = pool.take_folio(Order(u32::try_from(at >> 40).unwrap() % 8)) {
                    held.push(Out::new(folio, seed << 32 | mark));
                }
                if held.len() > 6 {
                    let out = held.swap_remove(usize::try_from(at >> 33).unwrap() % held.len());
                    out.check(pool);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for seed in 1..=4 {
            scope.spawn(work(seed));
        }
    });
    books::check(&pool);
    assert_eq!((tuple(&pool), pool.split().pages), ([0; 4], Pages(0)));
}

#[test]
fn base_pages_and_pools_without_folios_have_none() {
    let of_base_pages = Pool::new(Model::new(&[16]).unwrap(), Placement::ANYWHERE);
    of_base_pages.set_overcommit(Pages(1));
    let error = of_base_pages.take_folio(Order(0)).unwrap_err();
    assert!(matches!(error, Error::Undescribed(_)), "{error}");
    assert_eq!(of_base_pages.split().pages, Pages(0));
    let without = Pool::without_folios(Model::new(&[16]).unwrap(), Placement::ANYWHERE);
    let error = without.take_folio(Order(0)).unwrap_err();
    assert_eq!(error, Error::WithoutFolios);
}
