//! Makes memory resident with several threads: [`populate`], and [`Events`] for the calls of a
//! program that do so on one.
//!
//! MAP_POPULATE, MADV_POPULATE_WRITE, mlock(2) and the like fault an address range in on the
//! calling thread. A fault takes the mmap lock shared, so several threads can fault pieces of a
//! range in at once.
//! Then the program's own call finds the pages, and does what else it does: its result, its errors
//! and its limits stay the kernel's. A range that is populated whole is dense, so its blocks need no
//! credit of [`crate::density`] to be huge.
//!
//! Helpers are threads made for one call by the calling thread, whose memory policy, CPUs, cgroup
//! and credentials they inherit; they have left when the call returns. They fault in no more than
//! the call would, so a limit is met where it would be met without them. A signal for the caller
//! ends their work, and so do a change of privilege and a filter in another thread; the program's
//! own call does the rest.
#![expect(unsafe_code, reason = "threads are made here, on stacks of their own")]

use core::cell::Cell;
use core::ops::Range;
use core::ptr::with_exposed_provenance_mut as at;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering, fence};
use core::time::Duration;

use rustix::io::{Errno, Result};
use rustix::mm::{self, MapFlags, MlockAllFlags, MlockFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities};

use crate::events::Mechanism;
use crate::gather;
use crate::ledger::{Slot, stats};
use crate::orders::MAX_POPULATE_WORKERS;
use crate::sync::{Deadline, Word};
use crate::{density, pool, sandbox};
use jumbo_sys::proc::each_mapping;
use jumbo_sys::{self as sys, Blocked, Maps, Thread, map_own};

/// Minimum length of a range that several threads populate: one zeroes it in ten milliseconds, a
/// hundred times as long as it takes to make a thread.
pub const MIN_BYTES: usize = 64 << 20;
/// Length of a piece, which one thread faults in without a look at the others.
const PIECE_BYTES: usize = 8 << 20;
/// Parts of a range that are populated before the program's call.
const MAX_PARTS: usize = 32;
/// Stack of a helper, of which it needs a few hundred bytes.
const STACK_BYTES: usize = 32 << 10;
/// Timeout of [`stop_all`].
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of threads of a call; 0 before the start.
static MAX_THREADS: AtomicU32 = AtomicU32::new(0);
static MIN_LENGTH: AtomicUsize = AtomicUsize::new(MIN_BYTES);
crate::one_page! {
    /// Calls that have helpers, or are [`undisturbed`], now.
    static TEAM_COUNT: AtomicU32 = AtomicU32::new(0);
    /// Threads that wait in [`stop_all`].
    static STOP_COUNT: AtomicU32 = AtomicU32::new(0);
}

/// Kind of the faults, which decides what memory without a page gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// Pages of its own, as a write does. MADV_POPULATE_WRITE, Linux 5.14.
    Write,
    /// Pages that a read finds: those of a file or of shared memory, or the zero page.
    /// MADV_POPULATE_READ, Linux 5.14.
    Read,
}

/// Starts [`Events`]. `threads` is the maximum number of threads of a call, the caller included; 0:
/// its CPUs, at most 4. `min_bytes`: [`MIN_BYTES`], except in tests.
pub fn start(threads: u32, min_bytes: usize) {
    MIN_LENGTH.store(min_bytes, Ordering::Relaxed);
    let threads = match threads {
        0 => gather::default_threads(),
        some => some,
    };
    MAX_THREADS.store(threads, Ordering::Relaxed);
}

/// Makes a range of addresses resident with at most `threads` threads, the caller included; 0: its
/// CPUs, at most 4. Returns the number of threads. No byte changes that a thread could read.
///
/// `address` and `length` are multiples of the base page. Huge pages come where the range is
/// advised (MADV_HUGEPAGE). A range below [`MIN_BYTES`] is populated by the caller alone.
///
/// # Errors
/// Of the kernel, with a part of the range resident. `ENOMEM`: no memory, or a hole in the range;
/// `EFAULT`: a missing hugetlb page, or the end of a file; `EHWPOISON`: broken memory; `EINVAL`: a
/// kernel before Linux 5.14, unaligned addresses, memory without that access or of a driver;
/// `EAGAIN`: the process has entered a seccomp filter, or shares its memory with its parent
/// (vfork(2)).
pub fn populate(address: usize, length: usize, access: Access, threads: u32) -> Result<u32> {
    let range = address..address.checked_add(length).ok_or(Errno::INVAL)?;
    let threads = match threads {
        0 => gather::default_threads(),
        some => some.min(MAX_POPULATE_WORKERS),
    };
    match length >= MIN_BYTES && threads > 1 {
        true => share(&range, access, threads),
        false => fault_in(address, length, access).map(|()| 1),
    }
}

/// Pieces of a range, which threads claim.
struct Pieces {
    next: AtomicUsize,
    end: usize,
    piece: usize,
    access: Access,
    /// errno of the first error; 0: none.
    refused: AtomicI32,
}

impl Pieces {
    /// Populates the next piece; false if there is none, or after an error.
    fn populate_next(&self) -> bool {
        let next = |at: usize| (at < self.end).then(|| self.end_of(at));
        let relaxed = Ordering::Relaxed;
        if self.refused.load(relaxed) != 0 {
            return false;
        }
        let Ok(at) = self.next.fetch_update(relaxed, relaxed, next) else {
            return false;
        };
        if let Err(errno) = fault_in(at, self.end_of(at) - at, self.access) {
            self.refuse(errno);
        }
        true
    }

    /// Returns the end of the piece that starts at `at`: pieces end at multiples of their length.
    fn end_of(&self, at: usize) -> usize {
        ((at / self.piece + 1) * self.piece).min(self.end)
    }

    fn refuse(&self, errno: Errno) {
        let (errno, relaxed) = (errno.raw_os_error(), Ordering::Relaxed);
        let _ = (self.refused).compare_exchange(0, errno, relaxed, relaxed);
    }

    fn left(&self) -> usize {
        let left = self.end.saturating_sub(self.next.load(Ordering::Relaxed));
        left.div_ceil(self.piece)
    }
}

/// Does work that makes other calls than the program, with all signals blocked: a filter or a change
/// of privilege in another thread waits for its end. `None` without it, if one was first, or in a
/// process that shares its memory with its parent.
fn undisturbed<T>(work: impl FnOnce(&Blocked) -> T) -> Option<T> {
    if sandbox::is_entered() || !gather::is_own() {
        return None;
    }
    let blocked = Blocked::all();
    TEAM_COUNT.fetch_add(1, Ordering::AcqRel);
    // A thread that enters a filter or stops all sees the count, or is seen here.
    fence(Ordering::SeqCst);
    let is_late = sandbox::is_entered() || is_stopped();
    let answer = (!is_late).then(|| work(&blocked));
    TEAM_COUNT.fetch_sub(1, Ordering::AcqRel);
    TEAM_COUNT.wake(u32::MAX >> 1);
    answer
}

/// Populates a range with at most `threads` threads; returns their number.
fn share(range: &Range<usize>, access: Access, threads: u32) -> Result<u32> {
    let pieces = Pieces {
        next: AtomicUsize::new(range.start),
        end: range.end,
        piece: piece_bytes(range, threads),
        access,
        refused: AtomicI32::new(0),
    };
    let mut most = 1;
    // Each round ends with a signal for the caller, whose handler may jump out of here: no helper
    // is left then.
    while pieces.left() > 0 && pieces.refused.load(Ordering::Relaxed) == 0 {
        match undisturbed(|blocked| work(&pieces, threads - 1, blocked)) {
            Some(helpers) => most = most.max(1 + helpers),
            None => return Err(Errno::AGAIN),
        }
    }
    match pieces.refused.load(Ordering::Relaxed) {
        0 => Ok(most),
        errno => Err(Errno::from_raw_os_error(errno)),
    }
}

/// Populates pieces with up to `count` helpers, until none is left or a signal is pending. Returns
/// the number of helpers.
fn work(pieces: &Pieces, count: u32, blocked: &Blocked) -> u32 {
    let helpers = [const { Thread::none() }; MAX_POPULATE_WORKERS as usize - 1];
    let has_to_end = AtomicBool::new(false);
    let help = || {
        let _ = rustix::thread::set_name(c"jumbo-populate");
        let is_ended = || has_to_end.load(Ordering::Relaxed) || is_stopped();
        let mut has_more = true;
        while has_more && !is_ended() {
            has_more = pieces.populate_next();
        }
    };
    let count = (count as usize).min(pieces.left().saturating_sub(1));
    let length = count * STACK_BYTES;
    let (prot, flags) = (
        ProtFlags::READ | ProtFlags::WRITE,
        MapFlags::PRIVATE | MapFlags::NORESERVE,
    );
    let stacks = match count {
        0 => None,
        _ => map_own(length, prot, flags).ok(),
    };
    let stacks = stacks.map(|stacks| stacks.expose_provenance());
    let mut made = 0;
    if let Some(stacks) = stacks {
        // SAFETY: no child uses the stacks.
        let _ = unsafe { sys::advise(stacks, length, libc::MADV_DONTFORK) };
        for (index, helper) in helpers.iter().enumerate().take(count) {
            let stack = (stacks + index * STACK_BYTES, STACK_BYTES);
            // SAFETY: all signals are blocked. Each helper has a stack of its own, and is joined
            // below, before the stacks, `help` and `helpers` go.
            if !unsafe { helper.start(Thread::FLAGS, stack, &help) } {
                break;
            }
            made += 1;
        }
    }
    while pieces.populate_next() && !blocked.has_pending() {
        if is_stopped() {
            pieces.refuse(Errno::AGAIN);
        }
    }
    has_to_end.store(true, Ordering::Relaxed);
    for helper in &helpers {
        helper.join();
    }
    if let Some(stacks) = stacks {
        // SAFETY: mapped above, and no thread uses it any more.
        let _ = unsafe { sys::unmap(stacks, length) };
    }
    made
}

/// Returns the length of a piece. Threads that fault in one hugetlb page wait for each other. Such a
/// page may have 1 GiB if that divides both ends of the range, and is none of [`density`]'s blocks.
fn piece_bytes(range: &Range<usize>, threads: u32) -> usize {
    const GIB: usize = 1 << 30;
    let share = 1 << (range.len() / threads as usize).max(1).ilog2();
    let may_be_gigantic = (range.start | range.len()).is_multiple_of(GIB);
    match may_be_gigantic && !density::is_cut(range) {
        true => share.clamp(PIECE_BYTES, GIB),
        false => share.clamp(rustix::param::page_size(), PIECE_BYTES),
    }
}

/// Faults memory in on this thread.
fn fault_in(address: usize, length: usize, access: Access) -> Result<()> {
    match access {
        Access::Write => pool::populate(address, length, density::block_bytes()),
        // SAFETY: the kernel checks the range, and reads change no byte.
        Access::Read => unsafe { sys::advise(address, length, libc::MADV_POPULATE_READ) },
    }
}

fn is_stopped() -> bool {
    STOP_COUNT.load(Ordering::Acquire) > 0
}

/// Waits until no call has helpers or is [`undisturbed`], at most ten seconds.
fn stop_all() {
    // The filter was counted before.
    fence(Ordering::SeqCst);
    if TEAM_COUNT.load(Ordering::Acquire) == 0 || !gather::is_own() {
        return;
    }
    let deadline = Deadline::after(STOP_TIMEOUT);
    STOP_COUNT.fetch_add(1, Ordering::AcqRel);
    while let count @ 1.. = TEAM_COUNT.load(Ordering::Acquire)
        && !deadline.has_passed()
    {
        TEAM_COUNT.wait(count, Some(deadline.left()));
    }
    STOP_COUNT.fetch_sub(1, Ordering::AcqRel);
}

/// Populates a long range on behalf of the program; true if all of it is resident.
fn shared(range: &Range<usize>, access: Access) -> bool {
    let threads = MAX_THREADS.load(Ordering::Relaxed);
    if threads < 2 || range.len() < MIN_LENGTH.load(Ordering::Relaxed) {
        return false;
    }
    let answer = share(range, access, threads);
    if answer == Err(Errno::INVAL) && !sys::has_populate() {
        MAX_THREADS.store(1, Ordering::Relaxed);
    }
    if let Ok(threads) = answer {
        let slot = stats::slot();
        Slot::add(&slot.populated, range.len() as u64);
        let workers = &slot.populate_workers;
        workers.fetch_max(threads.into(), Ordering::Relaxed);
    }
    answer.is_ok()
}

/// Makes a new private or shared mapping resident, as MAP_POPULATE does: as far as possible.
pub fn mapping(address: usize, length: usize) {
    let range = address..address + length.next_multiple_of(rustix::param::page_size());
    undisturbed(|_| density::begin_filling(&range));
    if !shared(&range, Access::Write) {
        let _ = fault_in(range.start, range.len(), Access::Write);
    }
    undisturbed(|_| density::end_filling(&range));
}

/// Populates a range before `call`, which locks it, and populates it on one thread. Nothing is
/// populated if the kernel does not accept the lock. A lock reads shared memory. `stops`: it stops at
/// what it cannot populate, as mlock(2) does.
fn before<T>(
    range: &Range<usize>,
    stops: bool,
    is_accepted: impl FnOnce() -> bool,
    call: impl FnOnce() -> T,
) -> T {
    let begin = |_: &Blocked| {
        let parts = is_accepted().then(|| Parts::of(range))?;
        (parts.each()).for_each(|(part, _)| density::begin_filling(part));
        Some(parts)
    };
    let Some(parts) = undisturbed(begin).flatten() else {
        return call();
    };
    let mut end = range.start;
    for (part, is_private) in parts.each() {
        let access = match *is_private {
            true => Access::Write,
            false => Access::Read,
        };
        if stops && part.start != end {
            break;
        }
        let is_whole = shared(part, access);
        if stops && !is_whole {
            break;
        }
        end = part.end;
    }
    let answer = call();
    undisturbed(|_| (parts.each()).for_each(|(part, _)| density::end_filling(part)));
    answer
}

/// The writable parts of a range without a file on a disk, as far as names in /proc/PID/maps tell;
/// true: private memory.
struct Parts {
    found: [(Range<usize>, bool); MAX_PARTS],
    count: usize,
}

impl Parts {
    fn of(range: &Range<usize>) -> Self {
        const NAMES: [&[u8]; 5] = [
            b"/dev/zero",
            b"/memfd:",
            b"/SYSV",
            b"/dev/shm/",
            b"/anon_hugepage",
        ];
        let mut parts = Self {
            found: [const { (0..0, false) }; MAX_PARTS],
            count: 0,
        };
        if parts.query(range).is_ok() {
            return parts;
        }
        parts.count = 0;
        let _ = each_mapping(|line| {
            let part = line.start.max(range.start)..line.end.min(range.end);
            let is_named = || NAMES.iter().any(|name| line.is_named(name));
            if !part.is_empty() && line.writable && (line.is_private_anonymous() || is_named()) {
                parts.add(part, line.private);
            }
            line.start >= range.end
        });
        parts
    }

    /// Adds the mappings of a range without memory on a file. /proc/self/maps has those below it,
    /// too, which may be thousands.
    ///
    /// # Errors
    /// Those of [`Maps::mapping`]; EINVAL: memory on a file, whose name tells its kind.
    fn query(&mut self, range: &Range<usize>) -> Result<()> {
        let maps = Maps::open()?;
        let mut at = range.start;
        while at < range.end {
            let mapping = maps.mapping(at)?;
            let end = mapping.range.end.min(range.end);
            match (mapping.is_writable, mapping.is_private_anonymous) {
                (true, true) => self.add(at..end, true),
                (true, false) => return Err(Errno::INVAL),
                (false, _) => {}
            }
            at = end;
        }
        Ok(())
    }

    /// Adds a mapping, in the order of addresses. Advice may have split one, and short ones do not
    /// matter.
    fn add(&mut self, part: Range<usize>, is_private: bool) {
        let last = self.count.checked_sub(1);
        if let Some((before, kind)) = last.and_then(|last| self.found.get_mut(last)) {
            if before.end == part.start && *kind == is_private {
                before.end = part.end;
                return;
            }
            self.count -= usize::from(before.len() < density::block_bytes());
        }
        if let Some(place) = self.found.get_mut(self.count) {
            *place = (part, is_private);
            self.count += 1;
        }
    }

    fn each(&self) -> impl Iterator<Item = &(Range<usize>, bool)> {
        self.found.iter().take(self.count)
    }
}

/// Reports whether a call for a range of `length` bytes has a part that is populated here.
pub fn concerns(length: usize) -> bool {
    MAX_THREADS.load(Ordering::Relaxed) > 0
        && length >= density::block_bytes().max(2)
        && !sandbox::is_entered()
        && !sandbox::is_entered_later()
}

/// Makes mlock(2) by `call`, after several threads have populated the range. The kernel accepts the
/// lock first: a refused one populates nothing. MLOCK_ONFAULT of mlock2(2), Linux 4.4.
pub fn lock<T>(address: usize, length: usize, call: impl FnOnce() -> T) -> T {
    let page = rustix::param::page_size();
    let start = address & !(page - 1);
    let end = address.checked_add(length);
    let end = end.and_then(|end| end.checked_next_multiple_of(page));
    match end.filter(|end| concerns(end - start)) {
        Some(end) => before(
            &(start..end),
            true,
            || is_accepted(start, end - start),
            call,
        ),
        None => call(),
    }
}

/// Locks a new mapping, as MAP_LOCKED does: populated as far as possible. False if the kernel
/// refuses the lock.
pub fn lock_mapping(address: usize, length: usize) -> bool {
    let range = address..address + length.next_multiple_of(rustix::param::page_size());
    let answer = Cell::new(false);
    let accept = || {
        answer.set(is_accepted(address, length));
        answer.get()
    };
    before(&range, true, accept, || {
        if answer.get() {
            // SAFETY: a lock changes no byte.
            let _ = unsafe { mm::mlock(at(address), length) };
        }
    });
    answer.get()
}

fn is_accepted(address: usize, length: usize) -> bool {
    // SAFETY: a lock changes no byte.
    unsafe { mm::mlock_with(at(address), length, MlockFlags::ONFAULT) }.is_ok()
}

/// Makes mlockall(2) by `call`, after several threads have populated the memory. As for [`lock`],
/// with MCL_ONFAULT.
pub fn lock_all<T>(flags: i32, call: impl FnOnce() -> T) -> T {
    let all = MlockAllFlags::from_bits_retain(flags.cast_unsigned());
    let populates = all.contains(MlockAllFlags::CURRENT) && !all.contains(MlockAllFlags::ONFAULT);
    let is_accepted = || mm::mlockall(all | MlockAllFlags::ONFAULT).is_ok();
    match populates && concerns(usize::MAX) {
        true => before(&(0..usize::MAX), false, is_accepted, call),
        false => call(),
    }
}

/// Registers buffers with an io_uring by `call`, after several threads have populated them: `count`
/// iovecs at `vectors`. Adjacent buffers are one range. `call` takes the address of iovecs, and returns
/// its answer and the error. The kernel populates up to the buffer that exceeds RLIMIT_MEMLOCK, or that
/// it refuses.
///
/// The kernel charges the limit for the whole huge page of which a buffer is a part (io_uring/rsrc.c).
/// If it refuses that, the huge pages around the buffers are split, and the call is made again.
pub fn register<T>(vectors: usize, count: usize, call: impl Fn(usize) -> (T, Option<Errno>)) -> T {
    // A ring that takes buffers now reads the iovecs, here at an address that no process has.
    let nowhere = usize::MAX & !(rustix::param::page_size() - 1);
    let takes_buffers = || call(nowhere).1 == Some(Errno::FAULT);
    if concerns(usize::MAX) && sys::unfiltered(takes_buffers) == Some(true) {
        populate_buffers(vectors, count);
    }
    match call(vectors) {
        (_, Some(Errno::NOMEM)) => {}
        (answer, _) => return answer,
    }
    each_buffer(vectors, count, |buffer| {
        let range = pages_of(buffer);
        // SAFETY: the advice changes no byte. The kernel splits a huge page of which it gets a part:
        // MADV_COLD, Linux 5.4.
        let _ = unsafe { sys::advise(range.start, range.len(), libc::MADV_COLD) };
    });
    call(vectors).0
}

fn populate_buffers(vectors: usize, count: usize) {
    let mut left = sys::unfiltered(pinnable_bytes).unwrap_or(0);
    let mut range = 0..0;
    each_buffer(vectors, count, |buffer| {
        if buffer.start != range.end {
            left = register_range(&range, left);
            range.start = buffer.start;
        }
        range.end = buffer.end;
    });
    register_range(&range, left);
}

/// Maximum size of a buffer of a ring (io_uring/rsrc.c).
const MAX_BUFFER_BYTES: usize = 1 << 30;

/// Visits the buffers of `count` iovecs up to the first that the kernel refuses (EFAULT).
fn each_buffer(vectors: usize, count: usize, mut visit: impl FnMut(Range<usize>)) {
    const BATCH: usize = 32;
    for first in (0..count).step_by(BATCH) {
        let mut words = [0; 2 * BATCH];
        let at = vectors.wrapping_add(first * 2 * size_of::<usize>());
        let wanted = 2 * BATCH.min(count - first);
        let words = words.get_mut(..wanted).unwrap_or_default();
        if sys::unfiltered(|| sys::copy_words(at, words)) != Some(Ok(wanted)) {
            return;
        }
        for vector in words.chunks_exact(2) {
            match *vector {
                // An empty slot, Linux 5.13.
                [0, 0] => {}
                [start, length @ 1..=MAX_BUFFER_BYTES] if start != 0 => {
                    visit(start..start.saturating_add(length));
                }
                _ => return,
            }
        }
    }
}

/// Returns the pages of which a range has a part.
fn pages_of(range: Range<usize>) -> Range<usize> {
    let page = rustix::param::page_size();
    let end = range.end.checked_next_multiple_of(page);
    range.start & !(page - 1)..end.unwrap_or(range.end)
}

/// Returns the bytes that this process may pin. RLIMIT_MEMLOCK, getrlimit(2).
fn pinnable_bytes() -> usize {
    let may_exceed = |sets: CapabilitySets| sets.effective.contains(CapabilitySet::IPC_LOCK);
    let limit = getrlimit(Resource::Memlock).current;
    match limit.filter(|_| !capabilities(None).is_ok_and(may_exceed)) {
        Some(limit) => usize::try_from(limit).unwrap_or(usize::MAX),
        None => usize::MAX,
    }
}

/// Populates buffers if they are within the `left` bytes; returns what is left then.
fn register_range(range: &Range<usize>, left: usize) -> usize {
    let rest = left.checked_sub(range.len());
    if rest.is_some() && concerns(range.len()) {
        let range = pages_of(range.clone());
        if sys::unfiltered(|| is_uniform(&range)) == Some(true) {
            mapping(range.start, range.len());
        }
    }
    rest.unwrap_or(0)
}

/// Reports whether all of a range is memory of one kind that can be populated. At a hole, a file or
/// memory without access the kernel would stop, and threads could not.
fn is_uniform(range: &Range<usize>) -> bool {
    let parts = Parts::of(range);
    parts.count == 1 && parts.each().all(|(part, _)| part == range)
}

/// Events that populate memory, or forbid helpers.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    unsafe fn advise(
        address: usize,
        length: usize,
        advice: i32,
    ) -> Option<core::result::Result<(), i32>> {
        let page = rustix::param::page_size();
        let is_aligned = (address | length).is_multiple_of(page);
        if advice != libc::MADV_POPULATE_WRITE || !is_aligned || !concerns(length) {
            return None;
        }
        let range = address..address.checked_add(length)?;
        if length >= MIN_LENGTH.load(Ordering::Relaxed) && !is_uniform(&range) {
            return None;
        }
        undisturbed(|_| density::begin_filling(&range));
        let answer = match shared(&range, Access::Write) {
            true => Ok(()),
            // SAFETY: the program's own call, which changes no byte.
            false => unsafe { sys::advise(address, length, advice) },
        };
        undisturbed(|_| density::end_filling(&range));
        Some(answer.map_err(Errno::raw_os_error))
    }

    fn changing_privilege() {
        stop_all();
    }

    fn confining(_is_first: bool) {
        stop_all();
    }

    unsafe fn is_forked(_pid: u32) {
        TEAM_COUNT.store(0, Ordering::Relaxed);
        STOP_COUNT.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping_of(length: usize) -> usize {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        map_own(length, prot, flags).unwrap().expose_provenance()
    }

    #[test]
    fn every_piece_is_claimed_once() {
        for (start, length, threads) in [
            (0x1000, 0x3000, 2),
            (0x20_0000, 100 << 20, 3),
            (1 << 30, 4 << 30, 2),
            (0x1000, 1 << 30, 64),
        ] {
            let range = start..start + length;
            let pieces = Pieces {
                next: AtomicUsize::new(range.start),
                end: range.end,
                piece: piece_bytes(&range, threads),
                access: Access::Read,
                refused: AtomicI32::new(0),
            };
            assert!(pieces.piece.is_power_of_two(), "{range:x?}");
            let (mut at, mut count) = (start, 0);
            while at < range.end {
                let end = pieces.end_of(at);
                assert!(end > at && end <= range.end);
                (at, count) = (end, count + 1);
            }
            assert!(count >= threads as usize, "{range:x?}: {count}");
        }
    }

    #[test]
    fn a_range_is_resident_after_several_threads() {
        let length = MIN_BYTES + 4096;
        let start = mapping_of(length);
        assert_eq!(populate(start, length, Access::Write, 3), Ok(3));
        assert!(density::is_resident(&(start..start + length), 0));
        // SAFETY: mapped above.
        unsafe { sys::unmap(start, length) }.unwrap();
        assert_eq!(populate(start, length, Access::Write, 3), Err(Errno::NOMEM));
        assert_eq!(
            populate(start + 1, length, Access::Read, 1),
            Err(Errno::INVAL)
        );
    }
}
