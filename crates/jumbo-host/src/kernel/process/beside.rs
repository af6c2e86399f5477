//! A process beside a program, which looks after it from outside: [`Beside`].
//!
//! It holds no descriptor, folder, terminal or process group of the program's, and ends with it. Until
//! the program holds enough memory it is a copy of this process that sleeps; then it does its work, and
//! mostly becomes another image for that.
//!
//! A program that takes the place of this process sees no child: the process is an orphan, and another
//! process adopts it. Where this process itself adopts orphans (the first one of a PID namespace,
//! PR_SET_CHILD_SUBREAPER), it is a child whose end raises no signal, which wait(2) sees with __WALL
//! alone. Such a child must not execute anything: execve(2) has its end raise SIGCHLD again.

use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    PTracer, Pid, PidfdFlags, Resource, Rlimit, child_subreaper, getpid, pidfd_open, set_ptracer,
    setrlimit,
};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

use super::{Image, Signals, end, is_ready, tree};
use crate::kernel::Root;
use crate::units::Bytes;

/// The time between two looks at the program's memory: at first, and at last.
const LOOK: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// A process beside a program.
#[derive(Debug)]
pub struct Beside {
    pid: libc::pid_t,
    /// Closed by the execve(2) of this process: the program runs.
    _gate: Option<OwnedFd>,
    output: Option<OwnedFd>,
}

impl Beside {
    /// A process beside the program that this one is about to become. It does `work` once the program
    /// holds `least` of anonymous memory. `work` is told whether it may execute an image for that.
    ///
    /// # Errors
    /// No process or descriptor is to be had.
    ///
    /// # References
    /// clone(2), PR_SET_PTRACER(2const): stays over an execve(2)
    pub fn of_this(least: Bytes, work: impl FnOnce(bool)) -> io::Result<Self> {
        let program = pidfd_open(getpid(), PidfdFlags::empty())?;
        let (runs, gate) = pipe_with(PipeFlags::CLOEXEC)?;
        let (told, tell) = pipe_with(PipeFlags::CLOEXEC)?;
        let id = getpid();
        let is_adopter = id.is_init() || child_subreaper()?.is_some();
        let first = clone()?;
        if first == 0 {
            leave(&[&program, &runs, &tell].map(|fd| fd.as_raw_fd()), None);
            if !is_adopter && !matches!(clone(), Ok(0)) {
                end(0);
            }
            let _ = rustix::io::write(&tell, &getpid().as_raw_nonzero().get().to_ne_bytes());
            drop(tell);
            // Nothing is written: it ends.
            let _ = std::fs::File::from(runs).read(&mut [0]);
            look_after(id, &program, least, || work(!is_adopter));
        }
        drop((tell, runs));
        let mut pid = [0; 4];
        let said = std::fs::File::from(told).read_exact(&mut pid);
        if !is_adopter {
            wait_for(first);
        }
        said?;
        let pid = i32::from_ne_bytes(pid);
        allow(pid);
        Ok(Self {
            pid,
            _gate: Some(gate),
            output: None,
        })
    }

    /// A process beside a child of this one that runs, which allows its parent to trace it. It executes
    /// `image` once the child holds `least` of anonymous memory.
    ///
    /// # Errors
    /// As [`Beside::of_this`].
    pub fn of_child(
        child: u32,
        image: &Image,
        least: Bytes,
        signals: &Signals,
    ) -> io::Result<Self> {
        let id = i32::try_from(child).ok().and_then(Pid::from_raw);
        let id = id.ok_or(Errno::SRCH)?;
        let program = pidfd_open(id, PidfdFlags::empty())?;
        let (output, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let pid = clone()?;
        if pid == 0 {
            signals.give_back();
            leave(&[program.as_raw_fd()], Some(&write));
            look_after(id, &program, least, || drop(image.exec()));
        }
        Ok(Self {
            pid,
            _gate: None,
            output: Some(output),
        })
    }

    /// Its output, once it has ended; waits so long for that.
    pub fn finish(self, patience: Duration) -> Option<String> {
        let mut output = std::fs::File::from(self.output?);
        let deadline = std::time::Instant::now() + patience;
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

/// Lets a process, and those that it starts, trace this one, where Yama asks for that.
pub(super) fn allow(tracer: libc::pid_t) {
    if let Some(tracer) = Pid::from_raw(tracer) {
        // Without Yama there is no such call, and nothing to allow.
        let _ = set_ptracer(PTracer::ProcessID(tracer));
    }
}

/// A copy of this process: 0 there. Its end raises no signal, which could stay pending over an execve(2).
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
    // SAFETY: a null pointer asks for no status.
    while unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::__WALL) } < 0
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
}

/// Leaves all that is the program's: session, terminal, folder and descriptors, but for those to `keep`.
#[expect(unsafe_code, reason = "descriptors without an owner are closed")]
fn leave(keep: &[RawFd], output: Option<&OwnedFd>) {
    let _ = rustix::process::setsid();
    let _ = rustix::process::chdir("/");
    // A limit of the program's may end it, which is none of the user's faults to look into.
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    let _ = setrlimit(Resource::Core, none);
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
    // The list is read to its end before one of them, which it is read from, is closed.
    let open: Vec<_> = open.collect();
    for fd in open.into_iter().filter(|fd| *fd > 2 && !keep.contains(fd)) {
        // SAFETY: no value that owns one of them is used in this process again.
        unsafe { libc::close(fd) };
    }
}

/// Waits until the program holds enough, does `work`, and ends, with the program at the latest.
fn look_after(id: Pid, program: &OwnedFd, least: Bytes, work: impl FnOnce()) -> ! {
    let root = Root::host();
    let pid = id.as_raw_nonzero().get().unsigned_abs();
    let mut pause = LOOK.0;
    while !is_ready(program, pause).unwrap_or(true) {
        match tree::resident_anonymous(&root, pid) {
            Ok(resident) if resident >= least => {
                work();
                break;
            }
            Ok(_) => pause = (pause * 2).min(LOOK.1),
            Err(_) => break,
        }
    }
    end(0)
}
