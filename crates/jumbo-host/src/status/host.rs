//! Snapshot of the host: [`Host`].
//!
//! No error is fatal. [`Host::missing`] has the reason for each unreadable part: a normal user, a
//! container and a kernel without a feature get the other parts.

use std::fmt::Display;

use rustix::fs::StatVfsMountFlags;
use serde::Serialize;

use crate::kernel::balloon::{self, Reporting};
use crate::kernel::cgroup::Limits;
use crate::kernel::hugetlb::{self, Mount, Pool};
use crate::kernel::memory::{Events, Memory, Metadata, Zone};
use crate::kernel::mounts::{self, Tmpfs};
use crate::kernel::thp::{self, Thp};
use crate::kernel::{self, FileError, Root, hvo};
use crate::units::{Bytes, NodeId, PageSize, Pages};

/// Data of the host that is relevant to page sizes.
#[derive(Clone, Debug, Serialize)]
pub struct Host {
    /// Kernel release.
    pub kernel: String,
    /// Base page size.
    pub base_page: PageSize,
    /// Size of the memory that one PMD maps.
    pub pmd_size: PageSize,
    /// /proc/meminfo.
    pub memory: Option<Memory>,
    /// Current page metadata.
    pub metadata: Option<Metadata>,
    /// State of HVO; `None` where the kernel lacks it.
    pub optimize_vmemmap: Option<bool>,
    /// The hugetlb pools; `None` where the kernel lacks hugetlb.
    pub pools: Option<Vec<Pool>>,
    /// hugetlbfs mounts.
    pub mounts: Vec<Mount>,
    /// tmpfs mounts.
    pub tmpfs: Vec<Tmpfs>,
    /// The THP controls; `None` where the kernel lacks THP.
    pub thp: Option<Thp>,
    /// The control group's limits on this process.
    pub limits: Limits,
    /// The balloon with free page reporting; `None` where there is none, or unknown.
    pub reporting: Option<Reporting>,
    /// The flag `hypervisor` of /proc/cpuinfo, which marks a virtual machine on x86.
    pub hypervisor: bool,
    /// Huge pages that free memory can form without compaction.
    pub formable: Vec<Formable>,
    /// /proc/vmstat.
    pub events: Events,
    /// /proc/sys/vm.
    pub sysctl: Sysctl,
    /// True where /sys is mounted read-only, so that this process can set no control.
    pub sys_read_only: bool,
    /// Unavailable data with reasons.
    pub missing: Vec<Missing>,
}

/// Number of huge pages of one size in the free blocks of one zone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Formable {
    /// NUMA node.
    pub node: NodeId,
    /// Zone: `DMA32`, `Normal`, `Movable`.
    pub zone: String,
    /// All free memory of the zone.
    pub free: Bytes,
    /// Page size.
    pub size: PageSize,
    /// Number of pages.
    pub pages: Pages,
    /// False where the number is an upper bound: such a page needs several of the allocator's
    /// largest blocks, and buddyinfo does not tell which of them are adjacent.
    pub exact: bool,
}

/// Settings under /proc/sys/vm that affect huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sysctl {
    /// 0 heuristic, 1 always, 2 never above the commit limit.
    pub overcommit_memory: Option<u64>,
    /// Rate of background compaction, 0 to 100 (5.9).
    pub compaction_proactiveness: Option<u64>,
    /// Preference for swapping anonymous memory.
    pub swappiness: Option<u64>,
}

/// Data that is unavailable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// Name of the data.
    pub what: String,
    /// Reason.
    pub why: String,
}

impl Missing {
    /// Creates an entry for `what` with the reason `error`.
    pub fn new(what: impl Into<String>, error: &impl Display) -> Self {
        Self {
            what: what.into(),
            why: error.to_string(),
        }
    }

    /// Unwraps a result. An error becomes an entry in `missing`, and the default is returned.
    pub fn or_default<T: Default, E: Display>(
        read: Result<T, E>,
        what: &str,
        missing: &mut Vec<Self>,
    ) -> T {
        read.unwrap_or_else(|error| {
            missing.push(Self::new(what, &error));
            T::default()
        })
    }

    /// Creates an entry as [`Missing::new`]. After a denial, `it_takes` names the privilege.
    pub fn for_lack_of(what: impl Into<String>, error: &FileError, it_takes: &str) -> Self {
        let mut missing = Self::new(what, error);
        if error.is_denied() {
            missing.why = format!("{}; it takes {it_takes}", missing.why);
        }
        missing
    }
}

impl Host {
    /// Name of the THP controls in [`Missing::what`].
    pub const THP_CONTROLS: &'static str = "the THP controls";
    /// Name of the hugetlb pools in [`Missing::what`].
    pub const POOLS: &'static str = "the hugetlb pools";

    /// Reads the snapshot.
    pub fn read(root: &Root) -> Self {
        let mut missing = Vec::new();
        let m = &mut missing;
        let base_page = kernel::base_page(root);
        let pmd_size = Missing::or_default(thp::pmd_size(root).map(Some), "the PMD size", m);
        let memory = Missing::or_default(Memory::read(root).map(Some), "the host's memory", m);
        let events = Missing::or_default(Events::read(root), "the kernel's counters", m);
        let pools = Missing::or_default(hugetlb::pools(root), Self::POOLS, m);
        let sizes: Vec<_> = pools.iter().flatten().map(|pool| pool.size).collect();
        let pmd_size = pmd_size.unwrap_or_else(|| thp::reach_of_pmd(base_page));
        let zones = Missing::or_default(Zone::read_all(root), "free memory by block size", m);
        let hvo = Missing::or_default(hvo::is_on(root), "whether HVO is on", m);
        let thp = Missing::or_default(Thp::read(root), Self::THP_CONTROLS, m);
        let hugetlbfs = Missing::or_default(hugetlb::mounts(root), "hugetlbfs mounts", m);
        let tmpfs = Missing::or_default(mounts::tmpfs(root), "tmpfs mounts", m);
        let reporting = balloon::reporting(root);
        let reporting = Missing::or_default(reporting, "the state of free page reporting", m);
        let limits = Missing::or_default(Limits::read(root, &sizes), "control group limits", m);
        Self {
            kernel: root
                .read("proc/sys/kernel/osrelease")
                .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned()),
            base_page,
            pmd_size,
            metadata: memory
                .as_ref()
                .map(|memory| events.metadata(memory, base_page)),
            memory,
            optimize_vmemmap: hvo,
            formable: formable(&zones, pmd_size, &sizes, base_page),
            pools,
            mounts: hugetlbfs,
            tmpfs,
            thp,
            limits,
            reporting,
            hypervisor: has_hypervisor(root),
            events,
            sysctl: Sysctl::read(root),
            sys_read_only: rustix::fs::statvfs(root.path("sys"))
                .is_ok_and(|filesystem| filesystem.f_flag.contains(StatVfsMountFlags::RDONLY)),
            missing,
        }
    }

    /// Reports whether `what` could not be read.
    pub fn misses(&self, what: &str) -> bool {
        self.missing.iter().any(|missing| missing.what == what)
    }

    /// Number of pages of `size` that can be formed now on all nodes; false for an upper bound.
    pub fn formable_of(&self, size: PageSize) -> (Pages, bool) {
        let of = || {
            self.formable
                .iter()
                .filter(|formable| formable.size == size)
        };
        let pages = of().map(|formable| formable.pages.0).sum();
        (Pages(pages), of().all(|formable| formable.exact))
    }
}

fn has_hypervisor(root: &Root) -> bool {
    let text = root.read("proc/cpuinfo").unwrap_or_default();
    let mut flags = text.lines().filter(|line| line.starts_with("flags"));
    let mut flags = flags.next().unwrap_or_default().split_whitespace();
    flags.any(|flag| flag == "hypervisor")
}

fn formable(zones: &[Zone], pmd: PageSize, pools: &[PageSize], base: PageSize) -> Vec<Formable> {
    let mut sizes: Vec<_> = pools.iter().copied().chain([pmd]).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let in_zone = |zone: &Zone, size: PageSize| {
        let whole = zone.whole(size, base);
        let bound = || {
            let largest = zone.largest(base)?;
            Some(zone.whole(largest, base)?.bytes(largest).whole_pages(size))
        };
        Some(Formable {
            node: zone.node,
            zone: zone.name.clone(),
            free: zone.free(base),
            size,
            pages: whole.or_else(bound)?,
            exact: whole.is_some(),
        })
    };
    zones
        .iter()
        .flat_map(|zone| sizes.iter().filter_map(move |size| in_zone(zone, *size)))
        .collect()
}

impl Sysctl {
    fn read(root: &Root) -> Self {
        let value = |name: &str| root.read_u64(format!("proc/sys/vm/{name}")).ok();
        Self {
            overcommit_memory: value("overcommit_memory"),
            compaction_proactiveness: value("compaction_proactiveness"),
            swappiness: value("swappiness"),
        }
    }
}
