//! Taking everything away from the sibling that it could be made to use: [`confine`].
//!
//! In this order: its limits, its privilege, then what it holds. It executes memory that the program can write, so
//! until [`super::filter`] is installed it could do what the program could at its start. Nothing here
//! changes the user ID: that would change the program's dumpability, which belongs to the memory.
#![expect(unsafe_code, reason = "hands structures to the kernel")]

use core::sync::atomic::Ordering;

use super::control::{CONTROL, MAX_WORKERS};
use super::filter::LAST_DESCRIPTOR;
use super::identity;
use super::raw::{self, plain};
use crate::sys::{leave_descriptors, stand_back};

/// The CPU time of a sibling, all its threads together, after which the kernel kills it and frees what is
/// left: some seconds, and this much for each GiB of the host's memory and swap, several times what base pages
/// take. It bounds code of the program's choice that runs in a sibling whose program is gone.
const SOME_SECONDS: u64 = 10;
const GIBS_A_SECOND: u64 = 2;

/// The sibling's own descriptors, and one for each thread that it makes where the kernel is to count them.
#[expect(clippy::cast_possible_truncation, reason = "a handful")]
const DESCRIPTORS: u32 = LAST_DESCRIPTOR + MAX_WORKERS as u32;

/// How the sibling is called in ps(1).
pub const NAME: &core::ffi::CStr = c"jumbo-reaper";

/// The calls of this file that write nothing to memory.
fn reads(number: libc::c_long, arguments: [usize; 3]) -> isize {
    // SAFETY: each call here sets something of the process's, from numbers or from what a pointer points to.
    unsafe { plain(number, arguments) }
}

/// False where a step is refused: the caller ends.
pub(super) fn confine() -> bool {
    // Before its capabilities are gone, which say so.
    let is_fixed = CONTROL.identity_is_fixed.load(Ordering::Relaxed) && identity::is_fixed();
    CONTROL.counts_threads.store(!is_fixed, Ordering::Relaxed);
    // Limits first: to raise a hard one of 0 takes a capability.
    refuse_core(is_fixed)
        && at_most(libc::RLIMIT_CPU, seconds())
        && at_most(libc::RLIMIT_NOFILE, DESCRIPTORS.into())
        && drop_capabilities()
        && plain_prctl(libc::PR_SET_NO_NEW_PRIVS, 1)
        // In a table of its own, which never held what it closes: no pipe stays open a moment longer.
        && leave_descriptors().is_ok()
        && reads(libc::SYS_chdir, [c"/".as_ptr().expose_provenance(), 0, 0]) == 0
        && plain_prctl(libc::PR_SET_NAME, NAME.as_ptr().expose_provenance())
        // What waits for the program goes first: at the moment of its end the sibling's threads
        // would take all CPUs, and the waiter get one back only after a slice. And giving memory
        // back is no business of real time.
        && stand_back(&[libc::SCHED_OTHER, libc::SCHED_FIFO, libc::SCHED_RR])
        && run_anywhere()
}

/// On all CPUs that the program was started on: the thread that starts the sibling may be bound to one.
/// Where that is not allowed any more, it stays where it is.
fn run_anywhere() -> bool {
    let (cpus, size) = (&CONTROL.cpus, size_of_val(&CONTROL.cpus));
    if cpus.iter().any(|word| word.load(Ordering::Relaxed) != 0) {
        let pointer = cpus.as_ptr().expose_provenance();
        reads(libc::SYS_sched_setaffinity, [0, size, pointer]);
    }
    true
}

fn plain_prctl(option: libc::c_int, value: usize) -> bool {
    reads(libc::SYS_prctl, [option.cast_unsigned() as usize, value, 0]) == 0
}

/// capset(2) of none that is in effect or inherited; the ambient ones go with the inheritable ones. Those that are
/// permitted stay, of no use behind a filter without capset(2): ptrace(2) and /proc/PID/mem let a process of the same
/// user in that has all of them, and the memory is the program's.
fn drop_capabilities() -> bool {
    let Some(sets) = identity::capabilities() else {
        return false;
    };
    let header = identity::CAPABILITIES;
    let permitted = identity::permitted_alone(sets);
    let pointers = [
        (&raw const header).expose_provenance(),
        (&raw const permitted).expose_provenance(),
        0,
    ];
    reads(libc::SYS_capset, pointers) == 0
}

/// No second core of the same memory, which would bear the sibling's user: 1 byte, since 0 means "none" for
/// files alone, and a pipe in core_pattern is given a core all the same (core(5)).
///
/// To raise a hard limit of 0 takes CAP_SYS_RESOURCE. Who lacks it has no core in a file, and may have one in
/// a pipe, now or once core_pattern is changed. That is harmless where the program can never be another
/// user than its sibling: it would be a core that the program can have of itself at any time.
fn refuse_core(is_fixed: bool) -> bool {
    limit(libc::RLIMIT_CORE, 1) || is_fixed
}

/// The CPU time that it may have.
fn seconds() -> u64 {
    let mut info = core::mem::MaybeUninit::<libc::sysinfo>::zeroed();
    // SAFETY: the call writes to `info` alone.
    unsafe {
        plain(
            libc::SYS_sysinfo,
            [info.as_mut_ptr().expose_provenance(), 0, 0],
        )
    };
    // SAFETY: zeroes are valid, and so is what the kernel wrote over them.
    let info = unsafe { info.assume_init() };
    let memory = info.totalram.saturating_add(info.totalswap);
    let gibs = memory.saturating_mul(u64::from(info.mem_unit)) >> 30;
    SOME_SECONDS + gibs / GIBS_A_SECOND
}

/// A limit of so much, or of what the program may have itself.
fn at_most(resource: libc::__rlimit_resource_t, value: u64) -> bool {
    let mut now = libc::rlimit64 {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let arguments = [
        0,
        resource as usize,
        0,
        (&raw mut now).expose_provenance(),
        0,
        0,
    ];
    // SAFETY: the kernel writes one limit to `now`.
    let known = unsafe { raw::call(libc::SYS_prlimit64, arguments) == 0 };
    known && limit(resource, value.min(now.rlim_max))
}

/// Sets a limit, the soft and the hard one.
fn limit(resource: libc::__rlimit_resource_t, value: u64) -> bool {
    let limit = libc::rlimit64 {
        rlim_cur: value,
        rlim_max: value,
    };
    let arguments = [
        0,
        resource as usize,
        (&raw const limit).expose_provenance(),
        0,
        0,
        0,
    ];
    // SAFETY: the kernel reads one limit; there is nothing for it to write.
    unsafe { raw::call(libc::SYS_prlimit64, arguments) == 0 }
}
