//! Memory freed after the program's end by a reaper process that shares it.
//!
//! An ending process tears down its address space on one thread, and its waiting parent waits for
//! that. The reaper shares the address space, so the program is not the last user: the program ends
//! at once, whether it exits, crashes or is killed, and the reaper frees the memory with several
//! threads.
//!
//! - `launch`: [`start`] and [`retire`], called inside the program; `gate`: [`block_start`], before
//!   calls that a reaper would affect, except those that change no ID ([`keeps_ids`]). `control`:
//!   the shared state.
//! - `entry`: the code of the reaper. It drops its privileges (`confine`, `identity`), installs a
//!   seccomp filter (`filter`), and sleeps on one futex until the program has ended and no other
//!   process uses the memory.
//! - `release`: then reads the list of mappings (`jumbo_sys::proc`), unmaps all that are not private
//!   and anonymous, and zaps the others (`zap`). `raw`: its system calls.
//! - [`survey()`]: finds resources that would outlive the program (`locks`: of mapped files), in
//!   /proc.
//! - [`State`]: the outcome and its reason.
//!
//! For a process without a reaper, `jumbo kill` frees memory from outside.
//!
//! The program never waits for the reaper: an intermediate parent ends at once, so init adopts it.
//! There is none if init waits only for its own children (`init`), or if the program or an ancestor
//! is a subreaper (`orphans`), which would find it when it waits for any child.
//!
//! Known limits:
//! - While the reaper sleeps, tools that sum up resident memory count the program's twice, and the
//!   program's root folder and /proc stay mounted.
//! - Between its first instruction and its filter it has the program's user ID and could regain the
//!   program's capabilities. An attacker would need a thread that drops privileges in that moment,
//!   without the C library, and control over its memory in the same moment.
//! - It waits for a fault handler in another process (userfaultfd(2) with removal events) that does
//!   not respond.
//! - A program that writes /proc/self/attr/current (SELinux) and needs unshared memory for that, or
//!   that enables address tagging on x86-64 after its start, needs `--reaper=off`.
//!
//! Invariants: the reaper frees nothing while a process or thread uses the memory; it has no
//! effective capability, no file of the program, no terminal and no working directory; every
//! failure in it ends it, and the kernel frees the memory as without it.

mod confine;
mod control;
mod entry;
mod filter;
mod gate;
mod identity;
mod init;
mod launch;
mod locks;
mod orphans;
mod raw;
mod release;
mod state;
mod survey;
mod zap;

pub use confine::NAME;
pub use identity::{Ids, keeps_ids};
pub use init::init_reaps_orphans;
pub use launch::{
    allow_start, block_start, dismiss, forked, is_owner, is_running, prepare, record, retire, start,
};
pub use locks::is_locked;
pub use orphans::set_subreaper;
pub use state::State;
pub use survey::{
    Survey, is_device, is_mapped, is_written, maps_file, survey, survey_soon, would_outlive,
};
