//! Whether this thread may be in a signal handler: [`may_be`].
//!
//! pthread_create(3) may not be called in one: it allocates, and the handler may have interrupted an
//! allocation of the same thread. munmap(2) is called in handlers. Nothing tells a thread that it is in one;
//! but the kernel has left a frame on its stack then, which begins with the address that the handler returns
//! to. On x86-64 that is a function of the C library's, the same for all signals, so the stack is searched
//! for it, from here up to where it began. In doubt the answer is yes: on another stack than the thread's
//! own (sigaltstack(2), coroutines), on a deep one, where an old frame's remains still lie on it, and on
//! machines where the address is not on the stack.

use core::ops::Range;
use core::ptr::with_exposed_provenance;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::sync::thread_pointer;
use crate::sys::copy_words;

/// How much of a stack is searched, in bytes: 0.1 ms.
const DEEP: usize = 1 << 20;
/// Words at a time: few, since a fresh page of stack for them costs more than to ask again.
const WORDS: usize = 128;

/// Where the handlers of this program return to; 0: we were not loaded into a program; [`UNKNOWN`]: we were.
static RETURN: AtomicUsize = AtomicUsize::new(0);
const UNKNOWN: usize = 1;
/// An address at the beginning of the main thread's stack.
static BOTTOM: AtomicUsize = AtomicUsize::new(0);

/// From now on handlers are looked for. `bottom` is an address at the beginning of the main thread's stack:
/// that of its environment, say. 0: there is none that could be read.
pub(super) fn watch(bottom: usize) {
    BOTTOM.store(bottom, Ordering::Relaxed);
    RETURN.store(trampoline().unwrap_or(UNKNOWN), Ordering::Relaxed);
}

/// False where this thread is certainly not in a signal handler of the C library's making.
pub(super) fn may_be() -> bool {
    let wanted = RETURN.load(Ordering::Relaxed);
    if wanted <= UNKNOWN {
        return wanted == UNKNOWN;
    }
    let here = core::ptr::from_ref(&wanted).addr();
    let reach = here..here + DEEP;
    // The control block of a thread that glibc made lies at the beginning of its stack.
    let (bottom, thread) = (BOTTOM.load(Ordering::Relaxed), thread_pointer());
    let word = size_of::<usize>();
    // Behind this function's own variables.
    let start = (here + word).next_multiple_of(word);
    if reach.contains(&bottom) {
        is_above(start..bottom, wanted)
    } else if reach.contains(&thread) {
        is_between(start..thread, wanted)
    } else {
        true
    }
}

/// True where a frame that begins with `wanted` is somewhere in a part of the main thread's stack. That is read
/// directly: to go through the kernel takes longer than all else in here.
#[inline(never)]
#[expect(unsafe_code, reason = "reads the stack of its callers")]
fn is_above(range: Range<usize>, wanted: usize) -> bool {
    let count = range.len() / size_of::<usize>();
    let word = |at: usize| {
        let at = range.start + at * size_of::<usize>();
        // SAFETY: the kernel keeps the main thread's stack in one mapping, which grows downwards as a whole and has no other
        // within 1 MiB of its end (stack_guard_gap), so all between this frame and its beginning is mapped, by this
        // thread alone. Volatile: what lies there are other functions' variables.
        unsafe { with_exposed_provenance::<usize>(at).read_volatile() }
    };
    holds_frame(count, |at| (at < count).then(|| word(at)), wanted)
}

/// True where `wanted` is somewhere in memory, or not all of it is there. Only where there is room for it
/// on the stack.
#[inline(never)]
fn is_between(range: Range<usize>, wanted: usize) -> bool {
    let mut words = [0usize; WORDS];
    let mut at = range.start;
    loop {
        let count = WORDS.min(range.end.saturating_sub(at) / size_of::<usize>());
        let Some(some @ [_, ..]) = words.get_mut(..count) else {
            return false;
        };
        // By the kernel: what lies there need not be one stack, or readable.
        let is_there = copy_words(at, some) == Ok(count);
        if !is_there || holds_frame(count, |at| some.get(at).copied(), wanted) {
            return true;
        }
        if count < WORDS {
            return false;
        }
        // A frame may begin with the last words.
        at += (count - 2) * size_of::<usize>();
    }
}

/// Whether a frame of the kernel's begins in one of so many words: `wanted`, and behind it `uc_flags`, which has
/// UC_SIGCONTEXT_SS set (Linux 4.6) and nothing above UC_STRICT_RESTORE_SS, and an empty `uc_link`. What sigaction(2)
/// leaves on the stack has a signal mask there.
#[inline(always)]
fn holds_frame(count: usize, word: impl Fn(usize) -> Option<usize>, wanted: usize) -> bool {
    let mut found = (0..count).filter(|at| word(*at) == Some(wanted));
    found.any(|at| matches!((word(at + 1), word(at + 2)), (Some(2..=7), Some(0))))
}

/// What the kernel takes for an action (`struct kernel_sigaction`).
#[cfg(target_arch = "x86_64")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// Has glibc install the action that a signal has already, and looks what it told the kernel.
#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "sigaction(2), past the C library and through it"
)]
fn trampoline() -> Option<usize> {
    use core::ptr;

    const RESTORER: u64 = 0x0400_0000;
    let action = |new: *const Action, old: *mut Action| {
        // SAFETY: an action that is read and one that is written, or null.
        let answer = unsafe {
            let (call, size) = (libc::SYS_rt_sigaction, size_of::<u64>());
            libc::syscall(call, libc::SIGUSR2, new, old, size)
        };
        answer == 0
    };
    let (mut before, mut now) = (Action::default(), Action::default());
    if !action(ptr::null(), &raw mut before) {
        return None;
    }
    if before.flags & RESTORER == 0 {
        // SAFETY: all zeroes are a valid value, and this handler is the one that is there.
        let asked = unsafe {
            let mut same: libc::sigaction = core::mem::zeroed();
            same.sa_sigaction = before.handler;
            libc::sigaction(libc::SIGUSR2, &raw const same, ptr::null_mut()) == 0
        };
        let seen = asked && action(ptr::null(), &raw mut now);
        if !(action(&raw const before, ptr::null_mut()) && seen) {
            return None;
        }
    } else {
        now = before;
    }
    (now.flags & RESTORER != 0 && now.restorer > UNKNOWN).then_some(now.restorer)
}

#[cfg(not(target_arch = "x86_64"))]
fn trampoline() -> Option<usize> {
    None
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use core::sync::atomic::AtomicU32;

    use super::*;

    static SEEN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn handler(_: i32) {
        SEEN.store(1 + u32::from(may_be()), Ordering::Relaxed);
    }

    /// In a thread of its own, whose stack no handler has run on.
    #[test]
    #[expect(unsafe_code, reason = "installs a handler")]
    fn a_handler_is_told_from_the_program() {
        std::thread::spawn(|| {
            watch(0);
            assert!(!may_be());
            // SAFETY: the handler only calls what may be called in one.
            unsafe {
                libc::signal(libc::SIGWINCH, handler as *const () as usize);
                libc::raise(libc::SIGWINCH);
                libc::signal(libc::SIGWINCH, libc::SIG_DFL);
            }
            assert_eq!(SEEN.load(Ordering::Relaxed), 2);
            // Others tests make threads.
            RETURN.store(0, Ordering::Relaxed);
        })
        .join()
        .unwrap();
    }
}
