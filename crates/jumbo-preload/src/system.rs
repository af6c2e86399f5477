//! sysconf(3) and dlsym(3), for this library alone: rustix and mimalloc call them.
//!
//! The thread of [`jumbo_inside::watch`] has no thread pointer of the C library's, and musl's sysconf(3) may look at it (a
//! stack protector). dlsym(3) is not in every C library. Both are hidden: the program's own calls go where they always went.

use core::ffi::{CStr, c_char, c_int, c_long, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicI64, Ordering};

/// `-1` for all but the size of a page and the length of a tick.
unsafe extern "C" fn configuration(name: c_int) -> c_long {
    /// USER_HZ.
    const TICKS: c_long = 100;
    /// Asked for by the first thread, before there is any other.
    static PAGE: AtomicI64 = AtomicI64::new(0);
    match name {
        libc::_SC_PAGESIZE => match PAGE.load(Ordering::Relaxed) {
            0 => {
                // SAFETY: getauxval(3) reads what the kernel passed at the start.
                let page = unsafe { libc::getauxval(libc::AT_PAGESZ) }.cast_signed();
                PAGE.store(page, Ordering::Relaxed);
                page
            }
            page => page,
        },
        libc::_SC_CLK_TCK => TICKS,
        _ => -1,
    }
}

/// Null for all but getauxval(3).
unsafe extern "C" fn symbol(_handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: rustix passes a terminated name.
    match unsafe { CStr::from_ptr(name) } == c"getauxval" {
        true => libc::getauxval as *mut c_void,
        false => null_mut(),
    }
}

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".globl sysconf", ".hidden sysconf", "sysconf: jmp {}", ".globl dlsym", ".hidden dlsym", "dlsym: jmp {}",
    sym configuration, sym symbol
);
#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".globl sysconf", ".hidden sysconf", "sysconf: b {}", ".globl dlsym", ".hidden dlsym", "dlsym: b {}",
    sym configuration, sym symbol
);
