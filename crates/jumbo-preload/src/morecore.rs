//! Growth of the heap in whole huge pages, for glibc before 2.34: [`start`].
//!
//! That glibc has no tunable to advise its heap, and grows it by 132 KiB: the first touch precedes
//! the mapping of the rest of the huge page. But its malloc(3) calls a hook (`__morecore`) for
//! sbrk(2). The hook here moves the break to the end of a huge page, as the tunable of later
//! versions does, advises the step, and returns the requested part of it.
//!
//! glibc calls the hook with the lock of its main arena held, or while there is one thread.

use core::ffi::c_void;
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use jumbo_inside::density::program_break;
use jumbo_inside::events::Mechanism as _;
use jumbo_inside::heap::maps;
use libc::MAP_FAILED;

use crate::mechanisms::All;
use crate::own_stack::on;
use crate::{next, symbols};

static PMD_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Program break as reported to glibc.
static REPORTED_BREAK: AtomicUsize = AtomicUsize::new(0);
/// Program break of the process.
static BREAK: AtomicUsize = AtomicUsize::new(0);

/// Installs the hook, unless the C library has none or the program has installed its own.
pub(crate) fn start(pmd: usize) {
    let mut hook = null_mut::<*mut c_void>();
    let mut default = null_mut();
    symbols::each(&mut |object| {
        let find = |name| object.symbol(name).map_or(null_mut(), |(at, _)| at);
        (hook, default) = (find(c"__morecore").cast(), find(c"__default_morecore"));
        !hook.is_null() && !default.is_null()
    });
    // SAFETY: glibc's variable; the process has one thread as it starts, and glibc reads the
    // variable when its heap grows.
    unsafe {
        if !hook.is_null() && hook.read() == default {
            PMD_BYTES.store(pmd, Relaxed);
            hook.write(more as *mut c_void);
            program_break::is_followed_otherwise();
        }
    }
}

/// sbrk(2) for glibc's malloc; null on failure.
unsafe extern "C" fn more(increment: isize) -> *mut c_void {
    on(|| step(increment))
}

fn step(increment: isize) -> *mut c_void {
    // SAFETY: only glibc's heap ends there; a step down frees only memory that glibc returned.
    let sbrk = |by| unsafe { (next::sbrk.get())(by) };
    let now = sbrk(0).addr();
    if now != BREAK.load(Relaxed) {
        // The first call, or the program has moved the break.
        REPORTED_BREAK.store(now, Relaxed);
        BREAK.store(now, Relaxed);
    }
    let before = REPORTED_BREAK.load(Relaxed);
    let pmd = PMD_BYTES.load(Relaxed);
    let Some(after) = before.checked_add_signed(increment) else {
        return null_mut();
    };
    if after > now {
        let move_to = |to: usize| sbrk((to - now).cast_signed()) != MAP_FAILED;
        let end = after.next_multiple_of(pmd);
        let end = match move_to(end) {
            true => end,
            // RLIMIT_DATA may allow the smaller step.
            false if move_to(after) => after,
            false => return null_mut(),
        };
        BREAK.store(end, Relaxed);
        maps::advise_mapping(now, end - now, true);
    } else if now - after >= 2 * pmd {
        let end = after.next_multiple_of(pmd);
        All::unmapping(end, now - end);
        if sbrk((end.wrapping_sub(now)).cast_signed()) != MAP_FAILED {
            BREAK.store(end, Relaxed);
        }
    }
    REPORTED_BREAK.store(after, Relaxed);
    with_exposed_provenance_mut(before)
}
