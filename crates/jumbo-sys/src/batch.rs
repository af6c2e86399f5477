//! Scheduling of jumbo's threads: [`stand_back`] for bulk work, [`stay_prompt`] for short work that
//! is due at once.
#![expect(unsafe_code, reason = "system calls")]

use super::call;

/// Minimum slice: a task that wakes preempts a running one with a longer slice (`do_preempt_short`
/// in kernel/sched/fair.c, Linux 6.12).
const MIN_SLICE_NANOSECONDS: u64 = 100_000;

/// Maximum slice: a waking task with a shorter one preempts at once, instead of at the end of the
/// slice.
const MAX_SLICE_NANOSECONDS: u64 = 100_000_000;

/// Argument of sched_setattr(2) (`struct sched_attr`, linux/sched/types.h, in its first version).
#[repr(C)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    /// Slice in nanoseconds; ignored before Linux 6.12.
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Puts the calling thread under SCHED_BATCH with a long slice: it preempts no task when it wakes.
/// The nice value stays, and so does a policy that is not in `policies`. Needs no privilege. False
/// if the kernel refuses it.
///
/// # References
/// sched_setattr(2); Linux 3.14.
pub fn stand_back(policies: &[libc::c_int]) -> bool {
    schedule(policies, libc::SCHED_BATCH, MAX_SLICE_NANOSECONDS)
}

/// Puts the calling thread under SCHED_OTHER with a short slice: it runs soon after it wakes, also
/// on a busy CPU, with at most a fair share. Otherwise like [`stand_back`].
pub fn stay_prompt(policies: &[libc::c_int]) -> bool {
    schedule(policies, libc::SCHED_OTHER, MIN_SLICE_NANOSECONDS)
}

fn schedule(policies: &[libc::c_int], policy: libc::c_int, slice_nanoseconds: u64) -> bool {
    // SAFETY: both calls only return attributes of this thread.
    let (before, priority) = unsafe {
        (
            call(libc::SYS_sched_getscheduler, [0; 6]),
            call(libc::SYS_getpriority, [0; 6]),
        )
    };
    if !policies.iter().any(|known| *known as isize == before) {
        return true;
    }
    let attributes = Attributes {
        size: 48,
        policy: policy.cast_unsigned(),
        flags: 0,
        // The system call returns 20 minus the nice value.
        nice: i32::try_from(20 - priority).unwrap_or(0),
        priority: 0,
        runtime: slice_nanoseconds,
        deadline: 0,
        period: 0,
    };
    let attributes = (&raw const attributes).expose_provenance();
    // SAFETY: the kernel reads the attributes; the call affects only this thread.
    unsafe { call(libc::SYS_sched_setattr, [0, attributes, 0, 0, 0, 0]) == 0 }
}
