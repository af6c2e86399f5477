//! First touch of memory by several threads: [`in_parallel`].
//!
//! In a virtual machine the first touch of memory costs many times a later one, because the host
//! must back it; so all CPUs do it in advance. The C library does not know the threads
//! ([`Thread`]), which end before [`in_parallel`] returns: to it the process stays single-threaded.
#![expect(unsafe_code, reason = "creates threads on their own stacks")]

use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

use super::memory;
use jumbo_sys::{Blocked, Thread};

/// Maximum number of threads: zeroing is bound by memory bandwidth.
const MAX_THREADS: usize = 8;
const STACK_BYTES: usize = 64 << 10;

/// Fills a range on all CPUs, in parts of whole pages. After a failure the rest is left out, and
/// filled parts stay. Only while the process has one thread.
pub(crate) fn in_parallel(
    fill: &(impl Fn(usize, usize) -> Result<()> + Sync),
    page: usize,
    (address, length): (usize, usize),
) -> Result<()> {
    let cpus = rustix::thread::sched_getaffinity(None);
    let cpus = cpus
        .map_or(1, |cpus| cpus.count() as usize)
        .clamp(1, MAX_THREADS);
    // Small parts, so that no thread works long on the last one; but few mappings.
    let step = (length / cpus / 8).next_multiple_of(page).max(page);
    let (next, end) = (AtomicUsize::new(address), address + length);
    let failed = AtomicI32::new(0);
    // Fills parts until none is left or one fails.
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
    let stacks = memory::own(cpus * STACK_BYTES);
    if let Ok(stacks) = stacks {
        // A thread inherits its creator's mask. Signals are unblocked again below: warming takes
        // seconds, and the user may want to interrupt it.
        let _blocked = Blocked::all();
        for (at, thread) in threads[1..cpus].iter().enumerate() {
            // SAFETY: signals are blocked. The stack is this thread's alone, and all that it uses
            // lives until it is joined below.
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
