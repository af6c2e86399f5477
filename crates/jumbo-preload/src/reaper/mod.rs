//! When the sibling of [`jumbo_inside::reaper`] is started and ended: [`begin`], [`forked`], [`without`], [`renewed`]; and
//! [`auto`], for programs that get one when they are large.

pub(crate) mod auto;

use core::ops::Range;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use jumbo_inside::orders::ReaperMode;
use jumbo_inside::reaper::{self, Ids, State};
use jumbo_inside::sandbox;

use crate::symbols;

jumbo_inside::one_page! {
    /// The mode that was ordered: [`ON`], [`AUTO`], or 0.
    static MODE: AtomicU8 = AtomicU8::new(0);
}

const ON: u8 = 1;
const AUTO: u8 = 2;

/// Who takes the orphans below this process: what the orders say, and where in the environment.
pub(crate) struct Orphans {
    pub(crate) are_taken: bool,
    pub(crate) digit: *mut u8,
}

/// Gets ready, and starts the sibling where it is wanted at once. At the end of the constructor: in the
/// main thread, and with the ledger in place. `counted`: jumbo, or the program, tells what malloc has.
pub(crate) fn begin(mode: ReaperMode, counted: bool, orphans: &Orphans) {
    let mode = match mode {
        ReaperMode::Off => return,
        ReaperMode::On => ON,
        ReaperMode::Auto => AUTO,
    };
    if sandbox::is_entered() {
        return reaper::record(State::Seccomp);
    }
    let Some(image) = image() else {
        return reaper::record(State::Kernel);
    };
    // SAFETY: `digit` is that of the environment; `image` is where this library was found; the functions are in `bytes`; a library in
    // LD_PRELOAD is never unloaded.
    unsafe { reaper::prepare(workers(), &image, orphans.are_taken, orphans.digit) };
    auto::count(counted);
    MODE.store(mode, Ordering::Release);
    enter(mode);
}

/// In the child of a fork, when it counts in a slot of its own.
///
/// # Safety
/// As for [`reaper::forked`].
pub(crate) unsafe fn forked() {
    let mode = MODE.load(Ordering::Acquire);
    if mode != 0 {
        // SAFETY: the caller's promise.
        unsafe { reaper::forked() };
        enter(mode);
    }
}

fn enter(mode: u8) {
    if mode == ON {
        reaper::start();
    } else {
        auto::watch();
    }
}

/// Makes a call that some kernels refuse to a process whose memory another one shares, or that leaves what the
/// sibling would keep. Where there is one it is ended before, and started again after; in between no thread
/// starts one. `refused` tells such an answer, which the kernel may still give for a moment.
pub(crate) fn without<T>(mut call: impl FnMut() -> T, refused: impl Fn(&T) -> bool) -> T {
    let kept_out = reaper::keep_out();
    let retired = reaper::retire(State::Retired);
    let mut answer = call();
    for _ in 0..TRIES {
        if !retired || !refused(&answer) {
            break;
        }
        let moment = rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 100_000,
        };
        let _ = rustix::thread::nanosleep(&moment);
        answer = call();
    }
    if kept_out && reaper::let_in(retired) {
        again();
    }
    answer
}

/// Makes a call that asks for these IDs. The sibling that there is would stay who it was: it is ended before, unless
/// nothing changes. With `on` another one is started after, and with `auto` once the process has asked for more memory: a
/// server that changes its user for each request is not to pay for a start each time, and pays for [`RENEWALS`] at most.
pub(crate) fn renewed<T>(ids: Ids, wanted: &[u32], call: impl FnOnce() -> T) -> T {
    let mode = MODE.load(Ordering::Acquire);
    // Behind a filter it is told, which takes no call.
    if sandbox::is_entered() {
        reaper::dismiss(State::Retired);
        return call();
    }
    if mode == 0 || reaper::stays(ids, wanted) {
        return call();
    }
    auto::wait_for_more();
    let kept_out = reaper::keep_out();
    let is_wanted = reaper::retire(State::Retired)
        && mode == ON
        && RENEWED.fetch_add(1, Ordering::Relaxed) < RENEWALS;
    let answer = call();
    if kept_out && reaper::let_in(is_wanted) {
        again();
    }
    answer
}

/// How often a sibling is started again in a process that changes who it is.
const RENEWALS: u32 = 8;
static RENEWED: AtomicU32 = AtomicU32::new(0);

/// Starts the sibling that was kept out, or ended, for a call.
fn again() {
    let mode = MODE.load(Ordering::Acquire);
    if mode != ON && !auto::is_guarding() {
        return;
    }
    match reaper::start() {
        State::Running if mode == ON => {}
        State::Running => auto::started(),
        // Left to the thread that came into such a call meanwhile.
        State::Waiting => {}
        // Children in another PID namespace: it was ended for this.
        State::PidOne => reaper::record(State::Retired),
        _ => {}
    }
}

/// How often a call is tried again: for 20 ms, where the sibling's last instructions take microseconds.
const TRIES: u32 = 200;

/// The CPUs that this process may use, at most 4.
fn workers() -> usize {
    let allowed = rustix::thread::sched_getaffinity(None);
    allowed.map_or(1, |cpus| cpus.count().clamp(1, 4) as usize)
}

/// The addresses of this library, from its first segment to the end of its last.
fn image() -> Option<Range<usize>> {
    let page = rustix::param::page_size();
    let mut found = None;
    symbols::each(&mut |object| {
        found = object.is_this_library().then(|| object.image());
        found.is_some()
    });
    found.map(|image| image.start & !(page - 1)..image.end.next_multiple_of(page))
}
