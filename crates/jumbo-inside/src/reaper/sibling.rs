//! What the sibling does from its first instruction to its last: [`intermediate`], [`sibling`].
//!
//! It runs in memory that the program can write and, in the end, where nothing but this library is
//! mapped. So nothing here calls libc or touches a thread-local, and whatever goes wrong ends it: then the
//! kernel frees the memory, as it would have without us.
#![expect(unsafe_code, reason = "tasks start here, on stacks of their own")]

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use super::control::{CONTROL, Stack};
use super::raw::{self, Entry, Wait, plain};
use super::{State, confine, filter, orphans, release};

/// How long a wake-up that went to another thread is missed: of those that wait for the end of the main
/// thread the kernel wakes one, and pthread_join(3) may wait for it too. It is passed on here, but cannot
/// be there. Each time is one wake-up of a sleeping process.
const PATIENCE: Duration = Duration::from_secs(10);
/// How soon to look again whether all other threads are gone, at first and at most. They leave within
/// microseconds, but for a program that goes on without its main thread, and for a vfork(2) child that
/// outlives its parent.
const SOON: Duration = Duration::from_micros(50);
const LATE: Duration = Duration::from_secs(1);

const STACK: usize = 128 << 10;
crate::one_page::table! {
    static SIBLING: Stack<STACK> = Stack::new();
    static INTERMEDIATE: Stack<{ 16 << 10 }> = Stack::new();
}

/// clone3(2)'s flag of Linux 5.5, which libc has as a signed number of 32 bits.
const CLONE_CLEAR_SIGHAND: u64 = 1 << 32;
/// Memory is shared, a tracer does not follow, the program's handlers are not inherited.
const SHARING: u64 = flag(libc::CLONE_VM) | flag(libc::CLONE_UNTRACED) | CLONE_CLEAR_SIGHAND;

const fn flag(bit: libc::c_int) -> u64 {
    bit.cast_unsigned() as u64
}

/// Makes the process that makes the sibling: its parent ends at once, so that it is no child that
/// the program's own waits, or those of what it execs, could meet. Returns the process ID.
///
/// # Errors
/// The negative errno of clone3(2).
///
/// # Safety
/// Neither such a process nor a sibling is alive, and no other thread makes one.
pub(super) unsafe fn spawn_intermediate() -> isize {
    // Its table of descriptors is the program's until `confine` replaces it: a copy would hold files.
    let flags = SHARING | flag(libc::CLONE_FILES);
    // SAFETY: the caller's promise.
    unsafe { spawn(flags, INTERMEDIATE.place(), intermediate) }
}

/// # Safety
/// No task is on the stack, and the function may run on it.
unsafe fn spawn(
    flags: u64,
    stack: (usize, usize),
    function: unsafe extern "C" fn(usize) -> !,
) -> isize {
    let entry = Entry {
        function,
        argument: 0,
    };
    // SAFETY: the caller's promise. The kernel writes the child's ID to `alive`, an atomic.
    unsafe { raw::clone3(flags, &CONTROL.alive, stack, entry) }
}

/// # Safety
/// Called by [`spawn_intermediate`] alone.
unsafe extern "C" fn intermediate(_: usize) -> ! {
    // SAFETY: it writes nothing.
    let own = u32::try_from(unsafe { plain(libc::SYS_getpid, [0; 3]) }).unwrap_or(0);
    CONTROL.intermediate.store(own, Ordering::Relaxed);
    let told = flag(libc::CLONE_PARENT_SETTID) | flag(libc::CLONE_CHILD_CLEARTID);
    // SAFETY: no sibling was alive when this process was made, and only this one makes it.
    let spawn = || unsafe { spawn(SHARING | told, SIBLING.place(), sibling) };
    if !confine::confine() {
        tell(State::Unconfined);
    } else if spawn() < 0 {
        tell(State::Clone);
    }
    raw::exit_group(0)
}

/// # Safety
/// Called by [`intermediate`] alone.
unsafe extern "C" fn sibling(_: usize) -> ! {
    let state = prepare();
    tell(state);
    // SAFETY: the program put it there, in its own memory, which is this process's too.
    let word = unsafe { raw::word_at(CONTROL.tid_word.load(Ordering::Relaxed)) };
    if state == State::Running
        && let Some(word) = word
    {
        outlive(word);
        // SAFETY: no other task uses the memory now.
        unsafe { release::all() };
    }
    raw::exit_group(0)
}

fn prepare() -> State {
    let is_unwanted = || CONTROL.retire.load(Ordering::Acquire) != 0;
    let intermediate = CONTROL.intermediate.load(Ordering::Relaxed);
    match orphans::has_gone_to(intermediate, is_unwanted) {
        Some(1) => {}
        Some(_) => return State::Subreaper,
        None => return State::Retired,
    }
    // Neither the terminal's signals nor those for the program's process group.
    // SAFETY: it writes nothing.
    unsafe { plain(libc::SYS_setsid, [0; 3]) };
    let open = |path: &core::ffi::CStr| {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NOCTTY;
        let (at, flags) = (libc::AT_FDCWD as isize, flags.cast_unsigned() as usize);
        let path = path.as_ptr().expose_provenance();
        // SAFETY: it reads the path.
        unsafe { plain(libc::SYS_openat, [at.cast_unsigned(), path, flags]) }
    };
    // They tell of this memory and of no other, and keep none of it: only its description.
    let opened = open(c"/proc/self/maps") == 0 && open(c"/proc/self/statm") == 1;
    // Self-test: the program lives, so the answer must be no.
    if !opened || is_alone() {
        return State::Kernel;
    }
    if filter::install(CONTROL.counts_threads.load(Ordering::Relaxed)) {
        State::Running
    } else {
        State::Unconfined
    }
}

fn tell(state: State) {
    CONTROL.ready.store(state as u32, Ordering::Release);
    raw::wake(&CONTROL.ready);
}

/// Whether no other process or thread uses this memory. unshare(2) of CLONE_VM changes nothing and is
/// allowed to such a one alone (`current_is_single_threaded` in the kernel, since 2.6.16): without
/// privilege, without /proc, and whichever process shares.
fn is_alone() -> bool {
    let vm = libc::CLONE_VM.cast_unsigned() as usize;
    // SAFETY: it writes nothing.
    unsafe { plain(libc::SYS_unshare, [vm, 0, 0]) == 0 }
}

/// Returns when no other process uses the memory any more; does not return when the sibling is retired.
///
/// The kernel zeroes `word` and wakes one who waits when the main thread has ended, however it ended, and
/// when the process execs, from whatever thread (`mm_release`). Unless the program has told it another
/// address since (set_tid_address(2)), or has taken the page's permissions: so each wait ends in a look. The
/// word is read by the kernel alone, which tells where it cannot be.
fn outlive(word: &AtomicU32) {
    let program = CONTROL.program.load(Ordering::Relaxed);
    loop {
        leave_if_retired();
        match raw::wait(word, program, PATIENCE) {
            Wait::Woken => {}
            Wait::Changed => break,
            Wait::Failed => {
                raw::wait(&CONTROL.retire, 0, LATE);
            }
        }
        if is_alone() {
            return;
        }
    }
    raw::wake(word);
    let mut pause = SOON;
    while !is_alone() {
        leave_if_retired();
        raw::wait(&CONTROL.retire, 0, pause);
        pause = (pause * 2).min(LATE);
    }
}

fn leave_if_retired() {
    if CONTROL.retire.load(Ordering::Acquire) != 0 {
        raw::exit_group(0);
    }
}
