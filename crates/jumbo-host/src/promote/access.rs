//! The method that advises another process's memory: [`Access`].

use std::os::fd::AsFd as _;
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use serde::Serialize;

use super::{Refusal, Target};
use crate::kernel::cgroup::{self, Limit};
use crate::kernel::process::ProcessState;
use crate::kernel::remote::{self, Advice, Advised, End};
use crate::kernel::{Root, task};

/// Maximum time that a thread of the target is held for calls: one call takes 0.2 to 1 ms.
const MAX_HOLD_TIME: Duration = Duration::from_millis(1);

/// Minimum of memory that our memory cgroup must spare for a prepared huge page.
const MIN_ROOM_BYTES: u64 = 64 << 20;

/// Methods to advise, the better first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// process_madvise(2) on this thread, while the process runs.
    ProcessMadvise,
    /// madvise(2) in a thread of the process, which ptrace(2) stops.
    Ptrace,
}

/// Method, and the reason for a fallback.
#[derive(Clone, Debug, Serialize)]
pub struct Access {
    /// The method.
    pub method: Method,
    /// Reason why process_madvise(2) is unavailable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
}

/// Advice for memory of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryAdvice {
    /// MADV_COLLAPSE.
    Collapse,
    /// MADV_COLD.
    Cold,
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ProcessMadvise => "process_madvise",
            Self::Ptrace => "ptrace",
        })
    }
}

impl Access {
    /// Finds the best method for a process. Only with `stop_threads` is it [`Method::Ptrace`]: a
    /// system call of a stopped thread can return a partial result, as after a signal.
    ///
    /// # Errors
    /// [`Refusal::NoCollapse`], [`Refusal::Unreachable`], [`Refusal::WouldStop`], [`Refusal::Gone`].
    pub fn find(target: &Target, stop_threads: bool) -> Result<Self, Refusal> {
        // An empty range suffices: the kernel checks the advice and the permission first.
        let probed = target.calls().collapse(0, 0, false);
        let errno =
            match probed.map_err(|error| target.unreadable(target.unread("reach", error)))? {
                Ok(()) => {
                    return Ok(Self {
                        method: Method::ProcessMadvise,
                        fallback: None,
                    });
                }
                Err(Errno::INVAL | Errno::NOSYS) => return Err(Refusal::NoCollapse),
                Err(Errno::SRCH) => return Err(Refusal::Gone),
                Err(errno) => errno,
            };
        let advise = explain_madvise(errno);
        match ptrace_obstacle(target) {
            None if stop_threads => Ok(Self {
                method: Method::Ptrace,
                fallback: Some(advise),
            }),
            None => Err(Refusal::WouldStop { advise }),
            Some(trace) => Err(Refusal::Unreachable { advise, trace }),
        }
    }

    /// Advises `length` bytes at each of `addresses`. Returns one answer per address, and the
    /// reason for missing ones.
    pub(super) fn advise(
        &self,
        target: &Target,
        addresses: &[u64],
        advice: MemoryAdvice,
        length: usize,
    ) -> Advised {
        if self.method == Method::Ptrace {
            let advice = Advice {
                advice: match advice {
                    MemoryAdvice::Collapse => libc::MADV_COLLAPSE,
                    MemoryAdvice::Cold => libc::MADV_COLD,
                },
                length,
            };
            let (root, process) = (&target.root, target.process.as_fd());
            let renewed = target.renewed.get();
            let id = target.id();
            let advised =
                remote::advise(root, id, process, addresses, advice, MAX_HOLD_TIME, renewed);
            target.renewed.set(advised.renewed);
            return advised;
        }
        let mut advised = Advised {
            answers: Vec::new(),
            end: End::Done,
            renewed: None,
        };
        // The preparation is charged to our own memory cgroup.
        let has_room = |limit: Limit| limit.spare().0 >= MIN_ROOM_BYTES;
        let own = || cgroup::memory_limit(&target.root, std::process::id());
        let is_prepared = advice == MemoryAdvice::Collapse && own().is_none_or(has_room);
        for address in addresses {
            let answer = match advice {
                MemoryAdvice::Collapse => target.calls().collapse(*address, length, is_prepared),
                MemoryAdvice::Cold => target.calls().cool(*address, length),
            };
            advised.end = match answer {
                Ok(Err(Errno::SRCH)) => End::Gone,
                Ok(answer) => {
                    advised.answers.push(answer);
                    continue;
                }
                Err(_) => End::Held,
            };
            break;
        }
        advised
    }

    /// Returns the number of blocks to advise at a time.
    pub(super) fn at_once(&self) -> usize {
        match self.method {
            Method::ProcessMadvise => 1,
            // One stop of a thread serves several blocks.
            Method::Ptrace => 4,
        }
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

/// Describes why no thread of the target can be traced.
fn ptrace_obstacle(target: &Target) -> Option<String> {
    let (root, pid) = (&target.root, target.pid());
    let standing = match ProcessState::read(root, pid) {
        Ok(standing) => standing,
        Err(error) => return Some(Refusal::unread(error).to_string()),
    };
    if standing.tracer != 0 {
        let name = task::name(root, standing.tracer).unwrap_or_default();
        // A process chooses its own name.
        let name = name.replace(char::is_control, "\u{fffd}");
        return Some(format!(
            "ptrace: process {} ({name}) traces it",
            standing.tracer
        ));
    }
    if task::is_filtered(root, pid).unwrap_or(false) {
        let why = "ptrace: it is under seccomp, which would see the call and may kill for it";
        return Some(String::from(why));
    }
    if standing.state == 'T' {
        return Some(String::from("ptrace: it is stopped (SIGSTOP)"));
    }
    if !cfg!(target_arch = "x86_64") {
        return Some(End::Unsupported.to_string());
    }
    // This file needs the permission to attach.
    match root.read(format!("proc/{pid}/syscall")) {
        Err(error) if error.is_denied() => Some(denied(root)),
        _ => None,
    }
}

fn denied(root: &Root) -> String {
    match root.read_u64("proc/sys/kernel/yama/ptrace_scope") {
        Ok(scope @ 1..=2) => {
            format!("ptrace: kernel.yama.ptrace_scope is {scope}, so that it takes CAP_SYS_PTRACE")
        }
        Ok(scope @ 3..) => format!("ptrace: kernel.yama.ptrace_scope is {scope}: no process may"),
        _ => String::from("ptrace takes CAP_SYS_PTRACE: it is another user's, or not dumpable"),
    }
}
