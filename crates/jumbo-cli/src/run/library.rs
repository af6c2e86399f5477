//! Which file LD_PRELOAD names: [`find`].
//!
//! The command carries a copy of its library. It uses one that was installed in [`Library::places`] only
//! if that is of the same build, since another version would misread its configuration. Else it uses
//! the copy in one of [`Library::stores`], where packages install it, and puts it down there once where
//! it is not. It has to be a file with a name: the program's children, which may outlive this process,
//! load it by that name.
//!
//! A child of 32 bits cannot load it, and its loader says so on stderr. So LD_PRELOAD names the library by
//! `$LIB`, where [`lay_out`] has been: glibc puts its own folder there (`lib/x86_64-linux-gnu`, `lib64`), and a
//! program of 32 bits finds an empty library in its own. musl takes the name as it is, and there is a folder of that name.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind::{DirectoryNotEmpty, NotFound};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use jumbo_host::policy::variables;
use jumbo_host::status::{LIBRARY, Library};
use jumbo_host::whole_file::{self, Existing};

use super::Failure;

/// The library that was built with this command.
static CARRIED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libjumbo_preload.so"));

/// An empty library of 32 bits; nothing where the C compiler could make none.
static EMPTY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/32/libjumbo_preload.so"));

/// The token that glibc replaces by the name of its folder.
const LIB: &str = "$LIB";

/// libjumbo_preload.so: where JUMBO_PRELOAD says, or where it was installed, or the copy that this
/// command carries.
pub(super) fn find() -> Result<PathBuf, Failure> {
    let library = match std::env::var_os("JUMBO_PRELOAD") {
        Some(path) => named(Path::new(&path)),
        None => installed_or_carried(),
    }?;
    let library = by_lib(&library).unwrap_or(library);
    let mut bytes = library.as_os_str().as_bytes().iter();
    if bytes.any(|byte| variables::is_preload_separator(*byte)) {
        return Err(Failure::own(format!(
            "cannot put {} into LD_PRELOAD: the loader separates at colons and blanks; \
             hint: copy it to a path without them and set JUMBO_PRELOAD to that",
            library.display()
        )));
    }
    Ok(library)
}

/// The same file by `$LIB`, where programs of 64 bits find it on this host: it may have been laid out on another.
fn by_lib(library: &Path) -> Option<PathBuf> {
    let (folder, library) = (library.parent()?, library.canonicalize().ok()?);
    let is_there = |name| {
        let path = folder.join(name).join(LIBRARY).canonicalize();
        path.is_ok_and(|path| path == library)
    };
    let own = if is_lib_for_64() { "lib" } else { "lib64" };
    (is_there(LIB) && is_there(own)).then(|| folder.join(LIB).join(LIBRARY))
}

/// True where /lib is for 64 bits. Most hosts have these in /lib64, and 32 bits in /lib; Arch has one folder by both
/// names, for 64.
fn is_lib_for_64() -> bool {
    let lib64 = Path::new("/lib64").canonicalize();
    lib64.is_ok_and(|path| path.ends_with("lib"))
}

fn named(path: &Path) -> Result<PathBuf, Failure> {
    let failed = |path: &Path, error: io::Error| {
        Failure::own(format!(
            "cannot use the library that JUMBO_PRELOAD names, {}: {error}; \
             hint: unset JUMBO_PRELOAD, or set it to the path of a {LIBRARY}",
            path.display()
        ))
    };
    let path = std::path::absolute(path).map_err(|error| failed(path, error))?;
    match fs::File::open(&path) {
        Ok(_) => Ok(path),
        Err(error) => Err(failed(&path, error)),
    }
}

fn installed_or_carried() -> Result<PathBuf, Failure> {
    let command = std::env::current_exe().map_err(|error| {
        Failure::own(format!(
            "cannot tell where this command is, and so where {LIBRARY} is: {error}; \
             hint: set JUMBO_PRELOAD to its path"
        ))
    })?;
    let mut looked = String::new();
    let mut refused = |path: &Path, why: String| {
        looked.push_str(&format!("\n  {}: {why}", path.display()));
    };
    for place in Library::places(&command) {
        match Library::check(&place, &command) {
            Ok(path) if is_own(&path).unwrap_or(false) => return Ok(path),
            Ok(_) => refused(&place, String::from("it is of another version")),
            Err(why) => refused(&place, why),
        }
    }
    for store in Library::stores(&command) {
        match carried(&store, &command, is_lib_for_64()) {
            Ok(path) => return Ok(path),
            Err(why) => refused(&store, why),
        }
    }
    Err(Failure::own(format!(
        "cannot find {LIBRARY}, nor put the copy that this command carries anywhere; looked at{looked}\n\
         hint: copy {LIBRARY} beside the command, or run `jumbo run true` once as a user who may write there, \
         or set JUMBO_PRELOAD to its path"
    )))
}

/// The copy in `folder` for containers, which is put there unless it is: for images of several distributions.
///
/// glibc's own folder is `lib` in 64-bit programs of Arch, and in 32-bit programs of the Fedora family. The former
/// are more common in images.
pub(crate) fn for_containers(folder: &Path) -> Result<(), String> {
    let command = std::env::current_exe().map_err(|error| error.to_string())?;
    carried(&folder.join(LIBRARY), &command, true).map(drop)
}

/// The copy at `store`, which is put there unless it is.
fn carried(store: &Path, command: &Path, lib_for_64: bool) -> Result<PathBuf, String> {
    let is_whole = || is_carried(store).unwrap_or(false);
    if is_whole() {
        return Library::check(store, command);
    }
    // Nothing is written where another user could change it afterwards.
    let mut folders = store.ancestors().skip(1);
    if let Some(folder) = folders.find(|folder| folder.exists()) {
        Library::check(folder, command)?;
    }
    put(store, lib_for_64).map_err(|error| format!("cannot be written: {error}"))?;
    let path = Library::check(store, command)?;
    is_whole()
        .then_some(path)
        .ok_or_else(|| String::from("another version of it is being put there"))
}

/// True if the file has the length and the first block of [`CARRIED`], in which the linker's hash of the whole is (its
/// build ID).
fn is_own(installed: &Path) -> io::Result<bool> {
    begins_as_carried(installed, BLOCK)
}

/// True if the file has the bytes of [`CARRIED`].
pub(crate) fn is_carried(store: &Path) -> io::Result<bool> {
    begins_as_carried(store, CARRIED.len())
}

const BLOCK: usize = 32 << 10;

/// Compares the length, and so many bytes. Each start does, so it reads blocks: a buffer as large as the file takes
/// longer to touch than to read.
fn begins_as_carried(path: &Path, bytes: usize) -> io::Result<bool> {
    let mut file = fs::File::open(path)?;
    if file.metadata()?.len() != CARRIED.len() as u64 {
        return Ok(false);
    }
    let mut block = [0; BLOCK];
    for expected in CARRIED[..bytes.min(CARRIED.len())].chunks(BLOCK) {
        let block = &mut block[..expected.len()];
        file.read_exact(block)?;
        if block != expected {
            return Ok(false);
        }
    }
    Ok(true)
}

/// In one step: a program that runs has the old one mapped, and another jumbo may be at it too.
fn put(store: &Path, lib_for_64: bool) -> io::Result<()> {
    if let Some(folder) = store.parent() {
        create(folder)?;
        lay_out(folder, lib_for_64)?;
    }
    let new = store.with_extension(format!("so.{}", std::process::id()));
    whole_file::write(&new, CARRIED, 0o644, Existing::Keep)?;
    fs::rename(&new, store)
}

fn create(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(folder)
}

/// The folders of 64-bit and of 32-bit programs in which loaders look for the library.
fn folders(lib_for_64: bool) -> (Vec<&'static str>, Vec<&'static str>) {
    let (mut own, mut others) = (
        vec![LIB, "lib64", MULTIARCH],
        vec!["lib32", "lib/i386-linux-gnu"],
    );
    match lib_for_64 {
        true => own.push("lib"),
        false => others.push("lib"),
    }
    (own, others)
}

/// Debian's folder for libraries of this architecture.
const MULTIARCH: &str = match cfg!(target_arch = "aarch64") {
    true => "lib/aarch64-linux-gnu",
    false => "lib/x86_64-linux-gnu",
};

/// Removes the library of `folder` and what was laid out around it. Other files stay, and their folders.
pub(crate) fn remove(folder: &Path) -> io::Result<()> {
    let (own, others) = folders(true);
    let gone = |done: io::Result<()>| match done {
        Err(error) if !matches!(error.kind(), NotFound | DirectoryNotEmpty) => Err(error),
        _ => Ok(()),
    };
    // `lib` is the last of the first list, and the others are below it.
    for name in others.into_iter().chain(own).map(|name| folder.join(name)) {
        gone(fs::remove_file(name.join(LIBRARY)))?;
        gone(fs::remove_dir(name))?;
    }
    gone(fs::remove_file(folder.join(LIBRARY)))?;
    gone(fs::remove_dir(folder))
}

/// Makes the folders in which loaders look for the library of `folder`.
fn lay_out(folder: &Path, lib_for_64: bool) -> io::Result<()> {
    let (own, others) = folders(lib_for_64);
    let keep = |made: io::Result<()>| match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    };
    for name in own {
        create(&folder.join(name))?;
        let up = Path::new(name).components().map(|_| "..");
        let target = up.collect::<PathBuf>().join(LIBRARY);
        keep(symlink(target, folder.join(name).join(LIBRARY)))?;
    }
    for name in others.into_iter().filter(|_| !EMPTY.is_empty()) {
        create(&folder.join(name))?;
        keep(whole_file::write(
            &folder.join(name).join(LIBRARY),
            EMPTY,
            0o644,
            Existing::Keep,
        ))?;
    }
    Ok(())
}

/// Write the library that programs load, as a package has it
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Write it, and the folders in which loaders look for it, into DIR
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    put(&args.dir.join(LIBRARY), is_lib_for_64())
        .with_context(|| format!("cannot write the library into {}", args.dir.display()))?;
    Ok(ExitCode::SUCCESS)
}
