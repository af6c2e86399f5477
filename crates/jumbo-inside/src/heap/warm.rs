//! Memory made resident by several threads at once: [`in_parallel`].
//!
//! The first touch of memory in a virtual machine costs many times a later one, because the host has to
//! back it; so it is done beforehand and by all CPUs. The threads are the kernel's alone ([`Thread`]), and are gone when
//! [`in_parallel`] returns, so that the C library goes on taking the process for one with a single thread, which it is.
#![expect(unsafe_code, reason = "threads are made here, on stacks of their own")]

use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

use super::memory;
use crate::sys::{Blocked, Thread};

/// More do not help: the kernel's zeroing is bound by memory.
const MAX_THREADS: usize = 8;
const STACK_BYTES: usize = 64 << 10;

/// Fills a range in pieces of whole pages, by all CPUs. Where a piece fails the rest is left out, and what was filled stays. Only
/// while the process has one thread.
pub(crate) fn in_parallel(
    fill: &(impl Fn(usize, usize) -> Result<()> + Sync),
    page: usize,
    (address, length): (usize, usize),
) -> Result<()> {
    let cpus = rustix::thread::sched_getaffinity(None);
    let cpus = cpus
        .map_or(1, |cpus| cpus.count() as usize)
        .clamp(1, MAX_THREADS);
    // Pieces small enough that no thread works long on the last one while the others wait, and few enough mappings.
    let step = (length / cpus / 8).next_multiple_of(page).max(page);
    let (next, end) = (AtomicUsize::new(address), address + length);
    let failed = AtomicI32::new(0);
    // Fills pieces until there are none, or one cannot be had.
    let work = || {
        while failed.load(Ordering::Relaxed) == 0 {
            let at = next.fetch_add(step, Ordering::Relaxed);
            if at >= end {
                return;
            }
            if let Err(errno) = fill(at, step.min(end - at)) {
                failed.store(errno.raw_os_error(), Ordering::Release);
            }
        }
    };
    let threads = [const { Thread::none() }; MAX_THREADS];
    let stacks = memory::anywhere(cpus * STACK_BYTES);
    if let Ok(stacks) = stacks {
        // A thread is born with its maker's mask. Here signals come through again below: warming takes seconds, and the
        // user may want to end it.
        let _blocked = Blocked::all();
        for (at, thread) in threads[1..cpus].iter().enumerate() {
            // SAFETY: signals are blocked. The stack is this thread's alone, and all that it uses stays until it has
            // been joined, below.
            if !unsafe {
                thread.start(
                    Thread::FLAGS,
                    (stacks + at * STACK_BYTES, STACK_BYTES),
                    &work,
                )
            } {
                break;
            }
        }
    }
    work();
    threads.iter().for_each(Thread::join);
    if let Ok(stacks) = stacks {
        // SAFETY: no thread is on the stacks any more.
        let _ = unsafe { memory::unmap(stacks, cpus * STACK_BYTES) };
    }
    match failed.into_inner() {
        0 => Ok(()),
        errno => Err(Errno::from_raw_os_error(errno)),
    }
}
