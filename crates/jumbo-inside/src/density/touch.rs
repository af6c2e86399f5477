//! Cost of the first touch of new memory: [`measure`], [`is_costly`].
//!
//! A page fault clears its page. A huge page takes one fault and a long clear, base pages take a
//! fault each: together about four times as long. In a virtual machine whose kernel reports free
//! memory to the host (free page reporting, Linux 5.7; virtio_balloon) it can be the other way
//! round. The kernel reports free blocks of a huge page and more; the host takes their memory, and
//! gives it back page by page at the next touch, for 8 to 10 us each. Base pages come from smaller
//! free blocks, which are not reported. So:
//!
//! | first touch of 2 MiB | at hand | taken by the host |
//! |---|---|---|
//! | huge page | 0.2 ms | 4.4 ms |
//! | base pages | 0.8 ms | 0.8 ms while smaller blocks last, then 5.3 ms |
//!
//! So the heap's first touches are measured. While a huge page takes longer than base pages, new
//! memory begins on base pages, and `dense` collapses it when there is CPU time (`pace`). A
//! measurement that shows the opposite ends that; so does time.
#![expect(unsafe_code, reason = "advises memory, and unmaps its own")]

use core::fmt::Write as _;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;

use rustix::mm::{MapFlags, ProtFlags};

use super::measure::resident;
use super::table::PAGE_BYTES;
use super::{PMD_BYTES, has_left};
use crate::debug;
use crate::ledger::stats;
use crate::sandbox;
use crate::sync::{millis, now};
use crate::watch::cpu_time;
use jumbo_sys as sys;

/// Least time between two measurements of huge pages.
const INTERVAL: Duration = Duration::from_millis(5);
/// Least time between two measurements of base pages, which are costly, too, once the kernel has no
/// smaller free blocks left.
const BASE_INTERVAL: Duration = Duration::from_millis(100);
/// Base pages that are touched for a measurement, in memory of its own.
const SAMPLE_PAGES: usize = 4;
/// Huge pages are costly from this multiple of the time for base pages on: they save time later, too.
const RATIO: u32 = 2;
/// Time of a page fault that is slow: base pages are measured from that time on.
const SLOW_FAULT: Duration = Duration::from_micros(1);
/// Bounds of the time for which a measurement holds. It doubles while the next one shows the same.
const MIN_HOLD: Duration = Duration::from_secs(1);
const MAX_HOLD: Duration = Duration::from_secs(16);

static COSTS: Costs = Costs::new();

/// Nothing is measured: the user wants huge pages at any cost.
static IS_OFF: AtomicBool = AtomicBool::new(false);

pub(super) fn start(huge_at_once: bool) {
    IS_OFF.store(huge_at_once, Ordering::Relaxed);
}

/// Reports whether a huge page takes longer than the base pages in its place at this time.
pub(super) fn is_costly() -> bool {
    load(&COSTS.until_millis) != 0 && COSTS.is_costly(now())
}

/// Touches the start of new memory of the heap, of which the part `advised` is advised.
pub(super) fn measure(range: &Range<usize>, advised: &Range<usize>) {
    if IS_OFF.load(Ordering::Relaxed) {
        return;
    }
    // A partial block may have pages already.
    let first = range.start.next_multiple_of(pmd());
    if first + pmd() <= advised.end {
        if COSTS.is_due(now())
            && let Some(time) = sys::unfiltered(|| touch_huge(first)).flatten()
        {
            huge_took(time);
        }
    } else if is_costly() && !COSTS.knows_base(now()) {
        measure_base();
        note();
    }
}

/// Measures base pages, in a new mapping: those of the program it may have to find missing.
fn measure_base() {
    let bytes = SAMPLE_PAGES * PAGE_BYTES;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let sample = || {
        let start = sys::map_own(bytes, access, MapFlags::PRIVATE).ok()?;
        let address = start.expose_provenance();
        let time = touch(address, bytes);
        // SAFETY: mapped above; no other code knows it.
        let _ = unsafe { sys::unmap(address, bytes) };
        time
    };
    if let Some(time) = sys::unfiltered(sample).flatten() {
        let samples = u32::try_from(pmd() / bytes).unwrap_or(1);
        COSTS.base_took(time.saturating_mul(samples.max(1)), now());
    }
}

/// Makes pages resident as a write does, and returns the CPU time; `None` where that is not possible.
/// MADV_POPULATE_WRITE, Linux 5.14. The caller has checked for a filter.
fn touch(address: usize, bytes: usize) -> Option<Duration> {
    if sandbox::is_entered() || has_left() || !sys::allows(libc::MADV_POPULATE_WRITE) {
        return None;
    }
    let began = cpu_time();
    // SAFETY: makes the caller's memory resident, and changes no byte.
    unsafe { sys::advise(address, bytes, libc::MADV_POPULATE_WRITE) }.ok()?;
    Some(cpu_time().saturating_sub(began))
}

/// Touches a new block, of which no other thread knows the address; `None` if it is not huge.
fn touch_huge(address: usize) -> Option<Duration> {
    let time = touch(address, PAGE_BYTES)?;
    if resident(address + PAGE_BYTES, PAGE_BYTES) == Ok(Some(PAGE_BYTES)) {
        return Some(time);
    }
    // A program may register it with userfaultfd(2), and expects to find it missing.
    // SAFETY: a page of zeroes in new memory of the heap.
    let _ = unsafe { sys::discard(address, PAGE_BYTES) };
    None
}

/// Records the time that a huge page took.
pub(super) fn huge_took(time: Duration) {
    if IS_OFF.load(Ordering::Relaxed) {
        return;
    }
    let pages = pmd() / PAGE_BYTES;
    if is_slow(time, pages) && !COSTS.knows_base(now()) {
        measure_base();
    }
    if COSTS.huge_took(time, pages, now()) {
        note();
    }
}

/// Reports whether a huge page takes so long that base pages are to be measured.
fn is_slow(time: Duration, pages: usize) -> bool {
    let pages = u32::try_from(pages).unwrap_or(u32::MAX);
    time > SLOW_FAULT.saturating_mul(pages).saturating_mul(RATIO)
}

/// Writes the last times to the ledger.
fn note() {
    let [huge, base] = [&COSTS.huge_nanos, &COSTS.base_nanos].map(load);
    let slot = stats::slot();
    slot.touch_huge_ns.store(huge, Ordering::Relaxed);
    if base != 0 {
        slot.touch_base_ns.store(base, Ordering::Relaxed);
    }
    let micros = |nanos: u64| usize::try_from(nanos / 1000).unwrap_or(usize::MAX);
    debug::note(
        [micros(huge), micros(base), is_costly().into()],
        |line, [huge, base, is_costly]| {
            let begin = if is_costly == 0 { "huge" } else { "base" };
            write!(
                line,
                "first touch of a block: {huge} us huge, {base} us on base pages; new memory begins on \
                 {begin} pages"
            )
        },
    );
}

/// Times of the last measurements.
#[derive(Debug)]
struct Costs {
    /// Last measurement of a huge page and of base pages, and until when they are costly: [`millis`].
    measured_millis: AtomicU64,
    base_millis: AtomicU64,
    until_millis: AtomicU64,
    hold_millis: AtomicU64,
    /// Last times of a block; 0: not measured.
    huge_nanos: AtomicU64,
    base_nanos: AtomicU64,
}

impl Costs {
    const fn new() -> Self {
        Self {
            measured_millis: AtomicU64::new(0),
            base_millis: AtomicU64::new(0),
            until_millis: AtomicU64::new(0),
            hold_millis: AtomicU64::new(0),
            huge_nanos: AtomicU64::new(0),
            base_nanos: AtomicU64::new(0),
        }
    }

    fn is_costly(&self, now: Duration) -> bool {
        let until = load(&self.until_millis);
        until != 0 && millis(now) < until
    }

    /// Reports whether a huge page is to be measured.
    fn is_due(&self, now: Duration) -> bool {
        let last = Duration::from_millis(load(&self.measured_millis));
        now.saturating_sub(last) >= INTERVAL
    }

    /// Reports whether the time of base pages is recent.
    fn knows_base(&self, now: Duration) -> bool {
        let last = Duration::from_millis(load(&self.base_millis));
        load(&self.base_nanos) != 0 && now.saturating_sub(last) < BASE_INTERVAL
    }

    /// Records the time of a huge page of `pages` base pages; true if they are costly from now on.
    fn huge_took(&self, time: Duration, pages: usize, now: Duration) -> bool {
        let relaxed = Ordering::Relaxed;
        self.measured_millis.store(millis(now), relaxed);
        self.huge_nanos.store(nanos(time), relaxed);
        let base = Duration::from_nanos(load(&self.base_nanos));
        let is_costly = is_slow(time, pages) && time > base.saturating_mul(RATIO);
        let hold = match is_costly {
            true => (load(&self.hold_millis) * 2).clamp(millis(MIN_HOLD), millis(MAX_HOLD)),
            false => 0,
        };
        let until = if is_costly {
            millis(now).saturating_add(hold)
        } else {
            0
        };
        self.hold_millis.store(hold, relaxed);
        self.until_millis.store(until, relaxed);
        is_costly
    }

    /// Records the time of the base pages of a block.
    fn base_took(&self, time: Duration, now: Duration) {
        self.base_nanos.store(nanos(time).max(1), Ordering::Relaxed);
        self.base_millis.store(millis(now), Ordering::Relaxed);
        let huge = Duration::from_nanos(load(&self.huge_nanos));
        if huge <= time * RATIO {
            self.until_millis.store(0, Ordering::Relaxed);
            self.hold_millis.store(0, Ordering::Relaxed);
        }
    }
}

fn pmd() -> usize {
    PMD_BYTES.load(Ordering::Relaxed)
}

fn load(number: &AtomicU64) -> u64 {
    number.load(Ordering::Relaxed)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: usize = 512;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(100 + seconds)
    }

    fn after_slow(base: Duration) -> Costs {
        let costs = Costs::new();
        assert!(!costs.is_costly(at(0)) && costs.is_due(at(0)));
        assert!(costs.huge_took(Duration::from_micros(4400), PAGES, at(0)));
        assert!(costs.is_costly(at(0)) && !costs.knows_base(at(0)) && !costs.is_due(at(0)));
        costs.base_took(base, at(0));
        assert!(costs.knows_base(at(0)));
        costs
    }

    #[test]
    fn huge_pages_are_costly_where_base_pages_take_less_than_half() {
        assert!(after_slow(Duration::from_micros(800)).is_costly(at(0)));
        assert!(!after_slow(Duration::from_micros(5300)).is_costly(at(0)));
        let costs = after_slow(Duration::from_micros(800));
        assert!(!costs.knows_base(at(0) + BASE_INTERVAL));
        costs.base_took(Duration::from_micros(5300), at(0) + BASE_INTERVAL);
        assert!(
            !costs.is_costly(at(0) + BASE_INTERVAL),
            "no smaller blocks are left"
        );
        let costs = Costs::new();
        assert!(!costs.huge_took(Duration::from_micros(300), PAGES, at(0)));
        assert!(!costs.is_costly(at(0)));
    }

    #[test]
    fn a_measurement_holds_longer_while_the_next_one_shows_the_same() {
        let (costs, slow) = (
            after_slow(Duration::from_micros(800)),
            Duration::from_millis(4),
        );
        assert!(!costs.is_costly(at(1)));
        costs.huge_took(slow, PAGES, at(1));
        assert!(costs.is_costly(at(2)) && !costs.is_costly(at(3)));
        assert!((0..9).all(|_| costs.huge_took(slow, PAGES, at(3))));
        assert!(
            costs.is_costly(at(18)) && !costs.is_costly(at(19)),
            "at most 16 seconds"
        );
        costs.huge_took(Duration::from_micros(200), PAGES, at(10));
        assert!(!costs.is_costly(at(10)));
        costs.huge_took(slow, PAGES, at(20));
        assert!(!costs.is_costly(at(21)), "from the start again");
    }
}
