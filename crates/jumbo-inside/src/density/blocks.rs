//! States of all blocks that a PMD can map: [`BlockState`], one byte each in [`BlockTable`].
//!
//! Threads, signal handlers and the scanner access the table without a lock. A byte carries a
//! generation beside the state: a scan writes its result only if the program has not mapped,
//! unmapped or dropped the block meanwhile.
//!
//! Leaves of 8 KiB are mapped on demand, one for each 16 GiB of addresses at a PMD of 2 MiB.
//! Untracked memory takes no space.
#![expect(unsafe_code, reason = "refers to mapped leaves")]

use core::ops::Range;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

use rustix::mm::{self, MapFlags, ProtFlags};

use jumbo_sys::map_own;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockState {
    /// Unmapped, or memory of another kind.
    Untracked,
    /// On base pages until it is dense or the program is about to fill it.
    Waiting,
    /// Full of base pages: to be collapsed.
    Filled,
    /// Advised or collapsed.
    Huge {
        /// Sixteenths that may use memory without a touch; [`SIXTEENTHS`]: not measured.
        empty: u8,
    },
}

/// Units in which the waste of a block is counted.
pub(super) const SIXTEENTHS: u8 = 16;

impl BlockState {
    /// Just advised, not touched yet.
    pub(super) const ADVISED: Self = Self::Huge { empty: SIXTEENTHS };

    const fn of(byte: u8) -> Self {
        match byte & STATE_BITS {
            0 => Self::Untracked,
            1 => Self::Waiting,
            2 => Self::Filled,
            more => Self::Huge { empty: more - 3 },
        }
    }

    const fn bits(self) -> u8 {
        match self {
            Self::Untracked => 0,
            Self::Waiting => 1,
            Self::Filled => 2,
            Self::Huge { empty } => 3 + empty,
        }
    }

    /// Returns the sixteenths charged to the credit.
    pub(super) const fn charge(self) -> usize {
        match self {
            Self::Huge { empty } => empty as usize,
            Self::Untracked | Self::Waiting | Self::Filled => 0,
        }
    }
}

const STATE_BITS: u8 = (1 << 5) - 1;
const GENERATION: u8 = 1 << 5;
const _: () = assert!(3 + SIXTEENTHS <= STATE_BITS);

/// State read before an update by [`BlockTable::replace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SeenState(u8);

impl SeenState {
    pub(super) const fn state(self) -> BlockState {
        BlockState::of(self.0)
    }
}

const LEAF_BLOCKS: usize = 1 << 13;
/// Addresses that mmap(2) returns without a hint above 2^47.
const ADDRESS_BITS: u32 = 47;
const MAX_LEAVES: usize = 1 << (ADDRESS_BITS - 21 - 13);

#[derive(Debug)]
struct Leaf([AtomicU8; LEAF_BLOCKS]);

crate::one_page! {
    /// Set with the first tracked block.
    pub(super) static HAS_BLOCKS: AtomicBool = AtomicBool::new(false);
}

/// States of all blocks of a process.
#[derive(Debug)]
pub(super) struct BlockTable {
    leaves: [AtomicPtr<Leaf>; MAX_LEAVES],
    is_mapped: [AtomicU64; MAX_LEAVES / 64],
    /// Blocks of each leaf that were tracked ever: [`span`].
    spans: [AtomicU32; MAX_LEAVES],
}

/// Returns the range of a word of [`BlockTable::spans`]: the blocks behind its start, and its end. 0 is
/// an empty one.
const fn span(word: u32) -> Range<usize> {
    LEAF_BLOCKS - (word >> 16) as usize..(word & 0xffff) as usize
}

impl BlockTable {
    pub(super) const fn new() -> Self {
        Self {
            leaves: [const { AtomicPtr::new(null_mut()) }; MAX_LEAVES],
            is_mapped: [const { AtomicU64::new(0) }; MAX_LEAVES / 64],
            spans: [const { AtomicU32::new(0) }; MAX_LEAVES],
        }
    }

    fn leaf(&self, index: usize) -> Option<&'static Leaf> {
        let leaf = self.leaves.get(index)?.load(Ordering::Acquire);
        // SAFETY: null, or a zeroed leaf that was mapped for this table and is never unmapped.
        unsafe { leaf.as_ref() }
    }

    fn byte(&self, block: usize) -> Option<&'static AtomicU8> {
        self.leaf(block / LEAF_BLOCKS)?.0.get(block % LEAF_BLOCKS)
    }

    fn byte_or_map(&self, block: usize) -> Option<&'static AtomicU8> {
        let index = block / LEAF_BLOCKS;
        if self.leaf(index).is_none() {
            HAS_BLOCKS.store(true, Ordering::Release);
            let place = self.leaves.get(index)?;
            let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            let new = map_own(size_of::<Leaf>(), prot, flags).ok()?;
            let set =
                place.compare_exchange(null_mut(), new.cast(), Ordering::AcqRel, Ordering::Acquire);
            if set.is_err() {
                // SAFETY: mapped above, and in no table.
                let _ = unsafe { mm::munmap(new, size_of::<Leaf>()) };
            }
            self.is_mapped
                .get(index / 64)?
                .fetch_or(1 << (index % 64), Ordering::Release);
        }
        self.widen(index, block % LEAF_BLOCKS);
        self.byte(block)
    }

    /// Adds a block to the span of a leaf.
    fn widen(&self, index: usize, block: usize) {
        let Some(word) = self.spans.get(index) else {
            return;
        };
        let wider = |word: u32| {
            let Range { start, end } = span(word);
            let behind = u32::try_from(LEAF_BLOCKS - start.min(block)).unwrap_or(0);
            let end = u32::try_from(end.max(block + 1)).unwrap_or(0);
            Some(behind << 16 | end).filter(|wider| *wider != word)
        };
        let _ = word.fetch_update(Ordering::Release, Ordering::Relaxed, wider);
    }

    pub(super) fn seen(&self, block: usize) -> SeenState {
        SeenState(
            self.byte(block)
                .map_or(0, |byte| byte.load(Ordering::Acquire)),
        )
    }

    /// Sets the state of a block that the program has mapped, unmapped or dropped; returns the
    /// previous one. `None`: no memory for the leaf.
    pub(super) fn set(&self, block: usize, state: BlockState) -> Option<BlockState> {
        let byte = match state {
            BlockState::Untracked => self.byte(block),
            _ => self.byte_or_map(block),
        };
        let Some(byte) = byte else {
            return (state == BlockState::Untracked).then_some(BlockState::Untracked);
        };
        let after = |before: u8| (before & !STATE_BITS).wrapping_add(GENERATION) | state.bits();
        let mut before = byte.load(Ordering::Relaxed);
        while let Err(now) =
            byte.compare_exchange_weak(before, after(before), Ordering::AcqRel, Ordering::Relaxed)
        {
            before = now;
        }
        Some(BlockState::of(before))
    }

    /// Sets the measured state of a block; false if the program has changed the block since `seen`.
    pub(super) fn replace(&self, block: usize, seen: SeenState, state: BlockState) -> bool {
        let after = seen.0 & !STATE_BITS | state.bits();
        self.byte(block).is_some_and(|byte| {
            byte.compare_exchange(seen.0, after, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        })
    }

    /// Returns the next tracked block in a range for which `is_wanted` is true.
    pub(super) fn next(
        &self,
        range: Range<usize>,
        is_wanted: impl Fn(BlockState) -> bool,
    ) -> Option<usize> {
        let mut at = range.start;
        while at < range.end {
            let Some(leaf) = self.leaf(at / LEAF_BLOCKS) else {
                let next = self.next_leaf(at / LEAF_BLOCKS + 1)?;
                at = next * LEAF_BLOCKS;
                continue;
            };
            let leaf_start = at / LEAF_BLOCKS * LEAF_BLOCKS;
            let tracked = self.spans.get(at / LEAF_BLOCKS)?.load(Ordering::Acquire);
            let tracked = span(tracked);
            let start = tracked.start.max(at - leaf_start);
            let bytes = leaf.0.get(start..tracked.end).unwrap_or_default();
            let found = bytes
                .iter()
                .map(|byte| BlockState::of(byte.load(Ordering::Relaxed)))
                .position(|state| state != BlockState::Untracked && is_wanted(state));
            match found {
                Some(more) => return Some(leaf_start + start + more).filter(|at| *at < range.end),
                None => at = leaf_start + LEAF_BLOCKS,
            }
        }
        None
    }

    fn next_leaf(&self, from: usize) -> Option<usize> {
        let mut at = from;
        while at < MAX_LEAVES {
            let bits = self.is_mapped.get(at / 64)?.load(Ordering::Acquire) >> (at % 64);
            if bits != 0 {
                return Some(at + bits.trailing_zeros() as usize);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }
}

pub(super) const ALL: Range<usize> = 0..MAX_LEAVES * LEAF_BLOCKS;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_read_as_it_was_written() {
        let states = (0..=SIXTEENTHS).map(|empty| BlockState::Huge { empty });
        for state in states.chain([
            BlockState::Untracked,
            BlockState::Waiting,
            BlockState::Filled,
        ]) {
            assert_eq!(BlockState::of(state.bits()), state);
            assert_eq!(
                BlockState::of(state.bits() | !STATE_BITS),
                state,
                "a generation"
            );
        }
    }

    #[test]
    fn a_measured_state_is_dropped_if_the_block_has_changed() {
        static BLOCKS: BlockTable = BlockTable::new();
        assert_eq!(
            BLOCKS.set(7, BlockState::ADVISED),
            Some(BlockState::Untracked)
        );
        let seen = BLOCKS.seen(7);
        assert_eq!(
            BLOCKS.set(7, BlockState::Untracked),
            Some(BlockState::ADVISED)
        );
        assert_eq!(
            BLOCKS.set(7, BlockState::ADVISED),
            Some(BlockState::Untracked)
        );
        assert_eq!(BLOCKS.seen(7).state(), seen.state(), "the same again");
        assert!(!BLOCKS.replace(7, seen, BlockState::Huge { empty: 0 }));
        assert!(BLOCKS.replace(7, BLOCKS.seen(7), BlockState::Huge { empty: 0 }));
        assert_eq!(BLOCKS.seen(7).state(), BlockState::Huge { empty: 0 });
    }

    #[test]
    fn tracked_blocks_are_found_over_many_leaves() {
        static BLOCKS: BlockTable = BlockTable::new();
        let some = [
            3,
            LEAF_BLOCKS - 1,
            LEAF_BLOCKS,
            70 * LEAF_BLOCKS + 5,
            ALL.end - 1,
        ];
        for block in some {
            BLOCKS.set(block, BlockState::Waiting).unwrap();
        }
        let mut found = Vec::new();
        let mut at = 0;
        while let Some(next) = BLOCKS.next(at..ALL.end, |_| true) {
            found.push(next);
            at = next + 1;
        }
        assert_eq!(found, some);
        assert_eq!(BLOCKS.next(4..LEAF_BLOCKS - 1, |_| true), None);
        assert_eq!(BLOCKS.next(ALL, |state| state != BlockState::Waiting), None);
        assert_eq!(BLOCKS.set(ALL.end, BlockState::Waiting), None, "beyond");
    }
}
