//! How much of a block the program has touched: [`look`].
//!
//! mincore(2) says which pages are there. Of a huge page all are: those that hold nothing but
//! zeroes count as untouched. They are read by process_vm_readv(2), which fails where a plain read
//! would be a fault. One page in each sixteenth of the block is read, at random.
//!
//! A page of zeroes that the program wrote counts as untouched too: the bound holds, and such
//! memory is huge later.
#![expect(unsafe_code, reason = "system calls that take addresses")]

use rustix::io::Errno;

use super::blocks::SIXTEENTHS;
use super::table::PAGE_BYTES;
use crate::sys;

/// The pages of a block that are read.
const SAMPLES: usize = SIXTEENTHS as usize;
/// The most base pages that one call tells about.
const MAX_PAGES: usize = 512;
/// The bytes of a page that are read first.
const GLIMPSE_BYTES: usize = 64;
/// A page is read in such steps: the stack may be a small one.
const STEP_BYTES: usize = 1 << 10;

/// The memory of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touched {
    /// A part of it is not mapped.
    Gone,
    /// No page of it is there.
    Nothing,
    /// So many bytes are there, and so many sixteenths there but empty.
    Some { resident: usize, empty: u8 },
}

/// A number that differs from place to place, and is the same each time: a look that is repeated finds out nothing by luck.
fn random(place: usize) -> usize {
    static SEED: u8 = 0;
    let seed = place.wrapping_add(core::ptr::from_ref(&SEED).addr());
    let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (seed ^ seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ mixed >> 27
}

/// The page that is read in a sixteenth of a block, of `each` bytes, at an address. Its start is read first: that is
/// where a page is written that is written at all, mostly.
fn place_in(sixteenth: usize, each: usize) -> usize {
    sixteenth + random(sixteenth) % (each / PAGE_BYTES).max(1) * PAGE_BYTES
}

/// Looks at the block of `pmd` bytes at an address.
///
/// # Errors
/// Those of mincore(2) and process_vm_readv(2), where they say nothing.
pub(super) fn look(address: usize, pmd: usize) -> Result<Touched, Errno> {
    let each = pmd / SAMPLES;
    let mut places = [0; SAMPLES];
    let mut count = 0;
    let resident = parts(address, pmd, true, |part, there| {
        for sample in (part..part + there.len() * PAGE_BYTES).step_by(each) {
            let sampled = place_in(sample, each);
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
            empty: empty(places)?,
        },
    })
}

/// The bytes of a block that are there; `None`: a part of it is not mapped.
///
/// # Errors
/// Those of mincore(2).
pub(super) fn resident(address: usize, pmd: usize) -> Result<Option<usize>, Errno> {
    parts(address, pmd, false, |_, _| ())
}

/// As [`resident`]; `visit` has the pages of each part of which some are there.
fn parts(
    address: usize,
    pmd: usize,
    may_have_holes: bool,
    mut visit: impl FnMut(usize, &[u8]),
) -> Result<Option<usize>, Errno> {
    let mut resident = 0;
    for part in (address..address + pmd).step_by(MAX_PAGES * PAGE_BYTES) {
        let mut pages = [0u8; MAX_PAGES];
        let length = (MAX_PAGES * PAGE_BYTES).min(address + pmd - part);
        match mincore(part, length, &mut pages) {
            Err(Errno::NOMEM) if may_have_holes => {
                if !sixteenths(part, length, &mut pages)? {
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

/// The pages of a part that has holes: what shares a sixteenth with a hole counts as missing. False: all do.
fn sixteenths(part: usize, length: usize, pages: &mut [u8; MAX_PAGES]) -> Result<bool, Errno> {
    *pages = [0; MAX_PAGES];
    let each = (length / SAMPLES).max(PAGE_BYTES);
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

/// How many of the pages at some places hold nothing but zeroes. At first a glimpse of each is read.
fn empty(places: &[usize]) -> Result<u8, Errno> {
    let mut empty = 0;
    let mut first = 0;
    while first < places.len() {
        let mut glimpses = [[0usize; GLIMPSE_BYTES / size_of::<usize>()]; SAMPLES];
        let rest = places.get(first..).unwrap_or_default();
        let read = match sys::copy_scattered(rest, &mut glimpses) {
            Ok(read) => read,
            Err(Errno::FAULT) => 0,
            Err(error) => return Err(error),
        };
        for (place, glimpse) in rest.iter().zip(glimpses).take(read) {
            let is_zero = glimpse.iter().all(|word| *word == 0);
            empty += u8::from(is_zero && is_page_zero(*place)?);
        }
        // A page that is protected was touched before.
        first += read + 1;
    }
    Ok(empty)
}

fn mincore(address: usize, length: usize, pages: &mut [u8]) -> Result<(), Errno> {
    let arguments = [
        address,
        length,
        pages.as_mut_ptr().expose_provenance(),
        0,
        0,
        0,
    ];
    // SAFETY: the kernel writes a byte for each page, of which `pages` has as many at least.
    unsafe { sys::request(libc::SYS_mincore, arguments).map(drop) }
}

fn is_page_zero(page: usize) -> Result<bool, Errno> {
    let mut words = [0usize; STEP_BYTES / size_of::<usize>()];
    for at in (page..page + PAGE_BYTES).step_by(STEP_BYTES) {
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
    fn pages_that_were_written_to_are_told_from_pages_that_were_not() {
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
        assert_eq!(look(block, pmd), Ok(Touched::Nothing));
        (0..pmd).step_by(PAGE_BYTES).for_each(|at| write(at, 0));
        let zeroes = Touched::Some {
            resident: pmd,
            empty: 16,
        };
        assert_eq!(look(block, pmd), Ok(zeroes));
        (0..pmd / 2)
            .step_by(PAGE_BYTES)
            .for_each(|at| write(at + 77, 1));
        let half = Touched::Some {
            resident: pmd,
            empty: 8,
        };
        assert_eq!(look(block, pmd), Ok(half));
        // SAFETY: mapped above.
        unsafe { mm::munmap(with_exposed_provenance_mut(block + pmd / 2), pmd / 2) }.unwrap();
        // What is left of a block is looked at.
        let rest = Touched::Some {
            resident: pmd / 2,
            empty: 0,
        };
        assert_eq!(look(block, pmd), Ok(rest));
        // SAFETY: as above.
        unsafe { mm::munmap(start, 2 * pmd) }.unwrap();
        assert_eq!(look(block, pmd), Ok(Touched::Gone));
    }
}
