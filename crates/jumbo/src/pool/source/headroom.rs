//! What the memory cgroups of this process leave to it: [`Headroom`].
//!
//! The files are found and opened once; asking them allocates nothing, so that a heap may stand on a pool.
//! A process that is moved to another cgroup is still measured by the one it came from.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::kernel::cgroup::{self, MemoryFiles, bounded, page_cache};
use crate::kernel::{FileError, Root};
use crate::units::Bytes;

/// What memory.stat needs up to the lines that are read here, in both versions.
const STAT: usize = 4096;

/// The limits of a memory cgroup and of those above it.
#[derive(Debug)]
pub(super) struct Headroom {
    groups: Vec<Group>,
    /// Bytes that have room and are being touched.
    claimed: AtomicU64,
}

/// Room that somebody is about to use: nobody else counts on it until this is dropped.
#[derive(Debug)]
#[must_use]
pub(super) struct Claim<'a> {
    claimed: &'a AtomicU64,
    bytes: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.claimed.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

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
        let open = |files: MemoryFiles| {
            Some(Group {
                limit: File::open(files.limit).ok()?,
                usage: File::open(files.usage).ok()?,
                stat: File::open(files.stat).ok(),
            })
        };
        Ok(Self::of(groups.filter_map(open).collect()))
    }

    const fn of(groups: Vec<Group>) -> Self {
        Self {
            groups,
            claimed: AtomicU64::new(0),
        }
    }

    /// Room for `needed` more without the group passing a limit; page cache counts as room, and what other threads
    /// have claimed of this does not.
    ///
    /// Another process of the group may be faster, so this narrows the window in which a touch is fatal to
    /// what happens within one page fault; it cannot close it.
    ///
    /// # Errors
    /// EBUSY: there is none.
    pub(super) fn claim(&self, needed: Bytes) -> Result<Claim<'_>, Errno> {
        let others = self.claimed.fetch_add(needed.0, Ordering::Relaxed);
        let claim = Claim {
            claimed: &self.claimed,
            bytes: needed.0,
        };
        // What others have touched meanwhile counts twice: on the safe side.
        let all = Bytes(others.saturating_add(needed.0));
        if self.groups.iter().all(|group| group.has(all)) {
            Ok(claim)
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
        (folder, Headroom::of(vec![group]))
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
            let asked = headroom.claim(Bytes(50)).is_ok();
            assert_eq!(asked, room, "{limit} {usage} {cache}");
        }
    }

    #[test]
    fn room_is_promised_once() {
        let (_folder, headroom) = group("100", 20, 0);
        let first = headroom.claim(Bytes(50)).unwrap();
        assert_eq!(headroom.claim(Bytes(50)).err(), Some(Errno::BUSY));
        let _second = headroom.claim(Bytes(30)).unwrap();
        drop(first);
        assert!(headroom.claim(Bytes(50)).is_ok());
    }
}
