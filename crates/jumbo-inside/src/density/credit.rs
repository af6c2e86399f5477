//! Bound of the huge and untouched memory of the process: [`limit`].
//!
//! Advised memory counts as waste until it is measured: [`charge`] charges a whole block before its
//! advice, [`adjust`] returns the touched part. The limit is a percentage of the resident memory
//! (`--max-waste`), at least [`FLOOR_BYTES`]. `--max-waste=0` has no floor.
//!
//! In a memory cgroup with a limit the floor is also the maximum. All programs of a group, and of the
//! host, have a credit. So the floor is at most the available memory divided by the tasks there
//! ([`GROUP_PARTS`]), and the waste never exceeds a part of the host's ([`HOST_DIVISOR`]). Memory that
//! cannot be read counts as none.
//!
//! Blocks are charged only while the host has free huge pages. Without them the page fault would
//! wait for compaction, for milliseconds; such a block is collapsed later.

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{PMD_BYTES, touch};
use crate::headroom::{Parts, free_in_pieces, group_share, host_memory, host_room};

/// Parts of the available memory of a cgroup, one of which is the floor. At its limit a touch kills.
const GROUP_PARTS: Parts = Parts {
    least: 64,
    per_task: 4,
};
/// Parts of the host's available memory: one of the first is the floor, one of the second the maximum.
const HOST_PARTS: Parts = Parts {
    least: HOST_DIVISOR,
    per_task: 1,
};
const HOST_DIVISOR: usize = 4;

/// Minimum credit of a program of any size: the 16 MiB of the bound, less 2 MiB for the records and page
/// tables of sparse blocks.
pub(super) const FLOOR_BYTES: usize = 14 << 20;

static PERCENT: AtomicUsize = AtomicUsize::new(0);
crate::one_page! {
    /// Sum of the charges: the possible waste.
    static CHARGED_BYTES: AtomicUsize = AtomicUsize::new(0);
    /// Size of all charged blocks.
    static HUGE_BYTES: AtomicUsize = AtomicUsize::new(0);
}
/// Resident memory at the last scan.
static RESIDENT_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Part of the memory available in the cgroups and on the host that the floor never exceeds;
/// `usize::MAX`: no limit. One huge page until it was read.
static SHARE_BYTES: AtomicUsize = AtomicUsize::new(2 << 20);
/// A cgroup of this process has a limit.
static IS_LIMITED: AtomicBool = AtomicBool::new(true);
/// Memory available on the host; the floor until it was read.
static HOST_ROOM_BYTES: AtomicUsize = AtomicUsize::new(FLOOR_BYTES);

/// Free memory of the host in whole blocks, less the charges since it was read.
static FREE_BLOCK_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Minimum of free memory in blocks: a part of the host's memory, since each zone reserves pages
/// against requests that another zone could serve (`lowmem_reserve_ratio`).
static MIN_FREE_BYTES: AtomicUsize = AtomicUsize::new(0);
const MIN_FREE_DIVISOR: usize = 64;

pub(super) fn start(percent: usize) {
    PERCENT.store(percent, Ordering::Relaxed);
}

/// Returns the maximum waste at this time, in bytes.
pub(super) fn limit() -> usize {
    let percent = PERCENT.load(Ordering::Relaxed);
    if percent == 0 {
        return 0;
    }
    let proven = huge_bytes().saturating_sub(charged());
    let resident = RESIDENT_BYTES.load(Ordering::Relaxed).max(proven);
    let max = match IS_LIMITED.load(Ordering::Relaxed) {
        true => floor(),
        false => (resident / 100).saturating_mul(percent).max(floor()),
    };
    max.min(HOST_ROOM_BYTES.load(Ordering::Relaxed) / HOST_DIVISOR)
}

/// Returns the least limit, in bytes, of a program of any size: less in a tight memory cgroup.
pub(crate) fn floor() -> usize {
    FLOOR_BYTES.min(SHARE_BYTES.load(Ordering::Relaxed))
}

/// Returns the bytes that can still be charged.
pub(super) fn remaining() -> usize {
    limit().saturating_sub(charged())
}

pub(crate) fn charged() -> usize {
    sum(&CHARGED_BYTES)
}

pub(super) fn huge_bytes() -> usize {
    sum(&HUGE_BYTES)
}

/// Returns a sum. It is below 0 for a moment where a thread removes a block before another one has added
/// its charge: the table of blocks changes first.
fn sum(bytes: &AtomicUsize) -> usize {
    let bytes = bytes.load(Ordering::Relaxed).cast_signed();
    bytes.max(0).cast_unsigned()
}

/// Charges `bytes` for a block of `block` bytes; false if they exceed the limit.
pub(super) fn charge(bytes: usize, block: usize) -> bool {
    let limit = limit();
    let result = CHARGED_BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |charged| {
        let after = charged.saturating_add(bytes);
        (after <= limit).then_some(after)
    });
    if result.is_ok() {
        HUGE_BYTES.fetch_add(block, Ordering::Relaxed);
        let reduced = |free: usize| (free != usize::MAX).then(|| free.saturating_sub(bytes));
        let relaxed = Ordering::Relaxed;
        let _ = FREE_BLOCK_BYTES.fetch_update(relaxed, relaxed, reduced);
    }
    result.is_ok()
}

/// Charges a block before its advice; false at the limit, or if huge pages are scarce or costly.
pub(super) fn charge_block() -> bool {
    let block = PMD_BYTES.load(Ordering::Relaxed);
    !is_scarce() && !touch::is_costly() && charge(block, block)
}

/// Counts a block that is about to be full, without a charge; false if huge pages are scarce or
/// costly.
pub(super) fn add_full_block(block: usize) -> bool {
    let reduced = |free: usize| match free {
        usize::MAX => Some(free),
        _ => free.checked_sub(block),
    };
    let relaxed = Ordering::Relaxed;
    let has_free = !is_scarce()
        && !touch::is_costly()
        && FREE_BLOCK_BYTES
            .fetch_update(relaxed, relaxed, reduced)
            .is_ok();
    if has_free {
        HUGE_BYTES.fetch_add(block, relaxed);
    }
    has_free
}

/// Reports whether the host has few free huge pages.
pub(super) fn is_scarce() -> bool {
    FREE_BLOCK_BYTES.load(Ordering::Relaxed) < MIN_FREE_BYTES.load(Ordering::Relaxed)
}

/// Charges `bytes` for a block of `block` bytes, regardless of the limit.
pub(super) fn charge_unchecked(bytes: usize, block: usize) {
    CHARGED_BYTES.fetch_add(bytes, Ordering::Relaxed);
    HUGE_BYTES.fetch_add(block, Ordering::Relaxed);
}

/// Replaces a charge by its measured value.
pub(super) fn adjust(before: usize, after: usize) {
    // Atomic addition wraps around.
    CHARGED_BYTES.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
}

/// Removes a block and its charge.
pub(super) fn remove_block(bytes: usize, block: usize) {
    CHARGED_BYTES.fetch_sub(bytes, Ordering::Relaxed);
    HUGE_BYTES.fetch_sub(block, Ordering::Relaxed);
}

/// Sets both sums, in the child of a fork: a thread of the parent may have been amid an update.
pub(super) fn recount(charged: usize, huge: usize) {
    CHARGED_BYTES.store(charged, Ordering::Relaxed);
    HUGE_BYTES.store(huge, Ordering::Relaxed);
}

pub(super) fn set_resident(resident: usize) {
    RESIDENT_BYTES.store(resident, Ordering::Relaxed);
}

pub(super) fn read_room() {
    // An unknown amount counts as none.
    let group = group_share(GROUP_PARTS).unwrap_or(0);
    let (host, share) = host_room(HOST_PARTS).unwrap_or((0, 0));
    IS_LIMITED.store(group != usize::MAX, Ordering::Relaxed);
    SHARE_BYTES.store(group.min(share), Ordering::Relaxed);
    HOST_ROOM_BYTES.store(host, Ordering::Relaxed);
    let free = free_in_pieces(PMD_BYTES.load(Ordering::Relaxed));
    // Charged memory will still be taken from it.
    let free = free.map_or(usize::MAX, |free| free.saturating_sub(charged()));
    FREE_BLOCK_BYTES.store(free, Ordering::Relaxed);
    MIN_FREE_BYTES.store(host_memory() / MIN_FREE_DIVISOR, Ordering::Relaxed);
}
