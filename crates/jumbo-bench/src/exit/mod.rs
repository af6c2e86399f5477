//! `jumbo bench exit`: how long a process waits for the end of a large one, and when its memory is back.
//!
//! A process with a large block in base pages exits, crashes or is killed, and is watched from outside: from the call
//! or the signal until `waitpid` returns, and until the memory is free. That the memory is back is seen by one
//! probe on all sides (`memory::Watch`). What `waitpid` takes is measured at two sizes, because it shall not
//! depend on them.
//!
//! Before the end each side is checked: base pages only, and where the sibling is to give them back it sleeps.

mod end;
mod worker;

pub(crate) use worker::HOLD;

use std::num::NonZeroU32;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;

use crate::group::{self, Group, rows};
use crate::launch::Launch;
use crate::memory::{footprint, room};
use crate::table::Table;
use crate::{Error, Settings};
use end::{By, watch};
use worker::End;

/// The least size: a quarter of it must still be more than the program around it.
pub const MIN_SIZE: Bytes = Bytes(64 << 20);

const PUBLISHED: &str = "more than 10 min for several TB";

/// Measures the table, with processes of `size` bytes that so many threads give back; `None`: as many as jumbo takes by
/// itself.
///
/// # Errors
/// [`Error`].
pub fn measure(
    settings: &Settings,
    size: Bytes,
    workers: Option<NonZeroU32>,
) -> Result<Table, Error> {
    room(&Root::host(), footprint(size))?;
    let table = Table::new("exit", format!("{size} in base pages"), settings)?;
    let ends = [End::Exit, End::Crash, End::Kill];
    let groups = ends.map(|end| group_of(settings, end, size, workers));
    group::measure(settings, table, groups.into())
}

fn group_of(settings: &Settings, end: End, size: Bytes, workers: Option<NonZeroU32>) -> Group<'_> {
    let threads = workers.map_or(String::new(), |n| format!("--free-workers={n} "));
    let (key, quarter) = (end.key(), Bytes(size.0 / 4));
    let mut group = Group::new(settings, key);
    let mut add = |by: By, size: Bytes| {
        let launch = match by {
            By::Kernel | By::Killer => Launch::Plain,
            By::Reaper => Launch::Jumbo(format!("{threads}--reaper=on")),
        };
        let name = match by {
            By::Killer => "jumbo kill".to_owned(),
            _ if size == quarter => format!("{} of {quarter}", launch.name()),
            _ => launch.name(),
        };
        group.side(name, size, move || {
            watch(settings, end, (by, &launch), size)
        })
    };
    let (base, base_small) = (add(By::Kernel, size), add(By::Kernel, quarter));
    let (sibling_small, sibling) = (add(By::Reaper, quarter), add(By::Reaper, size));
    let name = |what: &str| format!("{key}_{what}");
    let growth = format!("{key}, wait at two sizes");
    let until = |what: &str| format!("{key}, until {what}");
    if end == End::Kill {
        let killed = add(By::Killer, size);
        rows! { group;
            "jumbo_kill_memory_back" => until("memory is back"), "back_ms", base / killed;
        }
    }
    rows! { group;
        name("wait_aa") => until("waitpid returns"), "wait_ms", base / base;
        name("wait") => until("waitpid returns"), "wait_ms", base / sibling, PUBLISHED;
        name("memory_back_aa") => until("memory is back"), "back_ms", base / base;
        name("memory_back") => until("memory is back"), "back_ms", base / sibling, PUBLISHED;
        name("wait_growth_ms") => &growth, "wait_ms", sibling - sibling_small;
    }
    group.value(name("wait_ms"), "wait_ms", sibling);
    group.value(name("wait_small_ms"), "wait_ms", sibling_small);
    group.value(format!("plain_{key}_wait_ms"), "wait_ms", base);
    group.value(format!("plain_{key}_wait_small_ms"), "wait_ms", base_small);
    group
}
