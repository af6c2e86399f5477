//! Arithmetic of a plan: from a [`Workload`] to [`PlannedPool`]s. Sizes round up.

use jumbo::units::{Bytes, NodeId, PageSize, Pages};
use serde::Serialize;

use crate::planned::Values;

/// Kind of huge pages that a program maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(super) enum PageKind {
    /// hugetlb pages by mmap(2), memfd_create(2) or hugetlbfs: any user may have them
    Mapped,
    /// hugetlb pages by shmget(2): for vm.hugetlb_shm_group and root
    Sysv,
    /// THPs: no pool, no change of the program
    Thp,
}

/// One mapping of an instance, in pages of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct PlannedMapping {
    pub(super) name: String,
    pub(super) size: Bytes,
}

/// Memory of a program, and the configuration that puts it on huge pages.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    pub(super) name: &'static str,
    /// Usual systemd unit of the program.
    pub(super) unit: String,
    pub(super) kind: PageKind,
    pub(super) page: PageSize,
    /// Mappings of one instance; with `bound`, on one node.
    pub(super) regions: Vec<PlannedMapping>,
    /// The program binds its memory to each of the nodes; else the memory may be on any node.
    pub(super) bound: bool,
    /// Source of the sizes.
    pub(super) source: String,
    /// Group ID for [`PageKind::Sysv`].
    pub(super) group: Option<u32>,
    /// Template of the program's configuration.
    pub(super) template: &'static str,
    /// Values for this template and for those of all workloads.
    pub(super) values: Values,
    pub(super) notes: Vec<String>,
}

/// Pages on one node, or on the whole host without a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct PlannedPool {
    pub(super) node: Option<NodeId>,
    pub(super) size: PageSize,
    pub(super) pages: Pages,
    pub(super) memory: Bytes,
}

impl PlannedMapping {
    pub(super) fn new(name: impl Into<String>, size: Bytes) -> Self {
        let name = name.into();
        Self { name, size }
    }

    pub(super) fn pages(&self, page: PageSize) -> Pages {
        Pages(self.size.0.div_ceil(page.bytes()))
    }
}

impl Workload {
    /// Makes a workload without files, steps and notes; by default with pages of 2 MiB.
    pub(super) fn new(
        name: &'static str,
        kind: PageKind,
        page: impl Into<Option<PageSize>>,
        regions: Vec<PlannedMapping>,
    ) -> Self {
        Self {
            name,
            unit: format!("{name}.service"),
            kind,
            page: page.into().unwrap_or(PageSize::SIZE_2M),
            regions,
            bound: false,
            source: String::from("as given"),
            group: None,
            template: "",
            values: Values::new(),
            notes: Vec::new(),
        }
    }

    /// Pages of one instance; of bound memory, those on one node.
    pub(super) fn pages(&self) -> Pages {
        let pages = self.regions.iter().map(|region| region.pages(self.page).0);
        Pages(pages.fold(0, u64::saturating_add))
    }

    /// Pages on each of `nodes` for `count` instances, with `headroom` percent more.
    pub(super) fn pools(&self, count: u64, nodes: u32, headroom: u64) -> Vec<PlannedPool> {
        let all = self.pages().0.saturating_mul(count);
        let all = all.saturating_add(all.saturating_mul(headroom).div_ceil(100));
        // Each node needs all of the bound memory. Other memory is spread over the nodes, as the
        // kernel does with a total.
        let each = match self.bound {
            true => all,
            false => all.div_ceil(nodes.into()),
        };
        let pool = |node| PlannedPool {
            node: (nodes > 1).then_some(NodeId(node)),
            size: self.page,
            pages: Pages(each),
            memory: Pages(each).bytes(self.page),
        };
        (0..nodes).map(pool).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(
        sizes: &[u64],
        page: PageSize,
        bound: bool,
        count: u64,
        nodes: u32,
        headroom: u64,
    ) -> u64 {
        let regions = sizes
            .iter()
            .map(|size| PlannedMapping::new("memory", Bytes(*size)));
        let mut workload = Workload::new("custom", PageKind::Mapped, page, regions.collect());
        workload.bound = bound;
        workload.pools(count, nodes, headroom)[0].pages.0
    }

    #[test]
    fn sizes_round_up_by_region_by_node_and_by_headroom() {
        const M: u64 = 1 << 20;
        let (small, large) = (PageSize::SIZE_2M, PageSize::SIZE_1G);
        for (sizes, page, bound, count, nodes, headroom, expected) in [
            (&[2 * M][..], small, false, 1, 1, 0, 1),
            (&[2 * M + 1], small, false, 1, 1, 0, 2),
            // Two mappings never share a page.
            (&[M, M], small, false, 1, 1, 0, 2),
            (&[10 * M], small, false, 1, 2, 0, 3),
            (&[10 * M], small, true, 1, 2, 0, 5),
            (&[10 * M], small, false, 3, 2, 0, 8),
            (&[200 << 30], small, false, 1, 2, 0, 51_200),
            (&[200 << 30], large, false, 1, 2, 0, 100),
            (&[200 << 30], small, false, 1, 1, 1, 103_424),
            (&[2 * M], small, false, 1, 1, 1, 2),
            (&[], small, false, 1, 1, 0, 0),
            (&[u64::MAX], small, false, u64::MAX, 1, 5, u64::MAX),
        ] {
            let found = pages(sizes, page, bound, count, nodes, headroom);
            assert_eq!(
                found, expected,
                "{sizes:?} {page} {bound} {count} {nodes} {headroom}"
            );
        }
    }
}
