//! Variables of each thread: [`Local`].
//!
//! They lie in the block that each C library allocates for the libraries loaded at the start. Rust's
//! own thread-locals would need the standard library.

use core::arch::{asm, global_asm};
use core::cell::Cell;
use core::ptr::with_exposed_provenance;

use jumbo_inside::slab::Cache;

/// Variables of a thread, all zero at its start.
#[repr(C)]
pub(crate) struct Local {
    /// Cache of small blocks, or null.
    pub(crate) cache: Cell<*mut Cache>,
    /// Bytes served by the C library since its heap was looked at.
    pub(crate) passed_bytes: Cell<usize>,
    /// Start and length of the addresses of the thread's stack that have room below them.
    pub(crate) ample_start: Cell<usize>,
    pub(crate) ample_bytes: Cell<usize>,
}
const _: () = assert!(size_of::<Local>() == 32 && align_of::<Local>() == 8);

#[cfg(target_arch = "x86_64")]
global_asm!(
    ".section .tbss.jumbo_local,\"awT\",@nobits",
    ".globl jumbo_local",
    ".hidden jumbo_local",
    ".type jumbo_local, @object",
    ".size jumbo_local, 32",
    ".balign 8",
    "jumbo_local:",
    ".zero 32",
    ".text"
);
#[cfg(target_arch = "aarch64")]
global_asm!(
    ".section .tbss.jumbo_local,\"awT\",%nobits",
    ".globl jumbo_local",
    ".hidden jumbo_local",
    ".type jumbo_local, %object",
    ".size jumbo_local, 32",
    ".balign 8",
    "jumbo_local:",
    ".zero 32",
    ".text"
);

/// Returns the variables of the calling thread, which alone uses them.
#[inline(always)]
pub(crate) fn local() -> &'static Local {
    let place: usize;
    // SAFETY: the address of a thread-local by the initial-exec model (ELF Handling For
    // Thread-Local Storage, U. Drepper): thread pointer plus the offset in the table of offsets.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "mov {0}, qword ptr fs:0",
            "add {0}, qword ptr [rip + jumbo_local@GOTTPOFF]",
            out(reg) place,
            options(nostack, readonly, pure)
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "mrs {0}, tpidr_el0",
            "adrp {1}, :gottprel:jumbo_local",
            "ldr {1}, [{1}, #:gottprel_lo12:jumbo_local]",
            "add {0}, {0}, {1}",
            out(reg) place,
            out(reg) _,
            options(nostack, readonly, pure)
        );
    }
    // SAFETY: the thread's own variables, until it ends; all zero is valid.
    unsafe { &*with_exposed_provenance(place) }
}
