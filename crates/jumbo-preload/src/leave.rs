//! Calls by which the program leaves its memory, exec(3) and exit(3), or waits for any child, wait(2).
//!
//! A process beside the program may run the jobs of [`jumbo_inside::watch`]. It ends, and is waited
//! for, before such a call, so the program leaves no process behind, and its end frees the memory.
//! Where the program leaves unseen (a signal, a bare system call) the kernel ends that process.
//!
//! It ends before a wait that would find it, too: with __WALL or __WCLONE, of any child.
//!
//! Some of the functions take any number of arguments, and a wait is unwound when its thread is
//! cancelled. So each is a few instructions that jump to
//! the next definition.

use core::arch::naked_asm;
use core::ffi::{c_int, c_void};

use jumbo_inside::{debug, watch};

use crate::{next, own_stack};

/// Defines functions that run `$before` on their first arguments, and jump.
macro_rules! leave {
    ($($name:ident($($argument:ident: $type:ty),*), $before:expr;)*) => {$(
        #[doc = concat!(stringify!($name), "(3).")]
        ///
        /// # Safety
        /// As for the C library's.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            extern "C" fn before($($argument: $type),*) -> *mut c_void {
                $before;
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
    execve(), own_stack::on(watch::about_to_exec);
    execveat(), own_stack::on(watch::about_to_exec);
    fexecve(), own_stack::on(watch::about_to_exec);
    execv(), own_stack::on(watch::about_to_exec);
    execvp(), own_stack::on(watch::about_to_exec);
    execvpe(), own_stack::on(watch::about_to_exec);
    execl(), own_stack::on(watch::about_to_exec);
    execlp(), own_stack::on(watch::about_to_exec);
    execle(), own_stack::on(watch::about_to_exec);
    _exit(), own_stack::on(watch::about_to_exit);
    _Exit(), own_stack::on(watch::about_to_exit);
    quick_exit(), own_stack::on(watch::about_to_exit);
    waitpid(process: c_int, _status: usize, options: c_int), waits(process == -1, options);
    wait3(_status: usize, options: c_int), waits(true, options);
    wait4(process: c_int, _status: usize, options: c_int), waits(process == -1, options);
    waitid(kind: c_int, _id: usize, _info: usize, options: c_int), waits(is_all(kind), options);
}

/// Reports whether waitid(2) waits for any child.
#[expect(
    clippy::cast_sign_loss,
    reason = "the type of the constants is unsigned"
)]
pub(crate) const fn is_all(kind: c_int) -> bool {
    kind as libc::idtype_t == libc::P_ALL
}

/// Runs before a wait with these options, for any child or another.
pub(crate) fn waits(is_any: bool, options: c_int) {
    if is_any && options & (libc::__WALL | libc::__WCLONE) != 0 && watch::is_beside() {
        own_stack::on(watch::about_to_wait);
    }
}

/// exit(3) and a return from `main` run this.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn end() {
    own_stack::on(|| {
        watch::about_to_exit();
        debug::flush();
    });
}
