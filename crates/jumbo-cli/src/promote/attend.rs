//! A program promoted from its start, for `jumbo run`: [`attend`].
//!
//! `jumbo promote --follow` has an interval between rounds. Here a cheap look at the size of the process
//! comes before each round, so that a program that fills its memory within a second is huge a moment
//! later, and an idle one costs next to nothing.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::process::tree;
use jumbo_host::kernel::{Root, task};
use jumbo_host::promote::{
    Access, Outcome, Pace, Progress, PromotePlan, Refusal, Selection, Target, Watcher, promote,
};
use jumbo_host::status::LIBRARY;
use jumbo_inside::orders::MaxWaste;
use serde::{Deserialize, Serialize};

use super::watch::Watch;
use super::{CPU_DIVISOR, MAX_INTERVAL, cpu_time};

/// The time between two looks at the size.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);
/// The growth that calls for a round: a huge page.
const MIN_GROWTH: Bytes = Bytes(2 << 20);
/// A program that grows by so much between two looks fills memory. A collapse would hold up its page faults.
const FILL_GROWTH: Bytes = Bytes(8 << 20);
/// A round is put off while the program fills memory, but no longer than this; then it has a quarter of the time.
const MAX_DELAY: Duration = Duration::from_secs(1);
const FILL_ROUND_TIME: Duration = Duration::from_millis(250);
/// The first interval between rounds without growth.
const MIN_INTERVAL: Duration = Duration::from_millis(400);

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

/// Promotes the heap of `pid` until it has ended, and says what came of it.
pub(crate) fn attend(pid: u32, max_waste: MaxWaste) -> anyhow::Result<()> {
    let root = Root::host();
    let mut watch = Watch::new()?;
    let mut promoted = Promoted::default();
    let wish = Selection {
        heap: true,
        text: false,
        shm: false,
        max_waste,
    };
    match Target::open(&root, pid) {
        Ok(target) => follow(&root, &target, &wish, &mut watch, &mut promoted),
        Err(refusal) => promoted.reason = Some(refusal.to_string()),
    }
    watch.finish();
    crate::view::json_line(&promoted)
}

fn follow(
    root: &Root,
    target: &Target,
    wish: &Selection,
    watch: &mut Watch,
    promoted: &mut Promoted,
) {
    let mut pace = Pace::new(target, None);
    let mut size = ResidentSize::new(root, target);
    let (mut planned_at, mut interval) = (Bytes(0), MIN_INTERVAL);
    // A plan that was cut short.
    let mut open: Option<PromotePlan> = None;
    let mut earliest = Instant::now();
    let (mut due, mut ended) = (earliest, earliest);
    while watch.ended_by().is_none() && !target.process().is_gone() {
        let fills = size.look();
        let now = Instant::now();
        let has_changed = size.resident.0.abs_diff(planned_at.0) >= MIN_GROWTH.0;
        let is_late = now >= ended + MAX_DELAY;
        let is_due = open.is_some() || now >= earliest && (now >= due || has_changed);
        if is_due && (!fills || is_late) {
            let (before, began) = (promoted.obtained, cpu_time(root));
            if open.is_none() {
                planned_at = size.resident;
            }
            let plan = plan(root, target, wish, promoted.cost, open.take());
            // A collapse is paid once for its block; to look for blocks is what must not be done too often.
            let planning = cpu_time(root).saturating_sub(began);
            let mut watcher = RoundWatcher {
                watch,
                size: &mut size,
                until: fills.then(|| now + FILL_ROUND_TIME),
                is_cut: false,
            };
            match plan {
                Ok((plan, reach)) => {
                    let outcome = promote(target, &reach, &plan, &mut pace, &mut watcher);
                    promoted.add(&reach, &outcome, watcher.is_cut);
                    open = watcher.is_cut.then(|| plan.after(&outcome));
                }
                Err(Refusal::Gone) => {}
                Err(refusal) => promoted.reason = Some(refusal.to_string()),
            }
            interval = match promoted.obtained > before {
                true => MIN_INTERVAL,
                false => (interval * 2).min(MAX_INTERVAL),
            };
            ended = Instant::now();
            earliest = earliest.max(now + planning * CPU_DIVISOR);
            due = earliest.max(ended + interval);
        }
        watch.wait_for(target.process(), SAMPLE_INTERVAL);
    }
}

/// The resident memory of the program at the last look.
struct ResidentSize<'a> {
    root: &'a Root,
    pid: u32,
    looked: Instant,
    resident: Bytes,
}

impl<'a> ResidentSize<'a> {
    fn new(root: &'a Root, target: &Target) -> Self {
        Self {
            root,
            pid: target.pid(),
            looked: Instant::now(),
            resident: Bytes(0),
        }
    }

    /// Looks; whether the program fills memory.
    fn look(&mut self) -> bool {
        let before = (self.looked, self.resident);
        self.looked = Instant::now();
        self.resident = tree::resident_anonymous(self.root, self.pid).unwrap_or(self.resident);
        let grown = self.resident.0.saturating_sub(before.1.0) as f64;
        let looks = (self.looked - before.0).as_secs_f64() / SAMPLE_INTERVAL.as_secs_f64();
        grown >= FILL_GROWTH.0 as f64 * looks.max(1.0)
    }
}

/// Ends a round once the program fills memory again.
struct RoundWatcher<'a, 'r> {
    watch: &'a mut Watch,
    size: &'a mut ResidentSize<'r>,
    /// The end of a round while it fills memory.
    until: Option<Instant>,
    is_cut: bool,
}

impl Watcher for RoundWatcher<'_, '_> {
    fn poll(&mut self, progress: &Progress) -> ControlFlow<()> {
        self.is_cut = match self.until {
            Some(until) => Instant::now() >= until,
            None => self.size.looked.elapsed() >= SAMPLE_INTERVAL && self.size.look(),
        };
        match self.is_cut {
            true => ControlFlow::Break(()),
            false => self.watch.poll(progress),
        }
    }
}

/// The plan for now, which is the open one where there is one, and the method.
fn plan(
    root: &Root,
    target: &Target,
    wish: &Selection,
    spent: Bytes,
    open: Option<PromotePlan>,
) -> Result<(PromotePlan, Access), Refusal> {
    if task::map_each(root, &[target.pid()], LIBRARY) == [true] {
        return Err(Refusal::Covered);
    }
    let plan = open.map_or_else(|| PromotePlan::new(target, wish, spent), Ok)?;
    Ok((plan, Access::find(target)?))
}

impl Promoted {
    fn add(&mut self, reach: &Access, outcome: &Outcome, is_cut: bool) {
        self.obtained += outcome.obtained;
        self.cost += outcome.cost;
        if outcome.obtained > Bytes(0) {
            self.method = Some(reach.method.to_string());
            self.fallback.clone_from(&reach.fallback);
        }
        let refused = outcome.failures.first();
        let refused = refused.map(|failure| format!("{}: {}", failure.errno, failure.reason));
        if !outcome.ended && !is_cut {
            self.reason = outcome.stopped.clone().or(refused);
        }
    }
}
