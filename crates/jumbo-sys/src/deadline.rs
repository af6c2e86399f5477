//! Time limits: [`Deadline`].

use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::time::ClockId;

use super::request;

/// Point in time of CLOCK_MONOTONIC, read through the vDSO without the C library.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Duration);

impl Deadline {
    /// Returns the deadline after `time` from now.
    pub fn after(time: Duration) -> Self {
        Self(now().saturating_add(time))
    }

    /// Returns the remaining time, zero after the deadline and once the clock is stopped.
    pub fn left(self) -> Duration {
        match STOPPED_NANOS.load(Ordering::Relaxed) {
            0 => self.0.saturating_sub(now()),
            _ => Duration::ZERO,
        }
    }

    /// Reports whether the deadline has passed.
    pub fn has_passed(self) -> bool {
        self.left().is_zero()
    }
}

/// Converts to whole milliseconds, for atomics.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the CPU time of the calling thread. CLOCK_THREAD_CPUTIME_ID, Linux 2.6.12.
pub fn cpu_time() -> Duration {
    clock(ClockId::ThreadCPUTime).unwrap_or_default()
}

/// Returns the time of CLOCK_MONOTONIC.
pub fn now() -> Duration {
    match STOPPED_NANOS.load(Ordering::Relaxed) {
        0 => clock(ClockId::Monotonic).unwrap_or(Duration::MAX),
        nanos => Duration::from_nanos(nanos),
    }
}

/// Address of the vDSO; 0 if it is unknown.
static VDSO: AtomicUsize = AtomicUsize::new(0);
/// The program has unmapped or moved it: checkpoints are restored so.
static IS_WITHOUT_VDSO: AtomicBool = AtomicBool::new(false);

/// Time at which the clock was stopped; 0: it runs.
static STOPPED_NANOS: AtomicU64 = AtomicU64::new(0);
/// A filter of the program may kill for a system call that reads a clock.
static IS_CONFINED: AtomicBool = AtomicBool::new(false);

/// Stops [`now`] where it is a system call, or becomes one, before a filter of the program that may kill for
/// it: without the vDSO, and unless `is_readable`: the vDSO can read the host's clock.
pub fn confine_clock(is_readable: impl FnOnce() -> bool) {
    if IS_CONFINED.swap(true, Ordering::Relaxed) {
        return;
    }
    if IS_WITHOUT_VDSO.load(Ordering::Relaxed) || !is_readable() {
        stop();
    }
}

fn stop() {
    let nanos = u64::try_from(now().as_nanos()).unwrap_or(u64::MAX);
    STOPPED_NANOS.store(nanos.max(1), Ordering::Relaxed);
}

/// Lets the clock run again: the kernel has refused the filter.
pub fn release_clock() {
    STOPPED_NANOS.store(0, Ordering::Relaxed);
    IS_CONFINED.store(false, Ordering::Relaxed);
}

/// Sets the address of the vDSO, AT_SYSINFO_EHDR of getauxval(3).
pub fn set_vdso(address: usize) {
    VDSO.store(address, Ordering::Relaxed);
}

/// Notes that the program is about to unmap or move a range. The clocks are read by a system call
/// from then on if the vDSO or its data, in front of it, may be there.
#[inline(always)]
pub fn unmapping(address: usize, length: usize) {
    /// Pages of data, and of the vDSO, on the architectures that have most.
    const PAGES: (usize, usize) = (8, 2);
    let (page, vdso) = (rustix::param::page_size(), VDSO.load(Ordering::Relaxed));
    let (start, end) = (vdso.wrapping_sub(PAGES.0 * page), vdso + PAGES.1 * page);
    if vdso != 0 && address < end && start < address.saturating_add(length) {
        if IS_CONFINED.load(Ordering::Relaxed) {
            stop();
        }
        IS_WITHOUT_VDSO.store(true, Ordering::Relaxed);
    }
}

#[expect(unsafe_code, reason = "a system call that rustix makes by the vDSO")]
fn clock(id: ClockId) -> Option<Duration> {
    if !IS_WITHOUT_VDSO.load(Ordering::Relaxed) {
        return Duration::try_from(rustix::time::clock_gettime(id)).ok();
    }
    let mut time = [0_u64; 2];
    let to = time.as_mut_ptr().expose_provenance();
    let arguments = [(id as i32).cast_unsigned() as usize, to, 0, 0, 0, 0];
    // SAFETY: the kernel writes a timespec, two words of 64 bits.
    unsafe { request(libc::SYS_clock_gettime, arguments) }.ok()?;
    Some(Duration::new(time[0], u32::try_from(time[1]).ok()?))
}
