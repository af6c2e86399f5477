//! A thread that lets the others go first: [`Batch`].

/// The longest slice that there is, 100 ms: a task with a shorter one that wakes up preempts at once
/// (`do_preempt_short` in kernel/sched/fair.c, Linux 6.12), where otherwise it waits for the end of a slice.
const SLICE: u64 = 100_000_000;

/// What sched_setattr(2) takes (`struct sched_attr`, linux/sched/types.h, in its first version) to have a thread under
/// SCHED_BATCH, which preempts no task when it wakes, with a long slice. It takes no privilege.
#[repr(C)]
#[derive(Debug)]
pub struct Batch {
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

impl Batch {
    /// For a thread whose nice value is this one.
    pub const fn new(nice: i32) -> Self {
        Self {
            size: 48,
            policy: libc::SCHED_BATCH.cast_unsigned(),
            flags: 0,
            nice,
            priority: 0,
            runtime: SLICE,
            deadline: 0,
            period: 0,
        }
    }
}
