//! A stack of this library's own: [`run`].
//!
//! The caller's stack may have a few KiB: that of a coroutine, or of a signal handler.

use core::arch::asm;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, Ordering};

use jumbo_inside::sandbox;
use jumbo_inside::sys::Blocked;

const STACK_BYTES: usize = 32 << 10;

/// Stack of zeroes, without a page until its first use.
#[repr(C, align(4096))]
struct Stack(UnsafeCell<[u8; STACK_BYTES]>);
// SAFETY: only the holder of `IS_USED` runs on it.
unsafe impl Sync for Stack {}
static STACK: Stack = Stack(UnsafeCell::new([0; STACK_BYTES]));
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Calls `work` on the stack, or on the caller's if another thread uses it. Signals are blocked
/// meanwhile: a handler would run on this stack, and a collector would not find the caller's.
pub(crate) fn run(work: extern "C" fn()) {
    // A filter of the program may forbid the call.
    let _blocked = (!sandbox::is_entered()).then(Blocked::all);
    if IS_USED.swap(true, Ordering::Acquire) {
        return work();
    }
    let top = STACK.0.get().expose_provenance() + STACK_BYTES;
    // SAFETY: the stack is this thread's until the store below, and aligned as a call requires.
    // `work` is a C function; the block saves the stack pointer in a register that such functions
    // keep.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "mov r12, rsp",
            "mov rsp, {top}",
            "call {work}",
            "mov rsp, r12",
            top = in(reg) top,
            work = in(reg) work,
            out("r12") _,
            clobber_abi("C"),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "mov x20, sp",
            "mov sp, {top}",
            "blr {work}",
            "mov sp, x20",
            top = in(reg) top,
            work = in(reg) work,
            out("x20") _,
            clobber_abi("C"),
        );
    }
    IS_USED.store(false, Ordering::Release);
}
