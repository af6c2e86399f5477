//! `--reaper=auto`: a sibling once the process has asked for much memory of its own, and as long as
//! nothing that hangs on the memory would outlive the program.
//!
//! Counted is what is asked for, not what is touched, since we are not called when memory is touched: blocks
//! of the heap now alive, regions that glibc's heaps grew into, what mimalloc has taken for its blocks, private
//! writable mappings made. Past
//! [`ENOUGH`] the kernel's list of mappings decides; its list of locks, which takes long, was looked at beside the program
//! by then. Where something would outlive the program then, there
//! is no sibling for good; what is acquired later ends it: shmat(2), io_setup(2), mapping a device or a
//! socket, mapping a file that is locked or open for writing, locking a mapped one or taking a lease of it. A lock that another process
//! takes later, by an open file that it shares with this one, is not seen.

use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use rustix::fd::BorrowedFd;

use jumbo_inside::events::Mapping;
use jumbo_inside::heap;
use jumbo_inside::reaper::{self, State, Survey};
use jumbo_inside::sandbox;

use crate::mimalloc;

/// So much memory of its own makes a process large.
const ENOUGH: u64 = 1 << 30;
/// After so much more, a process that was found too small is looked at again.
const STEP: u64 = 256 << 20;
/// So much before that, what takes long is begun beside the program.
const AHEAD: u64 = STEP / 2;

jumbo_inside::one_page! {
    /// The process is looked at when it asks for memory: it has no sibling yet, and may get one.
    static WATCHING: AtomicBool = AtomicBool::new(false);
    /// It has one.
    static GUARDING: AtomicBool = AtomicBool::new(false);
    /// It has one, or may get one: something that is acquired, and would outlive the program, is told.
    static LISTENING: AtomicBool = AtomicBool::new(false);
}
/// The code of the [`State`] that says what was acquired.
static ACQUIRED: AtomicU32 = AtomicU32::new(0);

jumbo_inside::one_page! {
    /// Bytes of the heap, and of mimalloc's, that were handed out before this process was forked.
    static INHERITED: AtomicU64 = AtomicU64::new(0);
    /// Bytes in private writable mappings made, and in regions that glibc's heaps grew into.
    static ASKED: AtomicU64 = AtomicU64::new(0);
    /// The bytes to be asked for until the process is looked at.
    static UNTIL: AtomicU64 = AtomicU64::new(ENOUGH - AHEAD);

    /// Memory of glibc's malloc is not counted: it is the program's, and jumbo's heap is off.
    static UNCOUNTED: AtomicBool = AtomicBool::new(false);
}

/// Whether what malloc has is counted. Once, before [`watch`].
pub(super) fn count(counted: bool) {
    UNCOUNTED.store(!counted, Ordering::Relaxed);
}

/// Starts watching: at the process's start, and in a fork's child. What was acquired stays acquired.
pub(super) fn watch() {
    INHERITED.store(blocks(), Ordering::Relaxed);
    ASKED.store(0, Ordering::Relaxed);
    UNTIL.store(ENOUGH - AHEAD, Ordering::Relaxed);
    GUARDING.store(false, Ordering::Relaxed);
    LISTENING.store(false, Ordering::Relaxed);
    reaper::record(match UNCOUNTED.load(Ordering::Relaxed) {
        true => State::Uncounted,
        false => State::Waiting,
    });
    WATCHING.store(true, Ordering::Release);
}

/// Bytes in blocks of the heap and of mimalloc's.
fn blocks() -> u64 {
    heap::live().saturating_add(mimalloc::taken() as u64)
}

/// Whether the sibling is to be there again after it was ended for a call.
pub(super) fn is_guarding() -> bool {
    GUARDING.load(Ordering::Acquire)
}

/// The heap has handed out a block. No lock of ours is held.
#[inline(always)]
pub(crate) fn asked() {
    if WATCHING.load(Ordering::Relaxed) {
        look();
    }
}

/// glibc's malloc has grown into another region.
pub(crate) fn region() {
    add(heap::arena::HEAP_MAX_BYTES);
}

/// An anonymous mapping was made, or refused.
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
    ASKED.fetch_add(bytes as u64, Ordering::Relaxed);
    asked();
}

/// What this process has asked for.
fn total() -> u64 {
    let blocks = blocks().saturating_sub(INHERITED.load(Ordering::Relaxed));
    blocks.saturating_add(ASKED.load(Ordering::Relaxed))
}

/// The sibling is about to be ended: another one is started when the process has asked for [`STEP`] more.
pub(super) fn wait_for_more() {
    if GUARDING.load(Ordering::SeqCst) && reaper::is_owner() {
        GUARDING.store(false, Ordering::SeqCst);
        LISTENING.store(false, Ordering::SeqCst);
        UNTIL.store(total().saturating_add(STEP - AHEAD), Ordering::Relaxed);
        WATCHING.store(true, Ordering::Release);
    }
}

#[cold]
#[inline(never)]
fn look() {
    if sandbox::is_entered() {
        WATCHING.store(false, Ordering::Relaxed);
        return reaper::record(State::Seccomp);
    }
    let asked = total();
    // A vfork(2) child runs in its parent's memory, and its parent's business is not its own.
    let until = UNTIL.load(Ordering::Relaxed);
    if asked < until || !reaper::is_owner() {
        return;
    }
    if asked < until.saturating_add(AHEAD) && !LISTENING.swap(true, Ordering::SeqCst) {
        UNTIL.store(until.saturating_add(AHEAD), Ordering::Relaxed);
        return reaper::survey_soon();
    }
    // One thread.
    if WATCHING.swap(false, Ordering::AcqRel) && !decide() {
        UNTIL.store(asked.saturating_add(STEP - AHEAD), Ordering::Relaxed);
        WATCHING.store(true, Ordering::Release);
    }
}

/// Starts the sibling, or finds out why there is to be none. False where it is too early to say.
fn decide() -> bool {
    // From here on, what is acquired is told.
    LISTENING.store(true, Ordering::SeqCst);
    let Ok(Survey { private, outlives }) = reaper::survey(ENOUGH as usize) else {
        decline(State::Kernel);
        return true;
    };
    if (private as u64) < ENOUGH {
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
        // A call of another thread's is in the way, which has it started after.
        State::Waiting => {}
        _ => {
            GUARDING.store(false, Ordering::SeqCst);
            LISTENING.store(false, Ordering::SeqCst);
        }
    }
    true
}

/// After a start beside other threads' calls.
pub(super) fn started() {
    let outlives = reaper::survey(0).map_or(Some(State::Kernel), |survey| survey.outlives);
    if let Some(state) = outlives {
        acquire(state);
    }
    end_for_acquired();
}

/// Another thread may have acquired something before there was anything to end.
fn end_for_acquired() {
    if let Some(state) = acquired() {
        decline(state);
    }
}

/// There is to be none, whether there is one now or not.
fn decline(state: State) {
    GUARDING.store(false, Ordering::SeqCst);
    LISTENING.store(false, Ordering::SeqCst);
    if sandbox::is_entered() {
        reaper::dismiss(state);
    } else if !reaper::retire(state) {
        reaper::record(state);
    }
}

/// What was acquired while there was a sibling, or while one was being started.
fn acquired() -> Option<State> {
    let state = State::from_code(ACQUIRED.load(Ordering::SeqCst));
    state.filter(|state| *state != State::Off)
}

/// Something was acquired that would outlive the program.
pub(crate) fn acquire(state: State) {
    // Behind a filter no call is made to find out.
    let is_mine = || sandbox::is_entered() || reaper::is_owner();
    if LISTENING.load(Ordering::SeqCst) && is_mine() {
        ACQUIRED.store(state as u32, Ordering::SeqCst);
        decline(state);
    }
}

/// A file was mapped, or not.
#[inline(always)]
pub(crate) fn mapped_file(mapping: &Mapping) {
    if LISTENING.load(Ordering::Relaxed) && is_made(mapping) {
        look_at_mapped(mapping.descriptor);
    }
}

#[cold]
#[inline(never)]
fn look_at_mapped(descriptor: c_int) {
    // Under a filter the program may map, and not be allowed to ask what.
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

/// A lock of an open file was taken, or a lease: flock(2), or fcntl(2) with F_OFD_SETLK or F_SETLEASE.
pub(crate) fn locked(descriptor: c_int) {
    if LISTENING.load(Ordering::SeqCst)
        && !sandbox::is_entered()
        && stat(descriptor).is_some_and(|(_, stat)| reaper::is_mapped(&stat))
    {
        acquire(State::LockedFile);
    }
}

fn stat<'a>(descriptor: c_int) -> Option<(BorrowedFd<'a>, rustix::fs::Stat)> {
    // SAFETY: the program has just used it with success; should another thread have closed it since,
    // fstat(2) says so.
    let descriptor = (descriptor >= 0).then(|| unsafe { BorrowedFd::borrow_raw(descriptor) })?;
    Some((descriptor, rustix::fs::fstat(descriptor).ok()?))
}
