//! Folio sizes of resident pages, from /proc/PID/pagemap and /proc/kpageflags
//! (Documentation/admin-guide/mm/pagemap.rst). Needs CAP_SYS_ADMIN: else the kernel hides the page
//! frame numbers.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::files::{FileError, Root};
use crate::units::{Bytes, PageSize};

const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

const COMPOUND_HEAD: u64 = 1 << 15;
const COMPOUND_TAIL: u64 = 1 << 16;
const ZERO_PAGE: u64 = 1 << 24;

/// Maximum number of pages of one read.
const MAX_PAGES: usize = 1 << 15;
/// Maximum distance of frames whose flags are read in one call.
const MAX_GAP: u64 = 64;

/// The function that reads entries of pagemap of a process: the first one, and their number.
pub type ReadEntries = fn(&Root, u32, u64, usize) -> io::Result<Vec<u64>>;

/// Open files for folio sizes. The cost is bounded: less than half a microsecond for each of at
/// most [`Folios::BUDGET`] pages; the size of later pages is unknown.
#[derive(Debug)]
pub struct Folios {
    root: Root,
    flags: File,
    base: PageSize,
    /// Maximum number of base pages of a folio.
    block: u64,
    left: usize,
    entries: ReadEntries,
}

impl Folios {
    /// Maximum number of base pages: 16 GiB of 4 KiB pages.
    pub const BUDGET: usize = 1 << 22;

    /// Opens /proc/kpageflags.
    ///
    /// # Errors
    /// [`FileError::Io`], EACCES if this process is not root.
    pub fn open(root: &Root, base: PageSize, pmd: PageSize) -> Result<Self, FileError> {
        Ok(Self {
            root: root.clone(),
            flags: root.open("proc/kpageflags")?,
            base,
            block: pmd.bytes() / base.bytes(),
            left: Self::BUDGET,
            entries,
        })
    }

    /// Replaces the reader of pagemap, which a process can block.
    #[must_use]
    pub fn reading(self, entries: ReadEntries) -> Self {
        Self { entries, ..self }
    }

    /// Returns the resident bytes of `pid` between two addresses, by folio size. A partly mapped
    /// folio counts with its mapped part. Pages beyond the budget are omitted.
    ///
    /// # Errors
    /// [`FileError::Io`] if the process is gone.
    pub fn sizes(
        &mut self,
        pid: u32,
        start: u64,
        end: u64,
    ) -> Result<BTreeMap<PageSize, Bytes>, FileError> {
        let relative = format!("proc/{pid}/pagemap");
        let unread =
            |relative: &str, error| FileError::io("read", &self.root.path(relative))(error);
        let base = self.base.bytes();
        let mut sizes = BTreeMap::new();
        let (mut page, last) = (start / base, end / base);
        while page < last && self.left > 0 {
            let wanted = usize::try_from(last - page)
                .unwrap_or(MAX_PAGES)
                .min(MAX_PAGES)
                .min(self.left);
            let entries = (self.entries)(&self.root, pid, page, wanted)
                .map_err(|error| unread(&relative, error))?;
            if entries.is_empty() {
                break;
            }
            page += entries.len() as u64;
            self.left -= entries.len();
            let mut frames: Vec<u64> = entries
                .into_iter()
                .filter(|entry| entry & PRESENT != 0)
                .map(|entry| entry & FRAME)
                .filter(|frame| *frame != 0)
                .collect();
            frames.sort_unstable();
            let tallied = self.tally(&frames, &mut sizes);
            tallied.map_err(|error| unread("proc/kpageflags", error))?;
        }
        Ok(sizes)
    }

    /// Adds the folio sizes of ascending `frames`.
    fn tally(&self, frames: &[u64], sizes: &mut BTreeMap<PageSize, Bytes>) -> io::Result<()> {
        let mut block = Block::default();
        for run in frames.chunk_by(|a, b| b - a < MAX_GAP) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else {
                continue;
            };
            let count = usize::try_from(last - first + 1).unwrap_or(usize::MAX);
            let flags = words(&self.flags, *first, count)?;
            for frame in run {
                let index = usize::try_from(frame - first).unwrap_or(usize::MAX);
                let Some(flags) = flags.get(index).filter(|flags| *flags & ZERO_PAGE == 0) else {
                    continue;
                };
                let pages = if flags & (COMPOUND_HEAD | COMPOUND_TAIL) == 0 {
                    1
                } else {
                    block.load(&self.flags, *frame, self.block)?.folio(*frame)
                };
                if let Ok(size) = PageSize::new(pages * self.base.bytes()) {
                    *sizes.entry(size).or_default() += Bytes(self.base.bytes());
                }
            }
        }
        Ok(())
    }
}

/// Flags of the frames that one huge page could cover.
#[derive(Default)]
struct Block {
    first: u64,
    flags: Vec<u64>,
}

impl Block {
    fn load(&mut self, file: &File, frame: u64, pages: u64) -> io::Result<&Self> {
        let first = frame - frame % pages;
        if self.flags.is_empty() || self.first != first {
            let count = usize::try_from(pages).unwrap_or(usize::MAX);
            *self = Self {
                first,
                flags: words(file, first, count)?,
            };
        }
        Ok(self)
    }

    /// Returns the number of base pages of the folio around `frame`, from its head to its last
    /// tail. A folio with its head before the block fills it.
    fn folio(&self, frame: u64) -> u64 {
        let index = usize::try_from(frame - self.first).unwrap_or(0);
        let up_to = self.flags.get(..=index).unwrap_or_default();
        let Some(head) = up_to.iter().rposition(|flags| flags & COMPOUND_HEAD != 0) else {
            return self.flags.len() as u64;
        };
        let tails = self.flags[head + 1..]
            .iter()
            .take_while(|flags| *flags & COMPOUND_TAIL != 0)
            .count() as u64;
        // Folios are powers of two: another number means a split during the read.
        1 << (tails + 1).ilog2()
    }
}

fn entries(root: &Root, pid: u32, first: u64, count: usize) -> io::Result<Vec<u64>> {
    let file = File::open(root.path(format!("proc/{pid}/pagemap")))?;
    words(&file, first, count)
}

/// Reads up to `count` 64-bit words of a file; fewer at its end.
fn words(file: &File, first: u64, count: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; count.saturating_mul(8)];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], first * 8 + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let word = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).ok();
    Ok(bytes[..filled].chunks_exact(8).filter_map(word).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folio_reaches_from_its_head_to_its_last_tail() {
        let mut flags = vec![0, COMPOUND_HEAD, COMPOUND_TAIL, 0, COMPOUND_HEAD];
        flags.extend([COMPOUND_TAIL; 3]);
        let block = Block { first: 512, flags };
        for (frame, pages) in [(513, 2), (514, 2), (516, 4), (518, 4), (519, 4)] {
            assert_eq!(block.folio(frame), pages, "{frame}");
        }
    }

    #[test]
    fn a_folio_that_began_before_the_block_fills_it() {
        let block = Block {
            first: 0,
            flags: vec![COMPOUND_TAIL; 8],
        };
        assert_eq!(block.folio(3), 8);
    }
}
