//! Identity of the preload library's file: [`Library`].
//!
//! Device and inode identify it. The name does not: any process can map a file of that name.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use object::read::elf::ElfFile64;
use object::{Endianness, Object as _, ObjectSymbol as _, ReadCache};
use rustix::fs::{Access, AtFlags, CWD, StatVfsMountFlags, accessat, statvfs};

use crate::kernel::file_id::FileId;
use crate::kernel::smaps::Mapping;
use crate::kernel::task::DELETED;
use jumbo_inside::ledger::Locator;

/// File name of the preload library.
pub const LIBRARY: &str = "libjumbo_preload.so";

/// The file of a preload library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    path: PathBuf,
    id: FileId,
}

impl Library {
    /// The library of this command: JUMBO_PRELOAD, or the first usable one of [`Library::places`]
    /// and [`Library::stores`].
    pub fn of_this_command() -> Option<&'static Self> {
        static FOUND: OnceLock<Option<Library>> = OnceLock::new();
        let find = || match std::env::var_os("JUMBO_PRELOAD") {
            Some(path) => Self::at(Path::new(&path)),
            None => {
                let own = std::env::current_exe().ok()?;
                let places = Self::places(&own).into_iter().chain(Self::stores(&own));
                let mut usable = places.filter_map(|path| Self::check(&path, &own).ok());
                usable.find_map(|path| Self::at(&path))
            }
        };
        FOUND.get_or_init(find).as_ref()
    }

    /// Paths of an installed library: beside the command, or in a `lib` next to its `bin`.
    pub fn places(command: &Path) -> [PathBuf; 3] {
        let folder = command.parent().unwrap_or(Path::new("/"));
        ["", "../lib/jumbo", "../lib"].map(|part| folder.join(part).join(LIBRARY))
    }

    /// Paths, by preference, where a command without an installed library writes its own copy: in
    /// the `lib` next to its `bin`, for all users, or in the caller's cache. A folder of the
    /// command's version keeps them apart from [`Library::places`].
    pub fn stores(command: &Path) -> Vec<PathBuf> {
        let folder = command.parent().filter(|folder| folder.ends_with("bin"));
        let beside = folder.and_then(Path::parent).map(|root| root.join("lib"));
        let variable = |name| std::env::var_os(name).map(PathBuf::from);
        let cache = variable("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let home = || variable("HOME").filter(|path| path.is_absolute());
        let cache = cache.or_else(|| Some(home()?.join(".cache")));
        let stores = beside.into_iter().chain(cache);
        let version = concat!("jumbo/", env!("CARGO_PKG_VERSION"));
        stores
            .map(|path| path.join(version).join(LIBRARY))
            .collect()
    }

    /// Returns the canonical path of the library at `path` if `command` may load it. It must be
    /// readable, executable, and trusted. Trusted users are root, the caller, and the owner of the
    /// command, which the caller runs anyway. Trusted groups are root's, the caller's, and those
    /// that can write to the command or its folder.
    ///
    /// # Errors
    /// The reason in words.
    pub fn check(path: &Path, command: &Path) -> Result<PathBuf, String> {
        let path = path.canonicalize().map_err(|error| error.to_string())?;
        accessat(CWD, &path, Access::READ_OK, AtFlags::EACCESS).map_err(|why| why.to_string())?;
        let mount = statvfs(&path).map_err(|why| why.to_string())?;
        if mount.f_flag.contains(StatVfsMountFlags::NOEXEC) {
            return Err(String::from("its file system is mounted noexec"));
        }
        Self::trust(&path, command)?;
        Ok(path)
    }

    /// Refuses a canonical path that a user or group that [`Library::check`] does not trust can
    /// write.
    ///
    /// # Errors
    /// The user or group in words.
    pub fn trust(path: &Path, command: &Path) -> Result<(), String> {
        let command_owner = fs::metadata(command).map_or(0, |of| of.uid());
        let trusted = [0, rustix::process::geteuid().as_raw(), command_owner];
        // A group that can write to the command or its folder can replace the command too: `staff`
        // in /usr/local on older Debian.
        let writer = |path: &Path| {
            let of = fs::metadata(path).ok()?;
            (of.mode() & libc::S_IWGRP != 0).then(|| of.gid())
        };
        let writers = [Some(command), command.parent()];
        let [by_file, by_folder] = writers.map(|path| path.and_then(writer).unwrap_or(0));
        let trusted_groups = [0, rustix::process::getegid().as_raw(), by_file, by_folder];
        // A user who can write to an ancestor of the command can replace the command too.
        let apart = |part: &&Path| *part == path || !command.starts_with(part);
        for part in path.ancestors().take_while(apart) {
            let found = fs::metadata(part).map_err(|error| error.to_string())?;
            let is_sticky = found.is_dir() && found.mode() & libc::S_ISVTX != 0;
            if !trusted.contains(&found.uid()) {
                return Err(format!(
                    "{} belongs to another user ({})",
                    part.display(),
                    found.uid()
                ));
            }
            if found.mode() & libc::S_IWOTH != 0 && !is_sticky {
                return Err(format!("any user may write to {}", part.display()));
            }
            let is_of_others = !trusted_groups.contains(&found.gid());
            if found.mode() & libc::S_IWGRP != 0 && is_of_others && !is_sticky {
                return Err(format!(
                    "another group ({}) may write to {}",
                    found.gid(),
                    part.display()
                ));
            }
        }
        Ok(())
    }

    /// The library at `path`; `None` where it is unreadable.
    pub fn at(path: &Path) -> Option<Self> {
        let path = path.canonicalize().ok()?;
        let id = FileId::of(File::open(&path).ok()?).ok()?;
        Some(Self { path, id })
    }

    /// Reports whether a mapping is of this file, or of a file that it replaced.
    pub(super) fn is_in(&self, mapping: &Mapping<'_>) -> bool {
        let was_here = || {
            let path = mapping.path.strip_suffix(DELETED).map(Path::new);
            self.device() == mapping.device && path == Some(&self.path)
        };
        FileId::from(mapping) == self.id || was_here()
    }

    /// Offset of the [`Locator`] from the first mapped address of this command's library.
    pub(super) fn locator() -> Option<u64> {
        static FOUND: OnceLock<Option<u64>> = OnceLock::new();
        let find = || {
            let file = ReadCache::new(File::open(&Self::of_this_command()?.path).ok()?);
            let file = ElfFile64::<Endianness, _>::parse(&file).ok()?;
            let mut symbols = file.dynamic_symbols();
            let found = symbols.find(|symbol| symbol.name() == Ok(Locator::SYMBOL))?;
            Some(found.address())
        };
        *FOUND.get_or_init(find)
    }

    /// Device of the file. Reads of other files on it do not block.
    pub(super) fn device(&self) -> (u32, u32) {
        self.id.device
    }
}

/// Reports whether a mapped file has the library's name.
pub(super) fn is_named(mapping: &Mapping<'_>) -> bool {
    let path = mapping.path.strip_suffix(DELETED).unwrap_or(mapping.path);
    path.rsplit('/').next() == Some(LIBRARY)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

    use super::*;

    #[test]
    fn a_library_that_another_user_can_write_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let folder = |name: &str, mode: u32| {
            let path = root.path().join(name);
            fs::create_dir_all(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let command = folder("bin", 0o755).join("jumbo");
        let library = folder("lib", 0o755).join(LIBRARY);
        fs::write(&command, "").unwrap();
        fs::write(&library, "").unwrap();
        let check = || Library::check(&root.path().join("bin/../lib").join(LIBRARY), &command);
        assert_eq!(check(), Ok(library.canonicalize().unwrap()));
        folder("lib", 0o777);
        assert!(check().unwrap_err().contains("any user may write to"));
        folder("lib", 0o1777);
        assert!(check().is_ok());
        fs::set_permissions(&library, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(check().unwrap_err().contains("any user may write to"));
        fs::remove_file(&library).unwrap();
        assert!(check().unwrap_err().contains("No such file"));
        let other = folder("other", 0o777).join(LIBRARY);
        fs::write(&other, "").unwrap();
        symlink(&other, &library).unwrap();
        assert!(check().unwrap_err().contains("any user may write to"));
        folder("other", 0o755);
        assert!(check().is_ok());
        // The caller's group may write, other groups may not. chown needs root.
        let shared = folder("other", 0o775);
        assert!(check().is_ok());
        if chown(&shared, None, Some(65534)).is_ok() {
            assert!(check().unwrap_err().contains("another group (65534)"));
            folder("other", 0o1775);
            assert!(check().is_ok());
            // The group can replace the command too.
            folder("other", 0o775);
            chown(folder("bin", 0o775), None, Some(65534)).unwrap();
            assert!(check().is_ok());
            folder("bin", 0o755);
        }
        folder("other", 0o755);
        if chown(&other, Some(65534), None).is_ok() {
            assert!(check().unwrap_err().contains("another user (65534)"));
            chown(&command, Some(65534), None).unwrap();
            assert!(check().is_ok());
        }
    }
}
