//! The threads that resolve faults: [`first`].
//!
//! They share a descriptor table apart from the program's, and only it has the userfaultfd: the
//! program cannot close it, find it or pass it on. The kernel closes it with the last thread,
//! however that exits, and so unregisters the ranges: no touch waits for a thread that is gone.
#![expect(unsafe_code, reason = "makes threads on stacks of their own")]

use core::sync::atomic::Ordering;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fd::OwnedFd;
use rustix::io::{Errno, Result};

use super::MAX_WASTE;
use super::state::{
    DROP, END, Entry, FAILED, FILL, MAX_THREADS, PAGE, READY, REGISTER, Registry, STATE,
};
use crate::density::record_reason;
use crate::density::table::Span;
use crate::ledger::stats::slot;
use crate::ledger::{Slot, shm_reason as reason};
use crate::standing::{self, Leader};
use crate::sys::{Thread, Userfault, wake};

const NAME: &core::ffi::CStr = c"jumbo-shmem";
/// Minimum and maximum interval at which the first thread checks the program's first thread.
const MIN_WAIT_SECONDS: i64 = 1;
const MAX_WAIT_SECONDS: i64 = 64;

struct Server {
    registry: &'static Registry,
    faults: Userfault,
    /// Readable when the threads must exit.
    stop: OwnedFd,
}

/// Runs the first thread: opens the userfaultfd, starts the other threads, serves, and exits last.
pub(super) fn first() {
    let registry = &STATE.registry;
    let server = Server::open(registry).and_then(|server| Ok((server.wait_queue()?, server)));
    registry.started.store(code(&server), Ordering::Release);
    wake(&registry.started);
    let Ok((queue, server)) = server else {
        return;
    };
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count());
    let count = (cpus as usize).clamp(1, MAX_THREADS);
    let work = || {
        let _ = rustix::thread::set_name(NAME);
        if let Ok(queue) = server.wait_queue() {
            server.serve(&queue, false);
        }
    };
    let others = || registry.threads.iter().enumerate().take(count).skip(1);
    for (at, thread) in others() {
        // SAFETY: this thread has all signals blocked, as its creator had. No other thread uses the
        // stack, and the thread is joined below, before `server` and `work` are dropped.
        unsafe { thread.start(Thread::FLAGS, STATE.stack(at), &work) };
    }
    server.serve(&queue, true);
    server.end();
    for (_, thread) in others() {
        thread.join();
    }
}

/// Returns the code of a result, for [`Registry::started`] and [`Registry::reply`].
fn code<T>(result: &Result<T>) -> u32 {
    match result {
        Ok(_) => READY,
        Err(errno) => FAILED + errno.raw_os_error().unsigned_abs(),
    }
}

impl Server {
    fn open(registry: &'static Registry) -> Result<Self> {
        standing::begin(NAME)?;
        let this = Self {
            registry,
            faults: Userfault::open()?,
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        this.faults.register(STATE.doorbell(), PAGE)?;
        Ok(this)
    }

    /// Returns the epoll instance that a thread waits on. A touch wakes one (EPOLLEXCLUSIVE, Linux
    /// 4.5).
    fn wait_queue(&self) -> Result<OwnedFd> {
        let (queue, none) = (epoll::create(CreateFlags::CLOEXEC)?, EventData::new_u64(0));
        let touches = EventFlags::IN | EventFlags::EXCLUSIVE;
        epoll::add(&queue, &self.faults, none, touches)?;
        epoll::add(&queue, &self.stop, none, EventFlags::IN)?;
        Ok(queue)
    }

    fn serve(&self, queue: &OwnedFd, is_first: bool) {
        let mut seconds = MIN_WAIT_SECONDS;
        while !self.registry.is_stopping.load(Ordering::Acquire) {
            match self.faults.next() {
                Ok(Some(address)) if address & !(PAGE - 1) == STATE.doorbell() => {
                    self.handle_request()
                }
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
                    match epoll::wait(queue, &mut event, is_first.then_some(&limit)) {
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

    /// Makes all threads exit. Waiting touches resume when the userfaultfd is closed.
    fn end(&self) {
        self.registry.is_stopping.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }

    /// Serves the request of a thread of the program.
    fn handle_request(&self) {
        let registry = self.registry;
        let address = registry.address.load(Ordering::Relaxed);
        let length = registry.length.load(Ordering::Relaxed);
        match registry.request.swap(0, Ordering::Acquire) {
            REGISTER => self.reply(self.faults.register(address, length)),
            FILL => self.reply(self.populate(address, length)),
            DROP => self.reply(self.faults.unregister(address, length)),
            END => return self.end(),
            // The caller's wait was interrupted (a stop, a debugger), and another thread serves its
            // request: that one wakes it.
            _ if registry.reply.load(Ordering::Acquire) == 0 => return,
            _ => {}
        }
        match self.faults.zero(STATE.doorbell(), PAGE).1 {
            Ok(()) | Err(Errno::EXIST) => self.faults.wake(STATE.doorbell(), PAGE),
            Err(_) => self.end(),
        }
    }

    fn reply(&self, result: Result<()>) {
        self.registry.reply.store(code(&result), Ordering::Release);
    }

    /// Populates the buffer of a system call, or unregisters its range.
    fn populate(&self, start: usize, length: usize) -> Result<()> {
        let mut ranges = self.registry.ranges();
        let found = ranges.find(|(_, span)| span.range().contains(&start));
        let (entry, span) = found.ok_or(Errno::NOENT)?;
        if !self
            .registry
            .budget
            .take(length, || self.registry.remaining())
        {
            self.give_up(&entry, &span);
            return Ok(());
        }
        let (filled, result) = self.fill(start, length, length, None);
        entry.note.filled.fetch_add(filled, Ordering::Relaxed);
        result
    }

    /// Populates at least the touched page, usually its block and readahead.
    fn resolve(&self, page: usize) {
        let mut ranges = self.registry.ranges();
        let Some((entry, span)) = ranges.find(|(_, span)| span.range().contains(&page)) else {
            return self.resolve_page(page, page, PAGE);
        };
        let (range, block) = (span.range(), entry.note.block());
        let block_start = page & !(block - 1);
        let start = range.start.max(block_start);
        let first = range.end.min(block_start.saturating_add(block)) - start;
        let max_waste = MAX_WASTE.load(Ordering::Relaxed);
        let readahead = &self.registry.readahead;
        let length = readahead.extend(start, first, range.end, block, max_waste);
        if !self
            .registry
            .budget
            .take(length, || self.registry.remaining())
        {
            return self.give_up(&entry, &span);
        }
        let (mut filled, mut result) = self.fill(start, length, first, Some(page));
        if filled == 0 && result.is_err() && length > first {
            // The readahead may cross into another mapping.
            (filled, result) = self.fill(start, first, first, Some(page));
        }
        entry.note.filled.fetch_add(filled, Ordering::Relaxed);
        if result.is_err() {
            self.resolve_page(page, start, first);
        }
    }

    /// Unregisters a range for whose blocks there is no room.
    fn give_up(&self, entry: &Entry<'_>, span: &Span) {
        let (slot, range) = (slot(), span.range());
        let blocks = range.len() / entry.note.block();
        Slot::add(&slot.shm_user_fallback_charge, blocks as u64);
        record_reason(reason::NO_MEMORY);
        if self.faults.unregister(range.start, range.len()).is_err() {
            self.end();
        }
        // Only now: `touch` must find all registered memory in the registry.
        self.registry.end(entry, span);
    }

    /// Fills missing pages: all of the first `first` bytes, and the rest up to a present page.
    /// Stops early if the `touched` page is present by now. Returns the filled bytes, and wakes all
    /// waiters.
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
            let (done, zeroed) = self.faults.zero(at, end - at);
            (at, filled) = (at + done, filled + done);
            match zeroed {
                // Another thread fills this block.
                Err(Errno::EXIST) if touched == Some(at) => break,
                // Another process that shares the memory touched the page.
                Err(Errno::EXIST) if at < start + first => at += PAGE,
                Err(Errno::EXIST) => break,
                zeroed => result = zeroed,
            }
        }
        // Before the wake-up: the program may exit after it.
        count(filled);
        self.faults.wake(start, length);
        (filled, result)
    }

    /// Populates one page; unregisters its block if that fails too.
    fn resolve_page(&self, page: usize, start: usize, length: usize) {
        match self.fill(page, PAGE, PAGE, None).1 {
            // NOENT, AGAIN: not registered any more, because it was moved or unmapped.
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

/// Counts the bytes of one fill, and its blocks, rounded up.
fn count(bytes: usize) {
    let slot = slot();
    let block = slot.shm_user_block.load(Ordering::Relaxed).max(PAGE as u64);
    Slot::add(&slot.shm_user, bytes as u64);
    Slot::add(&slot.shm_user_alloc, (bytes as u64).div_ceil(block));
}
