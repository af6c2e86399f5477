//! The end of the main thread while others go on: pthread_exit(3), thrd_exit(3).
//!
//! A process ends with its last thread, and a worker of [`jumbo_inside::gather`] is one. So, before the main thread
//! leaves the process to its other threads, the workers go, for good: later frees are done by their
//! callers alone. (A main thread that is cancelled is not seen; the process then ends when the last worker
//! has been idle for long enough, 100 ms or a minute.)
//!
//! Both unwind the stack of their thread, which Rust's frames do not take part in. So ours are not there any
//! more when that begins: each function is a few instructions that jump on to the next definition.

use core::arch::naked_asm;
use core::ffi::{c_int, c_void};

use jumbo_inside::events::Mechanism as _;
use jumbo_inside::sandbox;

use crate::mechanisms::All;
use crate::next;

/// pthread_exit(3).
///
/// # Safety
/// As for pthread_exit(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_exit(value: *mut c_void) -> ! {
    // As the calling conventions have it: the argument is kept over the call, on an aligned stack.
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

/// The calling thread is about to end, perhaps by exit(2).
pub(crate) fn ending() {
    // Linux names the first thread after the process. Behind a filter there are no workers, and nothing to ask.
    if !sandbox::is_entered() && rustix::thread::gettid() == rustix::process::getpid() {
        All::first_thread_ends();
    }
}

fn leave() {
    ending();
    // Where the program has called none of ours so far.
    next::prepare();
}
