//! Signals: names and numbers as of kill(1), waiting, and termination by a signal.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use jumbo_host::kernel::process::{Signals, die_by};
use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;

/// Standard signals by number, from 1 (signal(7)).
const SIGNAL_NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
    "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
    "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];
/// Real-time signals of programs: glibc uses 32 and 33 itself.
const REAL_TIME: std::ops::RangeInclusive<i32> = 34..=64;

/// Waits until a descriptor is ready, the timeout ends, or a signal arrives.
pub(crate) fn poll(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match rustix::event::poll(fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Reads the next signal that would terminate this process. A job control signal stops it.
pub(crate) fn next_termination(signals: &Signals) -> Option<i32> {
    while let Ok(Some(signal)) = signals.next() {
        match signal.number {
            libc::SIGCHLD | libc::SIGCONT | libc::SIGWINCH | libc::SIGURG | libc::SIGPIPE => {}
            libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => signals.stop_by(signal.number),
            number => return Some(number),
        }
    }
    None
}

/// Terminates this process by the signal, so that a shell sees a script interrupted.
pub(crate) fn end_by(signal: i32) -> ExitCode {
    die_by(signal);
    ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX))
}

/// Number of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Number(pub(crate) i32);

impl std::str::FromStr for Number {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let upper = text.to_ascii_uppercase();
        let name = upper.strip_prefix("SIG").unwrap_or(&upper);
        let real_time = |base: &i32, offset: &str| {
            let offset = match offset {
                "" => 0,
                offset => offset.parse().ok()?,
            };
            Some(base.saturating_add(offset)).filter(|number| REAL_TIME.contains(number))
        };
        let number = if let Some(offset) = name.strip_prefix("RTMIN") {
            real_time(REAL_TIME.start(), offset)
        } else if let Some(offset) = name.strip_prefix("RTMAX") {
            real_time(REAL_TIME.end(), offset)
        } else if let Some(index) = SIGNAL_NAMES.iter().position(|known| *known == name) {
            i32::try_from(index + 1).ok()
        } else {
            name.parse().ok().filter(|number| (1..=64).contains(number))
        };
        number.map(Self).ok_or_else(|| {
            String::from("there is no such signal; TERM, SIGKILL, 15 and RTMIN+1 are some")
        })
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let index = usize::try_from(self.0 - 1).unwrap_or(usize::MAX);
        match (SIGNAL_NAMES.get(index), self.0 - REAL_TIME.start()) {
            (Some(name), _) => write!(f, "SIG{name}"),
            (None, 0) => write!(f, "SIGRTMIN"),
            (None, above @ 1..) => write!(f, "SIGRTMIN+{above}"),
            (None, _) => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_parsed() {
        for (text, number) in [
            ("TERM", libc::SIGTERM),
            ("SIGKILL", libc::SIGKILL),
            ("sigusr1", libc::SIGUSR1),
            ("sys", libc::SIGSYS),
            ("stkflt", libc::SIGSTKFLT),
            ("9", 9),
            ("64", 64),
            ("RTMIN", 34),
            ("RTMIN+1", 35),
            ("SIGRTMAX", 64),
            ("RTMAX-1", 63),
        ] {
            assert_eq!(text.parse(), Ok(Number(number)), "{text}");
        }
        for text in [
            "", "0", "65", "-1", "NONE", "RTMIN-1", "RTMAX+1", "RTMIN+31", "SIG", "1.5",
        ] {
            assert!(text.parse::<Number>().is_err(), "{text}");
        }
    }

    #[test]
    fn every_displayed_name_is_parsed_back() {
        for number in 1..=64 {
            let shown = Number(number).to_string();
            assert_eq!(shown.parse(), Ok(Number(number)), "{shown}");
        }
    }
}
