//! Whose memory a reaper shares: [`program_of`], [`reaper_of`], [`reapers_of_the_ended`].
//!
//! A program's sibling (see [`jumbo_inside::reaper`]) is a process of its own with all of the program's memory, so
//! a sum over processes counts that twice. It is told by its name, by what it is confined to, and by the library
//! that it runs in; its program, by the memory that both share, or where kcmp(2) does not say that, by the command line,
//! which lies in that memory, and the program's own counters. One whose program has ended is the only process that has
//! the memory: it is counted.
//!
//! Invariant: where this user may look, a process that does not map this command's library is no reaper, whatever it
//! calls itself; and where it may not, one of another user is none.

use serde::Serialize;

use crate::kernel::process::tree;
use crate::kernel::{FileError, Root, aside, task};
use jumbo_inside::reaper;

use super::Covered;
use super::library::Library;

/// A reaper, and the program whose memory it shares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Sibling {
    /// The reaper.
    pub pid: u32,
    /// The program.
    pub program: u32,
}

/// The living program, among `others`, whose memory `pid` shares; `None` where it is no reaper, or has the
/// memory for itself.
pub fn program_of(root: &Root, pid: u32, others: impl IntoIterator<Item = u32>) -> Option<Sibling> {
    let inside = confined(root, pid)?;
    // A fake tree's processes are not the kernel's.
    let is_host = *root == Root::host();
    let mut command = None;
    let is_program = |other: &u32| {
        let shared = || is_host.then(|| tree::shares_memory(pid, *other)).flatten();
        *other != pid
            && !is_named(root, *other)
            && shared().unwrap_or_else(|| {
                let command = command.get_or_insert_with(|| arguments(root, pid));
                // Empty where it is giving the memory back.
                !command.is_empty()
                    && arguments(root, *other) == *command
                    && is_told(root, *other, inside)
            })
    };
    let program = others.into_iter().find(is_program);
    program.map(|program| Sibling { pid, program })
}

fn arguments(root: &Root, pid: u32) -> Vec<String> {
    task::arguments(root, pid).unwrap_or_default()
}

/// Whether `program` tells of this reaper, as far as can be seen.
fn is_told(root: &Root, program: u32, reaper: u32) -> bool {
    match Covered::read(root, program) {
        Ok(covered) => covered.and_then(|covered| covered.reaper.pid) == Some(reaper),
        // This user may not look.
        Err(error) => !error.is_held_back(),
    }
}

/// Whether `pid` is a reaper, of a program that lives or not.
pub fn is_reaper(root: &Root, pid: u32) -> bool {
    confined(root, pid).is_some()
}

/// The reaper of the living `program`; `None` where it has none, or where it cannot be told which of several it is.
pub fn reaper_of(root: &Root, program: u32) -> Option<u32> {
    let all = task::all(root).ok()?;
    let mut its = all
        .into_iter()
        .filter(|pid| program_of(root, *pid, [program]).is_some());
    let first = its.next()?;
    its.next().is_none().then_some(first)
}

/// The reapers that have the memory for themselves: they are about to give it back, or at it. One that was only just
/// made may be among them, for a moment.
///
/// # Errors
/// The processes cannot be listed.
pub fn reapers_of_the_ended(root: &Root) -> Result<Vec<u32>, FileError> {
    let all = task::all(root)?;
    let reapers = all.iter().copied().filter(|pid| is_reaper(root, *pid));
    let is_alone = |pid: &u32| program_of(root, *pid, all.iter().copied()).is_none();
    Ok(reapers.filter(is_alone).collect())
}

/// Whether a process of this name may be a reaper.
pub(super) fn is_name(name: &str) -> bool {
    name.as_bytes() == reaper::NAME.to_bytes()
}

fn is_named(root: &Root, pid: u32) -> bool {
    task::name(root, pid).is_ok_and(|name| is_name(&name))
}

/// The process ID of a reaper as its program has it, which may be in a namespace; `None` where it is none.
fn confined(root: &Root, pid: u32) -> Option<u32> {
    let status = is_named(root, pid).then(|| task::Status::read(root, pid).ok())??;
    let value = |name| status.get(name);
    let is_confined = value("NoNewPrivs") == Some("1") && value("Seccomp") == Some("2");
    let inside = value("NSpid").and_then(|pids| pids.split_whitespace().next_back()?.parse().ok());
    let user = value("Uid").and_then(|users| users.split_whitespace().nth(1)?.parse().ok());
    (is_confined && is_genuine(root, pid, user)).then(|| inside.unwrap_or(pid))
}

/// Whether `pid`, which is `user`'s, maps this command's library.
fn is_genuine(root: &Root, pid: u32, user: Option<u32>) -> bool {
    match (aside::maps(root, pid), Library::of_this_command()) {
        (Ok(maps), Some(library)) => maps.mappings().any(|mapping| library.is_in(&mapping)),
        (Err(error), _) if error.is_held_back() => false,
        (Ok(_) | Err(_), _) => user == Some(rustix::process::geteuid().as_raw()),
    }
}
