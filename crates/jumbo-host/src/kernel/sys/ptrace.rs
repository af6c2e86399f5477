//! Tracing a thread of another process: ptrace(2), as far as holding it at its exit and having it make a
//! system call take it.
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
const SYSCALL: libc::c_long = 24;
const GETSIGINFO: libc::c_long = 0x4202;
const GETREGSET: libc::c_long = 0x4204;
const SETREGSET: libc::c_long = 0x4205;
const SEIZE: libc::c_long = 0x4206;
const INTERRUPT: libc::c_long = 0x4207;
const LISTEN: libc::c_long = 0x4208;
const GET_RSEQ_CONFIGURATION: libc::c_long = 0x420f;
const GET_DISPATCH_CONFIGURATION: libc::c_long = 0x4211;
const OPTION_MARK_SYSCALLS: usize = 0x01;
const OPTION_TRACE_EXIT: usize = 0x40;
/// The general registers (NT_PRSTATUS).
const GENERAL: usize = 1;

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

/// Traces `thread` without stopping it, so that a stop at a system call can be told from one for SIGTRAP
/// (PTRACE_SEIZE with PTRACE_O_TRACESYSGOOD). It is let go when the calling thread ends.
///
/// # References
/// ptrace(2); Linux 3.4.
///
/// # Errors
/// As [`seize`].
pub(crate) fn seize_for_calls(thread: Pid) -> Result<()> {
    request(SEIZE, thread, 0, OPTION_MARK_SYSCALLS).map(drop)
}

/// Lets a stopped thread go on to where it enters a system call (PTRACE_SYSCALL).
///
/// # Errors
/// ESRCH: it is not stopped, or gone: killed meanwhile.
pub(crate) fn resume_to_call(thread: Pid) -> Result<()> {
    request(SYSCALL, thread, 0, 0).map(drop)
}

/// The general registers of a stopped thread.
pub(crate) type Registers = libc::user_regs_struct;

/// Reads the registers of a stopped thread; `None` where it runs 32-bit code (PTRACE_GETREGSET).
///
/// # References
/// ptrace(2); Linux 2.6.34.
///
/// # Errors
/// ESRCH: it is not stopped, or gone.
#[expect(unsafe_code, reason = "the registers are a C structure")]
pub(crate) fn registers(thread: Pid) -> Result<Option<Registers>> {
    // SAFETY: numbers alone, of which all zeroes are valid values.
    let mut registers: Registers = unsafe { std::mem::zeroed() };
    let mut part = part(&raw mut registers);
    let place = (&raw mut part).expose_provenance();
    request(GETREGSET, thread, GENERAL, place)?;
    // The kernel stores how many bytes the set of the thread's mode has.
    Ok((part.iov_len == size_of::<Registers>()).then_some(registers))
}

/// Writes them (PTRACE_SETREGSET).
///
/// # Errors
/// As [`registers`].
pub(crate) fn set_registers(thread: Pid, registers: &Registers) -> Result<()> {
    let mut registers = *registers;
    let mut part = part(&raw mut registers);
    let place = (&raw mut part).expose_provenance();
    request(SETREGSET, thread, GENERAL, place).map(drop)
}

fn part(registers: *mut Registers) -> libc::iovec {
    libc::iovec {
        iov_base: registers.cast(),
        iov_len: size_of::<Registers>(),
    }
}

/// The code of the signal that a thread is stopped for (PTRACE_GETSIGINFO; `si_code`, sigaction(2)).
///
/// # Errors
/// EINVAL: it is stopped for no signal; ESRCH: it is not stopped, or gone.
pub(crate) fn signal_code(thread: Pid) -> Result<i32> {
    // siginfo_t: the signal, an errno, the code, and 116 bytes more.
    let mut information = [0i32; 32];
    let place = information.as_mut_ptr().expose_provenance();
    request(GETSIGINFO, thread, 0, place)?;
    let [_, _, code, ..] = information;
    Ok(code)
}

/// The `struct rseq` of a stopped thread, in its memory; 0: it registered none.
///
/// # References
/// ptrace(2), PTRACE_GET_RSEQ_CONFIGURATION; Linux 5.13.
///
/// # Errors
/// EIO: a kernel without it; ESRCH: it is not stopped, or gone.
pub(crate) fn restartable_sequences(thread: Pid) -> Result<usize> {
    let mut configuration = [0u64; 3];
    let place = configuration.as_mut_ptr().expose_provenance();
    request(
        GET_RSEQ_CONFIGURATION,
        thread,
        size_of_val(&configuration),
        place,
    )?;
    let [address, ..] = configuration;
    Ok(usize::try_from(address).unwrap_or(usize::MAX))
}

/// True where a stopped thread has its system calls dispatched to itself, so that none of ours would
/// reach the kernel.
///
/// # References
/// ptrace(2), PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG; Linux 6.4.
///
/// # Errors
/// EIO: a kernel that does not say; ESRCH: it is not stopped, or gone.
pub(crate) fn dispatches_calls(thread: Pid) -> Result<bool> {
    let mut configuration = [0u64; 4];
    let place = configuration.as_mut_ptr().expose_provenance();
    request(
        GET_DISPATCH_CONFIGURATION,
        thread,
        size_of_val(&configuration),
        place,
    )?;
    let [mode, ..] = configuration;
    Ok(mode != 0)
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
    // SAFETY: `data` is a number for the requests of this module that move no data. For the others it is
    // the address of what the kernel fills in or reads (a word, a vector of one part, a configuration of
    // the size given as `address`), which outlives the call. `address` is otherwise one of the thread.
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
