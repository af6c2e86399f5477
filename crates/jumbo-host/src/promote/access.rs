//! The call that advises another process's memory, process_madvise(2): [`Access`].

use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use serde::Serialize;

use super::{Refusal, Target};
use crate::kernel::cgroup::{self, Limit};

/// Minimum of memory that our memory cgroup must spare for a prepared huge page.
const MIN_ROOM_BYTES: u64 = 64 << 20;

/// Permission to advise the memory of a process, while it runs.
#[derive(Clone, Debug, Serialize)]
pub struct Access {
    /// Name of the system call.
    pub method: &'static str,
}

/// Reason why a call was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum End {
    /// The process has ended.
    #[error("it has ended")]
    Gone,
    /// The call waited for the mmap lock of the process for too long.
    #[error("the process holds its memory map back")]
    Held,
}

/// Answer of the kernel, or the reason why there is none.
pub(super) type Answer = Result<Result<(), Errno>, End>;

impl Access {
    /// Finds out whether this process may advise the memory of another one.
    ///
    /// # Errors
    /// [`Refusal::NoCollapse`], [`Refusal::Unreachable`], [`Refusal::Gone`].
    pub fn find(target: &Target) -> Result<Self, Refusal> {
        // An empty range suffices: the kernel checks the advice and the permission first.
        let probed = target.calls().collapse(0, 0, false);
        match probed.map_err(|error| target.unreadable(target.unread("reach", error)))? {
            Ok(()) => Ok(Self {
                method: "process_madvise",
            }),
            Err(Errno::INVAL | Errno::NOSYS) => Err(Refusal::NoCollapse),
            Err(Errno::SRCH) => Err(Refusal::Gone),
            Err(errno) => Err(Refusal::Unreachable(explain_madvise(errno))),
        }
    }
}

/// Collapses the `length` bytes at `address` (MADV_COLLAPSE).
pub(super) fn collapse(target: &Target, address: u64, length: usize) -> Answer {
    // The preparation is charged to our own memory cgroup.
    let has_room = |limit: Limit| limit.spare().0 >= MIN_ROOM_BYTES;
    let is_prepared = cgroup::memory_limit(&target.root, std::process::id()).is_none_or(has_room);
    answer(target.calls().collapse(address, length, is_prepared))
}

/// Makes the `length` bytes at `address` the first to be reclaimed (MADV_COLD).
pub(super) fn cool(target: &Target, address: u64, length: usize) -> Answer {
    answer(target.calls().cool(address, length))
}

fn answer(made: std::io::Result<Result<(), Errno>>) -> Answer {
    match made {
        Ok(Err(Errno::SRCH)) => Err(End::Gone),
        Ok(answer) => Ok(answer),
        Err(_) => Err(End::Held),
    }
}

/// Describes why this process may not advise memory of another one of its user; `None` if it may.
pub fn missing_privilege() -> Option<&'static str> {
    /// The first user namespace (linux/nsfs.h, USER_NS_INIT_INO).
    const FIRST_USER_NAMESPACE: &str = "user:[4026531837]";
    if !has(CapabilitySet::SYS_NICE) {
        return Some("process_madvise takes CAP_SYS_NICE");
    }
    // A kernel without user namespaces has no such link.
    let namespace = std::fs::read_link("/proc/self/ns/user").ok()?;
    (namespace.as_os_str() != FIRST_USER_NAMESPACE)
        .then_some("process_madvise takes CAP_SYS_NICE in the first user namespace")
}

fn has(capability: CapabilitySet) -> bool {
    let sets = rustix::thread::capabilities(None);
    sets.is_ok_and(|sets| sets.effective.contains(capability))
}

/// Describes why process_madvise(2) is unavailable.
fn explain_madvise(errno: Errno) -> String {
    let foreign = "CAP_SYS_PTRACE, if it is another user's";
    match (missing_privilege(), has(CapabilitySet::SYS_PTRACE)) {
        (Some(missing), true) => missing.to_owned(),
        (Some(missing), false) => format!("{missing}, and {foreign}"),
        (None, true) => format!("process_madvise: {errno}"),
        (None, false) => format!("process_madvise takes {foreign}"),
    }
}
