//! The state of each block that a PMD can map: [`State`], a byte each in [`Blocks`].
//!
//! Threads, signal handlers and the scanning thread read and change it without a lock. A byte
//! carries a generation beside the state: what a scan has found out about a block is written only
//! where the program has not mapped, unmapped or dropped it meanwhile.
//!
//! Leaves of 8 KiB are mapped as they are needed: one for each 16 GiB of addresses at a PMD of
//! 2 MiB. Untracked memory takes nothing.
#![expect(
    unsafe_code,
    reason = "refers to leaves that were mapped, and are never unmapped"
)]

use core::ops::Range;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering};

use rustix::mm::{self, MapFlags, ProtFlags};

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Unknown here: unmapped, or memory of another kind.
    Untracked,
    /// On base pages until it is dense, or the program is about to fill it.
    Waiting,
    /// On base pages, and filled: to be collapsed.
    Filled,
    /// Advised or collapsed. So many sixteenths of it take memory, or may, that the program has not
    /// asked for by a touch: 0 is dense, [`SIXTEENTHS`] not yet measured.
    Huge {
        /// Sixteenths of the block.
        empty: u8,
    },
}

/// The parts in which the waste of a block is counted.
pub(super) const SIXTEENTHS: u8 = 16;

impl State {
    /// Advised just now, and not touched yet.
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

    /// The sixteenths that count against the credit.
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

/// A state as it was read, for [`Blocks::replace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen(u8);

impl Seen {
    pub(super) const fn state(self) -> State {
        State::of(self.0)
    }
}

const LEAF_BLOCKS: usize = 1 << 13;
/// The addresses that the kernel gives without being asked for more.
const ADDRESS_BITS: u32 = 47;
const MAX_LEAVES: usize = 1 << (ADDRESS_BITS - 21 - 13);

#[derive(Debug)]
struct Leaf([AtomicU8; LEAF_BLOCKS]);

crate::one_page! {
    /// A block is tracked, or was.
    pub(super) static IS_ANY: AtomicBool = AtomicBool::new(false);
}

/// The states of all blocks of a process.
#[derive(Debug)]
pub(super) struct Blocks {
    leaves: [AtomicPtr<Leaf>; MAX_LEAVES],
    /// One bit for each leaf that is there.
    there: [AtomicU64; MAX_LEAVES / 64],
}

impl Blocks {
    pub(super) const fn new() -> Self {
        Self {
            leaves: [const { AtomicPtr::new(null_mut()) }; MAX_LEAVES],
            there: [const { AtomicU64::new(0) }; MAX_LEAVES / 64],
        }
    }

    fn leaf(&self, number: usize) -> Option<&'static Leaf> {
        let leaf = self.leaves.get(number)?.load(Ordering::Acquire);
        // SAFETY: null, or a leaf that was mapped for this table, of zeroes then; it stays.
        unsafe { leaf.as_ref() }
    }

    fn byte(&self, block: usize) -> Option<&'static AtomicU8> {
        self.leaf(block / LEAF_BLOCKS)?.0.get(block % LEAF_BLOCKS)
    }

    fn byte_or_map(&self, block: usize) -> Option<&'static AtomicU8> {
        let number = block / LEAF_BLOCKS;
        if self.leaf(number).is_none() {
            IS_ANY.store(true, Ordering::Release);
            let place = self.leaves.get(number)?;
            let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            // SAFETY: a mapping at an address of the kernel's choice replaces none.
            let new = unsafe { mm::mmap_anonymous(null_mut(), size_of::<Leaf>(), prot, flags) };
            let new = new.ok()?;
            let set =
                place.compare_exchange(null_mut(), new.cast(), Ordering::AcqRel, Ordering::Acquire);
            if set.is_err() {
                // SAFETY: mapped above, and in no table.
                let _ = unsafe { mm::munmap(new, size_of::<Leaf>()) };
            }
            self.there
                .get(number / 64)?
                .fetch_or(1 << (number % 64), Ordering::Release);
        }
        self.byte(block)
    }

    /// The state of a block.
    pub(super) fn seen(&self, block: usize) -> Seen {
        Seen(
            self.byte(block)
                .map_or(0, |byte| byte.load(Ordering::Acquire)),
        )
    }

    /// Sets the state of a block that the program has mapped, unmapped or dropped, and gives the
    /// one before. `None`: there is no memory for it.
    pub(super) fn set(&self, block: usize, state: State) -> Option<State> {
        let byte = match state {
            State::Untracked => self.byte(block),
            _ => self.byte_or_map(block),
        };
        let Some(byte) = byte else {
            return (state == State::Untracked).then_some(State::Untracked);
        };
        let after = |before: u8| (before & !STATE_BITS).wrapping_add(GENERATION) | state.bits();
        let mut before = byte.load(Ordering::Relaxed);
        while let Err(now) =
            byte.compare_exchange_weak(before, after(before), Ordering::AcqRel, Ordering::Relaxed)
        {
            before = now;
        }
        Some(State::of(before))
    }

    /// Sets the state of a block that was found out; false where the program has changed the block
    /// since it was seen.
    pub(super) fn replace(&self, block: usize, seen: Seen, state: State) -> bool {
        let after = seen.0 & !STATE_BITS | state.bits();
        self.byte(block).is_some_and(|byte| {
            byte.compare_exchange(seen.0, after, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        })
    }

    /// The next tracked block of a range that `is_wanted`.
    pub(super) fn next(
        &self,
        range: Range<usize>,
        is_wanted: impl Fn(State) -> bool,
    ) -> Option<usize> {
        let mut at = range.start;
        while at < range.end {
            let Some(leaf) = self.leaf(at / LEAF_BLOCKS) else {
                let next = self.next_leaf(at / LEAF_BLOCKS + 1)?;
                at = next * LEAF_BLOCKS;
                continue;
            };
            let bytes = leaf.0.iter().skip(at % LEAF_BLOCKS);
            let found = bytes
                .map(|byte| State::of(byte.load(Ordering::Relaxed)))
                .position(|state| state != State::Untracked && is_wanted(state));
            match found {
                Some(more) => return Some(at + more).filter(|at| *at < range.end),
                None => at = (at / LEAF_BLOCKS + 1) * LEAF_BLOCKS,
            }
        }
        None
    }

    /// The first leaf from a number on.
    fn next_leaf(&self, from: usize) -> Option<usize> {
        let mut at = from;
        while at < MAX_LEAVES {
            let bits = self.there.get(at / 64)?.load(Ordering::Acquire) >> (at % 64);
            if bits != 0 {
                return Some(at + bits.trailing_zeros() as usize);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }
}

/// The numbers of all blocks.
pub(super) const ALL: Range<usize> = 0..MAX_LEAVES * LEAF_BLOCKS;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_read_as_it_was_written() {
        let states = (0..=SIXTEENTHS).map(|empty| State::Huge { empty });
        for state in states.chain([State::Untracked, State::Waiting, State::Filled]) {
            assert_eq!(State::of(state.bits()), state);
            assert_eq!(State::of(state.bits() | !STATE_BITS), state, "a generation");
        }
    }

    #[test]
    fn what_was_found_out_about_a_block_that_has_changed_is_not_written() {
        static BLOCKS: Blocks = Blocks::new();
        assert_eq!(BLOCKS.set(7, State::ADVISED), Some(State::Untracked));
        let seen = BLOCKS.seen(7);
        assert_eq!(BLOCKS.set(7, State::Untracked), Some(State::ADVISED));
        assert_eq!(BLOCKS.set(7, State::ADVISED), Some(State::Untracked));
        assert_eq!(BLOCKS.seen(7).state(), seen.state(), "the same again");
        assert!(!BLOCKS.replace(7, seen, State::Huge { empty: 0 }));
        assert!(BLOCKS.replace(7, BLOCKS.seen(7), State::Huge { empty: 0 }));
        assert_eq!(BLOCKS.seen(7).state(), State::Huge { empty: 0 });
    }

    #[test]
    fn tracked_blocks_are_found_over_many_leaves() {
        static BLOCKS: Blocks = Blocks::new();
        let some = [
            3,
            LEAF_BLOCKS - 1,
            LEAF_BLOCKS,
            70 * LEAF_BLOCKS + 5,
            ALL.end - 1,
        ];
        for block in some {
            BLOCKS.set(block, State::Waiting).unwrap();
        }
        let mut found = Vec::new();
        let mut at = 0;
        while let Some(next) = BLOCKS.next(at..ALL.end, |_| true) {
            found.push(next);
            at = next + 1;
        }
        assert_eq!(found, some);
        assert_eq!(BLOCKS.next(4..LEAF_BLOCKS - 1, |_| true), None);
        assert_eq!(BLOCKS.next(ALL, |state| state != State::Waiting), None);
        assert_eq!(BLOCKS.set(ALL.end, State::Waiting), None, "beyond");
    }
}
