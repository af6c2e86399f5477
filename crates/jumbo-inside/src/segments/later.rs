//! Whether a program has lived long enough, and touched enough text, for a copy to be worth while: what the thread of
//! [`crate::watch`] looks for.

use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use core::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::{Settings, because, move_all};
use crate::ledger::text_reason as reason;
use crate::orders::TextMode;
use crate::sync::millis;
use crate::watch::{self, Job, MAX_WAIT, MIN_WAIT, Stop, Without};

/// The CPU time that a program has used before any copy is made.
const MIN_CPU_TIME: Duration = Duration::from_secs(1);
/// The most that a copy costs, measured: making an image takes 0.2 to 0.6 ms for each MiB.
const COST_OF_MIB: Duration = Duration::from_micros(600);
/// A copy may take one part in so many of the CPU time that the program has used.
const CPU_TIME_PARTS: u32 = 50;

static JOB: Job = Job::new(0, look, without);
static SETTINGS: AtomicPtr<Settings> = AtomicPtr::new(core::ptr::null_mut());
/// The CPU time before which it does not try again.
static LEAST_MILLIS: AtomicU64 = AtomicU64::new(0);
/// The CPU time at the last look, and how long the program may be left alone.
static BEFORE_MILLIS: AtomicU64 = AtomicU64::new(0);
static IDLE_MILLIS: AtomicU64 = AtomicU64::new(0);

fn get(time: &AtomicU64) -> Duration {
    Duration::from_millis(time.load(Ordering::Relaxed))
}

/// Has the thread look.
pub(super) fn begin(settings: &'static Settings) {
    SETTINGS.store(core::ptr::from_ref(settings).cast_mut(), Ordering::Release);
    watch::begin(&JOB, Duration::ZERO);
}

/// Whether text may be replaced while the program runs.
#[inline(always)]
pub(super) fn may_move() -> bool {
    !SETTINGS.load(Ordering::Relaxed).is_null()
}

fn without(why: Without) {
    because(match why {
        Without::Filter => reason::FILTER,
        Without::Room => reason::NO_MEMORY,
        Without::Kernel => reason::UNKNOWN,
        Without::Ended => reason::ENDED,
    });
}

fn look(stop: &Stop) -> Option<Duration> {
    #[expect(unsafe_code, reason = "an atomic reference has no safe form in core")]
    // SAFETY: null, or a static that was stored there.
    let settings = unsafe { SETTINGS.load(Ordering::Acquire).as_ref() }?;
    let used = clock_gettime(ClockId::ProcessCPUTime);
    let used = Duration::try_from(used).unwrap_or(Duration::MAX);
    let least = get(&LEAST_MILLIS).max(MIN_CPU_TIME);
    if used < least {
        return Some(left(used, least));
    }
    let Some(found) = settings.find() else {
        because(reason::UNKNOWN);
        return None;
    };
    let mebibytes = found
        .iter()
        .map(|segment| segment.len() >> 20)
        .sum::<usize>();
    let cost = COST_OF_MIB.saturating_mul(u32::try_from(mebibytes).unwrap_or(u32::MAX));
    let worth = cost.saturating_mul(CPU_TIME_PARTS);
    if worth > used {
        LEAST_MILLIS.store(millis(worth), Ordering::Relaxed);
        return Some(left(used, worth));
    }
    let next = least.max(worth).saturating_mul(2);
    LEAST_MILLIS.store(millis(next), Ordering::Relaxed);
    let evidence = settings.mode == TextMode::Auto;
    let later = move_all(&found, settings, stop, evidence);
    if !later && settings.libs.is_none() {
        return None;
    }
    because(reason::NOT_YET);
    Some(MIN_WAIT)
}

/// How long it takes at least until the program has used so much: all CPUs together, and ever longer where the program
/// sleeps.
fn left(used: Duration, least: Duration) -> Duration {
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count());
    let soonest = (least - used) / cpus.max(1);
    let idle = match used.saturating_sub(get(&BEFORE_MILLIS)) < MIN_WAIT {
        true => (get(&IDLE_MILLIS) * 2).clamp(MIN_WAIT, MAX_WAIT),
        false => MIN_WAIT,
    };
    BEFORE_MILLIS.store(millis(used), Ordering::Relaxed);
    IDLE_MILLIS.store(millis(idle), Ordering::Relaxed);
    soonest.max(idle).clamp(MIN_WAIT, MAX_WAIT)
}
