//! Ranges that wait to be freed: [`Batch`], 8 inline and then blocks of 510.
//!
//! The numbers are the kernel's own (`MMU_GATHER_BUNDLE`, `MAX_GATHER_BATCH` in asm-generic/tlb.h). Memory
//! for the blocks is taken beforehand, a [`Reserve`] of them, because freeing must work when there is no
//! memory; where none is left a batch is full, and the thread that fills it hands it over first.
//!
//! Invariant: two entries of one batch that touch and are freed alike are one entry, if both were among
//! the last [`LOOK_BACK`] when the second came.

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rustix::io::Errno;

/// Entries that need no block.
pub(super) const INLINE: usize = 8;
/// Entries in a block: with its header, two base pages.
const BLOCK: usize = 510;
/// Blocks that one batch can have.
const CHAIN: usize = 4;
/// How many of the last entries a new one is merged with.
const LOOK_BACK: usize = 8;

/// How a range is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// Private anonymous memory is dropped and stays mapped: it reads as zeroes. MADV_DONTNEED.
    Zap,
    /// A hole in shared memory or in hugetlb pages: everybody reads zeroes there. MADV_REMOVE, Linux
    /// 2.6.16; hugetlb since 4.3.
    Punch {
        /// Which file it is, by a number of the caller's, of which ten bits count. Two threads that punch
        /// one file are slower than one (they meet at its lock), so ranges of one file that follow each
        /// other are left to one thread.
        file: u16,
    },
    /// A file's pages are dropped from this mapping, and stay in the file. MADV_DONTNEED.
    Drop,
    /// Private anonymous memory is dropped and unmapped. munmap(2), when the range is empty.
    Unmap,
}

/// A range that the kernel did not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot free {length} bytes at {address:#x} ({operation:?}): {errno}")]
#[non_exhaustive]
pub struct FreeError {
    /// Where it begins.
    pub address: usize,
    /// Its length in bytes.
    pub length: usize,
    /// What was asked for.
    pub operation: Operation,
    /// The kernel's answer.
    pub errno: Errno,
}

/// A range to free, in bytes, with its operation in the bits that page alignment leaves free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    start: usize,
    word: usize,
}

const CODE: usize = 4095;

impl Entry {
    /// `start` and `length` are multiples of the page size.
    pub(super) const fn new(start: usize, length: usize, operation: Operation) -> Self {
        let code = match operation {
            Operation::Zap => 0,
            Operation::Punch { file } => 1 | (file as usize & 1023) << 2,
            Operation::Drop => 2,
            Operation::Unmap => 3,
        };
        Self {
            start,
            word: length & !CODE | code,
        }
    }

    pub(super) const fn start(self) -> usize {
        self.start
    }

    pub(super) const fn length(self) -> usize {
        self.word & !CODE
    }

    pub(super) const fn end(self) -> usize {
        self.start + self.length()
    }

    pub(super) fn operation(self) -> Operation {
        match self.word & 3 {
            0 => Operation::Zap,
            1 => Operation::Punch {
                // Ten bits.
                file: u16::try_from(self.word >> 2 & 1023).unwrap_or(0),
            },
            2 => Operation::Drop,
            _ => Operation::Unmap,
        }
    }

    /// The bytes from `from` on, at most `most` of them.
    pub(super) fn part(self, from: usize, most: usize) -> Self {
        let length = (self.length() - from).min(most);
        Self {
            start: self.start + from,
            word: length | self.word & CODE,
        }
    }

    /// The kernel's refusal.
    pub(super) fn refused(self, errno: Errno) -> FreeError {
        FreeError {
            address: self.start,
            length: self.length(),
            operation: self.operation(),
            errno,
        }
    }

    /// One entry of two that touch and are freed alike.
    fn merged(self, other: Self) -> Option<Self> {
        let alike = self.word & CODE == other.word & CODE;
        let touch = self.end() == other.start || other.end() == self.start;
        (alike && touch).then(|| Self {
            start: self.start.min(other.start),
            word: self.word + other.length(),
        })
    }
}

/// A block of entries: in its batch's hands alone, so that each word stands for itself.
#[derive(Debug)]
#[repr(C, align(4096))]
struct Block {
    entries: [[AtomicUsize; 2]; BLOCK],
}

/// Blocks for batches, taken beforehand.
#[derive(Debug)]
pub(super) struct Reserve {
    blocks: [Block; Self::BLOCKS],
    /// A bit for each block that a batch has.
    taken: AtomicU32,
    touched: AtomicU32,
}

impl Reserve {
    const BLOCKS: usize = 8;

    pub(super) const fn new() -> Self {
        Self {
            blocks: [const {
                Block {
                    entries: [const { [const { AtomicUsize::new(0) }; 2] }; BLOCK],
                }
            }; Self::BLOCKS],
            taken: AtomicU32::new(0),
            touched: AtomicU32::new(0),
        }
    }

    /// Makes the blocks resident, so that no page of them is asked for when there are none left.
    pub(super) fn prepare(&self) {
        if self.touched.swap(1, Ordering::Relaxed) == 0 {
            for entry in self.blocks.iter().flat_map(|block| &block.entries) {
                entry[0].fetch_or(0, Ordering::Relaxed);
            }
        }
    }

    fn take(&self) -> Option<u8> {
        // What was never prepared is not taken: its pages may not be there.
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

    fn get(&self, block: u8, index: usize) -> Entry {
        let [start, word] = &self.blocks[usize::from(block)].entries[index];
        Entry {
            start: start.load(Ordering::Relaxed),
            word: word.load(Ordering::Relaxed),
        }
    }

    fn set(&self, block: u8, index: usize, entry: Entry) {
        let [start, word] = &self.blocks[usize::from(block)].entries[index];
        start.store(entry.start, Ordering::Relaxed);
        word.store(entry.word, Ordering::Relaxed);
    }
}

/// No more ranges go in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// Ranges that are freed together.
#[derive(Debug)]
pub(super) struct Batch {
    reserve: Option<&'static Reserve>,
    inline: [Entry; INLINE],
    chain: [u8; CHAIN],
    blocks: usize,
    count: usize,
    bytes: usize,
}

impl Batch {
    /// An empty batch, which takes its blocks from `reserve`; without one it has none.
    pub(super) const fn new(reserve: Option<&'static Reserve>) -> Self {
        const NOTHING: Entry = Entry { start: 0, word: 0 };
        Self {
            reserve,
            inline: [NOTHING; INLINE],
            chain: [0; CHAIN],
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

    /// True where another range would need a block and can have none.
    pub(super) const fn is_full(&self) -> bool {
        self.reserve.is_none() && self.count == INLINE
    }

    /// The entries, in the order in which they came.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry> {
        (0..self.count).map(|index| self.get(index))
    }

    pub(super) fn get(&self, index: usize) -> Entry {
        match (index.checked_sub(INLINE), self.reserve) {
            (Some(beyond), Some(reserve)) => {
                reserve.get(self.chain[beyond / BLOCK], beyond % BLOCK)
            }
            _ => self.inline[index],
        }
    }

    fn set(&mut self, index: usize, entry: Entry) {
        match (index.checked_sub(INLINE), self.reserve) {
            (Some(beyond), Some(reserve)) => {
                reserve.set(self.chain[beyond / BLOCK], beyond % BLOCK, entry);
            }
            _ => self.inline[index] = entry,
        }
    }

    /// Adds a range, merged with its neighbours.
    ///
    /// # Errors
    /// [`Full`]: there is no room, and nothing has changed.
    ///
    /// # Safety
    /// What the range holds, and for [`Operation::Unmap`] its addresses, are the caller's to lose. From now on until
    /// the batch is done nothing uses it.
    #[expect(unsafe_code, reason = "who has the batch frees the range")]
    pub(super) unsafe fn push(&mut self, entry: Entry) -> Result<(), Full> {
        let recent = self.count.saturating_sub(LOOK_BACK)..self.count;
        let found = recent
            .clone()
            .find_map(|index| Some((index, self.get(index).merged(entry)?)));
        if let Some((index, merged)) = found {
            self.set(index, merged);
            self.bytes += entry.length();
            // What grew may touch another one now.
            let bridged = recent
                .filter(|other| *other != index)
                .find_map(|other| Some((other, self.get(other).merged(merged)?)));
            if let Some((other, whole)) = bridged {
                self.set(index.min(other), whole);
                self.remove(index.max(other));
            }
            return Ok(());
        }
        if self.count == INLINE + self.blocks * BLOCK {
            let block = self.reserve.filter(|_| self.blocks < CHAIN);
            let block = block.and_then(Reserve::take).ok_or(Full)?;
            self.chain[self.blocks] = block;
            self.blocks += 1;
        }
        self.count += 1;
        self.set(self.count - 1, entry);
        self.bytes += entry.length();
        Ok(())
    }

    /// As [`Batch::push`], for tests, which free nothing.
    #[cfg(test)]
    #[expect(unsafe_code, reason = "nothing is freed")]
    pub(super) fn push_unfreed(&mut self, entry: Entry) -> Result<(), Full> {
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

const _: () = assert!(size_of::<Block>() == 2 * 4096);

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn reserve() -> &'static Reserve {
        let reserve = Box::leak(Box::new(Reserve::new()));
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

    /// The naive model: each page by itself, with what is to be done to it.
    fn pages(entries: impl Iterator<Item = Entry>) -> BTreeMap<usize, String> {
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
        fn a_batch_holds_the_pages_that_were_put_in(
            ranges in prop::collection::vec((0usize..400, 1usize..4, 0u8..5), 0..200),
        ) {
            let mut batch = Batch::new(Some(reserve()));
            let (mut model, mut bytes) = (BTreeMap::new(), 0);
            for (page, length, code) in ranges {
                if (page..page + length).any(|page| model.contains_key(&(page * 4096))) {
                    continue;
                }
                let entry = Entry::new(page * 4096, length * 4096, operation(code));
                prop_assert_eq!(entry.operation(), operation(code));
                batch.push_unfreed(entry).unwrap();
                bytes += entry.length();
                model.extend(pages(std::iter::once(entry)));
                prop_assert_eq!(batch.bytes(), bytes);
            }
            prop_assert_eq!(pages(batch.entries()), model);
        }

        #[test]
        fn pages_in_a_row_become_one_range(
            order in Just((0usize..8).collect::<Vec<_>>()).prop_shuffle(),
        ) {
            let mut batch = Batch::new(None);
            for page in order {
                batch.push_unfreed(Entry::new((page + 7) * 4096, 4096, Operation::Zap)).unwrap();
            }
            let whole = Entry::new(7 * 4096, 8 * 4096, Operation::Zap);
            prop_assert_eq!(batch.entries().collect::<Vec<_>>(), vec![whole]);
        }
    }

    #[test]
    fn a_batch_is_full_when_its_blocks_are() {
        let reserve = reserve();
        let apart = |index: usize| Entry::new(index * 8192, 4096, Operation::Zap);
        let mut batch = Batch::new(Some(reserve));
        let room = INLINE + CHAIN * BLOCK;
        for index in 0..room {
            batch.push_unfreed(apart(index)).unwrap();
        }
        assert_eq!(batch.push_unfreed(apart(room)), Err(Full));
        assert!(batch.entries().eq((0..room).map(apart)));
        // Its neighbours still go in.
        batch
            .push_unfreed(Entry::new(room * 8192 - 4096, 4096, Operation::Zap))
            .unwrap();
        assert_eq!(batch.count(), room);
        drop(batch);
        let mut many: Vec<Batch> = Vec::new();
        let taken = std::iter::from_fn(|| {
            let mut batch = Batch::new(Some(reserve));
            let filled = (0..=INLINE).all(|index| batch.push_unfreed(apart(index)).is_ok());
            many.push(batch);
            filled.then_some(())
        });
        assert_eq!(taken.count(), Reserve::BLOCKS);
        // Without a reserve there is room for the inline ones.
        let mut small = Batch::new(None);
        assert!((0..INLINE).all(|index| small.push_unfreed(apart(index)).is_ok()));
        assert_eq!(small.push_unfreed(apart(INLINE)), Err(Full));
    }
}
