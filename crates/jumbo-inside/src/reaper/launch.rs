//! Starting and ending the sibling, from inside the program: [`prepare`], [`start`], [`retire`], [`forked`];
//! and when it is not to be started, [`keep_out`].
//!
//! Here the program's own rules hold: no lock of jumbo's is held, errno is left alone, and no signal
//! handler runs in between, since all signals are blocked for as long as one thread is at it.
#![expect(unsafe_code, reason = "makes processes, and blocks signals")]

use core::ops::Range;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use super::control::{CONTROL, MAX_WORKERS};
use super::gate::Gate;
use super::raw::{self, plain};
use super::{State, identity, init, orphans, sibling, survey};
use crate::headroom;
use crate::ledger::stats;
use crate::sandbox;
use crate::sync::Deadline;
use crate::sys::process;

/// How long a sibling may take to get ready, or to end: only a stopped one, or a host that does not
/// schedule it, takes more than a millisecond.
const BOUND: Duration = Duration::from_secs(2);
/// How often a sibling that sleeps is told again: it may have been about to.
const AGAIN: Duration = Duration::from_millis(1);

crate::one_page! {
    /// The process that was prepared; another one, made by a bare clone(2) or vfork(2), leaves it alone.
    static OWNER: AtomicUsize = AtomicUsize::new(0);
    /// One thread at a time starts or ends it: 1 while one is at it.
    static BUSY: AtomicU32 = AtomicU32::new(0);
    /// Shut while calls are made that the sibling would stand in the way of.
    static GATE: Gate = Gate::new();
}

/// Gets ready, in the program's main thread and before it has others.
///
/// `workers` is how many threads are to give the memory back, `image` the addresses of the shared object
/// or executable that holds this code; `orphans_are_taken` and `digit` what the orders say of a subreaper above,
/// and where in the environment they say it, to be changed for what the program executes; or null.
///
/// # Safety
/// `digit` is null, or the address of the digit behind [`crate::orders::Orders::ORPHANS_KEY`] in the environment that the process was
/// given.
/// `image` is right. Within it are `memcpy`, `memmove`, `memset`, `memcmp` and `bcmp`: in the end the
/// sibling unmaps everything else. The image stays mapped for as long as the process runs.
pub unsafe fn prepare(
    workers: usize,
    image: &Range<usize>,
    orphans_are_taken: bool,
    digit: *mut u8,
) {
    // SAFETY: the caller's promise; the kernel puts the environment on the stack, which stays.
    unsafe { orphans::told(orphans_are_taken, digit) };
    let [start, end] = &CONTROL.image;
    start.store(image.start, Ordering::Relaxed);
    end.store(image.end, Ordering::Relaxed);
    let workers = workers.clamp(1, MAX_WORKERS);
    CONTROL.workers.store(workers, Ordering::Relaxed);
    let page = rustix::param::page_size();
    CONTROL.page.store(page, Ordering::Relaxed);
    // Here, where there is one thread: each may have an identity of its own later.
    let is_fixed = identity::is_fixed();
    CONTROL.identity_is_fixed.store(is_fixed, Ordering::Relaxed);
    let cpus = CONTROL.cpus.as_ptr().expose_provenance();
    let arguments = [0, size_of_val(&CONTROL.cpus), cpus, 0, 0, 0];
    // SAFETY: the kernel writes at most so many bytes, to words that may have any value. A host with more
    // CPUs than that is refused, and nothing is written.
    unsafe { raw::call(libc::SYS_sched_getaffinity, arguments) };
    own();
}

/// In the child of a fork(2): it has no sibling, and may start one.
///
/// # Safety
/// It is one, and has had neither a sibling nor another thread yet.
pub unsafe fn forked() {
    BUSY.store(0, Ordering::Relaxed);
    GATE.reset();
    CONTROL.clear();
    survey::forked();
    stats::slot().reaper_pid.store(0, Ordering::Relaxed);
    if sandbox::is_entered() {
        record(State::Seccomp);
    } else {
        record(State::Off);
        own();
    }
}

fn own() {
    let word = raw::tid_word().map_or(0, |word| word.as_ptr().expose_provenance());
    CONTROL.tid_word.store(word, Ordering::Relaxed);
    OWNER.store(pid(), Ordering::Release);
}

fn pid() -> usize {
    usize::try_from(process()).unwrap_or(0)
}

/// Whether this process is the one that was prepared, or a fork's child that told of itself: not a
/// vfork(2) child, which runs in its parent's memory.
pub fn is_owner() -> bool {
    // Under a filter getpid(2) may be one call too many, and without a sibling nothing depends on it.
    let nothing = sandbox::is_entered() && CONTROL.alive.load(Ordering::SeqCst) == 0;
    let owner = OWNER.load(Ordering::Acquire);
    nothing || (owner != 0 && owner == pid())
}

/// Whether this process has a sibling.
pub fn is_running() -> bool {
    CONTROL.alive.load(Ordering::SeqCst) != 0 && is_owner()
}

/// Starts the sibling, unless this process has one. What came of it is counted, and returned.
/// [`State::Waiting`]: not now. Where that is because of [`keep_out`], [`let_in`] tells when.
///
/// Not while a lock is held that the allocator or a fork may want.
pub fn start() -> State {
    loop {
        // Another thread that is at it, and was not done in time, is as one that is in the way.
        let state = obstacle().unwrap_or_else(|| exclusively(launch).unwrap_or(State::Waiting));
        if state != State::Waiting {
            record(state);
            return state;
        }
        if !GATE.was_opened() {
            return state;
        }
    }
}

/// Before a call that the sibling would stand in the way of: none is started until [`let_in`]. One that is
/// there stays; see [`retire`]. False where it is not for the caller to say: in a vfork(2) child, whose call
/// does not bear on its parent.
pub fn keep_out() -> bool {
    let mine = is_owner();
    if mine {
        GATE.shut();
    }
    mine
}

/// After the call, if [`keep_out`] was true; `retired`: a sibling was ended for it. True where one is to be
/// started now, and the caller is to do it.
pub fn let_in(retired: bool) -> bool {
    GATE.open(retired)
}

/// Counts what became of the reaper.
pub fn record(state: State) {
    let slot = stats::slot();
    if state == State::Running {
        let alive = CONTROL.alive.load(Ordering::Relaxed);
        slot.reaper_pid.store(alive, Ordering::Relaxed);
    }
    slot.reaper.store(state as u32, Ordering::Release);
}

/// Ends the sibling without freeing anything, and counts `reason`. True where there was one and it is gone.
///
/// The kernel may take another moment to see that the memory is not shared any more: a call that wants
/// that is to be tried again.
pub fn retire(reason: State) -> bool {
    // One that is being started is there in a moment.
    let is_coming = BUSY.load(Ordering::SeqCst) != 0 && is_owner();
    if !is_coming && !is_running() {
        return false;
    }
    let is_there = || CONTROL.alive.load(Ordering::SeqCst) != 0;
    if exclusively(|| is_there() && end()) != Some(true) {
        return false;
    }
    record(reason);
    true
}

/// Tells the sibling to end, if there is one, without a system call: it looks within ten seconds.
pub fn dismiss(reason: State) {
    if CONTROL.alive.load(Ordering::SeqCst) != 0 {
        CONTROL.retire.store(1, Ordering::Release);
        record(reason);
    }
}

/// Why no sibling is to be made.
fn obstacle() -> Option<State> {
    if sandbox::is_entered() {
        return Some(State::Seccomp);
    }
    let owner = OWNER.load(Ordering::Acquire);
    if owner != pid() || CONTROL.tid_word.load(Ordering::Relaxed) == 0 {
        return Some(State::Kernel);
    }
    if owner == 1 || children_elsewhere() {
        Some(State::PidOne)
    } else if orphans::are_taken() {
        Some(State::Subreaper)
    } else if !init::takes_notice() {
        Some(State::Init)
    } else {
        is_limited().then_some(State::Limits)
    }
}

/// Whether children of this thread are born into another PID namespace (unshare(2) of CLONE_NEWPID): the
/// first would be its PID 1, and end it for all others. Linux 4.12; where /proc does not say, there is no
/// sibling either.
pub fn children_elsewhere() -> bool {
    let read = |path: &core::ffi::CStr, name: &mut [u8; 64]| {
        rustix::fs::readlinkat_raw(rustix::fs::CWD, path, &mut name[..]).is_ok()
    };
    let (mut own, mut childrens) = ([0u8; 64], [0u8; 64]);
    let known = read(c"/proc/thread-self/ns/pid", &mut own)
        && read(c"/proc/thread-self/ns/pid_for_children", &mut childrens);
    !known || own != childrens
}

fn launch() -> State {
    if !GATE.admits() {
        return State::Waiting;
    }
    if CONTROL.alive.load(Ordering::Acquire) != 0 {
        // One that was told to end, and is stopped, is as good as none.
        let ending = CONTROL.retire.load(Ordering::Relaxed) != 0;
        return if ending {
            State::Retired
        } else {
            State::Running
        };
    }
    // SAFETY: `own` put it there.
    let word = unsafe { raw::word_at(CONTROL.tid_word.load(Ordering::Relaxed)) };
    let main_thread = word.map_or(0, |word| word.load(Ordering::Relaxed));
    if main_thread == 0 {
        // It has ended already: there is nothing to wait for.
        return State::Kernel;
    }
    CONTROL.clear();
    let slot = core::ptr::from_ref(stats::slot()).cast_mut();
    CONTROL.slot.store(slot, Ordering::Relaxed);
    CONTROL.program.store(main_thread, Ordering::Relaxed);
    // SAFETY: one thread at a time is here, and none is alive.
    let made = unsafe { sibling::spawn_intermediate() };
    reap(made);
    if made < 0 {
        return State::Clone;
    }
    let state = ready();
    if state == State::Running {
        return state;
    }
    // It ends by itself; where it does not, it is told to.
    end();
    if state == State::Subreaper {
        orphans::set_taken();
    }
    state
}

/// What the sibling says of itself.
fn ready() -> State {
    let deadline = Deadline::after(BOUND);
    loop {
        // In this order: it says what it is before it ends.
        let gone = CONTROL.alive.load(Ordering::Acquire) == 0;
        let ready = CONTROL.ready.load(Ordering::Acquire);
        if ready != 0 {
            return State::from_code(ready).unwrap_or(State::Unconfined);
        }
        if gone || deadline.has_passed() {
            return State::Unconfined;
        }
        raw::wait(&CONTROL.ready, 0, AGAIN);
    }
}

/// Tells the sibling to end, until it has. False where it does not: it is stopped. One that was told before, and is
/// still there, is not waited for again.
fn end() -> bool {
    if CONTROL.retire.swap(1, Ordering::AcqRel) != 0 {
        return CONTROL.alive.load(Ordering::Acquire) == 0;
    }
    let deadline = Deadline::after(BOUND);
    // SAFETY: `own` put it there.
    let word = unsafe { raw::word_at(CONTROL.tid_word.load(Ordering::Relaxed)) };
    loop {
        let alive = CONTROL.alive.load(Ordering::Acquire);
        if alive == 0 {
            return true;
        }
        if deadline.has_passed() {
            return false;
        }
        if let Some(word) = word {
            raw::wake(word);
        }
        raw::wake(&CONTROL.retire);
        raw::wait(&CONTROL.alive, alive, AGAIN);
    }
}

/// Whether a limit on the processes of the user (RLIMIT_NPROC) is so low, or a pids cgroup has so little room, that
/// one process more could be what the program, or another one of the user's, does not get.
fn is_limited() -> bool {
    const MIN_PROCESSES: u64 = 4096;
    const MIN_TASKS: usize = 1024;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nproc);
    limit.current.is_some_and(|most| most < MIN_PROCESSES)
        || headroom::tasks().is_some_and(|room| room < MIN_TASKS)
}

/// Waits for the child that makes the sibling: it has no exit signal, and is about to end. Where a wait of
/// the program's own with __WALL was faster there is nothing to do.
fn reap(child: isize) {
    const EINTR: isize = -(libc::EINTR as isize);
    let options = libc::__WALL.cast_unsigned() as usize;
    // SAFETY: without a place for the status nothing is written.
    let wait = || unsafe { plain(libc::SYS_wait4, [child.cast_unsigned(), 0, options]) };
    while child > 0 && wait() == EINTR {}
}

/// Runs `work` in one thread at a time, with all signals blocked, so that no handler of the program's
/// sees it half done. `None` where another thread is at it, and does not get done: that takes as long as a
/// start and an end may.
fn exclusively<T>(work: impl FnOnce() -> T) -> Option<T> {
    // Under a filter, where nothing is started, no call is made that can be spared.
    let before = (!sandbox::is_entered()).then(|| mask(libc::SIG_BLOCK, u64::MAX));
    let result = enter().then(|| {
        let result = work();
        BUSY.store(0, Ordering::SeqCst);
        raw::wake(&BUSY);
        result
    });
    if let Some(before) = before {
        mask(libc::SIG_SETMASK, before);
    }
    result
}

/// Becomes the thread that is at it. The other one's signals are blocked, so it goes on whatever happens.
fn enter() -> bool {
    let (ok, no) = (Ordering::SeqCst, Ordering::Relaxed);
    let deadline = Deadline::after(2 * BOUND + BOUND);
    while BUSY.compare_exchange(0, 1, ok, no).is_err() {
        if deadline.has_passed() {
            return false;
        }
        raw::wait(&BUSY, 1, AGAIN);
    }
    true
}

/// rt_sigprocmask(2) with the kernel's own set of 64 signals: those of the C library are among them.
fn mask(how: libc::c_int, signals: u64) -> u64 {
    let mut before = 0u64;
    let arguments = [
        how.cast_unsigned() as usize,
        (&raw const signals).expose_provenance(),
        (&raw mut before).expose_provenance(),
        size_of::<u64>(),
        0,
        0,
    ];
    // SAFETY: the kernel reads one set and writes the other.
    unsafe { raw::call(libc::SYS_rt_sigprocmask, arguments) };
    before
}
