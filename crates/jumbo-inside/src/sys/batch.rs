//! How a thread of ours shares its CPU: [`stand_back`] lets the others go first, [`stay_prompt`] runs
//! for moments, when they are due.
#![expect(unsafe_code, reason = "system calls")]

use super::call;

/// The shortest slice that there is: a task that wakes with less left to run than the running one
/// preempts it (`do_preempt_short` in kernel/sched/fair.c, Linux 6.12).
const SHORT_SLICE_NANOSECONDS: u64 = 100_000;

/// The longest slice that there is, 100 ms: a task with a shorter one that wakes up preempts at
/// once (`do_preempt_short` in kernel/sched/fair.c, Linux 6.12), where otherwise it waits for the
/// end of a slice.
const SLICE_NANOSECONDS: u64 = 100_000_000;

/// The argument of sched_setattr(2) (`struct sched_attr`, linux/sched/types.h, in its first version).
#[repr(C)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    /// The slice in nanoseconds; nothing before Linux 6.12.
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Puts the calling thread under SCHED_BATCH, which preempts no task when it wakes, with a long
/// slice; its nice value stays. It takes no privilege. A policy that is none of `policies` stays as
/// it is. False where the kernel refuses it.
///
/// # References
/// sched_setattr(2); Linux 3.14.
pub fn stand_back(policies: &[libc::c_int]) -> bool {
    schedule(policies, libc::SCHED_BATCH, SLICE_NANOSECONDS)
}

/// Puts the calling thread under SCHED_OTHER with a short slice: it runs soon after it wakes, also
/// on a busy CPU, and has a fair share of it at most. Else as [`stand_back`].
pub fn stay_prompt(policies: &[libc::c_int]) -> bool {
    schedule(policies, libc::SCHED_OTHER, SHORT_SLICE_NANOSECONDS)
}

fn schedule(policies: &[libc::c_int], policy: libc::c_int, slice_nanoseconds: u64) -> bool {
    // SAFETY: questions about this thread.
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
        // The kernel answers with 20 less the nice value.
        nice: i32::try_from(20 - priority).unwrap_or(0),
        priority: 0,
        runtime: slice_nanoseconds,
        deadline: 0,
        period: 0,
    };
    let attributes = (&raw const attributes).expose_provenance();
    // SAFETY: the kernel reads the attributes; the call is about this thread alone.
    unsafe { call(libc::SYS_sched_setattr, [0, attributes, 0, 0, 0, 0]) == 0 }
}
