//! Taking everything away from the sibling that it could be made to use: [`confine`].
//!
//! In this order: privilege first, then what it holds. It executes memory that the program can write, so
//! until [`super::filter`] is installed it could do what the program could at its start. Nothing here
//! changes the user ID: that would change the program's dumpability, which belongs to the memory.
#![expect(unsafe_code, reason = "hands structures to the kernel")]

use super::raw::{self, plain};

/// `CLOSE_RANGE_UNSHARE` of close_range(2), Linux 5.9.
const CLOSE_RANGE_UNSHARE: usize = 1 << 1;
/// `_LINUX_CAPABILITY_VERSION_3` of capset(2), Linux 2.6.26.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

/// How the sibling is called in ps(1).
const NAME: &std::ffi::CStr = c"jumbo-reaper";

/// False where a step is refused: the caller ends.
pub(super) fn confine() -> bool {
    empty_capabilities()
        && plain_prctl(libc::PR_SET_NO_NEW_PRIVS, 1)
        // In a table of its own, which never held what it closes: nobody's pipe stays open for a moment.
        && plain(
            libc::SYS_close_range,
            [0, u32::MAX as usize, CLOSE_RANGE_UNSHARE],
        ) == 0
        && plain(libc::SYS_chdir, [c"/".as_ptr().expose_provenance(), 0, 0]) == 0
        && refuse_core()
        && plain_prctl(libc::PR_SET_NAME, NAME.as_ptr().expose_provenance())
}

fn plain_prctl(option: libc::c_int, value: usize) -> bool {
    plain(libc::SYS_prctl, [option.cast_unsigned() as usize, value, 0]) == 0
}

/// capset(2) of none at all; the ambient ones go with the inheritable ones.
fn empty_capabilities() -> bool {
    let header = [CAPABILITY_VERSION, 0];
    let none = [0u32; 6];
    let pointers = [
        (&raw const header).expose_provenance(),
        (&raw const none).expose_provenance(),
        0,
    ];
    plain(libc::SYS_capset, pointers) == 0
}

/// No second core of the same memory. With 1 byte, since 0 means "none" for files alone: a pipe in
/// core_pattern is given a core all the same (core(5)).
fn refuse_core() -> bool {
    let limit = libc::rlimit64 {
        rlim_cur: 1,
        rlim_max: 1,
    };
    let arguments = [
        0,
        libc::RLIMIT_CORE as usize,
        (&raw const limit).expose_provenance(),
        0,
        0,
        0,
    ];
    // SAFETY: the kernel reads one limit; there is nothing for it to write.
    unsafe { raw::call(libc::SYS_prlimit64, arguments) == 0 }
}
