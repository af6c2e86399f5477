//! Ranges to free: [`Batch`], 8 inline, then in blocks of 510.
//!
//! The numbers are the kernel's (`MMU_GATHER_BUNDLE`, `MAX_GATHER_BATCH` in asm-generic/tlb.h). The
//! blocks are allocated beforehand, in a [`BlockReserve`], since freeing must work without free
//! memory. Without a block the batch is full, and its thread hands it over first.
//!
//! Invariant: adjacent ranges with one operation are merged, if within the last [`MERGE_WINDOW`].

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rustix::io::Errno;

/// Ranges stored without a block.
pub(super) const INLINE_RANGES: usize = 8;
/// Ranges of a block: with its header, two base pages.
const BLOCK_RANGES: usize = 510;
const MAX_BLOCKS: usize = 4;
/// Number of last ranges that are merged with a new one.
const MERGE_WINDOW: usize = 8;

/// Method to free a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// Drops private anonymous memory, which stays mapped and reads as zeroes. MADV_DONTNEED.
    Zap,
    /// Punches a hole into shared memory or hugetlb pages; all processes read zeroes. MADV_REMOVE,
    /// Linux 2.6.16; hugetlb since 4.3.
    Punch {
        /// Number of the file, ten bits, chosen by the caller. Two threads that punch one file are
        /// slower than one, because they contend for its lock. So ranges of one file stay together.
        file: u16,
    },
    /// Drops a file's pages from this mapping; the file keeps them. MADV_DONTNEED.
    Drop,
    /// Drops and unmaps private anonymous memory. munmap(2) of the empty range.
    Unmap,
}

/// Range that the kernel did not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot free {length} bytes at {address:#x} ({operation:?}): {errno}")]
#[non_exhaustive]
pub struct FreeError {
    /// Start address.
    pub address: usize,
    /// Length in bytes.
    pub length: usize,
    /// Requested operation.
    pub operation: Operation,
    /// Error of the kernel.
    pub errno: Errno,
}

/// Range to free, in bytes; the operation is in the low bits of the length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FreeRange {
    start: usize,
    word: usize,
}

const CODE_MASK: usize = 4095;

impl FreeRange {
    /// Returns a range; `start` and `length` are multiples of the page size.
    pub(super) const fn new(start: usize, length: usize, operation: Operation) -> Self {
        let code = match operation {
            Operation::Zap => 0,
            Operation::Punch { file } => 1 | (file as usize & 1023) << 2,
            Operation::Drop => 2,
            Operation::Unmap => 3,
        };
        Self {
            start,
            word: length & !CODE_MASK | code,
        }
    }

    pub(super) const fn start(self) -> usize {
        self.start
    }

    pub(super) const fn length(self) -> usize {
        self.word & !CODE_MASK
    }

    pub(super) const fn end(self) -> usize {
        self.start + self.length()
    }

    pub(super) fn operation(self) -> Operation {
        match self.word & 3 {
            0 => Operation::Zap,
            1 => Operation::Punch {
                file: u16::try_from(self.word >> 2 & 1023).unwrap_or(0),
            },
            2 => Operation::Drop,
            _ => Operation::Unmap,
        }
    }

    /// Returns at most `max` bytes at offset `from`.
    pub(super) fn part(self, from: usize, max: usize) -> Self {
        let length = (self.length() - from).min(max);
        Self {
            start: self.start + from,
            word: length | self.word & CODE_MASK,
        }
    }

    pub(super) fn error(self, errno: Errno) -> FreeError {
        FreeError {
            address: self.start,
            length: self.length(),
            operation: self.operation(),
            errno,
        }
    }

    /// Merges two adjacent ranges with the same operation.
    fn merged(self, other: Self) -> Option<Self> {
        let alike = self.word & CODE_MASK == other.word & CODE_MASK;
        let touch = self.end() == other.start || other.end() == self.start;
        (alike && touch).then(|| Self {
            start: self.start.min(other.start),
            word: self.word + other.length(),
        })
    }
}

/// Block of ranges. One batch owns it, so its words need no common order.
#[derive(Debug)]
#[repr(C, align(4096))]
struct RangeBlock {
    entries: [[AtomicUsize; 2]; BLOCK_RANGES],
}

#[derive(Debug)]
pub(super) struct BlockReserve {
    blocks: [RangeBlock; Self::BLOCKS],
    taken: AtomicU32,
    touched: AtomicU32,
}

impl BlockReserve {
    const BLOCKS: usize = 8;

    pub(super) const fn new() -> Self {
        Self {
            blocks: [const {
                RangeBlock {
                    entries: [const { [const { AtomicUsize::new(0) }; 2] }; BLOCK_RANGES],
                }
            }; Self::BLOCKS],
            taken: AtomicU32::new(0),
            touched: AtomicU32::new(0),
        }
    }

    /// Makes the blocks resident, so that no page is needed when memory is short.
    pub(super) fn prepare(&self) {
        if self.touched.swap(1, Ordering::Relaxed) == 0 {
            for entry in self.blocks.iter().flat_map(|block| &block.entries) {
                entry[0].fetch_or(0, Ordering::Relaxed);
            }
        }
    }

    fn take(&self) -> Option<u8> {
        // Unprepared blocks may need pages.
        if self.touched.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let free = |taken: u32| taken.trailing_ones();
        let next = |taken: u32| {
            let free = free(taken);
            ((free as usize) < Self::BLOCKS).then(|| taken | 1 << free)
        };
        let before = self
            .taken
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, next);
        before.ok().and_then(|taken| u8::try_from(free(taken)).ok())
    }

    fn give_back(&self, block: u8) {
        self.taken.fetch_and(!(1 << block), Ordering::Release);
    }

    fn get(&self, block: u8, index: usize) -> FreeRange {
        let [start, word] = &self.blocks[usize::from(block)].entries[index];
        FreeRange {
            start: start.load(Ordering::Relaxed),
            word: word.load(Ordering::Relaxed),
        }
    }

    fn set(&self, block: u8, index: usize, entry: FreeRange) {
        let [start, word] = &self.blocks[usize::from(block)].entries[index];
        start.store(entry.start, Ordering::Relaxed);
        word.store(entry.word, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// Ranges that are freed together.
#[derive(Debug)]
pub(super) struct Batch {
    reserve: Option<&'static BlockReserve>,
    inline: [FreeRange; INLINE_RANGES],
    chain: [u8; MAX_BLOCKS],
    blocks: usize,
    count: usize,
    bytes: usize,
}

impl Batch {
    /// Returns an empty batch with blocks from `reserve`, or without blocks.
    pub(super) const fn new(reserve: Option<&'static BlockReserve>) -> Self {
        const NOTHING: FreeRange = FreeRange { start: 0, word: 0 };
        Self {
            reserve,
            inline: [NOTHING; INLINE_RANGES],
            chain: [0; MAX_BLOCKS],
            blocks: 0,
            count: 0,
            bytes: 0,
        }
    }

    pub(super) const fn count(&self) -> usize {
        self.count
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reports whether another range needs a block, and there is no reserve.
    pub(super) const fn is_full(&self) -> bool {
        self.reserve.is_none() && self.count == INLINE_RANGES
    }

    /// Returns the ranges in the order of their addition.
    pub(super) fn entries(&self) -> impl Iterator<Item = FreeRange> {
        (0..self.count).map(|index| self.get(index))
    }

    pub(super) fn get(&self, index: usize) -> FreeRange {
        match (index.checked_sub(INLINE_RANGES), self.reserve) {
            (Some(beyond), Some(reserve)) => {
                reserve.get(self.chain[beyond / BLOCK_RANGES], beyond % BLOCK_RANGES)
            }
            _ => self.inline[index],
        }
    }

    fn set(&mut self, index: usize, entry: FreeRange) {
        match (index.checked_sub(INLINE_RANGES), self.reserve) {
            (Some(beyond), Some(reserve)) => {
                reserve.set(
                    self.chain[beyond / BLOCK_RANGES],
                    beyond % BLOCK_RANGES,
                    entry,
                );
            }
            _ => self.inline[index] = entry,
        }
    }

    /// Adds a range, merged with its neighbours.
    ///
    /// # Errors
    /// [`Full`]: no room; the batch is unchanged.
    ///
    /// # Safety
    /// The caller gives up the content of the range, and for [`Operation::Unmap`] its addresses. No
    /// thread uses the range until the batch is done.
    #[expect(unsafe_code, reason = "the owner of the batch frees the range")]
    pub(super) unsafe fn push(&mut self, entry: FreeRange) -> Result<(), Full> {
        let recent = self.count.saturating_sub(MERGE_WINDOW)..self.count;
        let found = recent
            .clone()
            .find_map(|index| Some((index, self.get(index).merged(entry)?)));
        if let Some((index, merged)) = found {
            self.set(index, merged);
            self.bytes += entry.length();
            // The merged range may touch another one.
            let bridged = recent
                .filter(|other| *other != index)
                .find_map(|other| Some((other, self.get(other).merged(merged)?)));
            if let Some((other, whole)) = bridged {
                self.set(index.min(other), whole);
                self.remove(index.max(other));
            }
            return Ok(());
        }
        if self.count == INLINE_RANGES + self.blocks * BLOCK_RANGES {
            let block = self.reserve.filter(|_| self.blocks < MAX_BLOCKS);
            let block = block.and_then(BlockReserve::take).ok_or(Full)?;
            self.chain[self.blocks] = block;
            self.blocks += 1;
        }
        self.count += 1;
        self.set(self.count - 1, entry);
        self.bytes += entry.length();
        Ok(())
    }

    /// Adds a range in tests, which free nothing.
    #[cfg(test)]
    #[expect(unsafe_code, reason = "nothing is freed")]
    pub(super) fn push_unfreed(&mut self, entry: FreeRange) -> Result<(), Full> {
        // SAFETY: no test gives its batches to `Kernel`.
        unsafe { self.push(entry) }
    }

    fn remove(&mut self, index: usize) {
        for at in index + 1..self.count {
            let entry = self.get(at);
            self.set(at - 1, entry);
        }
        self.count -= 1;
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if let Some(reserve) = self.reserve {
            for block in &self.chain[..self.blocks] {
                reserve.give_back(*block);
            }
        }
    }
}

const _: () = assert!(size_of::<RangeBlock>() == 2 * 4096);

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn reserve() -> &'static BlockReserve {
        let reserve = Box::leak(Box::new(BlockReserve::new()));
        reserve.prepare();
        reserve
    }

    fn operation(code: u8) -> Operation {
        match code % 5 {
            0 => Operation::Zap,
            1 => Operation::Drop,
            2 => Operation::Unmap,
            file => Operation::Punch {
                file: u16::from(file) * 200,
            },
        }
    }

    /// Model: each page with its operation.
    fn pages(entries: impl Iterator<Item = FreeRange>) -> BTreeMap<usize, String> {
        let mut pages = BTreeMap::new();
        for entry in entries {
            for page in (entry.start()..entry.end()).step_by(4096) {
                let twice = pages.insert(page, format!("{:?}", entry.operation()));
                assert_eq!(twice, None, "page {page:#x}");
            }
        }
        pages
    }

    proptest! {
        #[test]
        fn a_batch_holds_the_added_pages(
            ranges in prop::collection::vec((0usize..400, 1usize..4, 0u8..5), 0..200),
        ) {
            let mut batch = Batch::new(Some(reserve()));
            let (mut model, mut bytes) = (BTreeMap::new(), 0);
            for (page, length, code) in ranges {
                if (page..page + length).any(|page| model.contains_key(&(page * 4096))) {
                    continue;
                }
                let entry = FreeRange::new(page * 4096, length * 4096, operation(code));
                prop_assert_eq!(entry.operation(), operation(code));
                batch.push_unfreed(entry).unwrap();
                bytes += entry.length();
                model.extend(pages(std::iter::once(entry)));
                prop_assert_eq!(batch.bytes(), bytes);
            }
            prop_assert_eq!(pages(batch.entries()), model);
        }

        #[test]
        fn adjacent_pages_become_one_range(
            order in Just((0usize..8).collect::<Vec<_>>()).prop_shuffle(),
        ) {
            let mut batch = Batch::new(None);
            for page in order {
                batch.push_unfreed(FreeRange::new((page + 7) * 4096, 4096, Operation::Zap)).unwrap();
            }
            let whole = FreeRange::new(7 * 4096, 8 * 4096, Operation::Zap);
            prop_assert_eq!(batch.entries().collect::<Vec<_>>(), vec![whole]);
        }
    }

    #[test]
    fn a_batch_with_full_blocks_is_full() {
        let reserve = reserve();
        let apart = |index: usize| FreeRange::new(index * 8192, 4096, Operation::Zap);
        let mut batch = Batch::new(Some(reserve));
        let room = INLINE_RANGES + MAX_BLOCKS * BLOCK_RANGES;
        for index in 0..room {
            batch.push_unfreed(apart(index)).unwrap();
        }
        assert_eq!(batch.push_unfreed(apart(room)), Err(Full));
        assert!(batch.entries().eq((0..room).map(apart)));
        // Neighbours can still be merged.
        batch
            .push_unfreed(FreeRange::new(room * 8192 - 4096, 4096, Operation::Zap))
            .unwrap();
        assert_eq!(batch.count(), room);
        drop(batch);
        let mut many: Vec<Batch> = Vec::new();
        let taken = std::iter::from_fn(|| {
            let mut batch = Batch::new(Some(reserve));
            let filled = (0..=INLINE_RANGES).all(|index| batch.push_unfreed(apart(index)).is_ok());
            many.push(batch);
            filled.then_some(())
        });
        assert_eq!(taken.count(), BlockReserve::BLOCKS);
        // Only inline ranges without a reserve.
        let mut small = Batch::new(None);
        assert!((0..INLINE_RANGES).all(|index| small.push_unfreed(apart(index)).is_ok()));
        assert_eq!(small.push_unfreed(apart(INLINE_RANGES)), Err(Full));
    }
}
