//! Memory, as the tables need it: what a process has, what is free, and blocks to measure on.
//!
//! - `had`: what a worker had when it was measured.
//! - `Watch`: whether memory that was taken is free again, by one probe for all sides.
//! - `Block`: memory by `malloc` and by `mmap`.
//! - [`first_touch`]: what it takes to touch memory at first. [`touch_after_a_while`]: where the host may have taken it back.
//! - `sample`: one whose memory is touched and let go right before. `room`: whether there is enough.
//!
//! Invariant: nothing here knows of jumbo's own allocations; the worker asks as any program would.

#[expect(
    unsafe_code,
    reason = "measures mmap and munmap themselves, called by name on raw pointers"
)]
mod block;
mod touch;
#[expect(unsafe_code, reason = "calls getrusage")]
mod warm;
mod watch;

pub(crate) use block::{Block, numbers};
pub use touch::{AfterAWhile, FirstTouch, first_touch, touch_after_a_while};
pub use warm::Hit;
pub(crate) use warm::{own_times, sample};
pub(crate) use watch::Watch;

use std::ops::Range;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::cgroup::Limits;
use jumbo_host::kernel::memory::Memory as Host;
use jumbo_host::kernel::smaps::{Mapping as Mapped, Smaps};
use rustix::thread::disable_transparent_huge_pages;

use crate::Error;
use crate::figures::{Figures, figures};

/// The memory of this process now.
pub(crate) fn had(root: &Root) -> Result<Figures, Error> {
    let rollup = Smaps::read_rollup(root, std::process::id())?;
    // The kernel puts program text on huge pages by itself: that is not what is measured.
    sum(root, rollup.mappings(), |mapping| mapping.anon_huge_pages)
}

/// Its memory in the mappings in which `addresses` lie. A process that is told to keep to base
/// pages may have had huge ones before, in the heap of its start-up: those are not what is
/// measured.
pub(crate) fn had_in(root: &Root, addresses: &[Range<u64>]) -> Result<Figures, Error> {
    let smaps = Smaps::read(root, std::process::id())?;
    let within = |mapping: &Mapped<'_>| {
        let mut ranges = addresses.iter();
        ranges.any(|range| mapping.start < range.end && range.start < mapping.end)
    };
    sum(root, smaps.mappings().filter(within), Mapped::pmd_mapped)
}

fn sum<'m>(
    root: &Root,
    mappings: impl Iterator<Item = Mapped<'m>>,
    transparent: fn(&Mapped<'m>) -> Bytes,
) -> Result<Figures, Error> {
    let (mut resident, mut huge, mut hugetlb) = (Bytes(0), Bytes(0), Bytes(0));
    for mapping in mappings {
        resident += mapping.rss + mapping.hugetlb();
        huge += transparent(&mapping) + mapping.hugetlb();
        hugetlb += mapping.hugetlb();
    }
    Ok(figures([
        ("resident_bytes", resident.0 as f64),
        ("huge_bytes", huge.0 as f64),
        ("huge_percent", huge.0 as f64 / resident.0 as f64 * 100.0),
        ("hugetlb_bytes", hugetlb.0 as f64),
        (LIBRARIES, libraries(root, std::process::id())?),
    ]))
}

/// The figure of [`libraries`].
pub(crate) const LIBRARIES: &str = "preload_libraries";

/// 1 where the preload library is in a process, else 0.
pub(crate) fn libraries(root: &Root, pid: u32) -> Result<f64, Error> {
    let maps = root.read(format!("proc/{pid}/maps"))?;
    Ok(f64::from(u8::from(maps.contains("libjumbo_preload"))))
}

/// Has this process get base pages from now on, whatever it or a library in it advises.
pub(crate) fn base_pages_only() -> Result<(), Error> {
    Ok(disable_transparent_huge_pages(true)?)
}

/// The memory of a block of `size` bytes with its page tables and the program around it.
pub(crate) fn footprint(size: Bytes) -> Bytes {
    size + Bytes(size.0 / 50) + Bytes(64 << 20)
}

/// Checks that a measurement that takes `needed` at once does not meet the OOM killer: it would
/// take a bystander as well.
pub(crate) fn room(root: &Root, needed: Bytes) -> Result<(), Error> {
    let available = available(root)?;
    if needed > available {
        return Err(Error::Memory(needed, available));
    }
    Ok(())
}

/// The memory that may be taken: of the machine, within what the memory cgroup allows.
pub(crate) fn available(root: &Root) -> Result<Bytes, Error> {
    let machine = Host::read(root)?.available;
    let limit = Limits::read(root, &[])?.memory;
    Ok(limit.map_or(machine, |limit| limit.room().min(machine)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::By;

    #[test]
    fn a_blocks_memory_is_that_of_its_mapping() {
        let root = Root::host();
        let mut mapping = Block::take(By::Map, Bytes(8 << 20)).unwrap();
        mapping.touch();
        // The kernel may have merged it with a neighbour, which comes and goes with another test.
        let resident = |range| had_in(&root, &[range]).unwrap()["resident_bytes"];
        assert!(resident(mapping.addresses()) >= f64::from(8 << 20));
        assert_eq!(resident(0..1), 0.0);
        mapping.give_back().unwrap();
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let error = room(&Root::host(), Bytes(1 << 60)).unwrap_err();
        assert!(
            error.hint().is_some_and(|hint| hint.contains("--size")),
            "{error}"
        );
        room(&Root::host(), Bytes(1 << 20)).unwrap();
    }
}
