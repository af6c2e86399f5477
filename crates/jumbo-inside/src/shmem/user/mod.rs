//! Shared memory whose first touch populates a whole block: [`register`]. For hosts whose controls
//! allow no huge page.
//!
//! Threads of this process resolve the faults of a userfaultfd(2) in user mode, which needs no
//! privilege. The program takes one fault for each block instead of one for each base page. The
//! memory still has base pages.
//!
//! - No touch waits for ever. A range that cannot be filled is unregistered, and without a thread
//!   nothing is registered: the kernel then resolves the faults.
//! - Blocks are populated only while the host and the memory cgroup have room for all unpopulated
//!   memory: a program that touches little of a large mapping needs no more memory than before.
//! - A system call into unpopulated pages would fail with EFAULT: [`touch`] precedes the calls that
//!   the preload library sees.
//! - The C library does not know the threads. They exit, with that of [`crate::watch`], before
//!   calls that require a single thread or change the process's identity. They stay over fork(2):
//!   they hold no lock and leave nothing half done for a child, and the parent's ranges stay
//!   served. A child has no range: the kernel resolves its faults.
//! - The kernel tracks ranges that are mapped anew, moved, protected or dropped: memory that was
//!   moved or mapped anew is not registered. The NUMA policy of the thread that made these threads
//!   applies, not that of the touching thread. A userfaultfd of the program finds the ranges busy.
//!
//! Invariant: pages are populated with zeroes, where no page is, or not at all.
#![expect(unsafe_code, reason = "makes a thread on a stack of its own")]

mod budget;
mod readahead;
mod serve;
mod state;
#[cfg(test)]
mod tests;

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering, fence};
use core::time::Duration;

use rustix::io::Errno;

use state::{DROP, END, FAILED, FILL, PAGE, READY, REGISTER, Registry, STATE, State};

use crate::density::record_reason;
use crate::headroom::{has_room, has_tasks};
use crate::ledger::shm_reason as reason;
use crate::ledger::stats::slot;
use crate::sandbox;
use crate::standing::{self, Leader};
use crate::sys::{self, Blocked, Thread, process, request, wait};
use crate::watch::{self, Others};

/// Maximum bytes populated before a system call: it may use little of a large buffer.
const AHEAD_BYTES: usize = 1 << 20;

/// Number of registered ranges; 0 in the child of a fork. Machine code reads it.
pub static RANGES: &AtomicUsize = &STATE.registry.range_count;

/// Maximum readahead of a stream, in percent of the bytes that it has populated.
pub(super) static MAX_WASTE: AtomicUsize = AtomicUsize::new(5);

/// Returns the [`reason`] bit for an errno.
fn reason_of(errno: Errno) -> u32 {
    match errno {
        Errno::NOMEM | Errno::MFILE | Errno::NFILE => reason::NO_MEMORY,
        _ => reason::NO_USERFAULTFD,
    }
}

/// Registers a shared mapping of the caller: a touch then populates `block` bytes, a power of two
/// of at least a base page.
///
/// # Errors
/// Bit of [`reason`]: the kernel resolves the faults, as without this call.
///
/// # References
/// userfaultfd(2), user mode: Linux 5.11.
pub fn register(address: usize, length: usize, block: usize) -> Result<(), u32> {
    if sandbox::is_entered() {
        return Err(reason::FILTER);
    }
    let registry = &STATE.registry;
    let process = process();
    if !block.is_power_of_two() || block < PAGE {
        return Err(reason::NO_USERFAULTFD);
    }
    let _blocked = Blocked::all();
    let registered = registry.lock.with(|()| {
        let owner = registry.owner.load(Ordering::Relaxed);
        if registry.is_disabled.load(Ordering::Relaxed) || ![0, process].contains(&owner) {
            return Err(reason::ENDED);
        }
        if !registry.threads[0].is_alive() {
            start(registry, process)?;
        }
        let range = address..address.saturating_add(length);
        if !has_room(registry.remaining().saturating_add(length)) {
            return Err(reason::NO_MEMORY);
        }
        registry.readahead.forget(&range);
        // An earlier mapping there was unmapped by a system call that bypassed the C library.
        unregister(registry, &range);
        if !registry.add(&range, block, 0) {
            return Err(reason::TOO_MANY);
        }
        let block = block as u64;
        slot().shm_user_block.fetch_max(block, Ordering::Relaxed);
        let result = call(registry, REGISTER, &range);
        if result.is_err() {
            unregister(registry, &range);
        }
        result
    });
    registered.unwrap_or(Err(reason::ENDED))
}

/// Starts the threads. Under the lock, with signals blocked.
fn start(registry: &'static Registry, process: i32) -> Result<(), u32> {
    if standing::compare() == Leader::Gone {
        return Err(reason::ENDED);
    }
    if !has_tasks() {
        return Err(reason::NO_MEMORY);
    }
    let state = core::ptr::from_ref(&STATE).expose_provenance();
    // SAFETY: the content stays; a child finds zeroes, the state without threads. MADV_WIPEONFORK,
    // Linux 4.14.
    unsafe { sys::advise(state, size_of::<State>(), libc::MADV_WIPEONFORK) }.map_err(reason_of)?;
    watch::with(&Others(end));
    registry.owner.store(process, Ordering::Relaxed);
    // Another thread may have announced a seccomp filter, and found no threads to end.
    fence(Ordering::SeqCst);
    if sandbox::is_entered() {
        registry.is_disabled.store(true, Ordering::Relaxed);
        return Err(reason::FILTER);
    }
    registry.is_stopping.store(false, Ordering::Relaxed);
    registry.started.store(0, Ordering::Release);
    // SAFETY: signals are blocked. The previous thread on this stack has exited; all data is
    // static.
    if !unsafe { registry.threads[0].start(Thread::FLAGS, STATE.stack(0), &serve::first) } {
        return Err(reason::NO_MEMORY);
    }
    loop {
        match registry.started.load(Ordering::Acquire) {
            0 => drop(wait(&registry.started, 0, Duration::from_secs(1))),
            READY => return Ok(()),
            failed => {
                registry.threads[0].join();
                return Err(reason_of(errno(failed)));
            }
        }
    }
}

fn errno(failed: u32) -> Errno {
    Errno::from_raw_os_error(failed.saturating_sub(FAILED).cast_signed())
}

/// Sends a request to a thread by a touch of the doorbell, which returns when it is served, or
/// without a thread. Under the lock, with signals blocked.
fn call(registry: &Registry, request: u32, range: &Range<usize>) -> Result<(), u32> {
    registry.address.store(range.start, Ordering::Relaxed);
    registry.length.store(range.len(), Ordering::Relaxed);
    registry.reply.store(0, Ordering::Relaxed);
    registry.request.store(request, Ordering::Release);
    let doorbell = core::ptr::from_ref(&STATE.doorbell).expose_provenance();
    // SAFETY: the page holds no data.
    unsafe { sys::advise(doorbell, PAGE, libc::MADV_DONTNEED) }.map_err(reason_of)?;
    // SAFETY: the page is mapped, at least as zeroes.
    unsafe { core::ptr::read_volatile(STATE.doorbell.0.as_ptr()) };
    match registry.reply.load(Ordering::Acquire) {
        0 => Err(reason::ENDED),
        READY => Ok(()),
        failed => Err(reason_of(errno(failed))),
    }
}

/// Unregisters a range before it is unmapped, moved or mapped anew, for good even if that fails. A
/// length of less than a page means the whole registered range that begins there.
#[inline(always)]
pub fn forget(address: usize, length: usize) {
    if RANGES.load(Ordering::Relaxed) != 0 {
        forget_range(address..address.saturating_add(length));
    }
}

#[cold]
fn forget_range(mut range: Range<usize>) {
    let registry = &STATE.registry;
    let mut ranges = registry.ranges().map(|(_, span)| span.range());
    if range.len() < PAGE
        && let Some(registered) = ranges.find(|registered| registered.start == range.start)
    {
        range = registered;
    }
    leave(&pages(&range));
}

/// Rounds a range outwards to whole pages.
fn pages(range: &Range<usize>) -> Range<usize> {
    let last = range.end.saturating_add(PAGE - 1);
    range.start & !(PAGE - 1)..last & !(PAGE - 1)
}

/// Unregisters whole pages.
fn leave(range: &Range<usize>) {
    let registry = &STATE.registry;
    let _blocked = Blocked::all();
    registry.lock.with(|()| unregister(registry, range));
}

/// Unregisters whole pages, under the lock, with signals blocked. The registry keeps all that the
/// kernel has registered: system calls into pages that it lacks would fail.
fn unregister(registry: &Registry, range: &Range<usize>) {
    for (entry, registered) in registry.ranges() {
        let cut = registry.cut(range, &registered.range());
        if !cut.is_empty() {
            // Fails if nothing is mapped there any more.
            let _ = call(registry, DROP, &cut);
            registry.remove(&entry, &registered, &cut);
        }
    }
}

/// Populates or unregisters unpopulated pages before a system call that reads or writes them. Any
/// address is valid: this function does not access the memory. errno is unchanged.
#[inline(always)]
pub fn touch(address: usize, length: usize) {
    if RANGES.load(Ordering::Relaxed) != 0 {
        populate(&(address..address.saturating_add(length)));
    }
}

#[cold]
fn populate(touched: &Range<usize>) {
    let touched = pages(touched);
    let near = touched.start.saturating_add(AHEAD_BYTES);
    for (_, span) in STATE.registry.ranges() {
        let range = span.range();
        let (start, end) = (range.start.max(touched.start), range.end.min(touched.end));
        let mut at = start;
        while at < end.min(near) {
            at = populate_part(at..end.min(near));
        }
        if at < end {
            leave(&(at..end));
        }
    }
}

/// Populates missing pages at the start of a range; returns the end of the part that it handled.
fn populate_part(range: Range<usize>) -> usize {
    let mut present = [0u8; AHEAD_BYTES / PAGE];
    let pages = (range.len() / PAGE).min(present.len());
    let end = range.start + pages * PAGE;
    let vector = present.as_mut_ptr().expose_provenance();
    let arguments = [range.start, end - range.start, vector, 0, 0, 0];
    // SAFETY: mincore(2) writes a byte for each page.
    if unsafe { request(libc::SYS_mincore, arguments) }.is_err() {
        // Not wholly mapped.
        leave(&(range.start..end));
        return end;
    }
    let registry = &STATE.registry;
    let mut at = range.start;
    for run in present[..pages].chunk_by(|one, other| one & 1 == other & 1) {
        let missing = at..at + run.len() * PAGE;
        at = missing.end;
        if run[0] & 1 == 0 {
            let _blocked = Blocked::all();
            registry.lock.with(|()| {
                // Fails if the run is more than one mapping by now, or without memory.
                if call(registry, FILL, &missing).is_err() {
                    unregister(registry, &missing);
                }
            });
        }
    }
    end
}

/// Ends the threads for good. No range is registered any more.
pub fn end() {
    let registry = &STATE.registry;
    fence(Ordering::SeqCst);
    // No system call if there never were threads, or no longer are.
    let owner = registry.owner.load(Ordering::Relaxed);
    let has_ended =
        || registry.is_disabled.load(Ordering::Relaxed) && !registry.threads[0].is_alive();
    if owner == 0 || has_ended() || owner != process() {
        return;
    }
    let _blocked = Blocked::all();
    registry.lock.with(|()| {
        if !registry.is_disabled.swap(true, Ordering::Relaxed) {
            record_reason(reason::ENDED);
        }
        if registry.threads[0].is_alive() {
            let _ = call(registry, END, &(0..0));
            // If no thread took the request, the first thread reads this flag at its next check.
            registry.is_stopping.store(true, Ordering::Release);
            registry.threads[0].join();
        }
        // Only now: the kernel has no registered range any more.
        for (entry, span) in registry.ranges() {
            registry.end(&entry, &span);
        }
    });
}
