//! `jumbo plan qemu`: the RAM of virtual machines.

use jumbo::units::{Bytes, PageSize};

use crate::value::size_with_unit;

use super::sizing::{PageKind, PlannedMapping, Workload};
use crate::planned::all;

/// Plan the RAM of virtual machines under QEMU
///
/// The RAM of a guest is on one node, or in equal parts on each of --nodes. --count is the number
/// of guests. Pages are of 1 GiB where the parts are multiples of that.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo plan qemu --memory 64G
  jumbo plan qemu --memory 64G --nodes 2 --count 3 --page-size 2M
  jumbo plan qemu --memory 64G --for command-line")]
pub(super) struct Args {
    /// The RAM of a guest
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit)]
    pub(super) memory: Bytes,
}

/// Page size for `size`: 1 GiB for a multiple of that, else 2 MiB.
pub(super) fn large(size: Bytes) -> PageSize {
    match size.0 > 0 && size.0.is_multiple_of(1 << 30) {
        true => PageSize::SIZE_1G,
        false => PageSize::SIZE_2M,
    }
}

impl Args {
    pub(super) fn workload(&self, page: Option<PageSize>, nodes: u32) -> anyhow::Result<Workload> {
        let part = Bytes(self.memory.0.div_ceil(nodes.into()));
        let page = page.unwrap_or_else(|| large(part));
        if !part.0.is_multiple_of(page.bytes()) || !self.memory.0.is_multiple_of(nodes.into()) {
            anyhow::bail!(
                "{} on {nodes} nodes are parts of {part}, no whole number of {page} pages\n\
                 hint: QEMU refuses such RAM: give --memory or --page-size a multiple",
                self.memory
            );
        }
        let mut workload = Workload::new(
            "qemu",
            PageKind::Mapped,
            page,
            vec![PlannedMapping::new("guest RAM", part)],
        );
        workload.bound = true;
        let bind = |node| match nodes {
            1 => String::new(),
            _ => format!(",host-nodes={node},policy=bind"),
        };
        let cell = |node| format!("-numa node,nodeid={node},memdev=ram{node}");
        let cells: Vec<_> = (0..nodes).map(cell).collect();
        workload.template = include_str!("templates/qemu.txt");
        workload.values = vec![
            ("node", all(0..nodes)),
            ("bind", all((0..nodes).map(bind))),
            ("one_node", all((nodes == 1).then_some(""))),
            ("cells", all((nodes > 1).then(|| cells.join(" ")))),
            ("cell", all((0..nodes).filter(|_| nodes > 1))),
            ("part_mib", all([part.0 >> 20])),
            ("ram_mib", all([self.memory.0 >> 20])),
            ("page_kib", all([page.kib()])),
        ];
        if page > PageSize::SIZE_2M {
            workload.notes = vec![String::from(
                "a host whose guests come and go can have `hugetlb_cma=SIZE` on its command line instead of \
                 `hugepages=`: the kernel lends that memory to movable pages meanwhile (Linux 5.7)",
            )];
        }
        Ok(workload)
    }
}
