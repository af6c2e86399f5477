//! Hidden definitions of sysconf(3) and dlsym(3) for this library: rustix and mimalloc call them.
//!
//! The thread of [`jumbo_inside::watch`] has no thread pointer of the C library, and musl's
//! sysconf(3) may read it (stack protector). dlsym(3) is not in every C library. The program's own
//! calls are not affected.

use core::ffi::{CStr, c_char, c_int, c_long, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicI64, Ordering};

/// Returns the page size, the ticks per second, or -1 for every other name.
unsafe extern "C" fn system_value(name: c_int) -> c_long {
    const USER_HZ: c_long = 100;
    /// Read by the first thread, while there is no other.
    static PAGE_BYTES: AtomicI64 = AtomicI64::new(0);
    match name {
        libc::_SC_PAGESIZE => match PAGE_BYTES.load(Ordering::Relaxed) {
            0 => {
                // SAFETY: getauxval(3) reads the vector that the kernel passed at the start.
                let page = unsafe { libc::getauxval(libc::AT_PAGESZ) }.cast_signed();
                PAGE_BYTES.store(page, Ordering::Relaxed);
                page
            }
            page => page,
        },
        libc::_SC_CLK_TCK => USER_HZ,
        _ => -1,
    }
}

/// Returns the address of getauxval(3), or null for every other name.
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
    sym system_value, sym symbol
);
#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".globl sysconf", ".hidden sysconf", "sysconf: b {}", ".globl dlsym", ".hidden dlsym", "dlsym: b {}",
    sym system_value, sym symbol
);
