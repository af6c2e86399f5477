//! Samples of the host and of all processes: [`Collector`], for a thread of its own.
//!
//! Each sample reads all status files, but few smaps: a read of smaps holds the target's mmap lock
//! for reading while it walks the page tables. Each process has its own read interval, longer for
//! costly reads, so that all reads of smaps together take [`SMAPS_CPU_SHARE`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use jumbo::units::{Bytes, PageSize};
use jumbo_host::kernel::hugetlb::{self, Pool};
use jumbo_host::kernel::memory::{Events, Memory, Zone};
use jumbo_host::kernel::pressure::{self, Pressure};
use jumbo_host::kernel::thp::{self, Thp};
use jumbo_host::kernel::{FileError, Root, base_page, cgroup, task};
use jumbo_host::status::{Glance, Glances, Missing, is_sibling};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// Share of a CPU for reads of smaps.
const SMAPS_CPU_SHARE: f64 = 0.005;
/// Maximum share of an interval that one sample spends on smaps.
const MAX_SMAPS_SHARE: f64 = 0.02;
/// Maximum time that the first sample spends on smaps.
const FIRST_SMAPS_TIME: Duration = Duration::from_millis(100);
/// Minimum interval between two reads of one process's smaps.
const MIN_READ_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of processes that one child reads; it reads a process of [`LARGE_PROCESS`] alone.
const MAX_BATCH: usize = 16;
const LARGE_PROCESS: Bytes = Bytes(1 << 30);
/// Pause after a sample, as a multiple of its CPU time, whatever the interval.
const PAUSE_FACTOR: u32 = 20;
/// Lower bound of [`Collector::speed`].
const MIN_SPEED: f64 = 0.05;

fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct ProcessRow {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) user: String,
    pub(super) group: String,
    pub(super) command: String,
    #[serde(flatten)]
    pub(super) memory: task::Memory,
    /// `None` if its smaps are not read yet, or not readable.
    pub(super) glance: Option<Glance>,
}

/// Memory of the host, and rates of its counters.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct HostSample {
    pub(super) memory: Memory,
    pub(super) pools: Vec<Pool>,
    pub(super) pmd: Option<PageSize>,
    pub(super) thp: Option<Thp>,
    pub(super) zones: Vec<Zone>,
    /// Free memory.
    pub(super) free: Bytes,
    /// Free memory in blocks of at least the PMD size; `None` if the kernel's blocks are smaller.
    pub(super) free_huge: Option<Bytes>,
    pub(super) rates: Option<Rates>,
    pub(super) missing: Vec<Missing>,
}

/// Changes per second between two samples.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Rates {
    pub(super) seconds: f64,
    /// Counters of /proc/vmstat, by the kernel's names.
    pub(super) events: BTreeMap<String, f64>,
    /// Counters of `hugepages-*kB/stats`.
    pub(super) folios: BTreeMap<PageSize, BTreeMap<String, f64>>,
    /// Shares of time in which some, and all, tasks waited for memory (PSI).
    pub(super) stall: Option<(f64, f64)>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Sample {
    pub(super) host: HostSample,
    pub(super) processes: Vec<ProcessRow>,
    /// Number of processes that this user may not read.
    pub(super) hidden: usize,
    /// Number of processes whose mappings could not be read in time.
    pub(super) held_back: usize,
}

/// State of a process that is kept between samples.
struct TrackedProcess {
    process: ProcessRow,
    /// Number of samples with this process.
    samples: u32,
    state: ReadState,
}

#[derive(Clone, Copy)]
enum ReadState {
    Unread,
    Denied,
    Read {
        at: Instant,
        cost: Duration,
        candidate: Bytes,
        is_held_back: bool,
    },
}

struct CounterSnapshot {
    at: Instant,
    events: Events,
    pressure: Option<Pressure>,
    thp: Option<Thp>,
}

pub(super) struct Collector {
    root: Root,
    glances: Glances,
    interval: Duration,
    known: HashMap<u32, TrackedProcess>,
    /// Threads of the kernel, which are not read again.
    kernel_threads: HashSet<u32>,
    users: HashMap<u32, String>,
    /// Processes to be read next, at any cost.
    wanted: BTreeSet<u32>,
    counters: Option<CounterSnapshot>,
    rates: Option<Rates>,
    /// CPU time of this thread divided by elapsed time: on a busy host a read costs less CPU time
    /// than it takes.
    speed: f64,
}

/// Memory that can be huge.
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
            kernel_threads: HashSet::new(),
            wanted: BTreeSet::new(),
            counters: None,
            rates: None,
            speed: 1.0,
        })
    }

    /// Takes samples until `wanted` has no sender; it receives processes to be read at once.
    pub(super) fn run(mut self, wanted: &Receiver<u32>, send: impl Fn(Result<Sample, FileError>)) {
        loop {
            let (started, cpu) = (Instant::now(), cpu_time());
            let is_first = self.counters.is_none();
            send(self.sample(false));
            // The first rates come soon.
            let interval = if is_first {
                self.interval.min(MIN_READ_INTERVAL / 10)
            } else {
                self.interval
            };
            let rest = interval.saturating_sub(started.elapsed());
            match wanted.recv_timeout(rest.max((cpu_time() - cpu) * PAUSE_FACTOR)) {
                Ok(pid) => drop(self.wanted.insert(pid)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.wanted.extend(wanted.try_iter());
        }
    }

    /// Takes a sample; a `whole` one reads every process.
    pub(super) fn sample(&mut self, whole: bool) -> Result<Sample, FileError> {
        let (started, cpu) = (Instant::now(), cpu_time());
        self.processes()?;
        let worked = (cpu_time() - cpu).as_secs_f64();
        let speed = worked / started.elapsed().as_secs_f64().max(1e-6);
        self.speed = speed.clamp(MIN_SPEED, 1.0);
        self.glance(whole);
        let known = self.known.values();
        let count =
            |is: fn(&ReadState) -> bool| known.clone().filter(|known| is(&known.state)).count();
        Ok(Sample {
            hidden: count(|state| matches!(state, ReadState::Denied)),
            held_back: count(|state| {
                matches!(
                    state,
                    ReadState::Read {
                        is_held_back: true,
                        ..
                    }
                )
            }),
            processes: known.map(|known| known.process.clone()).collect(),
            host: self.host(),
        })
    }

    /// Reads all status files, skipping processes that end meanwhile.
    fn processes(&mut self) -> Result<(), FileError> {
        let pids = task::all(&self.root)?;
        let there: HashSet<_> = pids.iter().copied().collect();
        self.kernel_threads.retain(|pid| there.contains(pid));
        let mut before = std::mem::take(&mut self.known);
        let mut new = Vec::new();
        for pid in pids {
            if self.kernel_threads.contains(&pid) {
                continue;
            }
            let Ok(read) = task::named_memory(&self.root, pid) else {
                continue;
            };
            let Some((name, memory)) = read else {
                if task::is_kernel(&self.root, pid) {
                    self.kernel_threads.insert(pid);
                }
                continue;
            };
            let mut known = match before.remove(&pid) {
                Some(known) if known.process.name == name => known,
                // It shares the memory of its program.
                _ if is_sibling(&self.root, pid) => continue,
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

    fn new_process(&self, pid: u32, name: String, uid: u32) -> TrackedProcess {
        let user = self.users.get(&uid).cloned();
        TrackedProcess {
            process: ProcessRow {
                pid,
                name,
                user: user.unwrap_or_else(|| uid.to_string()),
                group: cgroup::path(&self.root, pid).unwrap_or_else(|| String::from("/")),
                command: String::new(),
                memory: task::Memory::default(),
                glance: None,
            },
            samples: 0,
            state: ReadState::Unread,
        }
    }

    /// Reads the smaps of the processes that are due, the largest first.
    fn glance(&mut self, whole: bool) {
        let now = Instant::now();
        let root_of = |known: &TrackedProcess| match known.state {
            ReadState::Read { cost, .. } => cost.as_secs_f64().sqrt(),
            ReadState::Unread | ReadState::Denied => 0.0,
        };
        let roots: f64 = self.known.values().map(root_of).sum();
        let (is_first, block) = (self.counters.is_none(), thp::pmd_size(&self.root));
        let block = block.map_or(0, |size| size.bytes());
        let mut due = Vec::new();
        for (pid, known) in &mut self.known {
            let now_there = candidate(&known.process.memory);
            if now_there.0 < block {
                // Too small for a huge page.
                known.process.glance = Some(Glance::default());
                continue;
            }
            let is_due = match known.state {
                _ if whole || self.wanted.contains(pid) => true,
                // Short-lived processes are not read.
                ReadState::Unread => is_first || known.samples > 1,
                ReadState::Denied => false,
                ReadState::Read { at, candidate, .. } => {
                    // The sum of cost/period over all processes is SMAPS_CPU_SHARE.
                    let period = Duration::from_secs_f64(root_of(known) * roots / SMAPS_CPU_SHARE);
                    let has_changed = now_there.0.abs_diff(candidate.0) > candidate.0 / 8;
                    let period = if has_changed { period / 8 } else { period };
                    now.duration_since(at) >= period.max(MIN_READ_INTERVAL)
                }
            };
            if is_due {
                due.push((*pid, now_there));
            }
        }
        due.sort_by_key(|(pid, bytes)| (!self.wanted.contains(pid), std::cmp::Reverse(*bytes)));
        let max_time = if is_first {
            FIRST_SMAPS_TIME
        } else {
            self.interval.mul_f64(MAX_SMAPS_SHARE)
        };
        let mut due = due.as_slice();
        while let Some((_, first)) = due.first()
            && (whole || now.elapsed().mul_f64(self.speed) < max_time)
        {
            let count = if *first >= LARGE_PROCESS {
                1
            } else {
                MAX_BATCH.min(due.len())
            };
            let (batch, rest) = due.split_at(count);
            due = rest;
            self.read_batch(batch);
        }
        self.wanted.clear();
    }

    fn read_batch(&mut self, batch: &[(u32, Bytes)]) {
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
                Err(error) if error.is_denied() => ReadState::Denied,
                _ => ReadState::Read {
                    at,
                    cost,
                    candidate: *candidate,
                    is_held_back,
                },
            };
            let is_disabled = known.process.memory.thp_enabled == Some(false);
            known.process.glance = glance.ok().map(|mut glance| {
                if is_disabled {
                    glance.gain = Bytes(0);
                }
                glance
            });
            // The process may have moved to another group.
            if let Some(group) = cgroup::path(&self.root, *pid) {
                known.process.group = group;
            }
        }
    }

    fn host(&mut self) -> HostSample {
        let (root, mut missing) = (&self.root, Vec::new());
        let m = &mut missing;
        let memory = Missing::or_default(Memory::read(root), "memory", m);
        let pools = Missing::or_default(hugetlb::pools(root), "pools", m);
        let thp = Missing::or_default(Thp::read(root), "THP", m);
        let zones = Missing::or_default(Zone::read_all(root), "free blocks", m);
        let now = CounterSnapshot {
            at: Instant::now(),
            events: Missing::or_default(Events::read(root), "counters", m),
            pressure: Missing::or_default(pressure::memory(root), "pressure", m),
            thp: thp.clone(),
        };
        let (base, pmd) = (base_page(root), thp::pmd_size(root).ok());
        let huge = |zone: &Zone| Some(zone.whole(pmd?, base)?.bytes(pmd?));
        let huge: Vec<_> = zones.iter().filter_map(huge).collect();
        // A requested sample may follow soon after another: too short for rates.
        let is_due =
            |before: &CounterSnapshot| now.at.duration_since(before.at) >= self.interval / 4;
        if self.counters.as_ref().is_none_or(is_due) {
            self.rates = self.counters.as_ref().map(|before| rates(before, &now));
            self.counters = Some(now);
        }
        HostSample {
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

/// Reports whether a counter of /proc/vmstat concerns huge pages.
fn is_relevant(name: &str) -> bool {
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

fn rates(before: &CounterSnapshot, now: &CounterSnapshot) -> Rates {
    let seconds = now.at.duration_since(before.at).as_secs_f64().max(1e-3);
    let rates = |before: &BTreeMap<String, u64>, now: &BTreeMap<String, u64>| {
        let rate = |(name, now): (&String, &u64)| {
            let change = now.saturating_sub(*before.get(name)?);
            Some((name.clone(), change as f64 / seconds))
        };
        now.iter().filter_map(rate).collect::<BTreeMap<_, _>>()
    };
    let mut events = rates(&before.events.0, &now.events.0);
    events.retain(|name, _| is_relevant(name));
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
