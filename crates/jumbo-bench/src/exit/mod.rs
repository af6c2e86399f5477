//! `jumbo bench exit`: how long whoever waits for a large process waits, and when its memory is back.
//!
//! A process with a large block in base pages exits, crashes or is killed, and is watched from outside: from the call
//! or the signal until `waitpid` returns, and until the memory is free. That the memory is back is seen by one
//! probe on all sides (`memory::Watch`). What `waitpid` takes is measured at two sizes, because it shall not
//! depend on them.
//!
//! Before the end each side is checked: base pages only, and where the sibling is to give them back it sleeps.

mod end;
mod plan;
pub mod worker;

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use jumbo::kernel::Root;
use jumbo::units::Bytes;

use crate::machine::Machine;
use crate::memory::{TRIES, Warmer, room};
use crate::rounds::alternate_all;
use crate::table::{Row, Table, Unit};
use crate::{Error, Progress, Settings};
use end::Sample;
use plan::{Case, End, Side, Size};

/// The least size: a quarter of it must still be more than the program around it.
pub const MIN_SIZE: Bytes = Bytes(64 << 20);

/// What a page of [`Table`] says was published.
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
    let mut warmer = Warmer::new(&root);
    let rounds = settings.rounds.get();
    let cases = plan::cases();
    progress.begin(cases.len() * (rounds + 1));

    // The warm-up is a whole round, as in the other tables.
    let mut samples = alternate_all(rounds + 1, cases.len(), |round, case| {
        let (end, side, size) = cases[case];
        let size = size.of(load.size);
        let what = format!("{} of {size}, {}", end.key(), side.name(load.workers));
        progress.step(&match round {
            0 => format!("warm-up: {what}"),
            _ => format!("round {round} of {rounds}: {what}"),
        });
        warmer.sample((&what, size), TRIES, || {
            end::watch(settings, (end, side), (size, load.workers))
        })
    })?;
    for samples in &mut samples {
        samples.remove(0);
    }
    let what = format!("{} in base pages", load.size);
    let mut table = Table::new("exit", what, rounds, machine);
    let found = Found {
        load,
        samples: cases.into_iter().zip(samples).collect(),
    };
    found.push(&mut table);
    table.set_hit(warmer.hit());
    Ok(table)
}

/// What a process of `size` bytes takes with its page tables and the program around it.
fn footprint(size: Bytes) -> Bytes {
    size + Bytes(size.0 / 50) + Bytes(64 << 20)
}

/// What was measured.
struct Found {
    load: Load,
    samples: BTreeMap<Case, Vec<Sample>>,
}

/// A figure of every sample.
type Figure = fn(&Sample) -> f64;

impl Found {
    fn push(&self, table: &mut Table) {
        let (wait, back): (Figure, Figure) = (|s| s.wait_ms, |s| s.back_ms);
        for end in [End::Exit, End::Kill, End::Crash] {
            let key = end.key();
            let waits = (
                format!("{key}_wait"),
                format!("{key}, until waitpid returns"),
            );
            let backs = (
                format!("{key}_memory_back"),
                format!("{key}, until memory is back"),
            );
            for ((name, measure), figure) in [(waits, wait), (backs, back)] {
                let aa = (format!("{name}_aa"), format!("{measure}, A/A"));
                table.push(self.compare(aa, end, Side::Again, figure));
                let row = self.compare((name, measure), end, Side::Reaper, figure);
                table.push(row.published(PUBLISHED));
            }
            self.push_waits(table, end);
        }
        for (name, side) in [
            ("supervise_memory_back", Side::Supervise),
            ("jumbo_kill_memory_back", Side::JumboKill),
        ] {
            let what = (name.to_owned(), "kill, until memory is back".to_owned());
            table.push(self.compare(what, End::Kill, side, back));
        }
    }

    /// How long was waited at both sizes, on both sides, and what the size is to it.
    fn push_waits(&self, table: &mut Table, end: End) {
        let key = end.key();
        for (size, suffix) in [(Size::Small, "wait_small_ms"), (Size::Full, "wait_ms")] {
            for (side, prefix) in [(Side::Reaper, ""), (Side::Plain, "plain_")] {
                let waits = self.figures((end, side, size), |s| s.wait_ms);
                table.value(format!("{prefix}{key}_{suffix}"), Unit::Ms, &waits);
            }
        }
        let sizes = [Size::Small, Size::Full];
        let [small, full] =
            sizes.map(|size| self.figures((end, Side::Reaper, size), |s| s.wait_ms));
        let [small_name, full_name] = sizes.map(|size| {
            let bytes = size.of(self.load.size);
            format!("{} of {bytes}", Side::Reaper.name(self.load.workers))
        });
        table.push(Row::difference(
            (
                format!("{key}_wait_growth_ms"),
                format!("{key}, wait at two sizes"),
                Unit::Ms,
            ),
            (small_name, &small),
            (full_name, &full),
        ));
    }

    /// A row that holds `side` against the baseline.
    fn compare(
        &self,
        (name, measure): (String, String),
        end: End,
        side: Side,
        figure: Figure,
    ) -> Row {
        let baseline = self.figures((end, Side::Plain, Size::Full), figure);
        let candidate = self.figures((end, side, Size::Full), figure);
        Row::ratio(
            (name, measure, Unit::Ms),
            (Side::Plain.name(None), &baseline),
            (side.name(self.load.workers), &candidate),
        )
    }

    fn figures(&self, case: Case, figure: Figure) -> Vec<f64> {
        let samples = self.samples.get(&case);
        samples.into_iter().flatten().map(figure).collect()
    }
}
