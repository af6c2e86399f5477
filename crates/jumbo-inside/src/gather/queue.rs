//! What is being freed and by whom: [`Queue`], the book behind the [`super::handover`]'s lock.
//!
//! A job is a batch with a cursor. A thread that has time claims the next piece of it, so that all threads
//! finish together; the last one out closes the job (unmaps what has been emptied). Threads come in three
//! [`Role`]s: the owner of a job, who works on it and waits for its end; workers; and helpers, who need
//! the memory of background jobs.
//!
//! Pure: no clock, no memory but its own, no system call. Nothing in here can fail half way.
//!
//! Invariants: each byte of a job is in exactly one piece; a job is closed once, after the last piece came
//! back; an owner is told of its job's end once.

use super::batch::{Batch, Entry, FreeError, Operation};

/// Jobs at a time; further ones are their callers' own business.
const JOBS: usize = 16;
/// Ranges in a piece.
const RANGES: usize = 8;
/// Where a large range is best cut: no two threads then meet in one page table.
const SEAM: usize = 2 << 20;
/// The most workers there can be.
pub(super) const WORKERS: usize = 64;

const MOST: u32 = 64;
const _: () = assert!(WORKERS == MOST as usize);

/// What one thread frees at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    ranges: [Entry; RANGES],
    count: usize,
}

impl Piece {
    pub(super) fn ranges(&self) -> &[Entry] {
        &self.ranges[..self.count]
    }

    fn punches(&self) -> Option<Operation> {
        let operation = self.ranges().first()?.operation();
        matches!(operation, Operation::Punch { .. }).then_some(operation)
    }
}

/// A job's number; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Id(u64);

/// How a job is to be done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// How many threads may work on it at once, its owner among them.
    pub(super) most: u32,
    /// How large a piece is, in bytes.
    pub(super) piece: usize,
    /// The thread that waits for it, as [`crate::sync::Platform::me`] says; none does in background mode.
    pub(super) owner: Option<u32>,
}

/// What became of a job.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    /// The most threads that worked on it at once.
    pub(super) threads: u32,
    /// The first refusal.
    pub(super) error: Option<FreeError>,
}

/// In which capacity a thread asks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Role {
    Owner(Id),
    /// By its number.
    Worker(usize),
    /// Until the background jobs up to this one are done.
    Helper(Id),
    /// Until all jobs up to this one are.
    Clearer(Id),
}

/// What a thread has done since it last asked.
#[derive(Clone, Copy, Debug)]
pub(super) enum Did {
    Nothing,
    Piece(Id, Piece, Result<(), FreeError>),
    Close(Id),
    /// As a worker; true if no thread called.
    Sleep(bool),
    /// As an owner or a helper.
    Wait,
}

/// What a thread is to do next.
#[derive(Debug)]
pub(super) enum Next {
    Piece(Id, Piece),
    Close(Id, Batch),
    /// Nothing until a job is handed over.
    Sleep,
    /// Nothing until a job is done or a worker has left.
    Wait,
    /// There is no more for it.
    Done(Outcome),
    Leave,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Free,
    Open,
    Closing,
    /// Its owner has yet to be told.
    Over,
}

#[derive(Debug)]
struct Job {
    id: Id,
    phase: Phase,
    terms: Terms,
    batch: Batch,
    /// The next entry, and how much of it was claimed.
    entry: usize,
    offset: usize,
    /// Threads with a piece of it in hand.
    threads: u32,
    /// A file that one of them punches.
    punching: Option<Operation>,
    bytes: usize,
    outcome: Outcome,
}

impl Job {
    const FREE: Self = Self {
        id: Id(0),
        phase: Phase::Free,
        terms: Terms {
            most: 0,
            piece: 0,
            owner: None,
        },
        batch: Batch::new(None),
        entry: 0,
        offset: 0,
        threads: 0,
        punching: None,
        bytes: 0,
        outcome: Outcome {
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
        let mut left = self.terms.piece;
        let mut piece = Piece {
            ranges: [Entry::default(); RANGES],
            count: 0,
        };
        while piece.count < RANGES && left > 0 && !self.is_exhausted() {
            let entry = self.batch.get(self.entry);
            let operation = entry.operation();
            let punch = matches!(operation, Operation::Punch { .. });
            let (first, alone) = (piece.count == 0, punch || piece.punches().is_some());
            if first && punch && self.punching == Some(operation) {
                return None;
            }
            if !first && alone && piece.punches() != Some(operation) {
                break;
            }
            let part = if punch {
                entry
            } else {
                let (from, end) = (entry.start() + self.offset, entry.end());
                let cut = (from + left) & !(SEAM - 1);
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
        self.punching = piece.punches().or(self.punching);
        self.threads += 1;
        self.outcome.threads = self.outcome.threads.max(self.threads);
        Some(piece)
    }
}

/// A worker, by its number.
#[derive(Clone, Copy, Debug, Default)]
struct Worker {
    present: bool,
    /// Its thread ID, which stays when it has left: until the kernel has let go of it.
    thread: u32,
}

/// Who is to be called when a job was handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) job: Id,
    /// So many workers that sleep.
    pub(super) wake: u32,
    /// So many that have to be made; they are counted already.
    pub(super) make: u32,
}

/// The book.
#[derive(Debug)]
pub(super) struct Queue {
    jobs: [Job; JOBS],
    last: Id,
    /// Workers that there are, or that are being made.
    alive: u32,
    asleep: u32,
    /// Owners and helpers that wait.
    waiting: u32,
    workers: [Worker; WORKERS],
    ending: bool,
    /// No worker is made any more.
    no_more: bool,
    /// Something has happened that owners and helpers wait for.
    news: bool,
    /// Bytes of background jobs.
    pending: usize,
    /// Threads that have a piece in hand, and the most of them that were asked about.
    working: u32,
    peak: u32,
}

impl Queue {
    pub(super) const fn new() -> Self {
        Self {
            jobs: [const { Job::FREE }; JOBS],
            last: Id(0),
            alive: 0,
            asleep: 0,
            waiting: 0,
            workers: [Worker {
                present: false,
                thread: 0,
            }; WORKERS],
            ending: false,
            no_more: false,
            news: false,
            pending: 0,
            working: 0,
            peak: 0,
        }
    }

    /// Takes a batch that is not empty, and leaves an empty one. `None` where there is no room for another
    /// job, and the batch is as it was.
    pub(super) fn submit(&mut self, batch: &mut Batch, terms: Terms) -> Option<Call> {
        let free = |job: &&mut Job| job.phase == Phase::Free;
        let job = self.jobs.iter_mut().find(free)?;
        let batch = core::mem::replace(batch, Batch::new(None));
        self.last = Id(self.last.0 + 1);
        let bytes = batch.bytes();
        *job = Job {
            id: self.last,
            phase: Phase::Open,
            terms,
            batch,
            bytes,
            ..Job::FREE
        };
        if terms.owner.is_none() {
            self.pending += bytes;
        }
        // An owner works too.
        let own = u32::from(terms.owner.is_some());
        let pieces = u32::try_from(bytes.div_ceil(terms.piece.max(1))).unwrap_or(u32::MAX);
        let wanted = terms.most.min(pieces).saturating_sub(own);
        let wake = wanted.min(self.asleep);
        let room = if self.no_more || self.ending {
            0
        } else {
            let most = MOST.min(terms.most.saturating_sub(own));
            most.saturating_sub(self.alive)
        };
        let make = (wanted - wake).min(room);
        self.alive += make;
        Some(Call {
            job: self.last,
            wake,
            make,
        })
    }

    /// True where there are workers, and all of them sleep, or will: those that are not there yet, too, if there is
    /// nothing to do.
    pub(super) fn is_idle(&self) -> bool {
        let rests =
            self.asleep == self.alive || self.jobs.iter().all(|job| job.phase == Phase::Free);
        self.alive > 0 && rests
    }

    /// Counts `count` workers, whom the caller makes, if there is none: gives how many.
    pub(super) fn expect(&mut self, count: u32) -> u32 {
        let lacks = self.alive == 0 && !self.no_more && !self.ending;
        self.alive += if lacks { count.min(MOST) } else { 0 };
        if lacks { self.alive } else { 0 }
    }

    /// So many workers could not be made.
    pub(super) fn not_made(&mut self, count: u32) {
        self.alive = self.alive.saturating_sub(count);
        self.news = true;
    }

    /// A new worker, thread `thread`: its number.
    pub(super) fn arrive(&mut self, thread: u32) -> usize {
        let free = self.workers.iter().position(|worker| !worker.present);
        let number = free.unwrap_or(WORKERS - 1);
        self.workers[number] = Worker {
            present: true,
            thread,
        };
        number
    }

    /// The threads that were workers, now that there are none: the kernel may still be at their end.
    pub(super) fn left(&mut self) -> [u32; WORKERS] {
        core::mem::replace(&mut self.workers, [Worker::default(); WORKERS])
            .map(|worker| worker.thread)
    }

    /// Has the workers leave when there is nothing to do, or no longer.
    pub(super) const fn end_workers(&mut self, leave: bool) {
        self.ending = leave;
    }

    /// Has no workers made from now on.
    pub(super) const fn make_no_more(&mut self) {
        self.no_more = true;
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

    /// True, once, when those who wait are to be woken; and whether there are any.
    pub(super) const fn take_news(&mut self) -> Option<bool> {
        if core::mem::replace(&mut self.news, false) {
            Some(self.waiting > 0)
        } else {
            None
        }
    }

    /// The most threads that worked at once, if they became more than ever before since that was asked.
    pub(super) const fn take_peak(&mut self) -> Option<u32> {
        if self.working > self.peak {
            self.peak = self.working;
            Some(self.peak)
        } else {
            None
        }
    }

    /// A thread waits until there are news.
    pub(super) const fn wait(&mut self) {
        self.waiting += 1;
    }

    /// A thread that waited does not any more.
    pub(super) const fn woken(&mut self) {
        self.waiting = self.waiting.saturating_sub(1);
    }

    /// Books what a thread did, and says what it is to do next.
    pub(super) fn next(&mut self, role: Role, did: Did) -> Next {
        match did {
            Did::Nothing => {}
            Did::Piece(id, piece, result) => {
                self.working = self.working.saturating_sub(1);
                if let Some(batch) = self.came_back(id, &piece, result) {
                    return Next::Close(id, batch);
                }
            }
            Did::Close(id) => self.closed(id),
            // Saturating, here and below: in the child of a fork the counts start anew.
            Did::Sleep(_) => self.asleep = self.asleep.saturating_sub(1),
            Did::Wait => self.woken(),
        }
        let next = match role {
            Role::Owner(id) => self.for_owner(id),
            Role::Worker(number) => self.for_worker(number, matches!(did, Did::Sleep(true))),
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
            return Next::Done(Outcome::default());
        };
        if job.phase == Phase::Over {
            let outcome = job.outcome;
            *job = Job::FREE;
            return Next::Done(outcome);
        }
        if let Some(piece) = job.claim() {
            return Next::Piece(id, piece);
        }
        self.wait();
        Next::Wait
    }

    fn for_worker(&mut self, number: usize, tired: bool) -> Next {
        let found = self.oldest(|job| job.threads < job.terms.most);
        if let Some((id, piece)) = found {
            return Next::Piece(id, piece);
        }
        if tired || self.ending || self.no_more {
            self.alive = self.alive.saturating_sub(1);
            self.workers[number].present = false;
            self.news = true;
            return Next::Leave;
        }
        self.asleep += 1;
        Next::Sleep
    }

    fn for_helper(&mut self, concerns: impl Fn(&Job) -> bool) -> Next {
        if let Some((id, piece)) = self.oldest(&concerns) {
            return Next::Piece(id, piece);
        }
        let is_under_way = |job: &Job| matches!(job.phase, Phase::Open | Phase::Closing);
        if (self.jobs.iter()).any(|job| is_under_way(job) && concerns(job)) {
            self.wait();
            return Next::Wait;
        }
        Next::Done(Outcome::default())
    }

    /// A piece of the oldest job that has one and that `suits`.
    fn oldest(&mut self, suits: impl Fn(&Job) -> bool) -> Option<(Id, Piece)> {
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

    fn find(&mut self, id: Id) -> Option<&mut Job> {
        let mut jobs = self.jobs.iter_mut();
        jobs.find(|job| job.id == id && job.phase != Phase::Free)
    }

    /// A piece was freed. Gives the batch if it was the last one, and something is to be unmapped.
    fn came_back(&mut self, id: Id, piece: &Piece, result: Result<(), FreeError>) -> Option<Batch> {
        let job = self.find(id)?;
        job.threads = job.threads.saturating_sub(1);
        job.outcome.error = job.outcome.error.or(result.err());
        if piece.punches() == job.punching {
            job.punching = None;
        }
        if job.phase != Phase::Open || !job.is_exhausted() || job.threads > 0 {
            return None;
        }
        job.phase = Phase::Closing;
        let batch = core::mem::replace(&mut job.batch, Batch::new(None));
        let unmaps = |entry: Entry| entry.operation() == Operation::Unmap;
        if batch.entries().any(unmaps) {
            return Some(batch);
        }
        self.closed(id);
        None
    }

    fn closed(&mut self, id: Id) {
        let Some(job) = self.find(id).filter(|job| job.phase == Phase::Closing) else {
            return;
        };
        let bytes = job.bytes;
        if job.terms.owner.is_some() {
            job.phase = Phase::Over;
        } else {
            *job = Job::FREE;
            self.pending = self.pending.saturating_sub(bytes);
        }
        self.news = true;
    }

    /// In the child of a fork, by `me`, its only thread: the workers are not here. Jobs of other threads
    /// have no owner here (and their staging ranges were not copied); one of this thread's own, which a signal handler
    /// interrupted to fork, begins anew.
    pub(super) fn forked(&mut self, me: u32) {
        for job in &mut self.jobs {
            let own = job.terms.owner == Some(me);
            match job.phase {
                Phase::Open if own => (job.entry, job.offset, job.threads) = (0, 0, 0),
                Phase::Closing if own => job.phase = Phase::Over,
                Phase::Over if own => {}
                _ => *job = Job::FREE,
            }
            job.punching = None;
        }
        (self.alive, self.asleep, self.waiting) = (0, 0, 0);
        (self.pending, self.working, self.peak) = (0, 0, 0);
        self.workers = [Worker::default(); WORKERS];
        self.ending = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_is_not_there_yet_is_idle_where_there_is_nothing_to_do() {
        let mut queue = Queue::new();
        assert!(!queue.is_idle());
        assert_eq!((queue.expect(2), queue.expect(2)), (2, 0));
        assert!(queue.is_idle());
        let mut batch = Batch::new(None);
        let entry = Entry::new(0, 2 << 20, Operation::Unmap);
        assert!(batch.push_unfreed(entry).is_ok());
        let terms = Terms {
            most: 1,
            piece: 1 << 20,
            owner: None,
        };
        assert!(queue.submit(&mut batch, terms).is_some() && !queue.is_idle());
    }
}
