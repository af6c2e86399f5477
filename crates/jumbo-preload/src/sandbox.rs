//! The calls by which a program installs a seccomp filter: prctl(2), syscall(2).
//!
//! From then on no system call is made that the program does not make itself; see
//! [`jumbo::kernel::sandbox`]. Calls of [`sharing`] that a program makes by their number are met here too.

use std::ffi::{c_int, c_long, c_ulong};

use jumbo::gather;
use jumbo::kernel::sandbox;
use jumbo::reaper::State;

use crate::reaper::auto;
use crate::{next, sharing};

/// prctl(2)'s ways to take privilege from one thread: the workers of [`gather`] would keep it.
const NARROWING: [c_int; 4] = [
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_CAPBSET_DROP,
    libc::PR_CAP_AMBIENT,
    libc::PR_SET_SECUREBITS,
];

/// SECCOMP_SET_MODE_STRICT and SECCOMP_SET_MODE_FILTER of seccomp(2); the operations behind only ask.
const SET_MODES: std::ops::RangeInclusive<c_long> = 0..=1;

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
        return entering(call, |answer| *answer == 0);
    }
    if NARROWING.contains(&option) {
        gather::retire();
    }
    call()
}

/// syscall(2): what libseccomp installs filters with.
///
/// Only a few numbers are looked at. Any other call jumps on to the C library's function with registers
/// and stack as they are, because some of them return twice, or on another stack.
///
/// # Safety
/// As for syscall(2).
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall() {
    std::arch::naked_asm!(
        "endbr64",
        "cmp rdi, {seccomp}",
        "je {watched}",
        "cmp rdi, {prctl}",
        "je {watched}",
        "cmp rdi, {unshare}",
        "je {watched}",
        "cmp rdi, {setns}",
        "je {watched}",
        "cmp rdi, {io_setup}",
        "je {watched}",
        "cmp rdi, {capset}",
        "je {watched}",
        "cmp rdi, {chroot}",
        "je {watched}",
        "cmp rdi, {pivot_root}",
        "je {watched}",
        "cmp rdi, {shmat}",
        "je {watched}",
        "cmp rdi, {flock}",
        "je {watched}",
        "cmp rdi, {fcntl}",
        "je {watched}",
        "cmp rdi, {mmap}",
        "je {watched}",
        "jmp [rip + {next}]",
        seccomp = const libc::SYS_seccomp,
        prctl = const libc::SYS_prctl,
        unshare = const libc::SYS_unshare,
        setns = const libc::SYS_setns,
        io_setup = const libc::SYS_io_setup,
        capset = const libc::SYS_capset,
        chroot = const libc::SYS_chroot,
        pivot_root = const libc::SYS_pivot_root,
        shmat = const libc::SYS_shmat,
        flock = const libc::SYS_flock,
        fcntl = const libc::SYS_fcntl,
        mmap = const libc::SYS_mmap,
        watched = sym watched,
        next = sym next::syscall,
    )
}

/// syscall(2): what libseccomp installs filters with.
///
/// Only a few numbers are looked at. Any other call jumps on to the C library's function with registers
/// and stack as they are, because some of them return twice, or on another stack.
///
/// # Safety
/// As for syscall(2).
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall() {
    std::arch::naked_asm!(
        "hint #34",
        "cmp x0, #{seccomp}",
        "b.eq {watched}",
        "cmp x0, #{prctl}",
        "b.eq {watched}",
        "cmp x0, #{unshare}",
        "b.eq {watched}",
        "cmp x0, #{setns}",
        "b.eq {watched}",
        "cmp x0, #{io_setup}",
        "b.eq {watched}",
        "cmp x0, #{capset}",
        "b.eq {watched}",
        "cmp x0, #{chroot}",
        "b.eq {watched}",
        "cmp x0, #{pivot_root}",
        "b.eq {watched}",
        "cmp x0, #{shmat}",
        "b.eq {watched}",
        "cmp x0, #{flock}",
        "b.eq {watched}",
        "cmp x0, #{fcntl}",
        "b.eq {watched}",
        "cmp x0, #{mmap}",
        "b.eq {watched}",
        "adrp x16, {next}",
        "ldr x16, [x16, :lo12:{next}]",
        "br x16",
        seccomp = const libc::SYS_seccomp,
        prctl = const libc::SYS_prctl,
        unshare = const libc::SYS_unshare,
        setns = const libc::SYS_setns,
        io_setup = const libc::SYS_io_setup,
        capset = const libc::SYS_capset,
        chroot = const libc::SYS_chroot,
        pivot_root = const libc::SYS_pivot_root,
        shmat = const libc::SYS_shmat,
        flock = const libc::SYS_flock,
        fcntl = const libc::SYS_fcntl,
        mmap = const libc::SYS_mmap,
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
        libc::SYS_seccomp if SET_MODES.contains(&first) => entering(call, |answer| *answer == 0),
        libc::SYS_prctl if first == c_long::from(libc::PR_SET_SECCOMP) => {
            entering(call, |answer| *answer == 0)
        }
        libc::SYS_prctl if NARROWING.map(c_long::from).contains(&first) => {
            gather::retire();
            call()
        }
        libc::SYS_capset => {
            gather::retire();
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
            let answer = call();
            if answer != -1 {
                auto::mapped_file(std::ptr::null_mut(), int(fourth), int(fifth));
            }
            answer
        }
        _ => call(),
    }
}

/// An argument that the kernel takes 32 bits of.
#[expect(clippy::cast_possible_truncation, reason = "as the kernel does")]
const fn int(argument: c_long) -> c_int {
    argument as c_int
}

/// Makes a call that installs a filter where it succeeds.
fn entering<T>(call: impl FnOnce() -> T, succeeded: impl FnOnce(&T) -> bool) -> T {
    // A worker that was there before would run in the program's memory without the filter; and from the
    // mark on none is made.
    sandbox::enter();
    gather::retire();
    let answer = call();
    if !succeeded(&answer) {
        sandbox::leave();
    }
    answer
}
