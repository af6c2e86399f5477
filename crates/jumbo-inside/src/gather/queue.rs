//! Jobs that free memory, and their threads: [`Queue`], behind the lock of [`super::handover`].
//!
//! A job is a batch with a cursor. Idle threads claim its next piece, so that all finish together.
//! The last one closes the job: it unmaps the empty ranges. A thread has a [`Role`]: the owner of a
//! job works on it and waits for its end; workers; helpers, who need the memory of background jobs.
//!
//! Pure: no clock, no other memory, no system call. No function fails half way.
//!
//! Invariants: each byte is in one piece. A job is closed once, after its last piece. Its owner
//! is notified once.

use super::batch::{Batch, FreeError, FreeRange, Operation};

/// Maximum jobs; further batches stay with their callers.
const MAX_JOBS: usize = 16;
/// Maximum ranges of a piece.
const MAX_RANGES: usize = 8;
/// Alignment of cuts in a large range: no two threads meet in one page table.
const CUT_ALIGN_BYTES: usize = 2 << 20;
pub(super) const MAX_WORKERS: u32 = 64;

/// Part of a job that one thread frees at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    ranges: [FreeRange; MAX_RANGES],
    count: usize,
}

impl Piece {
    pub(super) fn ranges(&self) -> &[FreeRange] {
        &self.ranges[..self.count]
    }

    fn punched_file(&self) -> Option<Operation> {
        let operation = self.ranges().first()?.operation();
        matches!(operation, Operation::Punch { .. }).then_some(operation)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Id(u64);

/// Parameters of a job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// Maximum threads on the job, including its owner.
    pub(super) max_threads: u32,
    /// Size of a piece, in bytes.
    pub(super) piece_bytes: usize,
    /// Thread that waits for the job ([`crate::sync::Platform::me`]); none in background mode.
    pub(super) owner: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct JobOutcome {
    /// Peak of the threads on the job.
    pub(super) threads: u32,
    pub(super) error: Option<FreeError>,
}

/// Capacity in which a thread requests work.
#[derive(Clone, Copy, Debug)]
pub(super) enum Role {
    Owner(Id),
    Worker(usize),
    /// Works until the background jobs up to this one are done.
    Helper(Id),
    /// Works until all jobs up to this one are done.
    Clearer(Id),
}

/// Completed action of a thread.
#[derive(Clone, Copy, Debug)]
pub(super) enum Completed {
    Nothing,
    Piece(Id, Piece, Result<(), FreeError>),
    Close(Id),
    /// Sleep of a worker; true on a timeout.
    Sleep(bool),
    /// Wait of an owner or helper.
    Wait,
}

#[derive(Debug)]
pub(super) enum Next {
    Piece(Id, Piece),
    Close(Id, Batch),
    /// Sleep until a job arrives.
    Sleep,
    /// Wait until a job is done or a worker has left.
    Wait,
    Done(JobOutcome),
    Leave,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Free,
    Open,
    Closing,
    /// Done; the owner is not notified yet.
    Over,
}

#[derive(Debug)]
struct FreeJob {
    id: Id,
    phase: Phase,
    terms: Terms,
    batch: Batch,
    /// Next range, and its claimed bytes.
    entry: usize,
    offset: usize,
    /// Threads with a piece.
    threads: u32,
    /// File that one of them punches.
    punching: Option<Operation>,
    bytes: usize,
    outcome: JobOutcome,
}

impl FreeJob {
    const FREE: Self = Self {
        id: Id(0),
        phase: Phase::Free,
        terms: Terms {
            max_threads: 0,
            piece_bytes: 0,
            owner: None,
        },
        batch: Batch::new(None),
        entry: 0,
        offset: 0,
        threads: 0,
        punching: None,
        bytes: 0,
        outcome: JobOutcome {
            threads: 0,
            error: None,
        },
    };

    fn is_exhausted(&self) -> bool {
        self.entry >= self.batch.count()
    }

    fn claim(&mut self) -> Option<Piece> {
        if self.phase != Phase::Open || self.is_exhausted() {
            return None;
        }
        let mut left = self.terms.piece_bytes;
        let mut piece = Piece {
            ranges: [FreeRange::default(); MAX_RANGES],
            count: 0,
        };
        while piece.count < MAX_RANGES && left > 0 && !self.is_exhausted() {
            let entry = self.batch.get(self.entry);
            let operation = entry.operation();
            let punch = matches!(operation, Operation::Punch { .. });
            let (first, alone) = (piece.count == 0, punch || piece.punched_file().is_some());
            if first && punch && self.punching == Some(operation) {
                return None;
            }
            if !first && alone && piece.punched_file() != Some(operation) {
                break;
            }
            let part = if punch {
                entry
            } else {
                let (from, end) = (entry.start() + self.offset, entry.end());
                let cut = (from + left) & !(CUT_ALIGN_BYTES - 1);
                let upto = if from + left >= end || cut <= from {
                    left
                } else {
                    cut - from
                };
                entry.part(self.offset, upto)
            };
            piece.ranges[piece.count] = part;
            piece.count += 1;
            left = left.saturating_sub(part.length());
            self.offset += part.length();
            if self.offset < entry.length() {
                break;
            }
            (self.entry, self.offset) = (self.entry + 1, 0);
        }
        self.punching = piece.punched_file().or(self.punching);
        self.threads += 1;
        self.outcome.threads = self.outcome.threads.max(self.threads);
        Some(piece)
    }
}

/// State of a worker number.
#[derive(Clone, Copy, Debug, Default)]
struct WorkerState {
    present: bool,
    /// Thread ID. Kept after the worker has left, until the kernel has released it.
    thread: u32,
}

/// Workers to wake and to make for a new job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wakeup {
    pub(super) job: Id,
    /// Sleeping workers to wake.
    pub(super) wake: u32,
    /// Workers to make; counted already.
    pub(super) make: u32,
}

#[derive(Debug)]
pub(super) struct Queue {
    jobs: [FreeJob; MAX_JOBS],
    last: Id,
    /// Workers, including those being made.
    alive: u32,
    asleep: u32,
    /// Waiting owners and helpers.
    waiting: u32,
    workers: [WorkerState; MAX_WORKERS as usize],
    ending: bool,
    is_forbidden: bool,
    /// An event for waiting owners and helpers.
    has_event: bool,
    pending: usize,
    /// Threads with a piece, and their reported peak.
    working: u32,
    peak: u32,
}

impl Queue {
    pub(super) const fn new() -> Self {
        Self {
            jobs: [const { FreeJob::FREE }; MAX_JOBS],
            last: Id(0),
            alive: 0,
            asleep: 0,
            waiting: 0,
            workers: [WorkerState {
                present: false,
                thread: 0,
            }; MAX_WORKERS as usize],
            ending: false,
            is_forbidden: false,
            has_event: false,
            pending: 0,
            working: 0,
            peak: 0,
        }
    }

    /// Takes a batch, and leaves an empty one. `None`: no room, the batch is unchanged.
    pub(super) fn submit(&mut self, batch: &mut Batch, terms: Terms) -> Option<Wakeup> {
        let free = |job: &&mut FreeJob| job.phase == Phase::Free;
        let job = self.jobs.iter_mut().find(free)?;
        let batch = core::mem::replace(batch, Batch::new(None));
        self.last = Id(self.last.0 + 1);
        let bytes = batch.bytes();
        *job = FreeJob {
            id: self.last,
            phase: Phase::Open,
            terms,
            batch,
            bytes,
            ..FreeJob::FREE
        };
        if terms.owner.is_none() {
            self.pending += bytes;
        }
        // An owner works, too.
        let own = u32::from(terms.owner.is_some());
        let pieces = u32::try_from(bytes.div_ceil(terms.piece_bytes.max(1))).unwrap_or(u32::MAX);
        let wanted = terms.max_threads.min(pieces).saturating_sub(own);
        let wake = wanted.min(self.asleep);
        let room = if self.is_forbidden || self.ending {
            0
        } else {
            let max = MAX_WORKERS.min(terms.max_threads.saturating_sub(own));
            max.saturating_sub(self.alive)
        };
        let make = (wanted - wake).min(room);
        self.alive += make;
        Some(Wakeup {
            job: self.last,
            wake,
            make,
        })
    }

    /// Reports whether there are workers, and all of them sleep. Workers still being made count as
    /// asleep if there are no jobs.
    pub(super) fn is_idle(&self) -> bool {
        let rests =
            self.asleep == self.alive || self.jobs.iter().all(|job| job.phase == Phase::Free);
        self.alive > 0 && rests
    }

    /// Counts `count` workers for the caller to make, if there are none; returns their number.
    pub(super) fn count_workers(&mut self, count: u32) -> u32 {
        if self.alive > 0 || self.is_forbidden || self.ending {
            return 0;
        }
        self.alive = count.min(MAX_WORKERS);
        self.alive
    }

    /// Uncounts workers that could not be made.
    pub(super) fn uncount_workers(&mut self, count: u32) {
        self.alive = self.alive.saturating_sub(count);
        self.has_event = true;
    }

    /// Adds the worker `thread`; returns its number.
    pub(super) fn add_worker(&mut self, thread: u32) -> usize {
        let free = self.workers.iter().position(|worker| !worker.present);
        let number = free.unwrap_or(MAX_WORKERS as usize - 1);
        self.workers[number] = WorkerState {
            present: true,
            thread,
        };
        number
    }

    /// Returns and clears the thread IDs of former workers, which the kernel may still hold.
    pub(super) fn take_threads(&mut self) -> [u32; MAX_WORKERS as usize] {
        core::mem::replace(
            &mut self.workers,
            [WorkerState::default(); MAX_WORKERS as usize],
        )
        .map(|worker| worker.thread)
    }

    /// Sets whether workers leave when there is no work.
    pub(super) const fn end_workers(&mut self, leave: bool) {
        self.ending = leave;
    }

    pub(super) const fn forbid_workers(&mut self) {
        self.is_forbidden = true;
    }

    pub(super) const fn alive(&self) -> u32 {
        self.alive
    }

    pub(super) const fn pending(&self) -> usize {
        self.pending
    }

    pub(super) const fn last(&self) -> Id {
        self.last
    }

    /// Returns, once per event, whether any thread waits for it.
    pub(super) const fn take_event(&mut self) -> Option<bool> {
        if core::mem::replace(&mut self.has_event, false) {
            Some(self.waiting > 0)
        } else {
            None
        }
    }

    /// Returns the peak of working threads, if it has grown.
    pub(super) const fn take_peak(&mut self) -> Option<u32> {
        if self.working > self.peak {
            self.peak = self.working;
            Some(self.peak)
        } else {
            None
        }
    }

    pub(super) const fn begin_wait(&mut self) {
        self.waiting += 1;
    }

    pub(super) const fn end_wait(&mut self) {
        self.waiting = self.waiting.saturating_sub(1);
    }

    /// Records the completed action of a thread; returns the next one.
    pub(super) fn next(&mut self, role: Role, completed: Completed) -> Next {
        match completed {
            Completed::Nothing => {}
            Completed::Piece(id, piece, result) => {
                self.working = self.working.saturating_sub(1);
                if let Some(batch) = self.end_piece(id, &piece, result) {
                    return Next::Close(id, batch);
                }
            }
            Completed::Close(id) => self.end_job(id),
            // Saturates, here and below: in the child of a fork the counts restart.
            Completed::Sleep(_) => self.asleep = self.asleep.saturating_sub(1),
            Completed::Wait => self.end_wait(),
        }
        let next = match role {
            Role::Owner(id) => self.for_owner(id),
            Role::Worker(number) => {
                self.for_worker(number, matches!(completed, Completed::Sleep(true)))
            }
            Role::Helper(upto) => {
                self.for_helper(|job| job.terms.owner.is_none() && job.id <= upto)
            }
            Role::Clearer(upto) => self.for_helper(|job| job.id <= upto),
        };
        self.working += u32::from(matches!(next, Next::Piece(..)));
        next
    }

    fn for_owner(&mut self, id: Id) -> Next {
        let Some(job) = self.find(id) else {
            return Next::Done(JobOutcome::default());
        };
        if job.phase == Phase::Over {
            let outcome = job.outcome;
            *job = FreeJob::FREE;
            return Next::Done(outcome);
        }
        if let Some(piece) = job.claim() {
            return Next::Piece(id, piece);
        }
        self.begin_wait();
        Next::Wait
    }

    fn for_worker(&mut self, number: usize, has_timed_out: bool) -> Next {
        let found = self.claim_oldest(|job| job.threads < job.terms.max_threads);
        if let Some((id, piece)) = found {
            return Next::Piece(id, piece);
        }
        if has_timed_out || self.ending || self.is_forbidden {
            self.alive = self.alive.saturating_sub(1);
            self.workers[number].present = false;
            self.has_event = true;
            return Next::Leave;
        }
        self.asleep += 1;
        Next::Sleep
    }

    fn for_helper(&mut self, concerns: impl Fn(&FreeJob) -> bool) -> Next {
        if let Some((id, piece)) = self.claim_oldest(&concerns) {
            return Next::Piece(id, piece);
        }
        let is_under_way = |job: &FreeJob| matches!(job.phase, Phase::Open | Phase::Closing);
        if (self.jobs.iter()).any(|job| is_under_way(job) && concerns(job)) {
            self.begin_wait();
            return Next::Wait;
        }
        Next::Done(JobOutcome::default())
    }

    /// Claims a piece of the oldest open job that `suits`.
    fn claim_oldest(&mut self, suits: impl Fn(&FreeJob) -> bool) -> Option<(Id, Piece)> {
        let mut after = Id(0);
        loop {
            let open = (self.jobs.iter_mut())
                .filter(|job| job.phase == Phase::Open && job.id > after && suits(job));
            let job = open.min_by_key(|job| job.id)?;
            if let Some(piece) = job.claim() {
                return Some((job.id, piece));
            }
            after = job.id;
        }
    }

    fn find(&mut self, id: Id) -> Option<&mut FreeJob> {
        let mut jobs = self.jobs.iter_mut();
        jobs.find(|job| job.id == id && job.phase != Phase::Free)
    }

    /// Records a freed piece. Returns the batch after the last piece, if it has ranges to unmap.
    fn end_piece(&mut self, id: Id, piece: &Piece, result: Result<(), FreeError>) -> Option<Batch> {
        let job = self.find(id)?;
        job.threads = job.threads.saturating_sub(1);
        job.outcome.error = job.outcome.error.or(result.err());
        if piece.punched_file() == job.punching {
            job.punching = None;
        }
        if job.phase != Phase::Open || !job.is_exhausted() || job.threads > 0 {
            return None;
        }
        job.phase = Phase::Closing;
        let batch = core::mem::replace(&mut job.batch, Batch::new(None));
        let unmaps = |entry: FreeRange| entry.operation() == Operation::Unmap;
        if batch.entries().any(unmaps) {
            return Some(batch);
        }
        self.end_job(id);
        None
    }

    fn end_job(&mut self, id: Id) {
        let Some(job) = self.find(id).filter(|job| job.phase == Phase::Closing) else {
            return;
        };
        let bytes = job.bytes;
        if job.terms.owner.is_some() {
            job.phase = Phase::Over;
        } else {
            *job = FreeJob::FREE;
            self.pending = self.pending.saturating_sub(bytes);
        }
        self.has_event = true;
    }

    /// Resets the queue in the child of a fork, by `me`, its only thread. Jobs of other threads
    /// have no owner here, and their staging ranges were not copied. A job of this thread,
    /// interrupted by a handler that forked, restarts.
    pub(super) fn forked(&mut self, me: u32) {
        for job in &mut self.jobs {
            let own = job.terms.owner == Some(me);
            match job.phase {
                Phase::Open if own => (job.entry, job.offset, job.threads) = (0, 0, 0),
                Phase::Closing if own => job.phase = Phase::Over,
                Phase::Over if own => {}
                _ => *job = FreeJob::FREE,
            }
            job.punching = None;
        }
        (self.alive, self.asleep, self.waiting) = (0, 0, 0);
        (self.pending, self.working, self.peak) = (0, 0, 0);
        self.workers = [WorkerState::default(); MAX_WORKERS as usize];
        self.ending = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_being_made_is_idle_without_jobs() {
        let mut queue = Queue::new();
        assert!(!queue.is_idle());
        assert_eq!((queue.count_workers(2), queue.count_workers(2)), (2, 0));
        assert!(queue.is_idle());
        let mut batch = Batch::new(None);
        let entry = FreeRange::new(0, 2 << 20, Operation::Unmap);
        assert!(batch.push_unfreed(entry).is_ok());
        let terms = Terms {
            max_threads: 1,
            piece_bytes: 1 << 20,
            owner: None,
        };
        assert!(queue.submit(&mut batch, terms).is_some() && !queue.is_idle());
    }
}
