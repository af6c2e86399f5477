//! Entry points and waits of the reaper process: [`intermediate`], [`reaper`].
//!
//! It runs in memory that the program can write, and in the end only this library is mapped. So
//! nothing here calls libc or uses a thread-local, and every failure ends the process: the kernel
//! frees the memory then.
#![expect(unsafe_code, reason = "tasks start here, on stacks of their own")]

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use super::control::{CONTROL, Stack};
use super::raw::{self, Entry, Wait, plain};
use super::{State, confine, filter, orphans, release};

/// Maximum delay of a missed wake-up: the kernel wakes one of the threads that wait for the main
/// thread's end, and that may be one in pthread_join(3). Each interval costs one wake-up of a
/// sleeping process.
const MAX_WAKE_DELAY: Duration = Duration::from_secs(10);
/// First and last poll interval for the end of the other threads. They end within microseconds,
/// unless the program continues without its main thread, or a vfork(2) child outlives its parent.
const MIN_POLL_INTERVAL: Duration = Duration::from_micros(50);
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(1);

crate::one_page::table! {
    static REAPER_STACK: Stack<{ 128 << 10 }> = Stack::new();
    static INTERMEDIATE_STACK: Stack<{ 16 << 10 }> = Stack::new();
}

/// Flag of clone3(2), Linux 5.5; libc's constant has 32 bits.
const CLONE_CLEAR_SIGHAND: u64 = 1 << 32;
/// Shares the memory, without tracers and without the program's signal handlers.
const SHARING: u64 = flag(libc::CLONE_VM) | flag(libc::CLONE_UNTRACED) | CLONE_CLEAR_SIGHAND;

const fn flag(bit: libc::c_int) -> u64 {
    bit.cast_unsigned() as u64
}

/// Makes the intermediate process, which makes the reaper and ends at once: the reaper is no child
/// that the program, or a program that it execs, could wait for. Returns the process ID.
///
/// # Errors
/// The negative errno of clone3(2).
///
/// # Safety
/// No intermediate process and no reaper is alive, and no other thread makes one.
pub(super) unsafe fn spawn_intermediate() -> isize {
    // It shares the descriptor table until `confine` replaces it: a copy would keep files open.
    let flags = SHARING | flag(libc::CLONE_FILES);
    // SAFETY: the caller's promise.
    unsafe { spawn(flags, INTERMEDIATE_STACK.place(), intermediate) }
}

/// # Safety
/// No task uses the stack, and the function may run on it.
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
/// Only [`spawn_intermediate`] passes it to clone3(2).
unsafe extern "C" fn intermediate(_: usize) -> ! {
    // SAFETY: the call writes nothing.
    let own = u32::try_from(unsafe { plain(libc::SYS_getpid, [0; 3]) }).unwrap_or(0);
    CONTROL.intermediate.store(own, Ordering::Relaxed);
    let flags = SHARING | flag(libc::CLONE_PARENT_SETTID) | flag(libc::CLONE_CHILD_CLEARTID);
    // SAFETY: no reaper was alive when this process started, and only this process makes one.
    let spawn = || unsafe { spawn(flags, REAPER_STACK.place(), reaper) };
    if !confine::confine() {
        report(State::Unconfined);
    } else if spawn() < 0 {
        report(State::Clone);
    }
    raw::exit_group(0)
}

/// # Safety
/// Only [`intermediate`] passes it to clone3(2).
unsafe extern "C" fn reaper(_: usize) -> ! {
    let state = prepare();
    report(state);
    // SAFETY: the program stored the address of a word in its memory, which this process shares.
    let word = unsafe { raw::word_at(CONTROL.tid_word.load(Ordering::Relaxed)) };
    if state == State::Running
        && let Some(word) = word
    {
        wait_for_end(word);
        // SAFETY: no other task uses the memory.
        unsafe { release::all() };
    }
    raw::exit_group(0)
}

fn prepare() -> State {
    let is_unwanted = || CONTROL.retire.load(Ordering::Acquire) != 0;
    let intermediate = CONTROL.intermediate.load(Ordering::Relaxed);
    match orphans::new_parent(intermediate, is_unwanted) {
        Some(1) => {}
        Some(_) => return State::Subreaper,
        None => return State::Retired,
    }
    // Excludes signals of the terminal and those for the program's process group.
    // SAFETY: the call writes nothing.
    unsafe { plain(libc::SYS_setsid, [0; 3]) };
    let open = |path: &core::ffi::CStr| {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NOCTTY;
        let (at, flags) = (libc::AT_FDCWD as isize, flags.cast_unsigned() as usize);
        let path = path.as_ptr().expose_provenance();
        // SAFETY: the call reads the path.
        unsafe { plain(libc::SYS_openat, [at.cast_unsigned(), path, flags]) }
    };
    // The files show only this memory, and keep none of it alive.
    let opened = open(c"/proc/self/maps") == 0 && open(c"/proc/self/statm") == 1;
    // Self-test of `is_alone`: the program is alive, so it must return false.
    if !opened || is_alone() {
        return State::Kernel;
    }
    if filter::install(CONTROL.counts_threads.load(Ordering::Relaxed)) {
        State::Running
    } else {
        State::Unconfined
    }
}

fn report(state: State) {
    CONTROL.ready.store(state as u32, Ordering::Release);
    raw::wake(&CONTROL.ready);
}

/// Reports whether no other process or thread uses this memory. unshare(2) of CLONE_VM changes
/// nothing and succeeds only then (`current_is_single_threaded`, since Linux 2.6.16). It needs no
/// privilege and no /proc.
fn is_alone() -> bool {
    let vm = libc::CLONE_VM.cast_unsigned() as usize;
    // SAFETY: the call writes nothing.
    unsafe { plain(libc::SYS_unshare, [vm, 0, 0]) == 0 }
}

/// Waits until no other process uses the memory; ends the reaper if it is retired.
///
/// The kernel zeroes `word` and wakes one waiter when the main thread ends, or when the process
/// execs (`mm_release`). The program may have registered another address (set_tid_address(2)) or
/// protected the page, so the loop checks after each wait. Only the kernel reads the word: it
/// reports an unreadable one.
fn wait_for_end(word: &AtomicU32) {
    let program = CONTROL.program.load(Ordering::Relaxed);
    loop {
        exit_if_retired();
        match raw::wait(word, program, MAX_WAKE_DELAY) {
            Wait::Woken => {}
            Wait::Changed => break,
            Wait::Failed => {
                raw::wait(&CONTROL.retire, 0, MAX_POLL_INTERVAL);
            }
        }
        if is_alone() {
            return;
        }
    }
    // Another waiter of the word may have missed the kernel's only wake-up.
    raw::wake(word);
    let mut interval = MIN_POLL_INTERVAL;
    while !is_alone() {
        exit_if_retired();
        raw::wait(&CONTROL.retire, 0, interval);
        interval = (interval * 2).min(MAX_POLL_INTERVAL);
    }
}

fn exit_if_retired() {
    if CONTROL.retire.load(Ordering::Acquire) != 0 {
        raw::exit_group(0);
    }
}
