//! Reapers, scanners and their programs: [`program_of`], [`siblings_of`],
//! [`reapers_of_the_ended`].
//!
//! A reaper (see [`jumbo_inside::reaper`]) is a process that shares all memory of its program, so a
//! sum over processes would count that memory twice. It is detected by its name, its confinement,
//! and the mapped library. Its program is found by kcmp(2). If that is denied, both have the same
//! command line, which lies in the shared memory, and the program's counters name the reaper. After
//! the end of the program, the reaper is counted as the only owner of the memory.
//!
//! A scanner, the process of [`jumbo_inside::watch`], shares the memory, too. Its parent is the
//! program, and its name tells it from a reaper.
//!
//! Invariant: a process without this command's library is no reaper, whatever its name. Where this
//! user may not read the mappings, a process of another user is none.

use std::ffi::CStr;

use serde::Serialize;

use crate::kernel::process::tree;
use crate::kernel::{FileError, Root, aside, task};
use jumbo_inside::{reaper, watch};

use super::Covered;
use super::library::Library;

/// Role of a reaper.
pub const REAPER: &str = "reaper";
/// Role of a scanner.
const SCANNER: &str = "scanner";

/// A reaper or scanner, and the program whose memory it shares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Sibling {
    /// PID of the reaper or scanner.
    pub pid: u32,
    /// PID of the program.
    pub program: u32,
    /// [`REAPER`], or `scanner`.
    pub role: &'static str,
}

/// Finds, among `others`, the living program whose memory `pid` shares; `None` where `pid` is no
/// reaper or scanner, or its program ended.
pub fn program_of(root: &Root, pid: u32, others: impl IntoIterator<Item = u32>) -> Option<Sibling> {
    if let Some(program) = watched_by(root, pid) {
        let is_listed = others.into_iter().any(|other| other == program);
        let role = SCANNER;
        return is_listed.then_some(Sibling { pid, program, role });
    }
    let inside = confined(root, pid)?;
    // kcmp(2) does not know the processes of a fake tree.
    let is_host = *root == Root::host();
    let mut command = None;
    let is_program = |other: &u32| {
        let shared = || is_host.then(|| tree::shares_memory(pid, *other)).flatten();
        *other != pid
            && !is_named(root, *other)
            && shared().unwrap_or_else(|| {
                let command = command.get_or_insert_with(|| arguments(root, pid));
                // Empty while the reaper frees the memory.
                !command.is_empty()
                    && arguments(root, *other) == *command
                    && names_reaper(root, *other, inside)
            })
    };
    let program = others.into_iter().find(is_program);
    let role = REAPER;
    program.map(|program| Sibling { pid, program, role })
}

fn arguments(root: &Root, pid: u32) -> Vec<String> {
    task::arguments(root, pid).unwrap_or_default()
}

/// Reports whether the counters of `program` name this reaper, or this user may not read them.
fn names_reaper(root: &Root, program: u32, reaper: u32) -> bool {
    match Covered::read(root, program) {
        Ok(covered) => covered.and_then(|covered| covered.reaper.pid) == Some(reaper),
        Err(error) => !error.is_held_back(),
    }
}

/// Reports whether `pid` is a reaper or scanner, of a living or ended program.
pub fn is_sibling(root: &Root, pid: u32) -> bool {
    watched_by(root, pid).is_some() || confined(root, pid).is_some()
}

/// Returns the program whose memory `pid` scans in place of a thread: its parent.
fn watched_by(root: &Root, pid: u32) -> Option<u32> {
    let name = task::name(root, pid).ok()?;
    if name.as_bytes() != watch::NAME.to_bytes() {
        return None;
    }
    let status = task::Status::read(root, pid).ok()?;
    let parent = status.get("PPid")?.trim().parse().ok()?;
    let known = || tree::shares_memory(pid, parent);
    let shares = (*root == Root::host()).then(known).flatten();
    let looks_so = || {
        let command = arguments(root, pid);
        !command.is_empty() && arguments(root, parent) == command
    };
    shares.unwrap_or_else(looks_so).then_some(parent)
}

/// The reapers and scanners of the living `programs`. Reapers are missing where several match one.
pub fn siblings_of(root: &Root, programs: &[u32]) -> Vec<Sibling> {
    let all = task::all(root).unwrap_or_default().into_iter();
    let found = all.filter_map(|pid| program_of(root, pid, programs.iter().copied()));
    let found: Vec<_> = found.collect();
    let is_like = |one: &Sibling, it: &Sibling| (one.role, one.program) == (it.role, it.program);
    let is_only = |it: &&Sibling| found.iter().filter(|one| is_like(one, it)).count() == 1;
    found.iter().filter(is_only).cloned().collect()
}

/// Reapers whose program ended, and that free its memory now or soon. A new reaper may be listed
/// for a moment.
pub fn reapers_of_the_ended(root: &Root) -> Result<Vec<u32>, FileError> {
    let all = task::all(root)?;
    let reapers = all.iter().copied().filter(|pid| is_sibling(root, *pid));
    let is_alone = |pid: &u32| program_of(root, *pid, all.iter().copied()).is_none();
    Ok(reapers.filter(is_alone).collect())
}

/// Reports whether `name` is that of processes which share the memory of a program.
pub(super) fn is_name(name: &str) -> bool {
    [reaper::NAME, watch::NAME]
        .map(CStr::to_bytes)
        .contains(&name.as_bytes())
}

fn is_named(root: &Root, pid: u32) -> bool {
    task::name(root, pid).is_ok_and(|name| is_name(&name))
}

/// PID of a reaper in its innermost namespace; `None` where `pid` is no reaper.
fn confined(root: &Root, pid: u32) -> Option<u32> {
    let status = is_named(root, pid).then(|| task::Status::read(root, pid).ok())??;
    let value = |name| status.get(name);
    let is_confined = value("NoNewPrivs") == Some("1") && value("Seccomp") == Some("2");
    let inside = value("NSpid").and_then(|pids| pids.split_whitespace().next_back()?.parse().ok());
    let user = value("Uid").and_then(|users| users.split_whitespace().nth(1)?.parse().ok());
    (is_confined && is_genuine(root, pid, user)).then(|| inside.unwrap_or(pid))
}

/// Reports whether `pid`, a process of `user`, maps this command's library.
fn is_genuine(root: &Root, pid: u32, user: Option<u32>) -> bool {
    match (aside::maps(root, pid), Library::of_this_command()) {
        (Ok(maps), Some(library)) => maps.mappings().any(|mapping| library.is_in(&mapping)),
        (Err(error), _) if error.is_held_back() => false,
        (Ok(_) | Err(_), _) => user == Some(rustix::process::geteuid().as_raw()),
    }
}
