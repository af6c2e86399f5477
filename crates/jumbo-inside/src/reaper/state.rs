//! State of a process's reaper, with the reason: [`State`].

/// Defines [`State`]: variant, code, machine-readable name, and message for users.
macro_rules! states {
    ($($(#[$attribute:meta])* $state:ident = $code:literal, $name:literal, $text:literal;)*) => {
        /// State of the reaper; the [`crate::ledger::Slot`] has its code.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(u32)]
        pub enum State {
            $(#[doc = concat!("Message: ", $text, ".")] #[doc = ""] $(#[$attribute])* $state = $code,)*
        }

        impl State {
            /// Returns the state of a code.
            pub const fn from_code(code: u32) -> Option<Self> {
                match code {
                    $($code => Some(Self::$state),)*
                    _ => None,
                }
            }

            /// Returns the machine-readable name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$state => $name,)*
                }
            }

            /// Returns the message for users.
            pub const fn text(self) -> &'static str {
                match self {
                    $(Self::$state => $text,)*
                }
            }
        }
    };
}

states! {
    /// Also in processes that are not covered.
    #[default]
    Off = 0, "off", "off";
    /// In mode `auto`.
    Waiting = 1, "waiting", "not started: the program allocated less than 1 GiB";
    Running = 2, "running", "ready to free the memory after the program's end";
    Done = 3, "done", "freed the memory after the program's end";
    /// The kernel refuses the call while memory is shared, or it drops an attribute that the reaper
    /// would keep. The reaper did not start again.
    Retired = 4, "retired", "ended before a call that a reaper would affect";
    /// In mode `auto`.
    Uncounted = 5, "uncounted",
        "not started: without jumbo's heap malloc's memory is not counted; --reaper=on starts it";
    /// The reaper would die with the program.
    PidOne = 16, "pid-one", "not started: the program is PID 1 of its namespace";
    /// The filter may kill the program for other system calls.
    Seccomp = 17, "seccomp", "not started: the program runs under a seccomp filter";
    Kernel = 18, "kernel", "not started: this kernel lacks a facility that it needs";
    Unconfined = 19, "unconfined", "not started: it could not drop its privileges";
    Clone = 20, "clone-failed", "not started: clone(2) failed";
    Subreaper = 21, "subreaper",
        "not started: the program or an ancestor is a subreaper, which would adopt it";
    Limits = 22, "limits",
        "not started: too few processes are allowed (RLIMIT_NPROC below 4096, or fewer than 1024 left in a pids cgroup)";
    Init = 23, "init",
        "not started: init of this PID namespace does not handle SIGCHLD, and would leave a zombie";
    Aio = 32, "aio", "declined: an AIO context would outlive the program";
    SysvSegment = 33, "sysv-segment", "declined: a System V segment would stay attached";
    LockedFile = 34, "locked-file", "declined: a mapped file would stay locked or leased";
    Device = 35, "device", "declined: a device or a socket is mapped";
    WrittenFile = 36, "written-file",
        "declined: a mapped file that is open for writing would stay busy";
}
