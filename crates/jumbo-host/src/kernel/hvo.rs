//! HVO, the kernel's own optimisation of the vmemmap of hugetlb pages (Documentation/mm/vmemmap_dedup.rst): whether it is on, and what it
//! saves: [`Savings`].
//!
//! The kernel counts its page metadata, but not of which pages. What all memory blocks would need without HVO, less what is counted, is
//! what HVO saves, whenever its pages were made. Of which pool that is follows only where one pool alone can have it.
//!
//! Invariant: a figure that does not follow from what was read is absent, with the reason.

use serde::Serialize;

use super::hugetlb::Pool;
use super::memory::{DESCRIPTOR, Metadata};
use super::thp::optional;
use super::zones;
use super::{FileError, Root};
use crate::units::{Bytes, PageSize, Pages};

/// Where HVO is switched on and off (Linux 5.18).
pub const FILE: &str = "proc/sys/vm/hugetlb_optimize_vmemmap";
/// Whether hotplugged memory holds its own descriptors (Linux 5.13).
const ON_MEMORY: &str = "sys/module/memory_hotplug/parameters/memmap_on_memory";
const BLOCKS: &str = "sys/devices/system/memory";
/// The kernel makes descriptors for so much memory at a time, where any of it is present (SECTION_SIZE_BITS; arm64 with large base
/// pages has larger ones). A memory block is one section or, on large machines, several, of which some may be absent.
const SECTION: Bytes = Bytes(128 << 20);

/// Whether HVO is on for pages made from now on; `None` where the kernel lacks it (before 5.18, or
/// CONFIG_HUGETLB_PAGE_OPTIMIZE_VMEMMAP not set).
///
/// # Errors
/// [`FileError`] where the file is there and cannot be read or understood.
pub fn is_on(root: &Root) -> Result<Option<bool>, FileError> {
    optional(root.read_u64(FILE).map(|value| value != 0))
}

/// What [`is_on`] found, in words.
pub fn in_words(is_on: Option<bool>) -> &'static str {
    match is_on {
        Some(true) => "on, for pages made from now on",
        Some(false) => "off",
        None => "not in this kernel",
    }
}

/// True where every page that HVO is for waits for a grace period of RCU: the kernel is one before 7.3, or does not say.
pub fn waits_for_rcu(root: &Root) -> bool {
    let release = root.read("proc/sys/kernel/osrelease").unwrap_or_default();
    super::version(&release).is_none_or(|release| release < (7, 3))
}

/// True where every surplus page waits for a grace period of RCU, milliseconds each.
pub fn surplus_is_slow(root: &Root) -> bool {
    is_on(root).ok().flatten() == Some(true) && waits_for_rcu(root)
}

/// Whether hotplugged memory holds its own descriptors, which HVO then leaves alone: `memory_hotplug.memmap_on_memory`. `None` where
/// the kernel lacks it.
///
/// # Errors
/// [`FileError`] where the file is there and cannot be read.
pub fn memmap_on_memory(root: &Root) -> Result<Option<bool>, FileError> {
    let text = optional(root.read(ON_MEMORY))?;
    Ok(text.map(|text| text.trim() != "N"))
}

/// What the descriptors of so much memory take.
pub fn descriptors(memory: Bytes, base: PageSize) -> Bytes {
    Bytes(memory.whole_pages(base).0.saturating_mul(DESCRIPTOR.0))
}

/// What is left of a page's descriptors where `kept` base pages of them stay: one with HVO, two with the series of 2021.
pub fn kept(size: PageSize, base: PageSize, kept: Pages) -> Bytes {
    descriptors(Bytes(size.bytes()), base).min(kept.bytes(base))
}

/// What HVO frees of a page's descriptors: all but one base page of them.
pub fn freed(size: PageSize, base: PageSize) -> Bytes {
    let all = descriptors(Bytes(size.bytes()), base);
    Bytes(all.0 - kept(size, base, Pages(1)).0)
}

/// What HVO saves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Savings {
    /// Now, by the kernel's counters; `None` where that does not follow from them.
    pub now: Option<Bytes>,
    /// Why it does not.
    pub unknown: Option<String>,
    /// What it would be if every page of every pool had it.
    pub most: Bytes,
    /// By pool.
    pub pools: Vec<OfPool>,
}

/// What HVO saves of the pages of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OfPool {
    /// The size of its pages.
    pub size: PageSize,
    /// How many there are.
    pub pages: Pages,
    /// What it frees for each.
    pub each: Bytes,
    /// What it would free for all of them.
    pub most: Bytes,
    /// Of how many pages it freed the descriptors: at least, and at most. `None` where that is not known.
    pub optimised: Option<(Pages, Pages)>,
}

impl Savings {
    /// From the pools, and what the kernel counts.
    pub fn read(root: &Root, pools: &[Pool], metadata: Option<Metadata>, base: PageSize) -> Self {
        let (now, unknown) = match saved(root, metadata, base) {
            Ok(now) => (Some(now), None),
            Err(why) => (None, Some(why)),
        };
        Self::new(pools, now, unknown, base)
    }

    fn new(
        pools: &[Pool],
        mut now: Option<Bytes>,
        mut unknown: Option<String>,
        base: PageSize,
    ) -> Self {
        let of = |pool: &Pool| {
            let each = freed(pool.size, base);
            OfPool {
                size: pool.size,
                pages: pool.total,
                each,
                most: Bytes(pool.total.0.saturating_mul(each.0)),
                optimised: None,
            }
        };
        let mut pools: Vec<_> = pools.iter().map(of).collect();
        let most: Bytes = pools.iter().map(|pool| pool.most).sum();
        // A pool may have changed between its counters and those of metadata; beyond that it is not HVO's.
        if now.is_some_and(|now| now.0 > most.0 + most.0 / 50) {
            now = None;
            let why =
                "the counters have less than HVO explains: they do not count all memory blocks";
            unknown = Some(why.to_owned());
        }
        for pool in &mut pools {
            pool.optimised = now.map(|now| {
                let others = most.0 - pool.most.0;
                let pages = |saved: u64| Pages(saved.checked_div(pool.each.0).unwrap_or(0));
                let least = pages(now.0.saturating_sub(others));
                (least.min(pool.pages), pages(now.0).min(pool.pages))
            });
        }
        Self {
            now,
            unknown,
            most,
            pools,
        }
    }
}

impl OfPool {
    /// How many pages keep all their descriptors, since they were made while HVO was off: at least, and at most.
    pub fn predate(&self) -> Option<(Pages, Pages)> {
        let (least, most) = self.optimised?;
        Some((Pages(self.pages.0 - most.0), Pages(self.pages.0 - least.0)))
    }
}

/// What the counters lack of the descriptors of all memory; why that is not known.
fn saved(root: &Root, metadata: Option<Metadata>, base: PageSize) -> Result<Bytes, String> {
    let metadata = metadata
        .filter(|metadata| metadata.counted)
        .ok_or("this kernel does not count its page metadata (Linux 6.12)")?;
    if matches!(memmap_on_memory(root), Ok(Some(true))) {
        return Err("hotplugged memory holds its own descriptors (memory_hotplug.memmap_on_memory), which are not counted".to_owned());
    }
    let in_words = |error: FileError| error.to_string();
    let block = root
        .read(format!("{BLOCKS}/block_size_bytes"))
        .map_err(in_words)?;
    let block = u64::from_str_radix(block.trim(), 16)
        .map_err(|error| format!("{BLOCKS}/block_size_bytes: {error}"))?;
    let names = root.list(BLOCKS).map_err(in_words)?;
    let is_block = |name: &&String| {
        let number = name.strip_prefix("memory");
        number.is_some_and(|number| number.parse::<u64>().is_ok())
    };
    let blocks = names.iter().filter(is_block).count() as u64;
    let memory = Bytes(blocks.saturating_mul(block));
    if block > SECTION.0 {
        let zones = zones::watermarks(root).map_err(in_words)?;
        let present = Pages(zones.values().map(|zone| zone.present.0).sum());
        // A section that is absent is so much that is not present.
        if memory.0.saturating_sub(present.bytes(base).0) >= SECTION.0 {
            return Err(format!(
                "memory blocks of {} are larger than what descriptors are made for, and some of {memory} is absent",
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
        let savings = Savings::new(pools, Some(Bytes(now)), None, BASE);
        let predate = savings.pools.iter().map(OfPool::predate);
        predate
            .map(|range| range.map(|(least, most)| (least.0, most.0)))
            .collect()
    }

    #[test]
    fn seven_of_eight_pages_and_4095_of_4096_are_freed() {
        assert_eq!(freed(PageSize::SIZE_2M, BASE), Bytes(7 * 4096));
        assert_eq!(freed(PageSize::SIZE_1G, BASE), Bytes(4095 * 4096));
        // Of one base page of descriptors or less there is nothing to free.
        let large = PageSize::new(64 << 10).unwrap();
        assert_eq!(freed(PageSize::SIZE_2M, large), Bytes(0));
    }

    #[test]
    fn a_hole_in_large_memory_blocks_is_no_saving() {
        let all = descriptors(Bytes(4 << 30), BASE);
        let read = |block: &str, blocks: u64, absent: u64| {
            let present = ((4 << 30) - absent) / BASE.bytes();
            let zone = format!("Node 0, zone Normal\n  present {present}\n  managed {present}\n");
            let size = format!("{BLOCKS}/block_size_bytes");
            let (_folder, root) = fake::host(&[(&size, block), ("proc/zoneinfo", &zone)]);
            for number in 0..blocks {
                fake::write(&root, &format!("{BLOCKS}/memory{number}/online"), "1");
            }
            let metadata = Metadata {
                bytes: Bytes(all.0 - (absent >> 6)),
                counted: true,
            };
            saved(&root, Some(metadata), BASE).ok()
        };
        // 128 MiB of a block of 2 GiB are absent, and so are their descriptors.
        assert_eq!(read("80000000\n", 2, 128 << 20), None);
        assert_eq!(read("80000000\n", 2, 0), Some(Bytes(0)));
        assert_eq!(read("8000000\n", 32, 0), Some(Bytes(0)));
    }

    #[test]
    fn of_one_pool_it_is_known_how_many_pages_predate_the_switch() {
        let pool = [pages(PageSize::SIZE_2M, 10)];
        for optimised in 0..=10 {
            let rest = 10 - optimised;
            let found = predate(&pool, optimised * 7 * 4096);
            assert_eq!(found, [Some((rest, rest))]);
        }
        // More than HVO can have saved is not HVO's.
        assert_eq!(predate(&pool, 80 * 4096), [None]);
    }

    #[test]
    fn of_several_pools_it_lies_between_two_numbers() {
        let both = [pages(PageSize::SIZE_2M, 1000), pages(PageSize::SIZE_1G, 1)];
        assert_eq!(predate(&both, 0), [Some((1000, 1000)), Some((1, 1))]);
        let all = (7000 + 4095) * 4096;
        assert_eq!(predate(&both, all), [Some((0, 0)), Some((0, 0))]);
        assert_eq!(predate(&both, 7000 * 4096), [Some((0, 585)), Some((0, 1))]);
    }
}
