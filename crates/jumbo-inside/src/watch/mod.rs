//! Background scanner, a thread: `begin`, [`end`]. Its `Job`s copy the text of long-lived programs
//! ([`crate::segments`]) and find dense memory (`density`).
//!
//! While the program has one thread, a process that shares its memory takes the thread's place
//! (`sibling`), so the program remains one of one thread. "The thread" below is either.
//!
//! The thread ends before calls that concern all threads or need a single one: fork(2), unshare(2),
//! setns(2), changes of user or capabilities, seccomp filters, the end of the main thread, the
//! pool's move off hugetlb. A process ends before the program's first pthread_create(3), chroot(2),
//! exec(3) and exit(3), too.
//!
//! The thread restarts only after a fork: when the program next maps memory ([`resume`]), less
//! often the more it forks, or when a job begins again. Its descriptors are its own. A change of
//! user or namespaces by a bare system call is noticed at the next scan (`crate::standing`), within a
//! second where the thread has privilege. A process confines itself (`confine`), so that nothing can use
//! the privilege meanwhile.
#![expect(unsafe_code, reason = "makes a thread on a stack of its own")]

use core::ptr::with_exposed_provenance;
use core::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
use core::time::Duration;

use rustix::io;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use crate::events::Mechanism;
use crate::headroom::has_tasks;
use crate::sandbox;
use crate::standing::{self, Beside, Leader};
use crate::sync::now;
use jumbo_sys::{self as sys, Blocked, Thread, process, request, stay_prompt, wait, wake};

mod confine;
mod job;
mod sibling;

pub(crate) use job::{Job, Without};
pub(crate) use sibling::program;
pub(crate) use sys::cpu_time;

/// Name of the thread, or of the process in its place, in ps(1).
pub const NAME: &core::ffi::CStr = c"jumbo-watch";

/// Bounds of the wait between two scans.
pub(crate) const MIN_WAIT: Duration = Duration::from_millis(20);
pub(crate) const MAX_WAIT: Duration = Duration::from_mins(1);
/// Maximum delay of a fork, an exec or an exit by a job. Reading text from a disk reaches it, and
/// compaction may.
const MAX_FORK_DELAY: Duration = Duration::from_millis(200);
/// Time after which a process that has to end is killed: it may hold a lock of the heap, which the
/// program needs, unless that leaves its memory.
const MAX_END_DELAY: Duration = Duration::from_secs(5);
const MAX_LEAVE_DELAY: Duration = Duration::from_secs(1);
/// Minimum time between two comparisons with the program, which take up to a tenth of a millisecond.
const COMPARE_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum time between two comparisons of a caller with privilege, which the program may have dropped
/// by a bare system call.
const MAX_PRIVILEGED_WAIT: Duration = Duration::from_secs(1);
/// Minimum process limit of a user who gets a thread: the number of present processes is unknown.
const MIN_PROCESSES: u64 = 1024;
/// Minimum life of a process that ends because it lacks a file, which the next one may open.
const MIN_LIFE: Duration = Duration::from_secs(1);

/// Size of the thread's stack. Its first word is nonzero after the start of a thread. The kernel clears it
/// in the child of any fork, so the child has no thread.
const STACK_BYTES: usize = 128 << 10;
const WORD_BYTES: usize = size_of::<AtomicU32>();
crate::one_page! {
    /// Address of the stack; 0 until the first thread. It is no static: a collector that is conservative
    /// takes what lies in a library's data for pointers, and words of the program's memory lie there.
    static STACK: AtomicUsize = AtomicUsize::new(0);
}

/// Returns the first word of the stack, if there is one.
#[inline(always)]
fn is_used() -> Option<&'static AtomicU32> {
    let stack = with_exposed_provenance::<AtomicU32>(STACK.load(Ordering::Acquire));
    // SAFETY: null, or zeroed memory that is never unmapped; the thread does not use the word.
    unsafe { stack.as_ref() }
}

/// Maps the stack, unless it is mapped. A copy in another process is to be empty: MADV_WIPEONFORK, Linux
/// 4.14.
fn prepare_stack() -> io::Result<()> {
    if is_used().is_some() {
        return Ok(());
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let mapped = sys::map_own(STACK_BYTES, access, MapFlags::PRIVATE)?.expose_provenance();
    // SAFETY: mapped above, and unused.
    let advised = unsafe { sys::advise(mapped, STACK_BYTES, libc::MADV_WIPEONFORK) };
    let (taken, seen) = (Ordering::AcqRel, Ordering::Acquire);
    if advised.is_err() || STACK.compare_exchange(0, mapped, taken, seen).is_err() {
        // SAFETY: no other code knows it.
        let _ = unsafe { sys::unmap(mapped, STACK_BYTES) };
    }
    advised
}

crate::one_page! {
    static THREAD: Thread = Thread::none();
    /// The stack is prepared: a thread was started at least once.
    static IS_PREPARED: AtomicBool = AtomicBool::new(false);
    /// Process that made the thread. A child that shares the memory (vfork(2)) is another process.
    static MAKER_PROCESS: AtomicI32 = AtomicI32::new(0);
}
/// CPU time of the comparisons since [`take_comparison_time`].
static COMPARISON_MICROS: AtomicU64 = AtomicU64::new(0);
static JOBS: [AtomicPtr<Job>; 6] = [const { AtomicPtr::new(core::ptr::null_mut()) }; 6];
crate::one_page! {
    /// Tells the thread to end at once.
    static STOP_NOW: AtomicBool = AtomicBool::new(false);
    /// Tells the thread to end before its next wait.
    static STOP_SOON: AtomicBool = AtomicBool::new(false);
    /// No thread is made any more.
    static IS_DISABLED: AtomicBool = AtomicBool::new(false);
    /// Futex word on which the thread sleeps; a change wakes it to check its jobs.
    static WAKE_WORD: AtomicU32 = AtomicU32::new(0);
    /// The thread ended for a fork, and restarts.
    static IS_RESTARTING: AtomicBool = AtomicBool::new(false);
    /// The process beside the program is to be made anew: it lacks files that it may not open.
    static IS_RENEWING: AtomicBool = AtomicBool::new(false);
    static FORK_COUNT: AtomicU32 = AtomicU32::new(0);
    /// A thread is being made or ended.
    static IS_CHANGING: AtomicBool = AtomicBool::new(false);
}

/// Function that reports whether a resource of the program would outlive it in a process that shares
/// its memory: with true a mapping, with false a lock of a mapped file.
static OUTLIVES: AtomicPtr<Outlives> = AtomicPtr::new(core::ptr::null_mut());

/// Such a function.
#[derive(Debug)]
pub struct Outlives(pub fn(bool) -> bool);

/// Has a thread run the jobs where `outlives` is true.
pub fn unless(outlives: &'static Outlives) {
    OUTLIVES.store(core::ptr::from_ref(outlives).cast_mut(), Ordering::Release);
}

/// Reports whether a process runs the jobs.
#[inline(always)]
pub fn is_beside() -> bool {
    sibling::exists()
}

/// Reports whether the caller is that process.
pub(crate) fn is_caller_beside() -> bool {
    sibling::is_caller()
}

/// Has a thread run the jobs from now on: a resource would outlive the program in a process.
#[cold]
pub fn refuse_sibling() {
    sibling::refuse();
    interrupt_sibling();
}

/// Returns all jobs begun by this process, or by one that it was forked from.
fn jobs() -> impl Iterator<Item = &'static Job> {
    JOBS.iter().filter_map(|job| {
        // SAFETY: null, or a static that was stored there.
        unsafe { job.load(Ordering::Acquire).as_ref() }
    })
}

/// Returns the jobs of this process that are not done.
fn own_jobs() -> impl Iterator<Item = &'static Job> {
    let process = program();
    jobs().filter(move |job| job.process.load(Ordering::Relaxed) == process)
}

/// Reports to the jobs of this process why there is no thread.
fn report_absence(why: Without) {
    own_jobs().for_each(|job| (job.without)(why));
}

/// Reports whether the thread belongs to another process, which shares the memory.
pub(crate) fn is_foreign() -> bool {
    is_watched() && MAKER_PROCESS.load(Ordering::Relaxed) != program()
}

/// Runs a job after `wait` at the latest. Called by a job, on the thread: that is no reason to make
/// the thread anew once it has ended.
pub(crate) fn begin_on_thread(job: &'static Job, wait: Duration) {
    job.hasten(wait);
    if let Some(place) = JOBS.get(job.index) {
        place.store(core::ptr::from_ref(job).cast_mut(), Ordering::Release);
    }
}

/// Runs a job after `wait` at the latest, and makes the thread if needed.
pub(crate) fn begin(job: &'static Job, wait: Duration) {
    if is_foreign() {
        return;
    }
    let is_sooner = job.hasten(wait);
    if let Some(place) = JOBS.get(job.index) {
        place.store(core::ptr::from_ref(job).cast_mut(), Ordering::Release);
    }
    // A process without such a job may have confined itself.
    if job.opens_files {
        interrupt_sibling();
    }
    if is_watched() {
        if is_sooner {
            notify(None);
        }
        // The thread may be about to end.
        IS_RESTARTING.store(true, Ordering::Release);
        return;
    }
    if IS_DISABLED.load(Ordering::Acquire) {
        return report_absence(Without::Ended);
    }
    match sys::unfiltered(prepare_stack) {
        Some(Ok(())) => {}
        Some(Err(_)) => return report_absence(Without::Room),
        None => return report_absence(Without::Filter),
    }
    IS_PREPARED.store(true, Ordering::Release);
    make();
}

fn make() {
    sys::guarded(make_unless_filtered);
}

fn make_unless_filtered() {
    if sandbox::is_entered() {
        return report_absence(Without::Filter);
    }
    let limit = getrlimit(Resource::Nproc).current;
    if limit.is_some_and(|limit| limit < MIN_PROCESSES) {
        return report_absence(Without::Room);
    }
    // The list of mappings may be read.
    sys::apart(make_apart);
}

fn make_apart() {
    // A signal handler must not find it busy; a thread inherits the signal mask.
    let _blocked = Blocked::all();
    if IS_CHANGING.swap(true, Ordering::SeqCst) {
        return;
    }
    // Another thread or a handler may have made the thread meanwhile, or have begun to install a
    // filter without a thread to end.
    fence(Ordering::SeqCst);
    let is_entered = sandbox::is_entered();
    if is_watched() || is_entered {
        IS_CHANGING.store(false, Ordering::SeqCst);
        if is_entered {
            report_absence(Without::Filter);
        }
        return;
    }
    MAKER_PROCESS.store(process(), Ordering::Relaxed);
    STOP_NOW.store(false, Ordering::Release);
    STOP_SOON.store(false, Ordering::Release);
    if let Some(used) = is_used().filter(|_| !IS_DISABLED.load(Ordering::SeqCst)) {
        used.store(1, Ordering::Release);
        sibling::reap();
        let first = STACK.load(Ordering::Relaxed);
        let stack = (first + WORD_BYTES, STACK_BYTES - WORD_BYTES);
        // SAFETY: signals are blocked. The previous thread was joined or belonged to another
        // process, so the stack is unused; it is never unmapped, and the function is static.
        if !unsafe { THREAD.start(sibling::flags(), stack, &run) } {
            report_absence(Without::Room);
        }
    }
    IS_CHANGING.store(false, Ordering::SeqCst);
}

/// Reports whether this process made the thread. Without one no getpid(2): a filter may kill.
fn is_makers() -> bool {
    let maker = MAKER_PROCESS.load(Ordering::Relaxed);
    maker != 0 && maker == process()
}

/// Reports whether a thread runs, of this process or of one that shares the memory.
#[inline(always)]
pub fn is_watched() -> bool {
    THREAD.is_alive() && is_used().is_some_and(|used| used.load(Ordering::Relaxed) != 0)
}

/// Ends the thread for good. A move in progress is abandoned, or just complete.
pub fn end() {
    fence(Ordering::SeqCst);
    // No call without a thread.
    let is_absent = !IS_PREPARED.load(Ordering::Acquire)
        || IS_DISABLED.load(Ordering::Acquire) && !is_watched() && !sibling::exists();
    if is_absent {
        return;
    }
    // Another thread may be making one.
    while IS_CHANGING.load(Ordering::SeqCst) {
        rustix::thread::sched_yield();
    }
    if !is_makers() {
        return;
    }
    IS_DISABLED.store(true, Ordering::SeqCst);
    IS_RESTARTING.store(false, Ordering::Relaxed);
    while IS_CHANGING.load(Ordering::SeqCst) {
        rustix::thread::sched_yield();
    }
    if is_watched() {
        report_absence(Without::Ended);
        notify(Some(&STOP_NOW));
        match sibling::exists() {
            true => sibling::finish(MAX_END_DELAY),
            false => THREAD.join(),
        }
    }
    sibling::reap();
}

/// Ends the thread for now, unless a job delays it.
fn interrupt() {
    if is_watched() {
        notify(Some(&STOP_SOON));
        THREAD.join_for(MAX_FORK_DELAY);
    }
    sibling::reap();
}

/// Ends the process that runs in place of the thread, before a call that would separate it from the
/// program. Without one it makes no system call.
fn interrupt_sibling() {
    if sibling::exists() && is_makers() {
        interrupt();
        IS_RESTARTING.store(!IS_DISABLED.load(Ordering::Acquire), Ordering::Release);
    }
}

/// Ends the process without exception.
fn finish_sibling(patience: Duration) {
    interrupt_sibling();
    if sibling::exists() && is_makers() {
        sibling::finish(patience);
        sibling::reap();
    }
}

/// The program is about to exec.
pub fn about_to_exec() {
    finish_sibling(MAX_LEAVE_DELAY);
}

/// The program is about to wait for a child of any kind, by which it would find the process. So a
/// thread runs the jobs from now on.
#[cold]
pub fn about_to_wait() {
    if is_makers() {
        sibling::refuse();
        finish_sibling(MAX_END_DELAY);
    }
}

/// The program is about to exit.
pub fn about_to_exit() {
    if sibling::exists() && is_makers() {
        IS_DISABLED.store(true, Ordering::SeqCst);
        finish_sibling(MAX_LEAVE_DELAY);
    }
}

fn notify(flag: Option<&AtomicBool>) {
    if let Some(flag) = flag {
        flag.store(true, Ordering::Release);
    }
    WAKE_WORD.fetch_add(1, Ordering::Release);
    wake(&WAKE_WORD);
}

/// Restarts the thread that ended for a fork, in the parent.
#[inline(always)]
pub fn resume() {
    if IS_RESTARTING.load(Ordering::Relaxed) {
        restart();
    }
}

#[cold]
fn restart() {
    if IS_RENEWING.load(Ordering::Acquire) && is_makers() {
        IS_RENEWING.store(false, Ordering::Release);
        interrupt_sibling();
    }
    // One that ends sets the word a moment earlier.
    let again = !is_watched() && IS_RESTARTING.swap(false, Ordering::AcqRel);
    // Ended for good, a filter may forbid the calls below.
    if again && sibling::exists() && is_makers() {
        sibling::reap();
    }
    let has_work = || is_makers() && own_jobs().next().is_some();
    if again && !IS_DISABLED.load(Ordering::Acquire) && has_work() {
        make();
    }
}

fn run() {
    sys::forget();
    IS_RENEWING.store(false, Ordering::Release);
    let is_beside = sibling::is_caller();
    if is_beside && !sibling::begin() {
        return;
    }
    if standing::begin(NAME).is_err() {
        return report_absence(Without::Kernel);
    }
    // Checked here: the caller that makes the thread may have a small stack.
    if !has_tasks() {
        return report_absence(Without::Room);
    }
    // The thread holds the mmap lock at times, for which the program may wait. So it must not wait
    // for the program's threads to free a CPU, under any of these policies.
    stay_prompt(&[libc::SCHED_OTHER, libc::SCHED_FIFO, libc::SCHED_RR]);
    if is_beside && sibling::would_outlive(false) {
        sibling::refuse();
        return IS_RESTARTING.store(true, Ordering::Release);
    }
    let stop = Stop::at(&STOP_NOW, &STOP_SOON);
    let is_privileged = standing::is_privileged();
    let most = match is_privileged {
        true => MAX_PRIVILEGED_WAIT,
        false => MAX_WAIT,
    };
    let mut beside = None;
    if is_beside {
        sys::keep();
        match Beside::begin(program()) {
            Ok(same) => beside = Some(same),
            Err(leader) => {
                may_go_on(leader, Some(true));
                return;
            }
        }
        for job in own_jobs().filter(|job| job.is_deferred.swap(false, Ordering::Relaxed)) {
            job.set_due(Duration::ZERO);
            job.run(&stop);
        }
    }
    let mut is_open = is_beside;
    let began = now();
    let mut compared = beside.as_ref().map(|_| now());
    loop {
        let before = WAKE_WORD.load(Ordering::Acquire);
        if stop.check_before_wait().is_err() {
            return;
        }
        // With a privilege that the program may drop, such a job waits for the next process.
        if is_open && (is_privileged || !own_jobs().any(|job| job.opens_files)) {
            confine::confine();
            is_open = false;
        }
        let is_due = |at| now().saturating_sub(at) >= COMPARE_INTERVAL;
        if compared.is_none_or(is_due) {
            let began = cpu_time();
            let leader = beside
                .as_ref()
                .map_or_else(standing::compare, Beside::compare);
            if !may_go_on(leader, is_beside.then_some(false)) {
                return;
            }
            compared = Some(now());
            let taken = cpu_time().saturating_sub(began).as_micros();
            let taken = u64::try_from(taken).unwrap_or_default();
            COMPARISON_MICROS.fetch_add(taken, Ordering::Relaxed);
        }
        let Some(soonest) = jobs().filter_map(|job| job.run(&stop)).min() else {
            // The program waits for an ended process when it next maps memory.
            return IS_RESTARTING.store(is_beside, Ordering::Release);
        };
        let is_deferred = |job: &Job| job.is_deferred.load(Ordering::Relaxed);
        let mut time = soonest.min(most);
        if sys::has_missed() || is_beside && own_jobs().any(is_deferred) {
            // The program makes another when it next maps memory; until then this one goes on.
            let is_old = now().saturating_sub(began) >= MIN_LIFE;
            if is_old && !IS_RENEWING.swap(true, Ordering::AcqRel) {
                IS_RESTARTING.store(true, Ordering::Release);
            } else if !is_old {
                time = time.min(MIN_LIFE);
            }
        }
        if !is_beside {
            wait(&WAKE_WORD, before, time);
        } else if !sibling::pause(before, time) {
            return;
        }
    }
}

/// Reports whether the caller, compared with the program, goes on. `beside`: it is a process, and true
/// at its first comparison.
fn may_go_on(leader: Leader, beside: Option<bool>) -> bool {
    match leader {
        Leader::Same => return true,
        Leader::Gone => return false,
        Leader::Elsewhere => {}
        // Of a program that may not be traced, a process reads no namespaces.
        Leader::Different if beside == Some(true) => sibling::refuse(),
        Leader::Different => {
            // For good: a new thread would have the privileges of its maker.
            IS_DISABLED.store(true, Ordering::SeqCst);
            report_absence(Without::Ended);
        }
    }
    // The program then waits for a process, or makes another one.
    IS_RESTARTING.store(beside.is_some(), Ordering::Release);
    false
}

/// Returns the CPU time of the comparisons since the last call.
pub(crate) fn take_comparison_time() -> Duration {
    Duration::from_micros(COMPARISON_MICROS.swap(0, Ordering::Relaxed))
}

/// Returns the CPU time of the program, without that of a process beside it.
pub(crate) fn program_cpu_time() -> Duration {
    /// `CPUCLOCK_SCHED` of include/linux/posix-timers.h.
    const SCHEDULED: i32 = 2;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let clock = (!program() << 3 | SCHEDULED).cast_unsigned() as usize;
    let to = (&raw mut time).expose_provenance();
    // SAFETY: the kernel writes one timespec to `time`.
    let answer = unsafe { request(libc::SYS_clock_gettime, [clock, to, 0, 0, 0, 0]) };
    let seconds = u64::try_from(time.tv_sec).ok().filter(|_| answer.is_ok());
    let nanoseconds = u64::try_from(time.tv_nsec).unwrap_or_default();
    let seconds = seconds.map(Duration::from_secs);
    seconds.map_or(Duration::MAX, |time| {
        time.saturating_add(Duration::from_nanos(nanoseconds))
    })
}

/// Requests to stop a job.
#[derive(Debug)]
pub(crate) struct Stop {
    now: Option<&'static AtomicBool>,
    soon: Option<&'static AtomicBool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// For good.
    Ended,
    /// Until later.
    NotYet,
}

impl Stop {
    pub(crate) const fn never() -> Self {
        Self {
            now: None,
            soon: None,
        }
    }

    /// Stops when `now` is set, and before a wait also when `soon` is.
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

    /// Checks before a wait.
    pub(crate) fn check_before_wait(&self) -> Result<(), Stopped> {
        let is_set = |flag: &AtomicBool| flag.load(Ordering::Acquire);
        match self.soon.is_some_and(is_set) {
            true => Err(Stopped::NotYet),
            false => self.check(),
        }
    }
}

/// Events that end the thread: it would keep a dropped privilege, or prevent the call.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    fn locking_all() {
        end();
    }

    fn first_thread_ends() {
        end();
    }

    fn before_thread() {
        if jumbo_sys::note_thread() {
            interrupt_sibling();
        }
    }

    fn before_confinement() {
        interrupt_sibling();
    }

    fn changing_privilege() {
        end();
    }

    fn confining(_is_first: bool) {
        end();
    }

    // The child has no thread. A copy in progress would waste addresses there.
    fn about_to_fork() {
        let never = !IS_PREPARED.load(Ordering::Acquire) || IS_DISABLED.load(Ordering::Acquire);
        if never || !is_makers() {
            return;
        }
        // The more a program forks, the longer it runs without the thread.
        let forks = FORK_COUNT.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        interrupt();
        if forks.is_power_of_two() && !is_watched() && !IS_DISABLED.load(Ordering::Acquire) {
            IS_RESTARTING.store(true, Ordering::Release);
        }
    }

    #[expect(unsafe_code, reason = "the event is unsafe")]
    unsafe fn is_forked(_pid: u32) {
        // A final end holds in the child, too.
        for flag in [
            &IS_RESTARTING,
            &IS_RENEWING,
            &IS_CHANGING,
            &STOP_NOW,
            &STOP_SOON,
        ] {
            flag.store(false, Ordering::Relaxed);
        }
        FORK_COUNT.store(0, Ordering::Relaxed);
        MAKER_PROCESS.store(0, Ordering::Relaxed);
        THREAD.forget_number();
        jumbo_sys::note_one_thread(true);
    }
}
