//! The files that containers mount: [`Files`].
//!
//! ```text
//! BASE/folders                          folders that `generate` created, for `remove`
//! BASE/VERSION/libjumbo_preload.so      library, in folders that loaders search
//! BASE/VERSION/ld.so.preload
//! ```

use std::fs;
use std::io;
use std::io::ErrorKind::{AlreadyExists, NotFound};
use std::iter;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use jumbo_host::status::LIBRARY;
use jumbo_host::whole_file::{self, Existing};

use crate::run::library;

#[derive(Debug)]
pub(super) struct Files {
    base: PathBuf,
    version: String,
}

const RECORD_NAME: &str = "folders";
const PRELOAD_NAME: &str = "ld.so.preload";
const VERSION: &str = env!("CARGO_PKG_VERSION");

impl Files {
    /// Folder of the library in containers, as in a package.
    pub(super) const IN_CONTAINERS: &str = concat!("/usr/lib/jumbo/", env!("CARGO_PKG_VERSION"));

    pub(super) fn of_this_version(base: PathBuf) -> Self {
        let version = VERSION.to_owned();
        Self { base, version }
    }

    /// Returns the files in the folder that a specification mounts.
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
        self.folder().join(PRELOAD_NAME)
    }

    /// Reports whether the files are those of this command.
    pub(super) fn is_current(&self) -> bool {
        let library = self.folder().join(LIBRARY);
        self.version == VERSION && library::is_embedded(&library).unwrap_or(false)
    }

    pub(super) fn missing(&self, dir: &Path) -> Vec<PathBuf> {
        let all = iter::once(self.folder());
        let all = all.chain(
            dir.ancestors()
                .chain(self.base.ancestors())
                .map(Path::to_owned),
        );
        all.filter(|folder| !folder.exists()).collect()
    }

    /// Creates the folders, and records those that were `missing`.
    pub(super) fn prepare(&self, dir: &Path, missing: &[PathBuf]) -> io::Result<()> {
        let (made, folder) = (self.recorded()?, self.folder());
        let is_own = match &made {
            None => fs::read_dir(&self.base)?.next().is_none(),
            Some(made) => !folder.exists() || made.iter().any(|made| Path::new(made) == folder),
        };
        if !is_own {
            return Err(io::Error::new(AlreadyExists, "it has files of others"));
        }
        let mut made = made.unwrap_or_default();
        for folder in missing.iter().filter_map(|folder| folder.to_str()) {
            if !made.iter().any(|made| made == folder) {
                made.push(folder.to_owned());
            }
        }
        write(&self.record(), &made.join("\n"))?;
        fs::create_dir_all(dir)
    }

    /// File in which `generate` records the folders that it created.
    pub(super) fn record(&self) -> PathBuf {
        self.base.join(RECORD_NAME)
    }

    /// Reads the recorded folders; `None` without a record.
    pub(super) fn recorded(&self) -> io::Result<Option<Vec<String>>> {
        match fs::read_to_string(self.record()) {
            Err(error) if error.kind() == NotFound => Ok(None),
            read => Ok(Some(read?.lines().map(String::from).collect())),
        }
    }

    /// Writes the library and ld.so.preload.
    ///
    /// Returns whether ld.so.preload of running containers changed.
    pub(super) fn write(&self, others: &[String]) -> anyhow::Result<bool> {
        library::for_containers(&self.folder()).map_err(|why| anyhow!(why))?;
        let own = format!("{}/$LIB/{LIBRARY}", Self::IN_CONTAINERS);
        let names = others.iter().chain([&own]);
        let text: String = names.map(|name| format!("{name}\n")).collect();
        let preload = self.preload();
        match is_file(&preload) {
            true if fs::read(&preload)? == text.as_bytes() => Ok(false),
            // Containers have mounted its inode.
            true => whole_file::write_in_place(&preload, text.as_bytes(), 0o644).map(|()| true),
            false => write(&preload, &text).map(|()| false),
        }
        .map_err(Into::into)
    }

    /// Removes the files of recorded versions. Returns the folders to remove once they are empty.
    pub(super) fn remove(&self) -> io::Result<Vec<String>> {
        let Some(made) = self.recorded()? else {
            return Ok(Vec::new());
        };
        for folder in made.iter().map(Path::new) {
            // A folder that others can write stays.
            if self.has_version(folder) && super::trusted(folder).is_ok() {
                remove_version(folder)?;
            }
        }
        fs::remove_file(self.record())?;
        Ok(made)
    }

    /// Reports whether a folder belongs to a version: not `$LIB`, `lib32`, or a symbolic link.
    fn has_version(&self, folder: &Path) -> bool {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        folder.parent() == Some(&self.base)
            && name.starts_with(|c: char| c.is_ascii_digit())
            && name.contains('.')
            && folder.symlink_metadata().is_ok_and(|found| found.is_dir())
    }
}

/// Removes the files of one version.
fn remove_version(folder: &Path) -> io::Result<()> {
    let preload = folder.join(PRELOAD_NAME);
    if is_file(&preload) {
        // Running containers keep the file: emptied, it makes their programs load no library.
        whole_file::write_in_place(&preload, b"", 0o644)?;
        fs::remove_file(&preload)?;
    }
    match folder.join(LIBRARY).exists() {
        true => library::remove(folder),
        false => Ok(()),
    }
}

fn is_file(path: &Path) -> bool {
    let found = path.symlink_metadata();
    found.is_ok_and(|found| found.is_file())
}

/// Writes a file atomically, unless it already has this text.
fn write(path: &Path, text: &str) -> io::Result<()> {
    match fs::read(path) {
        Ok(old) if old == text.as_bytes() => Ok(()),
        _ => whole_file::write(path, text.as_bytes(), 0o644, Existing::Replace),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_recorded_version_folders_are_removed_and_no_link_is_followed() {
        let base = tempfile::tempdir().unwrap();
        let at = |name: &str| base.path().join(name);
        let mut recorded = Vec::new();
        for name in ["0.0.1", "0.0.2", "etc", "$LIB"] {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join(PRELOAD_NAME), "text").unwrap();
            recorded.extend(at(name).to_str().map(String::from));
        }
        // 0.0.2 is not recorded, and 0.0.3 is a link.
        recorded.remove(1);
        symlink(at("etc"), at("0.0.3")).unwrap();
        recorded.extend(at("0.0.3").to_str().map(String::from));
        let files = Files::of_this_version(base.path().to_owned());
        fs::write(files.record(), recorded.join("\n")).unwrap();
        assert_eq!(files.remove().unwrap(), recorded);
        assert!(!at("0.0.1").join(PRELOAD_NAME).exists());
        for name in ["0.0.2", "etc", "$LIB"] {
            let text = fs::read_to_string(at(name).join(PRELOAD_NAME)).unwrap();
            assert_eq!(text, "text", "{name}");
        }
    }
}
