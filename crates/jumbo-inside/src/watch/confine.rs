//! Confinement of the process beside the program: [`confine`].
//!
//! The process runs code in memory that the program can write, with the user and the permitted
//! capabilities that the program had when it made the process. The program may drop these unseen, by
//! a bare system call, and be taken over then. So the process gives up all calls by which it could use
//! them: it keeps open the files that it reads ([`sys::keep`]), and a seccomp filter refuses all
//! other files, processes, identities and descriptors. What is left acts on the shared memory, which the
//! program reaches itself, and on the process alone.
//!
//! A refused call fails with EPERM: a mechanism acts as on a kernel without it. The permitted
//! capabilities stay, without use: otherwise a process of the same user that has none could attach by
//! ptrace(2), and reach the program's memory.
#![expect(unsafe_code, reason = "hands the filter to the kernel")]

use crate::bpf::{
    ALLOW, ARCHITECTURE, AT_ARCHITECTURE, AT_NUMBER, Step, answer, call, equal, greater, has, high,
    load, low, number,
};
use crate::headroom;
use jumbo_sys as sys;

/// Files that the jobs read, beside those that [`headroom::read_all`] and the comparison read.
const FILES: [&core::ffi::CStr; 8] = [
    c"/proc/loadavg",
    c"/proc/thread-self/schedstat",
    c"/sys/devices/system/cpu/online",
    c"/proc/self/maps",
    c"/proc/self/pagemap",
    c"/proc/self/statm",
    c"/proc/self/status",
    c"/proc/locks",
];

/// Calls that the filter allows with any arguments.
const PLAIN: [libc::c_long; 25] = [
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_lseek,
    libc::SYS_close,
    // Where a filter refuses process_vm_readv(2), memory is read through a pipe.
    libc::SYS_pipe2,
    libc::SYS_write,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getppid,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_mincore,
    libc::SYS_munmap,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
];
const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned();
/// Advice above is for tests of broken memory, with CAP_SYS_ADMIN: MADV_HWPOISON.
const MAX_ADVICE: u32 = 99;

/// Test of the word at an offset of `struct seccomp_data`.
#[derive(Clone, Copy)]
enum Test {
    Is(u32),
    AtMost(u32),
    Has(u32),
    HasNot(u32),
}

struct Filter {
    steps: [Step; 160],
    length: usize,
}

impl Filter {
    fn push(&mut self, step: Step) {
        if let Some(place) = self.steps.get_mut(self.length) {
            *place = step;
        }
        self.length += 1;
    }

    /// Allows a call whose arguments pass all tests.
    fn allow(&mut self, number: libc::c_long, tests: &[(u32, Test)]) {
        let skip = |left: usize| u8::try_from(2 * left + 1).unwrap_or(u8::MAX);
        self.push(load(AT_NUMBER));
        self.push(call(number, skip(tests.len())));
        for (at, (offset, test)) in tests.iter().enumerate() {
            let skip = skip(tests.len() - 1 - at);
            self.push(load(*offset));
            self.push(match *test {
                Test::Is(value) => equal(value, 0, skip),
                Test::AtMost(value) => greater(value, skip, 0),
                Test::Has(bits) => has(bits, 0, skip),
                Test::HasNot(bits) => has(bits, skip, 0),
            });
        }
        self.push(answer(ALLOW));
    }

    /// Returns the filter of the process with that ID.
    fn of(process: i32) -> Self {
        let mut filter = Self {
            steps: [answer(REFUSE); 160],
            length: 0,
        };
        filter.push(load(AT_ARCHITECTURE));
        filter.push(equal(ARCHITECTURE, 1, 0));
        filter.push(answer(REFUSE));
        PLAIN.into_iter().for_each(|call| filter.allow(call, &[]));
        let is_own = |argument| (low(argument), Test::Is(0));
        let null = |argument| [(low(argument), Test::Is(0)), (high(argument), Test::Is(0))];
        let [pointer, rest] = null(2);
        filter.allow(libc::SYS_prlimit64, &[is_own(0), pointer, rest]);
        filter.allow(libc::SYS_sched_setaffinity, &[is_own(0)]);
        filter.allow(libc::SYS_brk, &null(0));
        let option = Test::Is(number(libc::PR_GET_THP_DISABLE));
        filter.allow(libc::SYS_prctl, &[(low(0), option)]);
        filter.allow(libc::SYS_madvise, &[(low(2), Test::AtMost(MAX_ADVICE))]);
        let own = (low(0), Test::Is(number(process)));
        filter.allow(libc::SYS_process_vm_readv, &[own]);
        for request in sys::REQUESTS {
            filter.allow(libc::SYS_ioctl, &[(low(1), Test::Is(request))]);
        }
        let is_data = (low(2), Test::HasNot(number(libc::PROT_EXEC)));
        let is_anonymous = (low(3), Test::Has(number(libc::MAP_ANONYMOUS)));
        filter.allow(libc::SYS_mmap, &[is_data, is_anonymous]);
        filter.push(answer(REFUSE));
        filter
    }

    /// Reports whether the kernel has filters, and no filter refuses the call: SECCOMP_GET_ACTION_AVAIL
    /// of seccomp(2), Linux 4.14.
    fn is_available() -> bool {
        let action = libc::SECCOMP_RET_ERRNO;
        let action = (&raw const action).expose_provenance();
        let operation = libc::SECCOMP_GET_ACTION_AVAIL as usize;
        // SAFETY: the kernel reads the action.
        unsafe { sys::request(libc::SYS_seccomp, [operation, 0, action, 0, 0, 0]).is_ok() }
    }

    /// Installs the filter in this thread; false if the kernel refuses.
    fn install(&self) -> bool {
        /// SECCOMP_FILTER_FLAG_SPEC_ALLOW, Linux 4.17: the filter is no reason to mitigate
        /// speculation.
        const ALLOWS_SPECULATION: usize = 1 << 2;
        let filter = self.steps.get(..self.length).unwrap_or_default();
        let program = libc::sock_fprog {
            len: u16::try_from(filter.len()).unwrap_or(0),
            filter: filter.as_ptr().cast_mut(),
        };
        let program = (&raw const program).expose_provenance();
        let mode = libc::SECCOMP_SET_MODE_FILTER as usize;
        let arguments = [mode, ALLOWS_SPECULATION, program, 0, 0, 0];
        // SAFETY: the kernel copies and verifies the program.
        unsafe { sys::request(libc::SYS_seccomp, arguments).is_ok() }
    }
}

/// Confines the calling process, which keeps the files that it opens; those beyond RLIMIT_NOFILE count as
/// unreadable, and so as no room. Without filters (seccomp(2), Linux 4.17, CONFIG_SECCOMP_FILTER), or
/// where a filter refuses them, it stays as it is.
pub(super) fn confine() {
    for file in FILES {
        let _ = sys::open(file);
    }
    headroom::read_all();
    // Asked before: no_new_privs stays, and the next comparison would find it.
    let is_confined = Filter::is_available()
        && rustix::thread::set_no_new_privs(true).is_ok()
        && Filter::of(sys::process()).install();
    match is_confined {
        true => sys::shut(),
        false => {
            sys::forget();
            let _ = sys::leave_descriptors();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bpf::{Call, passes};

    #[test]
    fn the_filter_allows_what_the_jobs_need_and_nothing_else() {
        let filter = Filter::of(77);
        let steps = &filter.steps[..filter.length];
        let passes = |number, arguments| passes(steps, &Call::new(number, 1, arguments));
        let (anonymous, file) = (libc::MAP_ANONYMOUS as usize, libc::MAP_PRIVATE as usize);
        let exec = libc::PROT_EXEC as usize;
        for (number, arguments, is_allowed) in [
            (libc::SYS_read, [9; 6], true),
            (libc::SYS_exit_group, [9; 6], true),
            (libc::SYS_openat, [0; 6], false),
            (libc::SYS_capset, [0; 6], false),
            (libc::SYS_newfstatat, [0; 6], false),
            (
                libc::SYS_madvise,
                [9, 9, libc::MADV_COLLAPSE as usize, 0, 0, 0],
                true,
            ),
            (
                libc::SYS_madvise,
                [9, 9, libc::MADV_HWPOISON as usize, 0, 0, 0],
                false,
            ),
            (libc::SYS_process_vm_readv, [77, 0, 0, 0, 0, 0], true),
            (libc::SYS_process_vm_readv, [1, 0, 0, 0, 0, 0], false),
            (libc::SYS_mmap, [0, 9, 3, anonymous, 0, 0], true),
            (libc::SYS_mmap, [0, 9, 3, file, 0, 0], false),
            (libc::SYS_mmap, [0, 9, exec, anonymous, 0, 0], false),
            (libc::SYS_prlimit64, [0, 7, 0, 9, 0, 0], true),
            (libc::SYS_prlimit64, [0, 7, 9, 9, 0, 0], false),
            (libc::SYS_prlimit64, [0, 7, 1 << 32, 9, 0, 0], false),
            (libc::SYS_prlimit64, [1, 7, 0, 9, 0, 0], false),
            (libc::SYS_sched_setaffinity, [1; 6], false),
            (libc::SYS_ioctl, [0; 6], false),
            (
                libc::SYS_ioctl,
                [0, sys::REQUESTS[1] as usize, 0, 0, 0, 0],
                true,
            ),
            (0x4000_0000, [0; 6], false),
        ] {
            assert_eq!(
                passes(number, arguments),
                is_allowed,
                "{number} {arguments:?}"
            );
        }
        // The end of another rule is no end of the filter.
        assert_eq!(steps.len(), filter.length);
    }
}
