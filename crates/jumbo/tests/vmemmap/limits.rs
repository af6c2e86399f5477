//! Restores at the limit of a memory cgroup, in a separate process: refused where a touch would
//! kill.

use crate::books;
use std::io::{BufRead as _, BufReader};

use jumbo::gather::OwnedMapping;
use jumbo::pool::{self, Placement, Pool, Thp};
use jumbo::units::{Bytes, Order, PageSize, Pages};
use jumbo::vmemmap::{Error, Geometry, Vmemmap};
use jumbo_host::kernel::Root;
use jumbo_host::kernel::cgroup::Limits;

use crate::confined::{Group, finish, start};
use crate::host::{Alone, skip};

const LIMIT_BYTES: u64 = 64 << 20;
const HUGE_BYTES: u64 = 2 << 20;
/// Pages restored from the reserve.
const RESERVED_PAGES: u64 = 4;

#[test]
fn a_restore_at_the_limit_is_an_error() {
    assert_refused_and_alive("limits::role");
}

#[test]
fn a_folio_of_a_page_that_cannot_be_split_is_an_error() {
    if Thp::new().is_err() {
        return skip("no THP");
    }
    assert_refused_and_alive("limits::pool_role");
}

/// Runs a test of this file in a group with a limit.
fn assert_refused_and_alive(role: &str) {
    let _alone = Alone::new();
    let Some(group) = Group::new("memory") else {
        return skip("no memory controller, or no right to make a cgroup");
    };
    assert!(group.set(&["memory.max", "memory.limit_in_bytes"], LIMIT_BYTES));
    // Swap must not provide room.
    group.set(&["memory.swap.max", "memory.memsw.limit_in_bytes"], 0);
    let child = start(role, |command| {
        command.env("JUMBO_VMEMMAP_ROLE", "limit");
    });
    group.add(&child);
    let printed = finish(child);
    assert!(printed.contains("an error and alive"), "{printed}");
}

/// Fills the cgroup up to a few pages.
fn fill() -> Vec<OwnedMapping> {
    let left = || {
        let limits = Limits::read(&Root::host(), &[]).unwrap();
        limits.memory.unwrap().room().0
    };
    let mut filled = Vec::new();
    // The kernel charges a per-CPU batch of up to 256 KiB ahead.
    while left() > 512 << 10 {
        let mut mapping = OwnedMapping::new(Bytes(128 << 10)).unwrap();
        mapping.fill(1);
        filled.push(mapping);
    }
    filled
}

/// Reports whether this is the child process of a test above, in its group.
fn is_begun() -> bool {
    let mut line = String::new();
    std::env::var_os("JUMBO_VMEMMAP_ROLE").is_some()
        && BufReader::new(std::io::stdin())
            .read_line(&mut line)
            .is_ok()
}

/// A pool with populated pages: two are split from its table's reserve, the third is refused.
#[test]
fn pool_role() {
    if !is_begun() {
        return;
    }
    let pool = Pool::new(Thp::new().unwrap(), Placement::ANYWHERE);
    assert_eq!(pool.resize(Pages(3)).stopped, None);
    let _filled = fill();
    let folios: Vec<_> = (0..4)
        .map_while(|_| pool.take_folio(Order(8)).ok())
        .collect();
    assert_eq!((folios.len(), pool.split().pages), (4, Pages(2)));
    let error = pool.take_folio(Order(8)).unwrap_err();
    assert!(
        matches!(error, pool::Error::Split(Error::Memory { .. })),
        "{error}"
    );
    books::check(&pool);
    assert_eq!(pool.counters().used(), Pages(2));
    // The page is whole and usable.
    let mut page = pool.take().unwrap();
    page.bytes_mut().fill(1);
    drop((folios, page));
    assert_eq!(
        (pool.counters().free, pool.split().pages),
        (Pages(3), Pages(0))
    );
    println!("an error and alive");
}

/// A table of its own.
#[test]
fn role() {
    if !is_begun() {
        return;
    }

    let geometry = Geometry::new(PageSize::SIZE_4K, PageSize::SIZE_2M).unwrap();
    let vmemmap = Vmemmap::new(0..64 * HUGE_BYTES, geometry).unwrap();
    for page in 0..64 {
        vmemmap.prepare(page * HUGE_BYTES, Order(9)).unwrap();
    }
    assert!(vmemmap.hold(RESERVED_PAGES) > Bytes(RESERVED_PAGES * (32 << 10)));
    let filled = fill();

    // Restores use the reserve until it is empty.
    let restored = (0..64).take_while(|page| vmemmap.restore(page * HUGE_BYTES).is_ok());
    let restored = restored.count() as u64;
    assert_eq!(restored, RESERVED_PAGES);
    let page = 40 * HUGE_BYTES;
    let before = vmemmap.resident(&Root::host()).unwrap();
    for _ in 0..100 {
        let error = vmemmap.split(page, Order(0)).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Memory {
                    bytes: Bytes(32768),
                    ..
                }
            ),
            "{error}"
        );
        let error = vmemmap.restore(page).unwrap_err();
        assert!(matches!(error, Error::Memory { .. }), "{error}");
    }
    let after = vmemmap.resident(&Root::host()).unwrap();
    assert_eq!(
        (after.descriptors, after.sections),
        (before.descriptors, before.sections)
    );
    // The huge page is whole and usable.
    assert_eq!(vmemmap.order_of(page + 4096), Some(Order(9)));
    let held = vmemmap.get(page + 4096).unwrap();
    held.set_owner(7);
    drop(vmemmap.pin(page..page + HUGE_BYTES).unwrap());
    drop(held);
    assert_eq!(vmemmap.owner(page), Some(7));
    // Optimised pages refill the reserve; memory freed elsewhere in the program does, too.
    vmemmap.optimise(0).unwrap();
    drop(filled);
    vmemmap.split(page, Order(0)).unwrap();
    assert_eq!(vmemmap.owner(page + 4096), Some(7));
    assert!(vmemmap.hold(RESERVED_PAGES) > Bytes(RESERVED_PAGES * (32 << 10)));
    println!("an error and alive");
}
