//! The library for LD_PRELOAD: [`find`].
//!
//! The command contains a copy of its library. An installed library of [`Library::places`] is used
//! only if it is of the same build: another version would misread its configuration. Else the copy
//! in one of [`Library::stores`] is used, where packages install it, and written there if missing.
//! The library needs a file name: children of the program load it by name, also after this process
//! has ended.
//!
//! A 32-bit child cannot load it, and its loader would warn on stderr. So LD_PRELOAD names the
//! library by `$LIB` if [`create_folders`] was run: glibc replaces it by its own folder
//! (`lib/x86_64-linux-gnu`, `lib64`), and a 32-bit program finds an empty library in its folder.
//! musl does not expand `$LIB`, so a folder of that name exists too.

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
static EMBEDDED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libjumbo_preload.so"));

/// An empty 32-bit library; no bytes if the C compiler could not build it.
static EMPTY_32: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/32/libjumbo_preload.so"));

/// Token that glibc replaces by the name of its folder.
const LIB_TOKEN: &str = "$LIB";

/// Finds libjumbo_preload.so: the file of JUMBO_PRELOAD, an installed one, or the embedded copy.
pub(super) fn find() -> Result<PathBuf, Failure> {
    let library = match std::env::var_os("JUMBO_PRELOAD") {
        Some(path) => named(Path::new(&path)),
        None => installed_or_embedded(),
    }?;
    let library = with_lib_token(&library).unwrap_or(library);
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

/// Path of the same file through `$LIB`, if 64-bit programs of this host find it there: the folders
/// may be those of another host.
fn with_lib_token(library: &Path) -> Option<PathBuf> {
    let (folder, library) = (library.parent()?, library.canonicalize().ok()?);
    let is_there = |name| {
        let path = folder.join(name).join(LIBRARY).canonicalize();
        path.is_ok_and(|path| path == library)
    };
    let own = if is_lib_for_64() { "lib" } else { "lib64" };
    (is_there(LIB_TOKEN) && is_there(own)).then(|| folder.join(LIB_TOKEN).join(LIBRARY))
}

/// Reports whether /lib has 64-bit libraries. Most hosts have these in /lib64, and 32-bit ones in
/// /lib; on Arch both names are one folder of 64-bit libraries.
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

fn installed_or_embedded() -> Result<PathBuf, Failure> {
    let command = std::env::current_exe().map_err(|error| {
        Failure::own(format!(
            "cannot tell where this command is, and so where {LIBRARY} is: {error}; \
             hint: set JUMBO_PRELOAD to its path"
        ))
    })?;
    let mut tried = String::new();
    let mut refused = |path: &Path, why: String| {
        tried.push_str(&format!("\n  {}: {why}", path.display()));
    };
    // The first block has the linker's hash of the whole file (build ID).
    let is_same_build = |path: &Path| begins_as_embedded(path, READ_BLOCK_BYTES).unwrap_or(false);
    for place in Library::places(&command) {
        match Library::check(&place, &command) {
            Ok(path) if is_same_build(&path) => return Ok(path),
            Ok(_) => refused(&place, String::from("it is of another version")),
            Err(why) => refused(&place, why),
        }
    }
    for store in Library::stores(&command) {
        match stored(&store, &command, is_lib_for_64()) {
            Ok(path) => return Ok(path),
            Err(why) => refused(&store, why),
        }
    }
    Err(Failure::own(format!(
        "cannot find {LIBRARY}, nor put the copy that this command carries anywhere; looked at{tried}\n\
         hint: copy {LIBRARY} beside the command, or run `jumbo run true` once as a user who may write there, \
         or set JUMBO_PRELOAD to its path"
    )))
}

/// Writes the library into `folder` if it is missing, for containers of several distributions.
///
/// glibc's own folder is `lib` in 64-bit programs of Arch, and in 32-bit programs of the Fedora
/// family. The former are more common in images.
pub(crate) fn for_containers(folder: &Path) -> Result<(), String> {
    let command = std::env::current_exe().map_err(|error| error.to_string())?;
    stored(&folder.join(LIBRARY), &command, true).map(drop)
}

/// Path of the copy at `store`, which is written first if it is missing.
fn stored(store: &Path, command: &Path, lib_for_64: bool) -> Result<PathBuf, String> {
    let is_whole = || is_embedded(store).unwrap_or(false);
    if is_whole() {
        return Library::check(store, command);
    }
    // Never writes to a folder in which another user could replace the file.
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

/// Reports whether the file has the bytes of [`EMBEDDED`].
pub(crate) fn is_embedded(store: &Path) -> io::Result<bool> {
    begins_as_embedded(store, EMBEDDED.len())
}

const READ_BLOCK_BYTES: usize = 32 << 10;

/// Compares the length and the first `bytes` bytes. It runs at each start, so it reads blocks: the
/// first touch of a buffer as large as the file takes longer than the read.
fn begins_as_embedded(path: &Path, bytes: usize) -> io::Result<bool> {
    let mut file = fs::File::open(path)?;
    if file.metadata()?.len() != EMBEDDED.len() as u64 {
        return Ok(false);
    }
    let mut block = [0; READ_BLOCK_BYTES];
    for expected in EMBEDDED[..bytes.min(EMBEDDED.len())].chunks(READ_BLOCK_BYTES) {
        let block = &mut block[..expected.len()];
        file.read_exact(block)?;
        if block != expected {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes the library by a rename: running programs map the old file, and another jumbo may write
/// at the same time.
fn put(store: &Path, lib_for_64: bool) -> io::Result<()> {
    if let Some(folder) = store.parent() {
        create(folder)?;
        create_folders(folder, lib_for_64)?;
    }
    let new = store.with_extension(format!("so.{}", std::process::id()));
    whole_file::write(&new, EMBEDDED, 0o644, Existing::Keep)?;
    fs::rename(&new, store)
}

fn create(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(folder)
}

/// Folders in which the loaders of 64-bit and of 32-bit programs search the library.
fn folders(lib_for_64: bool) -> (Vec<&'static str>, Vec<&'static str>) {
    let (mut own, mut others) = (
        vec![LIB_TOKEN, "lib64", MULTIARCH],
        vec!["lib32", "lib/i386-linux-gnu"],
    );
    match lib_for_64 {
        true => own.push("lib"),
        false => others.push("lib"),
    }
    (own, others)
}

/// Debian's library folder of this architecture.
const MULTIARCH: &str = match cfg!(target_arch = "aarch64") {
    true => "lib/aarch64-linux-gnu",
    false => "lib/x86_64-linux-gnu",
};

/// Removes the library of `folder` and the folders of [`create_folders`]. Folders with other files
/// stay.
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

/// Creates the folders below `folder` in which loaders search the library.
fn create_folders(folder: &Path, lib_for_64: bool) -> io::Result<()> {
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
    for name in others.into_iter().filter(|_| !EMPTY_32.is_empty()) {
        create(&folder.join(name))?;
        keep(whole_file::write(
            &folder.join(name).join(LIBRARY),
            EMPTY_32,
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
