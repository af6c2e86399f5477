//! Measures how much of a block the program has touched: [`measure`].
//!
//! mincore(2) reports the resident pages. A huge page is resident as a whole: its pages of zeroes
//! count as untouched. process_vm_readv(2) reads them, because it returns an error where a plain
//! read would fault. It reads one random page per sixteenth of the block.
//!
//! A page of zeroes that the program wrote counts as untouched, too: the bound holds, and such
//! memory becomes huge later.
#![expect(unsafe_code, reason = "system calls that take addresses")]

use core::ops::Range;

use rustix::io::Errno;

use super::blocks::SIXTEENTHS;
use super::table::PAGE_BYTES;
use jumbo_sys as sys;

const SAMPLE_PAGES: usize = SIXTEENTHS as usize;
/// Maximum base pages per call of mincore(2).
const MAX_CALL_PAGES: usize = 512;
/// Words at the start of a page that are read first, and words of a page.
const PREFIX_WORDS: usize = 64 / size_of::<usize>();
const PAGE_WORDS: usize = PAGE_BYTES / size_of::<usize>();
/// Pages that a system call reads whole, and buffer size of [`is_page_zero`]; the stack may be small.
const READ_PAGES: usize = 2;
const BUFFER_BYTES: usize = 1 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touched {
    /// Partly unmapped.
    Gone,
    /// Without a resident page.
    Nothing,
    /// Resident bytes, and resident sixteenths that hold only zeroes.
    Some { resident: usize, empty: u8 },
}

/// Hashes an address or a number: a repeated measurement must read the same pages.
pub(crate) fn hash(address: usize) -> usize {
    static SEED: u8 = 0;
    let seed = address.wrapping_add(core::ptr::from_ref(&SEED).addr());
    let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (seed ^ seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ mixed >> 27
}

/// Returns the page to read in the sixteenth of `each` bytes at an address. The start of a page is
/// read first, because a used page is mostly written there.
fn sample_page(sixteenth: usize, each: usize) -> usize {
    sixteenth + hash(sixteenth) % (each / PAGE_BYTES).max(1) * PAGE_BYTES
}

/// Measures the block of `pmd` bytes at an address.
///
/// # Errors
/// Errors of mincore(2) and process_vm_readv(2) that leave the result open.
pub(super) fn measure(address: usize, pmd: usize) -> Result<Touched, Errno> {
    let each = pmd / SAMPLE_PAGES;
    let mut places = [0; SAMPLE_PAGES];
    let mut count = 0;
    let resident = read_parts(address, pmd, true, |part, there| {
        for sample in (part..part + there.len() * PAGE_BYTES).step_by(each) {
            let sampled = sample_page(sample, each);
            let is_there = there.get((sampled - part) / PAGE_BYTES);
            if is_there.is_some_and(|page| page & 1 != 0)
                && let Some(place) = places.get_mut(count)
            {
                *place = sampled;
                count += 1;
            }
        }
    })?;
    let places = places.get(..count).unwrap_or_default();
    Ok(match resident {
        None => Touched::Gone,
        Some(0) => Touched::Nothing,
        Some(resident) => Touched::Some {
            resident,
            empty: count_empty(places)?,
        },
    })
}

/// Maximum size of a range that [`is_resident`] reads as a whole, and the number and size of the parts
/// that it reads of a larger one.
const MAX_WHOLE_PAGES: usize = 2048;
const PARTS: usize = 32;
const PART_PAGES: usize = 64;
/// One page of so many may be missing.
const PAGES_PER_MISSING: usize = 32;
/// Number of pages whose content is read.
const CONTENT_PAGES: usize = 4;

/// Reports whether nearly all pages of a mapped range are resident, by a sample of a large range.
/// `random` selects the sample.
pub(crate) fn is_resident(range: &Range<usize>, random: usize) -> bool {
    let is_whole = range.len() <= MAX_WHOLE_PAGES * PAGE_BYTES;
    let (part_bytes, step) = match is_whole {
        true => (MAX_CALL_PAGES * PAGE_BYTES, MAX_CALL_PAGES * PAGE_BYTES),
        false => (
            PART_PAGES * PAGE_BYTES,
            (range.len() / PARTS).next_multiple_of(PAGE_BYTES),
        ),
    };
    let (mut read, mut missing) = (0, 0);
    for start in range.clone().step_by(step) {
        let mut pages = [0u8; MAX_CALL_PAGES];
        let offset = random % ((step - part_bytes) / PAGE_BYTES + 1) * PAGE_BYTES;
        let part = (start + offset).min(range.end - PAGE_BYTES);
        let length = part_bytes.min(range.end - part);
        if mincore(part, length, &mut pages).is_err() {
            return false;
        }
        let pages = pages.get(..length / PAGE_BYTES).unwrap_or_default();
        read += pages.len();
        missing += pages.iter().filter(|page| **page & 1 == 0).count();
    }
    missing * PAGES_PER_MISSING <= read.max(PAGES_PER_MISSING)
}

/// Reports whether a range is [resident](is_resident) and holds more than zeroes, by a sample: the
/// page of zeroes that the kernel maps for reads counts as resident.
pub(crate) fn is_filled(range: &Range<usize>, random: usize) -> bool {
    if !is_resident(range, random) {
        return false;
    }
    let quarter = (range.len() / CONTENT_PAGES).next_multiple_of(PAGE_BYTES);
    let places: [usize; CONTENT_PAGES] = core::array::from_fn(|at| {
        let page = (random >> 16) % (quarter / PAGE_BYTES) * PAGE_BYTES;
        (range.start + at * quarter + page).min(range.end - PAGE_BYTES)
    });
    // A page of zeroes may be the program's.
    count_empty(&places).is_ok_and(|empty| usize::from(empty) * 2 < CONTENT_PAGES)
}

/// Returns the resident bytes of a block; `None`: partly unmapped.
///
/// # Errors
/// Errors of mincore(2).
pub(super) fn resident(address: usize, pmd: usize) -> Result<Option<usize>, Errno> {
    read_parts(address, pmd, false, |_, _| ())
}

/// Reads the residency of a block; calls `visit` for each part with resident pages.
fn read_parts(
    address: usize,
    pmd: usize,
    may_have_holes: bool,
    mut visit: impl FnMut(usize, &[u8]),
) -> Result<Option<usize>, Errno> {
    let mut resident = 0;
    for part in (address..address + pmd).step_by(MAX_CALL_PAGES * PAGE_BYTES) {
        let mut pages = [0u8; MAX_CALL_PAGES];
        let length = (MAX_CALL_PAGES * PAGE_BYTES).min(address + pmd - part);
        match mincore(part, length, &mut pages) {
            Err(Errno::NOMEM) if may_have_holes => {
                if !read_sixteenths(part, length, &mut pages)? {
                    return Ok(None);
                }
            }
            Err(Errno::NOMEM) => return Ok(None),
            answer => answer?,
        }
        let pages = pages.get(..length / PAGE_BYTES).unwrap_or_default();
        let there = pages.iter().filter(|page| **page & 1 != 0).count();
        resident += there * PAGE_BYTES;
        if there > 0 {
            visit(part, pages);
        }
    }
    Ok(Some(resident))
}

/// Reads the pages of a part with holes: the pages of a sixteenth with a hole count as missing.
/// Returns false if all sixteenths have holes.
fn read_sixteenths(
    part: usize,
    length: usize,
    pages: &mut [u8; MAX_CALL_PAGES],
) -> Result<bool, Errno> {
    *pages = [0; MAX_CALL_PAGES];
    let each = (length / SAMPLE_PAGES).max(PAGE_BYTES);
    let mut is_any = false;
    for (at, some) in (part..part + length)
        .step_by(each)
        .zip(pages.chunks_mut(each / PAGE_BYTES))
    {
        match mincore(at, each, some) {
            Err(Errno::NOMEM) => some.fill(0),
            answer => {
                answer?;
                is_any = true;
            }
        }
    }
    Ok(is_any)
}

/// Counts the pages that hold only zeroes; it reads the starts of all of them first.
fn count_empty(places: &[usize]) -> Result<u8, Errno> {
    let mut empty = [0; SAMPLE_PAGES];
    let count = zero_pages::<PREFIX_WORDS, SAMPLE_PAGES>(places, &mut empty)?;
    let count = zero_pages::<PAGE_WORDS, READ_PAGES>(
        empty.get(..count).unwrap_or_default(),
        &mut [0; SAMPLE_PAGES],
    )?;
    Ok(u8::try_from(count).unwrap_or(u8::MAX))
}

/// Finds the pages whose first `WORDS` words are zero: writes them to `zero`, and returns their
/// number. A system call reads `MAX` of them.
fn zero_pages<const WORDS: usize, const MAX: usize>(
    mut pages: &[usize],
    zero: &mut [usize; SAMPLE_PAGES],
) -> Result<usize, Errno> {
    let mut count = 0;
    while !pages.is_empty() {
        let some = pages.get(..MAX).unwrap_or(pages);
        let mut content = [[0usize; WORDS]; MAX];
        let read = match sys::copy_scattered(some, &mut content) {
            Ok(read) => read,
            Err(Errno::FAULT) => 0,
            Err(error) => return Err(error),
        };
        for (page, words) in some.iter().zip(&content).take(read) {
            if words.iter().all(|word| *word == 0)
                && let Some(next) = zero.get_mut(count)
            {
                *next = *page;
                count += 1;
            }
        }
        // A protected page was touched before.
        let seen = some.len().min(read + 1);
        pages = pages.get(seen..).unwrap_or_default();
    }
    Ok(count)
}

pub(super) fn mincore(address: usize, length: usize, pages: &mut [u8]) -> Result<(), Errno> {
    let arguments = [
        address,
        length,
        pages.as_mut_ptr().expose_provenance(),
        0,
        0,
        0,
    ];
    // SAFETY: the kernel writes a byte per page; `pages` has at least as many.
    unsafe { sys::request(libc::SYS_mincore, arguments).map(drop) }
}

pub(super) fn is_page_zero(page: usize) -> Result<bool, Errno> {
    let mut words = [0usize; BUFFER_BYTES / size_of::<usize>()];
    for at in (page..page + PAGE_BYTES).step_by(BUFFER_BYTES) {
        match sys::copy_words(at, &mut words) {
            Ok(_) if words.iter().any(|word| *word != 0) => return Ok(false),
            Ok(_) => {}
            Err(Errno::FAULT) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use core::ptr::{null_mut, with_exposed_provenance_mut};

    use rustix::mm::{self, MapFlags, ProtFlags};

    use super::*;

    #[test]
    fn written_pages_differ_from_unwritten_ones() {
        let pmd = 2 << 20;
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a mapping at an address of the kernel's choice replaces none.
        let start = unsafe { mm::mmap_anonymous(null_mut(), 2 * pmd, prot, flags) }.unwrap();
        let block = start.expose_provenance().next_multiple_of(pmd);
        let write = |offset: usize, value: u8| {
            let at = with_exposed_provenance_mut::<u8>(block + offset);
            // SAFETY: within the mapping.
            unsafe { at.write(value) };
        };
        assert_eq!(measure(block, pmd), Ok(Touched::Nothing));
        assert!(!is_filled(&(block..block + pmd), 7));
        (0..pmd).step_by(PAGE_BYTES).for_each(|at| write(at, 0));
        let zeroes = Touched::Some {
            resident: pmd,
            empty: 16,
        };
        assert_eq!(measure(block, pmd), Ok(zeroes));
        assert!(!is_filled(&(block..block + pmd), 7), "zeroes");
        (0..pmd)
            .step_by(PAGE_BYTES)
            .for_each(|at| write(at + 99, 1));
        assert!(is_filled(&(block..block + pmd), 7));
        assert!(!is_filled(&(block..block + pmd + pmd / 8), 7));
        (0..pmd)
            .step_by(PAGE_BYTES)
            .for_each(|at| write(at + 99, 0));
        (0..pmd / 2)
            .step_by(PAGE_BYTES)
            .for_each(|at| write(at + 77, 1));
        let half = Touched::Some {
            resident: pmd,
            empty: 8,
        };
        assert_eq!(measure(block, pmd), Ok(half));
        // SAFETY: mapped above.
        unsafe { mm::munmap(with_exposed_provenance_mut(block + pmd / 2), pmd / 2) }.unwrap();
        // The rest of a cut block is measured.
        let rest = Touched::Some {
            resident: pmd / 2,
            empty: 0,
        };
        assert_eq!(measure(block, pmd), Ok(rest));
        // SAFETY: as above.
        unsafe { mm::munmap(start, 2 * pmd) }.unwrap();
        assert_eq!(measure(block, pmd), Ok(Touched::Gone));
    }
}
