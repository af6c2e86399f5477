//! The answer of a filter that was inherited: [`ask`].
//!
//! Such a filter cannot be read: that takes privilege. So a child process makes the calls, each in a form that does
//! nothing, and may die of it. Invariant: no child is made where that itself may be the end. It is not where the parent
//! of this process, which made this process, has the same filters, and where an engine started a container with it.
#![expect(unsafe_code, reason = "makes every system call of this crate")]

use rustix::fs::{Access, CWD};
use rustix::io::Errno;

use super::{field, filters, status};
use crate::sys;

/// The effect of a filter on the calls of jumbo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It kills for none, and lets those pass that memory is moved by. Others may fail.
    Harmless,
    /// It kills for some, or lets memory not be moved, but not for advice and the other calls of a start.
    Advice,
    /// It kills for advice.
    Deadly,
    /// It cannot be asked.
    Unknown,
}

const NONE: usize = usize::MAX;

/// The calls of a start, without those of the C library's allocator; see `environment` of the preload library.
const START: &[(libc::c_long, [usize; 4])] = &[
    (libc::SYS_madvise, [1, 0, libc::MADV_HUGEPAGE as usize, 0]),
    (libc::SYS_madvise, [1, 0, libc::MADV_NOHUGEPAGE as usize, 0]),
    (libc::SYS_madvise, [1, 0, libc::MADV_COLLAPSE as usize, 0]),
    (libc::SYS_madvise, [1, 0, libc::MADV_DONTNEED as usize, 0]),
    (
        libc::SYS_madvise,
        [1, 0, libc::MADV_POPULATE_WRITE as usize, 0],
    ),
    (
        libc::SYS_prctl,
        [libc::PR_GET_THP_DISABLE as usize, 0, 0, 0],
    ),
    (libc::SYS_openat, [NONE, 0, 0, 0]),
    (libc::SYS_read, [NONE, 0, 0, 0]),
    (libc::SYS_close, [NONE, 0, 0, 0]),
    (libc::SYS_fcntl, [NONE, 0, 0, 0]),
    (libc::SYS_fstat, [NONE, 0, 0, 0]),
    (libc::SYS_newfstatat, [NONE, 0, 0, 0]),
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
    (libc::SYS_faccessat, [NONE, 0, 0, 0]),
    (libc::SYS_mincore, [1, 0, 0, 0]),
];

/// Those without which memory that is being moved could not be put back.
const MOVE: &[(libc::c_long, [usize; 4])] = &[
    (libc::SYS_mremap, [1, 0, 0, 0]),
    (libc::SYS_mmap, [0, 0, 0, 0]),
    (libc::SYS_munmap, [1, 0, 0, 0]),
    (libc::SYS_mprotect, [1, 0, 0, 0]),
    (libc::SYS_madvise, [1, 0, libc::MADV_HUGEPAGE as usize, 0]),
    (libc::SYS_msync, [1, 0, 0, 0]),
    (libc::SYS_mincore, [1, 0, 0, 0]),
    (libc::SYS_rt_sigprocmask, [0, 0, 0, 8]),
];

/// The rest: files, threads, processes and their rights. What fails of it is left by its mechanism, as under a kernel without it.
const REST: &[(libc::c_long, [usize; 4])] = &[
    (libc::SYS_madvise, [1, 0, libc::MADV_WIPEONFORK as usize, 0]),
    (libc::SYS_madvise, [1, 0, libc::MADV_DONTDUMP as usize, 0]),
    (libc::SYS_madvise, [1, 0, libc::MADV_DODUMP as usize, 0]),
    (libc::SYS_madvise, [1, 0, libc::MADV_REMOVE as usize, 0]),
    (libc::SYS_madvise, [1, 0, libc::MADV_FREE as usize, 0]),
    (libc::SYS_process_madvise, [NONE, 0, 0, 0]),
    (libc::SYS_process_vm_readv, [0, 0, 0, 0]),
    (libc::SYS_userfaultfd, [NONE, 0, 0, 0]),
    (libc::SYS_mlock, [0, 0, 0, 0]),
    (libc::SYS_munlock, [0, 0, 0, 0]),
    (libc::SYS_memfd_create, [0, 0, 0, 0]),
    (libc::SYS_ftruncate, [NONE, 0, 0, 0]),
    (libc::SYS_fallocate, [NONE, 0, 0, 0]),
    (libc::SYS_fchmod, [NONE, 0, 0, 0]),
    (libc::SYS_flock, [NONE, 0, 0, 0]),
    (libc::SYS_fstatfs, [NONE, 0, 0, 0]),
    (libc::SYS_statx, [NONE, 0, 0, 0]),
    (libc::SYS_readlinkat, [NONE, 0, 0, 0]),
    (libc::SYS_getdents64, [NONE, 0, 0, 0]),
    (libc::SYS_ioctl, [NONE, 0, 0, 0]),
    (libc::SYS_lseek, [NONE, 0, 0, 0]),
    (libc::SYS_write, [NONE, 0, 0, 0]),
    (libc::SYS_pread64, [NONE, 0, 0, 0]),
    (libc::SYS_pwrite64, [NONE, 0, 0, 0]),
    (libc::SYS_epoll_create1, [NONE, 0, 0, 0]),
    (libc::SYS_epoll_ctl, [NONE, 0, 0, 0]),
    (libc::SYS_epoll_pwait, [NONE, 0, 0, 0]),
    (libc::SYS_ppoll, [1, 1, 1, 1]),
    (libc::SYS_eventfd2, [0, NONE, 0, 0]),
    (libc::SYS_pipe2, [0, NONE, 0, 0]),
    (libc::SYS_close_range, [1, 0, 0, 0]),
    (libc::SYS_clock_gettime, [NONE, 0, 0, 0]),
    (libc::SYS_nanosleep, [0, 0, 0, 0]),
    (libc::SYS_clock_nanosleep, [0, 0, 0, 0]),
    (libc::SYS_sched_yield, [0, 0, 0, 0]),
    (libc::SYS_sched_setattr, [0, 0, 0, 0]),
    (libc::SYS_sched_setaffinity, [0, 0, 0, 0]),
    (libc::SYS_sched_getscheduler, [0, 0, 0, 0]),
    (libc::SYS_getpriority, [0, 0, 0, 0]),
    (libc::SYS_setpriority, [NONE, 0, 0, 0]),
    (libc::SYS_getuid, [0, 0, 0, 0]),
    (libc::SYS_geteuid, [0, 0, 0, 0]),
    (libc::SYS_getgid, [0, 0, 0, 0]),
    (libc::SYS_getresuid, [0, 0, 0, 0]),
    (libc::SYS_getresgid, [0, 0, 0, 0]),
    (libc::SYS_setresgid, [NONE, NONE, NONE, 0]),
    (libc::SYS_getppid, [0, 0, 0, 0]),
    (libc::SYS_capget, [0, 0, 0, 0]),
    (libc::SYS_capset, [0, 0, 0, 0]),
    (libc::SYS_unshare, [0, 0, 0, 0]),
    (libc::SYS_setsid, [0, 0, 0, 0]),
    (libc::SYS_chdir, [0, 0, 0, 0]),
    (libc::SYS_prctl, [libc::PR_SET_NAME as usize, 0, 0, 0]),
    (
        libc::SYS_prctl,
        [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0],
    ),
    (
        libc::SYS_prctl,
        [libc::PR_SET_DUMPABLE as usize, NONE, 0, 0],
    ),
    (
        libc::SYS_prctl,
        [libc::PR_SET_PDEATHSIG as usize, NONE, 0, 0],
    ),
    (libc::SYS_seccomp, [NONE, 0, 0, 0]),
    (libc::SYS_landlock_restrict_self, [NONE, 0, 0, 0]),
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
    (libc::SYS_tgkill, [NONE, NONE, 0, 0]),
    (libc::SYS_waitid, [NONE, 0, 0, 0]),
    (libc::SYS_exit, [0, 0, 0, 0]),
];

/// Asks the filters that this process inherited, of which there are some. `is_sure`: this process makes another one
/// anyway. `is_container`: its environment is that of a container.
pub fn ask(is_sure: bool, is_container: bool) -> Answer {
    if !is_sure && !may_make_processes(is_container) {
        return Answer::Unknown;
    }
    match lives(&[START, MOVE, REST]) {
        Some(0) => Answer::Harmless,
        Some(REFUSED) => Answer::Advice,
        Some(_) => match lives(&[START]) {
            Some(0) => Answer::Advice,
            _ => Answer::Deadly,
        },
        None => Answer::Unknown,
    }
}

/// Whether clone(2) is known to be harmless.
fn may_make_processes(is_container: bool) -> bool {
    let mut text = [0u8; 4096];
    let Some(own) = status(c"/proc/self/status", &mut text) else {
        return false;
    };
    let (count, parent) = (filters(own), field(own, b"\nPPid:\t"));
    // Outside of the PID namespace: the engine that made the container.
    if parent == Some(0) {
        let is_there = |path| rustix::fs::accessat(CWD, path, Access::EXISTS, empty()).is_ok();
        return is_container || is_there(c"/.dockerenv") || is_there(c"/run/.containerenv");
    }
    let mut path = [0u8; 32];
    let path = parent.and_then(|parent| name(&mut path, parent));
    let theirs = path.and_then(|path| filters(status(path, &mut text)?));
    count.is_some() && theirs == count
}

const fn empty() -> rustix::fs::AtFlags {
    rustix::fs::AtFlags::empty()
}

/// `/proc/PID/status`.
fn name(buffer: &mut [u8; 32], process: u32) -> Option<&core::ffi::CStr> {
    use core::fmt::Write as _;
    struct Line<'a>(&'a mut [u8], usize);
    impl core::fmt::Write for Line<'_> {
        fn write_str(&mut self, text: &str) -> core::fmt::Result {
            let end = self.1 + text.len();
            let to = self.0.get_mut(self.1..end).ok_or(core::fmt::Error)?;
            to.copy_from_slice(text.as_bytes());
            self.1 = end;
            Ok(())
        }
    }
    write!(Line(buffer, 0), "/proc/{process}/status\0").ok()?;
    core::ffi::CStr::from_bytes_until_nul(buffer).ok()
}

/// The exit code of a child that saw a call of [`MOVE`] refused.
const REFUSED: i32 = 1;

/// The wait status of a child that makes these calls, 0 to 255 for an exit code; `None` where there is no child.
fn lives(calls: &[&[(libc::c_long, [usize; 4])]]) -> Option<i32> {
    let request = |number, [a, b, c, d]: [usize; 4]| {
        // SAFETY: each call in the tables fails, or does nothing beyond the child.
        unsafe { sys::request(number, [a, b, c, d, 0, 0]) }
    };
    let blocked = sys::Blocked::all();
    // No signal at its end: the program may have a handler, or wait for any child.
    // SAFETY: a copy of this process, as fork(2) makes it, that only makes system calls and ends.
    let child = unsafe { sys::request(libc::SYS_clone, [0; 6]) }.ok()?;
    if child == 0 {
        // A core dump would be the program's. A signal that kills is delivered though it is blocked.
        let limit = [0u64; 2];
        let limit = limit.as_ptr().expose_provenance();
        let _ = request(
            libc::SYS_prlimit64,
            [0, libc::RLIMIT_CORE as usize, limit, 0],
        );
        let mut code = 0;
        for part in calls {
            for (number, arguments) in *part {
                let last = *number == libc::SYS_exit;
                let is_refusal =
                    |errno| [Errno::PERM, Errno::NOSYS, Errno::ACCESS].contains(&errno);
                let status = if last { [code, 0, 0, 0] } else { *arguments };
                let answer = request(*number, status);
                if answer.is_err_and(is_refusal) && core::ptr::eq(*part, MOVE) {
                    code = REFUSED as usize;
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
        let mut buffer = [0; 32];
        assert_eq!(
            name(&mut buffer, u32::MAX),
            Some(c"/proc/4294967295/status")
        );
    }
}
