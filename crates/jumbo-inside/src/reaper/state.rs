//! [`State`]: what became of the reaper in a process, and why.

/// What became of the reaper; its code stands in the [`crate::ledger::Slot`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// `--reaper=off`, or the process is not covered.
    #[default]
    Off = 0,
    /// `auto`, and the process has not asked for enough memory.
    Waiting = 1,
    /// The sibling sleeps, ready.
    Running = 2,
    /// The sibling gave the memory back.
    Done = 3,
    /// It was ended before a call that the kernel refuses while memory is shared, or that takes from the
    /// program what the sibling would keep, and could not be started again.
    Retired = 4,
    /// `auto`, and what the process's malloc has is not counted.
    Uncounted = 5,
    /// The process is PID 1 of its namespace: the sibling would die with it.
    PidOne = 16,
    /// A seccomp filter is at work: calls that the program did not make before may kill it.
    Seccomp = 17,
    /// The kernel lacks what the sibling needs.
    Kernel = 18,
    /// The sibling could not be confined.
    Unconfined = 19,
    /// clone(2) failed.
    Clone = 20,
    /// The program is a subreaper, or there is one above it: the sibling would become its child.
    Subreaper = 21,
    /// So few processes are allowed, to the user or in a pids cgroup, that one more may be too many.
    Limits = 22,
    /// Init of the PID namespace does nothing about SIGCHLD: the sibling would stay its zombie.
    Init = 23,
    /// An AIO context would outlive the program.
    Aio = 32,
    /// A System V shared memory segment would stay attached.
    SysvSegment = 33,
    /// A locked file, or one with a lease, is mapped and would stay so.
    LockedFile = 34,
    /// A device is mapped, or a socket.
    Device = 35,
    /// A file that is open for writing is mapped, and would stay busy.
    WrittenFile = 36,
}

impl State {
    /// All of them.
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

    /// The state whose code it is.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as u32 == code)
    }

    /// One word for programs.
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

    /// A sentence for people.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Waiting => "not started: the program asked for less than 1 GiB",
            Self::Running => "ready to give the memory back after the end",
            Self::Done => "gave the memory back after the end",
            Self::Retired => "ended before a call that it would have stood in the way of",
            Self::Uncounted => {
                "not started: without jumbo's heap what malloc has is not counted; --reaper=on starts it"
            }
            Self::PidOne => "not started: the program is PID 1 of its namespace",
            Self::Seccomp => "not started: the program runs under a seccomp filter",
            Self::Kernel => "not started: this kernel lacks what it needs",
            Self::Unconfined => "not started: it could not be confined",
            Self::Clone => "not started: no process could be made",
            Self::Subreaper => {
                "not started: orphans go to a subreaper, the program or one above it, and it would be one"
            }
            Self::Limits => {
                "not started: too few processes are allowed (RLIMIT_NPROC below 4096, or fewer than 1024 left in a pids cgroup)"
            }
            Self::Init => {
                "not started: init of this PID namespace does nothing about SIGCHLD, and would leave it a zombie"
            }
            Self::Aio => "declined: an AIO context would outlive the program",
            Self::SysvSegment => "declined: a System V segment would stay attached",
            Self::LockedFile => "declined: a mapped file would stay locked or leased",
            Self::Device => "declined: a device or a socket is mapped",
            Self::WrittenFile => "declined: a mapped file that is open for writing would stay busy",
        }
    }
}
