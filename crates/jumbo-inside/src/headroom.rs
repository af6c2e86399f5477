//! Available memory and tasks, seen from inside a program: [`headroom`], [`tasks`].
//!
//! The minimum of the memory cgroups of this process, up to the root, and of the host. It is
//! checked before freed memory is held back, and before jumbo touches more than the program: at a
//! cgroup's limit a touch kills. A limit that cannot be read counts as short.
//!
//! Clean page cache of a cgroup counts as available, because it is reclaimed before an OOM kill and
//! fills any cgroup in time. Dirty pages and writeback do not.
//!
//! Not covered: the first touch of older mappings while memory is pending. So a memory cgroup needs
//! many times as much room; on the host the kernel reclaims first.
//!
//! Files are read into buffers on a stack with room, and nothing is cached, because a limit can change at any
//! time.

use core::ffi::CStr;

use jumbo_sys::cgroup::{self, clean_files, with_controller};
use jumbo_sys::proc::{kib_field, number, read};
use rustix::io::{Errno, Result};

/// Longest path. All buffers here are small: the stack may be fresh.
const MAX_PATH_BYTES: usize = 1024;
/// Longest text of a file: /proc/self/cgroup has a line per v1 hierarchy.
const MAX_TEXT_BYTES: usize = 2048;
/// Bytes of /proc/meminfo up to MemAvailable, its third line.
const MEMINFO_BYTES: usize = 256;
/// Longest text of a limit or a usage.
const VALUE_BYTES: usize = 32;
/// Bytes of memory.stat up to the lines that are read here, in both versions.
const STAT_BYTES: usize = 2048;

/// Room of a memory cgroup per pending byte: threads that touch memory may be faster than those
/// that free it, and at the limit of a cgroup a process is killed.
const GROUP_MARGIN: usize = 8;

/// Bytes that this process could still allocate and touch.
#[derive(Clone, Copy, Debug)]
pub struct Headroom {
    /// Available bytes of the host.
    pub(crate) host: usize,
    /// Room of the memory cgroups; `usize::MAX`: no limit.
    pub(crate) group: usize,
}

impl Headroom {
    /// Returns the bytes that may be allocated at all.
    pub fn min(&self) -> usize {
        self.host.min(self.group)
    }

    /// Reports whether no memory cgroup has a limit.
    pub const fn has_no_group_limit(&self) -> bool {
        self.group == usize::MAX
    }

    /// Reports whether `pending` bytes may be pending.
    pub const fn holds(&self, pending: usize) -> bool {
        self.host >= pending && self.group / GROUP_MARGIN >= pending
    }
}

/// Bytes to be pending or touched. Room beyond them is not measured, which saves calls.
#[derive(Clone, Copy, Debug)]
pub struct Needed {
    /// Bytes of the host; `usize::MAX`: measure all.
    pub host: usize,
    /// Bytes of the tightest memory cgroup.
    pub group: usize,
}

impl Needed {
    /// Returns the bytes for [`Headroom::holds`].
    pub const fn to_hold(pending: usize) -> Self {
        Self {
            host: pending,
            group: pending.saturating_mul(GROUP_MARGIN),
        }
    }

    /// Returns the bytes for [`Headroom::min`], before an allocation of `bytes`.
    pub const fn for_touching(bytes: usize) -> Self {
        Self {
            host: usize::MAX,
            group: bytes,
        }
    }
}

/// Measures the headroom; `None` if unknown, or behind a filter of the program. The caller holds a lock that delays fork(2), so that
/// no child inherits the descriptors.
pub fn headroom(needed: Needed) -> Option<Headroom> {
    jumbo_sys::unfiltered(|| jumbo_sys::apart(|| measure(needed)).flatten())?
}

/// Measures on the caller's stack.
fn measure(needed: Needed) -> Option<Headroom> {
    Some(Headroom {
        host: free(needed.host).or_else(available)?,
        group: least(&MEMORY, needed.group, None)?,
    })
}

/// Number of parts into which available memory is divided among the tasks that share it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    /// Least number.
    pub(crate) least: usize,
    /// Number for each task.
    pub(crate) per_task: usize,
}

impl Parts {
    /// Returns one of the parts.
    fn of(self, bytes: usize, tasks: usize) -> usize {
        bytes / tasks.saturating_mul(self.per_task).max(self.least).max(1)
    }
}

/// Returns the least part of the room of the memory cgroups; `usize::MAX`: no limit, `None`: unknown.
pub(crate) fn group_share(parts: Parts) -> Option<usize> {
    least(&MEMORY, usize::MAX, Some(parts))
}

/// Returns the host's available memory and a part of it; `None` if unknown.
pub(crate) fn host_room(parts: Parts) -> Option<(usize, usize)> {
    let room = available()?;
    let tasks = rustix::system::sysinfo().procs.into();
    Some((room, parts.of(room, tasks)))
}

/// Reads all files once, for a process that keeps them ([`sys::keep`]).
pub(crate) fn read_all() {
    const ONE: Parts = Parts {
        least: 1,
        per_task: 1,
    };
    let _ = (group_share(ONE), host_room(ONE), free_in_pieces(1));
}

/// Reports whether `bytes` can be touched that the program did not touch. On the scanner's stack.
pub(crate) fn has_room(bytes: usize) -> bool {
    measure(Needed::for_touching(bytes)).is_some_and(|room| room.min() >= bytes)
}

/// Reports whether the kernel may limit its commitments (vm.overcommit_memory is 2, or unknown).
/// Pending memory then counts against the limit.
pub fn is_promise_strict() -> bool {
    let mut text = [0u8; 16];
    let text = read(c"/proc/sys/vm/overcommit_memory", &mut text);
    !text.is_ok_and(|text| matches!(number(text), Some(0 | 1)))
}

/// Returns free memory without page cache, if more than `needed`: one call instead of three.
fn free(needed: usize) -> Option<usize> {
    if needed == usize::MAX {
        return None;
    }
    let info = rustix::system::sysinfo();
    let (free, unit) = (
        usize::try_from(info.freeram),
        usize::try_from(info.mem_unit),
    );
    let free = free.ok()?.checked_mul(unit.ok()?)?;
    (free > needed).then_some(free)
}

/// Returns the host's memory in bytes. sysinfo(2).
pub(crate) fn host_memory() -> usize {
    let info = rustix::system::sysinfo();
    let bytes = u64::from(info.mem_unit).saturating_mul(info.totalram);
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Reads MemAvailable of /proc/meminfo (Linux 3.14).
fn available() -> Option<usize> {
    let mut text = [0u8; MEMINFO_BYTES];
    let bytes = kib_field(read(c"/proc/meminfo", &mut text).ok()?, b"MemAvailable:")?;
    usize::try_from(bytes.0).ok()
}

/// Returns the free memory in blocks of at least `bytes`, by /proc/buddyinfo: a first touch of such
/// a block need not wait for compaction. `None` if it is unknown.
pub(crate) fn free_in_pieces(bytes: usize) -> Option<usize> {
    // A host with many zones may have more than the buffer holds.
    let mut text = [0u8; MAX_TEXT_BYTES];
    let text = read(c"/proc/buddyinfo", &mut text).ok()?;
    Some(pages_in_blocks(text, bytes / rustix::param::page_size()) * rustix::param::page_size())
}

/// Returns the base pages in free blocks of at least `pages`. A line has one count per order.
fn pages_in_blocks(text: &[u8], pages: usize) -> usize {
    let order = pages.max(1).trailing_zeros() as usize;
    let lines = text.split(|byte| *byte == b'\n');
    let counts = |line: &[u8]| {
        let fields = line
            .split(|byte| *byte == b' ')
            .filter(|field| !field.is_empty());
        // The counts follow "Node 0, zone Normal".
        let counts = fields.skip(4).enumerate().skip(order);
        counts
            .map(|(order, count)| number(count).unwrap_or(0) << order)
            .sum::<usize>()
    };
    lines.map(counts).sum()
}

/// Reports whether enough tasks remain for the program beside a thread of jumbo.
pub(crate) fn has_tasks() -> bool {
    const MIN_TASKS: usize = 16;
    tasks().is_none_or(|tasks| tasks >= MIN_TASKS)
}

/// Returns the tasks that the pids cgroups still allow; `usize::MAX`: no limit, `None`: unknown.
pub fn tasks() -> Option<usize> {
    least(&PIDS, 0, None)
}

/// Returns the least room of the cgroups of this process, or the least part of it.
fn least(controller: &'static Controller, needed: usize, parts: Option<Parts>) -> Option<usize> {
    let mut text = [0u8; MAX_TEXT_BYTES];
    let text = match read(c"/proc/self/cgroup", &mut text) {
        // Truncated.
        Ok(text) if text.len() == MAX_TEXT_BYTES => return None,
        Ok(text) => text,
        // A kernel without cgroups lacks this file.
        Err(Errno::NOENT) => return jumbo_sys::open(c"/proc/meminfo").ok().map(|_| usize::MAX),
        Err(_) => return None,
    };
    let groups = Groups::parse(controller, text)?;
    groups.least(needed, parts, |path, buffer| {
        read(path, buffer).map(<[u8]>::len)
    })
}

/// Returns the room of one cgroup, from files whose start `read` puts into a buffer; `usize::MAX`
/// without a limit. Page cache is read only if the room is less than `needed` without it. An error
/// of `read` for the limit is passed on; a file without a number is EIO.
fn room_of_group(
    version: &Version,
    needed: usize,
    mut read: impl FnMut(&[u8], &mut [u8]) -> Result<usize>,
) -> Result<usize> {
    let mut value = |name: &[u8]| {
        let mut text = [0u8; VALUE_BYTES];
        let length = read(name, &mut text)?;
        let text = text.get(..length).ok_or(Errno::IO)?;
        cgroup::limit(text).ok_or(Errno::IO)
    };
    let mut limit = value(version.limit)?;
    if !version.high.is_empty() {
        limit = limit.min(value(version.high).unwrap_or(usize::MAX));
    }
    if limit == usize::MAX {
        return Ok(usize::MAX);
    }
    let usage = value(version.usage).map_err(|_| Errno::IO)?;
    let free = limit.saturating_sub(usage);
    if free >= needed {
        return Ok(free);
    }
    let files = read_clean_files(|text| read(b"/memory.stat\0", text)).unwrap_or(0);
    Ok(limit.saturating_sub(usage.saturating_sub(files)))
}

/// File of the processes of a group.
const PROCESSES: &[u8] = b"/cgroup.procs\0";

/// Returns the number of tasks of a group and of those below it, or of its own processes;
/// `usize::MAX` if unknown. Not inlined, to save stack.
#[inline(never)]
fn tasks_of_group(mut read: impl FnMut(&'static [u8], &mut [u8]) -> Result<usize>) -> usize {
    let mut text = [0u8; MAX_TEXT_BYTES];
    let known = read(PIDS.v2.usage, &mut text).ok();
    let known = known.and_then(|length| number(text.get(..length)?));
    let lines = |text: &[u8]| text.iter().filter(|byte| **byte == b'\n').count();
    known.unwrap_or_else(|| match read(PROCESSES, &mut text) {
        // Truncated.
        Ok(MAX_TEXT_BYTES) | Err(_) => usize::MAX,
        Ok(length) => text.get(..length).map_or(usize::MAX, lines),
    })
}

/// Reads [`clean_files`] from a file. Not inlined, to save stack where it is not needed.
#[inline(never)]
fn read_clean_files(read: impl FnOnce(&mut [u8]) -> Result<usize>) -> Option<usize> {
    let mut text = [0u8; STAT_BYTES];
    let length = read(&mut text).ok()?;
    clean_files(text.get(..length)?)
}

/// Cgroup of this process for one controller, from /proc/self/cgroup.
#[derive(Debug)]
struct Groups<'a> {
    version: &'static Version,
    path: &'a [u8],
}

/// A controller, by its name, in cgroup v1 and v2.
#[derive(Debug)]
struct Controller {
    name: &'static [u8],
    v1: Version,
    v2: Version,
}

/// Mount points and file names of a controller in one version.
#[derive(Debug, PartialEq, Eq)]
struct Version {
    mounts: &'static [&'static [u8]],
    limit: &'static [u8],
    /// Throttling threshold, below the limit; empty: the version has none.
    high: &'static [u8],
    usage: &'static [u8],
}

/// Mount points of cgroup v2.
const V2_MOUNTS: &[&[u8]] = &[b"/sys/fs/cgroup", b"/sys/fs/cgroup/unified"];

static MEMORY: Controller = Controller {
    name: b"memory",
    v1: Version {
        mounts: &[b"/sys/fs/cgroup/memory"],
        limit: b"/memory.limit_in_bytes\0",
        high: b"",
        usage: b"/memory.usage_in_bytes\0",
    },
    v2: Version {
        mounts: V2_MOUNTS,
        limit: b"/memory.max\0",
        high: b"/memory.high\0",
        usage: b"/memory.current\0",
    },
};

static PIDS: Controller = Controller {
    name: b"pids",
    v1: Version {
        mounts: &[b"/sys/fs/cgroup/pids"],
        limit: b"/pids.max\0",
        high: b"",
        usage: b"/pids.current\0",
    },
    v2: Version {
        mounts: V2_MOUNTS,
        limit: b"/pids.max\0",
        high: b"",
        usage: b"/pids.current\0",
    },
};

impl<'a> Groups<'a> {
    fn parse(controller: &'static Controller, text: &'a [u8]) -> Option<Self> {
        let group = with_controller(text, controller.name)?;
        let version = match group.version {
            1 => &controller.v1,
            _ => &controller.v2,
        };
        let path = group.path;
        Some(Self { version, path })
    }

    /// Returns the least room of this group and those above it, from files that `read` reads. In a
    /// container the path may exist on the host only; then its existing ancestors count. A group
    /// without a readable limit counts as one without a limit.
    /// With `parts` it is divided by the tasks of the group.
    fn least(
        &self,
        needed: usize,
        parts: Option<Parts>,
        mut read: impl FnMut(&CStr, &mut [u8]) -> Result<usize>,
    ) -> Option<usize> {
        let version = self.version;
        let mut file = |mount: &[u8], folder: &[u8], name: &[u8], text: &mut [u8]| {
            let mut path = [0u8; MAX_PATH_BYTES];
            let path = joined(&mut path, [mount, folder, name]).ok_or(Errno::NAMETOOLONG)?;
            read(path, text)
        };
        let (mut min_room, mut seen, mut tasks) = (usize::MAX, false, 0);
        for mount in version.mounts {
            let mut folder = self.path.strip_suffix(b"/").unwrap_or(self.path);
            loop {
                let here = room_of_group(version, needed, |name, text| {
                    file(mount, folder, name, text)
                });
                match here {
                    Ok(usize::MAX) => seen = true,
                    Ok(mut room) => {
                        if let Some(parts) = parts {
                            let counts = match *version == MEMORY.v1 {
                                true => PIDS.v1.mounts[0],
                                false => mount,
                            };
                            let here = tasks_of_group(|name, text| match name {
                                PROCESSES => file(mount, folder, name, text),
                                _ => file(counts, folder, name, text),
                            });
                            // A group has those of the groups below it.
                            tasks = here.max(tasks);
                            room = parts.of(room, tasks);
                        }
                        (seen, min_room) = (true, min_room.min(room));
                    }
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::PERM) => {}
                    Err(_) => return None,
                }
                let Some(above) = folder.iter().rposition(|byte| *byte == b'/') else {
                    break;
                };
                folder = &folder[..above];
            }
            // The root of a v2 hierarchy has no limit file.
            if !seen && version.mounts == V2_MOUNTS && self.path == b"/" {
                let mut there = |name| file(mount, b"", name, &mut [0; VALUE_BYTES]).is_ok();
                seen = there(b"/cgroup.procs\0") || there(b"/cgroup.max.depth\0");
            }
            if seen {
                return Some(min_room);
            }
        }
        // No file of a group is there or readable: that is no sign of a full group.
        Some(usize::MAX)
    }
}

/// Concatenates `parts` into a path; the last one ends with a zero byte.
fn joined<'a>(buffer: &'a mut [u8], parts: [&[u8]; 3]) -> Option<&'a CStr> {
    let mut length = 0;
    for part in parts {
        let end = length + part.len();
        buffer.get_mut(length..end)?.copy_from_slice(part);
        length = end;
    }
    CStr::from_bytes_with_nul(&buffer[..length]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_counts_in_pieces_that_are_large_enough() {
        let text = b"Node 0, zone      DMA      1      0      0      1      0      0      0      0      0      1      3 \n\
            Node 0, zone   Normal   9999   9999      0      0      0      0      0      0      0      2      5 \n";
        assert_eq!(pages_in_blocks(text, 512), 3 * 512 + 8 * 1024);
        assert_eq!(pages_in_blocks(text, 1024), 8 * 1024);
        assert_eq!(pages_in_blocks(text, 2048), 0);
        assert_eq!(pages_in_blocks(b"", 512), 0);
    }

    const ALL: usize = usize::MAX;

    /// Reads from a list of files below /sys/fs/cgroup.
    fn files<'a>(
        files: &'a [(&'a str, &'a str)],
    ) -> impl FnMut(&CStr, &mut [u8]) -> Result<usize> + 'a {
        move |path, buffer| {
            let path = path.to_str().unwrap().trim_start_matches("/sys/fs/cgroup/");
            let found = files.iter().find(|(name, _)| *name == path);
            let (_, text) = found.ok_or(Errno::NOENT)?;
            if *text == "denied" {
                return Err(Errno::ACCESS);
            }
            let length = text.len().min(buffer.len());
            buffer[..length].copy_from_slice(&text.as_bytes()[..length]);
            Ok(length)
        }
    }

    /// Measures the memory cgroups of /proc/self/cgroup.
    fn memory(text: &str, list: &[(&str, &str)]) -> Option<usize> {
        Groups::parse(&MEMORY, text.as_bytes())?.least(ALL, None, files(list))
    }

    /// Each task of a group may waste a part of its room, at each level.
    #[test]
    fn the_room_is_divided_by_the_tasks_of_the_group() {
        let parts = Parts {
            least: 10,
            per_task: 2,
        };
        let share = |text: &str, list: &[(&str, &str)]| {
            Groups::parse(&MEMORY, text.as_bytes())?.least(ALL, Some(parts), files(list))
        };
        let v2 = [("a/memory.max", "1000"), ("a/memory.current", "0")];
        let with = |more: &[(&'static str, &'static str)]| share("0::/a\n", &[&v2, more].concat());
        assert_eq!(with(&[("a/pids.current", "3\n")]), Some(100));
        assert_eq!(with(&[("a/pids.current", "50\n")]), Some(10));
        assert_eq!(
            with(&[("a/cgroup.procs", &"1\n".repeat(50).leak()[..])]),
            Some(10)
        );
        assert_eq!(with(&[]), Some(0), "unknown");
        let many = "1\n".repeat(MAX_TEXT_BYTES).leak();
        assert_eq!(
            with(&[("a/cgroup.procs", many)]),
            Some(0),
            "too many to read"
        );
        let v1 = [
            ("memory/a/memory.limit_in_bytes", "1000"),
            ("memory/a/memory.usage_in_bytes", "0"),
            ("pids/a/pids.current", "50"),
        ];
        assert_eq!(share("4:memory:/a\n", &v1), Some(10));
    }

    #[test]
    fn the_tightest_group_counts() {
        let room = memory(
            "4:memory,x:/a/b\n1:cpu:/\n0::/c\n",
            &[
                ("memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory/a/memory.limit_in_bytes", "1000\n"),
                ("memory/a/memory.usage_in_bytes", "400\n"),
                ("memory/memory.limit_in_bytes", "5000\n"),
                ("memory/memory.usage_in_bytes", "400\n"),
                ("c/memory.max", "10\n"),
                ("c/memory.current", "10\n"),
            ],
        );
        assert_eq!(room, Some(600));
    }

    #[test]
    fn a_group_without_a_limit_has_all_room() {
        let none = [("a/memory.max", "max\n")];
        assert_eq!(memory("0::/a\n", &none), Some(ALL));
        let over = [("a/memory.max", "10"), ("a/memory.current", "11")];
        assert_eq!(memory("0::/a\n", &over), Some(0));
        // Beyond memory.high a program is throttled.
        for (max, high, room) in [
            ("max\n", "1000\n", 900),
            ("600\n", "max\n", 500),
            ("600", "550", 450),
        ] {
            let files = [
                ("a/memory.max", max),
                ("a/memory.high", high),
                ("a/memory.current", "100"),
            ];
            assert_eq!(memory("0::/a\n", &files), Some(room));
        }
        let root = [("cgroup.procs", "1")];
        assert_eq!(memory("0::/\n", &root), Some(ALL));
    }

    #[test]
    fn tasks_are_counted_in_the_groups_of_their_own_controller() {
        let text = b"8:pids:/a\n4:memory:/b\n0::/c\n";
        let room =
            |text, files: &[_]| Groups::parse(&PIDS, text)?.least(0, None, self::files(files));
        let first = [("pids/a/pids.max", "20\n"), ("pids/a/pids.current", "6\n")];
        assert_eq!(room(text, &first), Some(14));
        let second = [
            ("c/pids.max", "max\n"),
            ("pids.max", "100\n"),
            ("pids.current", "1\n"),
        ];
        assert_eq!(room(b"0::/c\n", &second), Some(99));
        assert_eq!(room(b"0::/c\n", &second[..1]), Some(usize::MAX));
    }

    #[test]
    fn unreadable_groups_are_not_full() {
        assert!(Groups::parse(&MEMORY, b"").is_none());
        let text = "4:memory:/a/b\n";
        assert_eq!(memory(text, &[]), Some(usize::MAX), "no folder");
        let limit = ("memory/memory.limit_in_bytes", "1000\n");
        assert_eq!(memory(text, &[limit]), None, "no usage");
        let above = ("memory/a/memory.limit_in_bytes", "denied");
        let below = ("memory/a/b/memory.limit_in_bytes", "max");
        assert_eq!(
            memory(text, &[below, above]),
            Some(usize::MAX),
            "the one above"
        );
        let long = format!("0::/{}", "x".repeat(MAX_PATH_BYTES));
        assert_eq!(
            memory(&long, &[("memory.max", "max")]),
            None,
            "no room for the path"
        );
    }

    /// Page cache of this group, and of the groups below it.
    #[test]
    fn clean_page_cache_is_room() {
        let v2 = "anon 700\nfile 250\nfile_mapped 9\nfile_dirty 20\nfile_writeback 10\n\
                      inactive_anon 300\nactive_anon 400\ninactive_file 150\nactive_file 100\n";
        let v1 = "cache 250\nrss 700\nmapped_file 9\ndirty 0\nwriteback 0\ninactive_anon 300\n\
                     inactive_file 5\nactive_file 0\ntotal_cache 250\ntotal_dirty 20\ntotal_writeback 10\n\
                     total_inactive_file 150\ntotal_active_file 100\n";
        for (text, stat, limit, usage, memory) in [
            (
                "0::/a\n",
                "a/memory.stat",
                "a/memory.max",
                "a/memory.current",
                v2,
            ),
            (
                "4:memory:/a\n",
                "memory/a/memory.stat",
                "memory/a/memory.limit_in_bytes",
                "memory/a/memory.usage_in_bytes",
                v1,
            ),
        ] {
            let groups = Groups::parse(&MEMORY, text.as_bytes()).unwrap();
            let room = |needed, stat: &[(&str, &str)]| {
                let known = [(limit, "1000\n"), (usage, "950\n")];
                groups.least(needed, None, files(&[&known, stat].concat()))
            };
            assert_eq!(room(ALL, &[(stat, memory)]), Some(50 + 250 - 30), "{text}");
            // The file is not read if it does not matter.
            assert_eq!(room(50, &[(stat, "denied")]), Some(50), "{text}");
            assert_eq!(room(50, &[(stat, memory)]), Some(50), "{text}");
            assert_eq!(room(51, &[(stat, memory)]), Some(270), "{text}");
            // Incomplete statistics do not count.
            let without = memory.replace("dirty 20", "dirt 20");
            for unknown in ["denied", "", "active_file 100", &without] {
                assert_eq!(room(ALL, &[(stat, unknown)]), Some(50), "{text}{unknown}");
            }
            let long = format!("{memory}{}", "x 1\n".repeat(STAT_BYTES));
            assert_eq!(room(ALL, &[(stat, &long)]), Some(270), "{text}");
            let late = format!("{}{memory}", "x 1\n".repeat(STAT_BYTES));
            assert_eq!(room(ALL, &[(stat, &late)]), Some(50), "{text}");
        }
    }

    #[test]
    fn this_host_has_some() {
        let room = headroom(Needed::for_touching(ALL));
        assert!(room.is_none_or(|room| room.min() > 1 << 20), "{room:?}");
    }

    #[test]
    fn a_group_needs_a_margin() {
        let room = Headroom {
            host: 100,
            group: 800,
        };
        assert!(room.holds(100) && !room.holds(101));
        let tight = Headroom { group: 799, ..room };
        assert!(!tight.holds(100));
    }
}
