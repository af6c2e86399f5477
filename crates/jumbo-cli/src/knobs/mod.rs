//! Common part of the commands that set knobs of the kernel (`pool`, `thp`, `vmemmap`).
//!
//! - [`change`] executes a change; [`undo`] restores the values before; [`boot`] prints them for a
//!   boot.
//! - [`terminal`]: signals and progress meanwhile.

pub(crate) mod boot;
pub(crate) mod change;
pub(crate) mod terminal;
pub(crate) mod undo;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::anyhow;
use jumbo_host::kernel::{FileError, Root, hugetlb};
use jumbo_host::knobs::{
    ApplyError, Form, Group, Journal, JournalError, Knob, Locked, Record, Step,
};
use jumbo_host::status::Missing;

use crate::view::{View, in_words, tell};

/// Exit status if only a part of the request was done.
pub(crate) const EXIT_PARTIAL: u8 = 3;

/// Exit status of a complete or partial result.
pub(crate) fn all_or_part(all: bool) -> ExitCode {
    ExitCode::from(if all { 0 } else { EXIT_PARTIAL })
}

/// Exit status of wrong usage.
const EXIT_USAGE: u8 = 2;

/// End of the help of such a command: `$own`, the rules of a change, and the exit statuses, with
/// `$status` among them.
macro_rules! help {
    ($own:literal) => {
        $crate::knobs::help!($own, "")
    };
    ($own:literal, $status:literal) => {
        concat!(
            $own,
            "\n\nChanges: --dry-run prints the plan and writes nothing. Old values are recorded first, each write is \
             read back, and --undo restores the values before the last change, however it ended; once more, before all \
             changes. Ctrl-C restores at once.\n\nExit status: 0 done; 3 done in part: less was obtained, or restored, than requested; \
             1 failed, nothing changed; 2 wrong usage; ",
            $status,
            "128+N signal N ended it, and the change was undone."
        )
    };
}
pub(crate) use help;

/// Options of a change.
#[derive(Debug, clap::Args)]
pub(crate) struct ChangeOptions {
    /// Print the lines that set it at boot, for sysctl.d, tmpfiles.d and the kernel command line,
    /// and change nothing
    #[arg(long, conflicts_with = "undo")]
    pub(crate) print_boot: bool,

    /// Restore the values before the last change; once more: before all changes
    #[arg(long)]
    pub(crate) undo: bool,

    #[command(flatten)]
    pub(crate) mode: Mode,
}

/// Options of such a command without a subcommand.
#[derive(Debug, clap::Args)]
#[command(mut_arg("dry_run", |dry_run| dry_run.requires("undo")))]
#[command(mut_arg("force", |force| force.requires("undo")))]
pub(crate) struct BareOptions {
    /// Restore the values before the last change; once more: before all changes
    #[arg(long)]
    pub(crate) undo: bool,

    #[command(flatten)]
    pub(crate) mode: Mode,

    /// A folder that stands in for /
    #[arg(long, global = true, hide = true, default_value = "/")]
    pub(crate) root: PathBuf,
}

/// Options of a change and of its undo.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Mode {
    /// Print the plan and write nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Restore with --undo even what another program changed since
    #[arg(long)]
    pub(crate) force: bool,

    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// Exits with 2: wrong usage that clap cannot detect.
pub(crate) fn usage(message: &str) -> ! {
    tell(message);
    std::process::exit(EXIT_USAGE.into())
}

/// Opens the journal.
pub(crate) fn journal(root: &Root) -> anyhow::Result<Journal> {
    Journal::of_user(root).ok_or_else(|| {
        anyhow!("there is no folder for the journal: XDG_RUNTIME_DIR is not set\nhint: {ROOT_HINT}")
    })
}

/// Locks `group`, and the pools of `knobs` if they are other groups, against `jumbo pool`.
pub(crate) fn lock<'a>(
    journal: &Journal,
    group: &Group,
    knobs: impl Iterator<Item = &'a Knob>,
    command: &str,
) -> anyhow::Result<(Locked, Vec<Locked>)> {
    let pools = knobs.filter(|knob| knob.form == Form::Pages);
    let sizes = pools.filter_map(|knob| Some(hugetlb::of_file(&knob.file)?.0));
    let sizes: BTreeSet<_> = sizes.collect();
    let pools = sizes.into_iter().map(Group::pool);
    let lock = |group: &Group| journal.lock(group, command).map_err(failed);
    let locked = lock(group)?;
    let others = pools.filter(|pool| pool != group);
    let others = others.map(|pool| lock(&pool)).collect::<Result<_, _>>()?;
    Ok((locked, others))
}

pub(crate) fn command_line() -> String {
    let words = std::env::args().skip(1);
    std::iter::once("jumbo".to_owned())
        .chain(words)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Exit status of a failed change: 1 if nothing is changed.
pub(crate) fn failure(error: ApplyError) -> anyhow::Result<ExitCode> {
    let leaves_changes = error.leaves_changes();
    let error = failed(error);
    if leaves_changes {
        tell(&in_words(&error));
        return Ok(ExitCode::from(EXIT_PARTIAL));
    }
    Err(error)
}

/// The error with its hint.
pub(crate) fn failed(error: impl Into<ApplyError>) -> anyhow::Error {
    let error = error.into();
    match apply_hint(&error) {
        Some(hint) => anyhow!("{error}\nhint: {hint}"),
        None => error.into(),
    }
}

const ROOT_HINT: &str = "changing the kernel's settings takes root";

fn apply_hint(error: &ApplyError) -> Option<&'static str> {
    match error {
        ApplyError::Refused(error) => file_hint(error),
        ApplyError::Failed { error, .. } => apply_hint(error),
        ApplyError::Moved { .. } => Some("nothing was changed; try again"),
        ApplyError::Changed { .. } => Some("`--force` restores the old values all the same"),
        ApplyError::Journal(error) => match error {
            JournalError::Busy { .. } => {
                Some("wait until it is done, or stop it: it undoes its change")
            }
            JournalError::File(FileError::Content { .. }) => {
                Some("remove the file to drop this record")
            }
            JournalError::File(error) => file_hint(error),
            JournalError::Unsafe { .. } => Some(
                "`--undo` writes the values in the records, so no other user may change them; remove the folder",
            ),
        },
        _ => None,
    }
}

fn file_hint(error: &FileError) -> Option<&'static str> {
    let FileError::Io { path, source, .. } = error else {
        return None;
    };
    match source.kind() {
        ErrorKind::PermissionDenied => Some(ROOT_HINT),
        ErrorKind::ReadOnlyFilesystem => {
            Some("it is read-only here, as in a container: change it on the host")
        }
        ErrorKind::NotFound => {
            Some("this kernel does not have it; `jumbo status` shows what it has")
        }
        ErrorKind::InvalidInput if path.ends_with("nr_hugepages") => Some(
            "this kernel cannot resize this pool while it runs: `hugepagesz=SIZE hugepages=N` on its \
             command line makes the pages at boot",
        ),
        ErrorKind::InvalidInput => Some("this kernel does not take that value"),
        _ => None,
    }
}

/// Shows a line for each write: knob, old value, new value, and the obtained value if it differs.
pub(crate) fn steps(view: &mut View, root: &Root, steps: &[Step]) {
    for step in steps {
        let obtained = match &step.after {
            Some(after) if *after != step.to => format!(", {after} obtained"),
            _ => String::new(),
        };
        let (knob, before, to) = (&step.knob, &step.before, &step.to);
        view.line(format!("  {knob}: {before} -> {to}{obtained}"));
        view.line(format!("    {}", root.path(&knob.file).display()));
    }
}

/// Records of groups, for `--undo`.
#[derive(serde::Serialize)]
pub(crate) struct Kept {
    /// Last change of each group, which `--undo` would restore.
    changes: Vec<Record>,
}

impl Kept {
    pub(crate) fn read(root: &Root, groups: &[Group], missing: &mut Vec<Missing>) -> Self {
        let journal = Journal::of_user(root);
        let last = |group: &Group| Some(journal.as_ref()?.last(std::slice::from_ref(group)));
        let changes = groups.iter().filter_map(last);
        let changes =
            changes.filter_map(|last| Missing::or_default(last, "the last change", missing));
        let changes = changes.collect();
        Self { changes }
    }

    pub(crate) fn show(&self, view: &mut View) {
        let change = |change: &Record| {
            let cut = match change.finished {
                true => "",
                false => ", not finished",
            };
            let (group, command, pid) = (&change.group.name, &change.command, change.pid);
            format!("{group}: `{command}` of process {pid}{cut}")
        };
        let changes = self.changes.iter().map(change);
        view.list("What --undo would put back", changes)
    }
}
