//! Environment and start of the program: [`Launch`].

use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use jumbo::units::PageSize;
use jumbo_host::kernel::process::{
    Child, ProgramImage, Signals, SpawnError, inherited_environment,
};
use jumbo_host::kernel::{Root, hugetlb, thp};
use jumbo_host::policy::{FreeMode, HostSupport, Orders, RunPlan, variables};
use jumbo_inside::headroom;
use jumbo_inside::sandbox::{self, Answer};

use super::args::RunSettings;
use super::library;
use super::outside::{self, Outside};
use super::program::{Program, start_failure};
use super::{Failure, NOT_EXECUTABLE};

#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) program: &'a Program,
    pub(super) plan: RunPlan,
    command: &'a [OsString],
    libs: Option<&'a str>,
    /// `None` if nothing is preloaded.
    library: Option<PathBuf>,
    pub(super) outside: Outside,
    /// Background frees were requested, and vm.overcommit_memory is 2.
    is_promise_strict: bool,
}

/// A variable and its new value.
pub(super) type Change = (&'static str, Vec<u8>);

impl<'a> Launch<'a> {
    pub(super) fn prepare(
        root: &Root,
        settings: &'a RunSettings,
        program: &'a Program,
    ) -> Result<Self, Failure> {
        let host = host(root, settings)?;
        let mut plan = RunPlan::new(
            settings.requested.clone(),
            settings.pool,
            host,
            &program.reach,
        );
        let library = match plan.preload.then(library::find).transpose() {
            // Only children of the program would load it.
            Err(_) if !program.reach.is_reached() => {
                plan.preload = false;
                None
            }
            found => found?,
        };
        if library.is_some() {
            plan.orders.launched_under = sandbox::known();
        }
        if program.filter == Answer::Harmless {
            plan.orders.filters = sandbox::inherited().unwrap_or_default();
        }
        let outside = outside::decide(settings, &program.reach, &plan.orders, plan.thp);
        Ok(Self {
            program,
            outside,
            plan,
            command: &settings.command,
            libs: settings.libs.as_deref(),
            is_promise_strict: library.is_some()
                && settings.requested.free == FreeMode::Background
                && headroom::is_promise_strict(),
            library,
        })
    }

    /// Reason why frees are not done in the background although that was requested.
    pub(super) fn why_not_later(&self) -> Option<&'static str> {
        self.is_promise_strict.then_some(
            "none is done in the background: vm.overcommit_memory is 2 (or cannot be read), and pending \
             memory would count against the commit limit",
        )
    }

    /// Changes of the environment; the library finds the ledger at `ledger`.
    pub(super) fn changes(&self, ledger: Option<&str>) -> Vec<Change> {
        let mut changes = Vec::new();
        if let Some(library) = &self.library {
            let current = inherited("LD_PRELOAD");
            let library = library.as_os_str().as_bytes();
            if let Some(value) = variables::preload(current.as_deref(), library) {
                changes.push(("LD_PRELOAD", value));
            }
            let mut orders = Orders {
                ledger,
                libs: self.libs,
                ..self.plan.orders.clone()
            };
            // Without a ledger processes cannot share an account of the pool.
            if let (None, Some(pool)) = (ledger, &mut orders.pool) {
                pool.each = true;
            }
            changes.push((Orders::VARIABLE, orders.to_string().into_bytes()));
        }
        changes
    }

    /// Variables for a program that another command starts.
    pub(super) fn variables(&self) -> Vec<Change> {
        let mut variables = Vec::new();
        let changes = self.changes(None);
        // An LD_PRELOAD that already has the library is unchanged, but is printed all the same.
        let kept = inherited("LD_PRELOAD").filter(|_| {
            self.library.is_some() && changes.iter().all(|(name, _)| *name != "LD_PRELOAD")
        });
        variables.extend(kept.map(|value| ("LD_PRELOAD", value)));
        variables.extend(changes);
        variables
    }

    /// Execs the program; returns only on failure.
    pub(super) fn exec(&self) -> Failure {
        match self.image(None) {
            Ok(image) => {
                let _beside = outside::beside_this(&self.outside);
                start_failure(self.name(), &image.exec())
            }
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

    fn image(&self, ledger: Option<&str>) -> Result<ProgramImage, Failure> {
        let environment = merge(inherited_environment(), &self.changes(ledger));
        let arguments = self.command.iter().map(OsString::as_os_str);
        environment
            .and_then(|environment| ProgramImage::new(&self.program.path, arguments, environment))
            .map_err(|error| Failure {
                code: NOT_EXECUTABLE,
                message: format!("cannot run `{}`: {error}", self.name().display()),
            })
    }
}

/// Reads the properties of the host that a start needs.
pub(super) fn host(root: &Root, settings: &RunSettings) -> Result<HostSupport, Failure> {
    // Without sysfs THP is assumed: advice without effect costs nothing.
    let folder = root.path("sys/kernel/mm");
    let thp = folder.join("transparent_hugepage").exists() || !folder.exists();
    let pmd = thp.then(|| thp::pmd_size(root)).transpose();
    let pmd = pmd.map_err(|error| Failure::own(error.to_string()))?;
    Ok(HostSupport {
        pmd,
        thp_never: pmd.is_some_and(|pmd| thp::is_never(root, pmd)),
        has_pages: (settings.pool.and_then(|pool| pool.page))
            .is_none_or(|page| has_pages(root, page)),
    })
}

/// Reports whether the kernel's pool has a free page of that size.
fn has_pages(root: &Root, page: PageSize) -> bool {
    let pools = hugetlb::pools(root).ok().flatten().unwrap_or_default();
    let mut pools = pools.iter().filter(|pool| pool.size == page);
    pools.any(|pool| pool.unused().0 > 0 || pool.may_grow_by().0 > 0)
}

/// Applies the changes to the environment, in place; new variables come last.
fn merge(mut environment: Vec<CString>, changes: &[Change]) -> std::io::Result<Vec<CString>> {
    for (name, value) in changes {
        // The loader takes the last of several entries of a variable.
        let index = environment
            .iter()
            .rposition(|entry| value_of(entry, name).is_some());
        let entry = CString::new([name.as_bytes(), b"=", value].concat())?;
        match index {
            Some(index) => environment[index] = entry,
            None => environment.push(entry),
        }
    }
    Ok(environment)
}

/// Last value of `name` in the environment; `std::env::var_os` returns the first.
fn inherited(name: &str) -> Option<Vec<u8>> {
    let environment = inherited_environment();
    let found = (environment.iter().rev()).find_map(|entry| value_of(entry, name));
    found.map(<[u8]>::to_vec)
}

fn value_of<'a>(entry: &'a CString, name: &str) -> Option<&'a [u8]> {
    entry
        .as_bytes()
        .strip_prefix(name.as_bytes())?
        .strip_prefix(b"=")
}
