//! Drops the reaper's limits, privileges and resources, in this order: [`confine`].
//!
//! The reaper executes memory that the program can write, so until [`super::filter`] is installed
//! it could do what the program could at its start. The user ID stays: a change would reset the
//! program's dumpability, which belongs to the memory.
#![expect(unsafe_code, reason = "hands structures to the kernel")]

use core::sync::atomic::Ordering;

use super::control::{CONTROL, MAX_WORKERS};
use super::filter::LAST_DESCRIPTOR;
use super::identity;
use super::raw::{self, plain};
use jumbo_sys::{leave_descriptors, stand_back};

/// Limit on CPU time of all threads together, after which the kernel kills the reaper and frees the
/// rest: a base, and a second for each two GiB of memory and swap, several times the cost of base
/// pages. It bounds code that the program left in the memory.
const BASE_CPU_SECONDS: u64 = 10;
const GIB_PER_CPU_SECOND: u64 = 2;

/// Descriptors of the reaper, and one for each thread if the kernel must limit their number.
#[expect(clippy::cast_possible_truncation, reason = "a small number")]
const MAX_DESCRIPTORS: u32 = LAST_DESCRIPTOR + MAX_WORKERS as u32;

/// Name of the reaper in ps(1).
pub const NAME: &core::ffi::CStr = c"jumbo-reaper";

/// Makes a call that writes nothing to memory.
fn set(number: libc::c_long, arguments: [usize; 3]) -> isize {
    // SAFETY: each call in this file sets an attribute of the process, from numbers or memory that
    // it reads.
    unsafe { plain(number, arguments) }
}

/// Confines the calling process; false if a step fails.
pub(super) fn confine() -> bool {
    // `is_fixed` depends on the capabilities that are dropped below.
    let is_fixed = CONTROL.identity_is_fixed.load(Ordering::Relaxed) && identity::is_fixed();
    CONTROL.counts_threads.store(!is_fixed, Ordering::Relaxed);
    // Limits first: raising a hard limit of 0 needs a capability.
    limit_core(is_fixed)
        && limit_to(libc::RLIMIT_CPU, max_cpu_seconds())
        && limit_to(libc::RLIMIT_NOFILE, MAX_DESCRIPTORS.into())
        && drop_capabilities()
        && prctl(libc::PR_SET_NO_NEW_PRIVS, 1)
        // An empty table: a copy would keep pipes open for a moment.
        && leave_descriptors().is_ok()
        && set(libc::SYS_chdir, [c"/".as_ptr().expose_provenance(), 0, 0]) == 0
        && prctl(libc::PR_SET_NAME, NAME.as_ptr().expose_provenance())
        // The program's waiter runs first: the reaper's threads would take all CPUs at the
        // program's end, and the waiter would get one only after a slice. Freeing memory needs no
        // real-time policy.
        && stand_back(&[libc::SCHED_OTHER, libc::SCHED_FIFO, libc::SCHED_RR])
        && use_initial_cpus()
}

/// Runs on all CPUs of the program at its start, if still allowed: the thread that starts the
/// reaper may be bound to one.
fn use_initial_cpus() -> bool {
    let (cpus, size) = (&CONTROL.cpus, size_of_val(&CONTROL.cpus));
    if cpus.iter().any(|word| word.load(Ordering::Relaxed) != 0) {
        let pointer = cpus.as_ptr().expose_provenance();
        set(libc::SYS_sched_setaffinity, [0, size, pointer]);
    }
    true
}

fn prctl(option: libc::c_int, value: usize) -> bool {
    set(libc::SYS_prctl, [option.cast_unsigned() as usize, value, 0]) == 0
}

/// Clears the effective and inheritable capabilities, and so the ambient ones. The permitted ones
/// stay: only processes of the same user that have all of them may attach (ptrace(2),
/// /proc/PID/mem) and reach the program's memory. Under a filter without capset(2) the reaper
/// cannot use them.
fn drop_capabilities() -> bool {
    let Some(sets) = identity::capabilities() else {
        return false;
    };
    let header = identity::CAPABILITY_HEADER;
    let permitted = identity::permitted_alone(sets);
    let pointers = [
        (&raw const header).expose_provenance(),
        (&raw const permitted).expose_provenance(),
        0,
    ];
    set(libc::SYS_capset, pointers) == 0
}

/// Prevents a second core dump of the memory, owned by the reaper's user: by a limit of 1 byte,
/// since 0 does not apply to a pipe in core_pattern (core(5)).
///
/// Raising a hard limit of 0 needs CAP_SYS_RESOURCE. Without it a pipe may get a core, but no file.
/// That is harmless if the program cannot change its user: it can dump its own core at any time.
fn limit_core(is_fixed: bool) -> bool {
    set_limit(libc::RLIMIT_CORE, 1) || is_fixed
}

/// Returns the limit on CPU time.
fn max_cpu_seconds() -> u64 {
    let mut info = core::mem::MaybeUninit::<libc::sysinfo>::zeroed();
    let to = info.as_mut_ptr().expose_provenance();
    // SAFETY: the call writes only to `info`.
    unsafe { plain(libc::SYS_sysinfo, [to, 0, 0]) };
    // SAFETY: any bytes are valid.
    let info = unsafe { info.assume_init() };
    let memory = info.totalram.saturating_add(info.totalswap);
    let gibs = memory.saturating_mul(u64::from(info.mem_unit)) >> 30;
    BASE_CPU_SECONDS + gibs / GIB_PER_CPU_SECOND
}

/// Sets a limit to `value`, or to the program's hard limit if that is lower.
fn limit_to(resource: libc::__rlimit_resource_t, value: u64) -> bool {
    prlimit(resource, None).is_some_and(|max| set_limit(resource, value.min(max)))
}

/// Sets the soft and the hard limit.
fn set_limit(resource: libc::__rlimit_resource_t, value: u64) -> bool {
    prlimit(resource, Some(value)).is_some()
}

/// prlimit(2): sets both limits to `value` if there is one. Returns the previous hard limit.
fn prlimit(resource: libc::__rlimit_resource_t, value: Option<u64>) -> Option<u64> {
    let limits = [value.unwrap_or(0); 2];
    let new = value.map_or(0, |_| (&raw const limits).expose_provenance());
    let mut before = [0u64; 2];
    let to = (&raw mut before).expose_provenance();
    // SAFETY: the kernel reads `limits` and writes `before`, which are a `struct rlimit64` each.
    let result = unsafe { raw::call(libc::SYS_prlimit64, [0, resource as usize, new, to, 0, 0]) };
    (result == 0).then_some(before[1])
}
