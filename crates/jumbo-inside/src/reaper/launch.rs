//! Start and end of the reaper, from inside the program: [`prepare`], [`start`], [`retire`],
//! [`forked`], [`block_start`].
//!
//! The code runs in the program: it holds no other lock of jumbo, leaves errno unchanged, and
//! blocks all signals while a thread starts or ends the reaper.
#![expect(unsafe_code, reason = "makes processes, and blocks signals")]

use core::ops::Range;
use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use core::time::Duration;

use super::control::{CONTROL, MAX_WORKERS};
use super::gate::Gate;
use super::raw::{self, plain};
use super::{State, entry, identity, init, orphans, survey};
use crate::headroom;
use crate::ledger::stats;
use crate::sandbox;
use crate::sync::Deadline;
use jumbo_sys::proc::children_change_namespace;
use jumbo_sys::{Blocked, process};

/// Timeout of the reaper's start or end, which take less than a millisecond unless the reaper is
/// stopped or the host does not schedule it.
const READY_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between wake-ups of a reaper that may just be falling asleep.
const WAKE_INTERVAL: Duration = Duration::from_millis(1);

crate::one_page! {
    /// Prepared process: processes of a bare clone(2) or vfork(2) do not start or end its reaper.
    static OWNER: AtomicI32 = AtomicI32::new(0);
    /// Lock of a start or end: 1 while a thread holds it.
    static BUSY: AtomicU32 = AtomicU32::new(0);
    /// Closed during calls that a reaper would affect.
    static GATE: Gate = Gate::new();
}

/// Prepares the process, in the program's main thread and before it has others.
///
/// `workers`: number of threads that free memory. `image`: addresses of the shared object or
/// executable with this code. `orphans_are_taken`: a subreaper above, as in the orders. `digit`:
/// address of that value in the environment, or null; it is changed for programs that the process
/// executes.
///
/// # Safety
/// `digit` is null, or the address of the digit behind [`crate::orders::Orders::ORPHANS_KEY`] in the
/// environment of the process. `image` is correct, contains `memcpy`, `memmove`, `memset`, `memcmp`
/// and `bcmp` (the reaper unmaps everything else), and stays mapped as long as the process runs.
pub unsafe fn prepare(
    workers: usize,
    image: &Range<usize>,
    orphans_are_taken: bool,
    digit: *mut u8,
) {
    // SAFETY: the caller's promise; the environment is on the stack, which stays mapped.
    unsafe { orphans::prepare(orphans_are_taken, digit) };
    let [start, end] = &CONTROL.image;
    start.store(image.start, Ordering::Relaxed);
    end.store(image.end, Ordering::Relaxed);
    let workers = workers.clamp(1, MAX_WORKERS);
    CONTROL.workers.store(workers, Ordering::Relaxed);
    let page = rustix::param::page_size();
    CONTROL.page.store(page, Ordering::Relaxed);
    // Now, with one thread: later each thread may have its own IDs.
    let is_fixed = identity::is_fixed();
    CONTROL.identity_is_fixed.store(is_fixed, Ordering::Relaxed);
    let cpus = CONTROL.cpus.as_ptr().expose_provenance();
    let arguments = [0, size_of_val(&CONTROL.cpus), cpus, 0, 0, 0];
    // SAFETY: the kernel writes at most the size of `cpus`, whose words may have any value. On a
    // host with more CPUs it fails and writes nothing.
    unsafe { raw::call(libc::SYS_sched_getaffinity, arguments) };
    own();
}

/// Resets the state in the child of a fork(2), which may start its own reaper.
///
/// # Safety
/// The process is such a child, and has had no reaper and no other thread.
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
    OWNER.store(process(), Ordering::Release);
}

/// Reports whether this process was prepared, or is a fork's child after [`forked`]: not a vfork(2)
/// child, which runs in its parent's memory.
pub fn is_owner() -> bool {
    // A filter may forbid getpid(2), and without a reaper the result does not matter.
    let is_irrelevant = sandbox::is_entered() && CONTROL.alive.load(Ordering::SeqCst) == 0;
    let owner = OWNER.load(Ordering::Acquire);
    is_irrelevant || (owner != 0 && owner == process())
}

/// Reports whether this process has a reaper.
pub fn is_running() -> bool {
    CONTROL.alive.load(Ordering::SeqCst) != 0 && is_owner()
}

/// Starts the reaper, unless this process has one. Records and returns the resulting state.
/// [`State::Waiting`]: not now; after a [`block_start`], [`allow_start`] leads to the start.
///
/// The caller holds no lock that the allocator or a fork may take.
pub fn start() -> State {
    loop {
        // After a timeout of the lock the other thread is treated as one in a blocking call.
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

/// Blocks starts until [`allow_start`], before a call that a reaper would affect. A present reaper
/// stays; see [`retire`]. False in a vfork(2) child, whose calls do not affect its parent.
pub fn block_start() -> bool {
    let is_owner = is_owner();
    if is_owner {
        GATE.close();
    }
    is_owner
}

/// Allows starts after the call, if [`block_start`] was true; `retired`: a reaper ended for it.
/// True if the caller must start a reaper now.
pub fn allow_start(retired: bool) -> bool {
    GATE.open(retired)
}

/// Records the state of the reaper.
pub fn record(state: State) {
    let slot = stats::slot();
    if state == State::Running {
        let alive = CONTROL.alive.load(Ordering::Relaxed);
        slot.reaper_pid.store(alive, Ordering::Relaxed);
    }
    slot.reaper.store(state as u32, Ordering::Release);
}

/// Ends the reaper without freeing memory, and records `reason`. True if there was one and it has
/// ended.
///
/// The kernel may consider the memory shared for another moment: the caller repeats a call that it
/// refuses.
pub fn retire(reason: State) -> bool {
    // A start in progress counts: its reaper is alive in a moment.
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

/// Tells the reaper to end, without a system call: it checks within ten seconds.
pub fn dismiss(reason: State) {
    if CONTROL.alive.load(Ordering::SeqCst) != 0 {
        CONTROL.retire.store(1, Ordering::Release);
        record(reason);
    }
}

/// Returns the reason not to start a reaper.
fn obstacle() -> Option<State> {
    if sandbox::is_entered() {
        return Some(State::Seccomp);
    }
    let owner = OWNER.load(Ordering::Acquire);
    if owner != process() || CONTROL.tid_word.load(Ordering::Relaxed) == 0 {
        return Some(State::Kernel);
    }
    if owner == 1 || children_change_namespace() {
        Some(State::PidOne)
    } else if orphans::are_taken() {
        Some(State::Subreaper)
    } else if !init::init_reaps_orphans() {
        Some(State::Init)
    } else {
        is_limited().then_some(State::Limits)
    }
}

fn launch() -> State {
    if !GATE.admits() {
        return State::Waiting;
    }
    if CONTROL.alive.load(Ordering::Acquire) != 0 {
        // A stopped reaper may have been told to end.
        let ending = CONTROL.retire.load(Ordering::Relaxed) != 0;
        return if ending {
            State::Retired
        } else {
            State::Running
        };
    }
    // SAFETY: `own` stored the address.
    let word = unsafe { raw::word_at(CONTROL.tid_word.load(Ordering::Relaxed)) };
    let main_thread = word.map_or(0, |word| word.load(Ordering::Relaxed));
    if main_thread == 0 {
        // The main thread has ended already.
        return State::Kernel;
    }
    CONTROL.clear();
    let slot = core::ptr::from_ref(stats::slot()).cast_mut();
    CONTROL.slot.store(slot, Ordering::Relaxed);
    CONTROL.program.store(main_thread, Ordering::Relaxed);
    // SAFETY: the caller holds the lock, and no reaper is alive.
    let child = unsafe { entry::spawn_intermediate() };
    reap(child);
    if child < 0 {
        return State::Clone;
    }
    let state = ready();
    if state == State::Running {
        return state;
    }
    // It usually ends by itself.
    end();
    if state == State::Subreaper {
        orphans::set_subreaper();
    }
    state
}

/// Waits for the state that the reaper reports.
fn ready() -> State {
    let deadline = Deadline::after(READY_TIMEOUT);
    loop {
        // In this order: it reports before it ends.
        let gone = CONTROL.alive.load(Ordering::Acquire) == 0;
        let ready = CONTROL.ready.load(Ordering::Acquire);
        if ready != 0 {
            return State::from_code(ready).unwrap_or(State::Unconfined);
        }
        if gone || deadline.has_passed() {
            return State::Unconfined;
        }
        raw::wait(&CONTROL.ready, 0, WAKE_INTERVAL);
    }
}

/// Tells the reaper to end and waits for that. False after the timeout (a stopped reaper); later
/// calls do not wait again.
fn end() -> bool {
    if CONTROL.retire.swap(1, Ordering::AcqRel) != 0 {
        return CONTROL.alive.load(Ordering::Acquire) == 0;
    }
    let deadline = Deadline::after(READY_TIMEOUT);
    // SAFETY: `own` stored the address.
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
        raw::wait(&CONTROL.alive, alive, WAKE_INTERVAL);
    }
}

/// Reports whether another process could exhaust the user's RLIMIT_NPROC or a pids cgroup.
fn is_limited() -> bool {
    const MIN_PROCESSES: u64 = 4096;
    const MIN_TASKS: usize = 1024;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nproc);
    limit.current.is_some_and(|max| max < MIN_PROCESSES)
        || headroom::tasks().is_some_and(|room| room < MIN_TASKS)
}

/// Waits for the intermediate child, which has no exit signal and ends at once. A wait of the
/// program with __WALL may have reaped it.
fn reap(child: isize) {
    const EINTR: isize = -(libc::EINTR as isize);
    let options = libc::__WALL.cast_unsigned() as usize;
    // SAFETY: with a null status the kernel writes nothing.
    let wait = || unsafe { plain(libc::SYS_wait4, [child.cast_unsigned(), 0, options]) };
    while child > 0 && wait() == EINTR {}
}

/// Runs `work` with the lock held and all signals blocked, so that no handler of the program sees a
/// partial change. `None` if another thread holds the lock longer than a start and an end may take.
fn exclusively<T>(work: impl FnOnce() -> T) -> Option<T> {
    // Under a filter no reaper starts, and system calls are avoided.
    let _blocked = (!sandbox::is_entered()).then(Blocked::all);
    lock().then(|| {
        let result = work();
        BUSY.store(0, Ordering::SeqCst);
        raw::wake(&BUSY);
        result
    })
}

/// Takes the lock. Its holder has all signals blocked, so no handler can suspend it.
fn lock() -> bool {
    let (success, failure) = (Ordering::SeqCst, Ordering::Relaxed);
    let deadline = Deadline::after(3 * READY_TIMEOUT);
    while BUSY.compare_exchange(0, 1, success, failure).is_err() {
        if deadline.has_passed() {
            return false;
        }
        raw::wait(&BUSY, 1, WAKE_INTERVAL);
    }
    true
}
