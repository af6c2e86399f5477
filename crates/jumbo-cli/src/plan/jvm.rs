//! `jumbo plan jvm`: the heap of a JVM, the tables of its collector, and the code cache.

use jumbo::units::{Bytes, PageSize};

use crate::value::size_with_unit;

use super::sizing::{PageKind, PlannedMapping, Workload};
use crate::planned::all;

/// Plan the heap of a JVM
///
/// With -XX:+UseLargePages HotSpot maps its heap, the tables of its collector and its code cache with
/// huge pages. The tables of G1 are 4 % of the heap in Java 17, and 2 % in Java 21 and 25, whose
/// numbers are not measured.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo plan jvm --heap 16G
  jumbo plan jvm --heap 16G --java 21
  jumbo plan jvm --heap 16G --thp
  jumbo plan jvm --heap 4G --count 8 --for kubernetes")]
pub(super) struct Args {
    /// The heap, for both -Xms and -Xmx
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit)]
    pub(super) heap: Bytes,

    /// ReservedCodeCacheSize
    #[arg(long, value_name = "SIZE", value_parser = size_with_unit, default_value = "240M")]
    pub(super) code_cache: Bytes,

    /// The release of Java
    #[arg(long, value_name = "RELEASE", default_value = "17", value_parser = ["17", "21", "25"])]
    pub(super) java: String,

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
                ("mark bitmap", 64),
                ("card table", 512),
                ("block offset table", 512),
                // Until Java 19, and until Java 20.
                ("second mark bitmap", 64),
                ("card counts", 512),
            ];
            let tables = &tables[..if self.java == "17" { 5 } else { 3 }];
            let tables = tables.iter().map(|(name, share)| of_heap(name, *share));
            let code = PlannedMapping::new("code cache", self.code_cache);
            (
                PageKind::Mapped,
                [heap].into_iter().chain(tables).chain([code]).collect(),
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
            let measured = if self.java == "17" {
                ""
            } else {
                ", not measured"
            };
            workload.source = format!(
                "the heap, by the rules of G1 in Java {}{measured}",
                self.java
            );
        }
        workload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Java 17: measured with OpenJDK 17.0.15 under -XX:+UseLargePages -Xms1g -Xmx1g.
    #[test]
    fn a_heap_has_the_measured_pages() {
        for (java, pages) in [("17", 651), ("21", 642), ("25", 642)] {
            let args = Args {
                heap: Bytes(1 << 30),
                code_cache: Bytes(240 << 20),
                java: java.to_owned(),
                thp: false,
            };
            assert_eq!(args.workload(None).pages().0, pages, "{java}");
        }
    }
}
