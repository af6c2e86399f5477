//! A process that can be promoted: [`Target`].

use std::cell::Cell;

use rustix::io::Errno;
use rustix::process::Pid;

use super::Refusal;
use crate::kernel::process::ProcessState;
use crate::kernel::remote::Renewed;
use crate::kernel::sys::Pagemap;
use crate::kernel::{FileError, Root, task};
use crate::status::is_reaper;
use crate::teardown::Process;

/// A process by descriptor: another that gets its ID later is not taken for it.
#[derive(Debug)]
pub struct Target {
    pub(super) root: Root,
    pub(super) process: Process,
    name: String,
    /// The wait of a thread that must not be stopped again.
    pub(super) renewed: Cell<Option<Renewed>>,
}

impl Target {
    /// Opens `pid`.
    ///
    /// # Errors
    /// [`Refusal`]: it is none, or none that has memory of its own.
    pub fn open(root: &Root, pid: u32) -> Result<Self, Refusal> {
        const KTHREADD: u32 = 2;
        if pid == std::process::id() {
            return Err(Refusal::Itself);
        }
        let opened = Process::open(root, pid);
        let standing = ProcessState::read(root, pid).map_err(|_| Refusal::Gone)?;
        if standing.process != pid {
            return Err(Refusal::Thread(standing.process));
        }
        if standing.parent == KTHREADD || pid == KTHREADD && standing.parent == 0 {
            return Err(Refusal::Kernel);
        }
        let parent = standing.parent;
        if standing.is_zombie() {
            return Err(Refusal::Zombie { parent });
        }
        if is_reaper(root, pid) {
            return Err(Refusal::Reaper);
        }
        let process = opened.map_err(|errno| match errno {
            Errno::SRCH => Refusal::Gone,
            errno => Refusal::File(FileError::io("open", &root.path(format!("proc/{pid}")))(
                errno.into(),
            )),
        })?;
        if process.is_gone() {
            return Err(Refusal::Zombie { parent });
        }
        Ok(Self {
            root: root.clone(),
            name: task::name(root, pid).unwrap_or_default(),
            process,
            renewed: Cell::new(None),
        })
    }

    /// Its ID.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its name, as ps(1) shows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// By descriptor: readable once it has ended.
    pub fn process(&self) -> &Process {
        &self.process
    }

    pub(super) fn id(&self) -> Pid {
        // The ID of a process that was opened is a positive number.
        let id = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        id.unwrap_or(Pid::INIT)
    }

    /// Its pagemap. The file stays that of the program that runs now: after an execve(2)
    /// it shows nothing.
    pub(super) fn pagemap(&self) -> Result<Pagemap, Refusal> {
        let file = self.root.open(format!("proc/{}/pagemap", self.pid()));
        file.map(|file| Pagemap::of(file.into()))
            .map_err(|error| self.unreadable(error))
    }

    /// The refusal that an unreadable file of it comes to.
    pub(super) fn unreadable(&self, error: FileError) -> Refusal {
        if self.process.is_gone() {
            return Refusal::Gone;
        }
        if !error.is_denied() {
            return Refusal::File(error);
        }
        match task::memory(&self.root, self.pid()).ok().flatten() {
            Some(task::Memory { uid, .. }) => Refusal::Hidden { uid, error },
            // It is ending: nothing is left to look into.
            None => Refusal::Gone,
        }
    }
}
