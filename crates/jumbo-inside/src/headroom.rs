//! How much memory can still be had, asked from inside a program: [`headroom`]; and how many tasks: [`tasks`].
//!
//! By this process's limits, by its memory cgroup and all above it, and of the host. Code that lets freed memory
//! count as used for a moment longer asks here first, and so does code that touches memory that the program did not
//! touch: at a cgroup's limit a touch does not fail, it kills. Where a limit cannot be read it is taken to be
//! short.
//!
//! What a cgroup keeps of files counts as room, for it goes before anything is killed, and a group that has
//! lived for a while is full of it; not so what has to be written first. One group is asked by `room_of_group`, which
//! the sources of a pool share.
//!
//! Not covered: memory that was mapped before and is touched first while something is pending. Its page faults
//! ask for no room, so a memory cgroup is asked for many times as much; on the host the kernel reclaims first.
//!
//! Files are read into a buffer on the stack; nothing is kept, because a limit can change at any time. It uses no other
//! module; `gather`, `heap`, `pool`, `reaper` and `ledger` ask it.

use core::ffi::CStr;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};

/// The longest path that is followed. Small, as all of this: the stack may be fresh.
pub(crate) const MAX_PATH_BYTES: usize = 1024;
/// How much of a file is read, at most: of /proc/self/cgroup a line for each v1 hierarchy.
const MAX_TEXT_BYTES: usize = 2048;
/// MemAvailable is the third line of /proc/meminfo.
const MEMINFO_BYTES: usize = 256;
/// A limit, or what is used.
const VALUE_BYTES: usize = 32;
/// What memory.stat needs up to the lines that are read here, in both versions.
const STAT_BYTES: usize = 2048;

/// How many times what is freed later a memory cgroup has to have room for: threads of the program that
/// touch memory may be faster than those that free it, and in a cgroup at its limit something is killed.
const GROUP_MARGIN: usize = 8;

/// The bytes that this process could still allocate and touch.
#[derive(Clone, Copy, Debug)]
pub struct Headroom {
    host: usize,
    group: usize,
}

impl Headroom {
    /// What may be allocated at all.
    pub fn min(&self) -> usize {
        self.host.min(self.group)
    }

    /// What the host has available, in bytes.
    pub(crate) const fn host(&self) -> usize {
        self.host
    }

    /// What the memory cgroups leave, in bytes; `usize::MAX`: no limit.
    pub(crate) const fn group(&self) -> usize {
        self.group
    }

    /// Whether no memory cgroup has a limit.
    pub const fn has_no_group_limit(&self) -> bool {
        self.group == usize::MAX
    }

    /// Whether so many bytes may be pending.
    pub const fn holds(&self, pending: usize) -> bool {
        self.host >= pending && self.group / GROUP_MARGIN >= pending
    }
}

/// How much is to be pending or touched: what is more than that need not be known. Every look beyond what is simply
/// free costs further calls.
#[derive(Clone, Copy, Debug)]
pub struct Needed {
    /// Of the host; `usize::MAX`: all that there is.
    pub host: usize,
    /// Of the tightest memory cgroup.
    pub group: usize,
}

impl Needed {
    /// What [`Headroom::holds`] looks at.
    pub const fn to_hold(pending: usize) -> Self {
        Self {
            host: pending,
            group: pending.saturating_mul(GROUP_MARGIN),
        }
    }

    /// What [`Headroom::min_room`] needs to tell whether `bytes` can be allocated.
    pub const fn for_touching(bytes: usize) -> Self {
        Self {
            host: usize::MAX,
            group: bytes,
        }
    }
}

/// How much room there is; `None` where that cannot be known. Called with a lock held that keeps fork(2) away, so
/// that no child has the descriptors.
pub fn headroom(needed: Needed) -> Option<Headroom> {
    Some(Headroom {
        host: free(needed.host).or_else(available)?,
        group: room(&MEMORY, needed.group)?,
    })
}

/// Whether `bytes` can be touched that the program did not touch.
pub(crate) fn has_room(bytes: usize) -> bool {
    headroom(Needed::for_touching(bytes)).is_some_and(|room| room.min() >= bytes)
}

/// Whether the kernel promises no more memory than there is (vm.overcommit_memory is 2), or may do so: then what is
/// pending counts against what others are promised.
pub fn is_promise_strict() -> bool {
    let mut text = [0u8; 16];
    let text = read(c"/proc/sys/vm/overcommit_memory", &mut text);
    !text.is_ok_and(|text| matches!(number(text), Some(0 | 1)))
}

/// What is not used, not even for the contents of files, where that is more than `needed`: one call, where
/// /proc/meminfo takes three.
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

/// The host's memory, in bytes. sysinfo(2).
pub(crate) fn host_memory() -> usize {
    let info = rustix::system::sysinfo();
    let bytes = u64::from(info.mem_unit).saturating_mul(info.totalram);
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// MemAvailable of /proc/meminfo (Linux 3.14).
fn available() -> Option<usize> {
    let mut text = [0u8; MEMINFO_BYTES];
    kib_field(read(c"/proc/meminfo", &mut text).ok()?, b"MemAvailable:")
}

/// Reads a field in kB of a file of /proc, in bytes.
pub(crate) fn kib_field(text: &[u8], key: &[u8]) -> Option<usize> {
    let mut lines = text.split(|byte| *byte == b'\n');
    let value = lines.find_map(|line| line.strip_prefix(key))?;
    number(value)?.checked_mul(1024)
}

/// The memory that is free in pieces of `bytes` and more, by /proc/buddyinfo: a first touch of such a piece need not wait
/// until the kernel has moved other memory away. `None` where that cannot be known.
pub(crate) fn free_in_pieces(bytes: usize) -> Option<usize> {
    // A host with more zones than this holds has more than is said.
    let mut text = [0u8; MAX_TEXT_BYTES];
    let text = read(c"/proc/buddyinfo", &mut text).ok()?;
    Some(pages_in_blocks(text, bytes / rustix::param::page_size()) * rustix::param::page_size())
}

/// The base pages in free pieces of so many and more. A line has a count for each order, from 0 on.
fn pages_in_blocks(text: &[u8], pages: usize) -> usize {
    let order = pages.max(1).trailing_zeros() as usize;
    let lines = text.split(|byte| *byte == b'\n');
    let counts = |line: &[u8]| {
        let fields = line
            .split(|byte| *byte == b' ')
            .filter(|field| !field.is_empty());
        // Behind "Node 0, zone Normal".
        let counts = fields.skip(4).enumerate().skip(order);
        counts
            .map(|(order, count)| number(count).unwrap_or(0) << order)
            .sum::<usize>()
    };
    lines.map(counts).sum()
}

/// Whether a thread of ours would leave the program needed tasks.
pub(crate) fn has_tasks() -> bool {
    const MIN_TASKS: usize = 16;
    tasks().is_none_or(|tasks| tasks >= MIN_TASKS)
}

/// How many more tasks the pids cgroups of this process leave; `usize::MAX` where there is no limit, `None` where that
/// cannot be known.
pub fn tasks() -> Option<usize> {
    room(&PIDS, 0)
}

/// What the groups of this process leave, and all above them.
fn room(controller: &'static Controller, needed: usize) -> Option<usize> {
    let mut text = [0u8; MAX_TEXT_BYTES];
    let text = match read(c"/proc/self/cgroup", &mut text) {
        // Not all of it.
        Ok(text) if text.len() == MAX_TEXT_BYTES => return None,
        Ok(text) => text,
        // A kernel without cgroups has no such file.
        Err(Errno::NOENT) => return rustix::fs::stat(c"/proc/meminfo").ok().map(|_| usize::MAX),
        Err(_) => return None,
    };
    let groups = Groups::parse(controller, text)?;
    groups.room(needed, |path, buffer| read(path, buffer).map(<[u8]>::len))
}

/// The files of a memory cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupFile {
    /// What may be used.
    Limit,
    /// What is used.
    Usage,
    /// Of what kind that is.
    Stat,
}

/// What one memory cgroup leaves, by the files that `read` puts the start of into a buffer; `usize::MAX` without a
/// limit. What it keeps of files is looked at where there is less than `needed` without.
///
/// # Errors
/// `read`'s for the limit; EIO where a file says nothing.
fn room_of_group(
    needed: usize,
    mut read: impl FnMut(CgroupFile, &mut [u8]) -> Result<usize>,
) -> Result<usize> {
    let mut text = [0u8; VALUE_BYTES];
    let length = read(CgroupFile::Limit, &mut text)?;
    let limit = text.get(..length).ok_or(Errno::IO)?;
    // Near the largest number there is (v1), or `max`.
    if limit.starts_with(b"max") {
        return Ok(usize::MAX);
    }
    let limit = number(limit).ok_or(Errno::IO)?;
    if limit >= 1 << 60 {
        return Ok(usize::MAX);
    }
    let length = read(CgroupFile::Usage, &mut text).map_err(|_| Errno::IO)?;
    let usage = text.get(..length).and_then(number).ok_or(Errno::IO)?;
    let free = limit.saturating_sub(usage);
    if free >= needed {
        return Ok(free);
    }
    let files = read_clean_files(|text| read(CgroupFile::Stat, text)).unwrap_or(0);
    Ok(limit.saturating_sub(usage.saturating_sub(files)))
}

/// [`clean_files`] of the start of a file. Not inlined, for the sake of the stack where it is not needed.
#[inline(never)]
fn read_clean_files(read: impl FnOnce(&mut [u8]) -> Result<usize>) -> Option<usize> {
    let mut text = [0u8; STAT_BYTES];
    let length = read(&mut text).ok()?;
    clean_files(text.get(..length)?)
}

/// What a group keeps of files and need not write before it gives that up, in bytes, by its memory.stat; `None`
/// where that does not say it.
pub fn clean_files(text: &[u8]) -> Option<usize> {
    // The last line may be a file_kind of one.
    let end = text.iter().rposition(|byte| *byte == b'\n')?;
    let value = |wanted: &[u8]| {
        let mut lines = text[..end].split(|byte| *byte == b'\n');
        lines.find_map(|line| number(line.strip_prefix(wanted)?.strip_prefix(b" ")?))
    };
    // Version 1 leaves the groups below out, unless `total_` is in front.
    let either = |first: &[u8], second: &[u8]| value(first).or_else(|| value(second));
    let kept = either(b"total_inactive_file", b"inactive_file")?
        .checked_add(either(b"total_active_file", b"active_file")?)?;
    let busy = either(b"total_dirty", b"file_dirty")?
        .checked_add(either(b"total_writeback", b"file_writeback")?)?;
    Some(kept.saturating_sub(busy))
}

/// Where a controller is, as /proc/self/cgroup has it.
#[derive(Debug, PartialEq, Eq)]
struct Groups<'a> {
    version: &'static Version,
    path: &'a [u8],
}

/// A controller, by its name, of the first version and of the second.
#[derive(Debug)]
struct Controller {
    name: &'static [u8],
    v1: Version,
    v2: Version,
}

/// Where a version of the controller is mounted, and how it names its files.
#[derive(Debug, PartialEq, Eq)]
struct Version {
    mounts: &'static [&'static [u8]],
    limit: &'static [u8],
    /// From here on a task is slowed down until memory is reclaimed; empty: the version has none.
    high: &'static [u8],
    usage: &'static [u8],
}

/// Where the second version of all controllers is.
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
                .any(|name| name == controller.name)
            {
                let version = &controller.v1;
                return Some(Self { version, path });
            }
            if number == b"0" && controllers.is_empty() {
                let version = &controller.v2;
                found = Some(Self { version, path });
            }
        }
        found
    }

    /// The min_room room of this group and those above it, by the files that `read` reads. In a container
    /// the path may be one that only the host knows: then the groups are those that can be found going up.
    fn room(
        &self,
        needed: usize,
        mut read: impl FnMut(&CStr, &mut [u8]) -> Result<usize>,
    ) -> Option<usize> {
        let version = self.version;
        let mut file = |mount: &[u8], folder: &[u8], name: &[u8], text: &mut [u8]| {
            let mut path = [0u8; MAX_PATH_BYTES];
            let path = joined(&mut path, [mount, folder, name]).ok_or(Errno::NAMETOOLONG)?;
            read(path, text)
        };
        let (mut min_room, mut seen) = (usize::MAX, false);
        for mount in version.mounts {
            let mut folder = self.path.strip_suffix(b"/").unwrap_or(self.path);
            loop {
                let here = room_of_group(needed, |file_kind, text| {
                    let length = file(mount, folder, version.name(file_kind), text)?;
                    if file_kind != CgroupFile::Limit || version.high.is_empty() {
                        return Ok(length);
                    }
                    let mut high = [0u8; VALUE_BYTES];
                    let read = file(mount, folder, version.high, &mut high).unwrap_or(0);
                    let high = high.get(..read).unwrap_or_default();
                    let limit = |text: &[u8]| number(text).unwrap_or(usize::MAX);
                    match limit(high) < text.get(..length).map_or(usize::MAX, limit) {
                        true => text.get_mut(..read).ok_or(Errno::IO)?.copy_from_slice(high),
                        false => return Ok(length),
                    }
                    Ok(read)
                });
                match here {
                    Ok(room) => (seen, min_room) = (true, min_room.min(room)),
                    // There is no such file.
                    Err(Errno::NOENT) => {}
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
        None
    }
}

impl Version {
    const fn name(&self, file_kind: CgroupFile) -> &'static [u8] {
        match file_kind {
            CgroupFile::Limit => self.limit,
            CgroupFile::Usage => self.usage,
            CgroupFile::Stat => b"/memory.stat\0",
        }
    }
}

/// `parts`, the last of which ends with a zero, as a path.
pub(crate) fn joined<'a>(buffer: &'a mut [u8], parts: [&[u8]; 3]) -> Option<&'a CStr> {
    let mut length = 0;
    for part in parts {
        let end = length + part.len();
        buffer.get_mut(length..end)?.copy_from_slice(part);
        length = end;
    }
    CStr::from_bytes_with_nul(&buffer[..length]).ok()
}

/// A number as text.
pub(crate) fn decimal(mut number: u32, buffer: &mut [u8; 10]) -> &[u8] {
    let mut first = buffer.len();
    for place in buffer.iter_mut().rev() {
        *place = b'0' + u8::try_from(number % 10).unwrap_or(0);
        (number, first) = (number / 10, first - 1);
        if number == 0 {
            break;
        }
    }
    buffer.get(first..).unwrap_or_default()
}

/// The number at the start of a text, behind blanks.
pub(crate) fn number(text: &[u8]) -> Option<usize> {
    let text = text.trim_ascii_start();
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    core::str::from_utf8(&text[..digits]).ok()?.parse().ok()
}

pub(crate) fn read<'a>(path: &CStr, buffer: &'a mut [u8]) -> Result<&'a [u8]> {
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
            let length = text.len().min(buffer.len());
            buffer[..length].copy_from_slice(&text.as_bytes()[..length]);
            Ok(length)
        }
    }

    #[test]
    fn the_tightest_group_counts() {
        let text = b"4:memory,x:/a/b\n1:cpu:/\n0::/c\n";
        let groups = Groups::parse(&MEMORY, text).unwrap();
        assert_eq!(
            groups,
            Groups {
                version: &MEMORY.v1,
                path: b"/a/b"
            }
        );
        let room = groups.room(
            ALL,
            files(&[
                (
                    "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
                    "9223372036854771712\n",
                ),
                ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n"),
                ("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "400\n"),
                ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n"),
                ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "400\n"),
            ]),
        );
        assert_eq!(room, Some(600));
    }

    #[test]
    fn a_group_without_a_limit_has_all_room() {
        let groups = Groups::parse(&MEMORY, b"0::/a\n").unwrap();
        let none = groups.room(ALL, files(&[("/sys/fs/cgroup/a/memory.max", "max\n")]));
        assert_eq!(none, Some(usize::MAX));
        let over = groups.room(
            ALL,
            files(&[
                ("/sys/fs/cgroup/a/memory.max", "10"),
                ("/sys/fs/cgroup/a/memory.current", "11"),
            ]),
        );
        assert_eq!(over, Some(0));
        // Beyond memory.high a program is slowed down.
        for (max, high, wanted) in [
            ("max\n", "1000\n", 900),
            ("600\n", "max\n", 500),
            ("600", "550", 450),
        ] {
            let files = [
                ("/sys/fs/cgroup/a/memory.max", max),
                ("/sys/fs/cgroup/a/memory.high", high),
                ("/sys/fs/cgroup/a/memory.current", "100"),
            ];
            assert_eq!(groups.room(ALL, self::files(&files)), Some(wanted));
        }
        let root = Groups::parse(&MEMORY, b"0::/\n").unwrap();
        let files = [("/sys/fs/cgroup/cgroup.procs", "1")];
        assert_eq!(root.room(ALL, self::files(&files)), Some(usize::MAX));
    }

    #[test]
    fn tasks_are_counted_in_the_groups_of_their_own_controller() {
        let text = b"8:pids:/a\n4:memory:/b\n0::/c\n";
        let room = |text, files: &[_]| Groups::parse(&PIDS, text)?.room(0, self::files(files));
        let first = [
            ("/sys/fs/cgroup/pids/a/pids.max", "20\n"),
            ("/sys/fs/cgroup/pids/a/pids.current", "6\n"),
        ];
        assert_eq!(room(text, &first), Some(14));
        let second = [
            ("/sys/fs/cgroup/c/pids.max", "max\n"),
            ("/sys/fs/cgroup/pids.max", "100\n"),
            ("/sys/fs/cgroup/pids.current", "1\n"),
        ];
        assert_eq!(room(b"0::/c\n", &second), Some(99));
        assert_eq!(room(b"0::/c\n", &second[..1]), Some(usize::MAX));
    }

    #[test]
    fn what_cannot_be_read_is_not_known() {
        assert_eq!(Groups::parse(&MEMORY, b""), None);
        let groups = Groups::parse(&MEMORY, b"4:memory:/a/b\n").unwrap();
        assert_eq!(groups.room(ALL, files(&[])), None);
        let limit = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n");
        assert_eq!(groups.room(ALL, files(&[limit])), None, "no usage");
        let above = ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "denied");
        let below = ("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "max");
        assert_eq!(
            groups.room(ALL, files(&[below, above])),
            None,
            "the one above"
        );
        let long = format!("0::/{}", "x".repeat(MAX_PATH_BYTES));
        let groups = Groups::parse(&MEMORY, long.as_bytes()).unwrap();
        let root = [("/sys/fs/cgroup/memory.max", "max")];
        assert_eq!(groups.room(ALL, files(&root)), None, "no room for the path");
    }

    /// What a group of this version keeps, and the groups below it.
    #[test]
    fn clean_page_cache_is_room() {
        let second = "anon 700\nfile 250\nfile_mapped 9\nfile_dirty 20\nfile_writeback 10\n\
                      inactive_anon 300\nactive_anon 400\ninactive_file 150\nactive_file 100\n";
        let first = "cache 250\nrss 700\nmapped_file 9\ndirty 0\nwriteback 0\ninactive_anon 300\n\
                     inactive_file 5\nactive_file 0\ntotal_cache 250\ntotal_dirty 20\ntotal_writeback 10\n\
                     total_inactive_file 150\ntotal_active_file 100\n";
        for (text, stat, limit, usage, memory) in [
            (
                "0::/a\n",
                "/sys/fs/cgroup/a/memory.stat",
                "/sys/fs/cgroup/a/memory.max",
                "/sys/fs/cgroup/a/memory.current",
                second,
            ),
            (
                "4:memory:/a\n",
                "/sys/fs/cgroup/memory/a/memory.stat",
                "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/a/memory.usage_in_bytes",
                first,
            ),
        ] {
            let groups = Groups::parse(&MEMORY, text.as_bytes()).unwrap();
            let room = |needed, stat: &[(&str, &str)]| {
                let known = [(limit, "1000\n"), (usage, "950\n")];
                groups.room(needed, files(&[&known, stat].concat()))
            };
            assert_eq!(room(ALL, &[(stat, memory)]), Some(50 + 250 - 30), "{text}");
            // It is not read where it does not matter.
            assert_eq!(room(50, &[(stat, "denied")]), Some(50), "{text}");
            assert_eq!(room(50, &[(stat, memory)]), Some(50), "{text}");
            assert_eq!(room(51, &[(stat, memory)]), Some(270), "{text}");
            // What it says counts only as a whole.
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
    fn a_group_has_to_have_much_more() {
        let room = Headroom {
            host: 100,
            group: 800,
        };
        assert!(room.holds(100) && !room.holds(101));
        let tight = Headroom { group: 799, ..room };
        assert!(!tight.holds(100));
    }
}
