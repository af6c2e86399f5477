//! Blocks of one slab: [`Slab`], whose class's lock is held.
#![expect(unsafe_code, reason = "headers and states are reached by address")]

use core::sync::atomic::{AtomicU8, Ordering};

use super::class::{UNIT_BYTES, shape_of};
use super::state;
use super::unit::{self, Unit};

pub(super) const BASE_BYTES: usize = 4096;
/// Base pages of a unit.
const BASES: usize = UNIT_BYTES / BASE_BYTES;

/// Words of the bitmap of free blocks, in front of the states.
pub(super) const fn words(blocks: usize) -> usize {
    blocks.div_ceil(64)
}

/// Bytes of the records of a slab.
pub(super) const fn record_bytes(blocks: usize) -> usize {
    (words(blocks) * 8 + blocks).next_multiple_of(16)
}

/// A slab whose class's lock is held.
#[derive(Clone, Copy)]
pub(super) struct Slab {
    pub(super) first: u32,
    pub(super) header: *mut Unit,
}

impl Slab {
    /// # Safety
    /// `first` is the first unit of a slab, and the lock of its class is held.
    pub(super) unsafe fn new(first: u32) -> Self {
        Self {
            first,
            header: unit::header(first),
        }
    }

    pub(super) fn blocks(self) -> usize {
        // SAFETY: `new`.
        usize::from(unsafe { (*self.header).blocks })
    }

    /// Returns the address of a block.
    pub(super) fn address_of(self, block: usize) -> usize {
        unit::address_of(self.first) + block * self.size()
    }

    /// Returns the number of the block at an address.
    pub(super) fn number_of(self, address: usize) -> usize {
        self.number_at(address - unit::address_of(self.first))
    }

    /// Returns the number of the block at an offset.
    pub(super) fn number_at(self, offset: usize) -> usize {
        // SAFETY: `new`.
        ((offset as u64 * u64::from(unsafe { (*self.header).factor })) >> 32) as usize
    }

    pub(super) fn size(self) -> usize {
        // SAFETY: `new`.
        unsafe { (*self.header).size as usize }
    }

    pub(super) fn state(self, block: usize) -> &'static AtomicU8 {
        // SAFETY: `new`; records are never unmapped.
        unsafe { &*(*self.header).states.add(block) }
    }

    /// Returns a word of the bitmap of free blocks.
    pub(super) fn word(self, number: usize) -> *mut u64 {
        // SAFETY: the bitmap is in front of the states, aligned to 8 bytes.
        unsafe {
            (*self.header)
                .states
                .cast::<u64>()
                .sub(words(self.blocks()))
                .add(number)
        }
    }

    fn set_free(self, block: usize, is_free: bool) {
        let word = self.word(block / 64);
        // SAFETY: within the bitmap; the lock is held.
        unsafe {
            match is_free {
                true => *word |= 1 << (block % 64),
                false => *word &= !(1 << (block % 64)),
            }
        }
    }

    /// Takes at most `wanted` free blocks from the first: writes their addresses. Returns their
    /// number, and the bytes that become resident.
    ///
    /// # Safety
    /// `to` has room for so many addresses.
    pub(super) unsafe fn take(self, to: *mut usize, wanted: usize) -> (usize, usize) {
        let (start, size) = (unit::address_of(self.first), self.size());
        // SAFETY: `new`; the bitmap has bits of blocks alone; the caller's promise.
        unsafe {
            let (hint, words) = (usize::from((*self.header).hint), words(self.blocks()));
            let is_resident = self.is_resident();
            let (mut number, mut taken, mut resident) = (hint / 64, 0, 0);
            while taken < wanted && number < words {
                let word = self.word(number);
                let mut bits = *word;
                while bits != 0 && taken < wanted {
                    let block = number * 64 + bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    let state = self.state(block);
                    let dirty = state.load(Ordering::Relaxed) & state::DIRTY;
                    state.store(state::CACHED | dirty, Ordering::Relaxed);
                    if !is_resident {
                        resident += self.touch(block);
                    }
                    to.add(taken).write(start + block * size);
                    taken += 1;
                }
                *word = bits;
                if taken < wanted {
                    number += 1;
                }
            }
            (*self.header).hint = u16::try_from(number * 64).unwrap_or(0);
            (*self.header).out += u16::try_from(taken).unwrap_or(0);
            (taken, resident)
        }
    }

    /// Reports whether all base pages count as resident.
    pub(super) fn is_resident(self) -> bool {
        let units = usize::from(shape_of(self.class()).units);
        // SAFETY: the units are the slab's.
        (0..units).all(|unit| unsafe { (*self.header.add(unit)).gone } == 0)
    }

    /// Frees adjacent blocks.
    ///
    /// # Safety
    /// They are taken, and nothing uses them.
    pub(super) unsafe fn free(self, block: usize, count: usize) {
        for number in block..block + count {
            self.state(number)
                .store(state::FREE | state::DIRTY, Ordering::Relaxed);
            self.set_free(number, true);
        }
        // SAFETY: `new`.
        unsafe {
            (*self.header).hint = (*self.header).hint.min(u16::try_from(block).unwrap_or(0));
            let count = u16::try_from(count).unwrap_or(0);
            (*self.header).out = (*self.header).out.saturating_sub(count);
        }
    }

    /// Marks a free block as one of a run. Returns the bytes that become resident.
    pub(super) fn mark(self, block: usize, state: u8) -> usize {
        self.state(block)
            .store(state | state::DIRTY, Ordering::Relaxed);
        self.set_free(block, false);
        // SAFETY: `new`.
        unsafe { (*self.header).out += 1 };
        self.touch(block)
    }

    /// Returns at most how many resident bytes no block has. Pieces count as their blocks.
    pub(super) fn idle_bytes(self) -> usize {
        let units = usize::from(shape_of(self.class()).units);
        // SAFETY: the units are the slab's.
        let gone = |unit| unsafe { (*self.header.add(unit)).gone }.count_ones() as usize;
        let resident = units * UNIT_BYTES - (0..units).map(gone).sum::<usize>() * BASE_BYTES;
        // SAFETY: `new`.
        resident.saturating_sub(usize::from(unsafe { (*self.header).out }) * self.size())
    }

    /// Calls `each` with the number and state of each block that is not free.
    pub(super) fn each_taken(self, mut each: impl FnMut(usize, u8)) {
        for number in 0..words(self.blocks()) {
            // SAFETY: within the bitmap; the lock is held.
            let mut taken = unsafe { !*self.word(number) };
            while taken != 0 {
                let block = number * 64 + taken.trailing_zeros() as usize;
                taken &= taken - 1;
                if block < self.blocks() {
                    each(block, self.state(block).load(Ordering::Relaxed));
                }
            }
        }
    }

    /// Notes that the base pages of a block become resident. Returns their bytes.
    fn touch(self, block: usize) -> usize {
        let (start, end) = (block * self.size(), (block + 1) * self.size());
        let mut touched = 0;
        for page in start / BASE_BYTES..end.div_ceil(BASE_BYTES) {
            // SAFETY: within the slab.
            let gone = unsafe { &mut (*self.header.add(page / BASES)).gone };
            if *gone & 1 << (page % BASES) != 0 {
                *gone &= !(1 << (page % BASES));
                touched += BASE_BYTES;
            }
        }
        touched
    }

    pub(super) fn is_gone(self, page: usize) -> bool {
        // SAFETY: within the slab.
        unsafe { (*self.header.add(page / BASES)).gone & 1 << (page % BASES) != 0 }
    }

    /// Reports whether all base pages of a block are gone, so that it reads as zeroes.
    pub(super) fn is_zero(self, block: usize) -> bool {
        let (start, end) = (block * self.size(), (block + 1) * self.size());
        (start / BASE_BYTES..end.div_ceil(BASE_BYTES)).all(|page| self.is_gone(page))
    }

    /// Drops base pages without a block that is taken, through `discard`. Returns their bytes.
    pub(super) fn drop_pages(self, mut discard: impl FnMut(usize, usize) -> bool) -> usize {
        let pages = usize::from(shape_of(self.class()).units) * BASES;
        let mut is_taken = [0_u64; 2];
        let size = self.size();
        for block in 0..self.blocks() {
            let state = self.state(block).load(Ordering::Relaxed);
            if state & state::KIND == state::FREE {
                continue;
            }
            for page in block * size / BASE_BYTES..((block + 1) * size).div_ceil(BASE_BYTES) {
                if let Some(word) = is_taken.get_mut(page / 64) {
                    *word |= 1 << (page % 64);
                }
            }
        }
        let may_go = |page: usize| {
            let taken = is_taken.get(page / 64).copied().unwrap_or(u64::MAX);
            taken & 1 << (page % 64) == 0 && !self.is_gone(page)
        };
        let (mut page, mut dropped) = (0, 0);
        while page < pages {
            if !may_go(page) {
                page += 1;
                continue;
            }
            let first = page;
            while page < pages && may_go(page) {
                page += 1;
            }
            let (at, length) = (
                unit::address_of(self.first) + first * BASE_BYTES,
                (page - first) * BASE_BYTES,
            );
            if !discard(at, length) {
                break;
            }
            dropped += length;
            for page in first..page {
                // SAFETY: within the slab; the lock is held.
                unsafe { (*self.header.add(page / BASES)).gone |= 1 << (page % BASES) };
            }
        }
        if dropped > 0 {
            for block in 0..self.blocks() {
                let state = self.state(block);
                let is_free = state.load(Ordering::Relaxed) & state::KIND == state::FREE;
                if is_free && self.is_zero(block) {
                    state.store(state::FREE, Ordering::Relaxed);
                }
            }
        }
        dropped
    }

    pub(super) fn class(self) -> usize {
        // SAFETY: `new`.
        usize::from(unsafe { (*self.header).class })
    }
}
