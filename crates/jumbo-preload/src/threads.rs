//! The end of the main thread before that of others: pthread_exit(3), thrd_exit(3).
//!
//! A process ends with its last thread, and the workers of [`jumbo_inside::gather`] are threads. So
//! the workers exit for good before the main thread does: later frees are synchronous. The
//! cancellation of a main thread is not detected; the process then ends once the last worker has
//! been idle long enough, 100 ms or a minute.
//!
//! Both functions unwind the stack of their thread, which Rust frames do not support. So each
//! function is a few instructions that jump to the next definition, without a Rust frame on the
//! stack.

use core::arch::naked_asm;
use core::ffi::{c_int, c_void};

use jumbo_inside::events::Mechanism as _;
use jumbo_inside::sandbox;
use jumbo_sys as sys;

use crate::mechanisms::All;
use crate::next;
use crate::own_stack::on;

/// pthread_exit(3).
///
/// # Safety
/// As for pthread_exit(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_exit(value: *mut c_void) -> ! {
    // The argument is saved over the call, on an aligned stack.
    #[cfg(target_arch = "x86_64")]
    naked_asm!("push rdi", "call {}", "pop rdi", "jmp rax", sym leave_pthread);
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "stp x0, x30, [sp, #-16]!", "bl {}", "mov x16, x0", "ldp x0, x30, [sp], #16", "br x16",
        sym leave_pthread
    );
}

/// thrd_exit(3).
///
/// # Safety
/// As for thrd_exit(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thrd_exit(value: c_int) -> ! {
    #[cfg(target_arch = "x86_64")]
    naked_asm!("push rdi", "call {}", "pop rdi", "jmp rax", sym leave_thrd);
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "stp x0, x30, [sp, #-16]!", "bl {}", "mov x16, x0", "ldp x0, x30, [sp], #16", "br x16",
        sym leave_thrd
    );
}

extern "C" fn leave_pthread() -> *mut c_void {
    leave();
    next::pthread_exit.address()
}

extern "C" fn leave_thrd() -> *mut c_void {
    leave();
    next::thrd_exit.address()
}

/// Reports the end of the calling thread, perhaps by exit(2).
pub(crate) fn ending() {
    // The first thread's ID is that of the process. Under a seccomp filter there are no workers.
    let is_first =
        || !sandbox::is_entered() && rustix::thread::gettid() == rustix::process::getpid();
    if sys::guarded(is_first) {
        on(All::first_thread_ends);
    }
}

fn leave() {
    ending();
    // This may be the first interposed call.
    next::look_up();
}
