//! Memory for the tables: usage of a process, free memory, and blocks to measure on.
//!
//! - `own_memory`: memory of this process.
//! - `FreeWatch`: waits until memory is free again, by one probe for all sides.
//! - `RawBlock`: memory from `malloc` and from `mmap`.
//! - [`first_touch`]: cost of the first touch. [`touch_after_a_while`]: the same where the host may
//!   have reclaimed the memory.
//! - `sample`: a sample whose memory is touched and freed right before. `check_available`: lower
//!   bound of available memory.
//!
//! Invariant: nothing here uses jumbo's own allocations; a worker allocates as any program does.

#[expect(
    unsafe_code,
    reason = "measures mmap and munmap themselves, called by name on raw pointers"
)]
mod block;
mod touch;
#[expect(unsafe_code, reason = "calls getrusage")]
mod warm;
mod watch;

pub(crate) use block::{RawBlock, numbers};
pub use touch::{AfterAWhile, FirstTouch, first_touch, touch_after_a_while};
pub use warm::Retakes;
pub(crate) use warm::{own_usage, sample};
pub(crate) use watch::FreeWatch;

use std::ops::Range;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::cgroup::Limits;
use jumbo_host::kernel::memory::Memory as Host;
use jumbo_host::kernel::smaps::{Mapping as Mapped, Smaps};
use rustix::thread::disable_transparent_huge_pages;

use crate::Error;
use crate::figures::{Figures, figures};

pub(crate) fn own_memory() -> Result<Figures, Error> {
    let rollup = Smaps::read_rollup(&Root::host(), std::process::id())?;
    // Text is excluded: the kernel maps it with huge pages by itself.
    sum(rollup.mappings(), |mapping| mapping.anon_huge_pages)
}

/// Memory of this process in the mappings that overlap `addresses`. The heap of its start-up is
/// excluded: it may have got huge pages before the process switched to base pages.
pub(crate) fn own_memory_in(addresses: &[Range<u64>]) -> Result<Figures, Error> {
    let smaps = Smaps::read(&Root::host(), std::process::id())?;
    let within = |mapping: &Mapped<'_>| {
        let mut ranges = addresses.iter();
        ranges.any(|range| mapping.start < range.end && range.start < mapping.end)
    };
    sum(smaps.mappings().filter(within), Mapped::pmd_mapped)
}

fn sum<'m>(
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
        preload_figure()?,
    ]))
}

/// Figure: 1 if the preload library is in this process, else 0.
pub(crate) fn preload_figure() -> Result<(&'static str, f64), Error> {
    let maps = Root::host().read("proc/self/maps")?;
    let is_loaded = maps.contains("libjumbo_preload");
    Ok(("preload_libraries", f64::from(u8::from(is_loaded))))
}

/// Restricts this process to base pages, whatever it or a library advises.
pub(crate) fn base_pages_only() -> Result<(), Error> {
    Ok(disable_transparent_huge_pages(true)?)
}

/// Memory of a block of `size` bytes, with its page tables and the program around it.
pub(crate) fn footprint(size: Bytes) -> Bytes {
    size + Bytes(size.0 / 50) + Bytes(64 << 20)
}

/// Checks that a measurement of `needed` bytes will not invoke the OOM killer.
pub(crate) fn check_available(needed: Bytes) -> Result<(), Error> {
    let available = available()?;
    if needed > available {
        return Err(Error::Memory(needed, available));
    }
    Ok(())
}

/// Available memory of the machine, within the limit of the memory cgroup.
pub(crate) fn available() -> Result<Bytes, Error> {
    let root = Root::host();
    let machine = Host::read(&root)?.available;
    let limit = Limits::read(&root, &[])?.memory;
    Ok(limit.map_or(machine, |limit| limit.room().min(machine)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::AllocCall;

    #[test]
    fn the_memory_of_a_block_is_that_of_its_mapping() {
        let mut mapping = RawBlock::take(AllocCall::Map, Bytes(8 << 20)).unwrap();
        mapping.touch();
        // The kernel may have merged it with a mapping of another test.
        let resident = |range| own_memory_in(&[range]).unwrap()["resident_bytes"];
        assert!(resident(mapping.addresses()) >= f64::from(8 << 20));
        assert_eq!(resident(0..1), 0.0);
        mapping.give_back().unwrap();
    }

    #[test]
    fn too_much_memory_is_rejected() {
        let error = check_available(Bytes(1 << 60)).unwrap_err();
        assert!(
            error.hint().is_some_and(|hint| hint.contains("--size")),
            "{error}"
        );
        check_available(Bytes(1 << 20)).unwrap();
    }
}
