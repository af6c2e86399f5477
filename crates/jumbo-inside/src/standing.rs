//! Comparison of jumbo's threads with the program's first thread: [`begin`], [`compare`].
//!
//! Credentials, namespaces and CPUs are attributes of a thread. The C library changes them in all
//! threads that it knows, after jumbo's threads have exited. A bare system call changes the calling
//! thread only. So a thread of jumbo compares itself with the first one at each scan, and exits if
//! they differ.
//!
//! A thread has no effective capabilities from its first instruction on. It keeps the permitted
//! ones: otherwise a process of the same user without them could attach by ptrace(2), and reach the
//! program's memory.

use rustix::fd::AsFd;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Result;
use rustix::process::{Pid, geteuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, sched_getaffinity, sched_setaffinity,
    set_capabilities,
};

use jumbo_sys::proc::{Path, each_byte, number, open_at};
use jumbo_sys::{leave_descriptors, process};

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
const NAMESPACES: [&core::ffi::CStr; 7] = [
    c"ns/cgroup",
    c"ns/ipc",
    c"ns/mnt",
    c"ns/net",
    c"ns/pid",
    c"ns/user",
    c"ns/uts",
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
pub(crate) fn begin(name: &core::ffi::CStr) -> Result<()> {
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
    compare_with(process(), false)
}

/// Variant of [`compare`] for a process beside the program, its parent.
pub(crate) fn compare_beside(program: i32) -> Leader {
    compare_with(program, true)
}

fn compare_with(program: i32, is_beside: bool) -> Leader {
    let leader = || match is_beside {
        true => with_capabilities(parent_standing),
        false => standing(c"/proc/self", false),
    };
    let (Ok(leader), Ok(own)) = (leader(), standing(c"/proc/thread-self", is_beside)) else {
        return Leader::Different;
    };
    if leader.is_zombie {
        return Leader::Gone;
    }
    if leader.hash != own.hash {
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
struct ThreadStatus {
    is_zombie: bool,
    /// Hash of the status lines and namespaces.
    hash: u64,
    /// Hash of the control groups and the root, which threads of a process share.
    place: u64,
}

/// One step of FNV-1a: <http://www.isthe.com/chongo/tech/comp/fnv/>.
const fn mix(hash: u64, byte: u8) -> u64 {
    (hash ^ byte as u64).wrapping_mul(0x0100_0000_01b3)
}
const FNV_OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// Returns the status of the parent, by its number in the PID namespace of /proc.
fn parent_standing() -> Result<ThreadStatus> {
    let mut parent = 0;
    jumbo_sys::proc::each_line(jumbo_sys::proc::open(c"/proc/self/status")?, |line| {
        let number = line.strip_prefix(b"PPid:\t".as_slice()).and_then(number);
        parent = number.unwrap_or(parent);
        Ok(number.is_some())
    })?;
    let mut path = Path::<32>::EMPTY;
    let path = path.write(format_args!("/proc/{parent}"));
    standing(path.ok_or(rustix::io::Errno::NAMETOOLONG)?, true)
}

fn standing(folder: &core::ffi::CStr, has_place: bool) -> Result<ThreadStatus> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::openat(CWD, folder, flags, Mode::empty())?;
    let mut standing = status(&folder)?;
    for namespace in NAMESPACES {
        // A namespace that the kernel lacks is 0 for both threads.
        let inode = rustix::fs::statat(&folder, namespace, AtFlags::empty());
        let inode = inode.map_or(0, |stat| stat.st_ino);
        standing.hash = inode.to_ne_bytes().into_iter().fold(standing.hash, mix);
    }
    // The profile of AppArmor or SELinux. Without such a module the file is not there, or fails.
    if let Ok(profile) = open_at(&folder, c"attr/current") {
        let _ = each_byte(profile, |byte| {
            standing.hash = mix(standing.hash, byte);
            Ok(false)
        });
    }
    if has_place {
        let root = rustix::fs::statat(&folder, c"root", AtFlags::empty())?;
        let root = [root.st_dev, root.st_ino].into_iter();
        standing.place = root.flat_map(u64::to_ne_bytes).fold(FNV_OFFSET_BASIS, mix);
        each_byte(open_at(&folder, c"cgroup")?, |byte| {
            standing.place = mix(standing.place, byte);
            Ok(false)
        })?;
    }
    Ok(standing)
}

fn status(folder: impl AsFd) -> Result<ThreadStatus> {
    let mut standing = ThreadStatus {
        is_zombie: false,
        hash: FNV_OFFSET_BASIS,
        place: FNV_OFFSET_BASIS,
    };
    // Start, length and hash of the present line.
    let (mut head, mut length, mut line) = ([0u8; 16], 0, FNV_OFFSET_BASIS);
    each_byte(open_at(folder, c"status")?, |byte| {
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
            standing.hash = line.to_ne_bytes().into_iter().fold(standing.hash, mix);
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
