//! The hand-over from those who free to the workers: [`Handover`], the [`Queue`] behind a lock, and where
//! to sleep.
//!
//! No thread misses a call: each of the two words that threads sleep on is read and moved on under the lock, and
//! futex(2) does not sleep on a word that has moved. The work itself is done outside of the lock, by a
//! [`Executor`]. Generic over [`Platform`], so that the tests run this very code under a scheduler that
//! searches its interleavings (`model`).

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use super::batch::{Batch, FreeError};
use super::queue::{Call, Did, Id, Next, Outcome, Piece, Queue, Role, Terms};
use crate::ledger::stats;
use crate::sync::{Apart, Deadline, Lock, Platform, Word};

/// What carries out what the queue says.
pub(super) trait Executor {
    /// Frees a piece.
    ///
    /// # Errors
    /// The kernel's first refusal; the other ranges were freed all the same.
    fn free(&self, piece: &Piece) -> Result<(), FreeError>;
    /// Unmaps what has been emptied.
    fn close(&self, batch: Batch);
}

/// The queue, and the two words that threads sleep on.
#[derive(Debug)]
pub(super) struct Handover<P: Platform = Apart> {
    queue: Lock<Queue, P>,
    /// Moves when there is work.
    work: P::Word,
    /// Moves when there are news for owners and helpers.
    news: P::Word,
    /// Not 0: this is the child of a fork, and the queue does not know yet.
    forked: P::Word,
    /// [`Queue::pending`], to be looked at without the lock.
    pending: AtomicUsize,
}

impl Handover {
    pub(super) const fn new() -> Self {
        crate::one_page! {
            static WORDS: [AtomicU32; 4] = [const { AtomicU32::new(0) }; 4];
        }
        let [lock, work, news, forked] = &WORDS;
        Self::on(lock, work, news, forked)
    }
}

impl<P: Platform> Handover<P> {
    /// On words that are 0.
    pub(super) const fn on(lock: P::Word, work: P::Word, news: P::Word, forked: P::Word) -> Self {
        Self {
            queue: Lock::on(lock, Queue::new()),
            work,
            news,
            forked,
            pending: AtomicUsize::new(0),
        }
    }

    /// Runs `work` on the queue, and wakes whom it concerns. `None` in a signal handler that interrupted
    /// this thread in here.
    fn with<R>(&self, work: impl FnOnce(&mut Queue) -> R) -> Option<R> {
        let (result, wake) = self.queue.with(|queue| {
            let relaxed = Ordering::Relaxed;
            if self.forked.load(relaxed) != 0 && self.forked.swap(0, relaxed) != 0 {
                queue.forked(P::me());
            }
            let result = work(queue);
            let pending = queue.pending();
            if self.pending.swap(pending, Ordering::Relaxed) != pending {
                let slot = stats::slot();
                slot.free_pending.store(pending as u64, Ordering::Relaxed);
            }
            if let Some(peak) = queue.take_peak() {
                let workers = &stats::slot().free_workers;
                workers.fetch_max(peak.into(), Ordering::Relaxed);
            }
            let news = queue.take_news();
            if news.is_some() {
                self.news.fetch_add(1, Ordering::Relaxed);
            }
            (result, news == Some(true))
        })?;
        if wake {
            self.news.wake(u32::MAX >> 1);
        }
        Some(result)
    }

    /// Takes a batch, and leaves an empty one. The sleepers are woken, and the caller makes as many workers
    /// as the answer says. `None`: the batch is as it was, and has to be done by the caller alone.
    pub(super) fn submit(&self, batch: &mut Batch, terms: Terms) -> Option<Call> {
        let submitted = self.with(|queue| {
            let call = queue.submit(batch, terms)?;
            self.work.fetch_add(1, Ordering::Relaxed);
            Some(call)
        });
        let call = submitted.flatten()?;
        if call.wake > 0 {
            self.work.wake(call.wake);
        }
        Some(call)
    }

    /// True where there are workers, or will be.
    pub(super) fn has_workers(&self) -> bool {
        self.with(|queue| queue.alive() > 0).unwrap_or(false)
    }

    /// So many workers could not be made after all.
    pub(super) fn not_made(&self, count: u32) {
        let _ = self.with(|queue| queue.not_made(count));
    }

    /// Works on the caller's own job, and waits until it is done.
    pub(super) fn finish(&self, job: Id, executor: &impl Executor) -> Outcome {
        self.work(Role::Owner(job), executor, None)
    }

    /// Works on background jobs, and waits until those that there are now are done. False if there were
    /// none.
    pub(super) fn help(&self, executor: &impl Executor) -> bool {
        if self.pending() == 0 {
            return false;
        }
        if let Some(last) = self.with(|queue| queue.last()) {
            self.work(Role::Helper(last), executor, None);
        }
        true
    }

    /// Works on all jobs that there are now, whosever they are, until they are done.
    pub(super) fn clear(&self, executor: &impl Executor) {
        if let Some(last) = self.with(|queue| queue.last()) {
            self.work(Role::Clearer(last), executor, None);
        }
    }

    /// The life of worker `number`: until it has been idle for `linger`, or is to leave.
    pub(super) fn serve(&self, number: usize, linger: Duration, executor: &impl Executor) {
        self.work(Role::Worker(number), executor, Some(linger));
    }

    /// True where there are workers, and nothing keeps any of them awake.
    pub(super) fn is_idle(&self) -> bool {
        self.with(|queue| queue.is_idle()).unwrap_or(false)
    }

    /// How many workers the caller is to make: `count` where there is none and may be some.
    pub(super) fn expect(&self, count: u32) -> u32 {
        self.with(|queue| queue.expect(count)).unwrap_or(0)
    }

    /// Enters this thread as a worker, and gives its number.
    pub(super) fn arrive(&self, thread: u32) -> usize {
        self.with(|queue| queue.arrive(thread)).unwrap_or(0)
    }

    fn work(&self, role: Role, executor: &impl Executor, linger: Option<Duration>) -> Outcome {
        let mut did = Did::Nothing;
        loop {
            let next = self.with(|queue| {
                let next = queue.next(role, did);
                let word = match next {
                    Next::Sleep => self.work.load(Ordering::Relaxed),
                    _ => self.news.load(Ordering::Relaxed),
                };
                (next, word)
            });
            // A handler that interrupted this thread in here has no business of its own here.
            let Some((next, word)) = next else {
                return Outcome::default();
            };
            did = match next {
                Next::Piece(job, piece) => Did::Piece(job, piece, executor.free(&piece)),
                Next::Close(job, batch) => {
                    executor.close(batch);
                    Did::Close(job)
                }
                Next::Sleep => Did::Sleep(self.work.wait(word, linger)),
                Next::Wait => {
                    self.news.wait(word, None);
                    Did::Wait
                }
                Next::Done(outcome) => return outcome,
                Next::Leave => return Outcome::default(),
            };
        }
    }

    /// Bytes that wait to be freed in the background.
    pub(super) fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }

    /// Has all workers leave, after what they have in hand, and waits until they have, for at most about
    /// `bound`. Gives the threads that were workers; `None` where some are still there.
    pub(super) fn end_workers(
        &self,
        bound: Duration,
        for_good: bool,
    ) -> Option<[u32; super::queue::WORKERS]> {
        let deadline = Deadline::after(bound);
        self.with(|queue| {
            queue.end_workers(true);
            if for_good {
                queue.make_no_more();
            }
            self.work.fetch_add(1, Ordering::Relaxed);
        })?;
        self.work.wake(u32::MAX >> 1);
        let mut left = None;
        loop {
            let time = deadline.left();
            let word = self.with(|queue| {
                if queue.alive() == 0 {
                    left = Some(queue.left());
                } else {
                    queue.wait();
                }
                self.news.load(Ordering::Relaxed)
            })?;
            if left.is_some() || time.is_zero() {
                break;
            }
            self.news.wait(word, Some(time));
            let _ = self.with(Queue::woken);
        }
        let _ = self.with(|queue| queue.end_workers(false));
        left
    }

    /// Before fork(2): no other thread is in the queue. False where this thread is.
    pub(super) fn before_fork(&self) -> bool {
        self.queue.acquire()
    }

    /// After fork(2), in both processes.
    ///
    /// # Safety
    /// [`Handover::before_fork`] was true, and this is its one answer in this process.
    #[expect(unsafe_code, reason = "gives a lock back")]
    pub(super) unsafe fn after_fork(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.queue.release() }
    }

    /// In the child of a fork. The next call tells the queue.
    pub(super) fn forked(&self) {
        self.forked.swap(1, Ordering::Relaxed);
        if self.pending() != 0 {
            self.pending.store(0, Ordering::Relaxed);
        }
    }
}
