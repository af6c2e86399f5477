//! Handlers of the calls by which a program confines itself: prctl(2), seccomp(2).
//!
//! Under a filter the library makes only the system calls of the program's own allocator, and
//! advice if the filter allows it; see [`jumbo_inside::sandbox`].

use core::ffi::{c_int, c_long, c_uint, c_ulong};

use jumbo_inside::events::Mechanism as _;
use jumbo_inside::{reaper, sandbox};

use crate::environment;
use crate::mechanisms::All;
use crate::own_stack::{self, on};

/// Options of prctl(2) that drop a privilege of one thread: jumbo's threads would keep it.
const PRIVILEGE_OPTIONS: [c_int; 4] = [
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_CAPBSET_DROP,
    libc::PR_CAP_AMBIENT,
    libc::PR_SET_SECUREBITS,
];

/// Operations of seccomp(2) that install a filter; the later ones only query. The kernel takes 32
/// bits.
const SET_MODES: core::ops::RangeInclusive<c_uint> =
    libc::SECCOMP_SET_MODE_STRICT..=libc::SECCOMP_SET_MODE_FILTER;

/// prctl(2).
pub(crate) fn control<T: From<c_int> + PartialEq>(
    option: c_int,
    first: c_ulong,
    second: c_ulong,
    call: impl FnOnce() -> T,
) -> T {
    if option == libc::PR_SET_SECCOMP {
        let strict = first == c_ulong::from(libc::SECCOMP_MODE_STRICT);
        let filter = (!strict).then_some(second.cast_signed());
        return entering(call, |answer| *answer == T::from(0), filter);
    }
    if PRIVILEGE_OPTIONS.contains(&option) {
        on(All::changing_privilege);
    }
    let answer = call();
    let is_subreaper = option == libc::PR_SET_CHILD_SUBREAPER && first != 0;
    if answer == T::from(0) && is_subreaper && reaper::is_owner() {
        on(reaper::set_subreaper);
    }
    answer
}

/// seccomp(2), without a function in the C library; libseccomp installs filters with it.
pub(crate) fn install(
    call: impl Fn() -> c_long,
    operation: c_uint,
    flags: c_uint,
    filter: c_long,
) -> c_long {
    if !SET_MODES.contains(&operation) {
        return call();
    }
    // With a listener, success is a descriptor instead of 0.
    let listens = c_ulong::from(flags) & libc::SECCOMP_FILTER_FLAG_NEW_LISTENER != 0;
    let installed = |answer: &c_long| *answer == 0 || listens && *answer > 0;
    entering(
        call,
        installed,
        (operation != libc::SECCOMP_SET_MODE_STRICT).then_some(filter),
    )
}

/// Makes a call that installs the filter at that address, or strict mode, if it succeeds.
fn entering<T>(
    call: impl FnOnce() -> T,
    succeeded: impl FnOnce(&T) -> bool,
    filter: Option<c_long>,
) -> T {
    if filter == Some(0) {
        // The kernel refuses null: a probe for seccomp support.
        return call();
    }
    own_stack::prepare();
    // Together: from `enter` on a thread may stay on its own stack.
    let entering = on(|| {
        All::before_confinement();
        let is_first = !sandbox::is_entered();
        let entering = sandbox::enter();
        All::confining(is_first);
        entering
    });
    let answer = call();
    let is_installed = succeeded(&answer);
    if is_installed {
        // SAFETY: the kernel has just read the filter there.
        let filter = filter.and_then(|filter| unsafe { steps(filter) });
        if let Some(filter) = filter {
            entering.accepted(filter);
        }
        on(|| {
            entering.installed(filter);
            environment::entered(filter);
        });
    } else {
        entering.refused();
    }
    on(|| All::confined(is_installed));
    answer
}

/// Returns the instructions of a filter (`struct sock_fprog`).
///
/// # Safety
/// The kernel has accepted the filter, and the program does not change it for now.
unsafe fn steps<'a>(filter: c_long) -> Option<&'a [libc::sock_filter]> {
    let filter =
        core::ptr::with_exposed_provenance::<libc::sock_fprog>(usize::try_from(filter).ok()?);
    // SAFETY: the caller's promise: the kernel accepts no null or unreadable filter; it need not be
    // aligned.
    unsafe {
        let filter = filter.read_unaligned();
        let is_aligned = filter.filter.is_aligned();
        is_aligned.then(|| core::slice::from_raw_parts(filter.filter, filter.len.into()))
    }
}
