//! Comparison of jumbo's threads with the program's first thread: [`begin`], [`compare`]; of a
//! process beside the program with it: [`Beside`].
//!
//! Credentials, namespaces and CPUs are attributes of a thread. The C library changes them in all
//! threads that it knows, after jumbo's threads have exited. A bare system call changes the calling
//! thread only. So a thread of jumbo compares itself with the first one at each scan, and exits if
//! they differ.
//!
//! A thread has no effective capabilities from its first instruction on. It keeps the permitted
//! ones: otherwise a process of the same user without them could attach by ptrace(2), and reach the
//! program's memory.

use core::ffi::CStr;

use rustix::fd::AsFd;
use rustix::io::{Errno, Result};
use rustix::process::{Pid, geteuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, sched_getaffinity, sched_setaffinity,
    set_capabilities,
};

use jumbo_sys::proc::{Path, each_byte, each_line, number, open};
use jumbo_sys::{is_shut, leave_descriptors, process};

/// Lines of /proc/PID/status that must agree; proc_pid_status(5).
const STATUS_KEYS: [&[u8]; 8] = [
    b"Uid:",
    b"Gid:",
    b"Groups:",
    b"NoNewPrivs:",
    b"Seccomp:",
    // Linux 5.9: a second filter, too.
    b"Seccomp_filters:",
    // A thread of jumbo keeps these, and drops the effective ones.
    b"CapPrm:",
    b"CapBnd:",
];
/// Namespaces that must agree; namespaces(7).
const NAMESPACES: [&str; 7] = [
    "ns/cgroup",
    "ns/ipc",
    "ns/mnt",
    "ns/net",
    "ns/pid",
    "ns/user",
    "ns/uts",
];

/// Result of comparing a thread of jumbo with the program's first thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leader {
    /// The first thread has the same attributes.
    Same,
    /// The first thread has another user or confinement, or its attributes are unknown.
    Different,
    /// The first thread has exited by a system call; the process ends with its last thread.
    Gone,
    /// The program has another control group or root than the process beside it.
    Elsewhere,
}

/// Initializes a thread of jumbo: no effective capability (capset(2), Linux 2.2), no descriptors.
pub(crate) fn begin(name: &CStr) -> Result<()> {
    set_effective(false);
    let _ = rustix::thread::set_name(name);
    leave_descriptors()
}

/// Runs `work` with effective capabilities: without them root's processes hide descriptors.
pub(crate) fn with_capabilities<R>(work: impl FnOnce() -> R) -> R {
    set_effective(true);
    let result = work();
    set_effective(false);
    result
}

fn set_effective(in_effect: bool) {
    let Ok(mut sets) = capabilities(None) else {
        return;
    };
    sets.effective = match in_effect {
        true => sets.permitted,
        false => CapabilitySet::empty(),
    };
    sets.inheritable = CapabilitySet::empty();
    // Never refused: no set grows beyond the permitted one.
    let _ = set_capabilities(None, sets);
}

/// Reports whether the caller is root or may use a capability.
pub(crate) fn is_privileged() -> bool {
    let is_capable = |sets: CapabilitySets| !sets.permitted.is_empty();
    geteuid().is_root() || capabilities(None).map_or(true, is_capable)
}

/// Compares the calling thread with the first one, and copies its CPU affinity.
pub(crate) fn compare() -> Leader {
    let [leader, own] = ["/proc/self", "/proc/thread-self"].map(|folder| {
        let mut standing = standing(folder, false)?;
        standing.attributes = standing.attributes.wrapping_mul(31) ^ namespaces(folder);
        Ok(standing)
    });
    judge(leader, own, process())
}

/// Comparison of a process beside the program with its parent, the program.
///
/// Once confined the process compares neither namespaces nor root: those of a process that may use
/// capabilities can only be read with these in effect.
#[derive(Debug)]
pub(crate) struct Beside {
    program: i32,
    /// Folder of the parent, by its number in the PID namespace of /proc.
    folder: Path<32>,
    /// Attributes of the process before it confined itself.
    attributes: u64,
}

impl Beside {
    /// Compares all attributes.
    ///
    /// # Errors
    /// The attributes differ.
    pub(crate) fn begin(program: i32) -> core::result::Result<Self, Leader> {
        let mut beside = Self {
            program,
            folder: Path::EMPTY,
            attributes: 0,
        };
        let mut compared = || {
            let _ = beside.folder.write(format_args!("/proc/{}", parent()?));
            let folder = beside.folder.text().ok_or(Errno::NAMETOOLONG)?;
            let read = |folder| Ok((standing(folder, true)?, namespaces(folder), root(folder)?));
            let (leader, theirs, their_root) = with_capabilities(|| read(folder))?;
            let (own, spaces, own_root) = read(OWN)?;
            beside.attributes = own.attributes;
            Ok::<_, Errno>(match judge(Ok(leader), Ok(own), program) {
                Leader::Same if theirs != spaces => Leader::Different,
                Leader::Same if their_root != own_root => Leader::Elsewhere,
                leader => leader,
            })
        };
        match compared() {
            Ok(Leader::Same) => Ok(beside),
            other => Err(other.unwrap_or(Leader::Different)),
        }
    }

    /// Compares user, privileges, filters and control groups, and copies the CPU affinity. It reads
    /// files that [`Beside::begin`] has read. A process that is not confined compares all.
    pub(crate) fn compare(&self) -> Leader {
        if !is_shut() {
            return Self::begin(self.program).map_or_else(|leader| leader, |_| Leader::Same);
        }
        let own = place(OWN).map(|place| Standing {
            is_zombie: false,
            attributes: self.attributes,
            place,
        });
        let leader = self.folder.text().ok_or(Errno::NAMETOOLONG);
        let leader = leader.and_then(|folder| standing(folder, true));
        judge(leader, own, self.program)
    }
}

/// Folder of the calling thread.
const OWN: &str = "/proc/thread-self";

fn judge(leader: Result<Standing>, own: Result<Standing>, program: i32) -> Leader {
    let (Ok(leader), Ok(own)) = (leader, own) else {
        return Leader::Different;
    };
    if leader.is_zombie {
        return Leader::Gone;
    }
    if leader.attributes != own.attributes {
        return Leader::Different;
    }
    if leader.place != own.place {
        return Leader::Elsewhere;
    }
    // The affinity of the first thread can be changed from outside (taskset -p).
    let wanted = sched_getaffinity(Pid::from_raw(program));
    if let (Ok(wanted), Ok(now)) = (wanted, sched_getaffinity(None))
        && wanted != now
    {
        let _ = sched_setaffinity(None, &wanted);
    }
    Leader::Same
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    is_zombie: bool,
    /// Hash of the status lines and the profile.
    attributes: u64,
    /// Hash of the control groups, which threads of a process share.
    place: u64,
}

/// One step of FNV-1a: <http://www.isthe.com/chongo/tech/comp/fnv/>.
const fn mix(hash: u64, byte: u8) -> u64 {
    (hash ^ byte as u64).wrapping_mul(0x0100_0000_01b3)
}
const FNV_OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// Returns the number of the parent in the PID namespace of /proc.
fn parent() -> Result<usize> {
    let mut parent = 0;
    each_line(open(c"/proc/self/status")?, |line| {
        let number = line.strip_prefix(b"PPid:\t".as_slice()).and_then(number);
        parent = number.unwrap_or(parent);
        Ok(number.is_some())
    })?;
    Ok(parent)
}

/// Runs `work` on the path of a file in the folder of a task.
fn at<R>(folder: &str, name: &str, work: impl FnOnce(&CStr) -> Result<R>) -> Result<R> {
    let mut path = Path::<48>::EMPTY;
    let path = path.write(format_args!("{folder}/{name}"));
    work(path.ok_or(Errno::NAMETOOLONG)?)
}

fn standing(folder: &str, has_place: bool) -> Result<Standing> {
    let mut standing = at(folder, "status", |path| status(open(path)?))?;
    // The profile of AppArmor or SELinux. Without such a module the file is not there, or fails.
    let _ = at(folder, "attr/current", |path| {
        each_byte(open(path)?, |byte| {
            standing.attributes = mix(standing.attributes, byte);
            Ok(false)
        })
    });
    if has_place {
        standing.place = place(folder)?;
    }
    Ok(standing)
}

/// Returns the hash of the control groups.
fn place(folder: &str) -> Result<u64> {
    let mut place = FNV_OFFSET_BASIS;
    at(folder, "cgroup", |path| {
        each_byte(open(path)?, |byte| {
            place = mix(place, byte);
            Ok(false)
        })
    })?;
    Ok(place)
}

/// Returns the hash of the namespaces. One that the kernel lacks is 0 for all tasks.
fn namespaces(folder: &str) -> u64 {
    let inode = |name| at(folder, name, |path| rustix::fs::stat(path));
    let inodes = NAMESPACES.map(|name| inode(name).map_or(0, |stat| stat.st_ino));
    let bytes = inodes.into_iter().flat_map(u64::to_ne_bytes);
    bytes.fold(FNV_OFFSET_BASIS, mix)
}

/// Returns device and inode of the root.
fn root(folder: &str) -> Result<[u64; 2]> {
    at(folder, "root", |path| rustix::fs::stat(path)).map(|root| [root.st_dev, root.st_ino])
}

fn status(file: impl AsFd) -> Result<Standing> {
    let mut standing = Standing {
        is_zombie: false,
        attributes: FNV_OFFSET_BASIS,
        place: FNV_OFFSET_BASIS,
    };
    // Start, length and hash of the present line.
    let (mut head, mut length, mut line) = ([0u8; 16], 0, FNV_OFFSET_BASIS);
    each_byte(file, |byte| {
        if byte != b'\n' {
            if let Some(place) = head.get_mut(length) {
                *place = byte;
            }
            length += 1;
            line = mix(line, byte);
            return Ok(false);
        }
        let begun = head.get(..length.min(head.len())).unwrap_or_default();
        standing.is_zombie |= begun.starts_with(b"State:\tZ");
        if STATUS_KEYS.iter().any(|key| begun.starts_with(key)) {
            let line = line.to_ne_bytes().into_iter();
            standing.attributes = line.fold(standing.attributes, mix);
        }
        (length, line) = (0, FNV_OFFSET_BASIS);
        Ok(false)
    })?;
    Ok(standing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_changes_its_group_alone_differs_from_the_first() {
        assert_eq!(compare(), Leader::Same);
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root has another group to go to");
            return;
        }
        let other = std::thread::spawn(|| {
            rustix::thread::set_thread_gid(rustix::process::Gid::from_raw(12345)).unwrap();
            compare()
        });
        assert_eq!(other.join().unwrap(), Leader::Different);
    }

    #[test]
    fn a_thread_that_drops_capabilities_alone_differs_from_the_first() {
        let is_root = rustix::process::geteuid().is_root();
        let other = std::thread::spawn(|| {
            let none = CapabilitySets {
                effective: CapabilitySet::empty(),
                permitted: CapabilitySet::empty(),
                inheritable: CapabilitySet::empty(),
            };
            set_capabilities(None, none).unwrap();
            compare()
        });
        let expected = match is_root {
            true => Leader::Different,
            false => Leader::Same,
        };
        assert_eq!(other.join().unwrap(), expected);
    }

    #[test]
    fn a_thread_has_capabilities_in_effect_only_while_it_needs_them() {
        let sets = std::thread::spawn(|| {
            let before = capabilities(None).unwrap();
            begin(c"test").unwrap();
            let shed = capabilities(None).unwrap();
            let needed = with_capabilities(|| capabilities(None).unwrap());
            [before, shed, needed, capabilities(None).unwrap()]
        });
        let [before, shed, needed, after] = sets.join().unwrap();
        assert_eq!(shed.effective, CapabilitySet::empty());
        assert_eq!(shed.permitted, before.permitted);
        assert_eq!(needed.effective, before.permitted);
        assert_eq!(after.effective, CapabilitySet::empty());
    }

    #[test]
    fn a_thread_follows_the_first_one_to_other_cpus() {
        let Ok(all) = sched_getaffinity(Pid::from_raw(process())) else {
            return;
        };
        let followed = std::thread::spawn(move || {
            let mut one = rustix::thread::CpuSet::new();
            let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu));
            one.set(first.unwrap());
            sched_setaffinity(None, &one).unwrap();
            assert_eq!(compare(), Leader::Same);
            sched_getaffinity(None).unwrap() == all
        });
        assert!(followed.join().unwrap());
    }
}
