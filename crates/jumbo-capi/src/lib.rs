//! The library `jumbo` for C and C++: `libjumbo`, with `include/jumbo.h` and `include/jumbo.hpp`.
//!
//! - `pool`, `region`, `file`, `ranges`, `status`: the functions, by the module of `jumbo` that they
//!   offer.
//! - `table`: handles with a generation. `failure`: errno, the message, and no panic beyond this
//!   crate. `sized`: structures that may grow in later versions.
//!
//! A function is a symbol, checks of its arguments, and one call of `jumbo`.
//!
//! Invariant: no value of a handle or a structure crashes the program. An address is the caller's
//! promise, stated by the function.
#![allow(
    unsafe_code,
    clippy::missing_safety_doc,
    reason = "a foreign function interface: the promises are those of C, in the documentation"
)]
#![allow(
    non_camel_case_types,
    reason = "the names of the header, which cbindgen writes from this source"
)]

mod failure;
mod file;
mod gate;
mod pool;
mod ranges;
mod region;
mod sized;
mod status;
mod table;

pub use failure::jumbo_error;
pub use file::*;
pub use pool::*;
pub use ranges::*;
pub use region::*;
pub use status::*;

use std::ffi::{CStr, c_char};

/// Pages of the kernel's hugetlb pool if it has enough, else THPs, and `jumbo_error` has the reason.
/// A pool that opens with 0 pages has THPs.
pub const JUMBO_ANY: u32 = 0;
/// Transparent huge pages, without privilege (Linux 6.1).
pub const JUMBO_THP: u32 = 1;
/// Pages of the kernel's hugetlb pool, or an error.
pub const JUMBO_HUGETLB: u32 = 2;

/// Returns the version of the library, as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}
