//! The files that containers mount: [`Files`].
//!
//! ```text
//! BASE/folders                          the folders that `generate` made, for `remove`
//! BASE/VERSION/libjumbo_preload.so      and the folders in which loaders look for it
//! BASE/VERSION/ld.so.preload
//! ```

use std::fs;
use std::io;
use std::io::ErrorKind::{AlreadyExists, NotFound};
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use jumbo_host::status::LIBRARY;
use jumbo_host::whole_file::{self, Existing};

use crate::run::library;

/// The files of one version.
#[derive(Debug)]
pub(super) struct Files {
    base: PathBuf,
    version: String,
}

const FOLDERS: &str = "folders";
const PRELOAD: &str = "ld.so.preload";
const VERSION: &str = env!("CARGO_PKG_VERSION");

impl Files {
    /// Where a container has the library: where a package would have put it.
    pub(super) const IN_CONTAINERS: &str = concat!("/usr/lib/jumbo/", env!("CARGO_PKG_VERSION"));

    pub(super) fn of_this_version(base: PathBuf) -> Self {
        let version = VERSION.to_owned();
        Self { base, version }
    }

    /// Those in the folder that a specification mounts.
    pub(super) fn at(folder: &Path) -> Option<Self> {
        Some(Self {
            base: folder
                .parent()
                .filter(|base| base.is_absolute())?
                .to_owned(),
            version: folder.file_name()?.to_str()?.to_owned(),
        })
    }

    pub(super) fn base(&self) -> &Path {
        &self.base
    }

    pub(super) fn version(&self) -> &str {
        &self.version
    }

    pub(super) fn folder(&self) -> PathBuf {
        self.base.join(&self.version)
    }

    pub(super) fn preload(&self) -> PathBuf {
        self.folder().join(PRELOAD)
    }

    /// True where they are of this command.
    pub(super) fn is_current(&self) -> bool {
        let library = self.folder().join(LIBRARY);
        self.version == VERSION && library::is_carried(&library).unwrap_or(false)
    }

    /// Makes the folders, and records which were not there.
    pub(super) fn prepare(&self, dir: &Path) -> io::Result<()> {
        let all = dir.ancestors().chain(self.base.ancestors());
        let missing: Vec<_> = all.filter(|folder| !folder.exists()).collect();
        let made = self.made()?;
        if made.is_none() && self.folder().exists() {
            return Err(io::Error::new(AlreadyExists, "it has files of others"));
        }
        fs::create_dir_all(&self.base)?;
        let missing = missing.iter().filter_map(|folder| folder.to_str());
        let made = made.unwrap_or_default().into_iter();
        let made: Vec<_> = made.chain(missing.map(String::from)).collect();
        write(&self.base.join(FOLDERS), &made.join("\n"))?;
        fs::create_dir_all(dir)
    }

    /// The recorded folders, the innermost first; `None` where `generate` made nothing.
    fn made(&self) -> io::Result<Option<Vec<String>>> {
        match fs::read_to_string(self.base.join(FOLDERS)) {
            Err(error) if error.kind() == NotFound => Ok(None),
            read => Ok(Some(read?.lines().map(String::from).collect())),
        }
    }

    /// Writes the library, and the names of what programs load.
    pub(super) fn write(&self, others: &[String]) -> anyhow::Result<()> {
        library::for_containers(&self.folder()).map_err(|why| anyhow!(why))?;
        let own = format!("{}/$LIB/{LIBRARY}", Self::IN_CONTAINERS);
        let names = others.iter().chain([&own]);
        let text: String = names.map(|name| format!("{name}\n")).collect();
        Ok(write(&self.preload(), &text)?)
    }

    /// Removes the files of all versions. The result: folders to remove once they are empty.
    pub(super) fn remove(&self) -> io::Result<Vec<String>> {
        let Some(made) = self.made()? else {
            return Ok(Vec::new());
        };
        for version in fs::read_dir(&self.base)? {
            dismantle(&version?.path())?;
        }
        fs::remove_file(self.base.join(FOLDERS))?;
        Ok(made)
    }
}

/// Removes the files of one version, if it has them.
fn dismantle(folder: &Path) -> io::Result<()> {
    let preload = folder.join(PRELOAD);
    if preload.exists() {
        // In containers that run, it stays: programs that start there must not look for the library.
        fs::write(&preload, "")?;
        fs::remove_file(&preload)?;
    }
    match folder.join(LIBRARY).exists() {
        true => library::remove(folder),
        false => Ok(()),
    }
}

/// Writes what is not there yet, as a whole.
fn write(path: &Path, text: &str) -> io::Result<()> {
    match fs::read(path) {
        Ok(there) if there == text.as_bytes() => Ok(()),
        _ => whole_file::write(path, text.as_bytes(), 0o644, Existing::Replace),
    }
}
