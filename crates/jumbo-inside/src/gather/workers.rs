//! The threads that free: [`make`].
//!
//! They are the kernel's alone ([`Thread`]): munmap(2) is called in signal handlers, where pthread_create(3) may not be, since it
//! allocates. Each has a thread pointer of its own, which locks know it by, and every signal blocked. They are named
//! `jumbo-free/N`, made when there is work, and leave soon after: an idle thread of ours would
//! keep fork(2) warning (CPython), unshare(2) failing, and a program's credentials, where they are changed by
//! a bare system call for one thread alone, from being dropped everywhere. In a process with
//! capabilities they leave at once. The C library's setuid(2) does not reach them, so they go before it. Background mode, which the
//! user has asked for, has one made ahead and keeps it for a while ([`prepare`]); a fork ends it first ([`end_idle`]).
#![expect(unsafe_code, reason = "threads are made here, on stacks of their own")]

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::mm::{self, MapFlags, ProtFlags};
use rustix::thread::CapabilitySet;

use super::memory::Kernel;
use super::queue::WORKERS;
use super::{BACKGROUND, HANDOVER, is_own};
use crate::sync::{BackOff, Deadline, Word};
use crate::sys::{Blocked, Thread, process, request, stand_back};
use crate::{headroom, sandbox};

/// How long a worker sleeps before it leaves.
const LINGER: Duration = Duration::from_millis(100);
/// The same in background mode, where calls are to return at once: making a thread costs more than all the rest.
const READY: Duration = Duration::from_mins(1);
/// A worker needs a few hundred bytes of it.
const STACK: usize = 64 << 10;
/// How long [`end`] waits.
const BOUND: Duration = Duration::from_secs(10);
/// How long it then waits for the kernel to let go of a thread: microseconds, but on a host that does not schedule
/// it, or where a debugger has it.
const LETTING_GO: Duration = Duration::from_secs(2);
/// How long an ID is asked for after that. It may be that of a thread of the program's by now.
const RELEASING: Duration = Duration::from_millis(10);

/// After a thread could not be made, some frees do without.
static BACK_OFF: BackOff = BackOff::new();
crate::one_page! {
    /// The threads that are making workers. Those that are there begin when all are: who frees holds the memory map, and the
    /// making of a thread, whose stack is mapped, waits for that.
    static MAKING: AtomicU32 = AtomicU32::new(0);
    /// The process that made workers. It is another one in a child that shares its memory (vfork(2)), or that
    /// was made behind the C library's back: what it reads of workers is about its parent's.
    static MAKER: AtomicI32 = AtomicI32::new(0);
}

/// Where workers run.
static PLACES: [Place; WORKERS] = [const { Place::new() }; WORKERS];

/// A thread and its stack, which stays for the next one.
struct Place {
    /// A thread is being made here.
    is_taken: AtomicBool,
    thread: Thread,
    /// 0: none so far.
    stack: AtomicUsize,
}

impl Place {
    const fn new() -> Self {
        Self {
            is_taken: AtomicBool::new(false),
            thread: Thread::none(),
            stack: AtomicUsize::new(0),
        }
    }

    /// Takes the place, where no worker is and none is being made.
    fn take(&self) -> bool {
        let is_free = !self.thread.is_alive() && !self.is_taken.swap(true, Ordering::Acquire);
        // Another thread may have made one here in between.
        let is_free_still = is_free && !self.thread.is_alive();
        if is_free && !is_free_still {
            self.is_taken.store(false, Ordering::Release);
        }
        is_free_still
    }

    /// Makes a worker in a place that was taken; false where none can be made.
    fn make(&'static self) -> bool {
        let stack = match self.stack.load(Ordering::Relaxed) {
            0 => reserve_stack(),
            stack => stack,
        };
        self.stack.store(stack, Ordering::Relaxed);
        let made = stack != 0 && {
            let _blocked = Blocked::all();
            // SAFETY: signals are blocked. No other thread is on the stack, nor is one made here meanwhile; both are never
            // unmapped, and neither is what it does.
            unsafe {
                self.thread
                    .start(Thread::FLAGS, (stack, STACK), &(work as fn()))
            }
        };
        self.is_taken.store(false, Ordering::Release);
        made
    }
}

/// Addresses for a stack; 0 where there are none.
fn reserve_stack() -> usize {
    let (prot, flags) = (
        ProtFlags::READ | ProtFlags::WRITE,
        MapFlags::PRIVATE | MapFlags::NORESERVE,
    );
    // SAFETY: a mapping at an address of the kernel's choice replaces none.
    let stack = unsafe { mm::mmap_anonymous(core::ptr::null_mut(), STACK, prot, flags) };
    stack.map_or(0, |stack| stack.expose_provenance())
}

/// Makes `count` workers, whom the queue counts already, or as many as can be made. Never under a lock.
pub(super) fn make(count: u32) {
    if count == 0 {
        return;
    }
    // A filter may be on its way whose installer saw no worker before and will see none after.
    let may = !BACK_OFF.holds() && !sandbox::is_entered();
    let mut made = 0;
    if may {
        MAKER.store(process(), Ordering::Relaxed);
        MAKING.fetch_add(1, Ordering::AcqRel);
        let mut places = PLACES.iter();
        while made < count
            && let Some(place) = places.find(|place| place.take())
        {
            if !place.make() {
                BACK_OFF.begin();
                break;
            }
            made += 1;
        }
        if MAKING.fetch_sub(1, Ordering::AcqRel) == 1 {
            MAKING.wake(u32::MAX >> 1);
        }
    }
    if made < count {
        HANDOVER.not_made(count - made);
    }
}

/// In the child of a fork: there is no worker, and no thread is making any.
///
/// # Safety
/// This is the child, with one thread.
pub(super) unsafe fn forked() {
    if !were_made() {
        return;
    }
    MAKING.store(0, Ordering::Relaxed);
    for place in &PLACES {
        place.is_taken.store(false, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { place.thread.forget() };
    }
}

/// The work of a thread, from its first instruction to its last.
fn work() {
    loop {
        let making = MAKING.load(Ordering::Acquire);
        if making == 0 {
            break;
        }
        MAKING.wait(making, None);
    }
    let thread = rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .unsigned_abs();
    let number = HANDOVER.arrive(thread);
    let (mut name, mut digits) = ([0; 16], [0; 10]);
    let digits = headroom::decimal(u32::try_from(number).unwrap_or(0), &mut digits);
    if let Some(name) = headroom::joined(&mut name, [b"jumbo-free/", digits, b"\0"]) {
        let _ = rustix::thread::set_name(name);
    }
    if BACKGROUND.load(Ordering::Relaxed) {
        // The caller, who waits for nothing, is not to be preempted by the worker that it wakes,
        // and preempts it when it wakes itself.
        stand_back(&[libc::SCHED_OTHER]);
    }
    HANDOVER.serve(number, linger(), &Kernel);
}

/// How long a worker may sleep here. An instant where the process has a privilege that it could drop, unless
/// background mode was asked for.
fn linger() -> Duration {
    if BACKGROUND.load(Ordering::Relaxed) {
        return READY;
    }
    let none = |sets: rustix::thread::CapabilitySets| sets.permitted == CapabilitySet::empty();
    if rustix::thread::capabilities(None).is_ok_and(none) {
        LINGER
    } else {
        Duration::ZERO
    }
}

/// Whether this process has made workers, or one that it was forked from.
pub(super) fn were_made() -> bool {
    MAKER.load(Ordering::Relaxed) != 0
}

/// Makes `count` workers where there is none.
pub(super) fn prepare(count: u32) {
    make(HANDOVER.expect(count));
}

/// Ends the workers where all of them sleep or are about to: a fork is about to be made, and some programs warn where one is made
/// beside other threads (CPython 3.12).
pub(super) fn end_idle() {
    if HANDOVER.is_idle() {
        end(false);
    }
}

/// Has the workers leave, after all that is to be freed is free, and waits until the kernel has let go of
/// them. False where they have not left within ten seconds.
pub(super) fn end(for_good: bool) -> bool {
    // Where no process ever made one no call is made.
    if !for_good && !were_made() {
        return true;
    }
    let _blocked = Blocked::new();
    let process = process();
    if !is_own() || !for_good && MAKER.load(Ordering::Relaxed) != process {
        // There is none, in this process.
        return true;
    }
    HANDOVER.help(&Kernel);
    let Some(left) = HANDOVER.end_workers(BOUND, for_good) else {
        return false;
    };
    let deadline = Deadline::after(LETTING_GO);
    for place in &PLACES {
        while place.thread.is_alive() && !deadline.has_passed() {
            place.thread.join_for(deadline.left());
        }
    }
    let deadline = Deadline::after(RELEASING);
    for thread in left.into_iter().filter(|thread| *thread != 0) {
        while exists(process, thread) && !deadline.has_passed() {
            rustix::thread::sched_yield();
        }
    }
    true
}

/// tgkill(2) with signal 0.
fn exists(process: i32, thread: u32) -> bool {
    let arguments = [process.unsigned_abs() as usize, thread as usize, 0, 0, 0, 0];
    // SAFETY: no signal is sent.
    unsafe { request(libc::SYS_tgkill, arguments) }.is_ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_worker_stands_back_from_the_usual_policy() {
        let policy = || {
            super::stand_back(&[libc::SCHED_OTHER]);
            // SAFETY: a question about this thread.
            unsafe { libc::sched_getscheduler(0) }
        };
        let other = std::thread::spawn(policy).join().unwrap();
        assert_eq!(other, libc::SCHED_BATCH);
    }
}
