//! A system call in the registers of a stopped thread: [`Held`].
//!
//! A thread that is stopped by PTRACE_INTERRUPT stands on its way out of the kernel, before the kernel
//! decides how the system call that it waited in goes on: the register of the result says how
//! (`-ERESTARTSYS` and its like, kernel only). So the registers are put back at a stop of the same
//! kind, and the kernel then decides as it would have. Where a call answers EINTR although no signal
//! came (signal(7), "Interruption of system calls"), the result becomes `-ERESTARTNOHAND`: again if no
//! handler runs, EINTR if one does.
//!
//! A thread inside a restartable sequence (rseq(2)) is let go at once: the kernel aborts the sequence,
//! and it would not if the thread were elsewhere when it leaves the kernel.

use rustix::io::{Errno, Result};
use rustix::process::Pid;

use super::{Advice, End};
use crate::kernel::sys::ptrace::{self, Registers};

/// The registers of a thread as it goes on with them, and the instruction that calls the kernel.
pub(super) struct Held {
    thread: Pid,
    own: Registers,
    instruction: u64,
}

#[cfg(target_arch = "x86_64")]
mod machine {
    use super::*;
    use crate::kernel::remote::errno;
    use crate::kernel::remote::threads::{Place, place_in};

    /// `syscall`.
    const INSTRUCTION: [u8; 2] = [0x0f, 0x05];
    /// The code segment of 64-bit user code.
    const USER_CODE: u64 = 0x33;
    const NO_CALL: u64 = u64::MAX;
    const EINTR: u64 = (libc::EINTR.unsigned_abs() as u64).wrapping_neg();
    /// Again, if no handler runs (include/linux/errno.h).
    const AGAIN_WITHOUT_HANDLER: u64 = 514u64.wrapping_neg();

    impl Held {
        /// Takes the registers of a thread that is stopped on its way out of the kernel. `vdso` is where
        /// the instruction may be.
        pub(in super::super) fn take(
            thread: Pid,
            vdso: Option<u64>,
        ) -> std::result::Result<Self, End> {
            let gone = |_: Errno| End::Gone;
            let own = ptrace::registers(thread).map_err(gone)?;
            let mut own = own.filter(|own| own.cs == USER_CODE).ok_or(End::Narrow)?;
            // No program has these: a thread that the kernel works with.
            if (own.rip, own.rsp) == (0, 0) {
                return Err(End::NoThread);
            }
            if own.rax == EINTR && own.orig_rax != NO_CALL && can_begin_again(own.orig_rax) {
                own.rax = AGAIN_WITHOUT_HANDLER;
                // At once: it may be let go without a call.
                ptrace::set_registers(thread, &own).map_err(gone)?;
            }
            if ptrace::dispatches_calls(thread).unwrap_or(false) {
                return Err(End::Dispatched);
            }
            if own.orig_rax == NO_CALL && is_in_sequence(thread, own.rip) {
                return Err(End::Signal);
            }
            // The one that it stands behind, if it came by one.
            let places = [vdso, own.rip.checked_sub(2)];
            let instruction = places.into_iter().flatten().find(|at| is_call(thread, *at));
            let instruction = instruction.ok_or(End::NoInstruction)?;
            Ok(Self {
                thread,
                own,
                instruction,
            })
        }

        /// True where it waits in a call that begins again with all of its time.
        pub(in super::super) fn is_renewed(&self) -> bool {
            let own = &self.own;
            let arguments = [own.rdi, own.rsi, own.rdx, own.r10, own.r8, own.r9];
            let argument = |at: usize| arguments.get(at).copied().unwrap_or(0);
            let place = place_in(own.orig_rax.cast_signed(), argument, |_| false);
            own.rax == AGAIN_WITHOUT_HANDLER && place == Place::Limited
        }

        /// Has the thread make the call next.
        pub(in super::super) fn aim(&self, address: u64, advice: Advice) -> Result<()> {
            let mut registers = self.own;
            registers.rip = self.instruction;
            registers.rax = libc::SYS_madvise.unsigned_abs();
            // No call is begun again with these registers.
            registers.orig_rax = NO_CALL;
            registers.rdi = address;
            registers.rsi = advice.length as u64;
            registers.rdx = u64::from(advice.advice.unsigned_abs());
            ptrace::set_registers(self.thread, &registers)
        }

        /// Whether a thread stands where it was to make the call: its signal is for that.
        pub(in super::super) fn is_at_call(&self) -> bool {
            let registers = ptrace::registers(self.thread).ok().flatten();
            registers.is_some_and(|registers| registers.rip == self.instruction)
        }

        /// The answer to the call, of a thread that has made it.
        pub(in super::super) fn answer(&self) -> Result<std::result::Result<(), Errno>> {
            let registers = ptrace::registers(self.thread)?.ok_or(Errno::IO)?;
            Ok(match i32::try_from(registers.rax.wrapping_neg()) {
                Ok(0) => Ok(()),
                Ok(number) => Err(errno(number)),
                Err(_) => Err(Errno::IO),
            })
        }
    }

    /// Whether a call that answered EINTR had no effect, so that it may begin again.
    fn can_begin_again(number: u64) -> bool {
        const CALLS: [libc::c_long; 18] = [
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
        CALLS.iter().any(|call| u64::try_from(*call) == Ok(number))
    }

    fn is_call(thread: Pid, at: u64) -> bool {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        ptrace::peek(thread, at).is_ok_and(|word| word.to_le_bytes().starts_with(&INSTRUCTION))
    }

    /// Whether `at` lies in the sequence that the thread says it is in (`struct rseq_cs`, rseq(2)).
    /// In doubt it does.
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

    /// The offset of the instruction in `code`.
    pub(in super::super) fn find(code: &[u8]) -> Option<usize> {
        code.windows(INSTRUCTION.len())
            .position(|bytes| bytes == INSTRUCTION)
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod machine {
    use super::*;

    impl Held {
        pub(in super::super) fn take(_: Pid, _: Option<u64>) -> std::result::Result<Self, End> {
            Err(End::Unsupported)
        }

        pub(in super::super) fn is_renewed(&self) -> bool {
            false
        }

        pub(in super::super) fn aim(&self, _: u64, _: Advice) -> Result<()> {
            Err(Errno::NOSYS)
        }

        pub(in super::super) fn is_at_call(&self) -> bool {
            false
        }

        pub(in super::super) fn answer(&self) -> Result<std::result::Result<(), Errno>> {
            Err(Errno::NOSYS)
        }
    }

    pub(in super::super) fn find(_: &[u8]) -> Option<usize> {
        None
    }
}

pub(super) use machine::find;

impl Held {
    /// Gives the thread its own registers back.
    pub(super) fn put_back(&self) -> Result<()> {
        ptrace::set_registers(self.thread, &self.own)
    }
}
