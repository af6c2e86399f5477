//! The list of loaded objects that the program sees: dl_iterate_phdr(3).
//!
//! A shared AddressSanitizer (gcc's default) ends a program in which another library is loaded first,
//! which could take its functions from it (`verify_asan_link_order`, the sanitizer's flags). This
//! library hands on what it does not serve, so it comes last in the list, as a library that the program
//! opened would.

use core::ffi::{c_int, c_void};

use crate::next;
use crate::symbols::{Object, Visit};

/// A walk of the list, and this library's own entry once it was passed.
struct Walk {
    visit: Visit,
    argument: *mut c_void,
    own: Option<(libc::dl_phdr_info, usize)>,
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
        own: None,
    };
    // SAFETY: the walk outlives the call, and the rest is the caller's promise.
    unsafe {
        let ended = (next::dl_iterate_phdr.get())(pass_on, (&raw mut walk).cast());
        match walk.own {
            Some((mut own, size)) if ended == 0 => visit(&raw mut own, size, argument),
            _ => ended,
        }
    }
}

/// Calls the program's callback with each object but this library.
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
        if walk.own.is_none() && Object::new(&*object).is_this_library() {
            walk.own = Some((*object, size.min(size_of::<libc::dl_phdr_info>())));
            return 0;
        }
        (walk.visit)(object, size, walk.argument)
    }
}
