//! `jumbo cdi`: a specification of the Container Device Interface, with which engines run the
//! programs of unchanged images on huge pages.
//!
//! - [`specification`]: the file for engines. [`files`]: the mounted files. [`show`] prints both.
//!   [`engines`] counts the containers that have a device.
//!
//! CDI replaces variables, and images have an LD_PRELOAD of their own. So the library is named in
//! /etc/ld.so.preload instead, which is mounted into the container.

mod engines;
mod files;
mod show;
mod specification;

use std::cmp::Reverse;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use jumbo::units::counted;
use jumbo_host::status::Library;
use rustix::fs::{FlockOperation, Mode, flock};
use rustix::process::umask;

use crate::view::{self, View};
use files::Files;
use specification::Specification;

/// Huge pages for programs in containers of unchanged images
///
/// Writes a specification of the Container Device Interface (CDI) with one device for each profile
/// of `jumbo run`. With `--device jumbo.dev/memory=default` an engine mounts jumbo's
/// library into the container and names it in /etc/ld.so.preload. The image and its LD_PRELOAD stay
/// as they are.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sudo jumbo cdi generate
  podman run --device jumbo.dev/memory=default IMAGE
  docker run --device jumbo.dev/memory=node IMAGE      # Docker 28.2
  jumbo cdi show
  sudo jumbo cdi remove --keep-names")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,

    /// Folder of the specification, jumbo.json
    #[arg(long, global = true, value_name = "DIR", default_value = DEFAULT_DIR)]
    dir: PathBuf,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Generate(GenerateArgs),
    /// Show the devices, their variables, and missing files
    Show {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove all that `generate` created
    ///
    /// Containers that run keep their memory. Programs that start in them later run without jumbo.
    /// A container that was made with a device cannot start again without its name.
    Remove(RemoveArgs),
}

#[derive(Debug, clap::Args)]
struct RemoveArgs {
    /// Leave the names of the devices, without any effect, for containers that
    /// were made with one and start again. See docs/containers.md
    #[arg(long)]
    keep_names: bool,

    /// Remove the names although podman or docker has containers with them
    #[arg(long, conflicts_with = "keep_names")]
    force: bool,
}

/// Write the specification, and the files that it mounts
///
/// The library is a separate copy, so that no update of jumbo removes it from a container. Copies
/// of earlier versions stay until `remove`, for running containers.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sudo jumbo cdi generate
  jumbo cdi generate --dry-run | jq .devices
  sudo jumbo cdi generate --preload /usr/lib/libfaketime.so.1")]
struct GenerateArgs {
    /// Copy the library into DIR [default: /usr/lib/jumbo/cdi; with --dir: jumbo-cdi beside it]
    #[arg(long, value_name = "DIR")]
    library: Option<PathBuf>,

    /// A library of the images that their own /etc/ld.so.preload names; may be repeated
    ///
    /// The mounted file hides an image's own. It names LIB too, before jumbo's library.
    #[arg(long, value_name = "LIB", value_parser = preload)]
    preload: Vec<String>,

    /// Print the specification and write nothing
    #[arg(long)]
    dry_run: bool,
}

/// Folder that all engines read.
const DEFAULT_DIR: &str = "/etc/cdi";

fn preload(typed: &str) -> Result<String, String> {
    let is_name = !typed.is_empty() && !typed.contains([' ', '\t', '\n', ':', '#']);
    is_name.then(|| typed.to_owned()).ok_or_else(|| {
        String::from("the loader separates names at colons and blanks, and takes # for a comment")
    })
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let dir = std::path::absolute(&args.dir).context("cannot tell where --dir is")?;
    match &args.command {
        Command::Generate(args) => generate(&dir, args),
        Command::Show { json } => show::main(&dir, *json),
        Command::Remove(args) => remove(&dir, args),
    }
}

fn generate(dir: &Path, args: &GenerateArgs) -> anyhow::Result<ExitCode> {
    let library = match &args.library {
        Some(library) => std::path::absolute(library).context("cannot tell where --library is")?,
        None if dir == Path::new(DEFAULT_DIR) => PathBuf::from("/usr/lib/jumbo/cdi"),
        None => dir.with_file_name("jumbo-cdi"),
    };
    let files = Files::of_this_version(library);
    let new = Specification::new(&files)?;
    if args.dry_run {
        view::json(&new)?;
        return Ok(ExitCode::SUCCESS);
    }
    // Users of rootless engines and of containers read it.
    umask(Mode::from_raw_mode(0o022));
    let path = dir.join(specification::FILE_NAME);
    let old = Specification::read(&path)?;
    if let Some(old) = old.as_ref().and_then(Specification::files)
        && old.base() != files.base()
    {
        return Err(anyhow!(
            "{} mounts files in {}, and not in {}\nhint: jumbo cdi remove, and then generate",
            path.display(),
            old.base().display(),
            files.base().display()
        ));
    }
    let is_new = old.as_ref() != Some(&new);
    let failed = |path: &Path| format!("cannot write {}", path.display());
    let hint = |error: anyhow::Error| {
        anyhow!(
            "{}\nhint: as root; or --dir and --library name other folders",
            view::in_words(&error)
        )
    };
    // Before anything is written.
    trusted(&files.record()).map_err(hint)?;
    trusted(&path).map_err(hint)?;
    let missing = files.missing(dir);
    let made = fs::create_dir_all(files.base()).with_context(|| failed(files.base()));
    made.map_err(hint)?;
    let _lock = lock(files.base())?;
    let known = files.recorded().with_context(|| failed(&files.record()))?;
    let write = || -> anyhow::Result<bool> {
        let prepared = files.prepare(dir, &missing);
        prepared.with_context(|| failed(files.base()))?;
        let written = files.write(&args.preload);
        let has_changed = written.with_context(|| failed(&files.folder()))?;
        if is_new {
            new.write(&path).with_context(|| failed(&path))?;
        }
        Ok(has_changed)
    };
    let written = write();
    if let (Err(_), None, None) = (&written, known, old) {
        // Only a specification leads to the files, and there is none.
        let _ = files.remove().map(remove_folders);
    }
    let has_changed = written.map_err(hint)?;
    let mut view = View::default();
    let what = if is_new { "written" } else { "as it was" };
    view.line(format!("{}: {what}", path.display()));
    if has_changed {
        let preload = files.preload();
        let preload = preload.display();
        view.line(format!("{preload}: changed, in containers that run too"));
    }
    let devices = new.devices.iter();
    view.lines(devices.map(|device| format!("  --device {}", device.full_name())));
    view.print()?;
    Ok(ExitCode::SUCCESS)
}

fn remove(dir: &Path, args: &RemoveArgs) -> anyhow::Result<ExitCode> {
    let path = dir.join(specification::FILE_NAME);
    let Some(mut specification) = Specification::read(&path)? else {
        let path = path.display();
        view::tell(&format!("there is no {path}: nothing to remove"));
        return Ok(ExitCode::SUCCESS);
    };
    let users = match args.keep_names || args.force {
        true => Vec::new(),
        false => engines::made_with_devices(),
    };
    if let Some((engine, count)) = users.first() {
        return Err(anyhow!(
            "{engine} has {} with a device of {}, which could not start again\n\
             hint: --keep-names leaves the names; --force removes them",
            counted(*count as u64, "container"),
            path.display()
        ));
    }
    let failed = || format!("cannot remove {} and its files", path.display());
    trusted(&path).with_context(failed)?;
    let files = specification.files();
    if let Some(files) = &files {
        trusted(&files.record()).with_context(failed)?;
    }
    let base = files.as_ref().map(Files::base).filter(|base| base.exists());
    let lock = base.map(lock).transpose()?;
    let folders = files.as_ref().map(Files::remove);
    // Last: an interrupted `remove` can find the files again.
    let folders = folders.transpose().with_context(failed)?;
    if args.keep_names {
        specification.keep_names();
        specification.write(&path).with_context(failed)?;
    } else {
        fs::remove_file(&path).with_context(failed)?;
    }
    drop(lock);
    remove_folders(folders.unwrap_or_default());
    let mut view = View::default();
    let what = match args.keep_names {
        true => "only the names of the devices are left",
        false => "removed",
    };
    view.line(format!("{}: {what}", path.display()));
    view.print()?;
    Ok(ExitCode::SUCCESS)
}

/// Removes empty folders, the innermost first: their paths are longer.
fn remove_folders(mut folders: Vec<String>) {
    folders.sort_unstable_by_key(|folder| Reverse(folder.len()));
    for folder in folders {
        let _ = fs::remove_dir(folder);
    }
}

/// Refuses a path that another user can change: its existing part, and each link in it.
fn trusted(path: &Path) -> anyhow::Result<()> {
    let refused = |why: String| anyhow!("{} is not safe to use: {why}", path.display());
    let command = std::env::current_exe().context("cannot tell where this command is")?;
    let own = rustix::process::geteuid().as_raw();
    let mut existing = None;
    for part in path.ancestors() {
        let Ok(found) = part.symlink_metadata() else {
            continue;
        };
        existing = existing.or(Some(part));
        if found.is_symlink() && ![0, own].contains(&found.uid()) {
            let (part, uid) = (part.display(), found.uid());
            return Err(refused(format!("{part} is a link of another user ({uid})")));
        }
    }
    let existing = existing.unwrap_or(Path::new("/")).canonicalize();
    let existing = existing.map_err(|error| refused(error.to_string()))?;
    Library::trust(&existing, &command).map_err(refused)
}

/// Locks the folder against other commands, until the descriptor is closed. Any user can hold this
/// lock, so it does not wait.
fn lock(folder: &Path) -> anyhow::Result<File> {
    let shown = folder.display();
    let file = File::open(folder).with_context(|| format!("cannot open {shown}"))?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
        let why = io::Error::from(error);
        anyhow!(
            "cannot lock {shown}: {why}\nhint: another process has it locked; lslocks(8) names it"
        )
    })?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, lchown, symlink};

    use super::*;

    #[test]
    fn a_path_that_another_user_can_change_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (open, own) = (folder.path().join("open"), folder.path().join("own"));
        fs::create_dir_all(open.join("below")).unwrap();
        trusted(&open.join("below/new/file")).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        let error = trusted(&open.join("below/new/file")).unwrap_err();
        assert!(error.to_string().contains("any user may write"), "{error}");
        symlink("/usr", &own).unwrap();
        trusted(&own.join("new")).unwrap();
        // Only root may change the owner.
        if lchown(&own, Some(65534), None).is_ok() {
            let error = trusted(&own.join("new")).unwrap_err();
            assert!(
                error.to_string().contains("a link of another user"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_held_lock_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let held = lock(folder.path()).unwrap();
        let error = lock(folder.path()).unwrap_err().to_string();
        assert!(error.contains("hint: another process"), "{error}");
        drop(held);
        lock(folder.path()).unwrap();
    }
}
