//! Files in a folder that stands in for a host; a pool, and the right to change it.

use std::fs;
use std::path::PathBuf;

use super::{Group, Journal, Knob, Locked, Plan};
use crate::kernel::{Root, hugetlb};
use crate::units::PageSize;

const SIZE: PageSize = PageSize::SIZE_2M;

/// A host with these files, which are empty.
pub(crate) fn host(files: &[&str]) -> (tempfile::TempDir, Root) {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::at(folder.path());
    for file in files {
        write(&root, file, "");
    }
    (folder, root)
}

pub(crate) fn write(root: &Root, file: &str, text: &str) {
    let path = root.path(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

pub(crate) struct Fake {
    folder: tempfile::TempDir,
    pub(crate) root: Root,
    pub(crate) locked: Locked,
}

impl Fake {
    /// A pool of 2 MiB pages that has none.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let pool = root.path(hugetlb::FOLDER).join("hugepages-2048kB");
        fs::create_dir_all(&pool).unwrap();
        for name in ["nr", "free", "resv", "surplus", "nr_overcommit"] {
            fs::write(pool.join(format!("{name}_hugepages")), "0\n").unwrap();
        }
        let journal = Journal::at(&root, folder.path().join("jumbo"));
        let locked = journal.lock(&Group::pool(SIZE), "test").unwrap();
        Self {
            folder,
            root,
            locked,
        }
    }

    /// To so many persistent pages.
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

    /// Has no record written any more, as on a full disk.
    pub(crate) fn fill(&self) {
        let record = "jumbo/pool-2M/next.toml.jumbo-new";
        let _ = fs::create_dir(self.folder.path().join(record));
    }
}
