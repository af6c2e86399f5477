//! `jumbo plan qemu`: the RAM of virtual machines.

use jumbo::units::{Bytes, PageSize};

use super::files::{File, Line, Reader, mount};
use super::sizing::{Kind, Region, Workload};

/// Plan the RAM of virtual machines under QEMU
///
/// A guest has so much RAM, on one node or in equal parts on each of --nodes. --count is the number
/// of guests. Pages are of 1 GiB where the parts are multiples of that.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo plan qemu --memory 64G
  jumbo plan qemu --memory 64G --nodes 2 --count 3 --page-size 2M
  jumbo plan qemu --memory 64G --for command-line")]
pub(super) struct Args {
    /// The RAM of a guest
    #[arg(long, value_name = "SIZE")]
    pub(super) memory: Bytes,
}

/// Pages of 1 GiB where none is in vain.
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
            Kind::Mapped,
            page,
            vec![Region::new("guest RAM", part)],
        );
        workload.bound = true;
        let (mib, kib) = (part.0 >> 20, page.kib());
        let (mut qemu, mut cells) = (Vec::new(), String::new());
        for node in 0..nodes {
            let bind = match nodes {
                1 => String::new(),
                _ => format!(",host-nodes={node},policy=bind"),
            };
            let line = format!(
                "-object memory-backend-memfd,id=ram{node},size={mib}M,hugetlb=on,hugetlbsize={kib}k,prealloc=on{bind}"
            );
            let why = match node {
                0 => {
                    "Pages of the pool without a mount. prealloc: missing pages are an error now, no SIGBUS later."
                }
                _ => "",
            };
            qemu.push(Line::new(line, why));
            cells += &format!(" -numa node,nodeid={node},memdev=ram{node}");
        }
        match nodes {
            1 => qemu.push(Line::new(
                "-machine memory-backend=ram0",
                "The RAM of the guest is that object.",
            )),
            _ => qemu.push(Line::new(
                cells.trim_start(),
                "A node of the guest for each of the host.",
            )),
        }
        qemu.push(Line::new(
            format!("-m {}M", self.memory.0 >> 20),
            "The sum of the objects.",
        ));
        let mut libvirt = vec![
            Line::new("<memoryBacking>", "Below <domain>."),
            Line::new("  <hugepages>", ""),
            Line::new(
                format!("    <page size=\"{kib}\" unit=\"KiB\"/>"),
                "Without a size libvirt takes the default one of the host.",
            ),
            Line::new("  </hugepages>", ""),
            Line::new(
                "  <allocation mode=\"immediate\"/>",
                "The guest starts with all of its pages, or not.",
            ),
            Line::new("</memoryBacking>", ""),
        ];
        if nodes > 1 {
            libvirt.push(Line::new(
                "<numatune>",
                "Each cell of <cpu><numa> has its pages on one node of the host.",
            ));
            libvirt.extend((0..nodes).map(|node| {
                let line =
                    format!("  <memnode cellid=\"{node}\" mode=\"strict\" nodeset=\"{node}\"/>");
                Line::new(line, "")
            }));
            libvirt.push(Line::new("</numatune>", ""));
        }
        workload.files = vec![
            File::new("qemu.arguments", Reader::Config, qemu),
            File::new("libvirt-domain.xml", Reader::Config, libvirt),
        ];
        if page > PageSize::SIZE_2M {
            workload.files.push(mount(page));
            workload.notes = vec![String::from(
                "a host whose guests come and go can have `hugetlb_cma=SIZE` on its command line instead of \
                 `hugepages=`: the kernel lends that memory to movable pages meanwhile (Linux 5.7)",
            )];
        }
        Ok(workload)
    }
}
