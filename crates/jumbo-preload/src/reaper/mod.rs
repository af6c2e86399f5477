//! Start and end of the process of [`jumbo_inside::reaper`]: [`begin`], [`forked`], [`without`],
//! [`renewed`]; and [`auto`], which starts it once the program is large.

pub(crate) mod auto;

use core::ops::Range;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use jumbo_inside::orders::ReaperMode;
use jumbo_inside::reaper::{self, Ids, State};
use jumbo_inside::sandbox;

use crate::own_stack::on;
use crate::symbols;

jumbo_inside::one_page! {
    /// Configured mode: [`ON`], [`AUTO`], or 0.
    static MODE: AtomicU8 = AtomicU8::new(0);
}

const ON: u8 = 1;
const AUTO: u8 = 2;

/// Maximum number of restarts in a process that changes its identity.
const MAX_RENEWALS: u32 = 8;
static RENEWALS: AtomicU32 = AtomicU32::new(0);

/// Maximum number of repeats of a refused call, each after [`RETRY_NANOSECONDS`]: 20 ms, where the
/// last instructions of the reaper take microseconds.
const MAX_RETRIES: u32 = 200;
const RETRY_NANOSECONDS: i64 = 100_000;

/// Initialises the reaper, and starts it in mode `on`.
///
/// The constructor calls it last: in the main thread, with the ledger mapped. `counted`: the memory
/// of malloc is counted. `orphans_are_taken`, `digit`: as for [`reaper::prepare`].
pub(crate) fn begin(mode: ReaperMode, counted: bool, orphans_are_taken: bool, digit: *mut u8) {
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
    // SAFETY: `digit` is that of the environment; `image` is this library's; the functions are in
    // `bytes`; a library in LD_PRELOAD is never unloaded.
    unsafe { reaper::prepare(workers(), &image, orphans_are_taken, digit) };
    auto::count(counted);
    MODE.store(mode, Ordering::Release);
    enter(mode);
}

/// Resets the state in the child of a fork, after it has a slot of its own.
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

/// Makes a call without a reaper: one that the kernel refuses while another process shares the
/// memory, or that changes attributes which the reaper would keep. A reaper ends before the call
/// and starts again after it; no thread starts one in between. `refused` detects a refusal, which
/// may last for a moment.
pub(crate) fn without<T>(mut call: impl FnMut() -> T, refused: impl Fn(&T) -> bool) -> T {
    let is_blocked = reaper::block_start();
    let retired = on(|| reaper::retire(State::Retired));
    let mut answer = call();
    for _ in 0..MAX_RETRIES {
        if !retired || !refused(&answer) {
            break;
        }
        let interval = rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: RETRY_NANOSECONDS,
        };
        let _ = rustix::thread::nanosleep(&interval);
        answer = call();
    }
    if is_blocked && reaper::allow_start(retired) {
        on(again);
    }
    answer
}

/// Makes a call that requests these IDs. A reaper would keep the old ones: it ends before the call,
/// unless nothing changes. In mode `on` it starts again after the call, at most [`MAX_RENEWALS`]
/// times: a server may change its user for each request. In mode `auto` it starts once the process
/// allocates more.
pub(crate) fn renewed<T>(ids: Ids, requested: &[u32], call: impl FnOnce() -> T) -> T {
    let mode = MODE.load(Ordering::Acquire);
    // Takes no system call, which a filter may forbid.
    if sandbox::is_entered() {
        on(|| reaper::dismiss(State::Retired));
        return call();
    }
    if mode == 0 || reaper::keeps_ids(ids, requested) {
        return call();
    }
    auto::wait_for_more();
    let is_blocked = reaper::block_start();
    let is_wanted = on(|| reaper::retire(State::Retired))
        && mode == ON
        && RENEWALS.fetch_add(1, Ordering::Relaxed) < MAX_RENEWALS;
    let answer = call();
    if is_blocked && reaper::allow_start(is_wanted) {
        on(again);
    }
    answer
}

/// Starts the reaper that was blocked, or ended, for a call.
fn again() {
    let mode = MODE.load(Ordering::Acquire);
    if mode != ON && !auto::is_guarding() {
        return;
    }
    match reaper::start() {
        State::Running if mode == ON => {}
        State::Running => auto::started(),
        // Another thread is in such a call, and starts it after that.
        State::Waiting => {}
        // The call moved children to another PID namespace: that is why the reaper ended.
        State::PidOne => reaper::record(State::Retired),
        _ => {}
    }
}

/// Returns the number of CPUs of this process, at most 4.
fn workers() -> usize {
    let allowed = rustix::thread::sched_getaffinity(None);
    allowed.map_or(1, |cpus| cpus.count().clamp(1, 4) as usize)
}

/// Returns the addresses of this library, from its first segment to the end of its last.
fn image() -> Option<Range<usize>> {
    let page = rustix::param::page_size();
    let mut found = None;
    symbols::each(&mut |object| {
        found = object.is_this_library().then(|| object.image());
        found.is_some()
    });
    found.map(|image| image.start & !(page - 1)..image.end.next_multiple_of(page))
}
