//! Seccomp filter of the reaper: [`install`].
//!
//! The filter (seccomp(2), Linux 3.5) lists each allowed call and, if possible, its arguments. The
//! reaper keeps the user ID that the program had at the start, and executes memory that the program
//! can write; so every call that it does not need kills it.
//!
//! Allowed are: reads of its two descriptors, futex waits and wake-ups, freeing memory (which the
//! program can do itself), the test whether it is alone, its own threads, its end. RLIMIT_CPU
//! bounds the CPU time (see `confine`); RLIMIT_NPROC and a pids cgroup bound the number of threads,
//! as they do the program's. But RLIMIT_NPROC does not apply to root, nor after a change of the
//! user. So if the program may change its user, each thread takes a descriptor (CLONE_PIDFD), which
//! the reaper cannot close, and RLIMIT_NOFILE limits their number. Before Linux 6.9, which refuses
//! that flag for threads, such a reaper has one thread.
#![expect(unsafe_code, reason = "hands the filter to the kernel")]

use super::raw;
use crate::bpf::{
    ALLOW, ARCHITECTURE, AT_ARCHITECTURE, AT_NUMBER, KILL, Step, answer, call, equal, greater,
    high, load, low, number,
};
use jumbo_sys::Thread;

/// Exact flags of the reaper's threads.
pub(super) const THREAD: u32 = Thread::FLAGS;

/// Exact flags of threads with a descriptor each, Linux 6.9.
pub(super) const COUNTED_THREAD: u32 = THREAD | libc::CLONE_PIDFD.cast_unsigned();

/// Last descriptor of the reaper; the first is 0.
pub(super) const LAST_DESCRIPTOR: u32 = 1;

/// MADV_DONTNEED_LOCKED of madvise(2), Linux 5.18.
pub(super) const MADV_DONTNEED_LOCKED: i32 = 24;

const LENGTH: u16 = 52;

/// Returns the filter with these thread flags. Each rule compares the number, or skips the rule;
/// then it checks the argument and returns an action.
const fn filter(thread: u32) -> [Step; LENGTH as usize] {
    [
        load(AT_ARCHITECTURE),
        equal(ARCHITECTURE, 1, 0),
        answer(KILL),
        load(AT_NUMBER),
        call(libc::SYS_futex, 4),
        load(low(1)),
        greater(number(libc::FUTEX_WAKE), 1, 0),
        answer(ALLOW),
        answer(KILL),
        call(libc::SYS_madvise, 5),
        load(low(2)),
        equal(number(libc::MADV_DONTNEED), 1, 0),
        equal(number(MADV_DONTNEED_LOCKED), 0, 1),
        answer(ALLOW),
        answer(KILL),
        call(libc::SYS_munmap, 1),
        answer(ALLOW),
        call(libc::SYS_read, 4),
        load(low(0)),
        greater(LAST_DESCRIPTOR, 1, 0),
        answer(ALLOW),
        answer(KILL),
        call(libc::SYS_lseek, 4),
        load(low(0)),
        greater(LAST_DESCRIPTOR, 1, 0),
        answer(ALLOW),
        answer(KILL),
        call(libc::SYS_unshare, 6),
        load(low(0)),
        equal(number(libc::CLONE_VM), 0, 3),
        load(high(0)),
        equal(0, 0, 1),
        answer(ALLOW),
        answer(KILL),
        call(libc::SYS_clone, 6),
        load(low(0)),
        equal(thread, 0, 3),
        load(high(0)),
        equal(0, 0, 1),
        answer(ALLOW),
        answer(KILL),
        call(libc::SYS_exit, 1),
        answer(ALLOW),
        call(libc::SYS_exit_group, 1),
        answer(ALLOW),
        call(libc::SYS_clock_gettime, 1),
        answer(ALLOW),
        // Restarts a wait after a stop or the freezer.
        call(libc::SYS_restart_syscall, 1),
        answer(ALLOW),
        call(libc::SYS_sched_yield, 1),
        answer(ALLOW),
        answer(KILL),
    ]
}
static FILTER: [Step; LENGTH as usize] = filter(THREAD);
static COUNTING_FILTER: [Step; LENGTH as usize] = filter(COUNTED_THREAD);

/// Installs the filter in this thread, which has PR_SET_NO_NEW_PRIVS; `counting`: for
/// [`COUNTED_THREAD`]s.
pub(super) fn install(counting: bool) -> bool {
    let filter = if counting { &COUNTING_FILTER } else { &FILTER };
    let program = libc::sock_fprog {
        len: LENGTH,
        filter: filter.as_ptr().cast_mut(),
    };
    let arguments = [
        libc::PR_SET_SECCOMP.cast_unsigned() as usize,
        libc::SECCOMP_MODE_FILTER as usize,
        (&raw const program).expose_provenance(),
        0,
        0,
        0,
    ];
    // SAFETY: the kernel copies and verifies the program.
    unsafe { raw::call(libc::SYS_prctl, arguments) == 0 }
}
