//! Hand-over from freeing threads to workers: [`Handover`], the locked [`Queue`] and two futexes.
//!
//! No wake-up is lost: both futex words are read and changed under the lock, and futex(2) does not
//! sleep on a changed word. An [`Executor`] does the work outside of the lock. Generic over
//! [`Platform`], so that tests search the interleavings of this code (`model`).

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use super::batch::{Batch, FreeError};
use super::queue::{Completed, Id, JobOutcome, Next, Piece, Queue, Role, Terms, Wakeup};
use crate::ledger::stats;
use crate::sync::{Apart, Deadline, Lock, Platform, Word};

/// Performs the actions of the queue.
pub(super) trait Executor {
    /// Frees a piece.
    ///
    /// # Errors
    /// The kernel's first error; the other ranges were freed.
    fn free(&self, piece: &Piece) -> Result<(), FreeError>;
    fn close(&self, batch: Batch);
}

/// Queue with its futex words.
#[derive(Debug)]
pub(super) struct Handover<P: Platform = Apart> {
    queue: Lock<Queue, P>,
    /// Changes with new work.
    work_word: P::Word,
    /// Changes with events for owners and helpers.
    event_word: P::Word,
    /// Nonzero in the child of a fork, until the queue is reset.
    forked: P::Word,
    /// Copy of [`Queue::pending`], read without the lock.
    pending: AtomicUsize,
}

impl Handover {
    pub(super) const fn new() -> Self {
        crate::one_page! {
            static WORDS: [AtomicU32; 4] = [const { AtomicU32::new(0) }; 4];
        }
        let [lock, work, event, forked] = &WORDS;
        Self::on(lock, work, event, forked)
    }
}

impl<P: Platform> Handover<P> {
    /// Returns a hand-over on words that are 0.
    pub(super) const fn on(lock: P::Word, work: P::Word, event: P::Word, forked: P::Word) -> Self {
        Self {
            queue: Lock::on(lock, Queue::new()),
            work_word: work,
            event_word: event,
            forked,
            pending: AtomicUsize::new(0),
        }
    }

    /// Runs `work` on the queue, and wakes waiting threads. `None` in a signal handler that
    /// interrupted this thread here.
    fn with<R>(&self, work: impl FnOnce(&mut Queue) -> R) -> Option<R> {
        let (result, wake) = self.queue.with_always(|queue| {
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
            let event = queue.take_event();
            if event.is_some() {
                self.event_word.fetch_add(1, Ordering::Relaxed);
            }
            (result, event == Some(true))
        })?;
        if wake {
            self.event_word.wake(u32::MAX >> 1);
        }
        Some(result)
    }

    /// Takes a batch, and leaves an empty one. Wakes the sleepers; the caller makes the other
    /// workers. `None`: the batch is unchanged, and the caller frees it alone.
    pub(super) fn submit(&self, batch: &mut Batch, terms: Terms) -> Option<Wakeup> {
        let submitted = self.with(|queue| {
            let wakeup = queue.submit(batch, terms)?;
            self.work_word.fetch_add(1, Ordering::Relaxed);
            Some(wakeup)
        });
        let wakeup = submitted.flatten()?;
        if wakeup.wake > 0 {
            self.work_word.wake(wakeup.wake);
        }
        Some(wakeup)
    }

    pub(super) fn has_workers(&self) -> bool {
        self.with(|queue| queue.alive() > 0).unwrap_or(false)
    }

    pub(super) fn uncount_workers(&self, count: u32) {
        let _ = self.with(|queue| queue.uncount_workers(count));
    }

    /// Works on the caller's job until it is done.
    pub(super) fn finish(&self, job: Id, executor: &impl Executor) -> JobOutcome {
        self.work(Role::Owner(job), executor, None)
    }

    /// Works on the present background jobs until they are done; false without any.
    pub(super) fn help(&self, executor: &impl Executor) -> bool {
        if self.pending() == 0 {
            return false;
        }
        if let Some(last) = self.with(|queue| queue.last()) {
            self.work(Role::Helper(last), executor, None);
        }
        true
    }

    /// Works on all present jobs until they are done.
    pub(super) fn clear(&self, executor: &impl Executor) {
        if let Some(last) = self.with(|queue| queue.last()) {
            self.work(Role::Clearer(last), executor, None);
        }
    }

    /// Runs worker `number` until it has been idle for `linger`, or is to leave.
    pub(super) fn serve(&self, number: usize, linger: Duration, executor: &impl Executor) {
        self.work(Role::Worker(number), executor, Some(linger));
    }

    pub(super) fn is_idle(&self) -> bool {
        self.with(|queue| queue.is_idle()).unwrap_or(false)
    }

    /// Returns the number of workers to make: `count` if there are none and they are allowed.
    pub(super) fn count_workers(&self, count: u32) -> u32 {
        self.with(|queue| queue.count_workers(count)).unwrap_or(0)
    }

    pub(super) fn add_worker(&self, thread: u32) -> usize {
        self.with(|queue| queue.add_worker(thread)).unwrap_or(0)
    }

    fn work(&self, role: Role, executor: &impl Executor, linger: Option<Duration>) -> JobOutcome {
        let mut completed = Completed::Nothing;
        loop {
            let next = self.with(|queue| {
                let next = queue.next(role, completed);
                let word = match next {
                    Next::Sleep => self.work_word.load(Ordering::Relaxed),
                    _ => self.event_word.load(Ordering::Relaxed),
                };
                (next, word)
            });
            // A handler that interrupted this thread here has no work.
            let Some((next, word)) = next else {
                return JobOutcome::default();
            };
            completed = match next {
                Next::Piece(job, piece) => Completed::Piece(job, piece, executor.free(&piece)),
                Next::Close(job, batch) => {
                    executor.close(batch);
                    Completed::Close(job)
                }
                Next::Sleep => Completed::Sleep(self.work_word.wait(word, linger)),
                Next::Wait => {
                    self.event_word.wait(word, None);
                    Completed::Wait
                }
                Next::Done(outcome) => return outcome,
                Next::Leave => return JobOutcome::default(),
            };
        }
    }

    pub(super) fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }

    /// Ends all workers after their current pieces, and waits for at most about `timeout`. Returns
    /// the thread IDs of the workers; `None` if some still run.
    pub(super) fn end_workers(
        &self,
        timeout: Duration,
        for_good: bool,
    ) -> Option<[u32; super::queue::MAX_WORKERS as usize]> {
        let deadline = Deadline::after(timeout);
        self.with(|queue| {
            queue.end_workers(true);
            if for_good {
                queue.forbid_workers();
            }
            self.work_word.fetch_add(1, Ordering::Relaxed);
        })?;
        self.work_word.wake(u32::MAX >> 1);
        let mut threads = None;
        loop {
            let time = deadline.left();
            let word = self.with(|queue| {
                if queue.alive() == 0 {
                    threads = Some(queue.take_threads());
                } else {
                    queue.begin_wait();
                }
                self.event_word.load(Ordering::Relaxed)
            })?;
            if threads.is_some() || time.is_zero() {
                break;
            }
            self.event_word.wait(word, Some(time));
            let _ = self.with(Queue::end_wait);
        }
        let _ = self.with(|queue| queue.end_workers(false));
        threads
    }

    /// Takes the lock before fork(2); false if this thread holds it.
    pub(super) fn before_fork(&self) -> bool {
        self.queue.acquire_always()
    }

    /// Releases the lock after fork(2), in both processes.
    ///
    /// # Safety
    /// [`Handover::before_fork`] returned true; called once per process.
    #[expect(unsafe_code, reason = "releases a lock")]
    pub(super) unsafe fn after_fork(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.queue.release() }
    }

    /// Marks the child of a fork; the next call resets the queue.
    pub(super) fn forked(&self) {
        self.forked.swap(1, Ordering::Relaxed);
        if self.pending() != 0 {
            self.pending.store(0, Ordering::Relaxed);
        }
    }
}
