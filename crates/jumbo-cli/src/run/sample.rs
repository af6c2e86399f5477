//! Measurements of the program while it runs: [`Sampler`].
//!
//! A *check* reads the anonymous resident size of each process. A *sample* reads their smaps: when
//! the total has grown clearly past the largest sample, and a few times after growth has stopped,
//! because memory becomes huge after it has grown. The CPU time of both is bounded, so that the
//! program is not slowed down.
//!
//! Memory that several processes map counts for each, as in their resident sizes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::process::tree;
use jumbo_host::kernel::{Root, task};
use jumbo_host::status::process::Observer;
use jumbo_host::status::{Kind, LIBRARY, Usage};
use jumbo_inside::ledger::Ledger;
use jumbo_inside::reaper;
use serde::Serialize;

const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(2);
const MAX_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Pause after a check or a sample, as a multiple of its CPU time: 1 % of a CPU for checks, 2 % for
/// samples.
const CHECK_PAUSE_FACTOR: u32 = 100;
const SAMPLE_PAUSE_FACTOR: u32 = 50;
/// The same during the first second: 5 % for each, so that short programs are seen near their peak.
const EARLY_PAUSE_FACTOR: u32 = 20;
const EARLY_TIME: Duration = Duration::from_secs(1);
/// Growth that causes a sample: one part in this many of the largest sample, and at least
/// [`MIN_GROWTH_BYTES`].
const GROWTH_PARTS: u64 = 50;
const MIN_GROWTH_BYTES: u64 = 64 << 10;
/// First interval between samples of memory that has stopped growing; it doubles each time, and
/// samples end at [`MAX_SETTLE_INTERVAL`].
const FIRST_SETTLE_INTERVAL: Duration = Duration::from_millis(500);
const MAX_SETTLE_INTERVAL: Duration = Duration::from_secs(8);

/// Memory at the moment of the largest heap.
#[derive(Debug)]
pub(super) struct Peak {
    /// Since the start.
    pub(super) at: Duration,
    pub(super) usage: Usage,
    pub(super) processes: Vec<ProcessSample>,
}

/// Memory of a process in a sample.
#[derive(Debug)]
pub(super) struct ProcessSample {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) usage: Usage,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct SampleStats {
    pub(super) samples: u64,
    /// Number of checks; the name is that of the JSON.
    pub(super) looks: u64,
    /// Mean interval between two checks.
    pub(super) interval_seconds: f64,
    /// Time of the peak since the start.
    pub(super) peak_at_seconds: Option<f64>,
    /// Largest resident size of one process in a sample, divided by the kernel's maximum. Limited
    /// to 1: the kernel's counters lag behind its page tables, and exclude hugetlb pages.
    pub(super) share_of_max_rss: Option<f64>,
    /// CPU time of checks and samples.
    pub(super) cost_seconds: f64,
    /// A process has THP disabled.
    #[serde(skip)]
    pub(super) thp_disabled: bool,
    /// A process has the library loaded. Unknown where one has joined the ledger.
    #[serde(skip)]
    pub(super) is_loaded: bool,
    /// Reason for no samples, or for samples without some process.
    pub(super) trouble: Option<String>,
}

pub(super) struct Sampler<'a> {
    root: &'a Root,
    observer: Option<Observer>,
    ledger: Option<&'a Ledger>,
    started: Instant,
    followed: BTreeSet<u32>,
    slots_seen: usize,
    next_check: Instant,
    next_sample: Instant,
    /// Time of the last sample, and the interval until the next one of as much memory.
    settling: (Instant, Duration),
    largest: Bytes,
    largest_heap: Bytes,
    largest_rss: Bytes,
    cost: Duration,
    peak: Option<Peak>,
    sampled: SampleStats,
}

impl<'a> Sampler<'a> {
    /// A sampler of the program whose first process is `pid`.
    pub(super) fn new(root: &'a Root, pid: u32, ledger: Option<&'a Ledger>) -> Self {
        let started = Instant::now();
        let mut sampled = SampleStats::default();
        let observer =
            Observer::new(root).map_err(|error| sampled.trouble = Some(error.to_string()));
        Self {
            root,
            observer: observer.ok(),
            ledger,
            started,
            followed: BTreeSet::from([pid]),
            slots_seen: 0,
            next_check: started,
            next_sample: started,
            settling: (started, MAX_SETTLE_INTERVAL),
            largest: Bytes(0),
            largest_heap: Bytes(0),
            largest_rss: Bytes(0),
            cost: Duration::ZERO,
            peak: None,
            sampled,
        }
    }

    /// Time of the next [`Sampler::check`].
    pub(super) fn deadline(&self) -> Instant {
        self.next_check
    }

    /// Checks the processes if the interval has passed, and takes a sample if memory has changed.
    pub(super) fn check(&mut self) {
        if Instant::now() < self.next_check {
            return;
        }
        let start = cpu_time();
        let resident = self.follow();
        let total: Bytes = resident.values().copied().sum();
        self.sampled.looks += 1;
        let (checked, now) = (cpu_time(), Instant::now());
        let pause = (checked - start) * self.pause_factor(CHECK_PAUSE_FACTOR);
        self.next_check = now + pause.clamp(MIN_CHECK_INTERVAL, MAX_CHECK_INTERVAL);

        let has_grown = total.0 >= self.largest.0 + growth(self.largest);
        let (last, settle) = self.settling;
        let has_settled =
            settle < MAX_SETTLE_INTERVAL && now >= last + settle && is_about(total, self.largest);
        if (has_grown || has_settled) && now >= self.next_sample {
            self.sample(resident);
            let settle = if has_grown {
                FIRST_SETTLE_INTERVAL
            } else {
                settle * 2
            };
            self.settling = (Instant::now(), settle);
            let pause = (cpu_time() - checked) * self.pause_factor(SAMPLE_PAUSE_FACTOR);
            self.next_sample = Instant::now() + pause;
        }
        self.cost += cpu_time() - start;
    }

    fn pause_factor(&self, later: u32) -> u32 {
        match self.started.elapsed() < EARLY_TIME {
            true => EARLY_PAUSE_FACTOR,
            false => later,
        }
    }

    /// Updates the set of processes. Returns those with memory of their own, with their anonymous
    /// resident size.
    fn follow(&mut self) -> BTreeMap<u32, Bytes> {
        // Daemons have left the process tree, but are in the ledger. Its process IDs are those of
        // the process's own namespace, so the process must also map the ledger.
        let slots = self.ledger.into_iter().flat_map(Ledger::slots);
        for slot in slots.skip(self.slots_seen) {
            self.slots_seen += 1;
            let pid = slot.pid.load(std::sync::atomic::Ordering::Relaxed);
            if !self.followed.contains(&pid) && maps(self.root, pid, Ledger::NAME) {
                self.followed.insert(pid);
            }
        }
        let (mut resident, mut sharing) = (BTreeMap::new(), BTreeSet::new());
        let mut open: Vec<(Option<u32>, u32)> =
            self.followed.iter().map(|pid| (None, *pid)).collect();
        self.followed.clear();
        while let Some((parent, pid)) = open.pop() {
            if self.followed.contains(&pid) {
                continue;
            }
            let Ok(anonymous) = tree::resident_anonymous(self.root, pid) else {
                continue;
            };
            self.followed.insert(pid);
            let children = tree::children(self.root, pid);
            open.extend(children.into_iter().map(|child| (Some(pid), child)));
            match parent.is_some_and(|parent| share_memory(parent, pid)) {
                true => drop(sharing.insert(pid)),
                false => drop(resident.insert(pid, anonymous)),
            }
        }
        // A reaper shares the memory of its program, which is counted already.
        let of_reapers = |pid: &u32| {
            task::name(self.root, *pid).is_ok_and(|name| name.as_bytes() == reaper::NAME.to_bytes())
                && (resident.keys()).any(|other| other != pid && share_memory(*pid, *other))
        };
        sharing.extend(resident.keys().copied().filter(of_reapers));
        // The next check finds them below their parents; their memory may be their own by then.
        for pid in sharing {
            resident.remove(&pid);
            self.followed.remove(&pid);
        }
        resident
    }

    /// Reads the smaps of these processes; `resident` has their anonymous size of the last check.
    fn sample(&mut self, resident: BTreeMap<u32, Bytes>) {
        let Some(observer) = &self.observer else {
            return;
        };
        let at = self.started.elapsed();
        let (mut usage, mut processes) = (Usage::default(), Vec::new());
        // The smaller of the sizes before and after: memory that was freed meanwhile must not raise
        // the threshold of the next sample.
        let mut sampled = Bytes(0);
        for (pid, before) in resident {
            let theirs = match observer.usage(pid) {
                Ok(theirs) => theirs,
                Err(error) => {
                    // A refused process is refused again; without it each check would sample.
                    if error.is_denied() {
                        self.sampled.trouble = Some(error.to_string());
                        sampled += before;
                    }
                    continue;
                }
            };
            let rss = theirs.0.values().map(|kind| kind.bytes).sum();
            // The process is ending, or it is a reaper that frees the memory of its program.
            if rss == Bytes(0) {
                continue;
            }
            let after = tree::resident_anonymous(self.root, pid).unwrap_or_default();
            sampled += before.min(after);
            self.largest_rss = self.largest_rss.max(rss);
            usage.add(&theirs);
            let memory = task::memory(self.root, pid).ok().flatten();
            self.sampled.thp_disabled |=
                memory.and_then(|memory| memory.thp_enabled) == Some(false);
            if self.slots_seen == 0 {
                self.sampled.is_loaded |= maps(self.root, pid, LIBRARY);
            }
            let name = task::name(self.root, pid).unwrap_or_default();
            processes.push(ProcessSample {
                pid,
                name,
                usage: theirs,
            });
        }
        self.largest = self.largest.max(sampled);
        // All processes may have ended meanwhile.
        if processes.is_empty() {
            return;
        }
        self.sampled.samples += 1;
        let heap = usage.kind(Kind::Heap).bytes;
        self.largest_heap = self.largest_heap.max(heap);
        if is_about(heap, self.largest_heap) {
            self.peak = Some(Peak {
                at,
                usage,
                processes,
            });
        }
    }

    /// Returns the peak and the statistics; `max_rss` is the kernel's value at the end.
    pub(super) fn finish(self, max_rss: Bytes) -> (Option<Peak>, SampleStats) {
        let mut sampled = self.sampled;
        let seconds = self.started.elapsed().as_secs_f64();
        sampled.interval_seconds = seconds / sampled.looks.max(1) as f64;
        sampled.cost_seconds = self.cost.as_secs_f64();
        sampled.peak_at_seconds = self.peak.as_ref().map(|peak| peak.at.as_secs_f64());
        if self.peak.is_none() && sampled.trouble.is_none() {
            sampled.trouble = Some(String::from(
                match self.root.path("proc/self/status").exists() {
                    true => "it ended before the first sample",
                    false => "there is no /proc here to look at it in",
                },
            ));
        }
        sampled.share_of_max_rss = (max_rss.0 > 0 && sampled.samples > 0)
            .then(|| (self.largest_rss.0 as f64 / max_rss.0 as f64).min(1.0));
        (self.peak, sampled)
    }
}

/// Makes the system calls of a [`Sampler`] on this process.
pub(super) fn rehearse(root: &Root) {
    let own = std::process::id();
    let mut sampler = Sampler::new(root, own, None);
    sampler.check();
    sampler.sample(BTreeMap::from([(own, Bytes(0))]));
    share_memory(own, own);
}

/// Difference from `bytes` that counts as growth.
fn growth(bytes: Bytes) -> u64 {
    (bytes.0 / GROWTH_PARTS).max(MIN_GROWTH_BYTES)
}

/// Reports whether `bytes` is within one growth of the maximum.
fn is_about(bytes: Bytes, max: Bytes) -> bool {
    bytes.0 + growth(bytes) >= max.0
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

fn share_memory(one: u32, other: u32) -> bool {
    tree::shares_memory(one, other) == Some(true)
}

fn maps(root: &Root, pid: u32, name: &str) -> bool {
    let maps = root.read(format!("proc/{pid}/maps"));
    maps.is_ok_and(|maps| maps.contains(name))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A child of vfork(2) and a reaper share their parent's memory. For kcmp(2) a thread does too.
    #[test]
    fn shared_memory_is_counted_once_at_every_check() {
        let (say, tid) = mpsc::channel();
        let (end, wait) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let own = rustix::thread::gettid();
            say.send(own.as_raw_nonzero().get().cast_unsigned())
                .unwrap();
            let _ = wait.recv();
        });
        let (own, other) = (std::process::id(), tid.recv().unwrap());
        let folder = tempfile::tempdir().unwrap();
        for (pid, child) in [(own, other.to_string()), (other, String::new())] {
            let task = folder.path().join(format!("proc/{pid}/task/{pid}"));
            std::fs::create_dir_all(&task).unwrap();
            std::fs::write(task.join("children"), child).unwrap();
            let statm = folder.path().join(format!("proc/{pid}/statm"));
            std::fs::write(statm, "9 9 1 0 0 0 0").unwrap();
        }
        let root = Root::at(folder.path());
        let mut sampler = Sampler::new(&root, own, None);
        for _ in 0..3 {
            assert_eq!(sampler.follow().into_keys().collect::<Vec<_>>(), [own]);
        }
        drop(end);
        thread.join().unwrap();
    }

    /// A backend that ends between the check and the sample must not hide the next, smaller one.
    #[test]
    fn memory_that_was_freed_before_its_sample_sets_no_threshold() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "sys/kernel/mm/transparent_hugepage/hpage_pmd_size",
            "2097152\n",
        );
        write("proc/7/task/7/children", "");
        let root = Root::at(folder.path());
        let mut sampler = Sampler::new(&root, 7, None);
        let mut samples = |resident: u64| {
            write("proc/7/statm", &format!("{resident} {resident} 0 0 0 0 0"));
            (sampler.next_check, sampler.next_sample) = (sampler.started, sampler.started);
            sampler.check();
            sampler.sampled.samples
        };
        assert_eq!(samples(1000), 0);
        let smaps =
            "10000-90000 rw-p 00000000 00:00 0 \nSize: 512 kB\nRss: 512 kB\nAnonymous: 512 kB\n";
        write("proc/7/smaps", smaps);
        assert_eq!(samples(500), 1);
        // As much as in the last sample: no other sample.
        assert_eq!(samples(500), 1);
    }
}
