//! [`Process`]: a process by descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Result;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::is_ready;
use crate::kernel::Root;
use jumbo_sys as sys;

/// A process by pidfd, which stays valid when its ID is reused. Clones share the descriptor. It is
/// readable once the process has ended, even as a zombie.
#[derive(Clone, Debug)]
pub struct Process {
    root: Root,
    pid: u32,
    fd: Arc<OwnedFd>,
}

impl Process {
    /// Opens `pid`; `root` has its files in /proc.
    ///
    /// # References
    /// pidfd_open(2); Linux 5.3.
    ///
    /// # Errors
    /// ESRCH: no such process; EINVAL or ENOENT: a thread other than the first of its process.
    pub fn open(root: &Root, pid: u32) -> Result<Self> {
        let known = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let known = known.ok_or(rustix::io::Errno::SRCH)?;
        Ok(Self {
            root: root.clone(),
            pid,
            fd: Arc::new(pidfd_open(known, PidfdFlags::empty())?),
        })
    }

    /// Returns the process ID.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// EPERM: not permitted; ESRCH: the process has ended and was waited for.
    pub fn signal(&self, signal: i32) -> Result<()> {
        sys::send_signal(&*self.fd, signal)
    }

    /// Reports whether the process has ended.
    pub fn is_gone(&self) -> bool {
        is_ready(&*self.fd, Duration::ZERO).unwrap_or(false)
    }

    /// Returns the root of its files in /proc.
    pub fn root(&self) -> &Root {
        &self.root
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
