//! A program promoted from its start, for `jumbo run`: [`main`].
//!
//! `jumbo promote --follow` has an interval between rounds. Here a cheap look at the size of the process
//! comes before each round, so that a program that fills its memory within a second is huge a moment
//! later, and an idle one costs next to nothing.

use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::process::tree;
use jumbo_host::kernel::{Root, task};
use jumbo_host::promote::{Outcome, Pace, Plan, Reach, Refusal, Target, Wish, promote};
use jumbo_host::status::LIBRARY;
use serde::{Deserialize, Serialize};

use super::watch::Watch;
use super::{CPU_PARTS, LONGEST, cpu_time};

/// The time between two looks at the size.
const LOOK: Duration = Duration::from_millis(50);
/// The growth that calls for a round: a huge page of any size that x86-64 and arm64 have for 4 KiB base pages.
const GROWTH: Bytes = Bytes(2 << 20);
/// The first interval between rounds without growth.
const SHORTEST: Duration = Duration::from_millis(400);

/// The result over all rounds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Promoted {
    /// The method; `None`: nothing was collapsed.
    pub(crate) method: Option<String>,
    /// Why it is not process_madvise(2).
    pub(crate) fallback: Option<String>,
    /// Collapsed, and collapsed again.
    pub(crate) obtained: Bytes,
    /// The memory that this took beyond what was resident.
    pub(crate) cost: Bytes,
    /// Why the last round obtained less than its plan, or there was none.
    pub(crate) reason: Option<String>,
}

/// Promotes `pid` until it has ended, and says what came of it.
pub(super) fn main(root: &Root, pid: u32, wish: &Wish, mut watch: Watch) -> anyhow::Result<()> {
    let mut promoted = Promoted::default();
    match Target::open(root, pid) {
        Ok(target) => attend(root, &target, wish, &mut watch, &mut promoted),
        Err(refusal) => promoted.reason = Some(refusal.to_string()),
    }
    watch.finish();
    crate::view::json_line(&promoted)
}

fn attend(root: &Root, target: &Target, wish: &Wish, watch: &mut Watch, promoted: &mut Promoted) {
    let mut pace = Pace::new(target, None);
    let (mut size, mut interval) = (Bytes(0), SHORTEST);
    let mut earliest = Instant::now();
    let mut due = earliest;
    while watch.ended_by().is_none() && !target.process().is_gone() {
        let resident = tree::resident_anonymous(root, target.pid()).unwrap_or(size);
        let now = Instant::now();
        if now >= due || now >= earliest && resident.0.abs_diff(size.0) >= GROWTH.0 {
            let (before, began, start) = (promoted.obtained, cpu_time(root), Instant::now());
            let plan = plan(root, target, wish, promoted.cost);
            // A collapse is paid once for its block; to look for blocks is what must not be done too often.
            let planning = cpu_time(root).saturating_sub(began);
            let done = plan.map(|(plan, reach)| {
                let outcome = promote(target, &reach, &plan, &mut pace, watch);
                promoted.add(&reach, &outcome);
            });
            match done {
                Ok(()) | Err(Refusal::Gone) => {}
                Err(refusal) => promoted.reason = Some(refusal.to_string()),
            }
            size = tree::resident_anonymous(root, target.pid()).unwrap_or(resident);
            interval = match promoted.obtained > before {
                true => SHORTEST,
                false => (interval * 2).min(LONGEST),
            };
            earliest = start + planning * CPU_PARTS;
            due = earliest.max(Instant::now() + interval);
        }
        watch.wait_for(target.process(), LOOK);
    }
}

/// The plan for now, and the method.
fn plan(
    root: &Root,
    target: &Target,
    wish: &Wish,
    spent: Bytes,
) -> Result<(Plan, Reach), Refusal> {
    if task::map_each(root, &[target.pid()], LIBRARY) == [true] {
        return Err(Refusal::Covered);
    }
    Ok((Plan::new(target, wish, spent)?, Reach::find(target)?))
}

impl Promoted {
    fn add(&mut self, reach: &Reach, outcome: &Outcome) {
        self.obtained += outcome.obtained;
        self.cost += outcome.cost;
        if outcome.obtained > Bytes(0) {
            self.method = Some(reach.method.to_string());
            self.fallback.clone_from(&reach.fallback);
        }
        let refused = outcome.failures.first();
        let refused = refused.map(|failure| format!("{}: {}", failure.errno, failure.reason));
        if !outcome.ended {
            self.reason = outcome.stopped.clone().or(refused);
        }
    }
}
