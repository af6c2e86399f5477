//! The mappings of all processes: [`Running`].

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use crate::kernel::file_id::FileId;
use crate::kernel::smaps::Smaps;
use crate::kernel::{FileError, Root, aside, mounts, task};
use crate::units::{PageSize, Pages};

/// Mappings of all other processes that this user may read.
#[derive(Debug)]
pub struct Running {
    maps: Vec<(u32, Smaps)>,
    /// Number of processes that this user may not read.
    pub hidden: usize,
}

impl Running {
    /// Reads the mappings of each process.
    ///
    /// # Errors
    /// [`FileError`] where /proc cannot be listed.
    pub fn read(root: &Root) -> Result<Self, FileError> {
        let mut pids = task::all(root)?;
        pids.retain(|pid| *pid != std::process::id());
        let (mut maps, mut hidden) = (Vec::new(), 0);
        for (pid, read) in pids.iter().zip(aside::maps_of_each(root, &pids)) {
            match read {
                Ok(read) => maps.push((*pid, read)),
                Err(error) => hidden += usize::from(!error.is_missing()),
            }
        }
        Ok(Self { maps, hidden })
    }

    /// Returns the processes that map this file.
    pub fn mapping(&self, file: &File) -> Vec<u32> {
        let Ok(id) = FileId::of(file) else {
            return Vec::new();
        };
        let maps = |(_, maps): &&(u32, Smaps)| maps.mappings().any(|m| FileId::from(&m) == id);
        self.maps.iter().filter(maps).map(|(pid, _)| *pid).collect()
    }

    /// Returns the paths of files with mapped text of at least a huge page, each with the reason
    /// why it cannot be opened.
    ///
    /// Files on file systems that may not answer are not opened: network file systems, FUSE, and
    /// file systems that are not mounted in this process's namespace.
    ///
    /// # Errors
    /// [`FileError`] where the mounts cannot be read.
    pub fn text(
        &self,
        root: &Root,
        pmd: PageSize,
    ) -> Result<BTreeMap<PathBuf, Option<String>>, FileError> {
        let mounts = mounts::by_device(root)?;
        let mut found = BTreeMap::new();
        for mapping in self.maps.iter().flat_map(|(_, maps)| maps.mappings()) {
            let is_text = mapping.execute && mapping.inode != 0 && mapping.path.starts_with('/');
            if !is_text
                || mapping.size() < Pages(1).bytes(pmd)
                || found.contains_key(&PathBuf::from(mapping.path))
            {
                continue;
            }
            let why_not = match mounts.get(&mapping.device).map(String::as_str) {
                _ if mapping.path.ends_with(" (deleted)") => {
                    Some("it was deleted or replaced while it runs".to_owned())
                }
                None => Some("its file system is not mounted here".to_owned()),
                Some(kind) if mounts::may_not_answer(kind) => {
                    Some(format!("its file system ({kind}) may not answer"))
                }
                Some(_) => {
                    match super::open_regular(Path::new(mapping.path)).and_then(FileId::of) {
                        Ok(id) if id == FileId::from(&mapping) => None,
                        Ok(_) => Some("another file has its name here".to_owned()),
                        Err(error) => Some(error.to_string()),
                    }
                }
            };
            found.insert(PathBuf::from(mapping.path), why_not);
        }
        Ok(found)
    }
}
