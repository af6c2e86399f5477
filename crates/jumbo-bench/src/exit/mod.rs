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

pub(crate) use worker::hold;

use std::num::NonZeroU32;

use jumbo::kernel::Root;
use jumbo::units::Bytes;

use crate::child::Launch;
use crate::group::Group;
use crate::machine::Machine;
use crate::memory::{footprint, room};
use crate::table::Table;
use crate::{Error, Progress, Settings, group};
use end::{Side, watch};
use worker::End;

/// The least size: a quarter of it must still be more than the program around it.
pub const MIN_SIZE: Bytes = Bytes(64 << 20);

const PUBLISHED: &str = "more than 10 min for several TB";

/// What is asked of the table.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// How much memory the processes have.
    pub size: Bytes,
    /// How many threads give it back; `None`: as many as jumbo takes by itself.
    pub workers: Option<NonZeroU32>,
}

/// Measures the table.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, load: Load, progress: &dyn Progress) -> Result<Table, Error> {
    let root = Root::host();
    let machine = Machine::read(&root)?;
    room(&root, footprint(load.size))?;
    let what = format!("{} in base pages", load.size);
    let table = Table::new("exit", what, settings, machine);
    let groups = [End::Exit, End::Crash, End::Kill].map(|end| ends(settings, end, load));
    group::measure(settings, progress, table, groups.into())
}

fn ends(settings: &Settings, end: End, Load { size, workers }: Load) -> Group<'_> {
    let threads = workers.map_or(String::new(), |n| format!("--free-workers={n} "));
    let side = |launch, reaper, killer| Side {
        launch,
        reaper,
        killer,
    };
    let run = |options| Launch::Jumbo(format!("{threads}{options}"));
    let reaper = || side(run("--reaper=on"), true, false);
    let plain = || side(Launch::Plain, false, false);

    let (key, quarter) = (end.key(), Bytes(size.0 / 4));
    let mut group = Group::new(key);
    let mut add = |side: Side, name: String, size: Bytes| {
        group.side(name, size, move || watch(settings, end, &side, size))
    };
    let name = reaper().launch.name();
    let base = add(plain(), "plain".to_owned(), size);
    let base_small = add(plain(), format!("plain of {quarter}"), quarter);
    let sibling_small = add(reaper(), format!("{name} of {quarter}"), quarter);
    let sibling = add(reaper(), name, size);
    let beside = (end == End::Kill).then(|| {
        let supervise = side(run("--reaper=off --supervise"), false, false);
        let name = supervise.launch.name();
        let killer = side(Launch::Plain, false, true);
        [
            add(supervise, name, size),
            add(killer, "jumbo kill".to_owned(), size),
        ]
    });
    let again = group.again(base);

    for (what, until, figure) in [
        ("wait", "until waitpid returns", "wait_ms"),
        ("memory_back", "until memory is back", "back_ms"),
    ] {
        let (name, measure) = (format!("{key}_{what}"), format!("{key}, {until}"));
        let aa = (format!("{name}_aa"), format!("{measure}, A/A"));
        group.ratio((&aa.0, &aa.1, figure), [base, again]);
        group
            .ratio((&name, &measure, figure), [base, sibling])
            .published(PUBLISHED);
    }
    for (name, side) in [
        (format!("{key}_wait_ms"), sibling),
        (format!("{key}_wait_small_ms"), sibling_small),
        (format!("plain_{key}_wait_ms"), base),
        (format!("plain_{key}_wait_small_ms"), base_small),
    ] {
        group.value(&name, "wait_ms", side);
    }
    let (name, measure) = (
        format!("{key}_wait_growth_ms"),
        format!("{key}, wait at two sizes"),
    );
    group.difference((&name, &measure, "wait_ms"), [sibling_small, sibling]);
    if let Some([supervise, killer]) = beside {
        let measure = "kill, until memory is back";
        for (name, side) in [
            ("supervise_memory_back", supervise),
            ("jumbo_kill_memory_back", killer),
        ] {
            group.ratio((name, measure, "back_ms"), [base, side]);
        }
    }
    group
}
