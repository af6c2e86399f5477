//! Hidden definitions of sysconf(3), dlsym(3) and getauxval(3) for this library and rustix.
//!
//! The thread of [`jumbo_inside::watch`] has no thread pointer of the C library, and musl's
//! sysconf(3) may read it (stack protector). dlsym(3) is not in every C library. A sanitizer may
//! define getauxval(3), and need not be ready for a call before the program's start. The program's
//! own calls are not affected.

use core::ffi::{CStr, c_char, c_int, c_long, c_ulong, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

use jumbo_inside::heap::BASE_PAGE;

/// Entry of the auxiliary vector: type and value.
type Auxiliary = [c_ulong; 2];

/// Auxiliary vector that the kernel passed at the start; null before [`start`].
static AUXILIARY: AtomicPtr<Auxiliary> = AtomicPtr::new(null_mut());

/// Finds the auxiliary vector behind the environment.
///
/// # Safety
/// `environment` is null, or the vector that the kernel passed to the process; the dynamic loader
/// may have removed entries.
pub(crate) unsafe fn start(environment: *const *const c_char) {
    let mut at = environment;
    // SAFETY: the caller's promise. A null pointer ends the environment, more of them stand for
    // removed entries, and the type of the vector's first entry is not zero.
    unsafe {
        while !at.is_null() && !at.read().is_null() {
            at = at.add(1);
        }
        while !at.is_null() && at.read().is_null() {
            at = at.add(1);
        }
    }
    AUXILIARY.store(at.cast::<Auxiliary>().cast_mut(), Ordering::Relaxed);
}

/// Returns a value of the auxiliary vector: getauxval(3), with `None` for a missing entry.
pub(crate) fn auxiliary(kind: c_ulong) -> Option<c_ulong> {
    let mut entry: *const Auxiliary = AUXILIARY.load(Ordering::Relaxed);
    if entry.is_null() {
        return None;
    }
    // SAFETY: an entry of type 0 ends the vector, which is on the stack of the first thread.
    while let [found @ 1..=c_ulong::MAX, value] = unsafe { entry.read() } {
        if found == kind {
            return Some(value);
        }
        // SAFETY: this was not the last entry.
        entry = unsafe { entry.add(1) };
    }
    None
}

unsafe extern "C" fn auxiliary_value(kind: c_ulong) -> c_ulong {
    auxiliary(kind).unwrap_or(0)
}

/// Returns the page size, the ticks per second, or -1 for every other name.
unsafe extern "C" fn system_value(name: c_int) -> c_long {
    const USER_HZ: c_long = 100;
    match name {
        // jumbo is for base pages of that size; the constructor compares.
        libc::_SC_PAGESIZE => auxiliary(libc::AT_PAGESZ)
            .map_or(BASE_PAGE.cast_signed() as c_long, c_ulong::cast_signed),
        libc::_SC_CLK_TCK => USER_HZ,
        _ => -1,
    }
}

/// Returns the address of [`auxiliary_value`] as getauxval(3), or null for every other name.
unsafe extern "C" fn symbol(_handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: rustix passes a terminated name.
    match unsafe { CStr::from_ptr(name) } == c"getauxval" {
        true => auxiliary_value as *mut c_void,
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
