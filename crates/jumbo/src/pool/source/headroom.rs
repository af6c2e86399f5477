//! What the memory cgroups of this process leave to it: [`Headroom`].
//!
//! The files are found and opened once; asking them allocates nothing, so that a heap may stand on a pool.
//! A process that is moved to another cgroup is still measured by the one it came from.

use std::fs::File;

use rustix::io::Errno;

use crate::kernel::cgroup::{self, bounded, page_cache};
use crate::kernel::{FileError, Root};
use crate::units::Bytes;

/// What memory.stat needs up to the lines that are read here, in both versions.
const STAT: usize = 4096;

/// The limits of a memory cgroup and of those above it.
#[derive(Debug)]
pub(super) struct Headroom(Vec<Group>);

#[derive(Debug)]
struct Group {
    limit: File,
    usage: File,
    stat: Option<File>,
}

impl Headroom {
    /// Finds them.
    ///
    /// # Errors
    /// [`FileError`] where /proc/self/{cgroup,mountinfo} cannot be read or understood.
    pub(super) fn open(root: &Root) -> Result<Self, FileError> {
        let groups = cgroup::memory_files(root)?.into_iter();
        Ok(Self(
            groups
                .filter_map(|files| {
                    Some(Group {
                        limit: File::open(files.limit).ok()?,
                        usage: File::open(files.usage).ok()?,
                        stat: File::open(files.stat).ok(),
                    })
                })
                .collect(),
        ))
    }

    /// Whether `needed` more can be charged without the group passing a limit; page cache counts as room.
    ///
    /// Another process of the group may be faster, so this narrows the window in which a touch is fatal to
    /// what happens within one page fault; it cannot close it.
    ///
    /// # Errors
    /// EBUSY: it cannot.
    pub(super) fn room_for(&self, needed: Bytes) -> Result<(), Errno> {
        if self.0.iter().all(|group| group.has(needed)) {
            Ok(())
        } else {
            Err(Errno::BUSY)
        }
    }
}

impl Group {
    fn has(&self, needed: Bytes) -> bool {
        let mut buffer = [0; 64];
        let limit = text(&self.limit, &mut buffer).and_then(|text| bounded(text.trim()));
        let Some(limit) = limit else {
            return true;
        };
        let usage = text(&self.usage, &mut buffer).and_then(|text| text.trim().parse().ok());
        let usage = Bytes(usage.unwrap_or(0));
        let free = |used: u64| limit.0.saturating_sub(used) >= needed.0;
        if free(usage.0) {
            return true;
        }
        let mut buffer = [0; STAT];
        let cache = self.stat.as_ref().and_then(|stat| text(stat, &mut buffer));
        let cache = cache.map_or(Bytes(0), page_cache);
        free(usage.0.saturating_sub(cache.0))
    }
}

/// The start of a file, as whole lines as fit.
fn text<'a>(file: &File, buffer: &'a mut [u8]) -> Option<&'a str> {
    let length = rustix::io::pread(file, &mut *buffer, 0).ok()?;
    let bytes = buffer.get(..length)?;
    let whole = if length == buffer.len() {
        bytes.iter().rposition(|byte| *byte == b'\n')? + 1
    } else {
        length
    };
    std::str::from_utf8(bytes.get(..whole)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(limit: &str, usage: u64, cache: u64) -> (tempfile::TempDir, Headroom) {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            File::open(path).unwrap()
        };
        let filler = "filler 1\n".repeat(700);
        let group = Group {
            limit: write("memory.max", format!("{limit}\n")),
            usage: write("memory.current", format!("{usage}\n")),
            stat: Some(write(
                "memory.stat",
                format!("anon 5\ninactive_file {cache}\nactive_file 1\n{filler}"),
            )),
        };
        (folder, Headroom(vec![group]))
    }

    #[test]
    fn page_cache_is_room_and_anything_else_is_not() {
        for (limit, usage, cache, room) in [
            ("max", 1 << 40, 0, true),
            ("100", 51, 0, true),
            ("100", 52, 0, false),
            ("100", 60, 9, true),
            ("100", 60, 8, false),
        ] {
            let (_folder, headroom) = group(limit, usage, cache);
            // The active byte of the cache is room as well.
            let asked = headroom.room_for(Bytes(50)).is_ok();
            assert_eq!(asked, room, "{limit} {usage} {cache}");
        }
    }
}
