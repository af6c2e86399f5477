//! The threads that answer: [`first`].
//!
//! They have a descriptor table of their own, and the userfaultfd is in it alone: the program cannot close it, find it or
//! hand it on. The kernel closes it with the last of them, however that ends, and with it the ranges: a touch never waits
//! for a thread that is not there.
#![expect(unsafe_code, reason = "makes threads on stacks of their own")]

use core::sync::atomic::Ordering;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fd::OwnedFd;
use rustix::io::{Errno, Result};

use super::books::{
    Books, DROP, END, Entry, FAILED, FILL, GROUND, MAX_THREADS, PAGE, READY, REGISTER,
};
use super::{block_of, max_waste};
use crate::density::table::Span;
use crate::ledger::stats::slot;
use crate::ledger::{Slot, shm_reason};
use crate::standing::{self, Leader};
use crate::sys::{Thread, Userfault, wake};

const NAME: &core::ffi::CStr = c"jumbo-shmem";
/// How often the first thread looks whether it is the last of the process: at first, and at the most.
const MIN_WAIT_SECONDS: i64 = 1;
const MAX_WAIT_SECONDS: i64 = 64;

struct Server {
    books: &'static Books,
    faults: Userfault,
    /// Readable when the threads are to leave.
    leave: OwnedFd,
}

/// What the first thread does: opens the userfaultfd, makes the others, serves, and is the last to leave.
pub(super) fn first() {
    let books = &GROUND.books;
    let server = Server::open(books).and_then(|server| Ok((server.wait_queue()?, server)));
    let started = match &server {
        Ok(_) => READY,
        Err(errno) => FAILED + errno.raw_os_error().unsigned_abs(),
    };
    books.started.store(started, Ordering::Release);
    wake(&books.started);
    let Ok((queue, server)) = server else {
        return;
    };
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count());
    let more = (cpus as usize).clamp(1, MAX_THREADS);
    let work = || {
        let _ = rustix::thread::set_name(NAME);
        if let Ok(queue) = server.wait_queue() {
            server.serve(&queue, false);
        }
    };
    let others = || books.threads.iter().enumerate().take(more).skip(1);
    for (at, thread) in others() {
        // SAFETY: this thread has all signals blocked, as its maker had. The stack is that thread's alone, and it is joined
        // below, before `server` and `work` go; so was the one that was before.
        unsafe { thread.start(Thread::FLAGS, GROUND.stack(at), &work) };
    }
    server.serve(&queue, true);
    server.end();
    for (_, thread) in others() {
        thread.join();
    }
}

impl Server {
    fn open(books: &'static Books) -> Result<Self> {
        standing::begin(NAME)?;
        let this = Self {
            books,
            faults: Userfault::open()?,
            leave: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        this.faults.register(GROUND.bell(), PAGE)?;
        Ok(this)
    }

    /// What a thread sleeps on. EPOLLEXCLUSIVE, Linux 4.5: a touch wakes one of them.
    fn wait_queue(&self) -> Result<OwnedFd> {
        let (queue, none) = (epoll::create(CreateFlags::CLOEXEC)?, EventData::new_u64(0));
        let touches = EventFlags::IN | EventFlags::EXCLUSIVE;
        epoll::add(&queue, &self.faults, none, touches)?;
        epoll::add(&queue, &self.leave, none, EventFlags::IN)?;
        Ok(queue)
    }

    fn serve(&self, queue: &OwnedFd, is_first: bool) {
        let mut seconds = MIN_WAIT_SECONDS;
        while !self.books.ending.load(Ordering::Acquire) {
            match self.faults.next() {
                Ok(Some(address)) if address & !(PAGE - 1) == GROUND.bell() => self.answer(),
                Ok(Some(address)) => self.resolve(address & !(PAGE - 1)),
                Ok(None) => {
                    let limit = Timespec {
                        tv_sec: seconds,
                        tv_nsec: 0,
                    };
                    let mut event = [epoll::Event {
                        flags: EventFlags::empty(),
                        data: EventData::new_u64(0),
                    }];
                    let came = epoll::wait(queue, &mut event, is_first.then_some(&limit));
                    match came {
                        Ok(1..) => seconds = MIN_WAIT_SECONDS,
                        Ok(0) if standing::compare() != Leader::Same => self.end(),
                        Ok(0) => seconds = (seconds * 2).min(MAX_WAIT_SECONDS),
                        Err(Errno::INTR) => {}
                        Err(_) => self.end(),
                    }
                }
                Err(_) => self.end(),
            }
        }
    }

    /// All threads are to leave: who waits goes on when the userfaultfd is closed.
    fn end(&self) {
        self.books.ending.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.leave, &1u64.to_ne_bytes());
    }

    /// Does what a thread of the program asks for.
    fn answer(&self) {
        let books = self.books;
        let address = books.address.load(Ordering::Relaxed);
        let length = books.length.load(Ordering::Relaxed);
        match books.call.swap(0, Ordering::Acquire) {
            REGISTER => self.say(self.faults.register(address, length)),
            FILL => self.say(self.bring_in(address, length)),
            DROP => self.say(self.faults.unregister(address, length)),
            END => return self.end(),
            // The caller's wait was interrupted (a stop, a debugger), and another of these threads is at its call: that one
            // wakes it.
            _ if books.answer.load(Ordering::Acquire) == 0 => return,
            _ => {}
        }
        match self.faults.zero(GROUND.bell(), PAGE).1 {
            Ok(()) | Err(Errno::EXIST) => self.faults.wake(GROUND.bell(), PAGE),
            Err(_) => self.end(),
        }
    }

    fn say(&self, result: Result<()>) {
        let answer = match result {
            Ok(()) => READY,
            Err(errno) => FAILED + errno.raw_os_error().unsigned_abs(),
        };
        self.books.answer.store(answer, Ordering::Release);
    }

    /// Brings in what a system call is given, or leaves its range to the kernel.
    fn bring_in(&self, start: usize, length: usize) -> Result<()> {
        let mut ranges = self.books.ranges();
        let found = ranges.find(|(_, span)| span.range().contains(&start));
        let (entry, span) = found.ok_or(Errno::NOENT)?;
        if !self.books.budget.take(length, || self.books.remaining()) {
            self.leave_to_the_kernel(&entry, &span);
            return Ok(());
        }
        let (filled, result) = self.fill(start, length, length, None);
        entry.note.filled.fetch_add(filled, Ordering::Relaxed);
        result
    }

    /// Brings in the block of a page that was touched, or more; or at least the page.
    fn resolve(&self, page: usize) {
        let mut ranges = self.books.ranges();
        let Some((entry, span)) = ranges.find(|(_, span)| span.range().contains(&page)) else {
            return self.resolve_page(page, page, PAGE);
        };
        let (range, block) = (span.range(), entry.note.block());
        let touched = block_of(page, block, &range);
        let (start, first) = (touched.start, touched.len());
        let streams = &self.books.streams;
        let length = streams.extend(start, first, range.end, block, max_waste());
        if !self.books.budget.take(length, || self.books.remaining()) {
            return self.leave_to_the_kernel(&entry, &span);
        }
        let mut answer = self.fill(start, length, first, Some(page));
        if answer.0 == 0 && answer.1.is_err() && length > first {
            // Not one mapping, perhaps.
            answer = self.fill(start, first, first, Some(page));
        }
        entry.note.filled.fetch_add(answer.0, Ordering::Relaxed);
        if answer.1.is_err() {
            self.resolve_page(page, start, first);
        }
    }

    /// There is no room for whole blocks of a range.
    fn leave_to_the_kernel(&self, entry: &Entry<'_>, span: &Span) {
        let (slot, range) = (slot(), span.range());
        let blocks = range.len() / entry.note.block();
        Slot::add(&slot.shm_user_fallback_charge, blocks as u64);
        slot.shm_reasons
            .fetch_or(shm_reason::NO_MEMORY, Ordering::Relaxed);
        if self.faults.unregister(range.start, range.len()).is_err() {
            self.end();
        }
        // Only now: system calls into what is registered have to find it in the books.
        self.books.end(entry, span);
    }

    /// Fills what is not there: of the first `first` bytes all, of the rest until it comes to a page that is; and no more where
    /// the page that was `touched` is there by now. How much it filled. All who wait for any of it are woken.
    fn fill(
        &self,
        start: usize,
        length: usize,
        first: usize,
        touched: Option<usize>,
    ) -> (usize, Result<()>) {
        let (mut at, end, mut filled) = (start, start + length, 0);
        let mut result = Ok(());
        while at < end && result.is_ok() {
            let (done, answer) = self.faults.zero(at, end - at);
            (at, filled) = (at + done, filled + done);
            match answer {
                // Another of these threads is at this block.
                Err(Errno::EXIST) if touched == Some(at) => break,
                // A process that shares the memory was here.
                Err(Errno::EXIST) if at < start + first => at += PAGE,
                Err(Errno::EXIST) => break,
                answer => result = answer,
            }
        }
        // Before the program goes on, and perhaps ends.
        count(filled);
        self.faults.wake(start, length);
        (filled, result)
    }

    /// Brings in one page. Where that is not to be had either the kernel decides about its block from now on.
    fn resolve_page(&self, page: usize, start: usize, length: usize) {
        match self.fill(page, PAGE, PAGE, None).1 {
            // Or not registered any more: moved, or unmapped.
            Ok(()) | Err(Errno::NOENT | Errno::AGAIN) => {}
            Err(_) => {
                Slot::add(&slot().shm_user_fallback, 1);
                if self.faults.unregister(start, length).is_err() {
                    self.end();
                }
            }
        }
    }
}

/// So much was brought in, for one touch: blocks, the last of them in part.
fn count(bytes: usize) {
    let slot = slot();
    let block = slot.shm_user_block.load(Ordering::Relaxed).max(PAGE as u64);
    Slot::add(&slot.shm_user, bytes as u64);
    Slot::add(&slot.shm_user_alloc, (bytes as u64).div_ceil(block));
}
