//! How much memory can still be had, asked from inside a program: [`headroom`].
//!
//! By this process's limits, by its memory cgroup and all above it, and of the host. Whoever lets freed memory
//! count as used for a moment longer asks here first, and whoever touches memory that the program did not
//! touch: at a cgroup's limit a touch does not fail, it kills. Where a limit cannot be read it is taken to be
//! short.
//!
//! Not covered: memory that was mapped before and is touched first while something is pending. Its page faults
//! ask nobody, so a memory cgroup is asked for many times as much; on the host the kernel reclaims first.
//!
//! Files are read into a buffer on the stack; nothing is kept, because a limit can change at any time.

use std::ffi::CStr;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};

/// The longest path that is followed. Small, as all of this: the stack may be fresh.
const PATH: usize = 1024;
/// How much of a file is read, at most: of /proc/self/cgroup a line for each v1 hierarchy.
const TEXT: usize = 2048;
/// MemAvailable is the third line of /proc/meminfo.
const LINES: usize = 256;

/// How many times what is freed later a memory cgroup has to have room for: threads of the program that
/// touch memory may be faster than those that free it, and in a cgroup at its limit something is killed.
const MARGIN: usize = 8;

/// The bytes that this process could still allocate and touch.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    host: usize,
    group: usize,
}

impl Room {
    /// What may be allocated at all.
    pub fn least(&self) -> usize {
        self.host.min(self.group)
    }

    /// Whether no memory cgroup has a limit.
    pub const fn is_of_no_group(&self) -> bool {
        self.group == usize::MAX
    }

    /// Whether so many bytes may be pending.
    pub const fn holds(&self, pending: usize) -> bool {
        self.host >= pending && self.group / MARGIN >= pending
    }
}

/// How much room there is; `None` where that cannot be known. What the host can give is not looked at further where
/// more than `enough` bytes are simply free. Called with a lock held that keeps fork(2) away, so that no child has
/// the descriptors.
pub fn headroom(enough: usize) -> Option<Room> {
    Some(Room {
        host: free(enough).or_else(available)?,
        group: group()?,
    })
}

/// What nobody uses, not even for the contents of files, where that is more than `enough`: one call, where
/// /proc/meminfo takes three.
fn free(enough: usize) -> Option<usize> {
    if enough == usize::MAX {
        return None;
    }
    let info = rustix::system::sysinfo();
    let (free, unit) = (
        usize::try_from(info.freeram),
        usize::try_from(info.mem_unit),
    );
    let free = free.ok()?.checked_mul(unit.ok()?)?;
    (free > enough).then_some(free)
}

/// MemAvailable of /proc/meminfo (Linux 3.14).
fn available() -> Option<usize> {
    let mut text = [0u8; LINES];
    let text = read(c"/proc/meminfo", &mut text).ok()?;
    let key = b"MemAvailable:";
    let line = text
        .split(|byte| *byte == b'\n')
        .find(|line| line.starts_with(key))?;
    number(&line[key.len()..])?.checked_mul(1024)
}

/// What the memory cgroups of this process leave.
fn group() -> Option<usize> {
    let mut text = [0u8; TEXT];
    let text = match read(c"/proc/self/cgroup", &mut text) {
        // Not all of it.
        Ok(text) if text.len() == TEXT => return None,
        Ok(text) => text,
        // A kernel without cgroups has no such file.
        Err(Errno::NOENT) => return exists(c"/proc/meminfo").then_some(usize::MAX),
        Err(_) => return None,
    };
    let groups = Groups::parse(text)?;
    groups.room(|path, buffer| read(path, buffer).map(<[u8]>::len))
}

/// Where the memory controller is, as /proc/self/cgroup has it.
#[derive(Debug, PartialEq, Eq)]
struct Groups<'a> {
    version: u8,
    path: &'a [u8],
}

/// Where a version of the controller is mounted, and how it names its files.
struct Version {
    mounts: &'static [&'static [u8]],
    limit: &'static [u8],
    usage: &'static [u8],
}

const V1: Version = Version {
    mounts: &[b"/sys/fs/cgroup/memory"],
    limit: b"/memory.limit_in_bytes\0",
    usage: b"/memory.usage_in_bytes\0",
};

const V2: Version = Version {
    mounts: &[b"/sys/fs/cgroup", b"/sys/fs/cgroup/unified"],
    limit: b"/memory.max\0",
    usage: b"/memory.current\0",
};

impl<'a> Groups<'a> {
    fn parse(text: &'a [u8]) -> Option<Self> {
        let mut found = None;
        for line in text.split(|byte| *byte == b'\n') {
            let mut fields = line.splitn(3, |byte| *byte == b':');
            let (Some(number), Some(controllers), Some(path)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if controllers
                .split(|byte| *byte == b',')
                .any(|name| name == b"memory")
            {
                return Some(Self { version: 1, path });
            }
            if number == b"0" && controllers.is_empty() {
                found = Some(Self { version: 2, path });
            }
        }
        found
    }

    /// The least room of this group and those above it, by the files that `read` reads. In a container
    /// the path may be one that only the host knows: then the groups are those that can be found going up.
    fn room(&self, mut read: impl FnMut(&CStr, &mut [u8]) -> Result<usize>) -> Option<usize> {
        let version = if self.version == 1 { V1 } else { V2 };
        // `Some(None)`: there is no such file. `None`: it cannot be known what it says.
        let mut value = |mount: &[u8], folder: &[u8], file: &[u8]| {
            let mut path = [0u8; PATH];
            let path = joined(&mut path, [mount, folder, file])?;
            let mut text = [0u8; 32];
            let length = match read(path, &mut text) {
                Err(Errno::NOENT) => return Some(None),
                read => read.ok()?,
            };
            let text = text.get(..length)?;
            // `max`: there is no limit.
            Some(Some(if text.starts_with(b"max") {
                usize::MAX
            } else {
                number(text)?
            }))
        };
        let (mut least, mut seen) = (usize::MAX, false);
        for mount in version.mounts {
            let mut folder = self.path.strip_suffix(b"/").unwrap_or(self.path);
            loop {
                if let Some(limit) = value(mount, folder, version.limit)? {
                    seen = true;
                    // Near the largest number there is (v1), or `max`.
                    if limit < 1 << 60 {
                        let usage = value(mount, folder, version.usage)??;
                        least = least.min(limit.saturating_sub(usage));
                    }
                }
                let Some(above) = folder.iter().rposition(|byte| *byte == b'/') else {
                    break;
                };
                folder = &folder[..above];
            }
            // The root of a v2 hierarchy has no limit file.
            if !seen && self.version == 2 && self.path == b"/" {
                let there = |file| matches!(value(mount, b"", file), Some(Some(_)));
                seen = [&b"/cgroup.procs\0"[..], b"/cgroup.max.depth\0"]
                    .into_iter()
                    .any(there);
            }
            if seen {
                return Some(least);
            }
        }
        None
    }
}

/// `parts`, the last of which ends with a zero, as a path.
fn joined<'a>(buffer: &'a mut [u8; PATH], parts: [&[u8]; 3]) -> Option<&'a CStr> {
    let mut length = 0;
    for part in parts {
        let end = length + part.len();
        buffer.get_mut(length..end)?.copy_from_slice(part);
        length = end;
    }
    CStr::from_bytes_with_nul(&buffer[..length]).ok()
}

/// The number at the start of a text, behind blanks.
fn number(text: &[u8]) -> Option<usize> {
    let text = text.trim_ascii_start();
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&text[..digits]).ok()?.parse().ok()
}

fn read<'a>(path: &CStr, buffer: &'a mut [u8]) -> Result<&'a [u8]> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let mut length = 0;
    loop {
        let more = rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut buffer[length..]))?;
        length += more;
        // The kernel makes the text of such a file in one piece, so whole lines are all that there are.
        let text = &buffer[..length];
        if more == 0 || text.len() == buffer.len() || text.ends_with(b"\n") {
            return Ok(&buffer[..length]);
        }
    }
}

fn exists(path: &CStr) -> bool {
    rustix::fs::stat(path).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers from a list of files.
    fn files<'a>(
        files: &'a [(&'a str, &'a str)],
    ) -> impl FnMut(&CStr, &mut [u8]) -> Result<usize> + 'a {
        move |path, buffer| {
            let path = path.to_str().unwrap();
            let found = files.iter().find(|(name, _)| *name == path);
            let (_, text) = found.ok_or(Errno::NOENT)?;
            if *text == "denied" {
                return Err(Errno::ACCESS);
            }
            buffer[..text.len()].copy_from_slice(text.as_bytes());
            Ok(text.len())
        }
    }

    #[test]
    fn the_tightest_group_counts() {
        let text = b"4:memory,x:/a/b\n1:cpu:/\n0::/c\n";
        let groups = Groups::parse(text).unwrap();
        assert_eq!(
            groups,
            Groups {
                version: 1,
                path: b"/a/b"
            }
        );
        let room = groups.room(files(&[
            (
                "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n"),
            ("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "400\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "400\n"),
        ]));
        assert_eq!(room, Some(600));
    }

    #[test]
    fn a_group_without_a_limit_has_all_room() {
        let groups = Groups::parse(b"0::/a\n").unwrap();
        let none = groups.room(files(&[("/sys/fs/cgroup/a/memory.max", "max\n")]));
        assert_eq!(none, Some(usize::MAX));
        let over = groups.room(files(&[
            ("/sys/fs/cgroup/a/memory.max", "10"),
            ("/sys/fs/cgroup/a/memory.current", "11"),
        ]));
        assert_eq!(over, Some(0));
        let root = Groups::parse(b"0::/\n").unwrap();
        let files = [("/sys/fs/cgroup/cgroup.procs", "1")];
        assert_eq!(root.room(self::files(&files)), Some(usize::MAX));
    }

    #[test]
    fn what_cannot_be_read_is_not_known() {
        assert_eq!(Groups::parse(b""), None);
        let groups = Groups::parse(b"4:memory:/a/b\n").unwrap();
        assert_eq!(groups.room(files(&[])), None);
        let limit = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n");
        assert_eq!(groups.room(files(&[limit])), None, "no usage");
        let above = ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "denied");
        let below = ("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "max");
        assert_eq!(groups.room(files(&[below, above])), None, "the one above");
        let long = format!("0::/{}", "x".repeat(PATH));
        let groups = Groups::parse(long.as_bytes()).unwrap();
        let root = [("/sys/fs/cgroup/memory.max", "max")];
        assert_eq!(groups.room(files(&root)), None, "no room for the path");
    }

    #[test]
    fn this_host_has_some() {
        let room = headroom(usize::MAX);
        assert!(room.is_none_or(|room| room.least() > 1 << 20), "{room:?}");
    }

    #[test]
    fn a_group_has_to_have_much_more() {
        let room = Room {
            host: 100,
            group: 800,
        };
        assert!(room.holds(100) && !room.holds(101));
        let tight = Room { group: 799, ..room };
        assert!(!tight.holds(100));
    }
}
