//! `jumbo plan redis`: anonymous memory, which Redis has no hugetlb option for.

use jumbo::units::{Bytes, PageSize};

use super::files::{File, Line, Reader};
use super::sizing::{Kind, Region, Workload};

/// Plan the memory of Redis or Valkey
///
/// The data set is anonymous memory: THPs by jumbo, no pool. Since Linux 5.8 a write after the fork
/// of a snapshot splits a THP and copies one base page, so a snapshot copies no more than before.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo plan redis --data-set 20G
  jumbo plan --pid $(pidof redis-server)")]
pub(super) struct Args {
    /// The memory of the data set: maxmemory, or used_memory at its peak
    #[arg(long, value_name = "SIZE")]
    pub(super) data_set: Bytes,
}

impl Args {
    pub(super) fn workload(&self, page: Option<PageSize>) -> Workload {
        let page = page.unwrap_or(PageSize::SIZE_2M);
        let mut workload = Workload::new(
            "redis",
            Kind::Thp,
            page,
            vec![Region::new("data set", self.data_set)],
        );
        let lines = vec![
            Line::new(
                "disable-thp no",
                "Redis switches THP off for itself where the host says `always`, unless this line is there.",
            ),
            Line::new(
                format!("maxmemory {}mb", self.data_set.0 >> 20),
                "The size of this plan.",
            ),
        ];
        workload.files = vec![
            File::new("redis.conf", Reader::Config, lines),
            File::new(
                "/etc/sysctl.d/60-redis.conf",
                Reader::Sysctl,
                vec![Line::new(
                    "vm.overcommit_memory = 1",
                    "The fork of a snapshot promises the data set twice. With 0 a large one may fail.",
                )],
            ),
        ];
        workload.unit = "redis-server.service".into();
        let why = "Covers the service by jumbo; its command stays as it is. Restart it then.";
        let drop_in = "/etc/systemd/system/redis-server.service.d/jumbo.conf";
        let line = format!("jumbo unit redis-server | sudo tee {drop_in}");
        workload.steps = vec![Line::new(line, why)];
        workload.notes = vec![format!(
            "a snapshot copies the base pages that are written meanwhile: up to {} more, where all are",
            self.data_set
        )];
        workload
    }
}
