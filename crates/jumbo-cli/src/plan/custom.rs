//! `jumbo plan custom`: memory of a given size and kind.

use jumbo::units::{Bytes, PageSize};

use super::sizing::{PageKind, PlannedMapping, Workload};
use crate::planned::all;

/// Plan memory of a given size
///
/// Each --size is a mapping of its own, which rounds up to whole pages.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo plan custom --size 12G
  jumbo plan custom --size 12G --size 512M --kind sysv --group 1001
  jumbo plan custom --size 12G --kind thp")]
pub(super) struct Args {
    /// A mapping of an instance. May be repeated
    #[arg(long, value_name = "SIZE", required = true)]
    pub(super) size: Vec<Bytes>,

    /// The kind of huge pages that the program uses
    #[arg(long, value_enum, default_value_t = PageKind::Mapped)]
    pub(super) kind: PageKind,

    /// The group of the program, by name or number, for --kind sysv
    #[arg(long, value_name = "GROUP", required_if_eq("kind", "sysv"))]
    pub(super) group: Option<String>,
}

impl Args {
    pub(super) fn workload(&self, page: Option<PageSize>) -> anyhow::Result<Workload> {
        let regions = self
            .size
            .iter()
            .map(|size| PlannedMapping::new("memory", *size));
        let mut workload = Workload::new("custom", self.kind, page, regions.collect());
        match self.kind {
            PageKind::Mapped => {}
            PageKind::Sysv => {
                let group = self.group.as_deref().unwrap_or_default();
                workload.group = Some(super::group(group)?);
            }
            PageKind::Thp => workload.values = vec![("any_program", all([""]))],
        }
        Ok(workload)
    }
}
