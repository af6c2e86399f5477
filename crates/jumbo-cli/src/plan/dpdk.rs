//! `jumbo plan dpdk`: memory of the EAL on each socket.

use jumbo::units::{Bytes, PageSize};

use super::files::{File, Line, Reader, mount};
use super::qemu::large;
use super::sizing::{Kind, Region, Workload};

/// Plan the memory of a DPDK application
///
/// So much memory on each of --nodes: the sockets whose network cards it drives. Pages of 1 GiB
/// keep the packet buffers in few IOTLB and TLB entries.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo plan dpdk --socket-memory 4G --nodes 2
  jumbo plan dpdk --socket-memory 512M")]
pub(super) struct Args {
    /// The memory on each socket
    #[arg(long, value_name = "SIZE")]
    pub(super) socket_memory: Bytes,
}

impl Args {
    pub(super) fn workload(&self, page: Option<PageSize>, nodes: u32) -> Workload {
        let page = page.unwrap_or_else(|| large(self.socket_memory));
        let region = Region::new("memory of a socket", self.socket_memory);
        let mut workload = Workload::new("dpdk", Kind::Mapped, page, vec![region]);
        workload.bound = true;
        workload.memlock = Some(
            "VFIO locks the memory that a device may reach; the limit counts for users other than root.",
        );
        // In whole pages: the EAL takes no part of one.
        let mib = workload.pages().bytes(page).0 >> 20;
        let sockets = vec![mib.to_string(); nodes as usize].join(",");
        let folder = match page {
            PageSize::SIZE_2M => String::from("/dev/hugepages"),
            _ => format!("/dev/hugepages{page}"),
        };
        let lines = vec![
            Line::new(
                format!("--socket-mem {sockets}"),
                "MiB on each socket, taken at the start: later growth may find no page.",
            ),
            Line::new(
                format!("--huge-dir {folder}"),
                "Pages of this size alone, where the host has several.",
            ),
            Line::new(
                "--iova-mode va",
                "Needs an IOMMU. With `pa` a buffer is contiguous only within a page, and reading addresses takes root.",
            ),
        ];
        workload.files = vec![File::new("eal.arguments", Reader::Config, lines)];
        if page > PageSize::SIZE_2M {
            workload.files.push(mount(page));
        }
        workload
    }
}
