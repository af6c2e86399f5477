//! Interposed calls of the program: functions of the C library, and the same calls by syscall(2).
//!
//! Each line of `doors!` defines the function of that name and the case of that number in
//! [`syscall`]. Both run the handler in the line, so they cannot reach different mechanisms. A
//! handler takes the call and its arguments, sends the events to the mechanisms, and makes the
//! call.
//!
//! Elsewhere: the `malloc` family ([`crate::alloc`]), which are no system calls; calls that unwind
//! ([`crate::threads`]) or leave ([`crate::leave`]) and `dlopen` ([`crate::dlopen`]), which have to be jumps.

use core::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};
use core::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use jumbo_inside::events::Mechanism as _;
use jumbo_inside::reaper::Ids;
use jumbo_inside::watch;
use libc::{gid_t, off_t, stack_t, uid_t};

use crate::mechanisms::All;
use crate::own_stack::on;
use crate::sharing::LOCKS;
use crate::{leave, maps, next, own_stack, rings, sandbox, sharing};

/// Register value of an argument or result of a system call.
trait Word {
    fn from_word(word: c_long) -> Self;
    fn word(self) -> c_long;
}

macro_rules! words {
    ($($type:ty),*) => {$(
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_possible_wrap, clippy::cast_lossless, reason = "as the kernel does")]
        impl Word for $type {
            #[inline(always)]
            fn from_word(word: c_long) -> Self {
                word as $type
            }
            #[inline(always)]
            fn word(self) -> c_long {
                self as c_long
            }
        }
    )*};
}

words!(c_int, c_uint, c_long, c_ulong, usize);

impl<T> Word for *const T {
    #[inline(always)]
    fn from_word(word: c_long) -> Self {
        with_exposed_provenance(usize::from_word(word))
    }
    #[inline(always)]
    fn word(self) -> c_long {
        self.expose_provenance().word()
    }
}

impl<T> Word for *mut T {
    #[inline(always)]
    fn from_word(word: c_long) -> Self {
        with_exposed_provenance_mut(usize::from_word(word))
    }
    #[inline(always)]
    fn word(self) -> c_long {
        self.expose_provenance().word()
    }
}

/// Makes a system call through the C library, which sets errno.
///
/// # Safety
/// As for syscall(2).
unsafe fn by_number(number: c_long, arguments: &[c_long]) -> c_long {
    let at = |index: usize| arguments.get(index).copied().unwrap_or(0);
    // SAFETY: the caller's promise.
    unsafe { (next::syscall.get())(number, at(0), at(1), at(2), at(3), at(4), at(5)) }
}

/// Runs the handler of a call. `: HANDLER` takes the call and its arguments, and has the safety
/// contract of the C function; it runs on a stack with room ([`on`]), so the call does not wait.
/// `=> HANDLER[ARGUMENTS]` is safe, and makes the call unchanged, on the caller's stack.
macro_rules! handle {
    ($call:ident($($argument:ident),*): $door:path) => {{
        // SAFETY: the caller's promise.
        on(|| unsafe { $door($call, $($argument),*) })
    }};
    ($call:ident($($argument:ident),*) => $door:path[$($passed:expr),*]) => {
        $door($($passed,)* || $call($($argument),*))
    };
}

/// Makes a call after its event.
#[inline(always)]
fn after<T>((): (), call: impl FnOnce() -> T) -> T {
    call()
}

/// Defines functions of the C library that are no system call, or one of another name.
macro_rules! names {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty, as $next:ident
        $(: $door:path)? $(=> $around:path[$($passed:expr),*])?;)*) => {$(
        #[doc = concat!("The C library's ", stringify!($name), ".")]
        ///
        /// # Safety
        /// As for the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            // SAFETY: the same call.
            let call = |$($argument: $type),*| unsafe { (next::$next.get())($($argument),*) };
            handle! { call($($argument),*) $(: $door)? $(=> $around[$($passed),*])? }
        }
    )*};
}

/// Defines functions of the C library that are system calls, and their cases by number.
macro_rules! doors {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty, $number:ident
        $(: $door:path)? $(=> $around:path[$($passed:expr),*])?;)*) => {
        names! {
            $($name($($argument: $type),*) -> $result, as $name
                $(: $door)? $(=> $around[$($passed),*])?;)*
        }

        /// System call numbers of the table.
        const NUMBERS: &[c_long] = &[$(libc::$number),*];

        /// Makes a system call of the table; `None` for other numbers.
        ///
        /// # Safety
        /// As for syscall(2).
        unsafe fn enter(number: c_long, arguments: &[c_long; 6]) -> Option<c_long> {
            match number {
                $(libc::$number => {
                    // Apart: the frames of all cases would be one.
                    #[inline(never)]
                    unsafe fn case(arguments: &[c_long; 6]) -> c_long {
                        let call = |$($argument: $type),*| {
                            // SAFETY: the same call.
                            let answer = unsafe { by_number(libc::$number, &[$($argument.word()),*]) };
                            <$result as Word>::from_word(answer)
                        };
                        #[allow(unused_mut, unused_variables, reason = "some calls take no arguments")]
                        let mut arguments = arguments.iter().copied();
                        $(let $argument = <$type as Word>::from_word(arguments.next().unwrap_or(0));)*
                        (handle! { call($($argument),*) $(: $door)? $(=> $around[$($passed),*])? }).word()
                    }
                    // SAFETY: the caller's promise.
                    Some(unsafe { case(arguments) })
                })*
                _ => None,
            }
        }
    };
}

doors! {
    mmap(addr: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, off: off_t)
        -> *mut c_void, SYS_mmap: maps::map;
    munmap(addr: *mut c_void, len: usize) -> c_int, SYS_munmap: maps::unmap;
    mremap(addr: *mut c_void, old: usize, new: usize, flags: c_int, to: *mut c_void)
        -> *mut c_void, SYS_mremap: maps::remap;
    mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int, SYS_mprotect => maps::protect[addr, len, prot];
    // Only the kernel knows the rights of a key.
    pkey_mprotect(addr: *mut c_void, len: usize, prot: c_int, key: c_int) -> c_int,
        SYS_pkey_mprotect => maps::protect[addr, len, if key > 0 { libc::PROT_NONE } else { prot }];
    mseal(addr: *mut c_void, len: usize, flags: c_ulong) -> c_int, SYS_mseal => maps::protect[addr, len, libc::PROT_NONE];
    madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int, SYS_madvise: maps::advise;
    mlock(addr: *const c_void, len: usize) -> c_int, SYS_mlock => maps::lock[addr, len, 0];
    mlock2(addr: *const c_void, len: usize, flags: c_uint) -> c_int, SYS_mlock2 => maps::lock[addr, len, flags];
    mlockall(flags: c_int) -> c_int, SYS_mlockall => maps::lock_all[flags];
    munlockall() -> c_int, SYS_munlockall => maps::unlock_all[];
    shmat(id: c_int, at: *const c_void, flags: c_int) -> *mut c_void, SYS_shmat: sharing::attach;
    shmdt(at: *const c_void) -> c_int, SYS_shmdt => after[on(|| All::unmapping(at.addr(), 1))];
    fallocate(fd: c_int, mode: c_int, offset: off_t, length: off_t) -> c_int,
        SYS_fallocate => after[on(|| sharing::allocating(fd, mode))];
    flock(fd: c_int, operation: c_int) -> c_int, SYS_flock => sharing::locked[fd, operation & libc::LOCK_UN == 0];
    fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int, SYS_fcntl => sharing::locked[fd, LOCKS.contains(&command)];
    ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int,
        SYS_ioctl => after[sharing::requesting(request, argument)];
    sigaltstack(new: *const stack_t, old: *mut stack_t) -> c_int, SYS_sigaltstack => own_stack::alternate[new];
    unshare(flags: c_int) -> c_int, SYS_unshare => sharing::unshared[flags];
    setns(fd: c_int, kind: c_int) -> c_int, SYS_setns => sharing::joined[];
    chroot(path: *const c_char) -> c_int, SYS_chroot => sharing::rooted[];
    pivot_root(root: *const c_char, old: *const c_char) -> c_int,
        SYS_pivot_root => sharing::rooted[];
    setuid(id: uid_t) -> c_int, SYS_setuid => sharing::identified[Ids::User, &[id]];
    setreuid(real: uid_t, effective: uid_t) -> c_int, SYS_setreuid => sharing::identified[Ids::User, &[real, effective]];
    setresuid(real: uid_t, effective: uid_t, saved: uid_t) -> c_int,
        SYS_setresuid => sharing::identified[Ids::User, &[real, effective, saved]];
    setgid(id: gid_t) -> c_int, SYS_setgid => sharing::identified[Ids::Group, &[id]];
    setregid(real: gid_t, effective: gid_t) -> c_int, SYS_setregid => sharing::identified[Ids::Group, &[real, effective]];
    setresgid(real: gid_t, effective: gid_t, saved: gid_t) -> c_int,
        SYS_setresgid => sharing::identified[Ids::Group, &[real, effective, saved]];
    setgroups(count: usize, groups: *const gid_t) -> c_int,
        SYS_setgroups => sharing::privileged[];
    capset(header: *mut c_void, data: *const c_void) -> c_int, SYS_capset => sharing::privileged[];
}

// off_t has 64 bits. Programs built with large-file support (CPython among them) import
// the names that end in 64.
names! {
    // By its number some options return 64 bits. Linux's calling conventions allow to declare all
    // five arguments.
    prctl(option: c_int, first: c_ulong, second: c_ulong, third: c_ulong, fourth: c_ulong)
        -> c_int, as prctl => sandbox::control[option, first, second];
    mmap64(addr: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, off: off_t)
        -> *mut c_void, as mmap: maps::map;
    fallocate64(fd: c_int, mode: c_int, offset: off_t, length: off_t) -> c_int,
        as fallocate => after[on(|| sharing::allocating(fd, mode))];
    fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int, as fcntl => sharing::locked[fd, LOCKS.contains(&command)];
    seteuid(id: uid_t) -> c_int, as seteuid => sharing::identified[Ids::User, &[id]];
    setegid(id: gid_t) -> c_int, as setegid => sharing::identified[Ids::Group, &[id]];
    initgroups(user: *const c_char, group: gid_t) -> c_int, as initgroups => sharing::privileged[];
    io_uring_register_buffers(ring: *mut c_void, vectors: *const c_void, count: c_uint) -> c_int,
        as io_uring_register_buffers: rings::register_by_liburing;
    io_uring_register_buffers_tags(ring: *mut c_void, vectors: *const c_void, tags: *const c_void, count: c_uint)
        -> c_int, as io_uring_register_buffers_tags: rings::register_with_tags;
    sbrk(increment: isize) -> *mut c_void, as sbrk => maps::move_break[increment];
    brk(addr: *mut c_void) -> c_int, as brk => maps::set_break[];
    thrd_create(thread: *mut libc::pthread_t, start: extern "C" fn(*mut c_void) -> c_int,
        argument: *mut c_void) -> c_int, as thrd_create => after[on(All::before_thread)];
}

/// Numbers of calls that [`watched`] handles without a line in the table.
const OTHER_NUMBERS: &[c_long] = &[
    libc::SYS_prctl,
    libc::SYS_seccomp,
    libc::SYS_landlock_restrict_self,
    libc::SYS_mbind,
    libc::SYS_io_setup,
    libc::SYS_io_uring_register,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_brk,
];

/// Length of [`ACTIONS`]; larger numbers pass.
const MAX_NUMBERS: usize = 512;

/// The call jumps to the next definition.
const PASSES: u8 = 0;
/// [`watched`] makes the call.
const IS_WATCHED: u8 = 1;

/// Action of [`syscall`] for each system call number.
static ACTIONS: [u8; MAX_NUMBERS] = {
    let mut actions = [PASSES; MAX_NUMBERS];
    let lists = [NUMBERS, OTHER_NUMBERS];
    let mut list = 0;
    while list < lists.len() {
        let mut at = 0;
        while at < lists[list].len() {
            #[expect(
                clippy::cast_sign_loss,
                reason = "no number is negative; else it is past the end"
            )]
            let number = lists[list][at] as usize;
            actions[number] = IS_WATCHED;
            at += 1;
        }
        list += 1;
    }
    actions
};

/// syscall(2).
///
/// A call that is not [`IS_WATCHED`] jumps to the C library's function with registers and stack
/// unchanged: some return twice or on another stack, and some are unwound while they wait.
///
/// # Safety
/// As for syscall(2).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall() {
    #[cfg(target_arch = "x86_64")]
    core::arch::naked_asm!(
        ".cfi_startproc",
        "endbr64",
        "cmp rdi, {end}",
        "jae 2f",
        "lea r11, [rip + {actions}]",
        "cmp byte ptr [r11 + rdi], {is_watched}",
        "je {watched}",
        "2:",
        "jmp [rip + {next}]",
        ".cfi_endproc",
        end = const MAX_NUMBERS,
        actions = sym ACTIONS,
        is_watched = const IS_WATCHED,
        watched = sym watched,
        next = sym next::syscall,
    );
    #[cfg(target_arch = "aarch64")]
    core::arch::naked_asm!(
        ".cfi_startproc",
        "hint #34",
        "cmp x0, #{end}",
        "b.hs 2f",
        "adrp x16, {actions}",
        "add x16, x16, :lo12:{actions}",
        "ldrb w16, [x16, x0]",
        "cmp w16, #{is_watched}",
        "b.eq {watched}",
        "2:",
        "adrp x16, {next}",
        "ldr x16, [x16, :lo12:{next}]",
        "br x16",
        ".cfi_endproc",
        end = const MAX_NUMBERS,
        actions = sym ACTIONS,
        is_watched = const IS_WATCHED,
        watched = sym watched,
        next = sym next::syscall,
    )
}

/// Handles the calls that are [`IS_WATCHED`], with the arguments of [`syscall`].
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
    let arguments = [first, second, third, fourth, fifth, sixth];
    // SAFETY: the caller's promise.
    if let Some(answer) = unsafe { enter(number, &arguments) } {
        return answer;
    }
    // SAFETY: as above.
    unsafe { other(number, &arguments) }
}

/// Handles [`OTHER_NUMBERS`]. Apart, as the cases above are.
///
/// # Safety
/// As for syscall(2).
#[inline(never)]
unsafe fn other(number: c_long, arguments: &[c_long; 6]) -> c_long {
    let [first, second, third, fourth, ..] = *arguments;
    // SAFETY: the same call.
    let call = || unsafe { by_number(number, arguments) };
    match number {
        libc::SYS_prctl => {
            let option = Word::from_word(first);
            let [second, third] = [second, third].map(Word::from_word);
            sandbox::control(option, second, third, call)
        }
        libc::SYS_seccomp => {
            let [operation, flags] = [first, second].map(Word::from_word);
            sandbox::install(call, operation, flags, third)
        }
        libc::SYS_landlock_restrict_self => sharing::privileged(call),
        // By libnuma. The policy outlives a block.
        libc::SYS_mbind => {
            All::protected(
                Word::from_word(first),
                Word::from_word(second),
                libc::PROT_NONE,
            );
            call()
        }
        libc::SYS_io_setup => sharing::set_up_aio(call),
        libc::SYS_io_uring_register => {
            let [operation, count] = [second, fourth].map(Word::from_word);
            let call = |argument: *const c_void| {
                // SAFETY: the same call, with a copy of its iovecs' place.
                unsafe { by_number(number, &[first, second, argument.word(), fourth]) }
            };
            rings::register(operation, Word::from_word(third), count, call)
        }
        libc::SYS_exit => {
            crate::threads::ending();
            call()
        }
        libc::SYS_exit_group => {
            watch::about_to_exit();
            call()
        }
        libc::SYS_execve | libc::SYS_execveat => {
            watch::about_to_exec();
            call()
        }
        libc::SYS_wait4 => {
            leave::waits(c_int::from_word(first) == -1, Word::from_word(third));
            call()
        }
        libc::SYS_waitid => {
            leave::waits(
                leave::is_all(Word::from_word(first)),
                Word::from_word(fourth),
            );
            call()
        }
        // SAFETY: the caller's promise; address 0 returns the break and changes nothing.
        libc::SYS_brk => maps::break_moved(|| unsafe { by_number(number, &[0]) }, call),
        _ => call(),
    }
}
