//! Frees memory that the heap retains by demand ([`super::window`]) when it is unused, or before
//! the process exceeds its former peak: [`begin`], [`end`].
//!
//! The heap never holds more than it once handed out, but the program may free blocks and fill
//! other memory. So while memory is retained, a job of [`crate::watch`] compares the resident
//! memory of the process with its peak, and checks the room in cgroups and on the host.

use core::sync::atomic::{AtomicBool, AtomicIsize, AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use super::window::BlockWindow;
use super::{BASE_PAGE, Caller, HEAP};
use crate::density;
use crate::gather::PendingFree;
use crate::headroom::{Needed, headroom};
use crate::sandbox;
use crate::watch::{self, Job, Stop, Without};
use jumbo_sys::{self as sys, Blocked, proc};

/// Interval between two scans.
const SCAN_INTERVAL: Duration = Duration::from_millis(2);
/// Growth beyond the peak that is always allowed.
const SLACK_BYTES: usize = 2 << 20;
/// Growth of other memory between two scans at which all retained memory is freed.
const MAX_OTHERS_GROWTH_BYTES: isize = 4 << 20;
/// Scans in which the former height falls to the present one, by two thirds.
const OTHERS_DECAY: isize = 64;
/// Room in cgroups and on the host below which all retained memory is freed.
const MIN_ROOM_BYTES: usize = 32 << 20;
/// Scans between two checks of the room, where no cgroup has a limit.
const SCANS_PER_ROOM_CHECK: u32 = 50;
/// Size of mappings that counts as about to be filled.
const MIN_FILLED_BYTES: usize = 1 << 20;
/// Usual size of a thread's stack (RLIMIT_STACK), which the C library maps unseen.
const STACK_BYTES: usize = 8 << 20;

static JOB: Job = Job::new(3, scan, without_thread);
crate::one_page! {
    /// Peak of the resident memory without the heap's free memory, in bytes; 0: unknown.
    static PEAK: AtomicUsize = AtomicUsize::new(0);
    /// Former height of the resident memory without the heap's blocks, in bytes; the minimum:
    /// unknown.
    static OTHERS: AtomicIsize = AtomicIsize::new(isize::MIN);
}
/// Scans until the next check of the room.
static SCANS_TO_ROOM_CHECK: AtomicU32 = AtomicU32::new(0);

/// Bytes in smaller mappings than [`MIN_FILLED_BYTES`] since the last one that counted.
static SMALL_MAPPED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Writable memory that the program has mapped, without what it unmapped since, and the most so far.
static MAPPED_BYTES: AtomicUsize = AtomicUsize::new(0);
static MAPPED_PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Set if no thread can scan.
static IS_OFF: AtomicBool = AtomicBool::new(false);

/// Reports whether memory may be retained by demand.
pub(super) fn is_on() -> bool {
    density::is_bounded()
        && !IS_OFF.load(Ordering::Relaxed)
        && !sandbox::is_entered_later()
        && !sandbox::is_entered()
}

/// Starts the scans: memory is retained by demand.
pub(super) fn begin() {
    watch::begin(&JOB, SCAN_INTERVAL);
}

/// Resets the peak in the child of a fork.
pub(super) fn reset_peak() {
    PEAK.store(0, Ordering::Relaxed);
    OTHERS.store(isize::MIN, Ordering::Relaxed);
}

/// Frees all memory retained by demand, also before the kernel makes much memory resident in one
/// call. Nothing is done while another thread keeps the lock: it may be suspended.
pub fn end() {
    let _blocked = blocked();
    let keeps = HEAP.with_as(Caller::Mapping, |window, _| {
        let keeps = window.keeps_by_demand();
        if keeps {
            window.end_demand();
        }
        keeps
    });
    let shrink = |window: &mut BlockWindow, leaving: &mut PendingFree| window.shrink(Some(leaving));
    while keeps == Some(true) && HEAP.with_as(Caller::Mapping, shrink) == Some(true) {}
}

/// Frees retained memory where the program is about to fill `bytes` of other memory, faster than
/// the scans may see it.
pub fn about_to_fill(bytes: usize) {
    crate::slab::about_to_fill(bytes);
    return_memory(|window, leaving| window.about_to_fill(bytes, leaving));
}

/// Frees retained memory of the window before other memory grows beyond its peak by `bytes`.
pub fn make_room(bytes: usize) {
    return_memory(|window, leaving| window.make_room(bytes, leaving));
}

/// Blocks signals while a call that maps memory holds a lock: a thread that is suspended by one would keep
/// others from mapping and forking.
fn blocked() -> Option<Blocked> {
    sandbox::allows_signals().then(Blocked::asynchronous)
}

/// Notes a writable mapping of the program. Small ones are added up.
pub(super) fn mapped(length: usize) {
    let small = match length < MIN_FILLED_BYTES {
        true => SMALL_MAPPED_BYTES.fetch_add(length, Ordering::Relaxed),
        false => 0,
    };
    let bytes = length.saturating_add(small);
    let mapped = MAPPED_BYTES.fetch_add(length, Ordering::Relaxed) + length;
    if bytes < MIN_FILLED_BYTES {
        return;
    }
    SMALL_MAPPED_BYTES.store(0, Ordering::Relaxed);
    let _blocked = blocked();
    let growth = mapped.saturating_sub(MAPPED_PEAK_BYTES.load(Ordering::Relaxed));
    if growth < MIN_FILLED_BYTES {
        about_to_fill(bytes);
    } else {
        MAPPED_PEAK_BYTES.store(mapped, Ordering::Relaxed);
        crate::slab::about_to_fill(bytes);
        make_room(bytes.max(growth));
    }
}

/// Notes that the program unmaps memory, of any kind.
pub(super) fn unmapped(length: usize) {
    let rest = |mapped: usize| Some(mapped.saturating_sub(length));
    let _ = MAPPED_BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest);
}

/// Frees retained memory where the program has made a range writable that is not resident yet. The
/// next scan measures it.
pub(super) fn made_writable(address: usize, length: usize) {
    if length < MIN_FILLED_BYTES {
        return;
    }
    let start = address & !(BASE_PAGE - 1);
    let range = start..start + (address - start + length).next_multiple_of(BASE_PAGE);
    return_memory(|window, leaving| {
        let is_resident = || density::is_resident(&range, 0);
        if window.keeps_by_demand() && sys::unfiltered(is_resident) == Some(false) {
            window.make_room_for_now(range.len(), leaving);
        }
    });
}

/// Frees retained memory where a new thread may fill its stack. The next scan measures it.
pub(super) fn about_to_thread() {
    return_memory(|window, leaving| window.make_room_for_now(STACK_BYTES, leaving));
}

/// Runs `work`, which unmaps memory in a call that maps. A later filter of the program may forbid
/// munmap(2). Nothing is done while another thread keeps the lock.
fn return_memory(work: impl FnOnce(&mut BlockWindow, &mut PendingFree)) {
    if !sandbox::is_entered_later() {
        HEAP.with_as(Caller::Mapping, work);
    }
}

/// Stops retention, because nothing scans it.
fn without_thread(_why: Without) {
    IS_OFF.store(true, Ordering::Relaxed);
    // The caller may be the watching thread, which never waits; the next free purges then.
    HEAP.window.with_soon(|window| window.end_demand());
    while HEAP.window.with_soon(|window| window.shrink(None)) == Some(true) {}
}

fn scan(stop: &Stop) -> Option<Duration> {
    if is_short() {
        HEAP.window.with_soon(BlockWindow::end_demand);
    }
    HEAP.window.with_soon(BlockWindow::age);
    let mut excess_factor: isize = 1;
    while let Some(room) = room_below_peak() {
        // Free memory may be untouched, and its return does not help: then more has to go.
        let growth = room.saturating_mul(if room < 0 { excess_factor } else { 1 });
        HEAP.window.with_soon(|window| window.limit_total(growth));
        if !shrink(stop) || room >= 0 {
            break;
        }
        excess_factor = excess_factor.saturating_mul(2);
    }
    // The holder of the lock may wait for this thread to end (setuid(2) in a signal handler).
    let keeps = HEAP.window.with_soon(|window| window.keeps_by_demand());
    keeps.unwrap_or(true).then_some(SCAN_INTERVAL)
}

/// Frees what is beyond the bound; reports whether that was anything.
fn shrink(stop: &Stop) -> bool {
    let mut has_freed = false;
    loop {
        let step = HEAP.window.with_soon(|window| {
            let before = window.free();
            (window.shrink(None), window.free() < before)
        });
        let Some((is_more, freed)) = step else {
            return false;
        };
        has_freed |= freed;
        if !is_more {
            return has_freed;
        }
        if stop.check_before_wait().is_err() {
            return false;
        }
    }
}

/// Reports whether other memory of the process grows by more than the scans can follow.
///
/// Allocated memory that is not touched yet lowers the measure for a moment. So it is compared with
/// its former height, which falls slowly.
fn is_filling(resident: usize, total: usize) -> bool {
    let others = resident.cast_signed() - total.cast_signed();
    let before = OTHERS.load(Ordering::Relaxed);
    let height = match before {
        isize::MIN => others,
        before => others.max(before - (before - others) / OTHERS_DECAY),
    };
    OTHERS.store(height, Ordering::Relaxed);
    before != isize::MIN && others > before + MAX_OTHERS_GROWTH_BYTES
}

/// Returns the bytes by which the process may grow until it is [`SLACK_BYTES`] beyond its former
/// peak, which is without the heap's free memory. Negative: it is to shrink. `None`: the lock is
/// taken.
fn room_below_peak() -> Option<isize> {
    let read = || {
        HEAP.window
            .with_soon(|window| (window.free(), window.total()))
    };
    let before = read()?;
    let Some(resident) = density::resident_memory() else {
        return Some(isize::MIN);
    };
    // Threads may have freed or allocated much in between: the lower bound of the peak counts.
    let after = read()?;
    let free = before.0.max(after.0);
    if is_filling(resident, before.1.max(after.1)) {
        return Some(-free.cast_signed());
    }
    let former = match PEAK.load(Ordering::Relaxed) {
        0 => peak().unwrap_or(resident),
        peak => peak,
    };
    let peak = former.max(resident.saturating_sub(free));
    PEAK.store(peak, Ordering::Relaxed);
    Some((peak + SLACK_BYTES).cast_signed() - resident.cast_signed())
}

/// Returns the peak of the resident memory in bytes: `VmHWM` of proc_pid_status(5).
fn peak() -> Option<usize> {
    let mut text = [0u8; 2048];
    let text = proc::read(c"/proc/self/status", &mut text).ok()?;
    usize::try_from(proc::kib_field(text, b"VmHWM:")?.0).ok()
}

/// Reports whether the cgroups or the host have little room.
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
