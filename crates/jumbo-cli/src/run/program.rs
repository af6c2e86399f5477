//! The executable, and whether LD_PRELOAD reaches it: [`Program`].

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::ErrorKind::{IsADirectory, NotFound, PermissionDenied};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use jumbo_host::kernel::{Root, base_page};
use jumbo_host::policy::Reach;
use jumbo_host::policy::elf::{Executable, Machine};
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
        let (binary, mut reach) = match none {
            Some(reach) => (path.clone(), reach),
            None if name.is_none() => (path.clone(), Reach::Reached),
            None => examine(&path),
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
            filter,
        })
    }
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
fn examine(path: &Path) -> (PathBuf, Reach) {
    let mut binary = path.to_owned();
    for _ in 0..=MAX_INTERPRETERS {
        match examine_file(&binary) {
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

fn examine_file(path: &Path) -> io::Result<FileType> {
    // Opening a pipe would wait for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let file = File::open(path)?;
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
    let executable = executable.as_ref().map_err(String::clone);
    Ok(FileType::Binary(Reach::of(
        executable,
        Machine::OWN,
        privilege,
    )))
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
