//! A process beside a program that manages it from outside: [`Beside`].
//!
//! It holds no descriptor, folder, terminal or process group of the program, and ends with it. It
//! is a sleeping copy of this process until the program holds enough memory. Then it works, mostly
//! by execve(2) of another image.
//!
//! A program that replaces this process sees no child: the process is an orphan, and another
//! process adopts it. This process itself may adopt orphans (PID 1 of a namespace,
//! PR_SET_CHILD_SUBREAPER). Then it is a child without an exit signal, which only wait(2) with
//! __WALL sees. Such a child must not execute an image: execve(2) sets its exit signal to SIGCHLD.

use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, child_subreaper, getpid, pidfd_open};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

use super::signals::forbid_core_dump;
use super::{ProgramImage, Signals, end, is_ready, tree};
use crate::kernel::Root;
use crate::units::Bytes;

/// First interval between two reads of the program's memory. It doubles up to the maximum.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(10);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A process beside a program.
#[derive(Debug)]
pub struct Beside {
    pid: libc::pid_t,
    /// Closed by the execve(2) of this process, which starts the program.
    _gate: Option<OwnedFd>,
    output: Option<OwnedFd>,
}

impl Beside {
    /// Starts a process beside the program that replaces this process. It does `work` once the
    /// program holds `min` of anonymous memory. The argument of `work` tells whether it may execute
    /// an image.
    ///
    /// # Errors
    /// The errno of clone(2), pipe2(2) or pidfd_open(2).
    ///
    /// # References
    /// clone(2)
    pub fn of_this(min: Bytes, work: impl FnOnce(bool)) -> io::Result<Self> {
        let program = pidfd_open(getpid(), PidfdFlags::empty())?;
        let (program_runs, gate) = pipe_with(PipeFlags::CLOEXEC)?;
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let id = getpid();
        let is_adopter = id.is_init() || child_subreaper()?.is_some();
        let first = clone()?;
        if first == 0 {
            let keep = [&program, &program_runs, &write].map(|fd| fd.as_raw_fd());
            detach(&keep, None);
            if !is_adopter && !matches!(clone(), Ok(0)) {
                end(0);
            }
            let _ = rustix::io::write(&write, &getpid().as_raw_nonzero().get().to_ne_bytes());
            drop(write);
            // Returns when the gate closes: no byte is written.
            let _ = std::fs::File::from(program_runs).read(&mut [0]);
            attend(id, &program, min, || work(!is_adopter));
        }
        drop((write, program_runs));
        let mut pid = [0; 4];
        let result = std::fs::File::from(read).read_exact(&mut pid);
        if !is_adopter {
            wait_for(first);
        }
        result?;
        let pid = i32::from_ne_bytes(pid);
        Ok(Self {
            pid,
            _gate: Some(gate),
            output: None,
        })
    }

    /// Starts a process beside a running child. It executes `image` once the child holds `min` of
    /// anonymous memory.
    pub fn of_child(
        child: u32,
        image: &ProgramImage,
        min: Bytes,
        signals: &Signals,
    ) -> io::Result<Self> {
        let id = i32::try_from(child).ok().and_then(Pid::from_raw);
        let id = id.ok_or(Errno::SRCH)?;
        let program = pidfd_open(id, PidfdFlags::empty())?;
        let (output, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let pid = clone()?;
        if pid == 0 {
            signals.restore();
            detach(&[program.as_raw_fd()], Some(&write));
            attend(id, &program, min, || drop(image.exec()));
        }
        Ok(Self {
            pid,
            _gate: None,
            output: Some(output),
        })
    }

    /// Waits for its end, and returns its output.
    pub fn finish(self, timeout: Duration) -> Option<String> {
        let mut output = std::fs::File::from(self.output?);
        let deadline = std::time::Instant::now() + timeout;
        let mut text = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let mut block = [0; 4096];
            if !is_ready(&output, left).unwrap_or(false) {
                return None;
            }
            match output.read(&mut block) {
                Ok(0) => break,
                Ok(read) => text.extend(block.get(..read).unwrap_or_default()),
                Err(_) => return None,
            }
        }
        wait_for(self.pid);
        String::from_utf8(text).ok()
    }
}

/// Copies this process, and returns 0 in the copy. Its end raises no signal, which could stay
/// pending over an execve(2).
#[expect(unsafe_code, reason = "fork(2) takes no other signal than SIGCHLD")]
fn clone() -> io::Result<libc::pid_t> {
    // SAFETY: as fork(2): no memory is shared, and the stack stays the same. Callers are
    // single-threaded, so that no lock of the C library is held.
    match unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) } {
        ..0 => Err(io::Error::last_os_error()),
        pid => Ok(libc::pid_t::try_from(pid).unwrap_or(libc::pid_t::MAX)),
    }
}

#[expect(unsafe_code, reason = "rustix has no __WALL")]
fn wait_for(child: libc::pid_t) {
    // SAFETY: the status pointer may be null.
    while unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::__WALL) } < 0
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
}

/// Detaches this process from the program's session, terminal, folder and descriptors, except those
/// to `keep`.
#[expect(unsafe_code, reason = "descriptors without an owner are closed")]
fn detach(keep: &[RawFd], output: Option<&OwnedFd>) {
    let _ = rustix::process::setsid();
    let _ = rustix::process::chdir("/");
    // A resource limit of the program may kill this process. Its core dump would mislead the user.
    forbid_core_dump();
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null");
    if let Ok(null) = null {
        let _ = (dup2_stdin(&null), dup2_stdout(&null), dup2_stderr(&null));
    }
    if let Some(output) = output {
        let _ = dup2_stdout(output);
    }
    let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    let open = open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    // Collected first, because the list has the descriptor of the folder that it is read from.
    let open: Vec<_> = open.collect();
    for fd in open.into_iter().filter(|fd| *fd > 2 && !keep.contains(fd)) {
        // SAFETY: this process uses no value again that owns one of them.
        unsafe { libc::close(fd) };
    }
}

/// Waits until the program holds `min`, does `work`, and ends this process. Ends it without work
/// when the program ends first.
fn attend(id: Pid, program: &OwnedFd, min: Bytes, work: impl FnOnce()) -> ! {
    let root = Root::host();
    let pid = id.as_raw_nonzero().get().unsigned_abs();
    let mut interval = MIN_POLL_INTERVAL;
    while !is_ready(program, interval).unwrap_or(true) {
        match tree::resident_anonymous(&root, pid) {
            Ok(resident) if resident >= min => {
                work();
                break;
            }
            Ok(_) => interval = (interval * 2).min(MAX_POLL_INTERVAL),
            Err(_) => break,
        }
    }
    end(0)
}
