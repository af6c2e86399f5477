//! CPU time of scans and collapses: [`wait`], [`spend`].
//!
//! On an idle CPU they take no time from the program. On busy ones they take at most a part of the
//! program's own CPU time, or of the time since its start, plus what they have saved: a block that is advised before the program
//! fills it has one page fault instead of one per base page. So a program that ends soon, or whose
//! memory is costly to collapse, loses at most that part.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;

use rustix::thread::sched_getaffinity;

use super::table::PAGE_BYTES;
use super::tracked::pmd;
use crate::sync::{millis, now};
use crate::watch::{program_cpu_time, take_comparison_time};
use jumbo_sys::proc;

/// Part of the program's CPU time, as a divisor.
const SHARE_DIVISOR: u32 = 32;
/// CPU time at first: a scan that advises ahead of a fill then pays for the next one.
const INITIAL: Duration = Duration::from_millis(5);
/// Part of the time since the first scan, as a divisor: the memory of a program that sleeps becomes
/// huge on a busy host, too.
const SLEEPER_DIVISOR: u32 = 40;
/// CPU time that a page fault takes at least.
const FAULT: Duration = Duration::from_nanos(500);
/// Age up to which the number of running tasks holds.
const MAX_AGE: Duration = Duration::from_millis(2);
/// Bounds of the wait for CPU time.
const MIN_WAIT: Duration = Duration::from_millis(1);
const MAX_WAIT: Duration = Duration::from_millis(500);

static SPENT_MICROS: AtomicU64 = AtomicU64::new(0);
static SAVED_MICROS: AtomicU64 = AtomicU64::new(0);
/// Time of the first scan; 0: none.
static START_MILLIS: AtomicU64 = AtomicU64::new(0);
static IS_BUSY: AtomicBool = AtomicBool::new(false);
static READ_MILLIS: AtomicU64 = AtomicU64::new(0);

/// Counts CPU time of a scan or collapse, and of the comparisons before it.
pub(super) fn spend(time: Duration) {
    let time = time.saturating_add(take_comparison_time());
    if is_busy() {
        SPENT_MICROS.fetch_add(micros(time), Ordering::Relaxed);
    }
}

/// Counts the page faults of base pages that `blocks` will not have.
pub(super) fn save(blocks: usize) {
    let pages = u32::try_from(blocks * pmd() / PAGE_BYTES).unwrap_or(u32::MAX);
    let saved = micros(FAULT.saturating_mul(pages));
    SAVED_MICROS.fetch_add(saved, Ordering::Relaxed);
}

/// Returns the least time until the next scan or collapse.
pub(super) fn wait() -> Duration {
    if !is_busy() {
        return Duration::ZERO;
    }
    let of = |micros: &AtomicU64| Duration::from_micros(micros.load(Ordering::Relaxed));
    let allowed = (program_cpu_time() / SHARE_DIVISOR)
        .max(age() / SLEEPER_DIVISOR)
        .saturating_add(INITIAL)
        .saturating_add(of(&SAVED_MICROS));
    match of(&SPENT_MICROS).saturating_sub(allowed) {
        Duration::ZERO => Duration::ZERO,
        missing => missing
            .saturating_mul(SHARE_DIVISOR)
            .clamp(MIN_WAIT, MAX_WAIT),
    }
}

/// Begins anew in the child of a fork, whose CPU time begins at 0.
pub(super) fn forked() {
    SPENT_MICROS.store(0, Ordering::Relaxed);
    SAVED_MICROS.store(0, Ordering::Relaxed);
    START_MILLIS.store(0, Ordering::Relaxed);
}

/// Returns the time since the first scan.
fn age() -> Duration {
    let now = now();
    let (first, relaxed) = (millis(now), Ordering::Relaxed);
    let start = START_MILLIS.compare_exchange(0, first, relaxed, relaxed);
    now.saturating_sub(Duration::from_millis(start.err().unwrap_or(first)))
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Reports whether tasks of the host wait for a CPU.
fn is_busy() -> bool {
    let read = Duration::from_millis(READ_MILLIS.load(Ordering::Relaxed));
    if now().saturating_sub(read) > MAX_AGE {
        // An unknown number counts as too many.
        let is_busy = running().is_none_or(|running| running > cpus());
        IS_BUSY.store(is_busy, Ordering::Relaxed);
        READ_MILLIS.store(millis(now()), Ordering::Relaxed);
    }
    IS_BUSY.load(Ordering::Relaxed)
}

/// Returns the number of running and runnable tasks of the host, the caller included.
/// proc_loadavg(5).
fn running() -> Option<usize> {
    let mut text = [0u8; 64];
    parse(proc::read(c"/proc/loadavg", &mut text).ok()?)
}

fn parse(text: &[u8]) -> Option<usize> {
    let fourth = text.split(|byte| *byte == b' ').nth(3)?;
    proc::number(fourth.split(|byte| *byte == b'/').next()?)
}

/// Returns the number of CPUs that the caller may use.
fn cpus() -> usize {
    sched_getaffinity(None).map_or(1, |cpus| usize::try_from(cpus.count()).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_tasks_are_the_first_number_of_the_fourth_field() {
        assert_eq!(parse(b"0.00 0.01 0.05 3/532 12345\n"), Some(3));
        assert_eq!(parse(b"0.00 0.01 0.05"), None);
        assert!(running().is_some_and(|running| running >= 1));
    }
}
