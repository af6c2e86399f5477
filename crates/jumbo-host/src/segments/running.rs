//! The mappings of all processes: [`Running`].

use std::fs::File;

use crate::kernel::file_id::FileId;
use crate::kernel::smaps::Smaps;
use crate::kernel::{FileError, Root, aside, task};

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
}
