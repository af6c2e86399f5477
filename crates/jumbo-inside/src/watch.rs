//! The thread that looks at a program from within, now and then: `begin`, [`end`]. What it looks at is a `Job`: whether the
//! program has lived long enough for a copy of its text ([`crate::segments`]); which of its memory
//! has turned out dense (`density`).
//!
//! It is none of the C library's: a program of one thread stays one to it. So it is gone before whatever concerns all
//! threads or wants a single one: fork(2), unshare(2), setns(2), a change of user or capabilities, a seccomp filter, the
//! end of the main thread, the pool's move off hugetlb pages. After a fork it comes again with the next mapping that the
//! program makes ([`resume`]), the more seldom the more forks there were, or when a job begins again, as that of shared memory does;
//! after the others it does not. Its descriptors are
//! its own. A program that changes its user or namespaces by a bare system call is noticed at the next scan (`crate::standing`).
#![expect(unsafe_code, reason = "makes a thread on a stack of its own")]

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use core::time::Duration;

use rustix::mm::{Advice, madvise};
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use crate::events::Mechanism;
use crate::headroom::has_tasks;
use crate::sandbox;
use crate::standing::{self, Leader};
use crate::sync::now;
use crate::sys::{Blocked, Thread, process, stay_prompt, wait, wake};

/// Between two looks.
pub(crate) const SHORTEST: Duration = Duration::from_millis(20);
pub(crate) const LONGEST: Duration = Duration::from_mins(1);
/// How long a fork waits for a job: it is over sooner, but where text has to be read from a disk.
const MAX_FORK_DELAY: Duration = Duration::from_millis(200);
/// A user that may have fewer processes is left alone: how many there are is not known.
const MIN_PROCESSES: u64 = 1024;

/// Where the thread runs. The kernel empties it in the child of a fork, however that was made, which so has no thread.
#[repr(C, align(4096))]
struct Stack {
    /// Not 0 where there is a thread, or there was.
    is_here: AtomicU32,
    _rest: UnsafeCell<[u8; STACK_BYTES - WORD_BYTES]>,
}
const STACK_BYTES: usize = 128 << 10;
const WORD_BYTES: usize = size_of::<AtomicU32>();
// SAFETY: the thread's alone, but for the first word, which is an atomic.
unsafe impl Sync for Stack {}
crate::one_page::table! {
    /// Zeroes that no page stands for before there is a thread.
    static STACK_OF_THREAD: Stack = Stack {
        is_here: AtomicU32::new(0),
        _rest: UnsafeCell::new([0; STACK_BYTES - WORD_BYTES]),
    };
}

crate::one_page! {
    static THREAD: Thread = Thread::none();
    /// There was a thread, or is: the stack is as it has to be.
    static IS_PREPARED: AtomicBool = AtomicBool::new(false);
    /// The process that made it: in a child that shares the memory (vfork(2)) what concerns threads concerns another process.
    static MAKER: AtomicI32 = AtomicI32::new(0);
}
/// What there is to do: one for each mechanism.
static JOBS: [AtomicPtr<Job>; 5] = [const { AtomicPtr::new(core::ptr::null_mut()) }; 5];
crate::one_page! {
    /// It is to end, and to give up what it is at.
    static ENDING: AtomicBool = AtomicBool::new(false);
    /// It is to end before it waits again.
    static LEAVING: AtomicBool = AtomicBool::new(false);
    /// None is to be made any more.
    static OVER: AtomicBool = AtomicBool::new(false);
    /// The word that it sleeps on: another number has it look at what it is to do.
    static CALLS: AtomicU32 = AtomicU32::new(0);
    /// It ended for a fork, and is to come again.
    static AGAIN: AtomicBool = AtomicBool::new(false);
    /// The forks so far.
    static FORKS: AtomicU32 = AtomicU32::new(0);
    /// One is being made or ended.
    static BUSY: AtomicBool = AtomicBool::new(false);
}

/// What ends the threads of another mechanism, which are as this one is and have to go when it has to.
static OTHERS: AtomicPtr<Others> = AtomicPtr::new(core::ptr::null_mut());

/// Such threads: what ends them, for good, and returns at once where there are none.
#[derive(Debug)]
pub(crate) struct Others(pub(crate) fn());

/// Has these threads end with this one.
pub(crate) fn with(others: &'static Others) {
    OTHERS.store(core::ptr::from_ref(others).cast_mut(), Ordering::Release);
}

/// Something to look at.
#[derive(Debug)]
pub(crate) struct Job {
    /// Its place among the jobs.
    place: usize,
    /// Looks, and says after how long it wants to look again; `None`: it is done.
    look: fn(&Stop) -> Option<Duration>,
    /// Why there is no thread for it, or none any more.
    without: fn(Without),
    /// The process that it is for; 0: none.
    process: AtomicI32,
    /// When it is due: [`now`], in nanoseconds; or [`NEVER`].
    due: AtomicU64,
}

/// Not due yet, while it is looked at.
const NEVER: u64 = u64::MAX;

/// Why there is no thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Without {
    /// A seccomp filter.
    Filter,
    /// No memory, or no task.
    Room,
    /// A kernel without what it needs.
    Kernel,
    /// It had to go.
    Ended,
}

impl Job {
    pub(crate) const fn new(
        place: usize,
        look: fn(&Stop) -> Option<Duration>,
        without: fn(Without),
    ) -> Self {
        Self {
            place,
            look,
            without,
            process: AtomicI32::new(0),
            due: AtomicU64::new(0),
        }
    }

    /// Looks, if it is due; how long until it is, if it ever is.
    fn run(&self, stop: &Stop) -> Option<Duration> {
        if self.process.load(Ordering::Relaxed) != process() {
            return None;
        }
        let due = Duration::from_nanos(self.due.load(Ordering::Relaxed));
        let left = due.saturating_sub(now());
        if !left.is_zero() {
            return Some(left);
        }
        // A thread that begins it again from here on makes it due.
        self.due.store(NEVER, Ordering::SeqCst);
        if let Some(wait) = (self.look)(stop) {
            self.hasten(wait);
        } else {
            self.process.store(0, Ordering::SeqCst);
            if self.due.load(Ordering::SeqCst) == NEVER {
                return None;
            }
            self.process.store(process(), Ordering::SeqCst);
        }
        let due = Duration::from_nanos(self.due.load(Ordering::Relaxed));
        Some(due.saturating_sub(now()))
    }

    fn set_due(&self, wait: Duration) {
        let due = now().saturating_add(wait).as_nanos();
        let due = u64::try_from(due).unwrap_or(u64::MAX);
        self.due.store(due, Ordering::SeqCst);
    }

    /// Makes it due after that time, if it is not due sooner. True where that is sooner than it was.
    fn hasten(&self, wait: Duration) -> bool {
        let is_new = self.process.load(Ordering::Relaxed) != process();
        let due = Duration::from_nanos(self.due.load(Ordering::Relaxed));
        let sooner = is_new || now().saturating_add(wait) < due;
        if sooner {
            self.set_due(wait);
        }
        self.process.store(process(), Ordering::SeqCst);
        sooner
    }
}

/// All jobs that were begun, by this process or by one that it was forked from.
fn jobs() -> impl Iterator<Item = &'static Job> {
    JOBS.iter().filter_map(|job| {
        // SAFETY: null, or a static that was stored there.
        unsafe { job.load(Ordering::Acquire).as_ref() }
    })
}

/// Says to the jobs of this process why there is no thread.
fn because(why: Without) {
    let mine = |job: &&Job| job.process.load(Ordering::Relaxed) == process();
    jobs().filter(mine).for_each(|job| (job.without)(why));
}

/// Whether the thread is that of another process, which shares its memory with this one.
pub(crate) fn is_anothers() -> bool {
    is_watched() && MAKER.load(Ordering::Relaxed) != process()
}

/// Has the thread look after `wait` at the latest, and makes it if there is none.
pub(crate) fn begin(job: &'static Job, wait: Duration) {
    if is_anothers() {
        return;
    }
    let sooner = job.hasten(wait);
    if let Some(place) = JOBS.get(job.place) {
        place.store(core::ptr::from_ref(job).cast_mut(), Ordering::Release);
    }
    if is_watched() {
        if sooner {
            call(None);
        }
        // It may just be leaving.
        AGAIN.store(true, Ordering::Release);
        return;
    }
    if OVER.load(Ordering::Acquire) {
        return because(Without::Ended);
    }
    let stack = core::ptr::from_ref(&STACK_OF_THREAD).cast_mut().cast();
    // SAFETY: nothing is on it yet, and no process is to find in a copy what is on it. MADV_WIPEONFORK, Linux 4.14.
    if unsafe { madvise(stack, STACK_BYTES, Advice::LinuxWipeOnFork) }.is_err() {
        return because(Without::Room);
    }
    IS_PREPARED.store(true, Ordering::Release);
    make();
}

fn make() {
    if sandbox::is_entered() {
        return because(Without::Filter);
    }
    let few = getrlimit(Resource::Nproc).current;
    if few.is_some_and(|most| most < MIN_PROCESSES) {
        return because(Without::Room);
    }
    // No handler may find it busy; and a thread is born with its maker's mask.
    let _blocked = Blocked::all();
    if BUSY.swap(true, Ordering::SeqCst) {
        return;
    }
    // Another thread, or a handler, may have made it since the caller looked; or marked that it installs a filter, and found no
    // thread to end.
    fence(Ordering::SeqCst);
    let is_entered = sandbox::is_entered();
    if is_watched() || is_entered {
        BUSY.store(false, Ordering::SeqCst);
        // The jobs do without a thread, and say so.
        if is_entered {
            because(Without::Filter);
        }
        return;
    }
    MAKER.store(process(), Ordering::Relaxed);
    ENDING.store(false, Ordering::Release);
    LEAVING.store(false, Ordering::Release);
    STACK_OF_THREAD.is_here.store(1, Ordering::Release);
    if !OVER.load(Ordering::SeqCst) {
        let first = core::ptr::from_ref(&STACK_OF_THREAD).expose_provenance();
        let stack = (first + WORD_BYTES, STACK_BYTES - WORD_BYTES);
        // SAFETY: signals are blocked. The one that was before has been joined, or was another process's, and the stack is its
        // alone; both values are static.
        if !unsafe { THREAD.start(Thread::FLAGS, stack, &look) } {
            because(Without::Room);
        }
    }
    BUSY.store(false, Ordering::SeqCst);
}

/// Whether this process made the thread, or would. No call is made in one that never did: a filter may end who asks for its number.
fn is_makers() -> bool {
    let maker = MAKER.load(Ordering::Relaxed);
    maker != 0 && maker == process()
}

/// Whether there is a thread, of this process or of one that shares the memory.
#[inline(always)]
pub fn is_watched() -> bool {
    THREAD.is_alive() && STACK_OF_THREAD.is_here.load(Ordering::Relaxed) != 0
}

/// Ends the thread, if there is one, for good. A move that is under way is given up, or has just been made.
pub fn end() {
    // SAFETY: null, or a static that was stored there.
    if let Some(Others(end)) = unsafe { OTHERS.load(Ordering::Acquire).as_ref() } {
        end();
    }
    fence(Ordering::SeqCst);
    // Where there never was one, or is none any more, no call is made.
    let none =
        !IS_PREPARED.load(Ordering::Acquire) || OVER.load(Ordering::Acquire) && !is_watched();
    if none {
        return;
    }
    // Another thread may be making one.
    while BUSY.load(Ordering::SeqCst) {
        rustix::thread::sched_yield();
    }
    if !is_makers() {
        return;
    }
    OVER.store(true, Ordering::SeqCst);
    AGAIN.store(false, Ordering::Relaxed);
    while BUSY.load(Ordering::SeqCst) {
        rustix::thread::sched_yield();
    }
    if is_watched() {
        because(Without::Ended);
        call(Some(&ENDING));
        THREAD.join();
    }
}

fn call(how: Option<&AtomicBool>) {
    if let Some(how) = how {
        how.store(true, Ordering::Release);
    }
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
    let again = AGAIN.swap(false, Ordering::AcqRel) && !is_watched();
    if again && is_makers() {
        make();
    }
}

/// What the thread does.
fn look() {
    if standing::begin(c"jumbo-watch").is_err() {
        return because(Without::Kernel);
    }
    // Asked here: the stack of who makes the thread may be a small one.
    if !has_tasks() {
        return because(Without::Room);
    }
    // Whatever its maker has. It holds the lock of all mappings at times, which the program may wait
    // for: it must not wait for the program's threads to leave it a CPU.
    stay_prompt(&[libc::SCHED_OTHER, libc::SCHED_FIFO, libc::SCHED_RR]);
    let stop = Stop::at(&ENDING, &LEAVING);
    loop {
        let calls = CALLS.load(Ordering::Acquire);
        if stop.check_before_wait().is_err() {
            return;
        }
        match standing::compare() {
            Leader::Same => {}
            Leader::Gone => return,
            Leader::Different => {
                // For good: it would be made anew with what the calling thread may do, not the first one.
                OVER.store(true, Ordering::SeqCst);
                return because(Without::Ended);
            }
        }
        match jobs().filter_map(|job| job.run(&stop)).min() {
            Some(soonest) => wait(&CALLS, calls, soonest.min(LONGEST)),
            None => return,
        };
    }
}

/// The CPU time of this thread: on a busy machine a look is longer than what it takes from the program.
pub(crate) fn used() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Whether what is under way is to be given up.
#[derive(Debug)]
pub(crate) struct Stop {
    now: Option<&'static AtomicBool>,
    soon: Option<&'static AtomicBool>,
}

/// Why a job stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// For good.
    Ended,
    /// For now.
    NotYet,
}

impl Stop {
    pub(crate) const fn never() -> Self {
        Self {
            now: None,
            soon: None,
        }
    }

    /// When `now` is set; a wait also when `soon` is.
    pub(crate) const fn at(now: &'static AtomicBool, soon: &'static AtomicBool) -> Self {
        Self {
            now: Some(now),
            soon: Some(soon),
        }
    }

    pub(crate) fn is_never(&self) -> bool {
        self.now.is_none()
    }

    pub(crate) fn check(&self) -> Result<(), Stopped> {
        let is_set = |flag: &AtomicBool| flag.load(Ordering::Acquire);
        match self.now.is_some_and(is_set) {
            true => Err(Stopped::Ended),
            false => Ok(()),
        }
    }

    /// Before a wait.
    pub(crate) fn check_before_wait(&self) -> Result<(), Stopped> {
        let is_set = |flag: &AtomicBool| flag.load(Ordering::Acquire);
        match self.soon.is_some_and(is_set) {
            true => Err(Stopped::NotYet),
            false => self.check(),
        }
    }
}

/// The events that end the thread, because it would keep what the program gives up or stand in the way.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    fn locking_all() {
        end();
    }

    fn first_thread_ends() {
        end();
    }

    fn changing_privilege() {
        end();
    }

    fn confining(_is_first: bool) {
        end();
    }

    // The thread goes. The child has none, whatever stands in its copy of the memory; what is being copied there would be a
    // waste of addresses.
    fn about_to_fork() {
        let never = !IS_PREPARED.load(Ordering::Acquire) || OVER.load(Ordering::Acquire);
        if never || !is_makers() {
            return;
        }
        // A program that forks often is left alone for ever longer.
        let forks = FORKS.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if is_watched() {
            call(Some(&LEAVING));
            THREAD.join_for(MAX_FORK_DELAY);
        }
        if forks.is_power_of_two() && !is_watched() && !OVER.load(Ordering::Acquire) {
            AGAIN.store(true, Ordering::Release);
        }
    }

    #[expect(unsafe_code, reason = "an event of the child")]
    unsafe fn is_forked(_pid: u32) {
        // What ended it for good holds for the child too.
        for flag in [&AGAIN, &BUSY, &ENDING, &LEAVING] {
            flag.store(false, Ordering::Relaxed);
        }
        FORKS.store(0, Ordering::Relaxed);
        MAKER.store(0, Ordering::Relaxed);
    }
}
