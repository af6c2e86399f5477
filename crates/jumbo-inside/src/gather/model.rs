//! The hand-over under a scheduler that searches its interleavings (shuttle): the same [`Handover`], on words
//! that the scheduler knows.
//!
//! What is looked for: a byte freed twice or never, a job closed before all of it is free, an owner that is
//! told too early, a call that no thread hears (a deadlock, which shuttle finds by itself).

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::collections::HashMap;

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::atomic::AtomicU32;
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

use super::batch::{Batch, Entry, FreeError, Operation};
use super::handover::{Executor, Handover};
use super::queue::{Call, Piece, Terms};
use crate::sync::{Platform, Word};

const PAGE: usize = 4096;
/// No worker gets tired.
const FOREVER: Duration = Duration::MAX;
const BOUND: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Model;

/// A futex: a number, and those who sleep on it.
#[derive(Debug, Default)]
pub(crate) struct Number {
    value: AtomicU32,
    asleep: Mutex<()>,
    call: Condvar,
}

impl Platform for Model {
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
        if time.is_some_and(|time| time < BOUND) && thread_rng().gen_bool(0.5) {
            return true;
        }
        let guard = self.asleep.lock().unwrap();
        if self.value.load(Ordering::Relaxed) == expected {
            drop(self.call.wait(guard).unwrap());
        }
        false
    }

    fn wake(&self, count: u32) {
        let _guard = self.asleep.lock().unwrap();
        for _ in 0..count.min(16) {
            self.call.notify_one();
        }
    }
}

/// Books what was freed and closed.
#[derive(Debug, Default)]
struct Book {
    freed: Mutex<HashMap<usize, u32>>,
    closed: Mutex<Vec<usize>>,
}

impl Executor for Book {
    fn free(&self, piece: &Piece) -> Result<(), FreeError> {
        for range in piece.ranges() {
            for page in (range.start()..range.end()).step_by(PAGE) {
                let mut freed = self.freed.lock().unwrap();
                *freed.entry(page).or_default() += 1;
            }
        }
        Ok(())
    }

    fn close(&self, batch: Batch) {
        for entry in batch.entries() {
            self.assert_free(entry.start(), entry.length() / PAGE);
            self.closed.lock().unwrap().push(entry.start());
        }
    }
}

impl Book {
    fn assert_free(&self, start: usize, pages: usize) {
        let freed = self.freed.lock().unwrap();
        for page in 0..pages {
            let times = freed.get(&(start + page * PAGE));
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
    book: Arc<Book>,
    workers: Arc<Mutex<Vec<thread::JoinHandle<()>>>>,
    linger: Duration,
}

impl World {
    fn new(linger: Duration) -> Self {
        let word = Number::default;
        Self {
            handover: Arc::new(Handover::on(word(), word(), word(), word())),
            book: Arc::default(),
            workers: Arc::default(),
            linger,
        }
    }

    /// Hands over `pages` from `start` on, of which the first are a range by themselves.
    fn submit(&self, start: usize, pages: usize, most: u32, later: bool) -> Call {
        let mut batch = Batch::new(None);
        let first = Entry::new(start, PAGE, Operation::Unmap);
        batch.push_unfreed(first).unwrap();
        let rest = Entry::new(start + 2 * PAGE, (pages - 1) * PAGE, Operation::Unmap);
        batch.push_unfreed(rest).unwrap();
        let terms = Terms {
            most,
            piece: PAGE,
            owner: (!later).then(Model::me),
        };
        let call = self.handover.submit(&mut batch, terms).unwrap();
        for _ in 0..call.make {
            let world = self.clone();
            let worker = thread::spawn(move || {
                let number = world.handover.arrive(Model::me());
                world.handover.serve(number, world.linger, &*world.book);
            });
            self.workers.lock().unwrap().push(worker);
        }
        call
    }

    fn assert_done(&self, start: usize, pages: usize) {
        self.book.assert_free(start, 1);
        self.book.assert_free(start + 2 * PAGE, pages - 1);
        self.book.assert_closed(start);
        self.book.assert_closed(start + 2 * PAGE);
    }

    /// The workers leave, and nothing is left.
    fn end(&self) {
        assert!(self.handover.end_workers(BOUND, false).is_some());
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

/// Two owners, who share the workers; some workers get tired at the worst moment.
fn owners(linger: Duration) {
    let world = World::new(linger);
    let owners: Vec<_> = [1usize << 20, 2 << 20]
        .into_iter()
        .map(|start| {
            let world = world.clone();
            thread::spawn(move || {
                for round in 0..2 {
                    let start = start + round * 64 * PAGE;
                    let call = world.submit(start, 3, 2, false);
                    world.handover.finish(call.job, &*world.book);
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
fn owners_are_told_when_all_is_free() {
    search(|| owners(FOREVER));
    search(|| owners(Duration::ZERO));
}

/// No thread waits for these: only workers that hear the call do them.
#[test]
fn background_jobs_are_heard_of() {
    search(|| {
        let world = World::new(FOREVER);
        for job in 1..=3 {
            // One worker, who may be asleep, or about to be.
            world.submit(job << 20, 2, 1, true);
        }
        // Without a call of this thread's: shuttle ends a run that goes on for ever.
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
fn helpers_wait_for_what_is_pending() {
    search(|| {
        let world = World::new(Duration::ZERO);
        world.submit(1 << 20, 3, 1, true);
        let other = world.clone();
        let owner = thread::spawn(move || {
            let call = other.submit(2 << 20, 3, 2, false);
            other.handover.finish(call.job, &*other.book);
            other.assert_done(2 << 20, 3);
        });
        world.handover.help(&*world.book);
        world.assert_done(1 << 20, 3);
        owner.join().unwrap();
        world.end();
    });
}
