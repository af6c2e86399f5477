//! `jumbo plan jvm`: the heap of a JVM, the tables of its collector, and the code cache.

use jumbo::units::{Bytes, PageSize};

use crate::value::size_with_unit;

use super::sizing::{PageKind, PlannedMapping, Workload};
use crate::files::all;

/// Plan the heap of a JVM
///
/// With -XX:+UseLargePages HotSpot maps its heap, the tables of its collector (4 % of the heap) and
/// its code cache with huge pages. The tables are those of G1 in Java 17; later ones have fewer.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo plan jvm --heap 16G
  jumbo plan jvm --heap 16G --thp
  jumbo plan jvm --heap 4G --count 8 --for kubernetes")]
pub(super) struct Args {
    /// The heap, for both -Xms and -Xmx
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit)]
    pub(super) heap: Bytes,

    /// ReservedCodeCacheSize
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit, default_value = "240M")]
    pub(super) code_cache: Bytes,

    /// THPs by -XX:+UseTransparentHugePages: no pool
    #[arg(long)]
    pub(super) thp: bool,
}

impl Args {
    pub(super) fn workload(&self, page: Option<PageSize>) -> Workload {
        let heap = PlannedMapping::new("heap", self.heap);
        let size = format!("-Xms{0}m -Xmx{0}m", self.heap.0 >> 20);
        let (kind, regions, options, why) = if self.thp {
            (
                PageKind::Thp,
                vec![heap],
                "-XX:+UseTransparentHugePages -XX:+AlwaysPreTouch",
                "HotSpot advises MADV_HUGEPAGE and touches the heap at its start.",
            )
        } else {
            // Two bitmaps have a bit for each 8 bytes, three tables a byte for each 512 bytes.
            let of_heap = |name: &str, share: u64| {
                PlannedMapping::new(name, Bytes(self.heap.0.div_ceil(share)))
            };
            let tables = [
                ("first mark bitmap", 64),
                ("second mark bitmap", 64),
                ("card table", 512),
                ("card counts", 512),
                ("block offset table", 512),
            ];
            let tables = tables.map(|(name, share)| of_heap(name, share));
            let code = PlannedMapping::new("code cache", self.code_cache);
            (
                PageKind::Mapped,
                [vec![heap], tables.into(), vec![code]].concat(),
                "-XX:+UseLargePages",
                "With both sizes alike the heap takes its pages at the start. Without pages HotSpot warns and runs on base pages.",
            )
        };
        let mut workload = Workload::new("jvm", kind, page, regions);
        let page_option = match kind == PageKind::Mapped && workload.page != PageSize::SIZE_2M {
            true => format!(" -XX:LargePageSizeInBytes={}m", workload.page.bytes() >> 20),
            false => String::new(),
        };
        let options = format!("{size} {options}{page_option}");
        workload.values = vec![("options", all([options])), ("options_why", all([why]))];
        if kind == PageKind::Mapped {
            workload.source = String::from("the heap, by the rules of G1 in Java 17");
        }
        workload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measured with OpenJDK 17.0.15 under -XX:+UseLargePages -Xms1g -Xmx1g.
    #[test]
    fn a_heap_has_the_measured_pages() {
        let args = Args {
            heap: Bytes(1 << 30),
            code_cache: Bytes(240 << 20),
            thp: false,
        };
        assert_eq!(args.workload(None).pages().0, 651);
    }
}
