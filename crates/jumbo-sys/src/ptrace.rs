//! The requests of ptrace(2) that hold a thread at its exit, or make it perform a system call.
//!
//! Only the thread that seized may make requests. [`wait_any`] returns the stops of a traced
//! thread. The tracer must answer each stop by [`resume`], [`listen`] or [`detach`]. ESRCH means
//! that the thread is not stopped, not traced, or gone.

use rustix::io::Result;
use rustix::process::Pid;

use crate::request;

// Requests and options of the kernel's include/uapi/linux/ptrace.h, equal on all architectures.
// libc lacks some of them.
const PTRACE_PEEKDATA: usize = 2;
const PTRACE_CONT: usize = 7;
const PTRACE_DETACH: usize = 17;
const PTRACE_SYSCALL: usize = 24;
const PTRACE_GETSIGINFO: usize = 0x4202;
const PTRACE_GETREGSET: usize = 0x4204;
const PTRACE_SETREGSET: usize = 0x4205;
const PTRACE_SEIZE: usize = 0x4206;
const PTRACE_INTERRUPT: usize = 0x4207;
const PTRACE_LISTEN: usize = 0x4208;
const PTRACE_GET_RSEQ_CONFIGURATION: usize = 0x420f;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: usize = 0x4211;
/// Marks stops at system calls, so that they differ from those for SIGTRAP.
pub const PTRACE_O_TRACESYSGOOD: usize = 0x01;
/// General registers (include/uapi/linux/elf.h).
const NT_PRSTATUS: usize = 1;

/// Traces `thread` without a stop (PTRACE_SEIZE). The end of the calling thread detaches it.
///
/// # References
/// ptrace(2); Linux 3.4.
///
/// # Errors
/// EPERM: not allowed (credentials, Yama), traced already, a kernel thread, a zombie; ESRCH: gone.
pub fn seize(thread: Pid, options: usize) -> Result<()> {
    trace(PTRACE_SEIZE, thread, 0, options).map(drop)
}

/// Resumes a stopped thread until it enters a system call (PTRACE_SYSCALL).
pub fn resume_to_call(thread: Pid) -> Result<()> {
    trace(PTRACE_SYSCALL, thread, 0, 0).map(drop)
}

/// General registers of a stopped thread.
pub type Registers = libc::user_regs_struct;

/// Reads the registers of a stopped thread; `None` where it runs 32-bit code (PTRACE_GETREGSET).
///
/// # References
/// ptrace(2); Linux 2.6.34.
#[expect(unsafe_code, reason = "the registers are a C structure")]
pub fn registers(thread: Pid) -> Result<Option<Registers>> {
    // SAFETY: the structure has only integers, so all zeroes are valid.
    let mut registers: Registers = unsafe { core::mem::zeroed() };
    let mut part = part(&raw mut registers);
    let data = (&raw mut part).expose_provenance();
    trace(PTRACE_GETREGSET, thread, NT_PRSTATUS, data)?;
    // The kernel stores the size of the register set of the thread's mode.
    Ok((part.iov_len == size_of::<Registers>()).then_some(registers))
}

/// Writes the registers of a stopped thread (PTRACE_SETREGSET).
pub fn set_registers(thread: Pid, registers: &Registers) -> Result<()> {
    let mut registers = *registers;
    let mut part = part(&raw mut registers);
    let data = (&raw mut part).expose_provenance();
    trace(PTRACE_SETREGSET, thread, NT_PRSTATUS, data).map(drop)
}

fn part(registers: *mut Registers) -> libc::iovec {
    libc::iovec {
        iov_base: registers.cast(),
        iov_len: size_of::<Registers>(),
    }
}

/// Code of the signal that stopped a thread (PTRACE_GETSIGINFO; `si_code`, sigaction(2)).
///
/// # Errors
/// EINVAL: it is stopped for no signal; ESRCH: it is not stopped, or gone.
pub fn signal_code(thread: Pid) -> Result<i32> {
    // siginfo_t: the signal, an errno, the code, and 116 more bytes.
    let mut information = [0i32; 32];
    let data = information.as_mut_ptr().expose_provenance();
    trace(PTRACE_GETSIGINFO, thread, 0, data)?;
    let [_, _, code, ..] = information;
    Ok(code)
}

/// Address of the `struct rseq` that a stopped thread registered; 0: none.
///
/// # References
/// ptrace(2), PTRACE_GET_RSEQ_CONFIGURATION; Linux 5.13.
///
/// # Errors
/// EIO: a kernel without it.
pub fn restartable_sequences(thread: Pid) -> Result<usize> {
    let [address, _, _] = configuration(PTRACE_GET_RSEQ_CONFIGURATION, thread)?;
    Ok(usize::try_from(address).unwrap_or(usize::MAX))
}

/// Reports whether the kernel dispatches the system calls of a stopped thread to a handler of its
/// process.
///
/// # References
/// ptrace(2), PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG; Linux 6.4.
///
/// # Errors
/// EIO: a kernel without it.
pub fn dispatches_calls(thread: Pid) -> Result<bool> {
    let [mode, _, _, _] = configuration(PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, thread)?;
    Ok(mode != 0)
}

/// Reads a structure of `N` words, whose size the kernel gets as the address.
fn configuration<const N: usize>(number: usize, thread: Pid) -> Result<[u64; N]> {
    let mut words = [0; N];
    let data = words.as_mut_ptr().expose_provenance();
    trace(number, thread, size_of_val(&words), data)?;
    Ok(words)
}

/// Resumes a stopped thread. Delivers `signal` where it stopped for one; 0: none.
pub fn resume(thread: Pid, signal: i32) -> Result<()> {
    trace(PTRACE_CONT, thread, 0, data(signal)).map(drop)
}

/// Leaves a thread in its group stop until SIGCONT, as without a tracer (PTRACE_LISTEN; Linux 3.4).
///
/// # Errors
/// EIO: no group stop.
pub fn listen(thread: Pid) -> Result<()> {
    trace(PTRACE_LISTEN, thread, 0, 0).map(drop)
}

/// Detaches a stopped thread, with `signal` as in [`resume`]. In a group stop it stays stopped.
pub fn detach(thread: Pid, signal: i32) -> Result<()> {
    trace(PTRACE_DETACH, thread, 0, data(signal)).map(drop)
}

/// Stops a running thread (PTRACE_INTERRUPT; Linux 3.4). The kernel restarts the system call that
/// it waits in, or returns EINTR where it cannot.
pub fn interrupt(thread: Pid) -> Result<()> {
    trace(PTRACE_INTERRUPT, thread, 0, 0).map(drop)
}

/// Reads the word at `address` in the memory of a stopped thread.
///
/// # Errors
/// EIO, EFAULT: no memory at the address.
pub fn peek(thread: Pid, address: usize) -> Result<usize> {
    let mut word = 0usize;
    // The system call stores the word; only libc's function returns it.
    let destination = (&raw mut word).expose_provenance();
    trace(PTRACE_PEEKDATA, thread, address, destination)?;
    Ok(word)
}

/// Next wait status of a traced `thread`; `None` while there is no news. Reaps an ended thread.
///
/// # References
/// waitpid(2), with `__WALL`: a traced thread need be neither a child nor the first of its process.
#[expect(unsafe_code, reason = "rustix decodes the status and drops the event")]
pub fn wait_any(thread: Pid) -> Result<Option<i32>> {
    let mut status = 0i32;
    let flags = (libc::__WALL | libc::WNOHANG).cast_unsigned() as usize;
    let to = (&raw mut status).expose_provenance();
    let arguments = [number(thread), to, flags, 0, 0, 0];
    let wait = || {
        // SAFETY: the status is ours and outlives the call.
        unsafe { request(libc::SYS_wait4, arguments) }
    };
    let news = rustix::io::retry_on_intr(wait)? != 0;
    Ok(news.then_some(status))
}

fn data(signal: i32) -> usize {
    usize::try_from(signal).unwrap_or(0)
}

#[expect(unsafe_code, reason = "a system call that rustix lacks")]
fn trace(what: usize, thread: Pid, address: usize, data: usize) -> Result<usize> {
    let arguments = [what, number(thread), address, data, 0, 0];
    // SAFETY: `data` is a number for the requests of this module that move no data. For the others
    // it is the address of a word, a vector of one part, or a configuration of `address` bytes. The
    // kernel writes or reads that memory, which outlives the call. `address` is otherwise in the
    // thread's address space.
    unsafe { request(libc::SYS_ptrace, arguments) }
}

fn number(thread: Pid) -> usize {
    thread.as_raw_nonzero().get().unsigned_abs() as usize
}
