//! What is worth mending: [`examine`], a pure function from a snapshot to [`Finding`]s.
//!
//! Findings are ordered by what they cost. First those by which programs fail or are killed; then by
//! the bytes concerned, which are wasted, or slower to use than they need be; then waits for the host; last those for which the
//! evidence gives no figure. Within a rank the larger one is first.
//!
//! A rule is a function from the [`Snapshot`] to findings. It names the file and the value that made
//! it speak, and a command that mends it; where it cannot tell, it keeps silent. Rules stand in the
//! file of what they look at: `thp`, `pools`, `programs`, `memory`.

mod memory;
mod pools;
mod programs;
mod thp;

use std::cmp::Reverse;

use serde::Serialize;

use super::{Host, Missing, Tasks};
use crate::kernel::Root;
use crate::units::Bytes;

/// Below this nothing is called large: a program with less on base pages loses little, and advice for
/// each of them would bury what matters.
const LARGE: Bytes = Bytes(64 << 20);

/// What the rules look at.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The host.
    pub host: Host,
    /// Its largest processes.
    pub tasks: Tasks,
    /// What touching memory takes, where that was measured.
    pub touch: Option<Touch>,
}

/// What it takes to touch so much memory, in huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Touch {
    /// How much.
    pub size: Bytes,
    /// Memory that had been free for a while, in microseconds.
    pub first_us: u64,
    /// The same right after it was given back, in microseconds.
    pub again_us: u64,
}

/// What a finding costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cost {
    /// Programs fail or are killed.
    Fails,
    /// Memory that no program can use.
    Wasted(Bytes),
    /// Memory that is slower to use than it need be.
    Slow(Bytes),
    /// The first touch of memory waits, as a rule for the host of a virtual machine.
    Waits(Touch),
    /// The evidence gives no figure.
    Unknown,
}

/// One thing worth mending.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// A name that stays the same, for scripts.
    pub id: &'static str,
    /// What it costs.
    pub cost: Cost,
    /// One sentence.
    pub title: String,
    /// What was read.
    pub evidence: Vec<Evidence>,
    /// What to do, with the command.
    pub hint: String,
}

/// A file and what stands in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// The file, and the field where it has several.
    pub source: String,
    /// The value.
    pub value: String,
}

impl Snapshot {
    /// Reads it, with a close look at the `top` largest processes.
    pub fn read(root: &Root, top: usize) -> Self {
        Self {
            host: Host::read(root),
            tasks: Tasks::read(root, top),
            touch: None,
        }
    }

    /// How often the kernel counted `event` since boot; 0 where it does not count it.
    fn since_boot(&self, event: &str) -> u64 {
        self.host.events.get(event).unwrap_or(0)
    }

    /// Free memory that is in pieces smaller than a huge page now, and all free memory.
    fn scattered(&self) -> (Bytes, Bytes) {
        let host = &self.host;
        let of_pmd = (host.formable.iter()).filter(|formable| formable.size == host.pmd_size);
        let free: Bytes = of_pmd.map(|formable| formable.free).sum();
        let (pages, _) = host.formable_of(host.pmd_size);
        let whole = pages.bytes(host.pmd_size);
        (Bytes(free.0.saturating_sub(whole.0)), free)
    }

    /// True where nothing could be read that a rule looks at: neither memory, nor controls, nor pools, nor processes.
    pub fn is_blind(&self) -> bool {
        let host = &self.host;
        let has_controls = host.thp.is_some() || host.pools.is_some();
        host.memory.is_none() && !has_controls && self.tasks.count == 0
    }

    /// What could not be looked at, and why.
    pub fn missing(&self) -> impl Iterator<Item = &Missing> {
        self.host.missing.iter().chain(&self.tasks.missing)
    }
}

impl Cost {
    fn rank(self) -> (Reverse<u8>, Bytes) {
        match self {
            Self::Fails => (Reverse(0), Bytes(0)),
            Self::Wasted(bytes) | Self::Slow(bytes) => (Reverse(1), bytes),
            // Microseconds and bytes cannot be held against each other.
            Self::Waits(touch) => (Reverse(2), Bytes(touch.first_us)),
            Self::Unknown => (Reverse(3), Bytes(0)),
        }
    }
}

impl Touch {
    /// How many times as long the first touch takes.
    pub fn ratio(self) -> f64 {
        self.first_us as f64 / self.again_us.max(1) as f64
    }
}

impl Finding {
    fn new(id: &'static str, cost: Cost, title: impl Into<String>) -> Self {
        Self {
            id,
            cost,
            title: title.into(),
            evidence: Vec::new(),
            hint: String::new(),
        }
    }

    fn evidence(mut self, source: impl Into<String>, value: impl ToString) -> Self {
        self.evidence.push(Evidence {
            source: source.into(),
            value: value.to_string(),
        });
        self
    }

    /// What a file of a process says.
    fn of(self, pid: u32, file: &str, value: impl ToString) -> Self {
        self.evidence(format!("/proc/{pid}/{file}"), value)
    }

    /// How often the kernel counted `event`.
    fn since_boot(self, event: &str, count: u64) -> Self {
        self.evidence(format!("/proc/vmstat {event}, since boot"), count)
    }

    fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }
}

/// Every finding, the costliest first. None: nothing to mend.
pub fn examine(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings: Vec<Finding> = [
        thp::rules(snapshot),
        pools::rules(snapshot),
        programs::rules(snapshot),
        memory::rules(snapshot),
    ]
    .into_iter()
    .flatten()
    .collect();
    findings.sort_by_key(|finding| Reverse(finding.cost.rank()));
    findings
}
