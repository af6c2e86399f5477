//! Memory given back after the program's end, by a sibling process that shares it.
//!
//! A process that ends tears its address space down itself, on one thread, and a process that waits for it waits
//! for that. The sibling shares the address space, so that the program is not its last user: the program
//! ends at once, however it ended, and the sibling gives the memory back with several threads.
//!
//! - [`start`] and [`retire`] (`launch`) are called inside the program, and [`keep_out`] (`gate`) before calls
//!   that it would stand in the way of; [`stays`] tells of a call that it would not; `control` is what both look at.
//! - `sibling` is what the sibling does: it is stripped (`confine`, and `identity`, who the program is), put
//!   under a seccomp filter (`filter`), and sleeps on one futex until the program has ended and no other process
//!   uses the memory.
//! - `release` then reads the list of mappings (`crate::proc`), unmaps what is not private and anonymous, and
//!   empties the rest (`zap`). `raw` makes its system calls.
//! - [`survey()`] finds what would outlive the program (`locks`, those of mapped files), in /proc (`proc`).
//! - [`State`] is what became of it, and why.
//!
//! All of these are code inside the program. `jumbo::teardown` is the other way, from outside: for a process that
//! was not prepared, `jumbo kill` frees its memory beside the kernel.
//!
//! The program never waits for it: its parent, made for that, ends at once, so it is init's child. There is
//! none where init is known for waiting for its own children only (`init`), nor where orphans go to a subreaper, be it
//! the program or one above it (`orphans`), whose waits for all children would find it.
//!
//! Known limits: while it sleeps, tools that add up resident memory count the program's twice, and it keeps
//! the program's root folder and its /proc mounted. Between its first instruction and its filter
//! it runs with the program's user ID and could take the program's capabilities back; only a thread that
//! drops privilege in that moment past the C library, and whose memory is in hostile hands in the same moment, could use that.
//! A user fault handler in another process (userfaultfd(2) with events of removal) that does not answer
//! makes it wait. A writer of /proc/self/attr/current (SELinux) that wants memory of its own has to be run
//! with `--reaper=off`, and so has a program that switches on the tagging of addresses on x86-64 after its
//! start.
//!
//! Invariants: it frees nothing while any process or thread uses the memory; it has no capability in effect, no
//! file of the program's, no terminal and no working directory; whatever goes wrong in it ends it, and the
//! kernel frees the memory as it would have without it.

mod confine;
mod control;
mod filter;
mod gate;
mod identity;
mod init;
mod launch;
mod locks;
mod orphans;
mod raw;
mod release;
mod sibling;
mod state;
mod survey;
mod zap;

pub use confine::NAME;
pub use identity::{Ids, stays};
pub use init::takes_notice;
pub use launch::{
    children_elsewhere, dismiss, forked, is_owner, is_running, keep_out, let_in, prepare, record,
    retire, start,
};
pub use locks::is_locked;
pub use orphans::set_taken as orphans_are_taken;
pub use state::State;
pub use survey::{Survey, is_device, is_mapped, is_written, survey, survey_soon};
