//! Gives back what stays in the heap by demand ([`super::window`]), once it is not used, and before it
//! makes the process larger than it ever was: [`begin`], [`end`].
//!
//! The heap itself never holds more than it once handed out. But the program may free blocks and fill
//! other memory then. So while something stays by demand, a job of [`crate::watch`] compares the resident
//! memory of the process with its peak, and looks at the room that cgroups and host leave.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use super::HEAP;
use crate::density;
use crate::headroom::{self, Needed, headroom};
use crate::sandbox;
use crate::watch::{self, Job, Stop, Without};

/// The wait between two looks.
const SCAN_INTERVAL: Duration = Duration::from_millis(5);
/// Memory that the process may have beyond its peak before all goes back.
const SLACK_BYTES: usize = 4 << 20;
/// Memory that the cgroups and the host leave at least.
const MIN_ROOM_BYTES: usize = 32 << 20;
/// Looks from one question for the room to the next, where no cgroup has a limit.
const SCANS_PER_ROOM_CHECK: u32 = 20;

static JOB: Job = Job::new(3, scan, without_thread);
crate::one_page! {
    /// The resident memory without what is free in the heap, at its peak, in bytes; 0: not known yet.
    static PEAK: AtomicUsize = AtomicUsize::new(0);
}
/// Looks until the next question for the room.
static SCANS_TO_ROOM_CHECK: AtomicU32 = AtomicU32::new(0);

/// There is no thread that could scan.
static IS_OFF: AtomicBool = AtomicBool::new(false);

/// Whether memory may stay by demand.
pub(super) fn is_on() -> bool {
    density::is_bounded()
        && !IS_OFF.load(Ordering::Relaxed)
        && !sandbox::is_entered_later()
        && !sandbox::is_entered()
}

/// Something stays by demand from now on.
pub(super) fn begin() {
    watch::begin(&JOB, SCAN_INTERVAL);
}

/// In the child of a fork, which has a peak of its own.
pub(super) fn is_forked() {
    PEAK.store(0, Ordering::Relaxed);
}

/// Nothing stays by demand any more.
pub(super) fn end() {
    if HEAP.with(|window, _| window.keeps_by_demand()) == Some(true) {
        while HEAP.with(|window, leaving| window.age(true, Some(leaving))) == Some(true) {}
    }
}

/// Nothing looks at it, so nothing stays.
fn without_thread(_why: Without) {
    IS_OFF.store(true, Ordering::Relaxed);
    // This may be the watching thread. Where the lock is not to be had, the next free gives it back.
    while HEAP.window.with_soon(|window| window.age(true, None)) == Some(true) {}
}

fn scan(stop: &Stop) -> Option<Duration> {
    let Some(free) = HEAP.window.with_soon(|window| window.free()) else {
        return Some(SCAN_INTERVAL);
    };
    let is_over = has_grown(free) || is_short();
    loop {
        let aged = HEAP.window.with_soon(|window| {
            let is_more = window.age(is_over, None);
            (is_more, window.keeps_by_demand())
        });
        // Who has the lock may wait for this thread to end (setuid(2) in a signal handler).
        let Some((is_more, keeps)) = aged else {
            return Some(SCAN_INTERVAL);
        };
        if !is_more || stop.check_before_wait().is_err() {
            return keeps.then_some(SCAN_INTERVAL);
        }
    }
}

/// Whether the process is larger than it would ever have been without the `free` bytes of the heap.
fn has_grown(free: usize) -> bool {
    let Some(resident) = density::resident_memory() else {
        return true;
    };
    let before = match PEAK.load(Ordering::Relaxed) {
        0 => peak().unwrap_or(resident),
        peak => peak,
    };
    let peak = before.max(resident.saturating_sub(free));
    PEAK.store(peak, Ordering::Relaxed);
    resident > peak + SLACK_BYTES
}

/// The resident memory of the process at its peak, in bytes: `VmHWM` of proc_pid_status(5).
fn peak() -> Option<usize> {
    let mut text = [0u8; 2048];
    let text = headroom::read(c"/proc/self/status", &mut text).ok()?;
    headroom::kib_field(text, b"VmHWM:")
}

/// Whether the cgroups or the host have little left.
fn is_short() -> bool {
    let left = SCANS_TO_ROOM_CHECK.load(Ordering::Relaxed);
    if left > 0 {
        SCANS_TO_ROOM_CHECK.store(left - 1, Ordering::Relaxed);
        return false;
    }
    let room = headroom(Needed {
        host: MIN_ROOM_BYTES,
        group: MIN_ROOM_BYTES,
    });
    if room.is_some_and(|room| room.has_no_group_limit()) {
        SCANS_TO_ROOM_CHECK.store(SCANS_PER_ROOM_CHECK, Ordering::Relaxed);
    }
    room.is_none_or(|room| room.min() < MIN_ROOM_BYTES)
}
