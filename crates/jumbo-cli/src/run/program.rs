//! The executable, and whether LD_PRELOAD reaches it: [`Program`].

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::ErrorKind::{IsADirectory, NotFound, PermissionDenied};
use std::io::{self, Read, Seek as _};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use jumbo_host::kernel::{Root, base_page};
use jumbo_host::policy::elf::{Executable, Machine};
use jumbo_host::policy::{Reach, variables};
use jumbo_inside::sandbox::{self, Answer};
use object::read::ReadCache;
use rustix::fs::{Access, AtFlags, CWD, StatVfsMountFlags, accessat};

use super::{Failure, NOT_EXECUTABLE, NOT_FOUND};

/// Maximum chain of interpreters that the kernel follows (binfmt_script(5)).
const MAX_INTERPRETERS: usize = 5;
/// Bytes of a `#!` line that the kernel reads.
const BINPRM_BUF_SIZE: usize = 256;

#[derive(Debug)]
pub(super) struct Program {
    /// The file to execute.
    pub(super) path: PathBuf,
    /// The binary that the kernel loads: the file, or the interpreter of its `#!` line.
    pub(super) binary: PathBuf,
    pub(super) reach: Reach,
    /// Reason of the program's C library against malloc's huge page tunable.
    pub(super) no_tunable: Option<&'static str>,
    /// Effect of inherited seccomp filters on jumbo's calls; harmless without filters.
    pub(super) filter: Answer,
}

impl Program {
    /// Finds `command[0]` as execvp(3) does, and examines the file. An empty command stands for a
    /// program that LD_PRELOAD reaches. `is_child`: the program will be a child of this process.
    pub(super) fn find(command: &[OsString], is_child: bool) -> Result<Self, Failure> {
        let name = command.first();
        let path = name.map_or_else(|| Ok(PathBuf::new()), |name| search(name))?;
        let host = || Reach::on_base_pages(base_page(&Root::host()));
        let none = super::is_off().then_some(Reach::Off).or_else(host);
        let mut no_tunable = None;
        let (binary, mut reach) = match none {
            Some(reach) => (path.clone(), reach),
            None if name.is_none() => {
                no_tunable = why_no_tunable_here();
                (path.clone(), Reach::Reached)
            }
            None => examine(&path, &mut no_tunable),
        };
        let is_container = || std::env::var_os(sandbox::CONTAINER).is_some();
        let filter = match reach.is_reached() && sandbox::inherited() != Some(0) {
            true => sandbox::ask(is_child, is_container()),
            false => Answer::Harmless,
        };
        if filter == Answer::Deadly {
            reach = Reach::Filtered;
        }
        Ok(Self {
            path,
            binary,
            reach,
            no_tunable,
            filter,
        })
    }
}

/// Returns the reason against malloc's huge page tunable in a program with this loader.
fn why_no_tunable(loader: &Path) -> Option<&'static str> {
    /// Loaders have some 200 KiB. One read saves calls, and a vector that grows would call mremap(2),
    /// for which a filter may kill.
    const MAX_LOADER_BYTES: usize = 1 << 20;
    let mut bytes = vec![0; MAX_LOADER_BYTES];
    // An unreadable loader has an unknown version.
    let length = File::open(loader).and_then(|mut file| file.read(&mut bytes));
    bytes.truncate(length.unwrap_or(0));
    variables::why_no_tunable(glibc_minor(&bytes))
}

/// Returns N of glibc 2.N, by its loader: both are of one build, and the loader has the version for
/// its `--version` since glibc 2.33.
fn glibc_minor(loader: &[u8]) -> Option<u32> {
    let marker = b" release version 2.";
    let at = memchr::memmem::find(loader, marker)? + marker.len();
    let rest = loader.get(at..)?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(rest.get(..digits)?).ok()?.parse().ok()
}

/// Returns the reason against the tunable for programs that are not known yet: that of the shell.
pub(super) fn why_no_tunable_here() -> Option<&'static str> {
    let mut found = None;
    examine(Path::new("/bin/sh"), &mut found);
    found
}

/// Reason why LD_PRELOAD does not reach the program of `command`, and whether it is promoted from
/// outside instead. `None` if LD_PRELOAD reaches it, or if there is no such program.
pub(crate) fn unreached(command: &[OsString]) -> Option<(String, bool)> {
    let reach = Program::find(command, true).ok()?.reach;
    Some((reach.reason()?, reach.is_outside()))
}

/// Failure with the program, the error and a hint in one line.
pub(super) fn start_failure(name: &OsStr, error: &io::Error) -> Failure {
    let (code, hint) = match error.kind() {
        NotFound => (NOT_FOUND, "is its interpreter or loader installed?"),
        IsADirectory => (NOT_EXECUTABLE, "name a program in it"),
        _ => (NOT_EXECUTABLE, "is it a program, and may you execute it?"),
    };
    Failure {
        code,
        message: format!("cannot run `{}`: {error}; hint: {hint}", name.display()),
    }
}

fn search(name: &OsStr) -> Result<PathBuf, Failure> {
    let failure = |code, why: &str| Failure {
        code,
        message: format!("cannot run `{}`: {why}", name.display()),
    };
    if name.is_empty() {
        return Err(failure(NOT_FOUND, "the name is empty"));
    }
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match can_execute(&path) {
            Ok(()) => Ok(path),
            Err(error) if error.kind() == NotFound => {
                Err(failure(NOT_FOUND, "no such file; hint: check the path"))
            }
            Err(error) => Err(start_failure(name, &error)),
        };
    }
    // Without PATH execvp searches confstr(_CS_PATH).
    let folders = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/bin:/usr/bin"));
    let mut denied = None;
    for folder in std::env::split_paths(&folders) {
        let path = match folder.as_os_str().is_empty() {
            true => Path::new(".").join(name),
            false => folder.join(name),
        };
        match can_execute(&path) {
            Ok(()) => return Ok(path),
            // execvp(3) continues the search, too.
            Err(error) if matches!(error.kind(), PermissionDenied | IsADirectory) => {
                denied.get_or_insert(error);
            }
            Err(_) => {}
        }
    }
    Err(match denied {
        Some(error) => start_failure(name, &error),
        None => failure(
            NOT_FOUND,
            "not found in PATH; hint: give its path, or fix PATH",
        ),
    })
}

fn can_execute(path: &Path) -> io::Result<()> {
    match std::fs::metadata(path)? {
        file if file.is_dir() => Err(IsADirectory.into()),
        file if !file.is_file() => Err(PermissionDenied.into()),
        _ => Ok(accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS)?),
    }
}

/// The binary of `path` and whether LD_PRELOAD reaches it.
fn examine(path: &Path, no_tunable: &mut Option<&'static str>) -> (PathBuf, Reach) {
    let mut binary = path.to_owned();
    for _ in 0..=MAX_INTERPRETERS {
        match examine_file(&binary, no_tunable) {
            Ok(FileType::Script(interpreter)) => binary = interpreter,
            Ok(FileType::Binary(reach)) => return (binary, reach),
            Err(error) => {
                let reason = format!(
                    "{} cannot be read to see what it is: {error}",
                    binary.display()
                );
                return (binary, Reach::Unknown(reason));
            }
        }
    }
    let reason = format!("more than {MAX_INTERPRETERS} scripts interpret each other");
    (binary, Reach::Unknown(reason))
}

enum FileType {
    /// Interpreter of a script.
    Script(PathBuf),
    Binary(Reach),
}

fn examine_file(path: &Path, no_tunable: &mut Option<&'static str>) -> io::Result<FileType> {
    // Opening a pipe would wait for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut file = File::open(path)?;
    let mut start = Vec::with_capacity(BINPRM_BUF_SIZE);
    (&file)
        .take(BINPRM_BUF_SIZE as u64)
        .read_to_end(&mut start)?;
    if let Some(line) = start.strip_prefix(b"#!") {
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let word = line.trim_ascii().split(|byte| byte.is_ascii_whitespace());
        let interpreter = word.into_iter().next().unwrap_or_default();
        let interpreter = PathBuf::from(OsStr::from_bytes(interpreter));
        return Ok(FileType::Script(interpreter));
    }
    if !start.starts_with(b"\x7fELF") {
        // ENOEXEC: execvp(3) starts the shell.
        return Ok(FileType::Script(PathBuf::from("/bin/sh")));
    }
    let privilege = privilege(&file)?;
    let executable = Executable::read(&ReadCache::new(&file));
    let known = executable.as_ref().ok();
    let loader = known.and_then(|executable| executable.loader.as_deref());
    *no_tunable = loader.and_then(|loader| why_no_tunable(Path::new(loader)));
    let reach = Reach::of(
        executable.as_ref().map_err(String::clone),
        Machine::OWN,
        privilege,
        || {
            // An unreadable file is taken for glibc: then nothing is set, which is safe.
            mentions(&mut file, b"GLIBC_TUNABLES").unwrap_or(true)
        },
    );
    Ok(FileType::Binary(reach))
}

/// Reason why the loader ignores LD_PRELOAD: privileges of the file that take effect on its mount.
fn privilege(file: &File) -> io::Result<Option<&'static str>> {
    let metadata = file.metadata()?;
    let nosuid =
        || rustix::fs::fstatvfs(file).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NOSUID));
    let (set_user, set_group) = (
        metadata.mode() & 0o4000 != 0,
        metadata.mode() & 0o2010 == 0o2010,
    );
    let mut buffer = [0u8; 64];
    let mut capabilities =
        || rustix::fs::fgetxattr(file, "security.capability", &mut buffer[..]).is_ok();
    let user = rustix::process::getuid();
    let found = if set_user && metadata.uid() != user.as_raw() {
        "it is set-user-ID"
    } else if set_group && metadata.gid() != rustix::process::getgid().as_raw() {
        "it is set-group-ID"
    } else if !user.is_root() && capabilities() {
        "its file has capabilities"
    } else {
        return Ok(None);
    };
    // Last, because a seccomp filter may kill the caller of prctl(2).
    Ok((!rustix::thread::no_new_privs()? && !nosuid()).then_some(found))
}

/// Reports whether the file contains `needle`.
fn mentions(file: &mut File, needle: &[u8]) -> io::Result<bool> {
    file.rewind()?;
    let finder = memchr::memmem::Finder::new(needle);
    let mut window = Vec::new();
    loop {
        let keep = window.len().min(needle.len() - 1);
        window.drain(..window.len() - keep);
        let read = (&mut *file).take(1 << 20).read_to_end(&mut window)?;
        if finder.find(&window).is_some() {
            return Ok(true);
        }
        if read == 0 {
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_tells_the_version_of_its_library() {
        let minor = |version: &str| {
            glibc_minor(
                format!("\0ld.so (Debian GLIBC 9.9) stable release version {version}.\n")
                    .as_bytes(),
            )
        };
        assert_eq!((minor("2.35"), minor("2.143")), (Some(35), Some(143)));
        for version in ["2.99999999999", "3.1", "2.", ""] {
            assert_eq!(minor(version), None, "{version}");
        }
    }
}
