//! Whether LD_PRELOAD gets into a program: [`Reach`].

use super::elf::{Executable, Machine};
use crate::units::PageSize;

/// Whether LD_PRELOAD gets into a program, or the obstacle; then the program runs untouched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// No obstacle in the file.
    Reached,
    /// Statically linked: no loader.
    Static,
    /// Go program.
    Go,
    /// Built for another machine than libjumbo_preload.so.
    Machine(Machine),
    /// Loader of another C library than glibc or musl.
    Loader(String),
    /// The loader ignores LD_PRELOAD: the reason for AT_SECURE (getauxval(3)), in words.
    Privileged(&'static str),
    /// Unreadable executable, with the reason.
    Unknown(String),
    /// An inherited seccomp filter kills the process for madvise(2).
    Filtered,
    /// The kernel's base page size is not the one that libjumbo_preload.so is built for.
    BasePage(PageSize),
    /// The user switched jumbo off (JUMBO=off).
    Off,
}

impl Reach {
    /// Returns the reach of a program. `executable` has its headers, or why they cannot be read;
    /// `own` is the machine of libjumbo_preload.so.
    pub fn of(
        executable: Result<&Executable, String>,
        own: Machine,
        privilege: Option<&'static str>,
    ) -> Self {
        let executable = match executable {
            Ok(executable) => executable,
            Err(reason) => return Self::Unknown(reason),
        };
        if executable.machine != own {
            return Self::Machine(executable.machine);
        }
        match (&executable.loader, privilege) {
            _ if executable.go => Self::Go,
            (None, _) => Self::Static,
            (Some(loader), _) if !executable.has_known_loader() => Self::Loader(loader.clone()),
            (Some(_), Some(privilege)) => Self::Privileged(privilege),
            (Some(_), None) => Self::Reached,
        }
    }

    /// Returns the reach of all programs with this base page size, if they share one.
    pub fn on_base_pages(size: PageSize) -> Option<Self> {
        (size != PageSize::SIZE_4K).then_some(Self::BasePage(size))
    }

    /// Reports whether LD_PRELOAD gets in.
    pub fn is_reached(&self) -> bool {
        *self == Self::Reached
    }

    /// Reports whether the program can be promoted from outside instead.
    pub fn is_outside(&self) -> bool {
        matches!(
            self,
            Self::Static | Self::Go | Self::Machine(_) | Self::Loader(_)
        )
    }

    /// Describes the obstacle.
    pub fn reason(&self) -> Option<String> {
        Some(match self {
            Self::Reached => return None,
            Self::Static => {
                "it is statically linked: there is no loader to read LD_PRELOAD".to_owned()
            }
            Self::Go => {
                "it is a Go program: its runtime maps memory by system calls of its own, past any library"
                    .to_owned()
            }
            Self::Machine(machine) => {
                format!("it is built for {machine}, which libjumbo_preload.so is not")
            }
            Self::Loader(loader) => format!(
                "its loader {loader} is neither glibc's nor musl's, which libjumbo_preload.so is built for"
            ),
            Self::Privileged(what) => {
                format!("{what}: the loader takes no LD_PRELOAD from who starts it")
            }
            Self::Unknown(reason) => reason.clone(),
            Self::Filtered => {
                String::from("a seccomp filter here would end it for jumbo's madvise(2) calls")
            }
            Self::BasePage(size) => format!(
                "the base pages of this kernel are of {size}, and libjumbo_preload.so needs {}",
                PageSize::SIZE_4K
            ),
            Self::Off => String::from("JUMBO=off is in the environment"),
        })
    }

    /// Reports whether LD_PRELOAD does no harm to the program: its loader takes the library or
    /// ignores it. Other loaders would complain on the program's stderr.
    pub fn tolerates_preload(&self) -> bool {
        !matches!(
            self,
            Self::Machine(_) | Self::Loader(_) | Self::Filtered | Self::BasePage(_) | Self::Off
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Machine = Machine {
        number: 62,
        bits: 64,
        little_endian: true,
    };

    fn executable(loader: Option<&str>, go: bool) -> Executable {
        Executable {
            machine: OWN,
            loader: loader.map(String::from),
            go,
        }
    }

    const GLIBC: Option<&str> = Some("/lib64/ld-linux-x86-64.so.2");

    #[test]
    fn headers_decide_reach_and_tolerance() {
        let x32 = Executable {
            machine: Machine { bits: 32, ..OWN },
            ..executable(GLIBC, true)
        };
        // Reason, and tolerance of LD_PRELOAD.
        for (executable, reason, tolerates) in [
            (executable(GLIBC, false), None, true),
            (
                executable(Some("/lib/ld-musl-x86_64.so.1"), false),
                None,
                true,
            ),
            (executable(None, false), Some("statically"), true),
            (executable(None, true), Some("Go"), true),
            (executable(GLIBC, true), Some("Go"), true),
            (
                executable(Some("/system/bin/linker64"), false),
                Some("linker64"),
                false,
            ),
            (x32, Some("x32"), false),
        ] {
            let reach = Reach::of(Ok(&executable), OWN, None);
            assert_eq!(reach.is_reached(), reason.is_none());
            let text = reach.reason().unwrap_or_default();
            assert!(text.contains(reason.unwrap_or_default()), "{text}");
            assert_eq!(reach.tolerates_preload(), tolerates, "{text}");
        }
    }

    #[test]
    fn privilege_matters_to_a_loader_only() {
        let privileged =
            |executable: &Executable| Reach::of(Ok(executable), OWN, Some("it is set-user-ID"));
        let reason = privileged(&executable(GLIBC, false)).reason();
        assert!(reason.unwrap().contains("set-user-ID"));
        let reason = privileged(&executable(None, false)).reason();
        assert!(reason.unwrap().contains("statically"));
    }

    #[test]
    fn other_base_pages_leave_the_program_untouched() {
        assert_eq!(Reach::on_base_pages(PageSize::SIZE_4K), None);
        let reach = Reach::on_base_pages(PageSize::new(16 << 10).unwrap()).unwrap();
        assert!(reach.reason().unwrap().contains("of 16K, "));
        assert!(!reach.tolerates_preload());
    }

    #[test]
    fn test_executable_has_a_known_loader() {
        let bytes = std::fs::read("/proc/self/exe").unwrap();
        let executable = Executable::read(&bytes[..]).unwrap();
        assert!(
            executable.has_known_loader() && !executable.go,
            "{executable:?}"
        );
        assert!(Reach::of(Ok(&executable), executable.machine, None).is_reached());
    }

    #[test]
    fn other_files_are_rejected() {
        for bytes in [&b"#!/bin/sh\n"[..], b"", b"\x7fELF", &[0x7f; 4096]] {
            assert!(Executable::read(bytes).is_err());
        }
    }
}
