//! The memory that huge pages may take beyond what the program touched: [`limit`].
//!
//! Advised memory counts as waste until a look at it shows otherwise: [`take`] charges a block in
//! full before it is advised, and [`adjust`] gives back what was found touched. The limit is a
//! percentage of what the process has resident (`--max-waste`), and [`FLOOR_BYTES`] at least.
//! `--max-waste=0` has no floor.
//!
//! In a memory cgroup with a limit the floor is all there is. And the waste is never more than a
//! quarter of what the group, or the host, has left.
//!
//! A block is charged only while the host has free huge pages. Where it has none the kernel would move
//! other memory in the program's page fault, which takes milliseconds; such a block is collapsed later.

use core::sync::atomic::{AtomicUsize, Ordering};

use super::PMD_BYTES;
use crate::headroom::{Enough, free_in_pieces, headroom, host_memory};

/// The credit of a program of any size.
pub(super) const FLOOR_BYTES: usize = 16 << 20;

static PERCENT: AtomicUsize = AtomicUsize::new(0);
crate::one_page! {
    /// The waste that is possible: the sum of the charges, in bytes.
    static CHARGED: AtomicUsize = AtomicUsize::new(0);
    /// The bytes of the blocks that were charged for, and are tracked.
    static HUGE: AtomicUsize = AtomicUsize::new(0);
}
/// The resident memory that the scanning thread read last.
static RESIDENT: AtomicUsize = AtomicUsize::new(0);
/// The memory that the cgroups of this process leave it, in bytes; `usize::MAX`: no limit.
static GROUP: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The memory that the host has available, in bytes; little until the thread has asked.
static HOST: AtomicUsize = AtomicUsize::new(FLOOR_BYTES);

/// The memory that the host has free in blocks, less what was charged since that was asked, in bytes.
static FREE_BLOCKS: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The memory in free blocks below which they are scarce, in bytes: a part of the host's memory, since each zone keeps a part
/// back from requests that another zone could serve (`lowmem_reserve_ratio`).
static MIN_FREE_BYTES: AtomicUsize = AtomicUsize::new(0);
const MIN_FREE_PART: usize = 64;

pub(super) fn start(percent: usize) {
    PERCENT.store(percent, Ordering::Relaxed);
}

/// The waste that may be there now, in bytes.
pub(super) fn limit() -> usize {
    let percent = PERCENT.load(Ordering::Relaxed);
    if percent == 0 {
        return 0;
    }
    let proven = HUGE
        .load(Ordering::Relaxed)
        .saturating_sub(CHARGED.load(Ordering::Relaxed));
    let resident = RESIDENT.load(Ordering::Relaxed).max(proven);
    let share = (resident / 100).saturating_mul(percent).max(FLOOR_BYTES);
    let group = GROUP.load(Ordering::Relaxed);
    let most = match group {
        usize::MAX => share,
        _ => FLOOR_BYTES,
    };
    most.min(group.min(HOST.load(Ordering::Relaxed)) / 4)
}

/// What is not charged yet.
pub(super) fn left() -> usize {
    limit().saturating_sub(CHARGED.load(Ordering::Relaxed))
}

/// The waste that is possible now, in bytes.
pub(crate) fn charged() -> usize {
    CHARGED.load(Ordering::Relaxed)
}

/// The blocks that were charged for and are tracked, in bytes.
pub(super) fn huge() -> usize {
    HUGE.load(Ordering::Relaxed)
}

/// Charges so many bytes, for a block of `block`; false where they are not left.
pub(super) fn take(bytes: usize, block: usize) -> bool {
    let limit = limit();
    let taken = CHARGED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |charged| {
        let after = charged.saturating_add(bytes);
        (after <= limit).then_some(after)
    });
    if taken.is_ok() {
        HUGE.fetch_add(block, Ordering::Relaxed);
        let less = |free: usize| (free != usize::MAX).then(|| free.saturating_sub(bytes));
        let relaxed = Ordering::Relaxed;
        let _ = FREE_BLOCKS.fetch_update(relaxed, relaxed, less);
    }
    taken.is_ok()
}

/// Charges a block that is about to be advised; false where that much is not left, or huge pages are scarce.
pub(super) fn take_block() -> bool {
    let block = PMD_BYTES.load(Ordering::Relaxed);
    !is_scarce() && take(block, block)
}

/// Whether the host has few free huge pages, or none.
pub(super) fn is_scarce() -> bool {
    FREE_BLOCKS.load(Ordering::Relaxed) < MIN_FREE_BYTES.load(Ordering::Relaxed)
}

/// Charges so many bytes, for a block of `block`, whether they are left or not.
pub(super) fn insist(bytes: usize, block: usize) {
    CHARGED.fetch_add(bytes, Ordering::Relaxed);
    HUGE.fetch_add(block, Ordering::Relaxed);
}

/// Replaces a charge, for what was found out.
pub(super) fn adjust(before: usize, after: usize) {
    if after >= before {
        CHARGED.fetch_add(after - before, Ordering::Relaxed);
    } else {
        CHARGED.fetch_sub(before - after, Ordering::Relaxed);
    }
}

/// Gives up a charge with its block.
pub(super) fn give(bytes: usize, block: usize) {
    CHARGED.fetch_sub(bytes, Ordering::Relaxed);
    HUGE.fetch_sub(block, Ordering::Relaxed);
}

/// Counts anew, in the child of a fork: a thread of the parent may have been amid a change.
pub(super) fn recount(charged: usize, huge: usize) {
    CHARGED.store(charged, Ordering::Relaxed);
    HUGE.store(huge, Ordering::Relaxed);
}

/// Notes what the process has resident.
pub(super) fn set_resident(resident: usize) {
    RESIDENT.store(resident, Ordering::Relaxed);
}

/// There is no thread that could ask: the waste is bounded by what the process has resident alone.
pub(super) fn without_room() {
    if HOST.load(Ordering::Relaxed) == FLOOR_BYTES {
        HOST.store(usize::MAX, Ordering::Relaxed);
    }
}

/// Asks what the cgroups and the host have left.
pub(super) fn ask_for_room() {
    let all = Enough {
        host: usize::MAX,
        group: usize::MAX,
    };
    // Where it cannot be known, there is little.
    let (group, host) = headroom(all).map_or((0, 0), |room| (room.group(), room.host()));
    GROUP.store(group, Ordering::Relaxed);
    HOST.store(host, Ordering::Relaxed);
    let free = free_in_pieces(PMD_BYTES.load(Ordering::Relaxed));
    // What is charged already will be taken from it.
    let free = free.map_or(usize::MAX, |free| free.saturating_sub(charged()));
    FREE_BLOCKS.store(free, Ordering::Relaxed);
    MIN_FREE_BYTES.store(host_memory() / MIN_FREE_PART, Ordering::Relaxed);
}
