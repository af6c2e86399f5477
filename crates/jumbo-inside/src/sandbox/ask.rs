//! Effect of an inherited filter: [`ask`].
//!
//! Reading such a filter takes privilege. Instead a child process makes all calls, each in a form
//! without effect, and may be killed for them.
//!
//! Invariant: no child is made where clone(2) itself may kill. It is harmless if the parent of this
//! process has the same filters, or if a container engine started this process.
#![expect(unsafe_code, reason = "makes every system call of this crate")]

use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

use super::{field, filters, status};
use jumbo_sys as sys;
use jumbo_sys::proc::Path;

/// Number and arguments of a system call.
type TestCall = (libc::c_long, [usize; 4]);

/// Effect of the filters on jumbo's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// No call kills, and those that move memory are allowed. Others may fail.
    Harmless,
    /// A call kills, or memory cannot be moved; advice and the other calls of a start are harmless.
    Advice,
    /// Advice kills.
    Deadly,
    /// No child could be made.
    Unknown,
}

const INVALID: usize = usize::MAX;
/// Linux 5.18; of the reaper.
const MADV_DONTNEED_LOCKED: i32 = 24;

const fn madvise(advice: i32) -> TestCall {
    (
        libc::SYS_madvise,
        [1, 0, advice.cast_unsigned() as usize, 0],
    )
}

const fn prctl(operation: i32, argument: usize) -> TestCall {
    (
        libc::SYS_prctl,
        [operation.cast_unsigned() as usize, argument, 0, 0],
    )
}

/// Calls of a start, without those of the C library's allocator; see `environment`.
const START_CALLS: &[TestCall] = &[
    madvise(libc::MADV_HUGEPAGE),
    madvise(libc::MADV_NOHUGEPAGE),
    madvise(libc::MADV_COLLAPSE),
    madvise(libc::MADV_DONTNEED),
    madvise(libc::MADV_POPULATE_WRITE),
    prctl(libc::PR_GET_THP_DISABLE, 0),
    (libc::SYS_openat, [INVALID, 0, 0, 0]),
    (libc::SYS_read, [INVALID, 0, 0, 0]),
    (libc::SYS_close, [INVALID, 0, 0, 0]),
    (libc::SYS_fcntl, [INVALID, 0, 0, 0]),
    (libc::SYS_fstat, [INVALID, 0, 0, 0]),
    (libc::SYS_newfstatat, [INVALID, 0, 0, 0]),
    (libc::SYS_mmap, [0, 0, 0, 0]),
    (libc::SYS_munmap, [1, 0, 0, 0]),
    (libc::SYS_mprotect, [1, 0, 0, 0]),
    (libc::SYS_brk, [0, 0, 0, 0]),
    (libc::SYS_getrandom, [0, 0, 0, 0]),
    (libc::SYS_prlimit64, [0, libc::RLIMIT_CORE as usize, 0, 0]),
    (libc::SYS_sched_getaffinity, [0, 0, 0, 0]),
    (libc::SYS_rt_sigaction, [0, 0, 0, 8]),
    (libc::SYS_rt_sigprocmask, [0, 0, 0, 8]),
    (libc::SYS_sysinfo, [0, 0, 0, 0]),
    (libc::SYS_getpid, [0, 0, 0, 0]),
    (libc::SYS_gettid, [0, 0, 0, 0]),
    (libc::SYS_futex, [1, libc::FUTEX_WAKE as usize, 0, 0]),
    (libc::SYS_faccessat, [INVALID, 0, 0, 0]),
    (libc::SYS_mincore, [1, 0, 0, 0]),
];

/// Calls needed to restore memory that is being moved.
const MOVE_CALLS: &[TestCall] = &[
    (libc::SYS_mremap, [1, 0, 0, 0]),
    (libc::SYS_mmap, [0, 0, 0, 0]),
    (libc::SYS_munmap, [1, 0, 0, 0]),
    (libc::SYS_mprotect, [1, 0, 0, 0]),
    madvise(libc::MADV_HUGEPAGE),
    (libc::SYS_msync, [1, 0, 0, 0]),
    (libc::SYS_mincore, [1, 0, 0, 0]),
    (libc::SYS_rt_sigprocmask, [0, 0, 0, 8]),
];

/// Other calls. A mechanism whose call fails acts as on a kernel without it.
const OTHER_CALLS: &[TestCall] = &[
    madvise(libc::MADV_WIPEONFORK),
    madvise(libc::MADV_DONTFORK),
    madvise(libc::MADV_DONTDUMP),
    madvise(libc::MADV_DODUMP),
    madvise(libc::MADV_REMOVE),
    madvise(libc::MADV_FREE),
    madvise(libc::MADV_COLD),
    madvise(libc::MADV_POPULATE_READ),
    madvise(MADV_DONTNEED_LOCKED),
    (libc::SYS_process_madvise, [INVALID, 0, 0, 0]),
    (libc::SYS_process_vm_readv, [0, 0, 0, 0]),
    (libc::SYS_userfaultfd, [INVALID, 0, 0, 0]),
    (libc::SYS_mlock, [0, 0, 0, 0]),
    (libc::SYS_munlock, [0, 0, 0, 0]),
    (libc::SYS_memfd_create, [0, 0, 0, 0]),
    (libc::SYS_ftruncate, [INVALID, 0, 0, 0]),
    (libc::SYS_fallocate, [INVALID, 0, 0, 0]),
    (libc::SYS_fchmod, [INVALID, 0, 0, 0]),
    (libc::SYS_flock, [INVALID, 0, 0, 0]),
    (libc::SYS_fstatfs, [INVALID, 0, 0, 0]),
    (libc::SYS_statx, [INVALID, 0, 0, 0]),
    (libc::SYS_readlinkat, [INVALID, 0, 0, 0]),
    (libc::SYS_getdents64, [INVALID, 0, 0, 0]),
    (libc::SYS_ioctl, [INVALID, 0, 0, 0]),
    (libc::SYS_lseek, [INVALID, 0, 0, 0]),
    (libc::SYS_write, [INVALID, 0, 0, 0]),
    (libc::SYS_pread64, [INVALID, 0, 0, 0]),
    (libc::SYS_pwrite64, [INVALID, 0, 0, 0]),
    (libc::SYS_epoll_create1, [INVALID, 0, 0, 0]),
    (libc::SYS_epoll_ctl, [INVALID, 0, 0, 0]),
    (libc::SYS_epoll_pwait, [INVALID, 0, 0, 0]),
    (libc::SYS_ppoll, [1, 1, 1, 1]),
    (libc::SYS_eventfd2, [0, INVALID, 0, 0]),
    (libc::SYS_pipe2, [0, INVALID, 0, 0]),
    (libc::SYS_close_range, [1, 0, 0, 0]),
    (libc::SYS_clock_gettime, [INVALID, 0, 0, 0]),
    (libc::SYS_nanosleep, [0, 0, 0, 0]),
    (libc::SYS_clock_nanosleep, [0, 0, 0, 0]),
    (libc::SYS_sched_yield, [0, 0, 0, 0]),
    (libc::SYS_sched_setattr, [0, 0, 0, 0]),
    (libc::SYS_sched_setaffinity, [0, 0, 0, 0]),
    (libc::SYS_sched_getscheduler, [0, 0, 0, 0]),
    (libc::SYS_getpriority, [0, 0, 0, 0]),
    (libc::SYS_setpriority, [INVALID, 0, 0, 0]),
    (libc::SYS_getuid, [0, 0, 0, 0]),
    (libc::SYS_geteuid, [0, 0, 0, 0]),
    (libc::SYS_getgid, [0, 0, 0, 0]),
    (libc::SYS_getresuid, [0, 0, 0, 0]),
    (libc::SYS_getresgid, [0, 0, 0, 0]),
    (libc::SYS_setresgid, [INVALID, INVALID, INVALID, 0]),
    (libc::SYS_getppid, [0, 0, 0, 0]),
    (libc::SYS_uname, [0, 0, 0, 0]),
    (libc::SYS_capget, [0, 0, 0, 0]),
    (libc::SYS_capset, [0, 0, 0, 0]),
    (libc::SYS_unshare, [0, 0, 0, 0]),
    (libc::SYS_setsid, [0, 0, 0, 0]),
    (libc::SYS_chdir, [0, 0, 0, 0]),
    prctl(libc::PR_SET_NAME, 0),
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1),
    prctl(libc::PR_SET_DUMPABLE, INVALID),
    prctl(libc::PR_SET_PDEATHSIG, INVALID),
    (libc::SYS_seccomp, [INVALID, 0, 0, 0]),
    (libc::SYS_landlock_restrict_self, [INVALID, 0, 0, 0]),
    (
        libc::SYS_clone,
        [libc::CLONE_SIGHAND.cast_unsigned() as usize, 0, 0, 0],
    ),
    (libc::SYS_clone3, [0, 0, 0, 0]),
    (libc::SYS_set_robust_list, [0, 0, 0, 0]),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, [0, 0, 0, 0]),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_stat, [0, 0, 0, 0]),
    (libc::SYS_tgkill, [INVALID, INVALID, 0, 0]),
    (libc::SYS_waitid, [INVALID, 0, 0, 0]),
    (libc::SYS_exit, [0, 0, 0, 0]),
];

/// Probes the filters that this process inherited; the process has at least one. `is_sure`: this
/// process makes a child anyway. `is_container`: the environment is that of a container.
pub fn ask(is_sure: bool, is_container: bool) -> Answer {
    if !is_sure && !may_clone(is_container) {
        return Answer::Unknown;
    }
    match try_calls(&[START_CALLS, MOVE_CALLS, OTHER_CALLS]) {
        Some(0) => Answer::Harmless,
        Some(MOVE_REFUSED) => Answer::Advice,
        Some(_) => match try_calls(&[START_CALLS]) {
            Some(0) => Answer::Advice,
            _ => Answer::Deadly,
        },
        None => Answer::Unknown,
    }
}

/// Reports whether clone(2) is known to be harmless.
fn may_clone(is_container: bool) -> bool {
    let mut text = [0u8; 4096];
    let Some(own) = status(c"/proc/self/status", &mut text) else {
        return false;
    };
    let (count, Some(parent)) = (filters(own), field(own, b"\nPPid:\t")) else {
        return false;
    };
    // Outside of the PID namespace: the container engine.
    if parent == 0 {
        let is_there = |path| accessat(CWD, path, Access::EXISTS, AtFlags::empty()).is_ok();
        return is_container || is_there(c"/.dockerenv") || is_there(c"/run/.containerenv");
    }
    let mut path = Path::<32>::EMPTY;
    let path = path.write(format_args!("/proc/{parent}/status"));
    let theirs = path.and_then(|path| filters(status(path, &mut text)?));
    count.is_some() && theirs == count
}

/// Exit code of a child with a refused call of [`MOVE_CALLS`].
const MOVE_REFUSED: i32 = 1;

/// Makes the calls in a child; returns its exit code, 256 for a signal, `None` without a child.
fn try_calls(calls: &[&[TestCall]]) -> Option<i32> {
    let request = |number, [a, b, c, d]: [usize; 4]| {
        // SAFETY: each call in the tables fails, or has no effect beyond the child.
        unsafe { sys::request(number, [a, b, c, d, 0, 0]) }
    };
    let blocked = sys::Blocked::all();
    // No signal at its end: the program may have a handler, or wait for any child.
    // SAFETY: a copy of this process, as by fork(2), that makes only system calls and exits.
    let child = unsafe { sys::request(libc::SYS_clone, [0; 6]) }.ok()?;
    if child == 0 {
        // Prevents a core dump, which would look like the program's.
        let limit = [0u64; 2];
        let limit = limit.as_ptr().expose_provenance();
        let _ = request(
            libc::SYS_prlimit64,
            [0, libc::RLIMIT_CORE as usize, limit, 0],
        );
        let mut code = 0;
        for table in calls {
            for (number, arguments) in *table {
                let last = *number == libc::SYS_exit;
                let is_refusal =
                    |errno| [Errno::PERM, Errno::NOSYS, Errno::ACCESS].contains(&errno);
                let status = if last { [code, 0, 0, 0] } else { *arguments };
                let answer = request(*number, status);
                if answer.is_err_and(is_refusal) && core::ptr::eq(*table, MOVE_CALLS) {
                    code = MOVE_REFUSED as usize;
                }
            }
        }
        loop {
            let _ = request(libc::SYS_exit_group, [code, 0, 0, 0]);
        }
    }
    drop(blocked);
    let mut status = 0i32;
    let place = (&raw mut status).expose_provenance();
    loop {
        match request(libc::SYS_wait4, [child, place, libc::__WALL as usize, 0]) {
            Err(Errno::INTR) => {}
            answer => {
                answer.ok()?;
                let is_exit = status & 0x7f == 0;
                return Some(if is_exit { status >> 8 & 0xff } else { 256 });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_filter_all_calls_are_harmless() {
        assert_eq!(ask(true, false), Answer::Harmless);
    }
}
