//! `jumbo plan redis`: anonymous memory on THPs; Redis has no hugetlb option.

use jumbo::units::{Bytes, PageSize};

use crate::value::size_with_unit;

use super::sizing::{PageKind, PlannedMapping, Workload};
use crate::planned::all;

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
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit)]
    pub(super) data_set: Bytes,
}

impl Args {
    pub(super) fn workload(&self, page: Option<PageSize>) -> Workload {
        let mut workload = Workload::new(
            "redis",
            PageKind::Thp,
            page,
            vec![PlannedMapping::new("data set", self.data_set)],
        );
        workload.template = include_str!("templates/redis.txt");
        workload.values = vec![("redis", all([self.data_set.0 >> 20]))];
        workload.unit = "redis-server.service".into();
        workload.notes = vec![format!(
            "a snapshot copies the base pages that are written meanwhile: up to {} more, where all are",
            self.data_set
        )];
        workload
    }
}
