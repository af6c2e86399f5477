//! The real [`Handover`] on modelled words, under shuttle, which searches its interleavings.
//!
//! The tests search for bytes freed twice or never, jobs closed too early, owners notified too
//! early, and lost wake-ups, which shuttle reports as deadlocks.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::collections::HashMap;

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::atomic::AtomicU32;
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

use super::batch::{Batch, FreeError, FreeRange, Operation};
use super::handover::{Executor, Handover};
use super::queue::{Piece, Terms, Wakeup};
use crate::sync::{Platform, Word};

const PAGE_BYTES: usize = 4096;
const NO_TIMEOUT: Duration = Duration::MAX;
const END_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Model;

/// Model of a futex.
#[derive(Debug, Default)]
pub(crate) struct Number {
    value: AtomicU32,
    sleepers: Mutex<()>,
    condition: Condvar,
}

impl Platform for Model {
    const MAX_SLEEP: Option<Duration> = None;
    type Word = Number;
    const MAX_SPINS: u32 = 0;

    fn me() -> u32 {
        u32::try_from(usize::from(shuttle::current::me()) + 1).unwrap() * 2
    }
}

impl Word for Number {
    fn load(&self, order: Ordering) -> u32 {
        self.value.load(order)
    }

    fn compare_exchange(&self, current: u32, new: u32, success: Ordering) -> Result<u32, u32> {
        let failure = Ordering::Relaxed;
        self.value.compare_exchange(current, new, success, failure)
    }

    fn swap(&self, new: u32, order: Ordering) -> u32 {
        self.value.swap(new, order)
    }

    fn fetch_add(&self, more: u32, order: Ordering) -> u32 {
        self.value.fetch_add(more, order)
    }

    fn wait(&self, expected: u32, time: Option<Duration>) -> bool {
        if time.is_some_and(|time| time < END_TIMEOUT) && thread_rng().gen_bool(0.5) {
            return true;
        }
        let guard = self.sleepers.lock().unwrap();
        if self.value.load(Ordering::Relaxed) == expected {
            drop(self.condition.wait(guard).unwrap());
        }
        false
    }

    fn wake(&self, count: u32) {
        let _guard = self.sleepers.lock().unwrap();
        for _ in 0..count.min(16) {
            self.condition.notify_one();
        }
    }
}

#[derive(Debug, Default)]
struct Record {
    freed: Mutex<HashMap<usize, u32>>,
    closed: Mutex<Vec<usize>>,
}

impl Executor for Record {
    fn free(&self, piece: &Piece) -> Result<(), FreeError> {
        for range in piece.ranges() {
            for page in (range.start()..range.end()).step_by(PAGE_BYTES) {
                let mut freed = self.freed.lock().unwrap();
                *freed.entry(page).or_default() += 1;
            }
        }
        Ok(())
    }

    fn close(&self, batch: Batch) {
        for entry in batch.entries() {
            self.assert_free(entry.start(), entry.length() / PAGE_BYTES);
            self.closed.lock().unwrap().push(entry.start());
        }
    }
}

impl Record {
    fn assert_free(&self, start: usize, pages: usize) {
        let freed = self.freed.lock().unwrap();
        for page in 0..pages {
            let times = freed.get(&(start + page * PAGE_BYTES));
            assert_eq!(times, Some(&1), "page {page} of {start:#x}");
        }
    }

    fn assert_closed(&self, start: usize) {
        let closed = self.closed.lock().unwrap();
        let times = closed.iter().filter(|at| **at == start).count();
        assert_eq!(times, 1, "{start:#x}");
    }
}

#[derive(Debug, Clone)]
struct World {
    handover: Arc<Handover<Model>>,
    record: Arc<Record>,
    workers: Arc<Mutex<Vec<thread::JoinHandle<()>>>>,
    linger: Duration,
}

impl World {
    fn new(linger: Duration) -> Self {
        let word = Number::default;
        Self {
            handover: Arc::new(Handover::on(word(), word(), word(), word())),
            record: Arc::default(),
            workers: Arc::default(),
            linger,
        }
    }

    /// Hands over `pages` pages at `start`, the first one as a range of its own.
    fn submit(&self, start: usize, pages: usize, max_threads: u32, later: bool) -> Wakeup {
        let mut batch = Batch::new(None);
        let first = FreeRange::new(start, PAGE_BYTES, Operation::Unmap);
        batch.push_unfreed(first).unwrap();
        let rest = FreeRange::new(
            start + 2 * PAGE_BYTES,
            (pages - 1) * PAGE_BYTES,
            Operation::Unmap,
        );
        batch.push_unfreed(rest).unwrap();
        let terms = Terms {
            max_threads,
            piece_bytes: PAGE_BYTES,
            owner: (!later).then(Model::me),
        };
        let wakeup = self.handover.submit(&mut batch, terms).unwrap();
        for _ in 0..wakeup.make {
            let world = self.clone();
            let worker = thread::spawn(move || {
                let number = world.handover.add_worker(Model::me());
                world.handover.serve(number, world.linger, &*world.record);
            });
            self.workers.lock().unwrap().push(worker);
        }
        wakeup
    }

    fn assert_done(&self, start: usize, pages: usize) {
        self.record.assert_free(start, 1);
        self.record.assert_free(start + 2 * PAGE_BYTES, pages - 1);
        self.record.assert_closed(start);
        self.record.assert_closed(start + 2 * PAGE_BYTES);
    }

    /// Ends the workers; nothing is pending.
    fn end(&self) {
        assert!(self.handover.end_workers(END_TIMEOUT, false).is_some());
        let workers = core::mem::take(&mut *self.workers.lock().unwrap());
        for worker in workers {
            worker.join().unwrap();
        }
        assert!(!self.handover.has_workers());
        assert_eq!(self.handover.pending(), 0);
    }
}

fn search(scenario: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(scenario.clone(), 600);
    shuttle::check_pct(scenario, 600, 3);
}

/// Two owners share the workers, which may time out at the worst moment.
fn owners(linger: Duration) {
    let world = World::new(linger);
    let owners: Vec<_> = [1usize << 20, 2 << 20]
        .into_iter()
        .map(|start| {
            let world = world.clone();
            thread::spawn(move || {
                for round in 0..2 {
                    let start = start + round * 64 * PAGE_BYTES;
                    let wakeup = world.submit(start, 3, 2, false);
                    world.handover.finish(wakeup.job, &*world.record);
                    world.assert_done(start, 3);
                }
            })
        })
        .collect();
    for owner in owners {
        owner.join().unwrap();
    }
    world.end();
}

#[test]
fn owners_are_notified_when_all_is_free() {
    search(|| owners(NO_TIMEOUT));
    search(|| owners(Duration::ZERO));
}

/// No thread waits for these jobs: woken workers do them.
#[test]
fn background_jobs_wake_workers() {
    search(|| {
        let world = World::new(NO_TIMEOUT);
        for job in 1..=3 {
            // One worker, which may sleep or be about to.
            world.submit(job << 20, 2, 1, true);
        }
        // Polls without helping; shuttle ends an endless run.
        while world.handover.pending() > 0 {
            thread::yield_now();
        }
        world.end();
        for job in 1..=3 {
            world.assert_done(job << 20, 2);
        }
    });
}

#[test]
fn helpers_wait_for_pending_memory() {
    search(|| {
        let world = World::new(Duration::ZERO);
        world.submit(1 << 20, 3, 1, true);
        let other = world.clone();
        let owner = thread::spawn(move || {
            let wakeup = other.submit(2 << 20, 3, 2, false);
            other.handover.finish(wakeup.job, &*other.record);
            other.assert_done(2 << 20, 3);
        });
        world.handover.help(&*world.record);
        world.assert_done(1 << 20, 3);
        owner.join().unwrap();
        world.end();
    });
}
