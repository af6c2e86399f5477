//! How pages are mapped: the PAGEMAP_SCAN request.

use core::ops::Range;

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Result;
use rustix::ioctl::{Opcode, opcode};

use super::control;

/// What PAGEMAP_SCAN takes (`struct pm_scan_arg`, linux/fs.h).
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
    /// The same, of a range.
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
const PAGEMAP_SCAN: Opcode = opcode::read_write::<Scan>(b'f', 16);

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// Bits of an entry of the file itself: no other process has the page mapped (Linux 4.2); it is there.
const EXCLUSIVE: u64 = 1 << 56;
const PRESENT: u64 = 1 << 63;

/// Which pages of a range are counted ([`Pagemap::count`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Those that this process has mapped.
    Present,
    /// Those of them that take memory: all but the zero page.
    Resident,
    /// Those mapped by a PMD or more.
    Huge,
    /// Those that are no file's any more, because they were written to: in memory or in swap.
    Changed,
}

/// A page that [`Pagemap::walk`] finds: in memory, or in swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// It is in memory.
    pub present: bool,
    /// It is mapped by a PMD or more.
    pub huge: bool,
}

/// /proc/self/pagemap, or that of another process, open for as long as this lives.
#[derive(Debug)]
pub struct Pagemap(OwnedFd);

impl Pagemap {
    /// Opens it.
    ///
    /// # Errors
    /// Those of open(2): no /proc, no descriptor to be had, or not allowed to a process that is not dumpable.
    pub fn open() -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
        rustix::fs::open(c"/proc/self/pagemap", flags, Mode::empty()).map(Self)
    }

    /// That of another process: `file` is its /proc/PID/pagemap.
    pub fn of(file: OwnedFd) -> Self {
        Self(file)
    }

    /// Calls `visit` with each run of pages that are in memory or in swap; the zero page is neither.
    ///
    /// # References
    /// Documentation/admin-guide/mm/pagemap.rst; Linux 6.7.
    ///
    /// # Errors
    /// ENOTTY: a kernel without it.
    pub fn walk(
        &self,
        range: Range<usize>,
        mut visit: impl FnMut(Range<usize>, Found),
    ) -> Result<()> {
        let what = Scan {
            category_inverted: PAGE_IS_PFNZERO,
            category_mask: PAGE_IS_PFNZERO,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_HUGE,
            ..Scan::default()
        };
        self.each::<64>(range, what, |[start, end, categories]| {
            let word = |word: u64| usize::try_from(word).unwrap_or(usize::MAX);
            let found = Found {
                present: categories & PAGE_IS_PRESENT != 0,
                huge: categories & PAGE_IS_HUGE != 0,
            };
            visit(word(start)..word(end), found);
        })
    }

    /// Calls `visit` with each region of a range that is what is asked for: its start, its end and what its pages are. `REGIONS`
    /// at a time.
    fn each<const REGIONS: usize>(
        &self,
        range: Range<usize>,
        what: Scan,
        mut visit: impl FnMut([u64; 3]),
    ) -> Result<()> {
        let mut found = [[0; 3]; REGIONS];
        let mut scan = what.of(range);
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

    /// PAGEMAP_SCAN: gives the number of regions that were found.
    fn scan(&self, scan: &mut Scan, found: &mut [[u64; 3]]) -> Result<usize> {
        scan.vec = found.as_mut_ptr().expose_provenance() as u64;
        scan.vec_len = found.len() as u64;
        #[expect(unsafe_code, reason = "an ioctl that rustix lacks")]
        // SAFETY: the request reads and writes a `struct pm_scan_arg`, which `Scan` is. `vec` has room for as many
        // regions as `vec_len` says, until the call is over. Without PM_SCAN_WP_MATCHING no page is changed.
        unsafe {
            control(&self.0, PAGEMAP_SCAN, scan)
        }
    }

    /// True where the page at `address` is there, mapped as a base page, and, if it is to be, `anonymous`.
    ///
    /// # References
    /// Documentation/admin-guide/mm/pagemap.rst; Linux 6.7.
    ///
    /// # Errors
    /// ENOTTY: a kernel without it.
    pub fn is_base(&self, address: usize, page: usize, anonymous: bool) -> Result<bool> {
        let never = PAGE_IS_HUGE | if anonymous { PAGE_IS_FILE } else { 0 };
        let what = Scan {
            category_inverted: never,
            category_mask: PAGE_IS_PRESENT | never,
            return_mask: PAGE_IS_PRESENT,
            ..Scan::default()
        };
        let regions = self.scan(&mut what.of(address..address + page), &mut [[0; 3]]);
        regions.map(|regions| regions > 0)
    }

    /// How many bytes of a range are such pages.
    ///
    /// # References
    /// Documentation/admin-guide/mm/pagemap.rst; Linux 6.7.
    ///
    /// # Errors
    /// ENOTTY: a kernel without it.
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
        let what = Scan {
            category_inverted: inverted,
            category_mask: mask,
            category_anyof_mask: any,
            return_mask: PAGE_IS_PRESENT,
            ..Scan::default()
        };
        let mut bytes = 0;
        self.each::<32>(range, what, |[start, end, _]| bytes += end - start)?;
        Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// The address of the first page of a range that is there.
    ///
    /// # References
    /// Documentation/admin-guide/mm/pagemap.rst; Linux 6.7.
    ///
    /// # Errors
    /// ENOTTY: a kernel without it.
    pub fn next_present(&self, range: Range<usize>) -> Result<Option<usize>> {
        let what = Scan {
            category_mask: PAGE_IS_PRESENT,
            return_mask: PAGE_IS_PRESENT,
            ..Scan::default()
        };
        let mut found = [[0; 3]];
        let regions = self.scan(&mut what.of(range.clone()), &mut found)?;
        let [[start, ..]] = found;
        Ok((regions > 0).then(|| usize::try_from(start).unwrap_or(range.end)))
    }

    /// How many bytes of a range are in pages that no other process has mapped; the zero page is none. `page` is the base page's
    /// size.
    ///
    /// # References
    /// Documentation/admin-guide/mm/pagemap.rst; Linux 4.2.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn exclusive(&self, range: Range<usize>, page: usize) -> Result<usize> {
        self.having(PRESENT | EXCLUSIVE, range, page)
    }

    /// How many bytes of a range are in memory, the zero page among them.
    ///
    /// # Errors
    /// As [`Pagemap::exclusive`].
    pub fn present(&self, range: Range<usize>, page: usize) -> Result<usize> {
        self.having(PRESENT, range, page)
    }

    /// How many bytes of a range have an entry with all `bits`.
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
