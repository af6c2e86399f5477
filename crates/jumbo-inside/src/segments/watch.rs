//! The thread that looks whether a program has lived long enough, and touched enough text, for a copy to be worth while:
//! [`begin`], [`end`].
//!
//! It is none of the C library's: a program of one thread stays one to it. So it is gone before whatever concerns all
//! threads or wants a single one: fork(2), unshare(2), setns(2), a change of user or capabilities, a seccomp filter, the
//! end of the main thread, the pool's move off hugetlb pages. After a fork it comes again with the next mapping that the
//! program makes ([`resume`]), the more seldom the more forks there were; after the others it does not. Its descriptors are
//! its own.
#![expect(unsafe_code, reason = "makes a thread on a stack of its own")]

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use core::time::Duration;

use rustix::mm::{Advice, madvise};
use rustix::time::{ClockId, clock_gettime};

use super::{Settings, Stop, because, move_all};
use crate::headroom::tasks;
use crate::ledger::text_reason as reason;
use crate::orders::TextMode;
use crate::sys::{Blocked, Thread, request, wait, wake};
use crate::{proc, sandbox};

/// `CLOSE_RANGE_UNSHARE` of close_range(2).
const CLOSE_RANGE_UNSHARE: usize = 1 << 1;
/// The CPU time that a program has used before any copy is made.
const LIVED: Duration = Duration::from_secs(1);
/// The most that a copy costs, measured: making an image takes 0.2 to 0.6 ms for each MiB.
const COST: Duration = Duration::from_micros(600);
/// A copy may take one part in so many of the CPU time that the program has used.
const SHARE: u32 = 50;
/// Between two looks.
const SHORTEST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_mins(1);
/// How long a fork waits for a move: it is over sooner, but where text has to be read from a disk.
const PATIENCE: Duration = Duration::from_millis(200);
/// So many more tasks the program could have, or there is no thread.
const TASKS: usize = 16;

/// Where the thread runs. The kernel empties it in the child of a fork, however that was made, which so has no thread.
#[repr(C, align(4096))]
struct Stack {
    /// Not 0 where there is a thread, or there was.
    is_here: AtomicU32,
    _rest: UnsafeCell<[u8; STACK - WORD]>,
}
const STACK: usize = 128 << 10;
const WORD: usize = size_of::<AtomicU32>();
// SAFETY: the thread's alone, but for the first word, which is an atomic.
unsafe impl Sync for Stack {}
/// Zeroes that no page stands for before there is a thread.
static STACK_OF_THREAD: Stack = Stack {
    is_here: AtomicU32::new(0),
    _rest: UnsafeCell::new([0; STACK - WORD]),
};

static THREAD: Thread = Thread::none();
/// The process that made it: in a child that shares the memory (vfork(2)) what concerns threads concerns another process.
static MAKER: AtomicI32 = AtomicI32::new(0);
static SETTINGS: AtomicPtr<Settings> = AtomicPtr::new(core::ptr::null_mut());
/// It is to end, and to give up what it is at.
static ENDING: AtomicBool = AtomicBool::new(false);
/// It is to end before it waits again.
static LEAVING: AtomicBool = AtomicBool::new(false);
/// None is to be made any more.
static OVER: AtomicBool = AtomicBool::new(false);
/// The CPU time before which it does not try again, in milliseconds.
static LEAST: AtomicU64 = AtomicU64::new(0);
/// What it sleeps on: another number has it look at what it is to do.
static CALLS: AtomicU32 = AtomicU32::new(0);
/// It ended for a fork, and is to come again.
static AGAIN: AtomicBool = AtomicBool::new(false);
/// The forks so far.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// One is being made or ended.
static BUSY: AtomicBool = AtomicBool::new(false);

/// Makes the thread.
pub(super) fn begin(settings: &'static Settings) {
    let stack = core::ptr::from_ref(&STACK_OF_THREAD).cast_mut().cast();
    // SAFETY: nothing is on it yet, and no process is to find in a copy what is on it. MADV_WIPEONFORK, Linux 4.14.
    if unsafe { madvise(stack, STACK, Advice::LinuxWipeOnFork) }.is_err() {
        return because(reason::NO_MEMORY);
    }
    SETTINGS.store(core::ptr::from_ref(settings).cast_mut(), Ordering::Release);
    make();
}

fn make() {
    if sandbox::is_entered() {
        return because(reason::FILTER);
    }
    if tasks().is_some_and(|tasks| tasks < TASKS) {
        return because(reason::NO_MEMORY);
    }
    // No handler may find it busy; and a thread is born with its maker's mask.
    let _blocked = Blocked::all();
    if BUSY.swap(true, Ordering::SeqCst) {
        return;
    }
    MAKER.store(process(), Ordering::Relaxed);
    ENDING.store(false, Ordering::Release);
    LEAVING.store(false, Ordering::Release);
    STACK_OF_THREAD.is_here.store(1, Ordering::Release);
    if !OVER.load(Ordering::SeqCst) {
        let first = core::ptr::from_ref(&STACK_OF_THREAD).expose_provenance();
        let stack = (first + WORD, STACK - WORD);
        // SAFETY: signals are blocked. The one that was before has been joined, or was another process's, and the stack is its
        // alone; both values are static.
        if !unsafe { THREAD.start(Thread::FLAGS, stack, &look) } {
            because(reason::NO_MEMORY);
        }
    }
    BUSY.store(false, Ordering::SeqCst);
}

fn process() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Whether text may be replaced while the program runs.
#[inline(always)]
pub(super) fn may_move() -> bool {
    !SETTINGS.load(Ordering::Relaxed).is_null()
}

/// Whether there is a thread, of this process or of one that shares the memory.
#[inline(always)]
pub fn is_watched() -> bool {
    THREAD.is_alive() && STACK_OF_THREAD.is_here.load(Ordering::Relaxed) != 0
}

/// Ends the thread, if there is one, for good. A move that is under way is given up, or has just been made.
pub fn end() {
    // Where there never was one, or is none any more, no call is made.
    let none =
        SETTINGS.load(Ordering::Acquire).is_null() || OVER.load(Ordering::Acquire) && !is_watched();
    if none || MAKER.load(Ordering::Relaxed) != process() {
        return;
    }
    OVER.store(true, Ordering::SeqCst);
    AGAIN.store(false, Ordering::Relaxed);
    // Another thread may be making one.
    while BUSY.load(Ordering::SeqCst) {
        rustix::thread::sched_yield();
    }
    if is_watched() {
        because(reason::ENDED);
        call(&ENDING);
        THREAD.join();
    }
}

/// Before fork(2): the thread goes. The child has none, whatever stands in its copy of the memory; what is being copied there
/// would be a waste of addresses.
pub fn about_to_fork() {
    let never = SETTINGS.load(Ordering::Acquire).is_null() || OVER.load(Ordering::Acquire);
    if never || MAKER.load(Ordering::Relaxed) != process() {
        return;
    }
    // A program that forks often is left alone for ever longer.
    let forks = FORKS.fetch_add(1, Ordering::Relaxed).saturating_add(1);
    if is_watched() {
        call(&LEAVING);
        THREAD.join_for(PATIENCE);
    }
    if forks.is_power_of_two() && !is_watched() && !OVER.load(Ordering::Acquire) {
        AGAIN.store(true, Ordering::Release);
    }
}

fn call(how: &AtomicBool) {
    how.store(true, Ordering::Release);
    CALLS.fetch_add(1, Ordering::Release);
    wake(&CALLS);
}

/// Makes the thread that has ended for a fork again, in the process that forked.
#[inline(always)]
pub fn resume() {
    if AGAIN.load(Ordering::Relaxed) {
        come_again();
    }
}

#[cold]
fn come_again() {
    if AGAIN.swap(false, Ordering::AcqRel) && MAKER.load(Ordering::Relaxed) == process() {
        make();
    }
}

/// What the thread does.
fn look() {
    // Descriptors of its own, none of the program's among them: the numbers that it takes are not missing to the program, and what
    // the program closes is not what it has open. CLOSE_RANGE_UNSHARE, Linux 5.9.
    let all = [0, u32::MAX as usize, CLOSE_RANGE_UNSHARE, 0, 0, 0];
    // SAFETY: the range is all; the table that is closed is a copy, of nothing.
    if unsafe { request(libc::SYS_close_range, all) }.is_err() {
        return because(reason::UNKNOWN);
    }
    let _ = rustix::thread::set_name(c"jumbo-text");
    // SAFETY: null, or a static that was stored there.
    let Some(settings) = (unsafe { SETTINGS.load(Ordering::Acquire).as_ref() }) else {
        return;
    };
    let stop = Stop::at(&ENDING, &LEAVING);
    let mut least = LIVED.max(Duration::from_millis(LEAST.load(Ordering::Relaxed)));
    while has_used(least, &stop) {
        let Some(found) = settings.find() else {
            return because(reason::UNKNOWN);
        };
        let mebibytes = found
            .iter()
            .map(|segment| segment.len() >> 20)
            .sum::<usize>();
        let cost = COST.saturating_mul(u32::try_from(mebibytes).unwrap_or(u32::MAX));
        let worth = cost.saturating_mul(SHARE);
        if worth > least {
            least = worth;
            continue;
        }
        least = least.saturating_mul(2);
        let milliseconds = u64::try_from(least.as_millis()).unwrap_or(u64::MAX);
        LEAST.store(milliseconds, Ordering::Relaxed);
        let evidence = settings.mode == TextMode::Auto;
        let later = move_all(&found, settings, &stop, evidence);
        if !later && settings.libs.is_none() {
            return;
        }
        because(reason::NOT_YET);
    }
}

/// Waits until the process has used so much CPU time. False where the thread is to end before.
fn has_used(least: Duration, stop: &Stop) -> bool {
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count());
    let (mut before, mut idle) = (Duration::ZERO, SHORTEST);
    loop {
        let calls = CALLS.load(Ordering::Acquire);
        if stop.check_before_wait().is_err() || has_no_leader() {
            return false;
        }
        let used = clock_gettime(ClockId::ProcessCPUTime);
        let used = Duration::try_from(used).unwrap_or(Duration::MAX);
        if used >= least {
            return true;
        }
        // Not before all CPUs together could have used it; and ever less often where the program sleeps.
        let soonest = (least - used) / cpus.max(1);
        idle = match used.saturating_sub(before) < SHORTEST {
            true => idle.saturating_mul(2),
            false => SHORTEST,
        };
        before = used;
        wait(&CALLS, calls, soonest.max(idle).clamp(SHORTEST, LONGEST));
    }
}

/// Whether the first thread has ended by itself, past the C library: the process ends with its last thread, and this may be it.
fn has_no_leader() -> bool {
    let mut text = [0u8; 128];
    let read =
        proc::open(c"/proc/self/stat").and_then(|file| rustix::io::read(&file, &mut text[..]));
    let text = text.get(..read.unwrap_or(0)).unwrap_or_default();
    // The name before it may have anything in it.
    let state = text
        .iter()
        .rposition(|byte| *byte == b')')
        .and_then(|at| text.get(at + 2));
    state == Some(&b'Z')
}
