//! Random operations on a table and on a model: a vector with the owner of each base page.
//!
//! After each operation both agree on every page, and finally on the descriptors' resident memory.

use std::ops::Range;

use jumbo::units::{Bytes, Order, PageSize, Pages};
use jumbo::vmemmap::{Error, Geometry, Pinned, Reference, Saving, Vmemmap};
use jumbo_host::kernel::Root;
use proptest::prelude::*;

/// Sections of the table, and its offset in the first GiB.
const SECTIONS: usize = 6;
const FIRST_SECTION: usize = 3;
const GIB: u64 = 1 << 30;

#[derive(Clone, Debug)]
enum Op {
    Prepare(usize, u32),
    Release(usize),
    Optimise(usize),
    Restore(usize),
    Split(usize, u32),
    Merge(usize, u32),
    Get(usize),
    Put(usize),
    Pin(usize, usize),
    Unpin(usize),
    Own(usize, u64),
}

/// Places are mostly page starts. Orders are relative to that of a section.
fn operations() -> impl Strategy<Value = Vec<Op>> {
    let place = || prop_oneof![6 => (0..SECTIONS * 4).prop_map(|quarter| quarter << 30), 1 => any::<u32>().prop_map(|n| n as usize)];
    let order = || prop_oneof![4 => 6..12u32, 1 => 0..6u32];
    let op = prop_oneof![
        6 => (place(), order()).prop_map(|(at, order)| Op::Prepare(at, order)),
        2 => place().prop_map(Op::Release),
        2 => place().prop_map(Op::Optimise),
        3 => place().prop_map(Op::Restore),
        4 => (place(), order()).prop_map(|(at, order)| Op::Split(at, order)),
        4 => (place(), order()).prop_map(|(at, order)| Op::Merge(at, order)),
        2 => place().prop_map(Op::Get),
        3 => any::<usize>().prop_map(Op::Put),
        2 => (place(), 1..3000usize).prop_map(|(at, count)| Op::Pin(at, count)),
        3 => any::<usize>().prop_map(Op::Unpin),
        2 => (place(), any::<u64>()).prop_map(|(at, word)| Op::Own(at, word)),
    ];
    prop::collection::vec(op, 1..60)
}

/// Huge page that a base page is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    head: usize,
    order: u32,
    is_described: bool,
    references: u64,
    pins: u64,
    owner: u64,
}

/// Model of the table; page numbers are relative to the range.
struct Plain {
    geometry: Geometry,
    parts: Vec<Option<Part>>,
}

/// Expected error, as far as the model distinguishes.
#[derive(Debug, PartialEq, Eq)]
enum No {
    Absent,
    Tail,
    Busy,
    Order,
    Taken,
    Outside,
}

impl From<Error> for No {
    fn from(error: Error) -> Self {
        match error {
            Error::Absent { .. } => Self::Absent,
            Error::Tail { .. } => Self::Tail,
            Error::Busy { .. } => Self::Busy,
            Error::Order { .. } => Self::Order,
            Error::Taken { .. } => Self::Taken,
            Error::Outside { .. } => Self::Outside,
            other => panic!("{other}"),
        }
    }
}

impl Plain {
    fn section(&self) -> u32 {
        self.geometry.section().0
    }

    fn fill(&mut self, pages: Range<usize>, order: u32, is_described: bool, owner: u64) {
        let first = pages.start;
        for page in pages {
            self.parts[page] = Some(Part {
                head: first + ((page - first) >> order << order),
                order,
                is_described,
                references: 0,
                pins: 0,
                owner,
            });
        }
    }

    fn head(&self, page: usize) -> Result<Part, No> {
        let part = self.parts[page].ok_or(No::Absent)?;
        (part.head == page).then_some(part).ok_or(No::Tail)
    }

    fn idle(part: &Part) -> Result<(), No> {
        (part.references == 0).then_some(()).ok_or(No::Busy)
    }

    fn block(&self, page: usize, order: u32) -> Result<Range<usize>, No> {
        // The range starts at a section, within larger pages.
        let absolute = page + (FIRST_SECTION << self.section());
        if !absolute.is_multiple_of(1 << order) {
            return Err(No::Order);
        }
        let end = page + (1 << order);
        (end <= self.parts.len())
            .then_some(page..end)
            .ok_or(No::Outside)
    }

    fn change(&mut self, pages: Range<usize>, change: impl Fn(&mut Part)) {
        let heads = self.parts[pages].iter().flatten().map(|part| part.head);
        let heads: Vec<usize> = heads.collect();
        for head in heads {
            let pages = head..head + (1 << self.parts[head].unwrap().order);
            for part in self.parts[pages].iter_mut().flatten() {
                change(part);
            }
        }
    }

    fn apply(&mut self, op: &Op) -> Result<Option<Saving>, No> {
        let saving = |plain: &Self, order| Some(plain.geometry.saving(Order(order)));
        match *op {
            Op::Prepare(page, order) => {
                let pages = self.block(page, order)?;
                if self.parts[pages.clone()].iter().any(Option::is_some) {
                    return Err(No::Taken);
                }
                self.fill(pages, order, order < self.section(), 0);
                return Ok(saving(self, order));
            }
            Op::Release(page) => {
                let part = self.head(page)?;
                Self::idle(&part)?;
                self.parts[page..page + (1 << part.order)].fill(None);
            }
            Op::Optimise(page) => {
                let part = self.head(page)?;
                if part.order >= self.section() && part.is_described {
                    Self::idle(&part)?;
                    self.change(page..page + 1, |part| part.is_described = false);
                }
                return Ok(saving(self, part.order));
            }
            Op::Restore(page) => {
                let part = self.head(page)?;
                if !part.is_described {
                    Self::idle(&part)?;
                    self.change(page..page + 1, |part| part.is_described = true);
                }
            }
            Op::Split(page, to) => {
                let part = self.head(page)?;
                if to >= part.order {
                    return Err(No::Order);
                }
                Self::idle(&part)?;
                let is_described = part.is_described || to < self.section();
                self.fill(page..page + (1 << part.order), to, is_described, part.owner);
            }
            Op::Merge(page, order) => {
                let pages = self.block(page, order)?;
                let first = self.head(page)?;
                let mut at = page;
                while at < pages.end {
                    let part = self.head(at)?;
                    if part.order >= order {
                        return Err(No::Order);
                    }
                    Self::idle(&part)?;
                    at += 1 << part.order;
                }
                self.fill(pages, order, order < self.section(), first.owner);
                return Ok(saving(self, order));
            }
            Op::Get(page) => {
                self.parts[page].ok_or(No::Absent)?;
                self.change(page..page + 1, |part| part.references += 1);
            }
            Op::Own(page, word) => {
                self.parts[page].ok_or(No::Absent)?;
                self.change(page..page + 1, |part| part.owner = word);
            }
            Op::Pin(page, count) => {
                let end = page + count;
                let inside = self.parts.get(page..end).ok_or(No::Outside)?;
                if inside.iter().any(Option::is_none) {
                    return Err(No::Absent);
                }
                self.pin(page..end, 1);
            }
            Op::Put(_) | Op::Unpin(_) => {}
        }
        Ok(None)
    }

    /// Changes the counts of the head for each page; all pages of the head show them.
    fn pin(&mut self, pages: Range<usize>, sign: i64) {
        for page in pages {
            self.change(page..page + 1, |part| {
                part.references = part.references.wrapping_add_signed(sign);
                part.pins = part.pins.wrapping_add_signed(sign);
            });
        }
    }
}

/// The table, the references to it, and the model.
struct Both<'v> {
    vmemmap: &'v Vmemmap,
    plain: Plain,
    references: Vec<(usize, Reference<'v>)>,
    pins: Vec<(Range<usize>, Pinned<'v>)>,
}

impl<'v> Both<'v> {
    fn at(&self, page: usize) -> u64 {
        self.vmemmap.range().start + page as u64 * self.plain.geometry.base().bytes()
    }

    fn apply(&mut self, op: &Op) {
        let expected = self.plain.apply(op);
        let none = |done: Result<(), Error>| done.map(|()| None);
        let vmemmap = self.vmemmap;
        let done = match *op {
            Op::Prepare(page, order) => vmemmap.prepare(self.at(page), Order(order)).map(Some),
            // Any byte of a page is valid.
            Op::Release(page) => none(vmemmap.release(self.at(page) + 1)),
            Op::Optimise(page) => vmemmap.optimise(self.at(page)).map(Some),
            Op::Restore(page) => none(vmemmap.restore(self.at(page))),
            Op::Split(page, to) => none(vmemmap.split(self.at(page), Order(to))),
            Op::Merge(page, order) => vmemmap.merge(self.at(page), Order(order)).map(Some),
            Op::Get(page) => vmemmap.get(self.at(page)).map(|got| {
                self.references.push((page, got));
                None
            }),
            Op::Own(page, word) => none(vmemmap.get(self.at(page)).map(|it| it.set_owner(word))),
            Op::Pin(page, count) => {
                let pages = page..page + count;
                let pinned = vmemmap.pin(self.at(pages.start)..self.at(pages.end));
                pinned.map(|pinned| {
                    assert_eq!(pinned.addresses(), self.at(page)..self.at(pages.end));
                    self.pins.push((pages, pinned));
                    None
                })
            }
            Op::Put(nth) if !self.references.is_empty() => {
                let (page, _) = self.references.swap_remove(nth % self.references.len());
                self.plain
                    .change(page..page + 1, |part| part.references -= 1);
                Ok(None)
            }
            Op::Unpin(nth) if !self.pins.is_empty() => {
                let (pages, _) = self.pins.swap_remove(nth % self.pins.len());
                self.plain.pin(pages, -1);
                Ok(None)
            }
            Op::Put(_) | Op::Unpin(_) => Ok(None),
        };
        assert_eq!(done.map_err(No::from), expected, "{op:?}");
    }

    fn check(&self) {
        for (page, part) in self.plain.parts.iter().enumerate() {
            let at = self.at(page) + 7;
            let head = self.vmemmap.head_of(at).map(|it| (it.head, it.order));
            let expected = part.map(|part| (self.at(part.head), Order(part.order)));
            assert_eq!(head, expected, "page {page}");
            assert_eq!(self.vmemmap.order_of(at), expected.map(|it| it.1));
            if part.is_none_or(|part| part.head == page) {
                let users = self.vmemmap.users(at).map(|it| (it.references, it.pins));
                assert_eq!(
                    users,
                    part.map(|part| (part.references, part.pins)),
                    "page {page}"
                );
                assert_eq!(
                    self.vmemmap.owner(at),
                    part.map(|part| part.owner),
                    "page {page}"
                );
            }
        }
    }

    /// Checks that the descriptors of described sections are resident, and no others.
    fn check_memory(&self) {
        let section = self.plain.geometry.section();
        let sections = self.plain.parts.chunks(1 << section.0);
        let described = sections.filter(|pages| pages.iter().flatten().any(|it| it.is_described));
        let expected = self.plain.geometry.descriptors(section).0 * described.count() as u64;
        let resident = self.vmemmap.resident(&Root::host()).unwrap();
        assert_eq!(resident.descriptors, Bytes(expected));
    }
}

/// Scales orders as for sections of order 9, and places as quarters of sections.
fn scaled(op: &Op, geometry: Geometry) -> Op {
    let section = geometry.section().0;
    let pages = SECTIONS << section;
    let place = |at: usize| match at >> 30 {
        0 => at % pages,
        quarter => ((quarter << section) / 4) % pages,
    };
    let order = |order: u32| (order + section).saturating_sub(9);
    match *op {
        Op::Prepare(at, by) => Op::Prepare(place(at), order(by)),
        Op::Release(at) => Op::Release(place(at)),
        Op::Optimise(at) => Op::Optimise(place(at)),
        Op::Restore(at) => Op::Restore(place(at)),
        Op::Split(at, by) => Op::Split(place(at), order(by)),
        Op::Merge(at, by) => Op::Merge(place(at), order(by)),
        Op::Get(at) => Op::Get(place(at)),
        Op::Pin(at, count) => Op::Pin(place(at), count),
        Op::Own(at, word) => Op::Own(place(at), word),
        Op::Put(nth) => Op::Put(nth),
        Op::Unpin(nth) => Op::Unpin(nth),
    }
}

fn live(base: u64, huge: u64, operations: &[Op]) {
    let size = |bytes| PageSize::new(bytes).unwrap();
    let geometry = Geometry::new(size(base), size(huge)).unwrap();
    let section = geometry.section().size(geometry.base()).bytes();
    let start = 5 * GIB + FIRST_SECTION as u64 * section;
    let vmemmap = Vmemmap::new(start..start + SECTIONS as u64 * section, geometry).unwrap();
    let mut both = Both {
        vmemmap: &vmemmap,
        plain: Plain {
            geometry,
            parts: vec![None; SECTIONS << geometry.section().0],
        },
        references: Vec::new(),
        pins: Vec::new(),
    };
    for op in operations {
        both.apply(&scaled(op, geometry));
        both.check();
    }
    both.check_memory();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]
    #[test]
    fn the_table_and_the_model_agree(operations in operations()) {
        live(4 << 10, 2 << 20, &operations);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn so_they_do_with_larger_base_pages(operations in operations()) {
        live(16 << 10, 4 << 20, &operations);
    }
}

#[test]
fn what_is_not_of_the_range_is_refused() {
    let geometry = Geometry::of_host().unwrap();
    let page = geometry.base().bytes();
    let section = geometry.section();
    let huge = section.size(geometry.base()).bytes();
    let range = GIB..GIB + 2 * huge;
    let vmemmap = Vmemmap::new(range.clone(), geometry).unwrap();
    assert_eq!(
        (vmemmap.range(), vmemmap.geometry()),
        (range.clone(), geometry)
    );
    for outside in [0, range.start - 1, range.end, u64::MAX] {
        assert_eq!(vmemmap.head_of(outside), None);
        let error = Error::Outside { address: outside };
        assert_eq!(vmemmap.get(outside).unwrap_err(), error);
        assert_eq!(vmemmap.release(outside).unwrap_err(), error);
        assert_eq!(vmemmap.prepare(outside, Order(0)).unwrap_err(), error);
    }
    assert!(vmemmap.pin(GIB..GIB).is_err() && vmemmap.pin(GIB..range.end + 1).is_err());
    assert!(matches!(
        vmemmap.prepare(GIB, geometry.largest()),
        Err(Error::Outside { .. })
    ));
    assert!(matches!(
        vmemmap.prepare(GIB, Order(40)),
        Err(Error::Order { .. })
    ));
    assert!(matches!(
        vmemmap.prepare(GIB + page, section),
        Err(Error::Order { .. })
    ));
    assert!(matches!(
        vmemmap.prepare(GIB + 1, Order(0)),
        Err(Error::Order { .. })
    ));
    assert_eq!(
        vmemmap.prepare(GIB + huge, section).unwrap().pages,
        Pages(8)
    );
    let half = vmemmap.pin(GIB..GIB + 2 * huge).unwrap_err();
    assert_eq!(half, Error::Absent { address: GIB });
    let half = vmemmap.pin(GIB + huge..range.end).unwrap();
    assert_eq!(
        vmemmap.release(GIB + huge).unwrap_err().to_string(),
        format!(
            "{:#x}: the page is in use: 512 references, 512 of them pins",
            GIB + huge
        )
    );
    drop(half);
    vmemmap.release(GIB + huge).unwrap();
    let (empty, small) = (
        GIB..GIB,
        Geometry::new(PageSize::new(1024).unwrap(), PageSize::SIZE_2M),
    );
    assert!(matches!(
        Vmemmap::new(empty, geometry),
        Err(Error::Outside { .. })
    ));
    assert!(matches!(
        Vmemmap::new(range, small.unwrap()),
        Err(Error::Geometry { .. })
    ));
}
