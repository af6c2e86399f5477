//! Process that runs the jobs in place of a thread while the program has one thread: [`Thread`] with
//! [`Thread::SIBLING`], [`program`].
//!
//! It shares the memory and nothing else, so the program's task directory, `Threads:` in its
//! status, unshare(CLONE_NEWUSER) and setns(2) are as without jumbo. ADR 8 has the alternatives.
//!
//! - It is a child without exit signal: only a wait with __WALL or __WCLONE finds it. It ends before
//!   such a wait for any child. [`reap`] waits for it.
//! - A resource that is bound to the memory (a SysV segment, a lock of a mapped file) would stay until
//!   it has ended: where there is one, a thread runs the jobs.
//! - It has a session of its own, no descriptors but those of `sys::files`, and `/` as its working
//!   directory ([`begin`]). It dumps no core: a debugger's breakpoint in the shared text kills it.
//! - It confines itself (`super::confine`).
//! - The kernel kills it at the end of the program's first thread (PR_SET_PDEATHSIG). After an exec
//!   it shares the memory with no process, and ends ([`pause`]).
#![expect(unsafe_code, reason = "system calls that rustix lacks")]

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, getppid, kill_process, setrlimit};

use super::{MAKER_PROCESS, OUTLIVES, Outlives, THREAD, WAKE_WORD};
use crate::sync::now;
use jumbo_sys::proc::{children_change_namespace, is_alone};
use jumbo_sys::{
    Thread, Wait, has_one_thread, process, raise_descriptors, request, tid_word, wait, wait_either,
    wake, word_at,
};

crate::one_page! {
    /// Address and value of the word that the kernel clears at an exec and at the end of the first
    /// thread. Address 0: unknown.
    static TID_WORD: AtomicUsize = AtomicUsize::new(0);
    static TID: AtomicU32 = AtomicU32::new(0);
    static IS_REFUSED: AtomicBool = AtomicBool::new(false);
}

/// Returns the ID of the program's process, also in the process beside it.
pub(crate) fn program() -> i32 {
    let own = process();
    match exists() && THREAD.number() == own.unsigned_abs() {
        true => MAKER_PROCESS.load(Ordering::Relaxed),
        false => own,
    }
}

/// Reports whether the caller is the process beside the program.
pub(super) fn is_caller() -> bool {
    exists() && program() != process()
}

/// Reports whether there is such a process, alive or not reaped.
pub(super) fn exists() -> bool {
    THREAD.number() != 0
}

/// Returns the flags of [`Thread::start`] for the caller, which is about to make a thread: those of
/// a process if it is the only thread.
pub(super) fn flags() -> u32 {
    // In another PID namespace it would be the first process, whose end ends the namespace.
    let is_alone = !IS_REFUSED.load(Ordering::Relaxed)
        && has_one_thread()
        && is_alone() == Some(true)
        && !children_change_namespace()
        && !would_outlive(true);
    if !is_alone {
        return Thread::FLAGS;
    }
    let word = tid_word();
    let value = word.map_or(0, |word| word.load(Ordering::Relaxed));
    // musl registers a lock, whose value is 0.
    let word = word.filter(|_| value != 0);
    let address = word.map_or(0, |word| word.as_ptr().expose_provenance());
    TID_WORD.store(address, Ordering::Relaxed);
    TID.store(value, Ordering::Relaxed);
    Thread::SIBLING
}

/// Reports whether a resource would outlive the program in the process.
pub(super) fn would_outlive(is_brief: bool) -> bool {
    // SAFETY: null, or a static that was stored there.
    let outlives = unsafe { OUTLIVES.load(Ordering::Acquire).as_ref() };
    outlives.is_some_and(|Outlives(outlives)| outlives(is_brief))
}

/// Has a thread run the jobs from now on.
pub(super) fn refuse() {
    IS_REFUSED.store(true, Ordering::Relaxed);
}

/// Separates the calling process from the program; false if the program has ended.
pub(super) fn begin() -> bool {
    let _ = rustix::process::setsid();
    let _ = rustix::process::chdir(c"/");
    // A byte: with 0 the kernel still passes a core to a program (core(5)).
    let none = Rlimit {
        current: Some(1),
        maximum: Some(1),
    };
    let _ = setrlimit(Resource::Core, none);
    // Files are kept open: as many as the program may have at most.
    raise_descriptors();
    let killed = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let parent = getppid().map_or(0, |parent| parent.as_raw_nonzero().get());
    killed.is_ok() && parent == MAKER_PROCESS.load(Ordering::Relaxed)
}

/// Waits in that process until the jobs are due or [`WAKE_WORD`] is not `before`; false if the
/// program has called exec(2).
pub(super) fn pause(before: u32, timeout: Duration) -> bool {
    // SAFETY: `flags` stored the address, in the memory that the program had then.
    let Some(word) = (unsafe { word_at(TID_WORD.load(Ordering::Relaxed)) }) else {
        wait_either((&WAKE_WORD, before), None, timeout);
        return true;
    };
    let tid = TID.load(Ordering::Relaxed);
    wait_either((&WAKE_WORD, before), Some((word, tid)), timeout);
    // Only the kernel reads the word: the program may have protected its page.
    let is_same = wait(word, tid, Duration::ZERO) != Wait::Changed;
    if !is_same {
        // The kernel wakes one waiter, and there may be a reaper.
        wake(word);
    }
    is_same
}

/// Waits for the process after its end, which [`Thread::is_alive`] reports a moment earlier. The
/// program may have done so, with __WALL.
pub(super) fn reap() {
    if !exists() || THREAD.is_alive() {
        return;
    }
    let options = libc::__WALL.cast_unsigned() as usize;
    let arguments = [THREAD.number() as usize, 0, options, 0, 0, 0];
    // SAFETY: with null pointers the kernel writes nothing.
    let wait = || unsafe { request(libc::SYS_wait4, arguments) };
    while wait() == Err(rustix::io::Errno::INTR) {}
    THREAD.forget_number();
}

/// Waits for the end of the process, which has been told to. Another one may have stopped it, so it
/// is continued, and killed after `patience`. A process that is frozen then ends once it is thawed, and
/// runs no instruction before.
pub(super) fn finish(patience: Duration) {
    let send = |signal| {
        let process = i32::try_from(THREAD.number()).ok().and_then(Pid::from_raw);
        process.map(|process| kill_process(process, signal))
    };
    let start = now();
    while THREAD.is_alive() && now().saturating_sub(start) < patience {
        send(Signal::CONT);
        THREAD.join_for(Duration::from_secs(1));
    }
    if THREAD.is_alive() {
        send(Signal::KILL);
        THREAD.join_for(Duration::from_secs(1));
    }
}
