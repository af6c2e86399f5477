//! Whose memory a reaper shares: [`program_of`], [`reaper_of`], [`reapers_of_the_ended`].
//!
//! A program's sibling (see [`crate::reaper`]) is a process of its own with all of the program's memory, so
//! whoever adds up processes counts that twice. It is told by its name, by what it is confined to, and by its
//! command line, which lies in the shared memory; and where this user may look, by what the program's own
//! counters say. One whose program has ended is the only process that has the memory: it is counted.

use serde::Serialize;

use crate::kernel::{FileError, Root, task};
use crate::reaper;

use super::Covered;

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
    let command = task::arguments(root, pid).ok()?;
    let is_program = |other: &u32| {
        *other != pid
            && !is_named(root, *other)
            && task::arguments(root, *other).is_ok_and(|theirs| theirs == command)
            && match Covered::read(root, *other) {
                Ok(covered) => covered.and_then(|covered| covered.reaper.pid) == Some(inside),
                // This user may not look.
                Err(_) => true,
            }
    };
    let program = others.into_iter().find(is_program);
    // Empty where it is giving the memory back.
    let program = program.filter(|_| !command.is_empty());
    program.map(|program| Sibling { pid, program })
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
    let text = is_named(root, pid).then(|| root.read(format!("proc/{pid}/status")).ok())??;
    let value = |key: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(':'));
        lines.find_map(|(found, value)| (found == key).then_some(value.trim()))
    };
    let is_confined = value("NoNewPrivs") == Some("1") && value("Seccomp") == Some("2");
    let inside = value("NSpid").and_then(|pids| pids.split_whitespace().next_back()?.parse().ok());
    is_confined.then(|| inside.unwrap_or(pid))
}
