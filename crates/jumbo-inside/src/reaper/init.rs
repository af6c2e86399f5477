//! Whether the init of this PID namespace waits for orphans: [`takes_notice`].
//!
//! The sibling is init's child, and a zombie from its end until init waits for it. In a container init is often
//! the application, which knows of no child but its own.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::proc;

/// The first PID namespace's: a number that the kernel never gives to another (`PROC_PID_INIT_INO`, Linux 3.8).
const FIRST: &[u8] = b"pid:[4026531836]";

/// Where init sleeps that waits for signals in a call (tini, dumb-init): for as long as it sleeps, it blocks none of them.
const FETCHES: &[u8] = b"sigtimedwait";

/// Whether this is the first PID namespace, whose init is the host's own, or init has said of SIGCHLD what it
/// does with it: it catches it, blocks it to fetch it, or ignores it so that the kernel waits. False where /proc
/// does not tell: to whom init is another user's, it does not tell that init fetches signals. Once it has told, the
/// answer stands, also for a process that has become another user since.
pub fn takes_notice() -> bool {
    static TAKES: AtomicBool = AtomicBool::new(false);
    let takes = TAKES.load(Ordering::Relaxed) || look();
    TAKES.store(takes, Ordering::Relaxed);
    takes
}

fn look() -> bool {
    let mut name = [0u8; 64];
    let read = rustix::fs::readlinkat_raw(rustix::fs::CWD, c"/proc/self/ns/pid", &mut name[..]);
    let is_first = read.is_ok_and(|length| name.get(..length) == Some(FIRST));
    let status = || proc::each_line(proc::open(c"/proc/1/status")?, |line| Ok(has_sigchld(line)));
    is_first || status().unwrap_or(false) || fetches()
}

fn fetches() -> bool {
    let mut place = [0u8; 64];
    let read = proc::open(c"/proc/1/wchan").and_then(|file| rustix::io::read(file, &mut place[..]));
    let name = read.ok().and_then(|length| place.get(..length));
    name.is_some_and(|name| name.windows(FETCHES.len()).any(|part| part == FETCHES))
}

/// Whether a line of /proc/PID/status is a set of blocked, ignored or caught signals with SIGCHLD in it. A signal that
/// is ignored by default is in none.
fn has_sigchld(line: &[u8]) -> bool {
    const SIGCHLD: u64 = 1 << (libc::SIGCHLD - 1);
    let set = [b"SigBlk:\t", b"SigIgn:\t", b"SigCgt:\t"]
        .into_iter()
        .find_map(|name| line.strip_prefix(name));
    let set = set.and_then(|digits| core::str::from_utf8(digits).ok());
    set.and_then(|digits| u64::from_str_radix(digits, 16).ok())
        .is_some_and(|set| set & SIGCHLD != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sigchld_is_found_in_the_three_sets() {
        for (line, found) in [
            ("SigCgt:\t0000000000010000", true),
            ("SigBlk:\t7be3c0fe28014a03", true),
            ("SigIgn:\t0000000000011000", true),
            ("SigCgt:\t00000000000004e8", false),
            ("SigPnd:\t0000000000010000", false),
            ("ShdPnd:\t0000000000010000", false),
            ("SigCgt:\t", false),
            ("", false),
        ] {
            assert_eq!(has_sigchld(line.as_bytes()), found, "{line}");
        }
    }
}
