//! Whether a program has lived long enough, and touched enough text, for a copy to be worth while: what the thread of
//! [`crate::watch`] looks for.

use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use core::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::{Settings, because, move_all};
use crate::ledger::text_reason as reason;
use crate::orders::TextMode;
use crate::watch::{self, Job, LONGEST, SHORTEST, Stop, Without};

/// The CPU time that a program has used before any copy is made.
const LIVED: Duration = Duration::from_secs(1);
/// The most that a copy costs, measured: making an image takes 0.2 to 0.6 ms for each MiB.
const COST: Duration = Duration::from_micros(600);
/// A copy may take one part in so many of the CPU time that the program has used.
const SHARE: u32 = 50;

static JOB: Job = Job::new(0, look, without);
static SETTINGS: AtomicPtr<Settings> = AtomicPtr::new(core::ptr::null_mut());
/// The CPU time before which it does not try again.
static LEAST: Time = Time::new(LIVED);
/// The CPU time at the last look, and how long the program may be left alone.
static BEFORE: Time = Time::new(Duration::ZERO);
static IDLE: Time = Time::new(SHORTEST);

/// A time that the thread keeps from one look to the next, in whole milliseconds.
struct Time(AtomicU64);

impl Time {
    #[expect(clippy::cast_possible_truncation, reason = "seconds")]
    const fn new(time: Duration) -> Self {
        Self(AtomicU64::new(time.as_millis() as u64))
    }

    fn get(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }

    fn set(&self, time: Duration) {
        let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.0.store(milliseconds, Ordering::Relaxed);
    }
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
    let least = LEAST.get().max(LIVED);
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
    let cost = COST.saturating_mul(u32::try_from(mebibytes).unwrap_or(u32::MAX));
    let worth = cost.saturating_mul(SHARE);
    if worth > used {
        LEAST.set(worth);
        return Some(left(used, worth));
    }
    LEAST.set(least.max(worth).saturating_mul(2));
    let evidence = settings.mode == TextMode::Auto;
    let later = move_all(&found, settings, stop, evidence);
    if !later && settings.libs.is_none() {
        return None;
    }
    because(reason::NOT_YET);
    Some(SHORTEST)
}

/// How long it takes at least until the program has used so much: all CPUs together, and ever longer where the program
/// sleeps.
fn left(used: Duration, least: Duration) -> Duration {
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count());
    let soonest = (least - used) / cpus.max(1);
    let idle = match used.saturating_sub(BEFORE.get()) < SHORTEST {
        true => IDLE.get().saturating_mul(2).min(LONGEST),
        false => SHORTEST,
    };
    BEFORE.set(used);
    IDLE.set(idle);
    soonest.max(idle).clamp(SHORTEST, LONGEST)
}
