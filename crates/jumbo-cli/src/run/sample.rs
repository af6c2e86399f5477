//! Looking at the program while it runs: [`Sampler`].
//!
//! A *look* reads how much anonymous memory each process of the program holds; a *sample* walks
//! their smaps, when there is clearly more than at the largest sample so far; and a few times
//! afterwards, while there is as much: memory becomes huge after it has grown. Both are rationed by
//! what they cost, so that a program is not slowed down by being watched.
//!
//! Memory that several processes map is counted for each, as their resident sizes do.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::process::tree;
use jumbo_host::kernel::{Root, task};
use jumbo_host::status::process::Observer;
use jumbo_host::status::{Kind, Usage};
use jumbo_inside::ledger::Ledger;
use jumbo_inside::reaper;
use serde::Serialize;

/// Looks come no closer, and no further apart.
const INTERVAL: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(200));
/// A pause is this many times what was done before it: 1 % of a CPU for looks, 2 % for samples, and
/// 5 % for each in the first second, so that short programs are seen near their peak.
const PAUSE_AFTER_LOOK: u32 = 100;
const PAUSE_AFTER_SAMPLE: u32 = 50;
const EARLY_PAUSE: u32 = 20;
const EARLY: Duration = Duration::from_secs(1);
/// A sample is worth it when memory has grown by one part in so many, and by so much.
const GROWTH: u64 = 50;
const LEAST_GROWTH: u64 = 64 << 10;
/// The pauses between the samples of memory that has stopped growing: the first, and from where on there is no other.
const SETTLE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(8));

/// The moment of the largest heap.
#[derive(Debug)]
pub(super) struct Peak {
    /// Since the start.
    pub(super) at: Duration,
    pub(super) usage: Usage,
    pub(super) processes: Vec<Process>,
}

/// One process at that moment.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) usage: Usage,
}

/// How the program was looked at.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Sampled {
    /// Walks of the smaps of all processes.
    pub(super) samples: u64,
    /// Looks at the counters.
    pub(super) looks: u64,
    /// The mean time between two looks.
    pub(super) interval_seconds: f64,
    /// When the peak was.
    pub(super) peak_at_seconds: Option<f64>,
    /// The largest resident size of one process in a sample, divided by the kernel's own maximum;
    /// at most 1, though the kernel's counters lag behind its page tables, and leave hugetlb pages
    /// out.
    pub(super) share_of_max_rss: Option<f64>,
    /// The CPU time that looking took.
    pub(super) cost_seconds: f64,
    /// A process may not have THPs.
    #[serde(skip)]
    pub(super) thp_disabled: bool,
    /// Why there were no samples, or not of every process.
    pub(super) trouble: Option<String>,
}

pub(super) struct Sampler<'a> {
    root: &'a Root,
    observer: Option<Observer>,
    ledger: Option<&'a Ledger>,
    started: Instant,
    followed: BTreeSet<u32>,
    slots_seen: usize,
    next_look: Instant,
    next_sample: Instant,
    /// The last sample, and the pause until the next one of as much memory.
    settling: (Instant, Duration),
    largest: Bytes,
    largest_heap: Bytes,
    largest_rss: Bytes,
    cost: Duration,
    peak: Option<Peak>,
    sampled: Sampled,
}

impl<'a> Sampler<'a> {
    /// A sampler of the program whose first process is `pid`.
    pub(super) fn new(root: &'a Root, pid: u32, ledger: Option<&'a Ledger>) -> Self {
        let started = Instant::now();
        let mut sampled = Sampled::default();
        let observer =
            Observer::new(root).map_err(|error| sampled.trouble = Some(error.to_string()));
        Self {
            root,
            observer: observer.ok(),
            ledger,
            started,
            followed: BTreeSet::from([pid]),
            slots_seen: 0,
            next_look: started,
            next_sample: started,
            settling: (started, SETTLE.1),
            largest: Bytes(0),
            largest_heap: Bytes(0),
            largest_rss: Bytes(0),
            cost: Duration::ZERO,
            peak: None,
            sampled,
        }
    }

    /// When [`Sampler::look`] is due.
    pub(super) fn deadline(&self) -> Instant {
        self.next_look
    }

    /// Looks, if it is time, and samples, if that is worth it.
    pub(super) fn look(&mut self) {
        if Instant::now() < self.next_look {
            return;
        }
        let start = cpu_time();
        let resident = self.follow();
        let total: Bytes = resident.values().copied().sum();
        self.sampled.looks += 1;
        let (looked, now) = (cpu_time(), Instant::now());
        let pause = (looked - start) * self.times(PAUSE_AFTER_LOOK);
        self.next_look = now + pause.clamp(INTERVAL.0, INTERVAL.1);

        let enough = self.largest.0 + (self.largest.0 / GROWTH).max(LEAST_GROWTH);
        let has_grown = total.0 >= enough;
        let (last, settle) = self.settling;
        let has_settled =
            settle < SETTLE.1 && now >= last + settle && is_about(total, self.largest);
        if (has_grown || has_settled) && now >= self.next_sample {
            self.sample(resident);
            let settle = if has_grown { SETTLE.0 } else { settle * 2 };
            self.settling = (Instant::now(), settle);
            let pause = (cpu_time() - looked) * self.times(PAUSE_AFTER_SAMPLE);
            self.next_sample = Instant::now() + pause;
        }
        self.cost += cpu_time() - start;
    }

    fn times(&self, later: u32) -> u32 {
        match self.started.elapsed() < EARLY {
            true => EARLY_PAUSE,
            false => later,
        }
    }

    /// Brings the set of processes up to date and returns those with memory of their own, and how
    /// much of it is resident and anonymous.
    fn follow(&mut self) -> BTreeMap<u32, Bytes> {
        // Those that daemonized have left the tree, but they are in the ledger. What stands there
        // is a process ID in the process's own namespace, so it has to prove that it has the
        // ledger.
        let slots = self.ledger.into_iter().flat_map(Ledger::slots);
        for slot in slots.skip(self.slots_seen) {
            self.slots_seen += 1;
            let pid = slot.pid.load(std::sync::atomic::Ordering::Relaxed);
            if !self.followed.contains(&pid) && maps_ledger(self.root, pid) {
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
        // A reaper's memory is its program's, which is there as well.
        let of_reapers = |pid: &u32| {
            task::name(self.root, *pid).is_ok_and(|name| name.as_bytes() == reaper::NAME.to_bytes())
                && (resident.keys()).any(|other| other != pid && share_memory(*pid, *other))
        };
        sharing.extend(resident.keys().copied().filter(of_reapers));
        // They are found again below their parents; the next time their memory may be their own.
        for pid in sharing {
            resident.remove(&pid);
            self.followed.remove(&pid);
        }
        resident
    }

    /// Walks the smaps of these processes, of which a look has told how much anonymous memory each
    /// has.
    fn sample(&mut self, resident: BTreeMap<u32, Bytes>) {
        let Some(observer) = &self.observer else {
            return;
        };
        let at = self.started.elapsed();
        let (mut usage, mut processes) = (Usage::default(), Vec::new());
        // What was there before and after the walk: memory that went meanwhile sets no mark for the
        // next sample.
        let mut seen = Bytes(0);
        for (pid, before) in resident {
            let theirs = match observer.usage(pid) {
                Ok(theirs) => theirs,
                Err(error) => {
                    // What is refused once is refused again: it sets the mark as what was seen.
                    if error.is_denied() {
                        self.sampled.trouble = Some(error.to_string());
                        seen += before;
                    }
                    continue;
                }
            };
            let rss = theirs.0.values().map(|kind| kind.bytes).sum();
            // It is ending, or a reaper that is giving back what its program had.
            if rss == Bytes(0) {
                continue;
            }
            let after = tree::resident_anonymous(self.root, pid).unwrap_or_default();
            seen += before.min(after);
            self.largest_rss = self.largest_rss.max(rss);
            usage.add(&theirs);
            let memory = task::memory(self.root, pid).ok().flatten();
            self.sampled.thp_disabled |=
                memory.and_then(|memory| memory.thp_enabled) == Some(false);
            let name = task::name(self.root, pid).unwrap_or_default();
            processes.push(Process {
                pid,
                name,
                usage: theirs,
            });
        }
        self.largest = self.largest.max(seen);
        // Every process may have gone while it was looked at.
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

    /// The peak, and how it was sampled; `max_rss` is the kernel's figure at the end.
    pub(super) fn finish(self, max_rss: Bytes) -> (Option<Peak>, Sampled) {
        let mut sampled = self.sampled;
        let seconds = self.started.elapsed().as_secs_f64();
        sampled.interval_seconds = seconds / sampled.looks.max(1) as f64;
        sampled.cost_seconds = self.cost.as_secs_f64();
        sampled.peak_at_seconds = self.peak.as_ref().map(|peak| peak.at.as_secs_f64());
        if self.peak.is_none() && sampled.trouble.is_none() {
            sampled.trouble = Some(String::from(
                match self.root.path("proc/self/status").exists() {
                    true => "it ended before it could be looked at",
                    false => "there is no /proc here to look at it in",
                },
            ));
        }
        sampled.share_of_max_rss = (max_rss.0 > 0 && sampled.samples > 0)
            .then(|| (self.largest_rss.0 as f64 / max_rss.0 as f64).min(1.0));
        (self.peak, sampled)
    }
}

/// The calls of a [`Sampler`], made of this process.
pub(super) fn rehearse(root: &Root) {
    let own = std::process::id();
    let mut sampler = Sampler::new(root, own, None);
    sampler.look();
    sampler.sample(BTreeMap::from([(own, Bytes(0))]));
    share_memory(own, own);
}

/// Whether memory is as much as the most that was seen, but for what counts as growth.
fn is_about(bytes: Bytes, most: Bytes) -> bool {
    bytes.0 + (bytes.0 / GROWTH).max(LEAST_GROWTH) >= most.0
}

/// The CPU time this thread has used: what looking costs, without what it waited for.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

fn share_memory(one: u32, other: u32) -> bool {
    tree::shares_memory(one, other) == Some(true)
}

fn maps_ledger(root: &Root, pid: u32) -> bool {
    let maps = root.read(format!("proc/{pid}/maps"));
    maps.is_ok_and(|maps| maps.contains(Ledger::NAME))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A child of vfork(2) may keep its parent's memory for a while, and a reaper does. To kcmp(2)
    /// a thread is as good.
    #[test]
    fn memory_that_two_share_is_counted_once_at_every_look() {
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

    /// A backend that ends between the look and the walk must not hide the next one, which needs
    /// less.
    #[test]
    fn memory_that_went_before_it_was_walked_sets_no_mark() {
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
            (sampler.next_look, sampler.next_sample) = (sampler.started, sampler.started);
            sampler.look();
            sampler.sampled.samples
        };
        assert_eq!(samples(1000), 0);
        let smaps =
            "10000-90000 rw-p 00000000 00:00 0 \nSize: 512 kB\nRss: 512 kB\nAnonymous: 512 kB\n";
        write("proc/7/smaps", smaps);
        assert_eq!(samples(500), 1);
        // No more than the walk saw: not worth another.
        assert_eq!(samples(500), 1);
    }
}
