//! Robust futexes: locks of a process that others may wait for.
//!
//! A thread registers the head of its list of locks (set_robust_list(2)). When the thread ends, the
//! kernel walks the list in the thread's memory, and wakes a waiter of each futex. If the memory
//! were released before, it would read as zero and the waiters would wait for ever: so a non-empty
//! list prevents the release. The kernel's OOM reaper waits two seconds for the same reason.

use std::io::Read as _;

use rustix::io::Errno;
use rustix::process::Pid;

use super::{Process, Reason};
use crate::kernel::aside;
use crate::kernel::sys::ptrace;

/// Offset of `list_op_pending` in `struct robust_list_head`: the lock being taken or released.
const PENDING_OFFSET: usize = 2 * size_of::<usize>();

/// Checks that `thread`, at its exit stop, holds no robust futex. It runs no code of its program
/// any more, so the answer stays valid.
pub(super) fn check(process: &Process, thread: Pid) -> Result<(), Reason> {
    // The kernel has a second list for 32-bit code, visible to 32-bit tracers only.
    if !is_of_our_word_size(process, thread) {
        return Err(Reason::Unreadable);
    }
    let head = ptrace::robust_list(thread).map_err(|_| Reason::Unreadable)?;
    if head == 0 {
        return Ok(());
    }
    match (
        ptrace::peek(thread, head),
        ptrace::peek(thread, head.wrapping_add(PENDING_OFFSET)),
    ) {
        // Bit 0 marks a futex with priority inheritance.
        (Ok(next), Ok(0)) if next & !1 == head => Ok(()),
        (Ok(_), Ok(_)) => Err(Reason::RobustLocks),
        (Err(Errno::SRCH), _) | (_, Err(Errno::SRCH)) => Err(Reason::Late),
        // The kernel cannot read it either.
        (Err(_), _) | (_, Err(_)) => Ok(()),
    }
}

/// Checks that a process without a hold can have no robust futex that another process waits for: it
/// would be in a writable shared mapping.
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
