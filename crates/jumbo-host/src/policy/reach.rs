//! Whether LD_PRELOAD gets into a program: [`Reach`].

use super::elf::{Executable, Machine};
use crate::units::PageSize;

/// Whether LD_PRELOAD gets into a program's memory, and what stands in between: then it runs untouched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Nothing that its file shows.
    Reached,
    /// It has no loader.
    Static {
        /// The glibc linked into it acts on GLIBC_TUNABLES.
        glibc: bool,
    },
    /// It is a Go program.
    Go,
    /// It runs on something else than libjumbo_preload.so.
    Machine(Machine),
    /// Its loader is that of another C library.
    Loader(String),
    /// The loader distrusts the environment: what makes the kernel set AT_SECURE (getauxval(3)) for it, in words.
    Privileged(&'static str),
    /// Its file does not show what it is.
    Unknown(String),
    /// The seccomp filters that it inherits kill for advice.
    Filtered,
    /// The kernel's base pages have another size than the one that libjumbo_preload.so is written for.
    BasePage(PageSize),
    /// The user switched jumbo off for it (JUMBO=off).
    Off,
}

impl Reach {
    /// The reach of a program that is `executable`, or could not be read as one for a reason. `own` is
    /// what libjumbo_preload.so runs on; `is_static_glibc` is asked only where it matters.
    pub fn of(
        executable: Result<&Executable, String>,
        own: Machine,
        privilege: Option<&'static str>,
        is_static_glibc: impl FnOnce() -> bool,
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
            (None, _) => Self::Static {
                glibc: is_static_glibc(),
            },
            (Some(loader), _) if !executable.has_known_loader() => Self::Loader(loader.clone()),
            (Some(_), Some(privilege)) => Self::Privileged(privilege),
            (Some(_), None) => Self::Reached,
        }
    }

    /// The reach of every program on a kernel with base pages of that size; `None` where it depends on the program.
    pub fn on_base_pages(size: PageSize) -> Option<Self> {
        (size != PageSize::SIZE_4K).then_some(Self::BasePage(size))
    }

    /// True where nothing stands in the way.
    pub fn is_reached(&self) -> bool {
        *self == Self::Reached
    }

    /// True where its memory can be promoted from outside instead: what it is rules nothing else out.
    pub fn is_outside(&self) -> bool {
        matches!(
            self,
            Self::Static { .. } | Self::Go | Self::Machine(_) | Self::Loader(_)
        )
    }

    /// Why not.
    pub fn reason(&self) -> Option<String> {
        Some(match self {
            Self::Reached => return None,
            Self::Static { .. } => {
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

    /// True where LD_PRELOAD in the environment does no harm to the program itself: its loader takes the
    /// library or never looks. A loader of another kind would complain on the program's stderr.
    pub fn tolerates_preload(&self) -> bool {
        !matches!(
            self,
            Self::Machine(_) | Self::Loader(_) | Self::Filtered | Self::BasePage(_) | Self::Off
        )
    }

    /// True where GLIBC_TUNABLES changes nothing in a program that is to run untouched.
    pub fn tolerates_tunables(&self) -> bool {
        !matches!(
            self,
            Self::Machine(_)
                | Self::Static { glibc: true }
                | Self::Filtered
                | Self::BasePage(_)
                | Self::Off
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
    fn a_file_shows_whether_the_library_gets_in_and_what_the_environment_would_do() {
        let x32 = Executable {
            machine: Machine { bits: 32, ..OWN },
            ..executable(GLIBC, true)
        };
        // The reason, and whether LD_PRELOAD and GLIBC_TUNABLES do no harm.
        for (executable, reason, tolerates) in [
            (executable(GLIBC, false), None, (true, true)),
            (
                executable(Some("/lib/ld-musl-x86_64.so.1"), false),
                None,
                (true, true),
            ),
            // It keeps its tunables.
            (executable(None, false), Some("statically"), (true, false)),
            (executable(None, true), Some("Go"), (true, true)),
            (executable(GLIBC, true), Some("Go"), (true, true)),
            (
                executable(Some("/system/bin/linker64"), false),
                Some("linker64"),
                (false, true),
            ),
            (x32, Some("x32"), (false, false)),
        ] {
            let reach = Reach::of(Ok(&executable), OWN, None, || true);
            assert_eq!(reach.is_reached(), reason.is_none());
            let said = reach.reason().unwrap_or_default();
            assert!(said.contains(reason.unwrap_or_default()), "{said}");
            assert_eq!(
                (reach.tolerates_preload(), reach.tolerates_tunables()),
                tolerates,
                "{said}"
            );
        }
    }

    #[test]
    fn privilege_matters_to_a_loader_only() {
        let privileged = |executable: &Executable| {
            Reach::of(Ok(executable), OWN, Some("it is set-user-ID"), || false)
        };
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
        assert!(!reach.tolerates_preload() && !reach.tolerates_tunables());
    }

    #[test]
    fn this_test_is_an_executable_with_a_known_loader() {
        let bytes = std::fs::read("/proc/self/exe").unwrap();
        let executable = Executable::read(&bytes[..]).unwrap();
        assert!(
            executable.has_known_loader() && !executable.go,
            "{executable:?}"
        );
        assert!(Reach::of(Ok(&executable), executable.machine, None, || false).is_reached());
    }

    #[test]
    fn what_is_no_executable_says_so() {
        for bytes in [&b"#!/bin/sh\n"[..], b"", b"\x7fELF", &[0x7f; 4096]] {
            assert!(Executable::read(bytes).is_err());
        }
    }
}
