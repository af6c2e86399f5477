//! The doors of the calls by which a program confines itself: prctl(2), seccomp(2).
//!
//! Behind a filter no system call is made that the program's own allocator would not make, but for advice where the filter
//! lets it pass; see [`jumbo_inside::sandbox`].

use core::ffi::{c_int, c_long, c_uint, c_ulong};

use jumbo_inside::events::Mechanism as _;
use jumbo_inside::{reaper, sandbox};

use crate::mechanisms::All;
use crate::{environment, mimalloc};

/// prctl(2)'s ways to take privilege from one thread: threads of ours would keep it.
const NARROWING: [c_int; 4] = [
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_CAPBSET_DROP,
    libc::PR_CAP_AMBIENT,
    libc::PR_SET_SECUREBITS,
];

/// The operations of seccomp(2) that install; the operations behind these only ask. The kernel takes 32 bits.
const SET_MODES: core::ops::RangeInclusive<c_uint> =
    libc::SECCOMP_SET_MODE_STRICT..=libc::SECCOMP_SET_MODE_FILTER;

/// prctl(2). Declared with the five arguments that the kernel looks at; the calling conventions of Linux
/// let the callee name them all the same.
///
/// # Safety
/// As for prctl(2).
pub(crate) unsafe fn control<T: From<c_int> + PartialEq>(
    call: impl Fn(c_int, c_ulong, c_ulong, c_ulong, c_ulong) -> T,
    option: c_int,
    first: c_ulong,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
) -> T {
    let call = || call(option, first, second, third, fourth);
    if option == libc::PR_SET_SECCOMP {
        let strict = first == c_ulong::from(libc::SECCOMP_MODE_STRICT);
        let filter = (!strict).then_some(second.cast_signed());
        return entering(call, |answer| *answer == T::from(0), filter);
    }
    if NARROWING.contains(&option) {
        All::changing_privilege();
    }
    if option == libc::PR_SET_TSC {
        // mimalloc reads a clock when it gives memory back.
        mimalloc::without_clock();
    }
    let answer = call();
    let orphans = option == libc::PR_SET_CHILD_SUBREAPER && first != 0;
    if answer == T::from(0) && orphans && reaper::is_owner() {
        reaper::orphans_are_taken();
    }
    answer
}

/// seccomp(2), which the C library has no function for: what libseccomp installs filters with.
pub(crate) fn install(
    call: impl Fn() -> c_long,
    operation: c_uint,
    flags: c_uint,
    filter: c_long,
) -> c_long {
    if !SET_MODES.contains(&operation) {
        return call();
    }
    // Success is a descriptor then, and not 0.
    let listens = c_ulong::from(flags) & libc::SECCOMP_FILTER_FLAG_NEW_LISTENER != 0;
    let installed = |answer: &c_long| *answer == 0 || listens && *answer > 0;
    entering(
        call,
        installed,
        (operation != libc::SECCOMP_SET_MODE_STRICT).then_some(filter),
    )
}

/// Makes a call that installs a filter where it succeeds: the one at that address, or the strict mode's.
fn entering<T>(
    call: impl FnOnce() -> T,
    succeeded: impl FnOnce(&T) -> bool,
    filter: Option<c_long>,
) -> T {
    if filter == Some(0) {
        // The kernel refuses it: so a program asks whether there are filters.
        return call();
    }
    All::before_confinement();
    let is_first = !sandbox::is_entered();
    let entering = sandbox::enter();
    All::confining(is_first);
    let answer = call();
    let is_installed = succeeded(&answer);
    if is_installed {
        // SAFETY: the kernel has just read the filter there.
        let filter = filter.and_then(|filter| unsafe { steps(filter) });
        entering.installed(filter);
        environment::entered(filter);
    } else {
        entering.refused();
    }
    All::confined(is_installed);
    answer
}

/// The steps of a filter, as prctl(2) and seccomp(2) take it.
///
/// # Safety
/// The kernel has taken it, and the program leaves it alone for now.
unsafe fn steps<'a>(filter: c_long) -> Option<&'a [libc::sock_filter]> {
    let filter =
        core::ptr::with_exposed_provenance::<libc::sock_fprog>(usize::try_from(filter).ok()?);
    // SAFETY: the caller's promise: the kernel takes none that is null, or cannot be read; it need not be aligned.
    unsafe {
        let filter = filter.read_unaligned();
        let is_aligned = filter.filter.is_aligned();
        is_aligned.then(|| core::slice::from_raw_parts(filter.filter, filter.len.into()))
    }
}
