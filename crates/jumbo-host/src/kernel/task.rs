//! One process without its mappings: /proc/PID/{stat,status,comm,cmdline} (proc_pid_stat(5)). All
//! functions return [`FileError::Io`] where the process is gone.

use std::fmt::Display;
use std::time::Duration;

use procfs_core::process::Stat;
use serde::Serialize;

use super::{FileError, Root, aside, parse};
use crate::units::Bytes;
use jumbo_sys::proc::kib;

/// Page fault counts of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Faults {
    /// Page faults that needed no I/O.
    pub minor: u64,
    /// Page faults that waited for I/O.
    pub major: u64,
    /// Minor faults of children that were waited for.
    pub children_minor: u64,
    /// Major faults of children that were waited for.
    pub children_major: u64,
}

/// The page faults of `pid`, from its stat file. Any user may read it.
pub fn faults(root: &Root, pid: u32) -> Result<Faults, FileError> {
    let stat = stat(root, pid)?;
    Ok(Faults {
        minor: stat.minflt,
        major: stat.majflt,
        children_minor: stat.cminflt,
        children_major: stat.cmajflt,
    })
}

/// The age of `pid` in seconds; `None` where it is gone or the kernel does not report it.
///
/// # References
/// proc_pid_stat(5), field 22; proc_uptime(5)
pub fn age(root: &Root, pid: u32) -> Option<f64> {
    let uptime = root.read("proc/uptime").ok()?;
    let uptime: f64 = uptime.split_ascii_whitespace().next()?.parse().ok()?;
    let started = stat(root, pid).ok()?.starttime as f64;
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    Some((uptime - started / ticks).max(0.0))
}

/// Reports whether `pid`, a process or one thread, is exiting (PF_EXITING) and runs no program.
pub fn is_exiting(root: &Root, pid: u32) -> Result<bool, FileError> {
    const PF_EXITING: u32 = 0x4;
    Ok(stat(root, pid)?.flags & PF_EXITING != 0)
}

/// Reports whether `pid` is a kernel thread (PF_KTHREAD); false where the process is gone.
pub fn is_kernel(root: &Root, pid: u32) -> bool {
    const PF_KTHREAD: u32 = 0x0020_0000;
    stat(root, pid).is_ok_and(|stat| stat.flags & PF_KTHREAD != 0)
}

/// Start time of `pid` in ticks after the boot, which tells it from a later process of that ID.
pub fn started(root: &Root, pid: u32) -> Result<u64, FileError> {
    Ok(stat(root, pid)?.starttime)
}

/// CPU time of the children of `pid` that it waited for.
pub fn children_cpu(root: &Root, pid: u32) -> Result<Duration, FileError> {
    let stat = stat(root, pid)?;
    let ticks = u64::try_from(stat.cutime + stat.cstime).unwrap_or(0);
    let a_second = rustix::param::clock_ticks_per_second() as f64;
    Ok(Duration::from_secs_f64(ticks as f64 / a_second))
}

fn stat(root: &Root, pid: impl Display) -> Result<Stat, FileError> {
    parse(root, &format!("proc/{pid}/stat"))
}

/// Fields of /proc/PID/status by name (proc_pid_status(5)).
pub(crate) struct Status(String);

impl Status {
    pub(crate) fn read(root: &Root, pid: impl Display) -> Result<Self, FileError> {
        root.read(format!("proc/{pid}/status")).map(Self)
    }

    /// The value of a field, without the blanks around it.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let mut lines = self.0.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(value.trim())
    }

    fn kib(&self, name: &str) -> Option<Bytes> {
        kib(self.get(name)?.as_bytes())
    }

    fn thp_enabled(&self) -> Option<bool> {
        self.get("THP_enabled").map(|value| value != "0")
    }
}

/// Peak resident set of `pid` (`VmHWM`), without hugetlb. Any user may read it. `None` for a kernel
/// thread or zombie, which has no memory.
pub fn vm_hwm(root: &Root, pid: u32) -> Result<Option<Bytes>, FileError> {
    Ok(Status::read(root, pid)?.kib("VmHWM"))
}

/// Memory of a process according to status. Any user may read it, of any process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Effective user ID.
    pub uid: u32,
    /// Address space.
    #[serde(skip)]
    pub size: Bytes,
    /// Resident anonymous memory (4.5).
    pub anon: Bytes,
    /// Resident file mappings (4.5).
    pub file: Bytes,
    /// Resident shared memory, counted in each process that maps it (4.5).
    pub shmem: Bytes,
    /// Hugetlb pages, which no other field counts (4.4).
    pub hugetlb: Bytes,
    /// Anonymous memory in swap.
    pub swap: Bytes,
    /// False where PR_SET_THP_DISABLE is set (5.0); `None` where the kernel does not report it.
    pub thp_enabled: Option<bool>,
}

/// Reads /proc/PID/status; `None` for kernel threads and zombies, which have no memory.
pub fn memory(root: &Root, pid: u32) -> Result<Option<Memory>, FileError> {
    Ok(memory_of(&Status::read(root, pid)?))
}

/// Reads the [`name`] of a process, with backslashes and newlines escaped, and its [`memory`].
pub fn named_memory(root: &Root, pid: u32) -> Result<Option<(String, Memory)>, FileError> {
    let status = Status::read(root, pid)?;
    let name = status.get("Name").unwrap_or_default().to_owned();
    Ok(memory_of(&status).map(|memory| (name, memory)))
}

fn memory_of(status: &Status) -> Option<Memory> {
    let kib = |name| status.kib(name).unwrap_or_default();
    let effective = |uids: &str| uids.split_ascii_whitespace().nth(1)?.parse().ok();
    status.get("VmSize").map(|_| Memory {
        uid: status.get("Uid").and_then(effective).unwrap_or_default(),
        size: kib("VmSize"),
        anon: kib("RssAnon"),
        file: kib("RssFile"),
        shmem: kib("RssShmem"),
        hugetlb: kib("HugetlbPages"),
        swap: kib("VmSwap"),
        thp_enabled: status.thp_enabled(),
    })
}

/// [`Memory::thp_enabled`] of this process.
pub fn own_thp_enabled(root: &Root) -> Result<Option<bool>, FileError> {
    Ok(Status::read(root, "self")?.thp_enabled())
}

/// The command line of `pid`, which the process can change; empty for kernel threads.
///
/// # Errors
/// [`FileError::Io`] where the process is gone, or holds the file back.
pub fn arguments(root: &Root, pid: u32) -> Result<Vec<String>, FileError> {
    aside::text(root, pid, "cmdline").map(|text| split(&text))
}

/// The [`arguments`] of each of these processes; empty where they cannot be read.
pub fn arguments_of_each(root: &Root, pids: &[u32]) -> Vec<Vec<String>> {
    let texts = aside::texts(root, pids, "cmdline");
    let arguments = texts.into_iter().map(|text| text.map(|text| split(&text)));
    arguments.map(Result::unwrap_or_default).collect()
}

/// Ends the path of a mapped file that was removed or replaced since. proc_pid_maps(5).
pub(crate) const DELETED: &str = " (deleted)";

/// Reports whether each of these processes maps a file of that name; false where its mappings
/// cannot be read.
pub fn map_each(root: &Root, pids: &[u32], file: &str) -> Vec<bool> {
    let (texts, end) = (aside::texts(root, pids, "maps"), format!("/{file}"));
    let path = |line: &'_ str| line.strip_suffix(DELETED).unwrap_or(line).ends_with(&end);
    let has = |text: String| text.lines().any(path);
    let texts = texts.into_iter();
    texts.map(|text| text.is_ok_and(has)).collect()
}

/// Splits a command line into arguments. If only the first is not empty, it is a title that the
/// program wrote over its arguments.
fn split(text: &str) -> Vec<String> {
    // The last argument ends in a NUL too, unless the program wrote a title there.
    let text = text.strip_suffix('\0').unwrap_or(text);
    let (first, rest) = text.split_once('\0').unwrap_or((text, ""));
    match (first, rest.trim_start_matches('\0')) {
        ("", "") => Vec::new(),
        (title, "") => vec![title.to_owned()],
        _ => text.split('\0').map(str::to_owned).collect(),
    }
}

/// The [`arguments`] quoted for a shell: a process can write anything there, and users copy the
/// line into a shell.
pub fn command(root: &Root, pid: u32) -> Result<String, FileError> {
    let arguments = arguments(root, pid)?;
    Ok(quoted(arguments.iter().map(String::as_str)))
}

/// The [`command`] of each of these processes; empty where it cannot be read.
pub(crate) fn commands(root: &Root, pids: &[u32]) -> Vec<String> {
    let arguments = arguments_of_each(root, pids).into_iter();
    let quote = |words: Vec<String>| quoted(words.iter().map(String::as_str));
    arguments.map(quote).collect()
}

/// Quotes words for a shell.
pub(crate) fn quoted<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    // Only a NUL cannot be quoted, and arguments and paths have none.
    shlex::try_join(words).unwrap_or_default()
}

/// The name of `pid`'s main thread, at most 15 bytes. Any user may read it.
pub fn name(root: &Root, pid: u32) -> Result<String, FileError> {
    let comm = root.read(format!("proc/{pid}/comm"))?;
    Ok(comm.trim_end_matches('\n').to_owned())
}

/// PIDs of all processes, ascending.
pub fn all(root: &Root) -> Result<Vec<u32>, FileError> {
    let names = root.list("proc")?;
    let mut pids: Vec<u32> = names.iter().filter_map(|name| name.parse().ok()).collect();
    pids.sort_unstable();
    if pids.is_empty() {
        let what = "it lists no process, so procfs is not mounted there";
        return Err(root.misread("proc", what));
    }
    Ok(pids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_read() {
        let (root, pid) = (Root::host(), std::process::id());
        assert!(faults(&root, pid).unwrap().minor > 0);
        assert!(vm_hwm(&root, pid).unwrap().unwrap() > Bytes(0));
        assert!(!name(&root, pid).unwrap().is_empty());
        let memory = memory(&root, pid).unwrap().unwrap();
        assert!(memory.anon > Bytes(0) && memory.thp_enabled == own_thp_enabled(&root).unwrap());
        let arguments = arguments(&root, pid).unwrap();
        assert_eq!(arguments, std::env::args().collect::<Vec<_>>());
        assert!(!command(&root, pid).unwrap().is_empty());
        assert!(all(&root).unwrap().contains(&pid));
    }

    #[test]
    fn a_title_is_one_argument() {
        for (text, arguments) in [
            (
                "nginx: master process\0\0\0\0",
                &["nginx: master process"][..],
            ),
            (
                "title that has no room left",
                &["title that has no room left"],
            ),
            ("sh\0-c\0\0last\0", &["sh", "-c", "", "last"]),
            ("sh\0-c\0\0", &["sh", "-c", ""]),
            ("\0first is empty\0", &["", "first is empty"]),
            ("\0\0\0", &[]),
            ("", &[]),
        ] {
            assert_eq!(split(text), arguments, "{text:?}");
        }
    }

    #[test]
    fn a_process_that_is_gone_is_missing() {
        // Above the largest PID of a kernel (2^22).
        let (root, pid) = (Root::host(), 5_000_000);
        assert!(faults(&root, pid).unwrap_err().is_missing());
        assert!(vm_hwm(&root, pid).unwrap_err().is_missing());
    }
}
