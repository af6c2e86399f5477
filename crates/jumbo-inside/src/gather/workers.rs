//! Threads that free memory: [`make`].
//!
//! The C library does not know them ([`Thread`]): munmap(2) may be called in signal handlers,
//! pthread_create(3) may not, because it allocates. Each has its own thread pointer, its identity
//! for locks, and all signals blocked. They are named `jumbo-free/N`.
//!
//! They are made for work, and leave soon after: with the call if the program has one thread, which
//! would see them. An idle thread would cause a warning at fork(2)
//! (CPython), make unshare(2) fail, and keep credentials that the program drops by a bare system
//! call. In a process with capabilities they leave at once. They end before setuid(2), because the
//! C library's does not reach them.
//!
//! Background mode makes one ahead ([`super::prepare`]), and keeps it longer, but not over a fork.
#![expect(unsafe_code, reason = "threads are made here, on stacks of their own")]

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::CapabilitySet;

use super::memory::Kernel;
use super::queue::MAX_WORKERS;
use super::{BACKGROUND, HANDOVER, is_own};
use crate::sandbox;
use crate::sync::{BackOff, Deadline, Word};
use jumbo_sys::proc::Path;
use jumbo_sys::{Blocked, Thread, map_own, process, request, stand_back};

/// Sleep of a worker before it leaves.
const IDLE_TIMEOUT: Duration = Duration::from_millis(100);
/// The same in background mode, where calls must not wait for a new thread.
const BACKGROUND_IDLE_TIMEOUT: Duration = Duration::from_mins(1);
/// Stack size; a worker needs a few hundred bytes.
const STACK_BYTES: usize = 64 << 10;
/// Timeout of [`end`].
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for the kernel to release a thread, which takes microseconds unless it is traced.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout for the thread ID, which may by now belong to a thread of the program.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(10);

/// Some frees do without workers after a thread could not be made.
static BACK_OFF: BackOff = BackOff::new();
crate::one_page! {
    /// Threads that are making workers. New workers start when it is 0: freeing holds the mmap
    /// lock, for which the mapping of the next stack would wait.
    static MAKER_COUNT: AtomicU32 = AtomicU32::new(0);
    /// Process that made workers. Another one, in a child that shares its memory (vfork(2)) or was
    /// made by a bare clone(2), reads the state of its parent's workers.
    static MAKER_PROCESS: AtomicI32 = AtomicI32::new(0);
}

static PLACES: [WorkerPlace; MAX_WORKERS as usize] =
    [const { WorkerPlace::new() }; MAX_WORKERS as usize];

/// Thread, and its stack, which is kept for the next thread.
struct WorkerPlace {
    /// A thread is being made here.
    is_taken: AtomicBool,
    thread: Thread,
    /// Address; 0: not mapped yet.
    stack: AtomicUsize,
}

impl WorkerPlace {
    const fn new() -> Self {
        Self {
            is_taken: AtomicBool::new(false),
            thread: Thread::none(),
            stack: AtomicUsize::new(0),
        }
    }

    /// Takes a place without a worker; false if it is in use.
    fn take(&self) -> bool {
        let is_free = !self.thread.is_alive() && !self.is_taken.swap(true, Ordering::Acquire);
        // Another thread may have made one meanwhile.
        let is_free_still = is_free && !self.thread.is_alive();
        if is_free && !is_free_still {
            self.is_taken.store(false, Ordering::Release);
        }
        is_free_still
    }

    /// Makes a worker in a place that was taken; false on failure.
    fn make(&'static self) -> bool {
        let stack = match self.stack.load(Ordering::Relaxed) {
            0 => reserve_stack(),
            stack => stack,
        };
        self.stack.store(stack, Ordering::Relaxed);
        let made = stack != 0 && {
            let _blocked = Blocked::all();
            // SAFETY: signals are blocked. No other thread uses the stack, nor is one made here
            // meanwhile. Stack and function are never unmapped.
            unsafe {
                self.thread
                    .start(Thread::FLAGS, (stack, STACK_BYTES), &(work as fn()))
            }
        };
        self.is_taken.store(false, Ordering::Release);
        made
    }
}

fn reserve_stack() -> usize {
    let (prot, flags) = (
        ProtFlags::READ | ProtFlags::WRITE,
        MapFlags::PRIVATE | MapFlags::NORESERVE,
    );
    map_own(STACK_BYTES, prot, flags).map_or(0, |stack| stack.expose_provenance())
}

/// Makes `count` workers, already counted, or as many as possible. The caller holds no lock.
pub(super) fn make(count: u32) {
    if count == 0 {
        return;
    }
    // A concurrent installer of a filter has seen no worker, and would not end this one.
    let may_make = !BACK_OFF.holds() && !sandbox::is_entered();
    let mut made = 0;
    if may_make {
        MAKER_PROCESS.store(process(), Ordering::Relaxed);
        MAKER_COUNT.fetch_add(1, Ordering::AcqRel);
        let mut places = PLACES.iter();
        while made < count
            && let Some(place) = places.find(|place| place.take())
        {
            if !place.make() {
                BACK_OFF.begin(BackOff::SKIPPED_ATTEMPTS);
                break;
            }
            made += 1;
        }
        if MAKER_COUNT.fetch_sub(1, Ordering::AcqRel) == 1 {
            MAKER_COUNT.wake(u32::MAX >> 1);
        }
    }
    if made < count {
        HANDOVER.uncount_workers(count - made);
    }
}

/// Resets the places in the child of a fork.
///
/// # Safety
/// The process is the child, with one thread.
pub(super) unsafe fn forked() {
    if !were_made() {
        return;
    }
    MAKER_COUNT.store(0, Ordering::Relaxed);
    for place in &PLACES {
        place.is_taken.store(false, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { place.thread.forget() };
    }
}

fn work() {
    loop {
        let making = MAKER_COUNT.load(Ordering::Acquire);
        if making == 0 {
            break;
        }
        MAKER_COUNT.wait(making, None);
    }
    let thread = rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .unsigned_abs();
    let number = HANDOVER.add_worker(thread);
    let mut name = Path::<16>::EMPTY;
    if let Some(name) = name.write(format_args!("jumbo-free/{number}")) {
        let _ = rustix::thread::set_name(name);
    }
    if BACKGROUND.load(Ordering::Relaxed) {
        // Keeps the worker from preempting the caller, who waits for nothing.
        stand_back(&[libc::SCHED_OTHER]);
    }
    HANDOVER.serve(number, idle_timeout(), &Kernel);
}

/// Returns the idle timeout: zero with a privilege to drop, except in background mode.
fn idle_timeout() -> Duration {
    if BACKGROUND.load(Ordering::Relaxed) {
        return BACKGROUND_IDLE_TIMEOUT;
    }
    let none = |sets: rustix::thread::CapabilitySets| sets.permitted == CapabilitySet::empty();
    if rustix::thread::capabilities(None).is_ok_and(none) {
        IDLE_TIMEOUT
    } else {
        Duration::ZERO
    }
}

/// Reports whether this process, or one that it was forked from, has made workers.
pub(super) fn were_made() -> bool {
    MAKER_PROCESS.load(Ordering::Relaxed) != 0
}

/// Ends the workers after all memory is free, and waits until the kernel has released them. False
/// after a timeout of ten seconds.
pub(super) fn end(for_good: bool) -> bool {
    // No call without workers.
    if !for_good && !were_made() {
        return true;
    }
    let _blocked = Blocked::new();
    let process = process();
    if !is_own() || !for_good && MAKER_PROCESS.load(Ordering::Relaxed) != process {
        // Another process's workers.
        return true;
    }
    HANDOVER.help(&Kernel);
    let Some(threads) = HANDOVER.end_workers(END_TIMEOUT, for_good) else {
        return false;
    };
    let deadline = Deadline::after(EXIT_TIMEOUT);
    for place in &PLACES {
        while place.thread.is_alive() && !deadline.has_passed() {
            place.thread.join_for(deadline.left());
        }
    }
    let deadline = Deadline::after(RELEASE_TIMEOUT);
    for thread in threads.into_iter().filter(|thread| *thread != 0) {
        while exists(process, thread) && !deadline.has_passed() {
            rustix::thread::sched_yield();
        }
    }
    true
}

/// Reports whether a thread exists: tgkill(2) with signal 0.
fn exists(process: i32, thread: u32) -> bool {
    let arguments = [process.unsigned_abs() as usize, thread as usize, 0, 0, 0, 0];
    // SAFETY: signal 0 is not delivered.
    unsafe { request(libc::SYS_tgkill, arguments) }.is_ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_worker_leaves_the_default_policy() {
        let policy = || {
            super::stand_back(&[libc::SCHED_OTHER]);
            // SAFETY: reads the policy of this thread.
            unsafe { libc::sched_getscheduler(0) }
        };
        let other = std::thread::spawn(policy).join().unwrap();
        assert_eq!(other, libc::SCHED_BATCH);
    }
}
