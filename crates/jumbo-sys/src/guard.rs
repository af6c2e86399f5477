//! Calls of jumbo that the program does not make itself, and a filter that another thread installs on
//! all threads (SECCOMP_FILTER_FLAG_TSYNC of seccomp(2)): [`guarded`], [`wait_for_guarded`].
//!
//! A check for a filter precedes such calls, but the filter may come between the check and the call, and
//! kill. So both are in a guarded region: the thread that is about to install a filter marks it, and
//! then waits for the threads that were first. [`unfiltered`] is both for filters after the start.
//!
//! Regions of one thread nest. A signal handler that installs a filter does not wait for the region that
//! it interrupts, and one that jumps out of a region delays later filters by a second.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};
use core::time::Duration;

use super::has_one_thread;
use crate::{Deadline, thread_pointer};

/// Most threads that are in a region at a time. Others go in unguarded.
const MAX_THREADS: usize = 64;
/// Probes for a free place.
const MAX_PROBES: usize = 8;
/// Maximum delay of a filter: a region takes microseconds, a large free much longer.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Thread pointer of a thread in a region, on a cache line of its own; 0: none.
#[repr(align(64))]
struct Place(AtomicUsize);

static PLACES: [Place; MAX_THREADS] = [const { Place(AtomicUsize::new(0)) }; MAX_THREADS];
crate::one_page! {
    /// Set once a place was taken: a forked child need not read the others.
    static IS_USED: AtomicBool = AtomicBool::new(false);
    /// Filters installed after the start, or being installed.
    static FILTER_COUNT: AtomicU32 = AtomicU32::new(0);
}

/// Records that a filter is about to be installed.
pub fn mark_filter() {
    FILTER_COUNT.fetch_add(1, Ordering::AcqRel);
}

/// Forgets a filter that the kernel refused.
pub fn unmark_filter() {
    FILTER_COUNT.fetch_sub(1, Ordering::AcqRel);
}

/// Reports whether a filter was installed after the start, or is being installed.
pub fn is_filtered() -> bool {
    FILTER_COUNT.load(Ordering::Acquire) != 0
}

/// Runs `work` in a guarded region; `None` without it, behind a filter after the start.
pub fn unfiltered<R>(work: impl FnOnce() -> R) -> Option<R> {
    guarded(|| (!is_filtered()).then(work))
}

/// Returns the places that a thread may take.
fn places(thread: usize) -> impl Iterator<Item = &'static Place> {
    // Stacks of threads are apart by multiples of a page, and their blocks at the same place in each.
    let first = thread.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
    (first..first + MAX_PROBES).filter_map(|at| PLACES.get(at % MAX_THREADS))
}

/// Runs `work`, which checks for a filter before it makes a call.
#[inline(always)]
pub fn guarded<R>(work: impl FnOnce() -> R) -> R {
    // No other thread installs a filter.
    if has_one_thread() {
        return work();
    }
    let place = take();
    let result = work();
    if let Some(Place(place)) = place {
        place.store(0, Ordering::Release);
    }
    result
}

/// Takes a place; `None` if there is none, or this thread has one.
#[inline(never)]
fn take() -> Option<&'static Place> {
    let own = thread_pointer();
    let is_own = |Place(place): &Place| place.load(Ordering::Relaxed) == own;
    if places(own).any(is_own) {
        return None;
    }
    if !IS_USED.load(Ordering::Relaxed) {
        IS_USED.store(true, Ordering::Relaxed);
    }
    let relaxed = Ordering::Relaxed;
    let taken = places(own).find(|Place(place)| {
        place.load(relaxed) == 0 && place.compare_exchange(0, own, relaxed, relaxed).is_ok()
    });
    // The thread that installs a filter sees the place, or this one sees the filter.
    fence(Ordering::SeqCst);
    taken
}

/// Waits until the other threads have left the regions in which they may be unaware of what this
/// thread has just marked, at most a second.
pub fn wait_for_guarded() {
    fence(Ordering::SeqCst);
    if !IS_USED.load(Ordering::Relaxed) {
        return;
    }
    let (own, deadline) = (thread_pointer(), Deadline::after(MAX_WAIT));
    for Place(place) in &PLACES {
        let seen = place.load(Ordering::Acquire);
        while seen != 0
            && seen != own
            && place.load(Ordering::Acquire) == seen
            && !deadline.has_passed()
        {
            // Without a system call: an earlier filter may forbid it.
            core::hint::spin_loop();
        }
    }
}

/// Forgets the regions of the parent's other threads, in the child of a fork.
pub(super) fn forked() {
    if IS_USED.load(Ordering::Relaxed) {
        let own = thread_pointer();
        for Place(place) in &PLACES {
            let seen = place.load(Ordering::Relaxed);
            if seen != 0 && seen != own {
                place.store(0, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU32;

    /// Threads check a mark in regions, and another one makes it: after its wait none is unaware.
    #[test]
    fn none_acts_on_an_outdated_check_after_the_wait() {
        for _ in 0..200 {
            let (is_marked, has_waited) = (AtomicBool::new(false), AtomicBool::new(false));
            let late = AtomicU32::new(0);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        for _ in 0..300 {
                            guarded(|| {
                                guarded(|| ());
                                if !is_marked.load(Ordering::Relaxed) {
                                    std::thread::yield_now();
                                    let is_late = has_waited.load(Ordering::Relaxed);
                                    late.fetch_add(is_late.into(), Ordering::Relaxed);
                                }
                            });
                        }
                    });
                }
                scope.spawn(|| {
                    std::thread::yield_now();
                    is_marked.store(true, Ordering::Relaxed);
                    guarded(wait_for_guarded);
                    has_waited.store(true, Ordering::Relaxed);
                });
            });
            assert_eq!(late.load(Ordering::Relaxed), 0);
        }
    }
}
