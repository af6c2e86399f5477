//! Samples of the host and of all processes: [`Collector`], for a thread of its own.
//!
//! Status files are read each time, smaps not: it holds the target's mmap lock for reading while it walks the page tables. Each
//! process has a period of its own, so that all reads together take [`SHARE`] of a CPU; costly ones are read less often.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use jumbo::units::{Bytes, PageSize};
use jumbo_host::kernel::hugetlb::{self, Pool};
use jumbo_host::kernel::memory::{Events, Memory, Zone};
use jumbo_host::kernel::pressure::{self, Pressure};
use jumbo_host::kernel::thp::{self, Thp};
use jumbo_host::kernel::{FileError, Root, base_page, cgroup, task};
use jumbo_host::status::{Glance, Glances, Missing, is_reaper};
use jumbo_inside::reaper;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// The part of a CPU that reads of smaps take.
const SHARE: f64 = 0.005;
/// The most of an interval that one sample spends on them, and the first sample's time.
const MOST: f64 = 0.02;
const FIRST: Duration = Duration::from_millis(100);
/// Nothing is read again before.
const SHORTEST: Duration = Duration::from_secs(5);
/// Processes that one child reads, as long as they have no more memory than this.
const TOGETHER: usize = 16;
const LARGE: Bytes = Bytes(1 << 30);
/// Sampling takes one part of so many of the time at most, whatever the interval.
const CPU_PARTS: u32 = 20;
/// The least [`Collector::speed`].
const SLOWEST: f64 = 0.05;

/// The CPU time of this thread.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// A process.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) user: String,
    pub(super) group: String,
    pub(super) command: String,
    #[serde(flatten)]
    pub(super) memory: task::Memory,
    /// `None` where it is not read yet, or may not be.
    pub(super) glance: Option<Glance>,
}

/// The host's memory now, and its counters a second.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Host {
    pub(super) memory: Memory,
    pub(super) pools: Vec<Pool>,
    pub(super) pmd: Option<PageSize>,
    pub(super) thp: Option<Thp>,
    pub(super) zones: Vec<Zone>,
    /// Free memory, and that in free blocks of the PMD size or more; `None` where the kernel's blocks are smaller.
    pub(super) free: Bytes,
    pub(super) free_huge: Option<Bytes>,
    pub(super) rates: Option<Rates>,
    pub(super) missing: Vec<Missing>,
}

/// Changes a second between two samples.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Rates {
    pub(super) seconds: f64,
    /// Of /proc/vmstat, by the kernel's names.
    pub(super) events: BTreeMap<String, f64>,
    /// Of `hugepages-*kB/stats`.
    pub(super) folios: BTreeMap<PageSize, BTreeMap<String, f64>>,
    /// Share of the time in which some, and all, tasks waited for memory (PSI).
    pub(super) stall: Option<(f64, f64)>,
}

/// All of it, at one moment.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Sample {
    pub(super) host: Host,
    pub(super) processes: Vec<Process>,
    /// Processes that this user may not look into.
    pub(super) hidden: usize,
    /// Processes that hold their mappings back.
    pub(super) held_back: usize,
}

/// A process between two samples.
struct Known {
    process: Process,
    /// The number of samples that it was in.
    samples: u32,
    state: State,
}

#[derive(Clone, Copy)]
enum State {
    Unread,
    Denied,
    Read {
        at: Instant,
        cost: Duration,
        candidate: Bytes,
        is_held_back: bool,
    },
}

/// Counters at a moment.
struct Counters {
    at: Instant,
    events: Events,
    pressure: Option<Pressure>,
    thp: Option<Thp>,
}

pub(super) struct Collector {
    root: Root,
    glances: Glances,
    interval: Duration,
    known: HashMap<u32, Known>,
    /// Threads of the kernel, and processes that have ended.
    without_memory: HashSet<u32>,
    users: HashMap<u32, String>,
    /// Read next, whatever it costs.
    wanted: BTreeSet<u32>,
    counters: Option<Counters>,
    rates: Option<Rates>,
    /// The part of the time that this thread gets of a CPU while it works: on a busy host a read costs less than it takes.
    speed: f64,
}

/// Memory of a kind that can be huge.
pub(super) fn candidate(memory: &task::Memory) -> Bytes {
    memory.anon + memory.shmem + memory.hugetlb
}

impl Collector {
    pub(super) fn new(root: Root, interval: Duration) -> Result<Self, FileError> {
        let passwd = root.read("etc/passwd").unwrap_or_default();
        let user = |line: &str| {
            let mut fields = line.split(':');
            let name = fields.next()?.to_owned();
            Some((fields.nth(1)?.parse().ok()?, name))
        };
        Ok(Self {
            glances: Glances::new(&root)?,
            users: passwd.lines().filter_map(user).collect(),
            root,
            interval,
            known: HashMap::new(),
            without_memory: HashSet::new(),
            wanted: BTreeSet::new(),
            counters: None,
            rates: None,
            speed: 1.0,
        })
    }

    /// Samples until `wanted`, which names processes to be read at once, has no sender.
    pub(super) fn run(mut self, wanted: &Receiver<u32>, send: impl Fn(Result<Sample, FileError>)) {
        loop {
            let (started, cpu) = (Instant::now(), cpu_time());
            let is_first = self.counters.is_none();
            send(self.sample(false));
            // Rates are there soon.
            let interval = if is_first {
                self.interval.min(SHORTEST / 10)
            } else {
                self.interval
            };
            let rest = interval.saturating_sub(started.elapsed());
            match wanted.recv_timeout(rest.max((cpu_time() - cpu) * CPU_PARTS)) {
                Ok(pid) => drop(self.wanted.insert(pid)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.wanted.extend(wanted.try_iter());
        }
    }

    /// A sample; of a `whole` one every process is read.
    pub(super) fn sample(&mut self, whole: bool) -> Result<Sample, FileError> {
        let (started, cpu) = (Instant::now(), cpu_time());
        self.processes()?;
        let worked = (cpu_time() - cpu).as_secs_f64();
        let speed = worked / started.elapsed().as_secs_f64().max(1e-6);
        self.speed = speed.clamp(SLOWEST, 1.0);
        self.glance(whole);
        let known = self.known.values();
        let count = |is: fn(&State) -> bool| known.clone().filter(|known| is(&known.state)).count();
        Ok(Sample {
            hidden: count(|state| matches!(state, State::Denied)),
            held_back: count(|state| {
                matches!(
                    state,
                    State::Read {
                        is_held_back: true,
                        ..
                    }
                )
            }),
            processes: known.map(|known| known.process.clone()).collect(),
            host: self.host(),
        })
    }

    /// Reads all status files. Processes that end meanwhile are left out.
    fn processes(&mut self) -> Result<(), FileError> {
        let pids = task::all(&self.root)?;
        let there: HashSet<_> = pids.iter().copied().collect();
        self.without_memory.retain(|pid| there.contains(pid));
        let mut before = std::mem::take(&mut self.known);
        let mut new = Vec::new();
        for pid in pids {
            if self.without_memory.contains(&pid) {
                continue;
            }
            let Ok(read) = task::named_memory(&self.root, pid) else {
                continue;
            };
            let Some((name, memory)) = read else {
                self.without_memory.insert(pid);
                continue;
            };
            let mut known = match before.remove(&pid) {
                Some(known) if known.process.name == name => known,
                _ if name.as_bytes() == reaper::NAME.to_bytes() && is_reaper(&self.root, pid) => {
                    // Its memory is its program's.
                    self.without_memory.insert(pid);
                    continue;
                }
                _ => {
                    new.push(pid);
                    self.new_process(pid, name, memory.uid)
                }
            };
            known.samples += 1;
            known.process.memory = memory;
            self.known.insert(pid, known);
        }
        for (pid, arguments) in new.iter().zip(task::arguments_of_each(&self.root, &new)) {
            if let Some(known) = self.known.get_mut(pid) {
                known.process.command = arguments.join(" ").replace(char::is_control, " ");
            }
        }
        Ok(())
    }

    fn new_process(&self, pid: u32, name: String, uid: u32) -> Known {
        let user = self.users.get(&uid).cloned();
        Known {
            process: Process {
                pid,
                name,
                user: user.unwrap_or_else(|| uid.to_string()),
                group: cgroup::path(&self.root, pid).unwrap_or_else(|| String::from("/")),
                command: String::new(),
                memory: task::Memory::default(),
                glance: None,
            },
            samples: 0,
            state: State::Unread,
        }
    }

    /// Looks closely at the processes whose time it is, the largest first.
    fn glance(&mut self, whole: bool) {
        let now = Instant::now();
        let root_of = |known: &Known| match known.state {
            State::Read { cost, .. } => cost.as_secs_f64().sqrt(),
            State::Unread | State::Denied => 0.0,
        };
        let roots: f64 = self.known.values().map(root_of).sum();
        let (is_first, block) = (self.counters.is_none(), thp::pmd_size(&self.root));
        let block = block.map_or(0, |size| size.bytes());
        let mut due = Vec::new();
        for (pid, known) in &mut self.known {
            let now_there = candidate(&known.process.memory);
            if now_there.0 < block {
                // No huge page fits in.
                known.process.glance = Some(Glance::default());
                continue;
            }
            let is_due = match known.state {
                _ if whole || self.wanted.contains(pid) => true,
                // Not those that come and go.
                State::Unread => is_first || known.samples > 1,
                State::Denied => false,
                State::Read { at, candidate, .. } => {
                    // The sum of cost/period over all processes is SHARE.
                    let period = Duration::from_secs_f64(root_of(known) * roots / SHARE);
                    let has_changed = now_there.0.abs_diff(candidate.0) > candidate.0 / 8;
                    let period = if has_changed { period / 8 } else { period };
                    now.duration_since(at) >= period.max(SHORTEST)
                }
            };
            if is_due {
                due.push((*pid, now_there));
            }
        }
        due.sort_by_key(|(pid, bytes)| (!self.wanted.contains(pid), std::cmp::Reverse(*bytes)));
        let most = if is_first {
            FIRST
        } else {
            self.interval.mul_f64(MOST)
        };
        let mut due = due.as_slice();
        while let Some((_, first)) = due.first()
            && (whole || now.elapsed().mul_f64(self.speed) < most)
        {
            let count = if *first >= LARGE {
                1
            } else {
                TOGETHER.min(due.len())
            };
            let (batch, rest) = due.split_at(count);
            due = rest;
            self.look(batch);
        }
        self.wanted.clear();
    }

    fn look(&mut self, batch: &[(u32, Bytes)]) {
        let at = Instant::now();
        let pids: Vec<_> = batch.iter().map(|(pid, _)| *pid).collect();
        let glances = self.glances.look(&pids);
        let cost = at.elapsed().mul_f64(self.speed) / u32::try_from(batch.len()).unwrap_or(1);
        for ((pid, candidate), glance) in batch.iter().zip(glances) {
            let Some(known) = self.known.get_mut(pid) else {
                continue;
            };
            let is_held_back = glance.as_ref().is_err_and(FileError::is_held_back);
            known.state = match &glance {
                Err(error) if error.is_denied() => State::Denied,
                _ => State::Read {
                    at,
                    cost,
                    candidate: *candidate,
                    is_held_back,
                },
            };
            // It may disable THPs for itself, and may have moved to another group.
            let is_disabled = known.process.memory.thp_enabled == Some(false);
            known.process.glance = glance.ok().map(|mut glance| {
                if is_disabled {
                    glance.gain = Bytes(0);
                }
                glance
            });
            if let Some(group) = cgroup::path(&self.root, *pid) {
                known.process.group = group;
            }
        }
    }

    fn host(&mut self) -> Host {
        let (root, mut missing) = (&self.root, Vec::new());
        let m = &mut missing;
        let memory = Missing::or_default(Memory::read(root), "memory", m);
        let pools = Missing::or_default(hugetlb::pools(root), "pools", m);
        let thp = Missing::or_default(Thp::read(root), "THP", m);
        let zones = Missing::or_default(Zone::read_all(root), "free blocks", m);
        let now = Counters {
            at: Instant::now(),
            events: Missing::or_default(Events::read(root), "counters", m),
            pressure: Missing::or_default(pressure::memory(root), "pressure", m),
            thp: thp.clone(),
        };
        let (base, pmd) = (base_page(root), thp::pmd_size(root).ok());
        let huge = |zone: &Zone| Some(zone.whole(pmd?, base)?.bytes(pmd?));
        let huge: Vec<_> = zones.iter().filter_map(huge).collect();
        // A sample that was asked for comes soon after another.
        let is_due = |before: &Counters| now.at.duration_since(before.at) >= self.interval / 4;
        if self.counters.as_ref().is_none_or(is_due) {
            self.rates = self.counters.as_ref().map(|before| rates(before, &now));
            self.counters = Some(now);
        }
        Host {
            memory,
            pools: pools.unwrap_or_default(),
            pmd,
            thp,
            free: zones.iter().map(|zone| zone.free(base)).sum(),
            free_huge: (!huge.is_empty()).then(|| huge.into_iter().sum()),
            zones,
            rates: self.rates.clone(),
            missing,
        }
    }
}

/// The counters of /proc/vmstat that have to do with huge pages.
fn is_ours(name: &str) -> bool {
    let prefixes = ["thp_", "compact_", "htlb_"];
    let names = [
        "pgfault",
        "pgmajfault",
        "pgmigrate_success",
        "pgmigrate_fail",
        "pswpin",
        "pswpout",
    ];
    prefixes.iter().any(|prefix| name.starts_with(prefix)) || names.contains(&name)
}

fn rates(before: &Counters, now: &Counters) -> Rates {
    let seconds = now.at.duration_since(before.at).as_secs_f64().max(1e-3);
    let rates = |before: &BTreeMap<String, u64>, now: &BTreeMap<String, u64>| {
        let rate = |(name, now): (&String, &u64)| {
            let change = now.saturating_sub(*before.get(name)?);
            Some((name.clone(), change as f64 / seconds))
        };
        now.iter().filter_map(rate).collect::<BTreeMap<_, _>>()
    };
    let mut events = rates(&before.events.0, &now.events.0);
    events.retain(|name, _| is_ours(name));
    let sizes = now.thp.iter().flat_map(|thp| &thp.sizes);
    let folios = sizes.filter_map(|(size, control)| {
        let before = before.thp.as_ref()?.sizes.get(size)?;
        Some((*size, rates(&before.stats, &control.stats)))
    });
    let share =
        |before: Duration, now: Duration| now.saturating_sub(before).as_secs_f64() / seconds;
    Rates {
        seconds,
        events,
        folios: folios.collect(),
        stall: before.pressure.zip(now.pressure).map(|(before, now)| {
            let (some, full) = (share(before.some, now.some), share(before.full, now.full));
            (some.min(1.0), full.min(1.0))
        }),
    }
}
