//! Calls by which the program leaves its memory: exec(3) and exit(3).
//!
//! A process beside the program may run the jobs of [`jumbo_inside::watch`]. It ends, and is waited
//! for, before such a call, so the program leaves no process behind, and its end frees the memory.
//! Where the program leaves unseen (a signal, a bare system call) the kernel ends that process.
//!
//! Some of the functions take any number of arguments. So each is a few instructions that jump to
//! the next definition.

use core::arch::naked_asm;
use core::ffi::c_void;

use jumbo_inside::watch;

use crate::{next, own_stack};

/// Defines functions that run `$before`, and jump.
macro_rules! leave {
    ($($name:ident, $before:path;)*) => {$(
        #[doc = concat!(stringify!($name), "(3).")]
        ///
        /// # Safety
        /// As for the C library's.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            extern "C" fn before() -> *mut c_void {
                own_stack::on($before);
                // This may be the first interposed call.
                next::look_up();
                next::$name.address()
            }
            // All registers of arguments are saved, on an aligned stack.
            #[cfg(target_arch = "x86_64")]
            naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "call {}",
                "mov r11, rax",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
                sym before
            );
            #[cfg(target_arch = "aarch64")]
            naked_asm!(
                "stp x0, x1, [sp, #-80]!", "stp x2, x3, [sp, #16]", "stp x4, x5, [sp, #32]",
                "stp x6, x7, [sp, #48]", "str x30, [sp, #64]",
                "bl {}",
                "mov x16, x0",
                "ldr x30, [sp, #64]", "ldp x6, x7, [sp, #48]", "ldp x4, x5, [sp, #32]",
                "ldp x2, x3, [sp, #16]", "ldp x0, x1, [sp], #80",
                "br x16",
                sym before
            );
        }
    )*};
}

leave! {
    execve, watch::about_to_exec;
    execveat, watch::about_to_exec;
    fexecve, watch::about_to_exec;
    execv, watch::about_to_exec;
    execvp, watch::about_to_exec;
    execvpe, watch::about_to_exec;
    execl, watch::about_to_exec;
    execlp, watch::about_to_exec;
    execle, watch::about_to_exec;
    _exit, watch::about_to_exit;
    _Exit, watch::about_to_exit;
    quick_exit, watch::about_to_exit;
}

/// exit(3) and a return from `main` run this.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn end() {
    own_stack::on(watch::about_to_exit);
}
