//! State of a process's reaper, with the reason: [`State`].

/// State of the reaper; the [`crate::ledger::Slot`] has its code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// `--reaper=off`, or the process is not covered.
    #[default]
    Off = 0,
    /// `auto`, and the process has not allocated enough memory.
    Waiting = 1,
    /// The reaper sleeps until the program's end.
    Running = 2,
    /// The reaper has freed the memory.
    Done = 3,
    /// The reaper ended before a call that the kernel refuses while memory is shared, or that drops
    /// an attribute which the reaper would keep; and did not start again.
    Retired = 4,
    /// `auto`, and the memory of the process's malloc is not counted.
    Uncounted = 5,
    /// The process is PID 1 of its namespace: the reaper would die with it.
    PidOne = 16,
    /// A seccomp filter is in force: it may kill the program for other system calls.
    Seccomp = 17,
    /// The kernel lacks a facility that the reaper needs.
    Kernel = 18,
    /// The reaper could not drop its privileges.
    Unconfined = 19,
    /// clone(2) failed.
    Clone = 20,
    /// The program or an ancestor is a subreaper: the reaper would become its child.
    Subreaper = 21,
    /// Limits on processes, of the user or a pids cgroup, leave little room for another one.
    Limits = 22,
    /// Init of the PID namespace does not handle SIGCHLD: the reaper would stay a zombie.
    Init = 23,
    /// An AIO context would outlive the program.
    Aio = 32,
    /// A System V shared memory segment would stay attached.
    SysvSegment = 33,
    /// A mapped file would stay locked or leased.
    LockedFile = 34,
    /// A device or a socket is mapped.
    Device = 35,
    /// A mapped file that is open for writing would stay busy.
    WrittenFile = 36,
}

impl State {
    /// All states.
    pub const ALL: [Self; 19] = [
        Self::Off,
        Self::Waiting,
        Self::Running,
        Self::Done,
        Self::Retired,
        Self::Uncounted,
        Self::PidOne,
        Self::Seccomp,
        Self::Kernel,
        Self::Unconfined,
        Self::Clone,
        Self::Subreaper,
        Self::Limits,
        Self::Init,
        Self::Aio,
        Self::SysvSegment,
        Self::LockedFile,
        Self::Device,
        Self::WrittenFile,
    ];

    /// Returns the state of a code.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as u32 == code)
    }

    /// Returns the machine-readable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Done => "done",
            Self::Retired => "retired",
            Self::Uncounted => "uncounted",
            Self::PidOne => "pid-one",
            Self::Seccomp => "seccomp",
            Self::Kernel => "kernel",
            Self::Unconfined => "unconfined",
            Self::Clone => "clone-failed",
            Self::Subreaper => "subreaper",
            Self::Limits => "limits",
            Self::Init => "init",
            Self::Aio => "aio",
            Self::SysvSegment => "sysv-segment",
            Self::LockedFile => "locked-file",
            Self::Device => "device",
            Self::WrittenFile => "written-file",
        }
    }

    /// Returns the message for users.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Waiting => "not started: the program allocated less than 1 GiB",
            Self::Running => "ready to free the memory after the program's end",
            Self::Done => "freed the memory after the program's end",
            Self::Retired => "ended before a call that a reaper would affect",
            Self::Uncounted => {
                "not started: without jumbo's heap malloc's memory is not counted; --reaper=on starts it"
            }
            Self::PidOne => "not started: the program is PID 1 of its namespace",
            Self::Seccomp => "not started: the program runs under a seccomp filter",
            Self::Kernel => "not started: this kernel lacks a facility that it needs",
            Self::Unconfined => "not started: it could not drop its privileges",
            Self::Clone => "not started: clone(2) failed",
            Self::Subreaper => {
                "not started: the program or an ancestor is a subreaper, which would adopt it"
            }
            Self::Limits => {
                "not started: too few processes are allowed (RLIMIT_NPROC below 4096, or fewer than 1024 left in a pids cgroup)"
            }
            Self::Init => {
                "not started: init of this PID namespace does not handle SIGCHLD, and would leave a zombie"
            }
            Self::Aio => "declined: an AIO context would outlive the program",
            Self::SysvSegment => "declined: a System V segment would stay attached",
            Self::LockedFile => "declined: a mapped file would stay locked or leased",
            Self::Device => "declined: a device or a socket is mapped",
            Self::WrittenFile => "declined: a mapped file that is open for writing would stay busy",
        }
    }
}
