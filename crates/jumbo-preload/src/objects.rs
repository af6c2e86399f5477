//! The list of loaded objects that the program sees: dl_iterate_phdr(3).
//!
//! A shared AddressSanitizer (gcc's default) ends a program in which another library is loaded first,
//! which could take its functions from it (`verify_asan_link_order`, the sanitizer's flags). This
//! library hands on what it does not serve, so it comes after the object behind it. Unwinders rely on the
//! lock that the C library holds meanwhile: each callback is within the walk.

use core::ffi::{c_int, c_void};

use crate::next;
use crate::symbols::{Object, Visit};

/// A walk of the list, and this library's own entry between the object before it and that behind it.
struct Walk {
    visit: Visit,
    argument: *mut c_void,
    held: Option<(libc::dl_phdr_info, usize)>,
}

/// dl_iterate_phdr(3).
///
/// # Safety
/// As for dl_iterate_phdr(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_iterate_phdr(visit: Visit, argument: *mut c_void) -> c_int {
    let mut walk = Walk {
        visit,
        argument,
        held: None,
    };
    // SAFETY: the walk outlives the call, and the rest is the caller's promise.
    unsafe {
        let ended = (next::dl_iterate_phdr.get())(pass_on, (&raw mut walk).cast());
        match walk.held {
            // It was the last of the list.
            Some((mut own, size)) if ended == 0 => visit(&raw mut own, size, argument),
            _ => ended,
        }
    }
}

/// Calls the program's callback with an object, and with this library after the object behind it.
///
/// # Safety
/// As for the callback of dl_iterate_phdr(3); the argument is a [`Walk`].
unsafe extern "C" fn pass_on(
    object: *mut libc::dl_phdr_info,
    size: usize,
    walk: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let walk = &mut *walk.cast::<Walk>();
        if Object::new(&*object).is_this_library() {
            walk.held = Some((*object, size.min(size_of::<libc::dl_phdr_info>())));
            return 0;
        }
        let ended = (walk.visit)(object, size, walk.argument);
        match walk.held.take() {
            Some((mut own, size)) if ended == 0 => (walk.visit)(&raw mut own, size, walk.argument),
            _ => ended,
        }
    }
}
