//! The knobs that there are, and which of them are changed together: [`Group`].

use serde::{Deserialize, Serialize};

use super::knob::{Form, Knob};
use crate::kernel::{hugetlb, hvo, thp};
use crate::units::{NodeId, PageSize};

/// Knobs that have one lock, one list of records, and one file for the next boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// In names of files: `pool-2M`.
    pub id: String,
    /// In words: `the pool of 2M pages`.
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
    /// How many pages of a pool stay, needed or not; on `node`, or on all together.
    pub fn persistent(size: PageSize, node: Option<NodeId>) -> Self {
        let place = node.map_or(String::new(), |node| format!(" on node {node}"));
        Self {
            name: format!("persistent {size} pages{place}"),
            file: hugetlb::file(size, node, "nr_hugepages"),
            form: Form::Pages,
        }
    }

    /// The pages of a pool that stay, of which some can be split into the next smaller size (5.16).
    pub fn demote(size: PageSize, node: Option<NodeId>) -> Self {
        Self {
            file: hugetlb::file(size, node, "demote"),
            form: Form::Demote,
            ..Self::persistent(size, node)
        }
    }

    /// How many surplus pages a pool may have beyond these.
    pub fn overcommit(size: PageSize) -> Self {
        Self {
            name: format!("overcommit of {size} pages"),
            file: hugetlb::file(size, None, "nr_overcommit_hugepages"),
            form: Form::Number,
        }
    }

    /// Whether hugetlb pages that are made from now on give most of their metadata back: 0 or 1.
    pub fn hvo() -> Self {
        Self {
            name: "HVO".to_owned(),
            file: hvo::FILE.to_owned(),
            form: Form::Number,
        }
    }

    /// One of those of transparent huge pages (Documentation/admin-guide/mm/transhuge.rst), by the name of its file:
    /// `enabled` and `shmem_enabled`, of one folio size or at the top, `defrag`, `use_zero_page`,
    /// `shrink_underused`, `khugepaged/max_ptes_none`.
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
