//! HVO, the kernel's optimisation of the vmemmap of hugetlb pages
//! (Documentation/mm/vmemmap_dedup.rst): its state, and its [`Savings`].
//!
//! The kernel counts the sum of its page metadata. The savings are the descriptors of all memory
//! blocks without HVO, less that sum. They are attributed to a pool only where no other can have
//! them.
//!
//! Invariant: a figure that the counters do not determine is absent, with the reason.

use serde::Serialize;

use super::hugetlb::Pool;
use super::memory::{DESCRIPTOR, Metadata};
use super::optional;
use super::zones;
use super::{FileError, Root};
use crate::units::{Bytes, PageSize, Pages};

/// File that switches HVO (Linux 5.18).
pub const FILE: &str = "proc/sys/vm/hugetlb_optimize_vmemmap";
const MEMMAP_ON_MEMORY: &str = "sys/module/memory_hotplug/parameters/memmap_on_memory";
const MEMORY_BLOCKS: &str = "sys/devices/system/memory";
/// Unit of memory for which the kernel allocates descriptors, where any of it is present
/// (SECTION_SIZE_BITS; larger on arm64 with large base pages). A memory block is one section or, on
/// large machines, several. Some of them may be absent.
const SECTION_BYTES: Bytes = Bytes(128 << 20);

/// Reports whether HVO applies to new pages; `None` where the kernel lacks it (before 5.18, or
/// CONFIG_HUGETLB_PAGE_OPTIMIZE_VMEMMAP not set).
pub fn is_on(root: &Root) -> Result<Option<bool>, FileError> {
    optional(root.read_u64(FILE).map(|value| value != 0))
}

/// The result of [`is_on`] in words.
pub fn in_words(is_on: Option<bool>) -> &'static str {
    match is_on {
        Some(true) => "on, for pages made from now on",
        Some(false) => "off",
        None => "not in this kernel",
    }
}

/// Reports whether each page that HVO optimises waits for an RCU grace period: Linux before 7.1, or
/// an unknown version.
pub fn waits_for_rcu(root: &Root) -> bool {
    let release = root.read("proc/sys/kernel/osrelease").unwrap_or_default();
    super::version(&release).is_none_or(|release| release < (7, 1))
}

/// Reports whether each surplus page waits for an RCU grace period of some milliseconds.
pub fn surplus_is_slow(root: &Root) -> bool {
    is_on(root).ok().flatten() == Some(true) && waits_for_rcu(root)
}

/// Reports whether hotplugged memory holds its own descriptors, which HVO then does not free:
/// `memory_hotplug.memmap_on_memory` (Linux 5.13). `None` where the kernel lacks it.
pub fn memmap_on_memory(root: &Root) -> Result<Option<bool>, FileError> {
    let text = optional(root.read(MEMMAP_ON_MEMORY))?;
    Ok(text.map(|text| text.trim() != "N"))
}

/// Size of the descriptors of `memory`.
fn descriptors(memory: Bytes, base: PageSize) -> Bytes {
    Bytes(memory.whole_pages(base).0.saturating_mul(DESCRIPTOR.0))
}

/// Size of the descriptors that HVO frees per page: all but one base page of them.
pub fn freed(size: PageSize, base: PageSize) -> Bytes {
    let all = descriptors(Bytes(size.bytes()), base);
    Bytes(all.0.saturating_sub(base.bytes()))
}

/// Memory that HVO saves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Savings {
    /// Current savings; `None` where the kernel's counters do not determine them.
    pub now: Option<Bytes>,
    /// Reason why `now` is absent.
    pub unknown: Option<String>,
    /// Savings if HVO applied to every page of every pool.
    pub most: Bytes,
    /// Savings by pool.
    pub pools: Vec<PoolSavings>,
}

/// Memory that HVO saves in one pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolSavings {
    /// Page size.
    pub size: PageSize,
    /// Number of pages.
    pub pages: Pages,
    /// Savings per page.
    pub each: Bytes,
    /// Savings if HVO applied to all pages.
    pub most: Bytes,
    /// Lower and upper bound of the number of optimised pages; `None` where unknown.
    pub optimised: Option<(Pages, Pages)>,
}

impl Savings {
    /// Computes the savings from the pools and the kernel's counters.
    pub fn read(root: &Root, pools: &[Pool], metadata: Option<Metadata>, base: PageSize) -> Self {
        Self::new(pools, saved(root, metadata, base), base)
    }

    fn new(pools: &[Pool], saved: Result<Bytes, String>, base: PageSize) -> Self {
        let max = |pool: &Pool| Bytes(pool.total.0.saturating_mul(freed(pool.size, base).0));
        let most: Bytes = pools.iter().map(max).sum();
        // 2 % more is possible: a pool may change between its counters and those of metadata.
        let saved = saved.and_then(|now| match now.0 <= most.0 + most.0 / 50 {
            true => Ok(now),
            false => Err(
                "the counters have less than HVO explains: they do not count all memory blocks"
                    .to_owned(),
            ),
        });
        let now = saved.as_ref().ok().copied();
        let of = |pool: &Pool| {
            let each = freed(pool.size, base);
            let pages = |saved: u64| {
                let pages = Pages(saved.checked_div(each.0).unwrap_or(0));
                pages.min(pool.total)
            };
            let others = most.0 - max(pool).0;
            PoolSavings {
                size: pool.size,
                pages: pool.total,
                each,
                most: max(pool),
                optimised: now.map(|now| (pages(now.0.saturating_sub(others)), pages(now.0))),
            }
        };
        Self {
            now,
            unknown: saved.err(),
            most,
            pools: pools.iter().map(of).collect(),
        }
    }
}

impl PoolSavings {
    /// Lower and upper bound of the number of pages made while HVO was off, with all descriptors.
    pub fn predate(&self) -> Option<(Pages, Pages)> {
        let (least, most) = self.optimised?;
        Some((Pages(self.pages.0 - most.0), Pages(self.pages.0 - least.0)))
    }
}

/// Size of the descriptors of all memory less the counted metadata; or the reason why unknown.
fn saved(root: &Root, metadata: Option<Metadata>, base: PageSize) -> Result<Bytes, String> {
    let metadata = metadata
        .filter(|metadata| metadata.counted)
        .ok_or("this kernel does not count its page metadata (Linux 6.12)")?;
    if matches!(memmap_on_memory(root), Ok(Some(true))) {
        return Err("hotplugged memory holds its own descriptors (memory_hotplug.memmap_on_memory), which are not counted".to_owned());
    }
    let in_words = |error: FileError| error.to_string();
    let block = root
        .read(format!("{MEMORY_BLOCKS}/block_size_bytes"))
        .map_err(in_words)?;
    let block = u64::from_str_radix(block.trim(), 16)
        .map_err(|error| format!("{MEMORY_BLOCKS}/block_size_bytes: {error}"))?;
    let names = root.list(MEMORY_BLOCKS).map_err(in_words)?;
    let is_block = |name: &&String| {
        let number = name.strip_prefix("memory");
        number.is_some_and(|number| number.parse::<u64>().is_ok())
    };
    let blocks = names.iter().filter(is_block).count() as u64;
    let memory = Bytes(blocks.saturating_mul(block));
    if block > SECTION_BYTES.0 {
        let zones = zones::watermarks(root).map_err(in_words)?;
        let present = Pages(zones.values().map(|zone| zone.present.0).sum());
        // An absent section has no descriptors.
        if memory.0.saturating_sub(present.bytes(base).0) >= SECTION_BYTES.0 {
            return Err(format!(
                "memory blocks of {} have several sections each, and some of {memory} is absent",
                Bytes(block)
            ));
        }
    }
    let all = descriptors(memory, base);
    let lacking = all.0.checked_sub(metadata.bytes.0).map(Bytes);
    lacking.ok_or_else(|| {
        format!(
            "{} are counted, and {all} are descriptors: the rest is other metadata (page_ext)",
            metadata.bytes
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake;

    const BASE: PageSize = PageSize::SIZE_4K;

    fn pages(size: PageSize, total: u64) -> Pool {
        Pool {
            size,
            ..fake::pool(total, total, 0, 0)
        }
    }

    fn predate(pools: &[Pool], now: u64) -> Vec<Option<(u64, u64)>> {
        let savings = Savings::new(pools, Ok(Bytes(now)), BASE);
        let predate = savings.pools.iter().map(PoolSavings::predate);
        predate
            .map(|range| range.map(|(least, most)| (least.0, most.0)))
            .collect()
    }

    #[test]
    fn seven_of_eight_pages_and_4095_of_4096_are_freed() {
        assert_eq!(freed(PageSize::SIZE_2M, BASE), Bytes(7 * 4096));
        assert_eq!(freed(PageSize::SIZE_1G, BASE), Bytes(4095 * 4096));
        // HVO keeps one base page of descriptors.
        let large = PageSize::new(64 << 10).unwrap();
        assert_eq!(freed(PageSize::SIZE_2M, large), Bytes(0));
    }

    #[test]
    fn a_hole_in_large_memory_blocks_is_no_saving() {
        let all = descriptors(Bytes(4 << 30), BASE);
        let read = |block: &str, blocks: u64, absent: u64| {
            let present = ((4 << 30) - absent) / BASE.bytes();
            let zone = format!("Node 0, zone Normal\n  present {present}\n  managed {present}\n");
            let size = format!("{MEMORY_BLOCKS}/block_size_bytes");
            let (_folder, root) = fake::host(&[(&size, block), ("proc/zoneinfo", &zone)]);
            for number in 0..blocks {
                fake::write(
                    &root,
                    &format!("{MEMORY_BLOCKS}/memory{number}/online"),
                    "1",
                );
            }
            let metadata = Metadata {
                bytes: Bytes(all.0 - (absent >> 6)),
                counted: true,
            };
            saved(&root, Some(metadata), BASE).ok()
        };
        // 128 MiB of a block of 2 GiB are absent, with their descriptors.
        assert_eq!(read("80000000\n", 2, 128 << 20), None);
        assert_eq!(read("80000000\n", 2, 0), Some(Bytes(0)));
        assert_eq!(read("8000000\n", 32, 0), Some(Bytes(0)));
    }

    #[test]
    fn one_pool_has_an_exact_number_of_pages_before_the_switch() {
        let pool = [pages(PageSize::SIZE_2M, 10)];
        for optimised in 0..=10 {
            let rest = 10 - optimised;
            let found = predate(&pool, optimised * 7 * 4096);
            assert_eq!(found, [Some((rest, rest))]);
        }
        // Savings above the maximum are unknown.
        assert_eq!(predate(&pool, 80 * 4096), [None]);
    }

    #[test]
    fn several_pools_have_bounds_of_that_number() {
        let both = [pages(PageSize::SIZE_2M, 1000), pages(PageSize::SIZE_1G, 1)];
        assert_eq!(predate(&both, 0), [Some((1000, 1000)), Some((1, 1))]);
        let all = (7000 + 4095) * 4096;
        assert_eq!(predate(&both, all), [Some((0, 0)), Some((0, 0))]);
        assert_eq!(predate(&both, 7000 * 4096), [Some((0, 585)), Some((0, 1))]);
    }
}
