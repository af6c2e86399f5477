//! `jumbo bench fork`: how long `fork` takes in a large process, and what the first writes after it take.
//!
//! The call copies page tables: one entry for each base page, or one for each huge page. That is what a database pays that saves its
//! memory from a child (Redis' BGSAVE), while it serves no client. The first write to a page after it makes a copy, and finds a huge page
//! in the way, which the kernel splits first: that is the other side, in a row of its own.
//!
//! Before it forks each side is checked: base pages only, or huge pages for all of the block.

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;

use crate::group::{self, Group, rows};
use crate::launch::Launch;
use crate::memory::{footprint, room};
use crate::table::Table;
use crate::task::{By, Memory, Task, Then};
use crate::{Error, Settings, claim};

/// The least size: below, the program around it weighs as much.
pub const MIN_SIZE: Bytes = Bytes(64 << 20);

/// Measures the table, with processes of those sizes. Those for which there is no memory are left out.
///
/// # Errors
/// [`Error`]; [`Error::Memory`] where there is none for any of them.
pub fn measure(settings: &Settings, sizes: &[Bytes]) -> Result<Table, Error> {
    let mut table = Table::new("fork", "a process that forks".to_owned(), settings)?;
    let mut groups = Vec::new();
    let mut last = None;
    for &size in sizes {
        match room(&Root::host(), footprint(size)) {
            Ok(()) => groups.push(group_of(settings, size)),
            Err(why) => {
                table.missing("a size", format!("{size}: {why}"));
                last = Some(why);
            }
        }
    }
    match last {
        Some(error) if groups.is_empty() => Err(error),
        _ => group::measure(settings, table, groups),
    }
}

fn group_of(settings: &Settings, size: Bytes) -> Group<'_> {
    let mut group = Group::new(settings, "fork");
    let task = |base| {
        Task::Memory(Memory {
            by: By::Malloc,
            sizes: vec![size],
            times: 1,
            base,
            then: Then::Fork,
        })
    };
    let base = group.work(Launch::Plain, task(true), size, claim::base(size));
    let huge = group.work(Launch::at_once(""), task(false), size, claim::huge(size));
    // `fork_8g`.
    let key = match size.0 % (1 << 30) {
        0 => format!("fork_{}g", size.0 >> 30),
        _ => format!("fork_{}m", size.0 >> 20),
    };
    for (suffix, measure, figure) in [
        ("", "the call", "call_ms"),
        ("_writes", "1000 first writes", "writes_ms"),
        ("_both", "both", "call_ms+writes_ms"),
    ] {
        let (name, measure) = (format!("{key}{suffix}"), format!("{size}, {measure}"));
        rows! { group;
            format!("{name}_aa") => &measure, figure, base / base;
            name => measure, figure, base / huge;
        }
    }
    group
}
