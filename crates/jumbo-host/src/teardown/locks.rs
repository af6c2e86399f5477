//! Robust futexes: what a process holds that others wait for.
//!
//! A thread tells the kernel where its list of them begins (set_robust_list(2)); when the thread ends the
//! kernel walks it, in the thread's own memory, and marks each futex so that a waiter gets it. Memory that
//! was released before reads as nothing, the waiters wait for ever: so a list that is not empty keeps us
//! from releasing. The kernel's own OOM reaper gives processes two seconds for the same reason.

use std::io::Read as _;

use rustix::io::Errno;
use rustix::process::Pid;

use super::{Process, Reason};
use crate::kernel::aside;
use crate::kernel::sys::ptrace;

/// Offset of `list_op_pending` in `struct robust_list_head`: the lock being taken or given back.
const PENDING: usize = 2 * size_of::<usize>();

/// Whether `thread`, which stands at its exit, holds robust futexes. It runs no more of its program, so
/// that the answer stays true.
pub(super) fn check(process: &Process, thread: Pid) -> Result<(), Reason> {
    // The kernel keeps a second list for 32-bit code, which only 32-bit tracers are shown.
    if !is_of_our_word_size(process, thread) {
        return Err(Reason::Unreadable);
    }
    let head = ptrace::robust_list(thread).map_err(|_| Reason::Unreadable)?;
    if head == 0 {
        return Ok(());
    }
    match (
        ptrace::peek(thread, head),
        ptrace::peek(thread, head.wrapping_add(PENDING)),
    ) {
        // Bit 0 marks a futex with priority inheritance.
        (Ok(next), Ok(0)) if next & !1 == head => Ok(()),
        (Ok(_), Ok(_)) => Err(Reason::RobustLocks),
        (Err(Errno::SRCH), _) | (_, Err(Errno::SRCH)) => Err(Reason::Late),
        // Where we cannot read it the kernel cannot either.
        (Err(_), _) | (_, Err(_)) => Ok(()),
    }
}

/// Whether a process that is not held could hold robust futexes that another one waits for: those are in
/// memory that both map and write.
pub(super) fn check_mappings(process: &Process) -> Result<(), Reason> {
    let maps = aside::maps(process.root(), process.pid()).map_err(|_| Reason::Unreadable)?;
    match (maps.mappings()).any(|mapping| mapping.write && mapping.shared) {
        true => Err(Reason::SharedMapping),
        false => Ok(()),
    }
}

fn is_of_our_word_size(process: &Process, thread: Pid) -> bool {
    const CLASS: u8 = if size_of::<usize>() == 8 { 2 } else { 1 };
    let path = process.root().path(format!("proc/{thread}/exe"));
    let mut start = [0; 5];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && start == [0x7f, b'E', b'L', b'F', CLASS]
}
