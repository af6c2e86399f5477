//! What is compared: [`End`], [`Side`], and the [`cases`] of a round.

use std::num::NonZeroU32;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use jumbo::policy::ReaperMode;
use jumbo::units::Bytes;

use crate::child::{Launch, Options};

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum End {
    /// It calls `exit(0)`.
    Exit,
    /// It calls `abort()`, and leaves no core.
    Crash,
    /// It gets SIGKILL.
    Kill,
}

/// Who gives its memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    /// The kernel, in the process's own exit.
    Plain,
    /// The same once more.
    Again,
    /// The sibling.
    Reaper,
    /// The launcher, beside the kernel.
    Supervise,
    /// `jumbo kill`, beside the kernel.
    JumboKill,
}

/// How much memory it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Size {
    /// All that was asked for.
    Full,
    /// A quarter, to see what the size is to the wait.
    Small,
}

/// One thing that is measured in each round.
pub(super) type Case = (End, Side, Size);

/// All of them, in the order in which they are first measured.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for end in [End::Exit, End::Kill, End::Crash] {
        for side in [Side::Plain, Side::Again, Side::Reaper] {
            cases.push((end, side, Size::Full));
        }
        for side in [Side::Plain, Side::Reaper] {
            cases.push((end, side, Size::Small));
        }
    }
    for side in [Side::Supervise, Side::JumboKill] {
        cases.push((End::Kill, side, Size::Full));
    }
    cases
}

impl End {
    /// The start of its rows' keys.
    pub(super) fn key(self) -> &'static str {
        match self {
            Self::Exit => "exit",
            Self::Kill => "kill",
            Self::Crash => "crash",
        }
    }

    /// Whether a process ended this way.
    pub(super) fn is(self, status: ExitStatus) -> bool {
        match self {
            Self::Exit => status.success(),
            Self::Kill => status.signal() == Some(libc::SIGKILL),
            Self::Crash => status.signal() == Some(libc::SIGABRT),
        }
    }
}

impl Side {
    /// How the process is started.
    pub(super) fn launch(self, workers: Option<NonZeroU32>) -> Launch {
        let options = Options {
            free_workers: workers.map(NonZeroU32::get),
            ..Options::NONE
        };
        match self {
            Self::Plain | Self::Again | Self::JumboKill => Launch::Plain,
            Self::Reaper => Launch::Jumbo(Options {
                reaper: Some(ReaperMode::On),
                ..options
            }),
            Self::Supervise => Launch::Jumbo(Options {
                reaper: Some(ReaperMode::Off),
                supervise: true,
                ..options
            }),
        }
    }

    /// As the table shows it.
    pub(super) fn name(self, workers: Option<NonZeroU32>) -> String {
        match self {
            Self::Again => "plain again".to_owned(),
            Self::JumboKill => "jumbo kill".to_owned(),
            _ => self.launch(workers).name().into_owned(),
        }
    }
}

impl Size {
    /// So many bytes where `full` was asked for.
    pub(super) fn of(self, full: Bytes) -> Bytes {
        match self {
            Self::Full => full,
            Self::Small => Bytes(full.0 / 4),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_case_is_measured_once_a_round_and_has_its_baseline() {
        let cases = cases();
        for (index, case) in cases.iter().enumerate() {
            assert!(!cases[..index].contains(case), "{case:?} twice");
            let (end, _, size) = *case;
            assert!(cases.contains(&(end, Side::Plain, size)), "{case:?} alone");
        }
    }

    #[test]
    fn names_are_what_is_typed() {
        let four = NonZeroU32::new(4);
        assert_eq!(Side::Reaper.name(None), "jumbo run --reaper=on");
        assert_eq!(
            Side::Supervise.name(four),
            "jumbo run --free-workers=4 --reaper=off --supervise"
        );
        assert_eq!(Side::JumboKill.launch(four), Launch::Plain);
    }

    #[test]
    fn a_process_that_ended_in_another_way_is_seen() {
        let status = ExitStatus::from_raw;
        for (end, raw) in [(End::Exit, 0), (End::Kill, 9), (End::Crash, 6)] {
            for other in [0, 9, 6, 15, 0x100] {
                assert_eq!(end.is(status(other)), raw == other, "{end:?} {other}");
            }
        }
    }
}
