//! `--reaper=auto`: a reaper once the process has allocated much private memory, as long as no
//! resource bound to the memory would outlive the program.
//!
//! Allocations are counted, since no event reports a touch: live blocks of the heap, memory of the
//! slabs, private writable mappings. Past [`MIN_PRIVATE_BYTES`] the kernel's list of mappings
//! decides; a background thread has read its slow list of locks by then. A resource that would
//! outlive the program rules out a reaper for good. One acquired later ends it: shmat(2),
//! io_setup(2), a mapping of a device or a socket, a mapping of a file that is locked or open for
//! writing, a lock or lease of a mapped file. A lock that another process takes later on a shared
//! open file is not detected.

use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use rustix::fd::BorrowedFd;

use jumbo_inside::events::Mapping;
use jumbo_inside::heap;
use jumbo_inside::reaper::{self, State, Survey};
use jumbo_inside::slab;
use jumbo_inside::{sandbox, watch};
use jumbo_sys as sys;

/// Minimum private memory for a reaper.
const MIN_PRIVATE_BYTES: u64 = 1 << 30;
/// Allocations between two surveys of a process that was too small.
const SURVEY_STEP_BYTES: u64 = 256 << 20;
/// Allocations between the background scan of locks and the survey.
const AHEAD_BYTES: u64 = SURVEY_STEP_BYTES / 2;

jumbo_inside::one_page! {
    /// Allocations are checked: the process has no reaper, and may get one.
    static WATCHING: AtomicBool = AtomicBool::new(false);
    /// The process has a reaper, or had one until a call ended it for a moment.
    static GUARDING: AtomicBool = AtomicBool::new(false);
    /// Acquired resources are recorded: the process has a reaper or may get one.
    static LISTENING: AtomicBool = AtomicBool::new(false);
}
/// Code of the [`State`] of an acquired resource.
static ACQUIRED: AtomicU32 = AtomicU32::new(0);

jumbo_inside::one_page! {
    /// Bytes in blocks of the heap and of the slabs at the time of the fork.
    static INHERITED: AtomicU64 = AtomicU64::new(0);
    /// Bytes in private writable mappings.
    static MAPPED: AtomicU64 = AtomicU64::new(0);
    /// Allocated bytes at which the next check is due.
    static NEXT_CHECK: AtomicU64 = AtomicU64::new(MIN_PRIVATE_BYTES - AHEAD_BYTES);

    /// Memory of glibc's malloc is not counted: jumbo's heap is off.
    static UNCOUNTED: AtomicBool = AtomicBool::new(false);
}

/// Sets whether memory of malloc is counted. Once, before [`watch`].
pub(super) fn count(counted: bool) {
    UNCOUNTED.store(!counted, Ordering::Relaxed);
}

/// Starts watching, in a new process or the child of a fork. Acquired resources stay acquired.
pub(super) fn watch() {
    INHERITED.store(blocks(), Ordering::Relaxed);
    MAPPED.store(0, Ordering::Relaxed);
    NEXT_CHECK.store(MIN_PRIVATE_BYTES - AHEAD_BYTES, Ordering::Relaxed);
    GUARDING.store(false, Ordering::Relaxed);
    LISTENING.store(false, Ordering::Relaxed);
    reaper::record(match UNCOUNTED.load(Ordering::Relaxed) {
        true => State::Uncounted,
        false => State::Waiting,
    });
    WATCHING.store(true, Ordering::Release);
}

/// Returns the bytes in blocks of the heap and of the slabs.
fn blocks() -> u64 {
    heap::live().saturating_add(slab::mapped() as u64)
}

/// Reports whether a reaper that ended for a call starts again.
pub(super) fn is_guarding() -> bool {
    GUARDING.load(Ordering::Acquire)
}

/// Checks for a reaper after an allocation. The caller holds no lock.
#[inline(always)]
pub(crate) fn allocated() {
    if WATCHING.load(Ordering::Relaxed) {
        check();
    }
}

/// Counts an anonymous mapping, unless it failed.
#[inline(always)]
pub(crate) fn mapped(mapping: &Mapping) {
    let own = mapping.protection & libc::PROT_WRITE != 0 && mapping.flags & libc::MAP_PRIVATE != 0;
    if WATCHING.load(Ordering::Relaxed) && own && is_made(mapping) {
        add(mapping.length);
    }
}

fn is_made(mapping: &Mapping) -> bool {
    mapping.address != libc::MAP_FAILED.addr()
}

fn add(bytes: usize) {
    MAPPED.fetch_add(bytes as u64, Ordering::Relaxed);
    allocated();
}

/// Returns the bytes that this process has allocated.
fn total() -> u64 {
    let blocks = blocks().saturating_sub(INHERITED.load(Ordering::Relaxed));
    blocks.saturating_add(MAPPED.load(Ordering::Relaxed))
}

/// Postpones the next reaper by [`SURVEY_STEP_BYTES`], before the caller ends the present one.
pub(super) fn wait_for_more() {
    if GUARDING.load(Ordering::SeqCst) && reaper::is_owner() {
        GUARDING.store(false, Ordering::SeqCst);
        LISTENING.store(false, Ordering::SeqCst);
        check_again(total());
    }
}

fn check_again(total: u64) {
    let next = total.saturating_add(SURVEY_STEP_BYTES - AHEAD_BYTES);
    NEXT_CHECK.store(next, Ordering::Relaxed);
    WATCHING.store(true, Ordering::Release);
}

#[cold]
#[inline(never)]
fn check() {
    sys::guarded(check_now);
}

fn check_now() {
    if sandbox::is_entered() {
        WATCHING.store(false, Ordering::Relaxed);
        return reaper::record(State::Seccomp);
    }
    let total = total();
    // A vfork(2) child, which runs in its parent's memory, is not the owner.
    let next = NEXT_CHECK.load(Ordering::Relaxed);
    if total < next || !reaper::is_owner() {
        return;
    }
    if total < next.saturating_add(AHEAD_BYTES) && !LISTENING.swap(true, Ordering::SeqCst) {
        NEXT_CHECK.store(next.saturating_add(AHEAD_BYTES), Ordering::Relaxed);
        return reaper::survey_soon();
    }
    // One thread decides.
    if WATCHING.swap(false, Ordering::AcqRel) && !decide() {
        check_again(total);
    }
}

/// Starts the reaper, or records the obstacle. False if the process is too small so far.
fn decide() -> bool {
    // Before the survey, so that no acquired resource is missed.
    LISTENING.store(true, Ordering::SeqCst);
    let Ok(Survey { private, outlives }) = reaper::survey(MIN_PRIVATE_BYTES as usize) else {
        decline(State::Kernel);
        return true;
    };
    if (private as u64) < MIN_PRIVATE_BYTES {
        LISTENING.store(false, Ordering::SeqCst);
        return false;
    }
    if let Some(state) = outlives.or(acquired()) {
        decline(state);
        return true;
    }
    GUARDING.store(true, Ordering::SeqCst);
    match reaper::start() {
        State::Running => end_for_acquired(),
        // Another thread is in a call that blocks the start, and starts it after that.
        State::Waiting => {}
        _ => {
            GUARDING.store(false, Ordering::SeqCst);
            LISTENING.store(false, Ordering::SeqCst);
        }
    }
    true
}

/// Repeats the survey after a start that another thread's call had delayed.
pub(super) fn started() {
    let outlives = reaper::survey(0).map_or(Some(State::Kernel), |survey| survey.outlives);
    if let Some(state) = outlives {
        acquire(state);
    }
    end_for_acquired();
}

/// Ends the reaper if another thread acquired a resource before the start.
fn end_for_acquired() {
    if let Some(state) = acquired() {
        decline(state);
    }
}

/// Rules out a reaper, and ends the present one.
fn decline(state: State) {
    GUARDING.store(false, Ordering::SeqCst);
    LISTENING.store(false, Ordering::SeqCst);
    if sandbox::is_entered() {
        reaper::dismiss(state);
    } else if !reaper::retire(state) {
        reaper::record(state);
    }
}

/// Returns the state of a resource acquired since the start began.
fn acquired() -> Option<State> {
    let state = State::from_code(ACQUIRED.load(Ordering::SeqCst));
    state.filter(|state| *state != State::Off)
}

/// Ends the reaper for an acquired resource, which would outlive the program.
pub(crate) fn acquire(state: State) {
    if watch::is_beside() {
        watch::refuse_sibling();
    }
    // Under a filter no call is made to find the owner.
    let is_mine = || sandbox::is_entered() || reaper::is_owner();
    if LISTENING.load(Ordering::SeqCst) && is_mine() {
        ACQUIRED.store(state as u32, Ordering::SeqCst);
        decline(state);
    }
}

/// Ends the reaper if the file of a new mapping would outlive the program.
#[inline(always)]
pub(crate) fn mapped_file(mapping: &Mapping) {
    reaper::maps_file();
    if (LISTENING.load(Ordering::Relaxed) || watch::is_beside()) && is_made(mapping) {
        check_file(mapping.descriptor);
    }
}

#[cold]
#[inline(never)]
fn check_file(descriptor: c_int) {
    sys::guarded(|| check_file_now(descriptor));
}

fn check_file_now(descriptor: c_int) {
    // The filter may allow mmap(2) and forbid fstat(2).
    if sandbox::is_entered() {
        return;
    }
    let Some((file, stat)) = stat(descriptor) else {
        return;
    };
    if reaper::is_device(file, &stat) {
        acquire(State::Device);
    } else if reaper::is_locked(file) {
        acquire(State::LockedFile);
    } else if reaper::is_written(file, &stat) {
        acquire(State::WrittenFile);
    }
}

/// Ends the reaper after a lock or lease of a mapped file: flock(2), fcntl(2) with F_OFD_SETLK or
/// F_SETLEASE.
pub(crate) fn locked(descriptor: c_int) {
    let is_mapped = || {
        !sandbox::is_entered() && stat(descriptor).is_some_and(|(_, stat)| reaper::is_mapped(&stat))
    };
    if (LISTENING.load(Ordering::SeqCst) || watch::is_beside()) && sys::guarded(is_mapped) {
        acquire(State::LockedFile);
    }
}

fn stat<'a>(descriptor: c_int) -> Option<(BorrowedFd<'a>, rustix::fs::Stat)> {
    // SAFETY: the program has just used the descriptor; fstat(2) fails if another thread has closed
    // it.
    let descriptor = (descriptor >= 0).then(|| unsafe { BorrowedFd::borrow_raw(descriptor) })?;
    Some((descriptor, rustix::fs::fstat(descriptor).ok()?))
}
