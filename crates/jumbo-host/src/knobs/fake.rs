//! A locked pool in a fake root.

use std::fs;
use std::path::PathBuf;

use super::{Group, Journal, Knob, Locked, Plan};
use crate::kernel::fake::{host, write};
use crate::kernel::{Root, hugetlb};
use crate::units::PageSize;

const SIZE: PageSize = PageSize::SIZE_2M;

pub(crate) struct Fake {
    folder: tempfile::TempDir,
    pub(crate) root: Root,
    pub(crate) locked: Locked,
}

impl Fake {
    /// An empty pool of 2 MiB pages.
    pub(crate) fn new() -> Self {
        let (folder, root) = host(&[]);
        for name in ["nr", "free", "resv", "surplus", "nr_overcommit"] {
            let file = hugetlb::file(SIZE, None, &format!("{name}_hugepages"));
            write(&root, &file, "0\n");
        }
        let journal = Journal::at(&root, folder.path().join("jumbo"));
        let locked = journal.lock(&Group::pool(SIZE), "test").unwrap();
        Self {
            folder,
            root,
            locked,
        }
    }

    /// Plans `to` persistent pages.
    pub(crate) fn plan(&self, to: u64) -> Plan {
        Plan::of(&self.root, Group::pool(SIZE), [(Self::knob(), to.into())]).unwrap()
    }

    pub(crate) fn knob() -> Knob {
        Knob::persistent(SIZE, None)
    }

    pub(crate) fn pages(&self) -> String {
        fs::read_to_string(self.file()).unwrap()
    }

    pub(crate) fn set_pages(&self, text: &str) {
        fs::write(self.file(), text).unwrap();
    }

    fn file(&self) -> PathBuf {
        self.root.path(Self::knob().file)
    }

    /// Makes all writes of records fail, as on a full disk.
    pub(crate) fn fill(&self) {
        let record = "jumbo/pool-2M/changes.toml.jumbo-new";
        let _ = fs::create_dir(self.folder.path().join(record));
    }
}
