//! Which file LD_PRELOAD names: [`find`].
//!
//! Packages install the library where [`Library::places`] says. `cargo install` installs the command alone, so the command carries a
//! copy, and puts it down once in one of [`Library::stores`]. It has to be a file with a name: the program's children, which may outlive
//! this process, load it by that name.

use std::fs::{self, DirBuilder};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use jumbo_host::policy::variables;
use jumbo_host::status::{LIBRARY, Library};
use jumbo_host::whole_file::{self, Existing};

use super::Failure;

/// The library that was built with this command.
static CARRIED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libjumbo_preload.so"));

/// libjumbo_preload.so: where JUMBO_PRELOAD says, or where it was installed, or the copy that this command carries.
pub(super) fn find() -> Result<PathBuf, Failure> {
    let library = match std::env::var_os("JUMBO_PRELOAD") {
        Some(path) => named(Path::new(&path)),
        None => installed_or_carried(),
    }?;
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
            Ok(path) => return Ok(path),
            Err(why) => refused(&place, why),
        }
    }
    for store in Library::stores(&command) {
        match carried(&store, &command) {
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

/// The copy at `store`, which is put there unless it is.
fn carried(store: &Path, command: &Path) -> Result<PathBuf, String> {
    let is_whole = || is_carried(store).unwrap_or(false);
    if is_whole() {
        return Library::check(store, command);
    }
    // Nothing is written where another user could change it afterwards.
    let mut folders = store.ancestors().skip(1);
    if let Some(folder) = folders.find(|folder| folder.exists()) {
        Library::check(folder, command)?;
    }
    put(store).map_err(|error| format!("cannot be written: {error}"))?;
    let path = Library::check(store, command)?;
    is_whole()
        .then_some(path)
        .ok_or_else(|| String::from("another version of it is being put there"))
}

/// True if the file has the bytes of [`CARRIED`]. Each start asks, so the file is compared in blocks: a buffer as large as
/// the file takes longer to touch than to read.
fn is_carried(store: &Path) -> io::Result<bool> {
    let mut file = fs::File::open(store)?;
    if file.metadata()?.len() != CARRIED.len() as u64 {
        return Ok(false);
    }
    let mut block = [0; 32 << 10];
    for expected in CARRIED.chunks(block.len()) {
        let block = &mut block[..expected.len()];
        file.read_exact(block)?;
        if block != expected {
            return Ok(false);
        }
    }
    Ok(true)
}

/// In one step: a program that runs has the old one mapped, and another jumbo may be at it too.
fn put(store: &Path) -> io::Result<()> {
    if let Some(folder) = store.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(folder)?;
    }
    let new = store.with_extension(format!("so.{}", std::process::id()));
    whole_file::write(&new, CARRIED, 0o644, Existing::Keep)?;
    fs::rename(&new, store)
}
