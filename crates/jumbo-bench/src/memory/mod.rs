//! Memory, as the tables need it: what a process has, what is free, and blocks to measure on.
//!
//! - [`Memory`]: what a worker says it had when it was measured.
//! - `Watch`: whether memory that was taken is free again, by one probe for all sides.
//! - `Block`, `Mapping`: memory by `malloc` and by `mmap`.
//! - `sample`: one whose memory is touched and let go right before. `room`: whether there is enough.
//!
//! Invariant: nothing here knows of jumbo's own allocations; the worker asks as any program would.

#[expect(
    unsafe_code,
    reason = "measures mmap and munmap themselves, called by name on raw pointers"
)]
mod block;
#[expect(
    unsafe_code,
    reason = "touches memory that no other code knows of, and calls getrusage"
)]
mod warm;
mod watch;

pub(crate) use block::{Block, Mapping, numbers};
pub use warm::Hit;
pub(crate) use warm::sample;
pub(crate) use watch::Watch;

use std::ops::Range;

use jumbo::kernel::Root;
use jumbo::kernel::cgroup::Limits;
use jumbo::kernel::memory::Memory as Host;
use jumbo::kernel::smaps::{Mapping as Mapped, Smaps};
use jumbo::units::Bytes;
use rustix::thread::disable_transparent_huge_pages;
use serde::{Deserialize, Serialize};

use crate::Error;

/// What a process had, and whether jumbo was in it.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Resident, in bytes, pages of a huge page pool included.
    pub resident: Bytes,
    /// The part of it in huge pages: transparent ones and those of a pool.
    pub huge: Bytes,
    /// The part of that in pages of a huge page pool of the kernel's.
    pub hugetlb: Bytes,
    /// The preload library is mapped.
    pub preloaded: bool,
}

impl Memory {
    /// What this process has now.
    pub(crate) fn read(root: &Root) -> Result<Self, Error> {
        let rollup = Smaps::read_rollup(root, std::process::id())?;
        let had = rollup.mappings().map(|mapping| Self {
            // The kernel puts program text on huge pages by itself: that is not what is measured.
            huge: mapping.anon_huge_pages + mapping.hugetlb(),
            ..Self::of(&mapping)
        });
        Self::sum(had).here(root)
    }

    /// What all of `some` had.
    pub(crate) fn sum(some: impl IntoIterator<Item = Self>) -> Self {
        let add = |one: Self, other: Self| Self {
            resident: one.resident + other.resident,
            huge: one.huge + other.huge,
            hugetlb: one.hugetlb + other.hugetlb,
            preloaded: one.preloaded || other.preloaded,
        };
        some.into_iter().fold(Self::default(), add)
    }

    /// What it has in the mappings in which `addresses` lie. A process that is told to keep to base pages may have
    /// had huge ones before, in the heap of its start-up: those are not what is measured.
    pub(crate) fn read_of(root: &Root, addresses: &Range<u64>) -> Result<Self, Error> {
        let smaps = Smaps::read(root, std::process::id())?;
        let within =
            |mapping: &Mapped<'_>| mapping.start < addresses.end && addresses.start < mapping.end;
        let had = smaps.mappings().filter(within);
        Self::sum(had.map(|mapping| Self::of(&mapping))).here(root)
    }

    fn of(mapping: &Mapped<'_>) -> Self {
        Self {
            resident: mapping.rss + mapping.hugetlb(),
            huge: mapping.pmd_mapped() + mapping.hugetlb(),
            hugetlb: mapping.hugetlb(),
            preloaded: false,
        }
    }

    /// The same, and whether jumbo is in this process.
    fn here(self, root: &Root) -> Result<Self, Error> {
        let maps = root.read("proc/self/maps")?;
        let preloaded = maps.contains("libjumbo_preload");
        Ok(Self { preloaded, ..self })
    }
}

/// Has this process get base pages from now on, whatever it or a library in it advises.
pub(crate) fn base_pages_only() -> Result<(), Error> {
    disable_transparent_huge_pages(true).map_err(|errno| Error::BasePages(errno.into()))
}

/// What a block of `size` bytes takes with its page tables and the program around it.
pub(crate) fn footprint(size: Bytes) -> Bytes {
    size + Bytes(size.0 / 50) + Bytes(64 << 20)
}

/// That a measurement that takes `needed` at once does not meet the OOM killer: it would take a bystander as
/// well.
pub(crate) fn room(root: &Root, needed: Bytes) -> Result<(), Error> {
    let available = available(root)?;
    if needed > available {
        return Err(Error::Memory(needed, available));
    }
    Ok(())
}

/// What may be taken: of the machine, and of what the memory cgroup allows.
fn available(root: &Root) -> Result<Bytes, Error> {
    let machine = Host::read(root)?.available;
    let limit = Limits::read(root, &[])?.memory;
    Ok(limit.map_or(machine, |limit| limit.room().min(machine)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocks_memory_is_that_of_its_mapping() {
        let root = Root::host();
        let mut mapping = Mapping::new(Bytes(8 << 20)).unwrap();
        mapping.touch();
        // The kernel may have merged it with a neighbour, which comes and goes with another test.
        let memory = Memory::read_of(&root, &mapping.addresses()).unwrap();
        assert!(memory.resident >= Bytes(8 << 20));
        assert_eq!(Memory::read_of(&root, &(0..1)).unwrap().resident, Bytes(0));
        mapping.unmap().unwrap();
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
