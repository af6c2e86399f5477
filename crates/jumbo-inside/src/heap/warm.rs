//! A large pool made resident by several threads at once: [`in_parallel`].
//!
//! The first touch of memory in a virtual machine costs many times a later one, because the host has to
//! back it; so it is done beforehand and by all CPUs. The threads are the kernel's alone: they run on the
//! caller's thread pointer, call nothing but the kernel, and are gone when [`in_parallel`] returns, so that
//! the C library goes on taking the process for one with a single thread, which it is.
#![expect(unsafe_code, reason = "threads are made here, on stacks of their own")]

use core::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};
use rustix::thread::futex;

use super::memory;
use super::supply::SUPPLY;
use crate::reaper::{Entry, raw};

/// More do not help: the kernel's zeroing is bound by memory.
const THREADS: u32 = 8;
const STACK: usize = 64 << 10;

static WORK: Work = Work {
    next: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
    step: AtomicUsize::new(0),
    errno: AtomicI32::new(0),
};
/// A word for each thread: not 0 until the kernel has let go of it.
static ALIVE: [AtomicU32; THREADS as usize] = [const { AtomicU32::new(0) }; THREADS as usize];

/// A range that is being filled, piece by piece.
#[derive(Debug)]
struct Work {
    next: AtomicUsize,
    end: AtomicUsize,
    step: AtomicUsize,
    errno: AtomicI32,
}

/// Fills a range in pieces, by all CPUs. Where a piece fails the rest is left out, and what was filled stays. Only while
/// the process has one thread.
pub(super) fn in_parallel(address: usize, length: usize, page: usize) -> Result<()> {
    let cpus = rustix::thread::sched_getaffinity(None);
    let cpus = cpus.map_or(1, |cpus| cpus.count().clamp(1, THREADS) as usize);
    // Pieces small enough that no thread works long on the last one while the others wait, and few enough mappings.
    let step = (length / cpus / 8).next_multiple_of(page).max(page);
    WORK.next.store(address, Ordering::Relaxed);
    WORK.end.store(address + length, Ordering::Relaxed);
    WORK.step.store(step, Ordering::Relaxed);
    WORK.errno.store(0, Ordering::Release);
    let stacks = memory::anywhere(cpus * STACK);
    let make = |at: &usize| stacks.is_ok_and(|stacks| make(*at, stacks + at * STACK));
    let mut made = 0;
    // A thread is born with its maker's mask. Here signals come through: warming takes seconds, and the user may
    // want to end it.
    memory::without_signals(|| made = (1..cpus).take_while(make).count());
    run();
    for word in &ALIVE[1..=made] {
        while let alive @ 1.. = word.load(Ordering::Acquire) {
            // The kernel zeroes the word and wakes who waits: CLONE_CHILD_CLEARTID, on a shared futex.
            let _ = futex::wait(word, futex::Flags::empty(), alive, None);
        }
    }
    if let Ok(stacks) = stacks {
        let _ = memory::unmap(stacks, cpus * STACK);
    }
    match WORK.errno.load(Ordering::Acquire) {
        0 => Ok(()),
        errno => Err(Errno::from_raw_os_error(errno)),
    }
}

/// Makes a thread, with [`STACK`] bytes of stack from `stack` on; false where none can be made.
fn make(at: usize, stack: usize) -> bool {
    let bits = |flags: libc::c_int| u64::from(flags.cast_unsigned());
    let shared = bits(libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND);
    let thread = bits(libc::CLONE_THREAD | libc::CLONE_SYSVSEM);
    let told = bits(libc::CLONE_PARENT_SETTID | libc::CLONE_CHILD_CLEARTID);
    let entry = Entry {
        function: thread_main,
        argument: 0,
    };
    // SAFETY: the stack is this thread's alone until its word is 0 again, which `in_parallel` waits for.
    // All signals are blocked, here and so there: no handler runs on a thread that libc does not know.
    unsafe { raw::clone3(shared | thread | told, &ALIVE[at], (stack, STACK), entry) > 0 }
}

/// # Safety
/// Called by [`make`] alone.
unsafe extern "C" fn thread_main(_: usize) -> ! {
    run();
    raw::exit(0)
}

/// Fills pieces until there are none, or one cannot be had.
fn run() {
    let (end, step) = (
        WORK.end.load(Ordering::Relaxed),
        WORK.step.load(Ordering::Relaxed),
    );
    while WORK.errno.load(Ordering::Relaxed) == 0 {
        let at = WORK.next.fetch_add(step, Ordering::Relaxed);
        if at >= end {
            return;
        }
        if let Err(errno) = SUPPLY.fill(at, step.min(end - at)) {
            WORK.errno.store(errno.raw_os_error(), Ordering::Release);
        }
    }
}
