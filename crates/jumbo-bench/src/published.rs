//! [`Source`]: where the figures in the column "published" come from, and what differs there.

use serde::Serialize;

/// The origin of the published figures of a table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Source {
    /// Author, title and date; or that none is recorded.
    pub title: &'static str,
    /// Where it can be read.
    pub url: Option<&'static str>,
    /// The conditions there, where they differ from those here.
    pub conditions: &'static str,
}

/// The first letter about freeing by several threads in the kernel.
const PARALLEL_FREE: &str = "Aaron Lu, mm: support parallel free of memory, 24 February 2017";
const PARALLEL_FREE_URL: &str = "https://lkml.iu.edu/hypermail/linux/kernel/1702.3/00244.html";

const NOT_RECORDED: &str = "The figures came with the mechanism; a public source is not recorded";

/// The source of the published figures of `table`, where it has some.
pub(crate) fn source(table: &str) -> Option<Source> {
    let source = |title, url, conditions| {
        Some(Source {
            title,
            url,
            conditions,
        })
    };
    match table {
        "free" => source(
            PARALLEL_FREE,
            Some(PARALLEL_FREE_URL),
            "There: free() of one malloc of 320 GB without THPs, on 72 cores in 4 nodes, by workers in the kernel. \
             Linux 4.10 took 10.8 s; the figure is that divided by the time with so many workers.",
        ),
        "exit" => source(
            PARALLEL_FREE,
            Some(PARALLEL_FREE_URL),
            "There: the end of a process with several terabytes, without the mechanism. It is a time and no ratio.",
        ),
        "shmem" => source(
            "Baolin Wang, add mTHP support for anonymous shmem, 6 May 2024",
            Some("https://lkml.indiana.edu/hypermail/linux/kernel/2405.0/04630.html"),
            "There: 1 GB touched by 32 threads on arm64 with 32 cores. The figure divides page faults per second; \
             this table divides times.",
        ),
        "vmemmap" => source(
            "Muchun Song, Free some vmemmap pages of hugetlb page, 2020: pages kept; times: a source is not recorded",
            Some("https://patchwork.kernel.org/comment/23765705/"),
            "There: the kernel's own descriptors of hugetlb pages. Below 1 the mechanism was slower.",
        ),
        "text" => source(
            NOT_RECORDED,
            None,
            "There: another program, on another machine. Faults, time and iTLB misses of its whole run.",
        ),
        "pool" => source(
            NOT_RECORDED,
            None,
            "There: STREAM on another machine, on the kernel's pool of huge pages.",
        ),
        "heap" => source(
            "Measured for jumbo, plain divided by each of them; a public source is not recorded",
            None,
            "There: the same load on another machine.",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_one_and_tables_without_published_figures_have_none() {
        for table in ["free", "exit", "shmem", "vmemmap"] {
            let url = source(table).and_then(|source| source.url);
            assert!(
                url.is_some_and(|url| url.starts_with("https://")),
                "{table}"
            );
        }
        assert_eq!(source("fork"), None);
    }
}
