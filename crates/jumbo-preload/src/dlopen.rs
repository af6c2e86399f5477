//! Libraries that the program loads: dlopen(3), dlmopen(3).
//!
//! `RTLD_DEEPBIND` binds a library to its own dependencies first, the C library among them: it
//! would call glibc's `free` with blocks of this library. So the flag is cleared if the program's
//! blocks may be this library's.
//!
//! A second C library in another namespace (dlmopen(3)) has its own `malloc`, which is not
//! interposed. Programs must not pass blocks between the two, with or without jumbo.
//!
//! glibc finds the caller's namespace, RUNPATH and `$ORIGIN` by the return address. So each
//! function is a few instructions that jump to the next definition.

use core::arch::naked_asm;
use core::ffi::{c_char, c_int, c_long, c_void};

use crate::{alloc, next};

/// Target of the jump and mask of the flags, returned in two registers.
#[repr(C)]
struct Onward {
    next: *mut c_void,
    flag_mask: usize,
}

/// dlopen(3).
///
/// # Safety
/// As for dlopen(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    // The arguments are saved over the call, on an aligned stack.
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "endbr64", "push rdi", "push rsi", "push rsi", "call {}", "pop rsi", "pop rsi", "pop rdi",
        "and esi, edx", "jmp rax",
        sym onward
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "hint #34", "stp x0, x1, [sp, #-32]!", "str x30, [sp, #16]", "bl {}", "mov x16, x0", "mov x17, x1",
        "ldr x30, [sp, #16]", "ldp x0, x1, [sp], #32", "and w1, w1, w17", "br x16",
        sym onward
    );
}

/// dlmopen(3).
///
/// # Safety
/// As for dlmopen(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlmopen(
    namespace: c_long,
    path: *const c_char,
    flags: c_int,
) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "endbr64", "push rdi", "push rsi", "push rdx", "call {}", "mov ecx, edx", "pop rdx", "pop rsi", "pop rdi",
        "and edx, ecx", "jmp rax",
        sym onward_in
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "hint #34", "stp x0, x1, [sp, #-32]!", "stp x2, x30, [sp, #16]", "bl {}", "mov x16, x0", "mov x17, x1",
        "ldp x2, x30, [sp, #16]", "ldp x0, x1, [sp], #32", "and w2, w2, w17", "br x16",
        sym onward_in
    );
}

extern "C" fn onward() -> Onward {
    next::look_up();
    Onward {
        next: next::dlopen.address(),
        flag_mask: flag_mask(),
    }
}

extern "C" fn onward_in(namespace: c_long) -> Onward {
    /// The program's own namespace (<dlfcn.h>).
    const LM_ID_BASE: c_long = 0;
    next::look_up();
    Onward {
        next: next::dlmopen.address(),
        flag_mask: match namespace {
            LM_ID_BASE => flag_mask(),
            _ => usize::MAX,
        },
    }
}

fn flag_mask() -> usize {
    /// <bits/dlfcn.h>.
    const RTLD_DEEPBIND: usize = 8;
    match alloc::is_diverted() {
        true => !RTLD_DEEPBIND,
        false => usize::MAX,
    }
}
