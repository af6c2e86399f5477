//! The existing knobs, and the [`Group`]s that are changed together.

use serde::{Deserialize, Serialize};

use super::knob::{Form, Knob};
use crate::kernel::{hugetlb, hvo, thp};
use crate::units::{NodeId, PageSize};

/// Knobs that share a lock and a list of records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Part of file names: `pool-2M`.
    pub id: String,
    /// Name in messages: `the pool of 2M pages`.
    pub name: String,
}

impl Group {
    /// The pool of `size` pages.
    pub fn pool(size: PageSize) -> Self {
        Self::new(
            &format!("pool-{size}"),
            &format!("the pool of {size} pages"),
        )
    }

    /// The kernel's vmemmap optimisation of hugetlb pages.
    pub fn hvo() -> Self {
        Self::new("hvo", "HVO")
    }

    /// The tables of transparent huge pages.
    pub fn thp() -> Self {
        Self::new("thp", "the THP tables")
    }

    fn new(id: &str, name: &str) -> Self {
        Self {
            id: id.to_owned(),
            name: name.to_owned(),
        }
    }
}

impl Knob {
    /// Number of persistent pages of a pool, on `node` or on all nodes together.
    pub fn persistent(size: PageSize, node: Option<NodeId>) -> Self {
        let place = node.map_or(String::new(), |node| format!(" on node {node}"));
        Self {
            name: format!("persistent {size} pages{place}"),
            file: hugetlb::file(size, node, "nr_hugepages"),
            form: Form::Pages,
        }
    }

    /// Splits persistent pages of a pool into the next smaller size (5.16).
    pub fn demote(size: PageSize, node: Option<NodeId>) -> Self {
        Self {
            file: hugetlb::file(size, node, "demote"),
            form: Form::Demote,
            ..Self::persistent(size, node)
        }
    }

    /// Maximum number of surplus pages of a pool.
    pub fn overcommit(size: PageSize) -> Self {
        Self {
            name: format!("overcommit of {size} pages"),
            file: hugetlb::file(size, None, "nr_overcommit_hugepages"),
            form: Form::Number,
        }
    }

    /// The vmemmap optimisation of hugetlb pages that are made from now on: 0 or 1.
    pub fn hvo() -> Self {
        Self {
            name: "HVO".to_owned(),
            file: hvo::FILE.to_owned(),
            form: Form::Number,
        }
    }

    /// A knob of transparent huge pages (Documentation/admin-guide/mm/transhuge.rst), by its file
    /// name: `enabled` and `shmem_enabled`, of one folio size or at the top, `defrag`,
    /// `use_zero_page`, `shrink_underused`, `khugepaged/max_ptes_none`.
    pub fn thp(size: Option<PageSize>, name: &str) -> Self {
        let (folder, of) = size.map_or(Default::default(), |size| {
            (
                format!("hugepages-{}kB/", size.kib()),
                format!(" of {size}"),
            )
        });
        Self {
            name: format!("{name}{of}"),
            file: format!("{}/{folder}{name}", thp::FOLDER),
            form: match name {
                "enabled" | "shmem_enabled" | "defrag" => Form::Word,
                _ => Form::Number,
            },
        }
    }
}
