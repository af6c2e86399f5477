//! No call of this library is in progress at a fork(2): [`pass`].
//!
//! A lock that another thread holds at a fork stays held in the child, which has no such thread. So
//! each call passes this gate, and a fork closes it: it waits for the calls in progress, and others
//! wait for the fork. All locks of this library are free then, in parent and child.
//!
//! A handler of a signal may fork, or make a call, while its thread is in a call: that one passes
//! already, and is not waited for. Its locks are its own in the child, too.

use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::thread::futex;

use crate::failure::{Failure, Outcome};

/// Number of threads in a call, and above it the number of forks, [`FORK`] each.
static STATE: AtomicU32 = AtomicU32::new(0);
const FORK: u32 = 1 << 20;

/// Answer of pthread_atfork(3).
static REGISTERED: AtomicI32 = AtomicI32::new(0);

/// The loader registers the handlers: during the first call another thread may be in fork(2), which
/// holds the C library's lock of the handlers.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = register;

extern "C" fn register() {
    // SAFETY: the handlers use an atomic, a futex and a thread-local that needs no initialization.
    let answer = unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_child))
    };
    REGISTERED.store(answer, Ordering::Relaxed);
}

thread_local! {
    /// This thread is in a call.
    static IS_IN: Cell<bool> = const { Cell::new(false) };
}

/// Reports whether this thread is in a call. False in a thread that is ending: its call counts.
fn is_in() -> bool {
    IS_IN.try_with(Cell::get).unwrap_or(false)
}

fn wait(seen: u32) {
    // Woken by each end of a call or fork; the caller checks again.
    let _ = futex::wait(&STATE, futex::Flags::PRIVATE, seen, None);
}

fn wake() {
    let _ = futex::wake(&STATE, futex::Flags::PRIVATE, u32::MAX >> 1);
}

/// Closes the gate.
extern "C" fn before_fork() {
    let own = u32::from(is_in());
    let mut seen = STATE.fetch_add(FORK, Ordering::Acquire) + FORK;
    while seen % FORK > own {
        wait(seen);
        seen = STATE.load(Ordering::Acquire);
    }
}

extern "C" fn after_fork() {
    STATE.fetch_sub(FORK, Ordering::Release);
    wake();
}

extern "C" fn after_fork_child() {
    STATE.store(is_in().into(), Ordering::Release);
}

/// A call in progress.
struct Passage;

impl Drop for Passage {
    fn drop(&mut self) {
        let _ = IS_IN.try_with(|is_in| is_in.set(false));
        if STATE.fetch_sub(1, Ordering::Release) > FORK {
            wake();
        }
    }
}

/// Runs a call while no fork is in progress.
///
/// # Errors
/// Those of pthread_atfork(3), and of `body`.
pub(crate) fn pass<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    match REGISTERED.load(Ordering::Relaxed) {
        0 => {}
        code => {
            return Err(Failure::new(
                Errno::from_raw_os_error(code),
                "pthread_atfork",
            ));
        }
    }
    if is_in() {
        return body();
    }
    let mut seen = STATE.load(Ordering::Relaxed);
    loop {
        if seen >= FORK {
            wait(seen);
            seen = STATE.load(Ordering::Relaxed);
            continue;
        }
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        match STATE.compare_exchange_weak(seen, seen + 1, acquire, relaxed) {
            Ok(_) => break,
            Err(now) => seen = now,
        }
    }
    let _ = IS_IN.try_with(|is_in| is_in.set(true));
    let _passage = Passage;
    body()
}
