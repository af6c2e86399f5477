//! Tracing a thread of another process: ptrace(2), as far as holding it at its exit takes it.
//!
//! Requests are valid from the thread that seized only. What a traced thread stands still for is told by
//! [`wait_any`]; every such stop has to be answered by [`resume`], [`listen`] or [`detach`].

use rustix::io::{Errno, Result};
use rustix::process::Pid;

use super::result;

// The numbers of the kernel's include/uapi/linux/ptrace.h, which all architectures share.
const PEEKDATA: libc::c_long = 2;
const CONT: libc::c_long = 7;
const DETACH: libc::c_long = 17;
const SEIZE: libc::c_long = 0x4206;
const INTERRUPT: libc::c_long = 0x4207;
const LISTEN: libc::c_long = 0x4208;
const OPTION_TRACE_EXIT: usize = 0x40;

/// Traces `thread` without stopping it, so that it will stop before it gives up its memory
/// (PTRACE_SEIZE with PTRACE_O_TRACEEXIT). It is let go when the calling thread ends.
///
/// # References
/// ptrace(2); Linux 3.4.
///
/// # Errors
/// EPERM: not allowed (credentials, Yama), traced already, a kernel thread, a zombie; ESRCH: gone.
pub(crate) fn seize(thread: Pid) -> Result<()> {
    request(SEIZE, thread, 0, OPTION_TRACE_EXIT).map(drop)
}

/// Lets a stopped thread go on, with `signal` delivered to it where it stopped for one; 0: none.
///
/// # Errors
/// ESRCH: it is not stopped, or gone: killed meanwhile.
pub(crate) fn resume(thread: Pid, signal: i32) -> Result<()> {
    request(CONT, thread, 0, data(signal)).map(drop)
}

/// Leaves a thread in its group stop, to be continued by SIGCONT as if it were not traced
/// (PTRACE_LISTEN; Linux 3.4).
///
/// # Errors
/// ESRCH: it is not stopped, or gone; EIO: it is no group stop.
pub(crate) fn listen(thread: Pid) -> Result<()> {
    request(LISTEN, thread, 0, 0).map(drop)
}

/// Stops tracing a stopped thread, with `signal` as in [`resume`]. In a group stop it stays stopped.
///
/// # Errors
/// ESRCH: it is not stopped, or gone.
pub(crate) fn detach(thread: Pid, signal: i32) -> Result<()> {
    request(DETACH, thread, 0, data(signal)).map(drop)
}

/// Asks a running thread to stop (PTRACE_INTERRUPT; Linux 3.4). A system call that it waits in is
/// restarted, or answers EINTR where the kernel cannot restart it.
///
/// # Errors
/// ESRCH: it is gone, or not traced.
pub(crate) fn interrupt(thread: Pid) -> Result<()> {
    request(INTERRUPT, thread, 0, 0).map(drop)
}

/// The word at `address` in the memory of a stopped thread.
///
/// # Errors
/// EIO, EFAULT: nothing is there; ESRCH: it is not stopped, or gone.
pub(crate) fn peek(thread: Pid, address: usize) -> Result<usize> {
    let mut word = 0usize;
    // The system call stores what the library's function returns.
    let destination = (&raw mut word).expose_provenance();
    request(PEEKDATA, thread, address, destination)?;
    Ok(word)
}

/// Where the list of the robust futexes that `thread` holds begins, in its memory; 0: it never made one.
///
/// # References
/// get_robust_list(2); Linux 2.6.17.
///
/// # Errors
/// EPERM: not allowed; ESRCH: gone; ENOSYS: a kernel without futexes.
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
pub(crate) fn robust_list(thread: Pid) -> Result<usize> {
    let (mut head, mut length) = (0usize, 0usize);
    // SAFETY: both words are ours and outlive the call, which fills them in.
    let returned = unsafe {
        libc::syscall(
            libc::SYS_get_robust_list,
            thread.as_raw_nonzero().get(),
            &raw mut head,
            &raw mut length,
        )
    };
    result(returned).map(|_| head)
}

/// The wait status of a traced `thread`, or `None` while there is no news. What has ended is reaped.
///
/// # References
/// waitpid(2), with `__WALL`: a traced thread need be neither a child nor the first of its process.
///
/// # Errors
/// ECHILD: it is not traced any more.
#[expect(unsafe_code, reason = "rustix decodes the status and drops the event")]
pub(crate) fn wait_any(thread: Pid) -> Result<Option<i32>> {
    let mut status = 0;
    loop {
        // SAFETY: the status is ours and outlives the call.
        let returned = unsafe {
            libc::waitpid(
                thread.as_raw_nonzero().get(),
                &raw mut status,
                libc::__WALL | libc::WNOHANG,
            )
        };
        match result(returned.into()) {
            Ok(0) => return Ok(None),
            Ok(_) => return Ok(Some(status)),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

fn data(signal: i32) -> usize {
    usize::try_from(signal).unwrap_or(0)
}

#[expect(unsafe_code, reason = "a system call that rustix lacks")]
fn request(request: libc::c_long, thread: Pid, address: usize, data: usize) -> Result<usize> {
    // SAFETY: `data` is a number for every request of this module but PTRACE_PEEKDATA, for which it is
    // the address of a word that outlives the call; `address` is one of the traced thread.
    let returned = unsafe {
        libc::syscall(
            libc::SYS_ptrace,
            request,
            libc::c_long::from(thread.as_raw_nonzero().get()),
            address,
            data,
        )
    };
    result(returned)
}
