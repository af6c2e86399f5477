//! What the memory cgroups of this process leave to it: [`Headroom`].
//!
//! The files are found and opened once; asking them allocates nothing, so that a heap may stand on a pool.
//! A process that is moved to another cgroup is still measured by the one it came from.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::kernel::cgroup::{self, MemoryFiles};
use crate::kernel::{FileError, Root};
use crate::units::Bytes;
use jumbo_inside::headroom::{Part, left};

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

/// The files of one; `None` for those that could not be opened.
#[derive(Debug)]
struct Group {
    limit: Option<File>,
    usage: Option<File>,
    stat: Option<File>,
}

impl Headroom {
    /// Finds them.
    ///
    /// # Errors
    /// [`FileError`] where /proc/self/{cgroup,mountinfo} cannot be read or understood.
    pub(super) fn open(root: &Root) -> Result<Self, FileError> {
        let groups = cgroup::memory_files(root)?.into_iter();
        let open = |files: MemoryFiles| Group {
            limit: File::open(files.limit).ok(),
            usage: File::open(files.usage).ok(),
            stat: File::open(files.stat).ok(),
        };
        Ok(Self::of(groups.map(open).collect()))
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
        let needed = usize::try_from(needed.0).unwrap_or(usize::MAX);
        let left = left(needed, |part, buffer| {
            let file = match part {
                Part::Limit => &self.limit,
                Part::Usage => &self.usage,
                Part::Stat => &self.stat,
            };
            let file = file.as_ref().ok_or(Errno::BADF)?;
            rustix::io::pread(file, buffer, 0)
        });
        match left {
            Ok(left) => left >= needed,
            // The group is gone, and this process had left it before.
            Err(Errno::NODEV) => true,
            // What cannot be read is taken to be short.
            Err(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(limit: &str, usage: u64, cache: u64) -> (tempfile::TempDir, Headroom) {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            File::open(path).ok()
        };
        let filler = "filler 1\n".repeat(700);
        let group = Group {
            limit: write("memory.max", format!("{limit}\n")),
            usage: write("memory.current", format!("{usage}\n")),
            stat: write(
                "memory.stat",
                format!(
                    "anon 5\nfile_dirty 2\nfile_writeback 1\ninactive_file {cache}\nactive_file 4\n{filler}"
                ),
            ),
        };
        (folder, Headroom::of(vec![group]))
    }

    #[test]
    fn clean_page_cache_is_room_and_anything_else_is_not() {
        for (limit, usage, cache, room) in [
            ("max", 1 << 40, 0, true),
            ("100", 51, 0, true),
            ("100", 52, 0, false),
            ("100", 60, 9, true),
            ("100", 60, 8, false),
        ] {
            let (_folder, headroom) = group(limit, usage, cache);
            // One active byte of the cache that is clean is room as well.
            let asked = headroom.claim(Bytes(50)).is_ok();
            assert_eq!(asked, room, "{limit} {usage} {cache}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_short() {
        let asked = |spoil: fn(&mut Group)| {
            let (_folder, mut headroom) = group("100", 10, 0);
            spoil(&mut headroom.groups[0]);
            headroom.claim(Bytes(50)).is_ok()
        };
        assert!(asked(|_| ()));
        assert!(asked(|group| group.stat = None));
        assert!(!asked(|group| group.limit = None));
        assert!(!asked(|group| group.usage = None));
        assert!(!asked(|group| group.usage = File::open("/dev/null").ok()));
        assert!(!asked(|group| group.limit = File::open("/dev/null").ok()));
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
