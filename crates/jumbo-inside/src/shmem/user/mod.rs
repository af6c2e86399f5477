//! Shared memory whose first touch brings in a whole block: [`register`]; the rung for hosts whose controls allow no huge page.
//!
//! Threads of ours answer the page faults of a userfaultfd(2) for user space alone, as an ordinary user may: a program takes
//! one fault for each block, where the kernel alone has one for each base page. What comes in are base pages all the same.
//!
//! - No touch waits for ever. What cannot be filled is unregistered, and where no thread of ours is left nothing is
//!   registered: the kernel then does what it does without us.
//! - Blocks come in only where there is room for all that has not come yet, on the host and in the memory cgroup: a program that
//!   touches little of a large mapping lives on where it lives without us.
//! - A system call into pages that were never touched fails with EFAULT: [`touch`] comes before those that are seen.
//! - The threads are none of the C library's, and gone before whatever wants a single one, or changes who the process is: they
//!   end with that of [`crate::watch`]. But they stay over a fork(2): they hold no lock and nothing that a child would find half done,
//!   and the ranges of the parent are not left alone for the time. A child has no range: what it touches are the kernel's base pages.
//! - What is mapped, moved, protected or dropped meanwhile the kernel keeps books of: what was moved or mapped anew is not
//!   registered. A NUMA policy that a thread of the program has for itself does not count, but that of the thread that made
//!   ours. A program that has a userfaultfd of its own finds such ranges busy.
//!
//! Invariant: pages come in as zeroes, where nothing is, or not at all.
#![expect(unsafe_code, reason = "makes a thread on a stack of its own")]

mod books;
mod budget;
mod serve;
mod streams;
#[cfg(test)]
mod tests;

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering, fence};
use core::time::Duration;

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use books::{Books, DROP, END, FAILED, FILL, GROUND, Ground, PAGE, READY, REGISTER};

use crate::headroom::{has_room, has_tasks};
use crate::ledger::shm_reason;
use crate::ledger::stats::slot;
use crate::sandbox;
use crate::standing::{self, Leader};
use crate::sys::{Blocked, Thread, process, request, wait};
use crate::watch::{self, Others};

/// So much of what a system call is given comes in before it. It may be given much, and use little.
const AHEAD_BYTES: usize = 1 << 20;

/// How many ranges are registered: 0 until there are any, and in the child of a fork. For machine code to look at.
pub static RANGES: &AtomicUsize = &GROUND.books.count;

/// How many percent of what a stream brought in may come in ahead of it.
static MAX_WASTE: AtomicUsize = AtomicUsize::new(5);

/// Why a range is not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A seccomp filter is at work.
    Filter,
    /// No memory, no descriptor, no task or no mapping was to be had.
    NoMemory,
    /// userfaultfd(2) is not to be had, or not for this memory: the errno.
    Refused(i32),
    /// The threads had to go, or are another process's.
    Ended,
    /// Too many ranges.
    TooMany,
}

impl Reason {
    /// Its bit among [`shm_reason`].
    pub const fn bit(self) -> u32 {
        match self {
            Self::Filter => shm_reason::FILTER,
            Self::NoMemory => shm_reason::NO_MEMORY,
            Self::Refused(_) => shm_reason::NO_USERFAULTFD,
            Self::Ended => shm_reason::ENDED,
            Self::TooMany => shm_reason::TOO_MANY,
        }
    }

    fn of(errno: Errno) -> Self {
        match errno {
            Errno::NOMEM | Errno::MFILE | Errno::NFILE => Self::NoMemory,
            errno => Self::Refused(errno.raw_os_error()),
        }
    }
}

/// How many percent of what was brought in may come in before it is touched, beside the block of a touch; 5 to begin with.
pub fn allow_waste(percent: usize) {
    MAX_WASTE.store(percent, Ordering::Relaxed);
}

fn max_waste() -> usize {
    MAX_WASTE.load(Ordering::Relaxed)
}

/// The memory from `address` on, a shared mapping of the caller's, comes in by blocks of `block` bytes from now on: a power of
/// two, a base page at least.
///
/// # Errors
/// Why it does not: the kernel then does what it does without us.
///
/// # References
/// userfaultfd(2), user mode only: Linux 5.11.
pub fn register(address: usize, length: usize, block: usize) -> Result<(), Reason> {
    if sandbox::is_entered() {
        return Err(Reason::Filter);
    }
    let books = &GROUND.books;
    let process = process();
    if !block.is_power_of_two() || block < PAGE {
        return Err(Reason::Refused(Errno::INVAL.raw_os_error()));
    }
    let _blocked = Blocked::all();
    let registered = books.lock.with(|()| {
        let maker = books.maker.load(Ordering::Relaxed);
        if books.over.load(Ordering::Relaxed) || ![0, process].contains(&maker) {
            return Err(Reason::Ended);
        }
        if !books.threads[0].is_alive() {
            make(books, process)?;
        }
        let range = address..address.saturating_add(length);
        if !has_room(books.remaining().saturating_add(length)) {
            return Err(Reason::NoMemory);
        }
        books.streams.begin_anew(&range);
        // What was there before is gone, past the C library.
        unregister(books, &range);
        if !books.add(&range, block, 0) {
            return Err(Reason::TooMany);
        }
        let block = block as u64;
        slot().shm_user_block.fetch_max(block, Ordering::Relaxed);
        let answer = call(books, REGISTER, &range);
        if answer.is_err() {
            unregister(books, &range);
        }
        answer
    });
    registered.unwrap_or(Err(Reason::Ended))
}

/// Makes the threads. Under the lock, with signals blocked.
fn make(books: &'static Books, process: i32) -> Result<(), Reason> {
    if standing::compare() == Leader::Gone {
        return Err(Reason::Ended);
    }
    if !has_tasks() {
        return Err(Reason::NoMemory);
    }
    let ground = core::ptr::from_ref(&GROUND).cast_mut().cast();
    // SAFETY: what is there stays; only a child finds zeroes, which is what it is to find. MADV_WIPEONFORK, Linux 4.14.
    unsafe { madvise(ground, size_of::<Ground>(), Advice::LinuxWipeOnFork) }.map_err(Reason::of)?;
    watch::with(&Others(end));
    books.maker.store(process, Ordering::Relaxed);
    // Another thread may have marked that it installs a filter, and found no threads to end.
    fence(Ordering::SeqCst);
    if sandbox::is_entered() {
        books.over.store(true, Ordering::Relaxed);
        return Err(Reason::Filter);
    }
    books.ending.store(false, Ordering::Relaxed);
    books.started.store(0, Ordering::Release);
    // SAFETY: signals are blocked. The one that was before is gone, and the stack is its alone; all of it is static.
    if !unsafe { books.threads[0].start(Thread::FLAGS, GROUND.stack(0), &serve::first) } {
        return Err(Reason::NoMemory);
    }
    loop {
        match books.started.load(Ordering::Acquire) {
            0 => drop(wait(&books.started, 0, Duration::from_secs(1))),
            READY => return Ok(()),
            failed => {
                books.threads[0].join();
                return Err(Reason::of(errno(failed)));
            }
        }
    }
}

fn errno(failed: u32) -> Errno {
    Errno::from_raw_os_error(failed.saturating_sub(FAILED).cast_signed())
}

/// Calls a thread of ours by a touch of the bell, which returns when it is done, or when there is none. Under the lock, with
/// signals blocked.
fn call(books: &Books, what: u32, range: &Range<usize>) -> Result<(), Reason> {
    books.address.store(range.start, Ordering::Relaxed);
    books.length.store(range.len(), Ordering::Relaxed);
    books.answer.store(0, Ordering::Relaxed);
    books.call.store(what, Ordering::Release);
    let bell = core::ptr::from_ref(&GROUND.bell).cast_mut();
    // SAFETY: nothing is kept on that page.
    unsafe { madvise(bell.cast(), PAGE, Advice::LinuxDontNeed) }.map_err(Reason::of)?;
    // SAFETY: the page is there, if only as zeroes.
    unsafe { core::ptr::read_volatile(GROUND.bell.0.as_ptr()) };
    match books.answer.load(Ordering::Acquire) {
        0 => Err(Reason::Ended),
        READY => Ok(()),
        failed => Err(Reason::of(errno(failed))),
    }
}

/// The range is about to be unmapped, moved or mapped anew; one of less than a page stands for all of the mapping that begins
/// there. It is the kernel's from then on, whether that succeeds or fails.
#[inline(always)]
pub fn forget(address: usize, length: usize) {
    if RANGES.load(Ordering::Relaxed) != 0 {
        remove(address..address.saturating_add(length));
    }
}

#[cold]
fn remove(mut range: Range<usize>) {
    let books = &GROUND.books;
    let mut ranges = books.ranges().map(|(_, span)| span.range());
    if range.len() < PAGE
        && let Some(registered) = ranges.find(|registered| registered.start == range.start)
    {
        range = registered;
    }
    leave(&pages(&range));
}

/// The pages that have a byte of a range.
fn pages(range: &Range<usize>) -> Range<usize> {
    let last = range.end.saturating_add(PAGE - 1);
    range.start & !(PAGE - 1)..last & !(PAGE - 1)
}

/// Leaves whole pages to the kernel.
fn leave(range: &Range<usize>) {
    let books = &GROUND.books;
    let _blocked = Blocked::all();
    books.lock.with(|()| unregister(books, range));
}

/// The same, under the lock, with signals blocked. What the books have is what the kernel has: system calls into other pages fail.
fn unregister(books: &Books, range: &Range<usize>) {
    for (entry, registered) in books.ranges() {
        let cut = books.cut(range, &registered.range());
        if !cut.is_empty() {
            // It fails where nothing is mapped any more.
            let _ = call(books, DROP, &cut);
            books.remove(&entry, &registered, &cut);
        }
    }
}

/// A system call is about to read or write there: pages that were never touched are brought in, or left to the kernel. Whatever
/// the address is, nothing is touched here. errno is left alone.
#[inline(always)]
pub fn touch(address: usize, length: usize) {
    if RANGES.load(Ordering::Relaxed) != 0 {
        bring_in(&(address..address.saturating_add(length)));
    }
}

#[cold]
fn bring_in(touched: &Range<usize>) {
    let touched = pages(touched);
    let near = touched.start.saturating_add(AHEAD_BYTES);
    for (_, span) in GROUND.books.ranges() {
        let range = span.range();
        let (start, end) = (range.start.max(touched.start), range.end.min(touched.end));
        let mut at = start;
        while at < end.min(near) {
            at = bring_in_some(at..end.min(near));
        }
        if at < end {
            leave(&(at..end));
        }
    }
}

/// Brings in what is not there of the first pages of a range; gives where to go on.
fn bring_in_some(range: Range<usize>) -> usize {
    let mut there = [0u8; AHEAD_BYTES / PAGE];
    let pages = (range.len() / PAGE).min(there.len());
    let end = range.start + pages * PAGE;
    let vector = there.as_mut_ptr().expose_provenance();
    let arguments = [range.start, end - range.start, vector, 0, 0, 0];
    // SAFETY: mincore(2) writes a byte for each page.
    if unsafe { request(libc::SYS_mincore, arguments) }.is_err() {
        // Not mapped, or not all of it.
        leave(&(range.start..end));
        return end;
    }
    let books = &GROUND.books;
    let mut at = range.start;
    for run in there[..pages].chunk_by(|one, other| one & 1 == other & 1) {
        let missing = at..at + run.len() * PAGE;
        at = missing.end;
        if run[0] & 1 == 0 {
            let _blocked = Blocked::all();
            books.lock.with(|()| {
                // It fails where the run is more than one mapping by now, or no memory is to be had.
                if call(books, FILL, &missing).is_err() {
                    unregister(books, &missing);
                }
            });
        }
    }
    end
}

/// Ends the threads, if there are any, for good. No range is registered any more.
pub fn end() {
    let books = &GROUND.books;
    fence(Ordering::SeqCst);
    // Where there never were any, or are none any more, no call is made.
    let maker = books.maker.load(Ordering::Relaxed);
    let none = maker == 0 || books.over.load(Ordering::Relaxed) && !is_serving();
    if none || maker != process() {
        return;
    }
    let _blocked = Blocked::all();
    books.lock.with(|()| {
        if !books.over.swap(true, Ordering::Relaxed) {
            slot()
                .shm_reasons
                .fetch_or(shm_reason::ENDED, Ordering::Relaxed);
        }
        if books.threads[0].is_alive() {
            let _ = call(books, END, &(0..0));
            // Where it was not heard, the first thread sees this when it looks next.
            books.ending.store(true, Ordering::Release);
            books.threads[0].join();
        }
        // Now that the kernel has none.
        for (entry, span) in books.ranges() {
            books.end(&entry, &span);
        }
    });
}

/// Whether there are threads of ours, of this process or of one that shares the memory.
pub fn is_serving() -> bool {
    GROUND.books.threads[0].is_alive()
}

/// What of a range comes in with a page of it.
fn block_of(page: usize, block: usize, range: &Range<usize>) -> Range<usize> {
    let start = page & !(block - 1);
    range.start.max(start)..range.end.min(start.saturating_add(block))
}
