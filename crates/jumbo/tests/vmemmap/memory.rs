//! Memory of a table, as the kernel reports it.

use std::fs;

use jumbo::units::{Bytes, Order, PageSize, Pages};
use jumbo::vmemmap::{Geometry, Resident, Vmemmap};
use jumbo_host::kernel::Root;
use jumbo_host::kernel::smaps::Smaps;

const GIB: u64 = 1 << 30;

fn of_4k() -> Geometry {
    Geometry::new(PageSize::SIZE_4K, PageSize::SIZE_2M).unwrap()
}

fn resident(vmemmap: &Vmemmap) -> Resident {
    vmemmap.resident(&Root::host()).unwrap()
}

#[test]
fn huge_pages_of_a_tebibyte_take_a_thousandth() {
    let vmemmap = Vmemmap::new(0..1 << 40, of_4k()).unwrap();
    let empty = resident(&vmemmap);
    assert_eq!((empty.sections, empty.descriptors), (Bytes(0), Bytes(0)));
    for page in 0..1 << 19 {
        let saving = vmemmap.prepare(page << 21, Order(9)).unwrap();
        assert_eq!((saving.pages, saving.of), (Pages(8), Pages(8)));
    }
    let full = resident(&vmemmap);
    assert_eq!(
        (full.sections, full.descriptors),
        (Bytes(16 << 20), Bytes(0))
    );
    // Reads of tail descriptors populate no memory.
    for page in (0..1 << 40).step_by(12345 << 12) {
        assert_eq!(vmemmap.order_of(page), Some(Order(9)));
    }
    drop(vmemmap.pin(0..1 << 40).unwrap());
    assert_eq!(resident(&vmemmap), full);
}

#[test]
fn all_base_pages_of_descriptors_come_and_go() {
    let vmemmap = Vmemmap::new(0..2 * GIB, of_4k()).unwrap();
    vmemmap.hold(0);
    for (order, pages) in [(9, 8), (18, 4096)] {
        assert_eq!(
            vmemmap.prepare(GIB, Order(order)).unwrap().pages,
            Pages(pages)
        );
        assert_eq!(resident(&vmemmap).descriptors, Bytes(0));
        vmemmap.restore(GIB).unwrap();
        assert_eq!(resident(&vmemmap).descriptors, Bytes(pages << 12));
        let saved = vmemmap.optimise(GIB).unwrap();
        assert_eq!(
            (saved.pages, saved.of, saved.why),
            (Pages(pages), Pages(pages), None)
        );
        assert_eq!(resident(&vmemmap).descriptors, Bytes(0));
        vmemmap.release(GIB).unwrap();
    }
    // 1 GiB pages need no memory; a split one does.
    vmemmap.prepare(GIB, Order(18)).unwrap();
    vmemmap.split(GIB, Order(9)).unwrap();
    assert_eq!(resident(&vmemmap).descriptors, Bytes(0));
    vmemmap.split(GIB + (2 << 20), Order(0)).unwrap();
    assert_eq!(resident(&vmemmap).descriptors, Bytes(32 << 10));
    assert_eq!(vmemmap.merge(GIB, Order(18)).unwrap().pages, Pages(4096));
    assert_eq!(resident(&vmemmap).descriptors, Bytes(0));
}

/// A table for pages that are never split has one section for each.
#[test]
fn sections_are_as_large_as_is_asked() {
    let geometry = Geometry::new(PageSize::SIZE_4K, PageSize::SIZE_1G).unwrap();
    let vmemmap = Vmemmap::new(0..64 * GIB, geometry).unwrap();
    vmemmap.hold(0);
    for page in 0..64 {
        let saving = vmemmap.prepare(page * GIB, Order(18)).unwrap();
        assert_eq!((saving.pages, saving.of), (Pages(4096), Pages(4096)));
    }
    assert_eq!(resident(&vmemmap).total(), Bytes(4096));
    vmemmap.split(GIB, Order(9)).unwrap();
    assert_eq!(resident(&vmemmap).descriptors, Bytes(16 << 20));
    assert_eq!(vmemmap.order_of(GIB + 5), Some(Order(9)));
    vmemmap.merge(GIB, Order(18)).unwrap();
    assert_eq!(resident(&vmemmap).total(), Bytes(4096));
}

#[test]
fn the_reserve_is_held_and_let_go() {
    let vmemmap = Vmemmap::new(0..GIB, of_4k()).unwrap();
    let one = vmemmap.hold(1);
    assert!(one > Bytes(32 << 10) && one < Bytes(64 << 10), "{one}");
    assert_eq!(resident(&vmemmap).reserve, one);
    assert_eq!(vmemmap.hold(64), Bytes(one.0 * 64));
    assert_eq!(vmemmap.hold(1000), resident(&vmemmap).reserve);
    assert_eq!(
        (vmemmap.hold(0), resident(&vmemmap).reserve),
        (Bytes(0), Bytes(0))
    );
}

#[test]
fn the_table_has_no_huge_pages_and_a_name() {
    let vmemmap = Vmemmap::new(0..64 * GIB, of_4k()).unwrap();
    vmemmap.prepare(0, Order(18)).unwrap();
    vmemmap.restore(0).unwrap();
    let smaps = Smaps::read(&Root::host(), std::process::id()).unwrap();
    // A mapping of 16 MiB, aligned and fully written.
    let here = smaps
        .mappings()
        .filter(|it| it.rss == Bytes(16 << 20) && it.declined);
    assert!(
        here.into_iter()
            .any(|it| it.anon_huge_pages == Bytes(0) && it.declined)
    );
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains("jumbo-vmemmap") || !maps.contains("[anon:"));
}
