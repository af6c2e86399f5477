//! The environment that the program gets, and its start: [`Launch`].

use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use jumbo::kernel::process::{Child, Image, Signals, SpawnError, inherited_environment};
use jumbo::kernel::{Root, thp};
use jumbo::policy::{Host, Orders, Plan, Tunable, variables};
use rustix::fs::{Access, AtFlags, CWD};

use super::args::Settings;
use super::program::{Program, start_failure};
use super::{Failure, NOT_EXECUTABLE};

/// A program ready to start.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) program: &'a Program,
    pub(super) plan: Plan,
    command: &'a [OsString],
    library: PathBuf,
}

/// A variable and its new value.
pub(super) type Change = (&'static str, Vec<u8>);

impl<'a> Launch<'a> {
    pub(super) fn prepare(
        root: &Root,
        settings: &'a Settings,
        program: &'a Program,
    ) -> Result<Self, Failure> {
        // Without sysfs nothing is known, and then asking for huge pages costs nothing.
        let folder = root.path("sys/kernel/mm");
        let thp = folder.join("transparent_hugepage").exists() || !folder.exists();
        let pmd = thp.then(|| thp::pmd_size(root)).transpose();
        let host = Host {
            pmd: pmd.map_err(|error| Failure::own(error.to_string()))?,
        };
        let tunables = std::env::var_os("GLIBC_TUNABLES").map(OsString::into_vec);
        let plan = Plan::new(settings.options, host, &program.reach, tunables.as_deref());
        Ok(Self {
            program,
            plan,
            command: &settings.command,
            library: find_library()?,
        })
    }

    /// What is set in the environment; `ledger` is where the library finds the ledger.
    pub(super) fn changes(&self, ledger: Option<&str>) -> Vec<Change> {
        let mut changes = Vec::new();
        if self.plan.preload {
            let current = std::env::var_os("LD_PRELOAD").map(OsString::into_vec);
            let library = self.library.as_os_str().as_bytes();
            if let Some(value) = variables::preload(current.as_deref(), library) {
                changes.push(("LD_PRELOAD", value));
            }
            let orders = Orders {
                ledger,
                ..self.plan.orders.clone()
            };
            changes.push((Orders::VARIABLE, orders.encode().into_bytes()));
        }
        if let Tunable::Set(value) = &self.plan.tunable {
            changes.push(("GLIBC_TUNABLES", value.clone()));
        }
        changes
    }

    /// Becomes the program; returns only where that fails.
    pub(super) fn exec(&self) -> Failure {
        match self.image(None) {
            Ok(image) => start_failure(self.name(), &image.exec()),
            Err(failure) => failure,
        }
    }

    /// Starts the program as a child. The inner error: no child can be made.
    pub(super) fn spawn(
        &self,
        ledger: Option<&str>,
        signals: &Signals,
    ) -> Result<Result<Child, SpawnError>, Failure> {
        let image = self.image(ledger)?;
        match Child::spawn(&image, signals) {
            Err(SpawnError::Exec(error)) => Err(start_failure(self.name(), &error)),
            made => Ok(made),
        }
    }

    fn name(&self) -> &OsStr {
        self.command
            .first()
            .map(OsString::as_os_str)
            .unwrap_or_default()
    }

    fn image(&self, ledger: Option<&str>) -> Result<Image, Failure> {
        let environment = merge(inherited_environment(), &self.changes(ledger));
        let arguments = self.command.iter().map(OsString::as_os_str);
        environment
            .and_then(|environment| Image::new(&self.program.path, arguments, environment))
            .map_err(|error| Failure {
                code: NOT_EXECUTABLE,
                message: format!("cannot run `{}`: {error}", self.name().display()),
            })
    }
}

/// The environment with the changes made in place; what is new comes last.
fn merge(mut environment: Vec<CString>, changes: &[Change]) -> std::io::Result<Vec<CString>> {
    for (name, value) in changes {
        let entry = CString::new([name.as_bytes(), b"=", value].concat())?;
        let is_it = |entry: &CString| {
            let rest = entry.as_bytes().strip_prefix(name.as_bytes());
            rest.is_some_and(|rest| rest.starts_with(b"="))
        };
        match environment.iter().position(is_it) {
            Some(index) => environment[index] = entry,
            None => environment.push(entry),
        }
    }
    Ok(environment)
}

/// libjumbo_preload.so: where JUMBO_PRELOAD says, or beside the command, or in a `lib` next to its `bin`.
fn find_library() -> Result<PathBuf, Failure> {
    const NAME: &str = "libjumbo_preload.so";
    let hint = "hint: build it with `cargo build --release`, or set JUMBO_PRELOAD to its path";
    let usable = |path: &Path| {
        rustix::fs::accessat(CWD, path, Access::READ_OK, AtFlags::EACCESS).map_err(|errno| {
            let path = path.display();
            Failure::own(format!("cannot use {path}: {errno}; {hint}"))
        })
    };
    let library = if let Some(path) = std::env::var_os("JUMBO_PRELOAD") {
        let path = std::path::absolute(&path)
            .map_err(|error| Failure::own(format!("cannot use JUMBO_PRELOAD: {error}; {hint}")))?;
        usable(&path)?;
        path
    } else {
        let own = std::env::current_exe()
            .map_err(|error| Failure::own(format!("cannot find {NAME}: {error}; {hint}")))?;
        let folder = own.parent().unwrap_or(Path::new("/"));
        let candidates = ["", "../lib/jumbo", "../lib"].map(|part| folder.join(part).join(NAME));
        let found = candidates.iter().find(|path| usable(path).is_ok());
        match found {
            Some(path) => path.clone(),
            None => {
                let folder = folder.display();
                return Err(Failure::own(format!(
                    "cannot find {NAME} beside {folder}/jumbo; {hint}"
                )));
            }
        }
    };
    let bytes = library.as_os_str().as_bytes();
    if bytes
        .iter()
        .any(|byte| variables::is_preload_separator(*byte))
    {
        return Err(Failure::own(format!(
            "cannot put {} into LD_PRELOAD: the loader separates at colons and blanks; \
             hint: copy it to a path without them and set JUMBO_PRELOAD to that",
            library.display()
        )));
    }
    Ok(library)
}
