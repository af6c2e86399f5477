//! The threads that free: [`make`].
//!
//! They are threads of the C library's, so that its setuid(2) reaches them, debuggers and seccomp(2) with
//! TSYNC know them, and nothing about them surprises the program: detached, named `jumbo-free/N`, with every
//! signal blocked. They are made when there is work and leave soon after: an idle thread of ours would
//! keep fork(2) warning (CPython), unshare(2) failing, and a program's credentials, where they are changed by
//! a bare system call for one thread alone, from being dropped everywhere. In a process with
//! capabilities they leave at once. Background mode, which the user has asked for, has one made ahead and keeps it
//! for a while ([`prepare`]); a fork ends it first ([`end_idle`]).
#![expect(unsafe_code, reason = "pthread_create(3) takes C's types")]

use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use core::time::Duration;

use rustix::thread::CapabilitySet;

use super::memory::Kernel;
use super::{BACKGROUND, HANDOVER, is_own};
use crate::sync::{BackOff, Deadline, Word};
use crate::sys::{process, request, stand_back};
use crate::{headroom, sandbox};

/// How long a worker sleeps before it leaves.
const LINGER: Duration = Duration::from_millis(100);
/// The same in background mode, where calls are to return at once: making a thread costs more than all the rest.
const READY: Duration = Duration::from_mins(1);
/// A worker needs a few hundred bytes; the rest, which costs addresses only, is for the program's static
/// thread-local variables, which the C library keeps on the same mapping.
const STACK: usize = 2 << 20;
/// How long [`end`] waits.
const BOUND: Duration = Duration::from_secs(10);
/// How long it then waits for the kernel to let go of a thread: microseconds, but on a host that does not schedule
/// it, or where a debugger has it.
const LETTING_GO: Duration = Duration::from_secs(2);

/// After a thread could not be made, some frees do without.
static BACK_OFF: BackOff = BackOff::new();
/// How many threads are making workers. Those that are there begin when all are: who frees holds the memory map, and the
/// making of a thread, whose stack is mapped, waits for that.
static MAKING: AtomicU32 = AtomicU32::new(0);
/// The process that made workers. It is another one in a child that shares its memory (vfork(2)), or that
/// was made behind the C library's back: what it reads of workers is about its parent's.
static MAKER: AtomicI32 = AtomicI32::new(0);

/// Makes `count` workers, whom the queue counts already, or as many as can be made. Never under a lock, nor in a
/// signal handler: the C library allocates.
///
/// All of them here, and none by another worker: a thread that has not allocated before is given an arena by
/// glibc, which takes 128 MiB of addresses for a moment and 64 for good, out of what RLIMIT_AS leaves the program.
pub(super) fn make(count: u32) {
    if count == 0 {
        return;
    }
    // A filter may be on its way whose installer saw no worker before and will see none after.
    let may = !BACK_OFF.holds() && !sandbox::is_untried();
    let mut made = 0;
    if may {
        MAKER.store(process(), Ordering::Relaxed);
        // SAFETY: errno is this thread's own; what succeeds must leave it alone.
        let errno = unsafe { *libc::__errno_location() };
        MAKING.fetch_add(1, Ordering::AcqRel);
        while made < count && make_one() {
            made += 1;
        }
        if MAKING.fetch_sub(1, Ordering::AcqRel) == 1 {
            MAKING.wake(u32::MAX >> 1);
        }
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = errno };
    }
    if made < count {
        HANDOVER.not_made(count - made);
    }
}

/// Whether that is the address of a worker's start routine.
pub(super) fn is_routine(address: usize) -> bool {
    address == start as *const () as usize
}

fn make_one() -> bool {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let (mut all, mut before) = (
        MaybeUninit::<libc::sigset_t>::uninit(),
        MaybeUninit::<libc::sigset_t>::uninit(),
    );
    // SAFETY: each value is initialised by the first call that takes it, and used only where that
    // succeeded; the start routine is a function of this library, which is never unloaded. A thread is
    // born with its maker's signal mask, so the mask is full until it is there; the C library keeps the
    // signals that it needs itself out of it.
    unsafe {
        let attributes = attributes.as_mut_ptr();
        if libc::pthread_attr_init(attributes) != 0 {
            return false;
        }
        libc::pthread_attr_setdetachstate(attributes, libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_attr_setstacksize(attributes, STACK);
        libc::sigfillset(all.as_mut_ptr());
        let masked =
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) == 0;
        let made = masked && {
            let mut thread = MaybeUninit::uninit();
            let create = |thread: *mut libc::pthread_t| {
                libc::pthread_create(thread, attributes, start, ptr::null_mut())
            };
            create(thread.as_mut_ptr()) == 0
        };
        if masked {
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        }
        libc::pthread_attr_destroy(attributes);
        if !made {
            BACK_OFF.begin();
        }
        made
    }
}

/// In the child of a fork: no thread is making any.
pub(super) fn forked() {
    MAKING.store(0, Ordering::Relaxed);
}

extern "C" fn start(_: *mut c_void) -> *mut c_void {
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
    ptr::null_mut()
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
