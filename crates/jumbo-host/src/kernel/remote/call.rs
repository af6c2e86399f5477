//! A system call in the registers of a stopped thread: [`SavedRegisters`].
//!
//! PTRACE_INTERRUPT stops a thread at its exit from the kernel, before the kernel decides whether
//! to restart the interrupted system call. The result register tells (`-ERESTARTSYS` and the like,
//! in the kernel only). So the registers are restored at a stop of the same kind, and the kernel
//! decides as without a tracer. Some calls return EINTR without a signal (signal(7), "Interruption
//! of system calls"). Their result becomes `-ERESTARTNOHAND`: restarted if no handler runs, else
//! EINTR.
//!
//! A thread inside a restartable sequence (rseq(2)) is detached at once. The kernel aborts the
//! sequence, but would not if the thread were elsewhere at its exit from the kernel.

use rustix::io::{Errno, Result};
use rustix::process::Pid;

use super::{Advice, End};
use jumbo_sys::ptrace::{self, Registers};

/// The registers to restore, and the address of a system call instruction.
pub(super) struct SavedRegisters {
    thread: Pid,
    own: Registers,
    instruction: u64,
}

#[cfg(target_arch = "x86_64")]
mod machine {
    use super::*;
    use crate::kernel::remote::errno;
    use crate::kernel::remote::threads::{ThreadState, state_of_call};

    /// Code of the instruction `syscall`.
    const SYSCALL_CODE: [u8; 2] = [0x0f, 0x05];
    /// Code segment of 64-bit user code (`__USER_CS`).
    const USER_CS: u64 = 0x33;
    /// Value of `orig_rax` outside a system call.
    const NO_CALL: u64 = u64::MAX;
    const EINTR: u64 = (libc::EINTR.unsigned_abs() as u64).wrapping_neg();
    /// Result for a restart if no handler runs (include/linux/errno.h).
    const ERESTARTNOHAND: u64 = 514u64.wrapping_neg();

    impl SavedRegisters {
        /// Saves the registers of a thread that is stopped at its exit from the kernel. `vdso` is a
        /// candidate for the address of the instruction.
        pub(in super::super) fn save(
            thread: Pid,
            vdso: Option<u64>,
        ) -> std::result::Result<Self, End> {
            let gone = |_: Errno| End::Gone;
            let own = ptrace::registers(thread).map_err(gone)?;
            let mut own = own.filter(|own| own.cs == USER_CS).ok_or(End::Narrow)?;
            // Only a kernel worker has these.
            if (own.rip, own.rsp) == (0, 0) {
                return Err(End::NoThread);
            }
            if own.rax == EINTR && own.orig_rax != NO_CALL && can_restart(own.orig_rax) {
                own.rax = ERESTARTNOHAND;
                // Set now, because the thread may be detached without a call.
                ptrace::set_registers(thread, &own).map_err(gone)?;
            }
            if ptrace::dispatches_calls(thread).unwrap_or(false) {
                return Err(End::Dispatched);
            }
            if own.orig_rax == NO_CALL && is_in_sequence(thread, own.rip) {
                return Err(End::Signal);
            }
            // The thread may have entered the kernel by the instruction before `rip`.
            let candidates = [vdso, own.rip.checked_sub(2)];
            let mut candidates = candidates.into_iter().flatten();
            let instruction = candidates.find(|at| is_call(thread, *at));
            let instruction = instruction.ok_or(End::NoInstruction)?;
            Ok(Self {
                thread,
                own,
                instruction,
            })
        }

        /// Reports whether the thread's call restarts with its full timeout.
        pub(in super::super) fn restarts_timeout(&self) -> bool {
            let own = &self.own;
            let arguments = [own.rdi, own.rsi, own.rdx, own.r10, own.r8, own.r9];
            let argument = |at: usize| arguments.get(at).copied().unwrap_or(0);
            let state = state_of_call(own.orig_rax.cast_signed(), argument, |_| false);
            own.rax == ERESTARTNOHAND && state == ThreadState::Limited
        }

        /// Sets the registers for the call.
        pub(in super::super) fn set_call(&self, address: u64, advice: Advice) -> Result<()> {
            let mut registers = self.own;
            registers.rip = self.instruction;
            registers.rax = libc::SYS_madvise.unsigned_abs();
            // The kernel must not restart a call with these registers.
            registers.orig_rax = NO_CALL;
            registers.rdi = address;
            registers.rsi = advice.length as u64;
            registers.rdx = u64::from(advice.advice.unsigned_abs());
            ptrace::set_registers(self.thread, &registers)
        }

        /// Reports whether the thread is at the instruction, so that its fault comes from there.
        pub(in super::super) fn is_at_call(&self) -> bool {
            let registers = ptrace::registers(self.thread).ok().flatten();
            registers.is_some_and(|registers| registers.rip == self.instruction)
        }

        /// Result of the call, after the thread has made it.
        pub(in super::super) fn call_result(&self) -> Result<std::result::Result<(), Errno>> {
            let registers = ptrace::registers(self.thread)?.ok_or(Errno::IO)?;
            Ok(match i32::try_from(registers.rax.wrapping_neg()) {
                Ok(0) => Ok(()),
                Ok(number) => Err(errno(number)),
                Err(_) => Err(Errno::IO),
            })
        }
    }

    /// Reports whether a call that returned EINTR had no effect, so that it may restart.
    fn can_restart(number: u64) -> bool {
        const RESTARTABLE_CALLS: [libc::c_long; 18] = [
            libc::SYS_epoll_wait,
            libc::SYS_epoll_pwait,
            libc::SYS_epoll_pwait2,
            libc::SYS_rt_sigtimedwait,
            libc::SYS_semop,
            libc::SYS_semtimedop,
            libc::SYS_io_getevents,
            libc::SYS_select,
            libc::SYS_pselect6,
            libc::SYS_ppoll,
            libc::SYS_read,
            libc::SYS_readv,
            libc::SYS_accept,
            libc::SYS_accept4,
            libc::SYS_recvfrom,
            libc::SYS_recvmsg,
            libc::SYS_sendto,
            libc::SYS_sendmsg,
        ];
        RESTARTABLE_CALLS.contains(&number.cast_signed())
    }

    fn is_call(thread: Pid, at: u64) -> bool {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        ptrace::peek(thread, at).is_ok_and(|word| word.to_le_bytes().starts_with(&SYSCALL_CODE))
    }

    /// Reports whether `at` lies in the thread's current sequence (`struct rseq_cs`, rseq(2)). True
    /// if unknown.
    fn is_in_sequence(thread: Pid, at: u64) -> bool {
        const RSEQ_CS: usize = 8;
        let address = match ptrace::restartable_sequences(thread) {
            Ok(0) | Err(Errno::IO) => return false,
            Ok(address) => address,
            Err(_) => return true,
        };
        let peek = |at: usize| ptrace::peek(thread, at);
        let sequence = match peek(address.wrapping_add(RSEQ_CS)) {
            Ok(0) => return false,
            Ok(sequence) => sequence,
            Err(_) => return true,
        };
        match (
            peek(sequence.wrapping_add(8)),
            peek(sequence.wrapping_add(16)),
        ) {
            (Ok(start), Ok(length)) => at.wrapping_sub(start as u64) < length as u64,
            _ => true,
        }
    }

    /// Offset of the instruction in `code`.
    pub(in super::super) fn find(code: &[u8]) -> Option<usize> {
        code.windows(SYSCALL_CODE.len())
            .position(|bytes| bytes == SYSCALL_CODE)
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod machine {
    use super::*;

    impl SavedRegisters {
        pub(in super::super) fn save(_: Pid, _: Option<u64>) -> std::result::Result<Self, End> {
            Err(End::Unsupported)
        }

        pub(in super::super) fn restarts_timeout(&self) -> bool {
            false
        }

        pub(in super::super) fn set_call(&self, _: u64, _: Advice) -> Result<()> {
            Err(Errno::NOSYS)
        }

        pub(in super::super) fn is_at_call(&self) -> bool {
            false
        }

        pub(in super::super) fn call_result(&self) -> Result<std::result::Result<(), Errno>> {
            Err(Errno::NOSYS)
        }
    }

    pub(in super::super) fn find(_: &[u8]) -> Option<usize> {
        None
    }
}

pub(super) use machine::find;

impl SavedRegisters {
    pub(super) fn restore(&self) -> Result<()> {
        ptrace::set_registers(self.thread, &self.own)
    }
}
