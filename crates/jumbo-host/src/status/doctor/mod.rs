//! Rules of `jumbo doctor`: [`examine`], a pure function from a snapshot to [`Finding`]s.
//!
//! Findings are sorted by cost: first failures of programs, then bytes (wasted or slow), then waits
//! for the host, last unknown costs. Within a rank the larger cost is first.
//!
//! A rule is a function from the [`Snapshot`] to findings. A finding has the file and the value
//! that caused it, and a command that fixes it. Without evidence there is no finding. Each file has
//! the rules of its subject: `thp`, `pools`, `programs`, `memory`.

mod memory;
mod pools;
mod programs;
mod thp;

use std::cmp::Reverse;

use serde::Serialize;

use super::{Host, Missing, Tasks};
use crate::kernel::Root;
use crate::kernel::hugetlb::Pool;
use crate::units::Bytes;

/// Minimum memory of a finding: smaller amounts cost little, and many findings would hide the
/// important ones.
const LARGE_BYTES: Bytes = Bytes(64 << 20);

/// Folder of the THP controls.
const THP_FOLDER: &str = "/sys/kernel/mm/transparent_hugepage";

/// Hint against fragmented free memory.
const COMPACT_HINT: &str = "`echo 1 > /proc/sys/vm/compact_memory` compacts now, \
                            `sysctl vm.compaction_proactiveness=60` compacts in the background \
                            (=20, the kernel's default, undoes it)";

/// Input of the rules.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The host.
    pub host: Host,
    /// The largest processes.
    pub tasks: Tasks,
    /// Measured time of touches; `None` without a measurement.
    pub touch: Option<Touch>,
}

/// Time of touching memory in huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Touch {
    /// Size of the memory.
    pub size: Bytes,
    /// Time for memory that was free for a while, in microseconds.
    pub first_us: u64,
    /// Time for memory that was freed just before, in microseconds.
    pub again_us: u64,
}

/// Cost of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cost {
    /// Programs fail or are killed.
    Fails,
    /// Memory that no program can use.
    Wasted(Bytes),
    /// Memory that is slower than necessary.
    Slow(Bytes),
    /// First touches that wait, usually for the host of a virtual machine.
    Waits(Touch),
    /// Unknown cost.
    Unknown,
}

/// A problem of the host or a program, with a fix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable name for scripts.
    pub id: &'static str,
    /// Cost of the problem.
    pub cost: Cost,
    /// Description in one sentence.
    pub title: String,
    /// Values that show the problem.
    pub evidence: Vec<Evidence>,
    /// Fix, with the command.
    pub hint: String,
}

/// A value with its source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// File, and the field where it has several.
    pub source: String,
    /// Value.
    pub value: String,
}

impl Snapshot {
    /// Reads the host and its processes, with the details of the `top` largest.
    pub fn read(root: &Root, top: usize) -> Self {
        Self {
            host: Host::read(root),
            tasks: Tasks::read(root, top),
            touch: None,
        }
    }

    fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.host.pools.iter().flatten()
    }

    /// Value of the kernel's counter `event`; 0 where it has none.
    fn since_boot(&self, event: &str) -> u64 {
        self.host.events.get(event).unwrap_or(0)
    }

    /// Free memory in blocks smaller than a huge page, and all free memory.
    fn scattered(&self) -> (Bytes, Bytes) {
        let host = &self.host;
        let of_pmd = (host.formable.iter()).filter(|formable| formable.size == host.pmd_size);
        let free: Bytes = of_pmd.map(|formable| formable.free).sum();
        let (pages, _) = host.formable_of(host.pmd_size);
        let whole = pages.bytes(host.pmd_size);
        (Bytes(free.0.saturating_sub(whole.0)), free)
    }

    /// Reports whether all inputs of the rules are unreadable: memory, controls, pools and
    /// processes.
    pub fn is_blind(&self) -> bool {
        let host = &self.host;
        let has_controls = host.thp.is_some() || host.pools.is_some();
        host.memory.is_none() && !has_controls && self.tasks.count == 0
    }

    /// Unavailable data with reasons.
    pub fn missing(&self) -> impl Iterator<Item = &Missing> {
        self.host.missing.iter().chain(&self.tasks.missing)
    }
}

impl Cost {
    fn rank(self) -> (Reverse<u8>, Bytes) {
        match self {
            Self::Fails => (Reverse(0), Bytes(0)),
            Self::Wasted(bytes) | Self::Slow(bytes) => (Reverse(1), bytes),
            // Microseconds and bytes are not comparable.
            Self::Waits(touch) => (Reverse(2), Bytes(touch.first_us)),
            Self::Unknown => (Reverse(3), Bytes(0)),
        }
    }
}

impl Touch {
    /// Time of the first touch divided by that of the second.
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

    /// Adds a value from a file of a process.
    fn process_evidence(self, pid: u32, file: &str, value: impl ToString) -> Self {
        self.evidence(format!("/proc/{pid}/{file}"), value)
    }

    /// Adds the value of the kernel's counter `event`.
    fn since_boot(self, event: &str, count: u64) -> Self {
        self.evidence(format!("/proc/vmstat {event}, since boot"), count)
    }

    fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }
}

/// Returns all findings by descending cost.
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
