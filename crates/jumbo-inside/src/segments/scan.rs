//! The scan that finds when a copy of text pays: the program has used enough CPU time and touched
//! enough text. Runs on the thread of [`crate::watch`].

use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use core::time::Duration;

use super::{SegmentSettings, move_all, record_reason};
use crate::ledger::text_reason as reason;
use crate::orders::TextMode;
use crate::sync::millis;
use crate::watch::{self, Job, MAX_WAIT, MIN_WAIT, Stop, Without};

/// CPU time of the program before the first copy.
const MIN_CPU_TIME: Duration = Duration::from_secs(1);
/// Maximum cost of a copy: making an image took 0.2 to 0.6 ms per MiB.
const COPY_TIME_PER_MIB: Duration = Duration::from_micros(600);
/// Minimum CPU time of the program, as a multiple of the copy's cost.
const CPU_TIME_PER_COST: u32 = 50;

static JOB: Job = Job::new(0, scan, without).opening_files();
static SETTINGS: AtomicPtr<SegmentSettings> = AtomicPtr::new(core::ptr::null_mut());
/// CPU time before which no copy is tried again.
static NEXT_CPU_MILLIS: AtomicU64 = AtomicU64::new(0);
/// CPU time at the last scan.
static LAST_CPU_MILLIS: AtomicU64 = AtomicU64::new(0);
/// Scan interval of an idle program.
static IDLE_MILLIS: AtomicU64 = AtomicU64::new(0);

fn get(time: &AtomicU64) -> Duration {
    Duration::from_millis(time.load(Ordering::Relaxed))
}

pub(super) fn begin(settings: &'static SegmentSettings) {
    SETTINGS.store(core::ptr::from_ref(settings).cast_mut(), Ordering::Release);
    watch::begin(&JOB, Duration::ZERO);
}

/// Reports whether text may be replaced while the program runs.
#[inline(always)]
pub(super) fn may_move() -> bool {
    !SETTINGS.load(Ordering::Relaxed).is_null()
}

fn without(why: Without) {
    record_reason(match why {
        Without::Filter => reason::FILTER,
        Without::Room => reason::NO_MEMORY,
        Without::Kernel => reason::UNKNOWN,
        Without::Ended => reason::ENDED,
    });
}

fn scan(stop: &Stop) -> Option<Duration> {
    #[expect(unsafe_code, reason = "an atomic reference has no safe form in core")]
    // SAFETY: null, or a static that was stored there.
    let settings = unsafe { SETTINGS.load(Ordering::Acquire).as_ref() }?;
    let used = watch::program_cpu_time();
    let least = get(&NEXT_CPU_MILLIS).max(MIN_CPU_TIME);
    if used < least {
        return Some(interval(used, least));
    }
    let Some(found) = settings.find() else {
        record_reason(reason::UNKNOWN);
        return None;
    };
    let mebibytes = found
        .iter()
        .map(|segment| segment.len() >> 20)
        .sum::<usize>();
    let cost = COPY_TIME_PER_MIB.saturating_mul(u32::try_from(mebibytes).unwrap_or(u32::MAX));
    let required = cost.saturating_mul(CPU_TIME_PER_COST);
    if required > used {
        NEXT_CPU_MILLIS.store(millis(required), Ordering::Relaxed);
        return Some(interval(used, required));
    }
    // A move opens the images of other processes.
    if JOB.is_deferred() {
        return Some(MAX_WAIT);
    }
    let next = least.max(required).saturating_mul(2);
    NEXT_CPU_MILLIS.store(millis(next), Ordering::Relaxed);
    let evidence = settings.mode == TextMode::Auto;
    let later = move_all(&found, settings, stop, evidence);
    if !later && settings.libs.is_none() {
        return None;
    }
    record_reason(reason::NOT_YET);
    Some(MIN_WAIT)
}

/// Returns the time until the next scan: the minimum in which all CPUs can use the missing CPU
/// time; doubled at each scan of an idle program.
fn interval(used: Duration, least: Duration) -> Duration {
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count());
    let soonest = (least - used) / cpus.max(1);
    let idle = match used.saturating_sub(get(&LAST_CPU_MILLIS)) < MIN_WAIT {
        true => (get(&IDLE_MILLIS) * 2).clamp(MIN_WAIT, MAX_WAIT),
        false => MIN_WAIT,
    };
    LAST_CPU_MILLIS.store(millis(used), Ordering::Relaxed);
    IDLE_MILLIS.store(millis(idle), Ordering::Relaxed);
    soonest.max(idle).clamp(MIN_WAIT, MAX_WAIT)
}
