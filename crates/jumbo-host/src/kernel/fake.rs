//! Fake hosts for unit tests: a folder with files, and pools without files.

use std::fs;

use super::Root;
use super::hugetlb::Pool;
use crate::units::{PageSize, Pages};

/// Creates a fake host with these files. Dropping the folder removes it.
pub(crate) fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::at(folder.path());
    for (file, text) in files {
        write(&root, file, text);
    }
    (folder, root)
}

/// A pool of 2 MiB pages on no node.
pub(crate) fn pool(total: u64, free: u64, reserved: u64, surplus: u64) -> Pool {
    Pool {
        size: PageSize::SIZE_2M,
        total: Pages(total),
        free: Pages(free),
        reserved: Pages(reserved),
        surplus: Pages(surplus),
        overcommit: Pages(0),
        demote_size: None,
        nodes: Default::default(),
    }
}

pub(crate) fn write(root: &Root, file: &str, text: impl AsRef<[u8]>) {
    let path = root.path(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}
