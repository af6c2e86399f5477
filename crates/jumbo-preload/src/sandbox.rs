//! The calls by which a program installs a seccomp filter: prctl(2), syscall(2).
//!
//! From then on no system call is made that the program's own allocator would not make, but for advice where the filter
//! lets it pass; see [`jumbo_inside::sandbox`]. Calls of [`sharing`] that a program makes by their number are met here too.

use core::ffi::{c_int, c_long, c_ulong};

use jumbo_inside::reaper::{self, Ids, State};
use jumbo_inside::{gather, heap};
use jumbo_inside::{sandbox, shmem, watch};

use crate::reaper::{auto, renewed};
use crate::{alloc, environment, glibc, mimalloc, next, sharing, threads};

/// prctl(2)'s ways to take privilege from one thread: the workers of [`gather`] would keep it.
const NARROWING: [c_int; 4] = [
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_CAPBSET_DROP,
    libc::PR_CAP_AMBIENT,
    libc::PR_SET_SECUREBITS,
];

/// What seccomp(2) is asked for; the operations behind these only ask.
const SET_MODES: core::ops::RangeInclusive<c_long> =
    SET_MODE_STRICT..=libc::SECCOMP_SET_MODE_FILTER as c_long;
const SET_MODE_STRICT: c_long = libc::SECCOMP_SET_MODE_STRICT as c_long;
/// Success is a descriptor then, and not 0.
const LISTENER: c_long = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER as c_long;

/// prctl(2). Declared with the five arguments that the kernel looks at; the calling conventions of Linux
/// let the callee name them all the same.
///
/// # Safety
/// As for prctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(
    option: c_int,
    first: c_ulong,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
) -> c_int {
    // SAFETY: the same call.
    let call = || unsafe { (next::prctl.get())(option, first, second, third, fourth) };
    if option == libc::PR_SET_SECCOMP {
        let strict = first == c_ulong::from(libc::SECCOMP_MODE_STRICT);
        return entering(
            call,
            |answer| *answer == 0,
            (!strict).then_some(second.cast_signed()),
        );
    }
    if NARROWING.contains(&option) {
        threads::end_ours();
    }
    if option == libc::PR_SET_TSC {
        // mimalloc reads a clock when it gives memory back.
        mimalloc::without_clock();
    }
    let answer = call();
    if answer == 0 {
        controlled(c_long::from(option), first != 0);
    }
    answer
}

/// prctl(2), by whatever name it was called, has answered.
fn controlled(option: c_long, set: bool) {
    if option == c_long::from(libc::PR_SET_CHILD_SUBREAPER) && set && reaper::is_owner() {
        reaper::orphans_are_taken();
    }
}

/// The system calls that are looked at when they are made by their number.
const WATCHED: &[c_long] = &[
    libc::SYS_seccomp,
    libc::SYS_prctl,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_io_setup,
    libc::SYS_capset,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_shmat,
    libc::SYS_flock,
    libc::SYS_fcntl,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_exit,
    libc::SYS_landlock_restrict_self,
];

/// Past the number of each of them.
const NUMBERS: usize = 512;

/// By number: whether it is one of [`WATCHED`].
static IS_WATCHED: [bool; NUMBERS] = {
    let mut is_watched = [false; NUMBERS];
    let mut at = 0;
    while at < WATCHED.len() {
        #[expect(
            clippy::cast_sign_loss,
            reason = "no number is negative; else it is past the end"
        )]
        let number = WATCHED[at] as usize;
        is_watched[number] = true;
        at += 1;
    }
    is_watched
};

/// syscall(2): what libseccomp installs filters with.
///
/// Only the [`WATCHED`] numbers are looked at. Any other call jumps on to the C library's function with registers
/// and stack as they are, because some of them return twice, or on another stack.
///
/// # Safety
/// As for syscall(2).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall() {
    #[cfg(target_arch = "x86_64")]
    core::arch::naked_asm!(
        "endbr64",
        "cmp rdi, {numbers}",
        "jae 2f",
        "lea r11, [rip + {is_watched}]",
        "cmp byte ptr [r11 + rdi], 0",
        "jne {watched}",
        "2:",
        "jmp [rip + {next}]",
        numbers = const NUMBERS,
        is_watched = sym IS_WATCHED,
        watched = sym watched,
        next = sym next::syscall,
    );
    #[cfg(target_arch = "aarch64")]
    core::arch::naked_asm!(
        "hint #34",
        "cmp x0, #{numbers}",
        "b.hs 2f",
        "adrp x16, {is_watched}",
        "add x16, x16, :lo12:{is_watched}",
        "ldrb w16, [x16, x0]",
        "cbnz w16, {watched}",
        "2:",
        "adrp x16, {next}",
        "ldr x16, [x16, :lo12:{next}]",
        "br x16",
        numbers = const NUMBERS,
        is_watched = sym IS_WATCHED,
        watched = sym watched,
        next = sym next::syscall,
    )
}

/// The calls that [`syscall`] looks at, with the arguments as they came.
///
/// # Safety
/// As for syscall(2).
unsafe extern "C" fn watched(
    number: c_long,
    first: c_long,
    second: c_long,
    third: c_long,
    fourth: c_long,
    fifth: c_long,
    sixth: c_long,
) -> c_long {
    // SAFETY: the same call.
    let call =
        || unsafe { (next::syscall.get())(number, first, second, third, fourth, fifth, sixth) };
    match number {
        libc::SYS_seccomp if SET_MODES.contains(&first) => {
            let listens = second & LISTENER != 0;
            let installed = |answer: &c_long| *answer == 0 || listens && *answer > 0;
            entering(call, installed, (first != SET_MODE_STRICT).then_some(third))
        }
        libc::SYS_prctl if first == c_long::from(libc::PR_SET_SECCOMP) => {
            let strict = second == c_long::from(libc::SECCOMP_MODE_STRICT);
            entering(call, |answer| *answer == 0, (!strict).then_some(third))
        }
        libc::SYS_prctl => {
            if NARROWING.map(c_long::from).contains(&first) {
                threads::end_ours();
            }
            if first == c_long::from(libc::PR_SET_TSC) {
                mimalloc::without_clock();
            }
            let answer = call();
            if answer == 0 {
                controlled(first, second != 0);
            }
            answer
        }
        // Of one thread alone, where the C library's own functions tell all of them.
        libc::SYS_capset | libc::SYS_setgroups => {
            threads::end_ours();
            call()
        }
        libc::SYS_setuid
        | libc::SYS_setgid
        | libc::SYS_setreuid
        | libc::SYS_setregid
        | libc::SYS_setresuid
        | libc::SYS_setresgid => {
            threads::end_ours();
            let of_user = [libc::SYS_setuid, libc::SYS_setreuid, libc::SYS_setresuid];
            let ids = if of_user.contains(&number) {
                Ids::User
            } else {
                Ids::Group
            };
            let wanted = match number {
                libc::SYS_setuid | libc::SYS_setgid => [first; 3],
                libc::SYS_setreuid | libc::SYS_setregid => [first, second, second],
                _ => [first, second, third],
            };
            renewed(ids, &wanted.map(|id| int(id).cast_unsigned()), call)
        }
        // Of one thread alone.
        libc::SYS_landlock_restrict_self => {
            threads::end_ours();
            call()
        }
        libc::SYS_exit => {
            let ours = watch::is_watched() || shmem::user::is_serving();
            if ours && rustix::thread::gettid() == rustix::process::getpid() {
                watch::end();
            }
            call()
        }
        libc::SYS_unshare => sharing::unshared(first, call),
        libc::SYS_setns => sharing::joined(call),
        libc::SYS_chroot | libc::SYS_pivot_root => sharing::rooted(call),
        libc::SYS_io_setup => {
            let answer = call();
            if answer == 0 {
                auto::acquire(State::Aio);
            }
            answer
        }
        libc::SYS_shmat => {
            gather::about_to_map_at(size(second), 1);
            let answer = call();
            if answer != -1 {
                auto::acquire(State::SysvSegment);
            }
            answer
        }
        libc::SYS_flock => {
            let answer = call();
            sharing::flocked(answer, int(first), int(second));
            answer
        }
        libc::SYS_fcntl => {
            let answer = call();
            sharing::controlled(answer, int(first), int(second));
            answer
        }
        libc::SYS_mmap => {
            if int(fourth) & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0 {
                gather::about_to_map_at(size(first), size(second));
                shmem::unmapped(size(first), size(second));
            }
            let answer = call();
            if answer != -1 {
                auto::mapped_file(core::ptr::null_mut(), int(fourth), int(fifth));
            }
            answer
        }
        libc::SYS_munmap => {
            shmem::unmapped(size(first), size(second));
            call()
        }
        libc::SYS_mremap => {
            shmem::unmapped(size(first), size(second).max(1));
            if int(fourth) & libc::MREMAP_FIXED != 0 {
                shmem::unmapped(size(fifth), size(third));
            }
            call()
        }
        _ => call(),
    }
}

/// An argument that is an address, or a length.
const fn size(argument: c_long) -> usize {
    argument.cast_unsigned() as usize
}

/// An argument that the kernel takes 32 bits of.
#[expect(clippy::cast_possible_truncation, reason = "as the kernel does")]
const fn int(argument: c_long) -> c_int {
    argument as c_int
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
    heap::before_confinement();
    // A worker that was there before would run in the program's memory without the filter; and from the
    // mark on none is made.
    let is_first = !sandbox::is_untried();
    let entering = sandbox::enter();
    watch::end();
    if is_first {
        gather::confine();
    }
    glibc::follow();
    if alloc::is_diverted() {
        next::start_malloc();
    }
    mimalloc::confine();
    let answer = call();
    if succeeded(&answer) {
        // SAFETY: the kernel has just read the filter there.
        let filter = filter.and_then(|filter| unsafe { steps(filter) });
        entering.installed(filter);
        environment::entered(filter);
    } else {
        entering.refused();
        mimalloc::unconfine();
    }
    glibc::follow();
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
