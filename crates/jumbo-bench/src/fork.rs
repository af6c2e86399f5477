//! `jumbo bench fork`: the time of `fork` in a large process, and of the first writes after it.
//!
//! fork(2) copies page tables: one entry per base page, or one per huge page. A database that saves
//! its memory from a child (Redis' BGSAVE) serves no client meanwhile. The first write to a page
//! after it copies the page; the kernel splits a huge page first. That cost has rows of its own.
//!
//! Before the fork each side is checked: base pages only, or huge pages for the whole block.

use jumbo::units::Bytes;

use crate::group::{self, Group, rows};
use crate::launch::Launch;
use crate::memory::{check_available, footprint};
use crate::table::Table;
use crate::task::{Action, Task};
use crate::{Error, Settings, claim};

/// Minimum size: below, the program around it is as large.
pub const MIN_SIZE: Bytes = Bytes(64 << 20);

/// Measures the table, with processes of those sizes. Sizes that exceed the available memory are
/// missing.
///
/// # Errors
/// [`Error`]; [`Error::Memory`] if no size fits.
pub fn measure(settings: &Settings, sizes: &[Bytes]) -> Result<Table, Error> {
    let mut table = Table::new("fork", "a process that forks".to_owned(), settings)?;
    let mut groups = Vec::new();
    let mut last = None;
    for &size in sizes {
        match check_available(footprint(size)) {
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
    let task = |base| Task::block(size, base, Action::Fork);
    let base = group.work(Launch::Plain, task(true), size, claim::base(size));
    let huge = group.work(Launch::at_once(""), task(false), size, claim::huge(size));
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
