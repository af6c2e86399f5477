//! Promotion of a program from its start, for `jumbo run`: [`attend`].
//!
//! `jumbo promote --follow` waits between rounds. This module samples the resident size instead:
//! growth starts a round at once, and an idle program costs almost nothing.

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

/// Interval between samples of the resident size.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);
/// Minimum growth that starts a round: a huge page.
const MIN_GROWTH: Bytes = Bytes(2 << 20);
/// Growth within [`SAMPLE_INTERVAL`] that counts as filling memory. A collapse would delay the page
/// faults of such a program.
const FILL_GROWTH: Bytes = Bytes(8 << 20);
/// Maximum delay of a round while the program fills memory.
const MAX_DELAY: Duration = Duration::from_secs(1);
/// Maximum time of a round while the program fills memory: a quarter of the delay.
const FILL_ROUND_TIME: Duration = Duration::from_millis(250);
/// First interval between rounds without growth.
const MIN_INTERVAL: Duration = Duration::from_millis(400);

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Promoted {
    /// Method; `None`: nothing was collapsed.
    pub(crate) method: Option<String>,
    /// Collapsed memory; repeated collapses count again.
    pub(crate) obtained: Bytes,
    pub(crate) cost: Bytes,
    /// Reason why the last round obtained less than its plan, or did not run.
    pub(crate) reason: Option<String>,
}

/// Promotes the heap of `pid` until the process has ended, and prints the result.
pub(crate) fn attend(pid: u32, max_waste: MaxWaste) -> anyhow::Result<()> {
    let root = Root::host();
    let mut watch = Watch::new()?;
    let mut promoted = Promoted::default();
    let wish = Selection::of_heap(max_waste);
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
    // The rest of an interrupted round.
    let mut remaining: Option<PromotePlan> = None;
    let mut earliest = Instant::now();
    let (mut due, mut ended) = (earliest, earliest);
    while watch.ended_by().is_none() && !target.process().is_gone() {
        let is_filling = size.sample();
        let now = Instant::now();
        let has_changed = size.resident.0.abs_diff(planned_at.0) >= MIN_GROWTH.0;
        let is_late = now >= ended + MAX_DELAY;
        let is_due = remaining.is_some() || now >= earliest && (now >= due || has_changed);
        if is_due && (!is_filling || is_late) {
            let (before, began) = (promoted.obtained, cpu_time(root));
            if remaining.is_none() {
                planned_at = size.resident;
            }
            let plan = plan(root, target, wish, promoted.cost, remaining.take());
            // Only planning is rate-limited: a block is collapsed once, but scanned by each plan.
            let planning = cpu_time(root).saturating_sub(began);
            let mut watcher = RoundWatcher {
                watch,
                size: &mut size,
                until: is_filling.then(|| now + FILL_ROUND_TIME),
                is_interrupted: false,
            };
            match plan {
                Ok((plan, reach)) => {
                    let outcome = promote(target, &plan, &mut pace, &mut watcher);
                    promoted.add(&reach, &outcome, watcher.is_interrupted);
                    remaining = watcher.is_interrupted.then(|| plan.after(&outcome));
                }
                Err(Refusal::Gone) => {}
                Err(refusal) => {
                    promoted.reason = Some(refusal.to_string());
                    // No program in its place is within reach either.
                    if let Refusal::Unreachable(_) = refusal {
                        break;
                    }
                }
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

/// Resident memory of the program at the last sample.
struct ResidentSize<'a> {
    root: &'a Root,
    pid: u32,
    sampled: Instant,
    resident: Bytes,
}

impl<'a> ResidentSize<'a> {
    fn new(root: &'a Root, target: &Target) -> Self {
        Self {
            root,
            pid: target.pid(),
            sampled: Instant::now(),
            resident: Bytes(0),
        }
    }

    /// Samples the size; returns whether the program fills memory.
    fn sample(&mut self) -> bool {
        let before = (self.sampled, self.resident);
        self.sampled = Instant::now();
        self.resident = tree::resident_anonymous(self.root, self.pid).unwrap_or(self.resident);
        let grown = self.resident.0.saturating_sub(before.1.0) as f64;
        let intervals = (self.sampled - before.0).as_secs_f64() / SAMPLE_INTERVAL.as_secs_f64();
        grown >= FILL_GROWTH.0 as f64 * intervals.max(1.0)
    }
}

/// Interrupts a round once the program fills memory again.
struct RoundWatcher<'a, 'r> {
    watch: &'a mut Watch,
    size: &'a mut ResidentSize<'r>,
    /// End of a round while the program fills memory.
    until: Option<Instant>,
    is_interrupted: bool,
}

impl Watcher for RoundWatcher<'_, '_> {
    fn poll(&mut self, progress: &Progress) -> ControlFlow<()> {
        self.is_interrupted = match self.until {
            Some(until) => Instant::now() >= until,
            None => self.size.sampled.elapsed() >= SAMPLE_INTERVAL && self.size.sample(),
        };
        match self.is_interrupted {
            true => ControlFlow::Break(()),
            false => self.watch.poll(progress),
        }
    }
}

/// Returns the remaining plan or a new one, and the method.
fn plan(
    root: &Root,
    target: &Target,
    wish: &Selection,
    spent: Bytes,
    remaining: Option<PromotePlan>,
) -> Result<(PromotePlan, Access), Refusal> {
    if task::map_each(root, &[target.pid()], LIBRARY) == [true] {
        return Err(Refusal::Covered);
    }
    let plan = remaining.map_or_else(|| PromotePlan::new(target, wish, spent), Ok)?;
    Ok((plan, Access::find(target)?))
}

impl Promoted {
    fn add(&mut self, reach: &Access, outcome: &Outcome, is_interrupted: bool) {
        self.obtained += outcome.obtained;
        self.cost += outcome.cost;
        if outcome.obtained > Bytes(0) {
            self.method = Some(reach.method.to_string());
        }
        let refused = outcome.failures.first();
        let refused = refused.map(|failure| format!("{}: {}", failure.errno, failure.reason));
        if !outcome.ended && !is_interrupted {
            self.reason = outcome.stopped.clone().or(refused);
        }
    }
}
