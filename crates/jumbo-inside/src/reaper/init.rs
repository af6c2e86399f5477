//! Detects whether the init of this PID namespace waits for orphans: [`init_reaps_orphans`].
//!
//! Init adopts the reaper, which is a zombie until init waits for it. In a container init is often
//! the application, which waits only for its own children.

use core::sync::atomic::{AtomicBool, Ordering};

use jumbo_sys::proc;

/// Link of the first PID namespace, whose number is fixed (`PROC_PID_INIT_INO`, Linux 3.8).
const FIRST_NAMESPACE: &[u8] = b"pid:[4026531836]";

/// Kernel function in which an init sleeps that fetches signals (tini, dumb-init); it blocks no
/// signal then.
const SIGNAL_WAIT: &[u8] = b"sigtimedwait";

/// Reports whether this is the first PID namespace, or init handles SIGCHLD: it catches the signal,
/// blocks it to fetch it, or ignores it so that the kernel reaps. False if /proc hides it: another
/// user's init does not show that it fetches signals. A positive result is cached: a later change
/// of the user ID has no effect.
pub fn init_reaps_orphans() -> bool {
    static REAPS_ORPHANS: AtomicBool = AtomicBool::new(false);
    let reaps_orphans = REAPS_ORPHANS.load(Ordering::Relaxed) || detect();
    REAPS_ORPHANS.store(reaps_orphans, Ordering::Relaxed);
    reaps_orphans
}

fn detect() -> bool {
    let mut name = [0u8; 64];
    let read = rustix::fs::readlinkat_raw(rustix::fs::CWD, c"/proc/self/ns/pid", &mut name[..]);
    let is_first = read.is_ok_and(|length| name.get(..length) == Some(FIRST_NAMESPACE));
    let status = || proc::each_line(proc::open(c"/proc/1/status")?, |line| Ok(has_sigchld(line)));
    // A signal between the two reads is in neither.
    is_first || (0..3).any(|_| status().unwrap_or(false) || fetches_signals())
}

/// Reports whether init sleeps in sigtimedwait(2). On a busy CPU the scheduler may keep a process that
/// sleeps in its queue (delayed dequeue, Linux 6.12), where wchan shows no function; the number of
/// its system call makes the scheduler take it out, and may be read with more privilege only.
fn fetches_signals() -> bool {
    let mut buffer = [0u8; 256];
    let function = proc::read(c"/proc/1/wchan", &mut buffer).unwrap_or_default();
    let mut parts = function.windows(SIGNAL_WAIT.len());
    if parts.any(|part| part == SIGNAL_WAIT) {
        return true;
    }
    let call = proc::read(c"/proc/1/syscall", &mut buffer).unwrap_or_default();
    proc::number(call).map(i64::try_from) == Some(Ok(libc::SYS_rt_sigtimedwait))
}

/// Reports whether a line of /proc/PID/status is a set of blocked, ignored, caught or pending signals
/// that contains SIGCHLD. No set contains signals ignored by default.
///
/// Pending: sigtimedwait(2) unblocks what it waits for, and after the signal the process may wait for
/// a CPU, in no kernel function and with SIGCHLD in no other set. The kernel keeps a signal that is
/// ignored by default only for a process that blocks it or waits for it (`sig_ignored`,
/// kernel/signal.c).
fn has_sigchld(line: &[u8]) -> bool {
    const SIGCHLD: u64 = 1 << (libc::SIGCHLD - 1);
    let names = [
        "SigBlk:\t",
        "SigIgn:\t",
        "SigCgt:\t",
        "SigPnd:\t",
        "ShdPnd:\t",
    ];
    let set = names
        .into_iter()
        .find_map(|name| line.strip_prefix(name.as_bytes()));
    let set = set.and_then(|digits| core::str::from_utf8(digits).ok());
    set.and_then(|digits| u64::from_str_radix(digits, 16).ok())
        .is_some_and(|set| set & SIGCHLD != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sigchld_is_found_in_each_set() {
        for (line, found) in [
            ("SigCgt:\t0000000000010000", true),
            ("SigBlk:\t7be3c0fe28014a03", true),
            ("SigIgn:\t0000000000011000", true),
            ("SigCgt:\t00000000000004e8", false),
            ("SigPnd:\t0000000000010000", true),
            ("ShdPnd:\t0000000000010000", true),
            ("ShdPnd:\t0000000000000001", false),
            ("SigCgt:\t", false),
            ("", false),
        ] {
            assert_eq!(has_sigchld(line.as_bytes()), found, "{line}");
        }
    }
}
