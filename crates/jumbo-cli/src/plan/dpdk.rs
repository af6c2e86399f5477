//! `jumbo plan dpdk`: memory of DPDK's environment abstraction layer (EAL) on each socket.

use jumbo::units::{Bytes, PageSize};

use crate::value::size_with_unit;

use super::qemu::large;
use super::sizing::{PageKind, PlannedMapping, Workload};
use crate::planned::all;

/// Plan the memory of a DPDK application
///
/// Memory on each of --nodes: the sockets whose network cards it drives. Pages of 1 GiB keep the
/// packet buffers in few IOTLB and TLB entries.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo plan dpdk --socket-memory 4G --nodes 2
  jumbo plan dpdk --socket-memory 512M")]
pub(super) struct Args {
    /// The memory on each socket
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit)]
    pub(super) socket_memory: Bytes,
}

impl Args {
    pub(super) fn workload(&self, page: Option<PageSize>, nodes: u32) -> Workload {
        let page = page.unwrap_or_else(|| large(self.socket_memory));
        let region = PlannedMapping::new("memory of a socket", self.socket_memory);
        let mut workload = Workload::new("dpdk", PageKind::Mapped, page, vec![region]);
        workload.bound = true;
        // The EAL takes whole pages.
        let mib = workload.pages().bytes(page).0 >> 20;
        let sockets = vec![mib.to_string(); nodes as usize].join(",");
        let folder = match page {
            PageSize::SIZE_2M => String::from("/dev/hugepages"),
            _ => format!("/dev/hugepages{page}"),
        };
        workload.template = include_str!("templates/dpdk.txt");
        let memlock = "VFIO locks the memory that a device may reach; the limit counts for users other than root.";
        workload.values = vec![
            ("sockets", all([sockets])),
            ("folder", all([folder])),
            ("memlock", all([memlock])),
        ];
        workload
    }
}
