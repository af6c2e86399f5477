//! CPU time of scans and collapses: [`wait`], [`spend`].
//!
//! On an idle CPU they take no time from the program. On busy ones they take at most a part of the
//! program's own CPU time, or of the time that passes, plus what they save: a block that is advised
//! before the program fills it has one page fault instead of one per base page. So a program that ends
//! soon, or whose memory is costly to collapse, loses at most that part. It is a token bucket: a part
//! that is not spent in time is lost, or a program that slept would be disturbed when it works. What was
//! saved is kept.
//!
//! The CPUs are busy if more tasks run than there are, or if the scanner itself has waited: that shows
//! the tasks of a cpuset, and the quota of a cgroup.

use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use core::time::Duration;

use super::table::PAGE_BYTES;
use super::tracked::pmd;
use crate::sync::{millis, now};
use crate::watch::{program_cpu_time, take_comparison_time};
use jumbo_sys::proc;

/// Part of the program's CPU time, as a divisor.
const SHARE_DIVISOR: u32 = 64;
/// Nanoseconds of CPU time of the program's part that may be spent later, and at first: a scan that
/// advises ahead of a fill then pays for the next one.
const BURST: i64 = 5_000_000;
/// Part of the time that passes, as a divisor: the memory of a program that sleeps becomes huge on a
/// busy host, too.
const SLEEPER_DIVISOR: u32 = 64;
/// CPU time that a page fault takes at least.
const FAULT: Duration = Duration::from_nanos(500);
/// Wait for a CPU that is none: an idle CPU wakes up.
const WAKE_NANOS: u64 = 200_000;
/// Time that the scanner has run and waited before its waits are judged again.
const MIN_TURN_NANOS: u64 = 1_000_000;
/// Age up to which the number of running tasks holds.
const MAX_AGE: Duration = Duration::from_millis(10);
/// Bounds of the wait for CPU time.
const MIN_WAIT: Duration = Duration::from_millis(1);
const MAX_WAIT: Duration = Duration::from_millis(500);

/// CPU time that may be spent; below 0: that has to be earned first.
static BALANCE_NANOS: AtomicI64 = AtomicI64::new(BURST);
/// The program's CPU time, and the time, up to which it was earned.
static USED_NANOS: AtomicU64 = AtomicU64::new(0);
static PASSED_NANOS: AtomicU64 = AtomicU64::new(0);
static IS_BUSY: AtomicBool = AtomicBool::new(false);
static READ_MILLIS: AtomicU64 = AtomicU64::new(0);
/// [`turns`] of the scanner when its waits were last judged.
static LAST_TURNS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
static HAS_WAITED: AtomicBool = AtomicBool::new(false);

/// Counts CPU time of a scan or collapse, and of the comparisons before it.
pub(super) fn spend(time: Duration) {
    let time = time.saturating_add(take_comparison_time());
    if is_busy() {
        change(|balance| balance.saturating_sub_unsigned(nanos(time)));
    }
}

/// Counts the page faults of base pages that `blocks` will not have.
pub(super) fn save(blocks: usize) {
    let pages = u32::try_from(blocks * pmd() / PAGE_BYTES).unwrap_or(u32::MAX);
    let saved = nanos(FAULT.saturating_mul(pages));
    change(|balance| balance.saturating_add_unsigned(saved));
}

fn change(to: impl Fn(i64) -> i64) {
    let relaxed = Ordering::Relaxed;
    let _ = BALANCE_NANOS.fetch_update(relaxed, relaxed, |balance| Some(to(balance)));
}

/// Returns the least time until the next scan or collapse.
pub(super) fn wait() -> Duration {
    if !is_busy() {
        return Duration::ZERO;
    }
    let since = |last: &AtomicU64, time: Duration| {
        let last = last.swap(nanos(time), Ordering::Relaxed);
        time.saturating_sub(Duration::from_nanos(last))
    };
    let used = since(&USED_NANOS, program_cpu_time());
    let passed = since(&PASSED_NANOS, now());
    let earned = nanos((used / SHARE_DIVISOR).max(passed / SLEEPER_DIVISOR));
    change(|balance| balance.max(balance.saturating_add_unsigned(earned).min(BURST)));
    match BALANCE_NANOS.load(Ordering::Relaxed) {
        0.. => Duration::ZERO,
        missing => Duration::from_nanos(missing.unsigned_abs())
            .saturating_mul(SHARE_DIVISOR)
            .clamp(MIN_WAIT, MAX_WAIT),
    }
}

/// Begins anew in the child of a fork, whose CPU time begins at 0.
pub(super) fn forked() {
    BALANCE_NANOS.store(BURST, Ordering::Relaxed);
    USED_NANOS.store(0, Ordering::Relaxed);
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Reports whether tasks wait for the CPUs of the program.
fn is_busy() -> bool {
    let read = Duration::from_millis(READ_MILLIS.load(Ordering::Relaxed));
    if now().saturating_sub(read) > MAX_AGE {
        // An unknown number counts as too many.
        let is_crowded = || match (running(), online()) {
            (Some(running), Some(online)) => running > online,
            _ => true,
        };
        let is_busy = has_waited() || is_crowded();
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

/// Returns the number of CPUs that run tasks, which may be fewer to the caller.
fn online() -> Option<usize> {
    let mut text = [0u8; 256];
    let list = proc::read(c"/sys/devices/system/cpu/online", &mut text).ok()?;
    list.split(|byte| *byte == b',').map(length).sum()
}

/// Returns the number of CPUs in a part of a list: `3`, or `0-63`. cpuset(7).
fn length(part: &[u8]) -> Option<usize> {
    let mut ends = part.split(|byte| *byte == b'-').map(proc::number);
    let first = ends.next()??;
    let last = ends.next().unwrap_or(Some(first))?;
    Some(last.checked_sub(first)? + 1)
}

/// Reports whether the scanner has waited for a CPU longer than it ran. False if the kernel does not
/// count that (CONFIG_SCHED_INFO).
fn has_waited() -> bool {
    let mut text = [0u8; 80];
    let turns = proc::read(c"/proc/thread-self/schedstat", &mut text)
        .ok()
        .and_then(turns);
    let last = LAST_TURNS
        .each_ref()
        .map(|word| word.load(Ordering::Relaxed));
    if let Some((turns, has_waited)) = turns.and_then(|turns| Some((turns, judge(last, turns)?))) {
        HAS_WAITED.store(has_waited, Ordering::Relaxed);
        for (word, value) in LAST_TURNS.iter().zip(turns) {
            word.store(value, Ordering::Relaxed);
        }
    }
    HAS_WAITED.load(Ordering::Relaxed)
}

/// Returns the nanoseconds that a task ran and that it waited for a CPU, and how often it ran. The
/// kernel's documentation, scheduler/sched-stats.
fn turns(text: &[u8]) -> Option<[u64; 3]> {
    let mut fields = text.split(|byte| *byte == b' ').map(proc::number);
    let mut next = || u64::try_from(fields.next()??).ok();
    Some([next()?, next()?, next()?])
}

/// Reports whether a task has waited longer than it ran; `None`: that was too short to tell, or the
/// numbers are another task's.
fn judge(before: [u64; 3], after: [u64; 3]) -> Option<bool> {
    let [Some(ran), Some(waited), Some(count)] =
        [0, 1, 2].map(|index| after[index].checked_sub(before[index]))
    else {
        return Some(false);
    };
    let wakes = count.saturating_mul(WAKE_NANOS);
    (ran + waited >= MIN_TURN_NANOS).then(|| waited.saturating_sub(wakes) > ran)
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

    #[test]
    fn the_cpus_of_a_list_are_counted() {
        let count =
            |list: &[u8]| -> Option<usize> { list.split(|byte| *byte == b',').map(length).sum() };
        assert_eq!(count(b"0\n"), Some(1));
        assert_eq!(count(b"0-3,8,10-11\n"), Some(7));
        assert_eq!(count(b"\n"), None);
        assert!(online().is_some_and(|cpus| cpus >= 1));
    }

    #[test]
    fn waits_beyond_those_of_waking_up_are_those_of_a_busy_cpu() {
        const MS: u64 = 1_000_000;
        let of = |after| judge([5 * MS, 3 * MS, 7], after);
        assert_eq!(turns(b"5000000 3000000 7\n"), Some([5 * MS, 3 * MS, 7]));
        assert_eq!(of([5 * MS + 9, 3 * MS + 9, 8]), None);
        // Ten turns of 0.1 ms, after 0.15 ms each; after 0.5 ms each.
        assert_eq!(of([6 * MS, 3 * MS + 1_500_000, 17]), Some(false));
        assert_eq!(of([6 * MS, 8 * MS, 17]), Some(true));
        // A fork's.
        assert_eq!(of([0, 0, 1]), Some(false));
    }
}
