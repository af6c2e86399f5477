//! `jumbo cdi`: a specification of the Container Device Interface, by which engines put the programs of unchanged
//! images on huge pages.
//!
//! - [`specification`]: the file for engines. [`files`]: what it mounts. [`show`] prints both.
//!
//! CDI replaces variables, and images preload libraries of their own. So LD_PRELOAD is not touched:
//! the library is in /etc/ld.so.preload, which a mount brings into the container.

mod files;
mod show;
mod specification;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use jumbo_host::whole_file::{self, Existing};
use rustix::fs::{FlockOperation, Mode, flock};
use rustix::process::umask;

use crate::view::{self, View};
use files::Files;
use specification::Specification;

/// Huge pages for programs in containers of unchanged images
///
/// Writes a specification of the Container Device Interface (CDI) with one device for each profile
/// of `jumbo run`. An engine that is told `--device jumbo.dev/memory=default` mounts jumbo's
/// library into the container and names it in /etc/ld.so.preload. The image and its LD_PRELOAD stay
/// as they are.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sudo jumbo cdi generate
  podman run --device jumbo.dev/memory=default IMAGE
  docker run --device jumbo.dev/memory=node IMAGE      # Docker 28.2
  jumbo cdi show
  sudo jumbo cdi remove")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,

    /// Folder of the specification, jumbo.json
    #[arg(long, global = true, value_name = "DIR", default_value = DIR)]
    dir: PathBuf,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Generate(GenerateArgs),
    /// Show the devices, what they set, and whether their files are there
    Show {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove all that `generate` made
    ///
    /// Containers that run keep their memory. Programs that start in them later run without jumbo.
    Remove,
}

/// Write the specification, and the files that it mounts
///
/// The library is a copy of its own, so that no update of jumbo takes it from a container. Copies of
/// earlier versions stay until `remove`, for containers that run.
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

    /// GLIBC_TUNABLES of the images, to be kept
    ///
    /// CDI replaces the variable; glibc's malloc needs jumbo's entry.
    #[arg(long, value_name = "TUNABLES")]
    tunables: Option<String>,

    /// Print the specification and write nothing
    #[arg(long)]
    dry_run: bool,
}

/// The folder that all engines read.
const DIR: &str = "/etc/cdi";

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
        Command::Remove => remove(&dir),
    }
}

fn generate(dir: &Path, args: &GenerateArgs) -> anyhow::Result<ExitCode> {
    let library = match &args.library {
        Some(library) => std::path::absolute(library).context("cannot tell where --library is")?,
        None if dir == Path::new(DIR) => PathBuf::from("/usr/lib/jumbo/cdi"),
        None => dir.with_file_name("jumbo-cdi"),
    };
    let files = Files::of_this_version(library);
    let new = Specification::new(&files, args.tunables.as_deref())?;
    if args.dry_run {
        view::json(&new)?;
        return Ok(ExitCode::SUCCESS);
    }
    // Users of rootless engines and of containers read it.
    umask(Mode::from_raw_mode(0o022));
    let path = dir.join(specification::NAME);
    let old = Specification::read(&path)?;
    let is_new = old.as_ref() != Some(&new);
    let written = write(dir, &path, &files, &args.preload, is_new.then_some(&new));
    if let (Err(_), None) = (&written, old) {
        // Nothing is left that only a specification could find again.
        let _ = files.remove().map(remove_folders);
    }
    written.map_err(|error| {
        anyhow!(
            "{}\nhint: as root; or --dir and --library name other folders",
            view::in_words(&error)
        )
    })?;
    let mut view = View::stdout();
    let what = if is_new { "written" } else { "as it was" };
    view.line(format!("{}: {what}", path.display()))?;
    view.lines(new.names().map(|name| format!("  --device {name}")))?;
    view.finish()?;
    Ok(ExitCode::SUCCESS)
}

fn write(
    dir: &Path,
    path: &Path,
    files: &Files,
    preload: &[String],
    new: Option<&Specification>,
) -> anyhow::Result<()> {
    let failed = |path: &Path| format!("cannot write {}", path.display());
    files.prepare(dir).with_context(|| failed(files.base()))?;
    let _lock = lock(dir)?;
    files
        .write(preload)
        .with_context(|| failed(&files.folder()))?;
    if let Some(new) = new {
        let text = serde_json::to_string_pretty(new)? + "\n";
        whole_file::write(path, text.as_bytes(), 0o644, Existing::Replace)
            .with_context(|| failed(path))?;
    }
    Ok(())
}

fn remove(dir: &Path) -> anyhow::Result<ExitCode> {
    let path = dir.join(specification::NAME);
    let Some(specification) = Specification::read(&path)? else {
        let path = path.display();
        view::tell(&format!("there is no {path}: nothing to remove"));
        return Ok(ExitCode::SUCCESS);
    };
    let lock = lock(dir)?;
    let failed = || format!("cannot remove {} and its files", path.display());
    let folders = specification.files().map(|files| files.remove());
    // After them, so that they are found again if this is cut short.
    let folders = folders.transpose().with_context(failed)?;
    fs::remove_file(&path).with_context(failed)?;
    drop(lock);
    remove_folders(folders.unwrap_or_default());
    let mut view = View::stdout();
    view.line(format!("{}: removed", path.display()))?;
    view.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Removes those that are empty.
fn remove_folders(folders: Vec<String>) {
    for folder in folders {
        let _ = fs::remove_dir(folder);
    }
}

/// Keeps other commands from writing there at the same time. It goes with the descriptor, and leaves no file.
fn lock(dir: &Path) -> anyhow::Result<File> {
    let folder = File::open(dir).context(format!("cannot open {}", dir.display()))?;
    flock(&folder, FlockOperation::LockExclusive).map_err(io::Error::from)?;
    Ok(folder)
}
