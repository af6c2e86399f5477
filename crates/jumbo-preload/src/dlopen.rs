//! Libraries that the program loads: dlopen(3), dlmopen(3).
//!
//! `RTLD_DEEPBIND` binds a library to its own dependencies first, and the C library is one: its `free` finds glibc's, not
//! ours, and gets blocks of ours. The flag is cleared where the program's blocks may be ours.
//!
//! A second C library in another namespace (dlmopen(3)) has a `malloc` of its own, which our library is not in front of.
//! Programs must not pass blocks between the two, with or without us.
//!
//! glibc finds the caller's namespace, RUNPATH and `$ORIGIN` by the return address. So each function is a few instructions
//! that jump on to the next definition.

use core::arch::naked_asm;
use core::ffi::{c_char, c_int, c_long, c_void};

use crate::{alloc, next};

/// How to go on: returned in two registers.
#[repr(C)]
struct Onward {
    /// The next definition.
    address: *mut c_void,
    /// The flags to keep.
    kept: usize,
}

/// dlopen(3).
///
/// # Safety
/// As for dlopen(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    // As the calling conventions have it: the arguments are kept over the call, on an aligned stack.
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
    next::prepare();
    Onward {
        address: next::dlopen.address(),
        kept: kept_flags(),
    }
}

extern "C" fn onward_in(namespace: c_long) -> Onward {
    /// `LM_ID_BASE` of <dlfcn.h>: the program's own.
    const BASE: c_long = 0;
    next::prepare();
    Onward {
        address: next::dlmopen.address(),
        kept: if namespace == BASE {
            kept_flags()
        } else {
            usize::MAX
        },
    }
}

/// The flags that are passed on.
fn kept_flags() -> usize {
    /// `RTLD_DEEPBIND` of <bits/dlfcn.h>.
    const DEEPBIND: usize = 8;
    match alloc::is_diverted() {
        true => !DEEPBIND,
        false => usize::MAX,
    }
}
