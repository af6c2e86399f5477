//! The state of pages, by the PAGEMAP_SCAN request and the entries of /proc/PID/pagemap.

use core::ops::Range;

use rustix::fd::OwnedFd;
use rustix::io::Result;
use rustix::ioctl::{Opcode, opcode};

use super::{File, control, open};

/// Argument of PAGEMAP_SCAN (`struct pm_scan_arg`, linux/fs.h).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

impl Scan {
    /// Sets the range.
    fn of(self, range: Range<usize>) -> Self {
        Self {
            size: size_of::<Self>() as u64,
            start: range.start as u64,
            end: range.end as u64,
            ..self
        }
    }
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
pub(super) const PAGEMAP_SCAN: Opcode = opcode::read_write::<Scan>(b'f', 16);

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// Bit of an entry of the file: no other process maps the page (Linux 4.2).
const EXCLUSIVE: u64 = 1 << 56;
/// Bit of an entry of the file: the page is present.
const PRESENT: u64 = 1 << 63;

/// Filter of [`Pagemap::count`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Pages that this process maps.
    Present,
    /// Present pages except the zero page.
    Resident,
    /// Pages mapped by a PMD or larger.
    Huge,
    /// Private copies of a file's pages, after a write: in memory or in swap.
    Changed,
}

/// State of a page in memory or in swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageState {
    /// The page is in memory.
    pub present: bool,
    /// A PMD or larger maps the page.
    pub huge: bool,
}

/// Open /proc/PID/pagemap of this process or another.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Opens that of this process.
    ///
    /// # Errors
    /// Those of open(2): no /proc, no free descriptor, or a process that is not dumpable.
    pub fn open() -> Result<Self> {
        open(c"/proc/self/pagemap").map(Self)
    }

    /// Wraps /proc/PID/pagemap of another process.
    pub fn of(file: OwnedFd) -> Self {
        Self(File::Own(file))
    }

    /// Calls `visit` with each run of pages in memory or in swap, without the zero page.
    ///
    /// # References
    /// Documentation/admin-guide/mm/pagemap.rst; Linux 6.7.
    ///
    /// # Errors
    /// ENOTTY: an older kernel.
    pub fn walk(
        &self,
        range: Range<usize>,
        mut visit: impl FnMut(Range<usize>, PageState),
    ) -> Result<()> {
        let scan = Scan {
            category_inverted: PAGE_IS_PFNZERO,
            category_mask: PAGE_IS_PFNZERO,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_HUGE,
            ..Scan::default()
        };
        self.each::<64>(scan.of(range), |[start, end, categories]| {
            let word = |word: u64| usize::try_from(word).unwrap_or(usize::MAX);
            let state = PageState {
                present: categories & PAGE_IS_PRESENT != 0,
                huge: categories & PAGE_IS_HUGE != 0,
            };
            visit(word(start)..word(end), state);
        })
    }

    /// Calls `visit` with start, end and categories of each region that the scan finds, `REGIONS`
    /// per request.
    fn each<const REGIONS: usize>(
        &self,
        mut scan: Scan,
        mut visit: impl FnMut([u64; 3]),
    ) -> Result<()> {
        let mut found = [[0; 3]; REGIONS];
        while scan.start < scan.end {
            let regions = self.scan(&mut scan, &mut found)?;
            found.iter().take(regions).copied().for_each(&mut visit);
            if scan.walk_end <= scan.start {
                break;
            }
            scan.start = scan.walk_end;
        }
        Ok(())
    }

    /// Makes the request PAGEMAP_SCAN. Returns the number of regions in `found`.
    fn scan(&self, scan: &mut Scan, found: &mut [[u64; 3]]) -> Result<usize> {
        scan.vec = found.as_mut_ptr().expose_provenance() as u64;
        scan.vec_len = found.len() as u64;
        #[expect(unsafe_code, reason = "an ioctl that rustix lacks")]
        // SAFETY: the request reads and writes a `struct pm_scan_arg`, which `Scan` is. `vec` has
        // `vec_len` regions during the call. Without PM_SCAN_WP_MATCHING no page is changed.
        unsafe {
            control(&self.0, PAGEMAP_SCAN, scan)
        }
    }

    /// Reports whether the page at `address` is present, mapped as a base page, and anonymous if
    /// `anonymous`.
    ///
    /// # References
    /// Documentation/admin-guide/mm/pagemap.rst; Linux 6.7.
    ///
    /// # Errors
    /// ENOTTY: an older kernel.
    pub fn is_base(&self, address: usize, page: usize, anonymous: bool) -> Result<bool> {
        let excluded = PAGE_IS_HUGE | if anonymous { PAGE_IS_FILE } else { 0 };
        let scan = Scan {
            category_inverted: excluded,
            category_mask: PAGE_IS_PRESENT | excluded,
            return_mask: PAGE_IS_PRESENT,
            ..Scan::default()
        };
        let regions = self.scan(&mut scan.of(address..address + page), &mut [[0; 3]]);
        regions.map(|regions| regions > 0)
    }

    /// Returns the bytes of a range in pages that match the filter.
    ///
    /// # References
    /// Documentation/admin-guide/mm/pagemap.rst; Linux 6.7.
    ///
    /// # Errors
    /// ENOTTY: an older kernel.
    pub fn count(&self, range: Range<usize>, pages: Pages) -> Result<usize> {
        let (inverted, mask, any) = match pages {
            Pages::Present => (0, PAGE_IS_PRESENT, 0),
            Pages::Resident => (PAGE_IS_PFNZERO, PAGE_IS_PRESENT | PAGE_IS_PFNZERO, 0),
            Pages::Huge => (0, PAGE_IS_PRESENT | PAGE_IS_HUGE, 0),
            Pages::Changed => (
                PAGE_IS_FILE,
                PAGE_IS_FILE,
                PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            ),
        };
        let scan = Scan {
            category_inverted: inverted,
            category_mask: mask,
            category_anyof_mask: any,
            return_mask: PAGE_IS_PRESENT,
            ..Scan::default()
        };
        let mut bytes = 0;
        self.each::<32>(scan.of(range), |[start, end, _]| bytes += end - start)?;
        Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// Returns the address of the first present page of a range.
    ///
    /// # References
    /// Documentation/admin-guide/mm/pagemap.rst; Linux 6.7.
    ///
    /// # Errors
    /// ENOTTY: an older kernel.
    pub fn next_present(&self, range: Range<usize>) -> Result<Option<usize>> {
        let scan = Scan {
            category_mask: PAGE_IS_PRESENT,
            return_mask: PAGE_IS_PRESENT,
            ..Scan::default()
        };
        let mut found = [[0; 3]];
        let regions = self.scan(&mut scan.of(range.clone()), &mut found)?;
        let [[start, ..]] = found;
        Ok((regions > 0).then(|| usize::try_from(start).unwrap_or(range.end)))
    }

    /// Returns the bytes of a range in pages that only this process maps, without the zero page.
    /// `page` is the base page size.
    ///
    /// # References
    /// Documentation/admin-guide/mm/pagemap.rst; Linux 4.2.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn exclusive(&self, range: Range<usize>, page: usize) -> Result<usize> {
        self.having(PRESENT | EXCLUSIVE, range, page)
    }

    /// Returns the bytes of a range that are in memory, the zero page included.
    ///
    /// # Errors
    /// As [`Pagemap::exclusive`].
    pub fn present(&self, range: Range<usize>, page: usize) -> Result<usize> {
        self.having(PRESENT, range, page)
    }

    /// Returns the bytes of a range whose entries have all `bits`.
    fn having(&self, bits: u64, range: Range<usize>, page: usize) -> Result<usize> {
        const ENTRY: usize = size_of::<u64>();
        let mut pages = 0;
        let (mut at, end) = (range.start / page * ENTRY, range.end / page * ENTRY);
        let mut entries = [0u8; 512 * ENTRY];
        while at < end {
            let wanted = entries.len().min(end - at);
            let into = entries.get_mut(..wanted).unwrap_or_default();
            let read = rustix::io::pread(&self.0, into, at as u64)?;
            if read < ENTRY {
                break;
            }
            let (read, _) = entries.get(..read).unwrap_or_default().as_chunks::<ENTRY>();
            let has = |entry: &&[u8; ENTRY]| u64::from_ne_bytes(**entry) & bits == bits;
            pages += read.iter().filter(has).count();
            at += read.len() * ENTRY;
        }
        Ok(pages * page)
    }
}
