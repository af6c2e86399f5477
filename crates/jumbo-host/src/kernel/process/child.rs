//! A program run as a child: [`Child`].

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, set_parent_process_death_signal};

use super::{ProcessState, ProgramImage, Signals, end};
use crate::kernel::Root;

/// A program that runs as a child of this process, in its session and process group. The kernel
/// kills it when this process ends, because a kill of the launcher is meant for the program.
#[derive(Debug)]
pub struct Child {
    pid: libc::pid_t,
}

/// A state change of a [`Child`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Exit with this code.
    Exited(i32),
    /// End by this signal.
    Killed(i32),
    /// Stop by this signal.
    Stopped(i32),
    /// Continuation after a stop.
    Continued,
}

/// Resource usage of a [`Child`] and of its children that were waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceUsage {
    /// Page faults without I/O.
    pub minor: u64,
    /// Page faults with I/O.
    pub major: u64,
    /// Peak resident set of any one process, in bytes.
    pub max_rss: u64,
    /// CPU time in user mode.
    pub user: Duration,
    /// CPU time in the kernel.
    pub system: Duration,
}

/// Error of [`Child::spawn`].
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The fork failed.
    #[error("cannot start a process: {0}")]
    Fork(#[source] io::Error),
    /// The execve failed.
    #[error("{0}")]
    Exec(#[source] io::Error),
}

impl Child {
    /// Runs `image` with the signal mask and dispositions that this process inherited.
    ///
    /// # Errors
    /// [`SpawnError`]. No child remains.
    ///
    /// # References
    /// fork(2), PR_SET_PDEATHSIG(2const)
    pub fn spawn(image: &ProgramImage, signals: &Signals) -> Result<Self, SpawnError> {
        let (read, write) =
            pipe_with(PipeFlags::CLOEXEC).map_err(|errno| SpawnError::Fork(errno.into()))?;
        let launcher = rustix::process::getpid();
        let pid = fork().map_err(SpawnError::Fork)?;
        if pid == 0 {
            become_program(image, signals, launcher, &write);
        }
        let child = Self { pid };
        drop(write);
        // The pipe closes when the program starts, and carries an errno when it does not.
        let mut errno = [0; 4];
        match std::fs::File::from(read).read_exact(&mut errno) {
            Ok(()) => {
                let _ = child.wait();
                let error = io::Error::from_raw_os_error(i32::from_ne_bytes(errno));
                Err(SpawnError::Exec(error))
            }
            Err(_) => Ok(child),
        }
    }

    /// Process ID.
    pub fn pid(&self) -> u32 {
        self.pid.unsigned_abs()
    }

    /// State change since the last call, or `None`. The child is reaped after [`Change::Exited`] or
    /// [`Change::Killed`].
    ///
    /// # Errors
    /// The errno of wait4(2).
    pub fn poll(&self) -> io::Result<Option<(Change, ResourceUsage)>> {
        let change = wait4(self.pid, libc::WNOHANG | libc::WUNTRACED | libc::WCONTINUED)?;
        Ok(change.map(|(status, usage)| (Change::of(status), usage)))
    }

    /// Sends a signal. An ended child ignores it.
    #[expect(unsafe_code, reason = "kill and sigqueue take raw numbers")]
    pub fn send(&self, signal: super::Signal) {
        // SAFETY: the child is not reaped, so the ID is its own; no memory is touched.
        unsafe {
            if signal.code == libc::SI_QUEUE {
                let value = libc::sigval {
                    sival_ptr: std::ptr::without_provenance_mut(
                        usize::try_from(signal.value).unwrap_or(usize::MAX),
                    ),
                };
                libc::sigqueue(self.pid, signal.number, value);
            } else {
                libc::kill(self.pid, signal.number);
            }
        }
    }

    /// Reports whether it is stopped.
    pub fn is_stopped(&self) -> bool {
        ProcessState::read(&Root::host(), self.pid()).is_ok_and(|process| process.state == 'T')
    }

    /// Waits until it ends.
    ///
    /// # Errors
    /// The errno of wait4(2).
    pub fn wait(&self) -> io::Result<(Change, ResourceUsage)> {
        wait(self.pid).map(|(status, usage)| (Change::of(status), usage))
    }
}

impl Change {
    fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal(), status.stopped_signal()) {
            (Some(code), ..) => Self::Exited(code),
            (_, Some(signal), _) => Self::Killed(signal),
            (.., Some(signal)) => Self::Stopped(signal),
            _ => Self::Continued,
        }
    }
}

/// Waits for the end of a child, and returns its resource usage with that of the descendants it
/// waited for.
///
/// # Errors
/// ECHILD where it is no child.
pub fn wait(child: libc::pid_t) -> io::Result<(ExitStatus, ResourceUsage)> {
    loop {
        match wait4(child, 0) {
            Ok(Some(ended)) => return Ok(ended),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// # References
/// wait4(2)
#[expect(
    unsafe_code,
    reason = "wait4 is the one call that gives the child's page faults"
)]
fn wait4(child: libc::pid_t, options: i32) -> io::Result<Option<(ExitStatus, ResourceUsage)>> {
    let mut status = 0;
    // SAFETY: any bits are a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to memory of the right type that outlives the call.
    match unsafe { libc::wait4(child, &raw mut status, options, &raw mut usage) } {
        ..0 => return Err(io::Error::last_os_error()),
        0 => return Ok(None),
        _ => {}
    }
    let time = |time: libc::timeval| {
        let seconds = Duration::from_secs(time.tv_sec.unsigned_abs());
        seconds + Duration::from_micros(time.tv_usec.unsigned_abs())
    };
    let resources = ResourceUsage {
        minor: usage.ru_minflt.unsigned_abs(),
        major: usage.ru_majflt.unsigned_abs(),
        max_rss: usage.ru_maxrss.unsigned_abs() << 10,
        user: time(usage.ru_utime),
        system: time(usage.ru_stime),
    };
    Ok(Some((ExitStatus::from_raw(status), resources)))
}

/// Forks. Returns 0 in the child.
#[expect(unsafe_code, reason = "fork copies this process")]
pub(in crate::kernel) fn fork() -> io::Result<libc::pid_t> {
    // SAFETY: callers are single-threaded (the launcher has no second thread), so that the child
    // may run any code, or the child makes only system calls.
    match unsafe { libc::fork() } {
        pid if pid < 0 => Err(io::Error::last_os_error()),
        pid => Ok(pid),
    }
}

fn become_program(image: &ProgramImage, signals: &Signals, launcher: Pid, errors: &OwnedFd) -> ! {
    let _ = set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    if rustix::process::getppid() != Some(launcher) {
        // The launcher ended before the death signal was set.
        end(128 + libc::SIGKILL);
    }
    signals.restore();
    let error = image.exec();
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    let _ = rustix::io::write(errors, &errno.to_ne_bytes());
    end(127)
}
