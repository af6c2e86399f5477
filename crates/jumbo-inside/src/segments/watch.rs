//! The thread that looks whether a program has lived long enough, and touched enough text, for a copy to be worth while:
//! [`begin`], [`end`].
//!
//! It is none of the C library's: a program of one thread stays one to it. So it is gone before whatever concerns all
//! threads or wants a single one: fork(2), unshare(2), setns(2), a change of user or capabilities, a seccomp filter, the
//! end of the main thread, the pool's move off hugetlb pages. After a fork it comes again with the next mapping that the
//! program makes ([`resume`]); after the others it does not.
#![expect(unsafe_code, reason = "makes a thread on a stack of its own")]

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use core::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::{Settings, Stop, because, move_all};
use crate::ledger::text_reason as reason;
use crate::orders::TextMode;
use crate::sandbox;
use crate::sys::{Blocked, Thread, wait, wake};

/// The CPU time that a program has used before any copy is made.
const LIVED: Duration = Duration::from_secs(1);
/// The most that a copy costs, measured: making an image takes 0.2 to 0.6 ms for each MiB.
const COST: Duration = Duration::from_micros(600);
/// A copy may take one part in so many of the CPU time that the program has used.
const SHARE: u32 = 50;
/// Between two looks.
const SHORTEST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_mins(1);

#[repr(align(4096))]
struct Stack(UnsafeCell<[u8; STACK]>);
const STACK: usize = 128 << 10;
// SAFETY: the thread's alone.
unsafe impl Sync for Stack {}
/// Zeroes that no page stands for before there is a thread.
static STACK_OF_THREAD: Stack = Stack(UnsafeCell::new([0; STACK]));

static THREAD: Thread = Thread::none();
/// The process that made it: in a child that was made behind the C library's back there is none, whatever stands here.
static MAKER: AtomicI32 = AtomicI32::new(0);
static SETTINGS: AtomicPtr<Settings> = AtomicPtr::new(core::ptr::null_mut());
/// It is to end, and to give up what it is at.
static ENDING: AtomicBool = AtomicBool::new(false);
/// It is to end before it waits again. A move takes less than a fiftieth of what the program has run.
static LEAVING: AtomicBool = AtomicBool::new(false);
/// The CPU time before which it does not try again, in milliseconds.
static LEAST: AtomicU64 = AtomicU64::new(0);
/// What it sleeps on: another number has it look at `ENDING`.
static CALLS: AtomicU32 = AtomicU32::new(0);
/// It ended for a fork, and is to come again.
static AGAIN: AtomicBool = AtomicBool::new(false);
/// One is being made or ended.
static BUSY: AtomicBool = AtomicBool::new(false);

/// Makes the thread.
pub(super) fn begin(settings: &'static Settings) {
    SETTINGS.store(core::ptr::from_ref(settings).cast_mut(), Ordering::Release);
    make();
}

fn make() {
    if sandbox::is_entered() {
        return because(reason::FILTER);
    }
    if BUSY.swap(true, Ordering::Acquire) {
        return;
    }
    MAKER.store(process(), Ordering::Relaxed);
    ENDING.store(false, Ordering::Release);
    LEAVING.store(false, Ordering::Release);
    let stack = (STACK_OF_THREAD.0.get().expose_provenance(), STACK);
    // A thread is born with its maker's mask.
    let blocked = Blocked::all();
    // SAFETY: signals are blocked. The one that was before has been joined, or was another process's, and the stack is its alone;
    // both values are static.
    if !unsafe { THREAD.start(Thread::FLAGS, stack, &look) } {
        because(reason::NO_MEMORY);
    }
    drop(blocked);
    BUSY.store(false, Ordering::Release);
}

fn process() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Ends the thread, if there is one, for good. A move that is under way is given up, or has just been made.
pub fn end() {
    AGAIN.store(false, Ordering::Relaxed);
    if leave(&ENDING) {
        because(reason::ENDED);
    }
}

/// Before fork(2): the child would have its memory, and no thread.
pub fn about_to_fork() {
    if leave(&LEAVING) {
        AGAIN.store(true, Ordering::Release);
    }
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

/// True where there was one.
fn leave(how: &AtomicBool) -> bool {
    if !THREAD.is_alive() || MAKER.load(Ordering::Relaxed) != process() {
        return false;
    }
    how.store(true, Ordering::Release);
    CALLS.fetch_add(1, Ordering::Release);
    wake(&CALLS);
    THREAD.join();
    true
}

/// What the thread does.
fn look() {
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
        LEAST.store(
            u64::try_from(least.as_millis()).unwrap_or(u64::MAX),
            Ordering::Relaxed,
        );
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
        if stop.check_before_wait().is_err() {
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
