//! A process that can be promoted: [`Target`].

use std::os::fd::AsFd as _;

use rustix::io::Errno;

use super::Refusal;
use crate::kernel::aside::MapCalls;
use crate::kernel::process::Process;
use crate::kernel::process::ProcessState;
use crate::kernel::{FileError, Root, task};
use crate::status::is_sibling;

/// A process by descriptor, which stays valid when its ID is reused.
#[derive(Debug)]
pub struct Target {
    pub(super) root: Root,
    pub(super) process: Process,
    name: String,
    /// Calls that take the mmap lock of the process.
    calls: MapCalls,
}

/// Opens a process that has memory of its own.
///
/// # Errors
/// [`Refusal`] for any other.
pub fn open_program(root: &Root, pid: u32) -> Result<Process, Refusal> {
    if pid == std::process::id() {
        return Err(Refusal::Itself);
    }
    let opened = Process::open(root, pid);
    let standing = ProcessState::read(root, pid).map_err(Refusal::unread)?;
    if standing.process != pid {
        return Err(Refusal::Thread(standing.process));
    }
    if task::is_kernel(root, pid) {
        return Err(Refusal::Kernel);
    }
    if is_sibling(root, pid) {
        return Err(Refusal::Sibling);
    }
    let process = opened.map_err(|errno| match errno {
        Errno::SRCH => Refusal::Gone,
        errno => Refusal::File(FileError::io("open", &root.path(format!("proc/{pid}")))(
            errno.into(),
        )),
    })?;
    // The state alone may be that of a first thread that has ended before others.
    if process.is_gone() {
        let parent = standing.parent;
        return Err(Refusal::Zombie { parent });
    }
    Ok(process)
}

impl Target {
    /// Opens `pid`.
    ///
    /// # Errors
    /// Same as [`open_program`]; [`Refusal::File`].
    pub fn open(root: &Root, pid: u32) -> Result<Self, Refusal> {
        let process = open_program(root, pid)?;
        let base = super::plan::size(crate::kernel::base_page(root));
        let calls = MapCalls::start(root, pid, process.as_fd(), base);
        let calls = calls.map_err(FileError::io("start a child for", &root.path("proc/self")))?;
        Ok(Self {
            root: root.clone(),
            calls,
            name: task::name(root, pid).unwrap_or_default(),
            process,
        })
    }

    /// Returns the process ID.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Returns the process name, as ps(1) shows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the process by descriptor: readable once it has ended.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Opens the pagemap of the current program: it is empty after an execve(2).
    pub(super) fn pagemap(&self) -> Result<&MapCalls, Refusal> {
        let opened = self.calls.open();
        opened.map_err(|error| self.unreadable(self.unread("open", error)))?;
        Ok(&self.calls)
    }

    /// Returns the calls that need no pagemap.
    pub(super) fn calls(&self) -> &MapCalls {
        &self.calls
    }

    /// The error of a call on pagemap.
    pub(super) fn unread(&self, operation: &'static str, error: std::io::Error) -> FileError {
        let path = self.root.path(format!("proc/{}/pagemap", self.pid()));
        FileError::io(operation, &path)(error)
    }

    /// Returns the refusal for an unreadable file of the process.
    pub(super) fn unreadable(&self, error: FileError) -> Refusal {
        // An ending process loses its memory before its descriptor becomes readable.
        match task::memory(&self.root, self.pid()) {
            _ if self.process.is_gone() => Refusal::Gone,
            Ok(None) => Refusal::Gone,
            Ok(Some(task::Memory { uid, .. })) if error.is_denied() => {
                Refusal::Hidden { uid, error }
            }
            Ok(Some(_)) => Refusal::File(error),
            Err(error) => Refusal::unread(error),
        }
    }
}
