//! The one leaf of the mechanism that touches memory: staging areas, copying, comparing, and the one call that puts a
//! range in the place of text or data.
//!
//! Everything here is a raw system call or a plain memory access. Sizes and addresses are bytes, multiples of the base page.
#![expect(unsafe_code, reason = "the leaf that maps and moves")]

use core::ffi::c_void;
use core::ops::Range;
use core::ptr::{self, with_exposed_provenance, with_exposed_provenance_mut};

use rustix::fd::AsFd;
use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::density::{self, Policy};
use crate::sys;

fn at(address: usize) -> *mut c_void {
    with_exposed_provenance_mut(address)
}

/// Addresses of our own, as far from a PMD's bounds as those of a range that they stand in for. What is mapped there is
/// unmapped when this goes, but for what was moved away.
#[derive(Debug)]
pub(super) struct Staging {
    whole: Range<usize>,
    range: Range<usize>,
    is_moved: bool,
}

impl Staging {
    /// Takes addresses for the stand-in of `like`.
    pub(super) fn reserve(like: &Range<usize>, pmd: usize) -> Result<Self> {
        let length = like.len() + pmd;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a mapping at an address of the kernel's choice replaces none.
        let start =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), length, ProtFlags::empty(), flags)? };
        let start = start.expose_provenance();
        let first = start + (like.start.wrapping_sub(start) & (pmd - 1));
        Ok(Self {
            whole: start..start + length,
            range: first..first + like.len(),
            is_moved: false,
        })
    }

    /// Where it is.
    pub(super) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Maps fresh private memory there, to be written, and asks for huge pages.
    pub(super) fn map_anonymous(&self) -> Result<()> {
        let (prot, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::FIXED,
        );
        // SAFETY: the addresses are this value's, and nothing uses what is there.
        unsafe {
            mm::mmap_anonymous(at(self.range.start), self.range.len(), prot, flags)?;
        }
        // Where THP is not to be had, a collapse brings them, or nothing does.
        let _ = advise(&self.range);
        Ok(())
    }

    /// Maps `file` there from `offset` on.
    pub(super) fn map_file(
        &self,
        file: impl AsFd,
        offset: u64,
        prot: ProtFlags,
        shared: bool,
    ) -> Result<()> {
        let kind = if shared {
            MapFlags::SHARED
        } else {
            MapFlags::PRIVATE
        };
        // SAFETY: the addresses are this value's, and nothing uses what is there.
        unsafe {
            mm::mmap(
                at(self.range.start),
                self.range.len(),
                prot,
                kind | MapFlags::FIXED,
                file,
                offset,
            )
            .map(drop)
        }
    }

    /// Copies a part of `from` to its place here, `part` counting from the start. EFAULT where it is not mapped any more.
    ///
    /// # Safety
    /// `from` is the range that this stands in for; this is mapped to be written.
    pub(super) unsafe fn copy(&self, from: &Range<usize>, part: Range<usize>) -> Result<()> {
        let (source, to) = (from.start + part.start, self.range.start + part.start);
        // SAFETY: the caller's promise.
        match unsafe { sys::copy_bytes(source, to, part.len())? } {
            copied if copied == part.len() => Ok(()),
            _ => Err(Errno::FAULT),
        }
    }

    /// Whether a part of `other` and of this hold the same. EFAULT where the other is not mapped any more.
    ///
    /// # Safety
    /// `other` is the range that this stands in for; this can be read, and does not change.
    pub(super) unsafe fn equals(&self, other: &Range<usize>, part: Range<usize>) -> Result<bool> {
        const WORDS: usize = 2048;
        const STEP: usize = WORDS * size_of::<usize>();
        let mut words = [0usize; WORDS];
        for offset in part.clone().step_by(STEP) {
            let length = (part.end - offset).min(STEP) / size_of::<usize>();
            let there = words.get_mut(..length).unwrap_or_default();
            if sys::copy_words(other.start + offset, there)? != length {
                return Err(Errno::FAULT);
            }
            let here = with_exposed_provenance::<usize>(self.range.start + offset);
            // SAFETY: the caller's promise. Base pages are whole words.
            let here = unsafe { core::slice::from_raw_parts(here, length) };
            // All of it, so that the compiler can take vectors.
            let pairs = here.iter().zip(there.iter());
            if pairs.fold(0, |found, (here, there)| found | here ^ there) != 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Puts what is here in the place of `range`, by one mremap(2): at each moment a thread finds there either what was
    /// or what is. Where the kernel cannot, all stays as it was.
    ///
    /// # Safety
    /// `range` is the one that this stands in for, and both hold the same.
    pub(super) unsafe fn take_place_of(mut self, range: &Range<usize>) -> Result<()> {
        let (from, length) = (self.range.start, self.range.len());
        // SAFETY: the caller's promise.
        let moved = replace(range, || unsafe {
            sys::move_mapping(from, range.start, length)
        });
        self.is_moved = moved.is_ok();
        moved
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let parts = if self.is_moved {
            // Another thread may have mapped something into the gap.
            [
                self.whole.start..self.range.start,
                self.range.end..self.whole.end,
            ]
        } else {
            [self.whole.clone(), 0..0]
        };
        for part in parts.into_iter().filter(|part| !part.is_empty()) {
            // SAFETY: the addresses are this value's.
            let _ = unsafe { sys::unmap(part.start, part.len()) };
        }
    }
}

/// Makes a call that replaces what is mapped at `range`. The kernel takes away what was there before it maps what is to be
/// there, and can lack memory for its own records in between: then only another call helps.
fn replace(range: &Range<usize>, call: impl Fn() -> Result<()>) -> Result<()> {
    let answer = call();
    match answer.is_ok() || sys::is_mapped(range.start) {
        true => answer,
        false => sys::insist(call),
    }
}

/// Maps `file` from `offset` on over `range`, private, to be read and executed, by one mmap(2): at each moment a thread
/// finds there either what was or what is.
///
/// # Safety
/// The file holds what the range holds.
pub(super) unsafe fn map_over(range: &Range<usize>, file: impl AsFd, offset: u64) -> Result<()> {
    let (prot, flags) = (
        ProtFlags::READ | ProtFlags::EXEC,
        MapFlags::PRIVATE | MapFlags::FIXED,
    );
    // SAFETY: the caller's promise.
    replace(range, || unsafe {
        mm::mmap(at(range.start), range.len(), prot, flags, &file, offset).map(drop)
    })
}

/// Words as the bytes that they are.
pub(super) fn bytes(words: &[usize]) -> &[u8] {
    // SAFETY: each byte of a word is a byte, and they are borrowed for as long.
    unsafe { core::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

/// Asks for huge pages where `range` is mapped.
pub(super) fn advise(range: &Range<usize>) -> Result<()> {
    density::advise(range, Policy::Segment)
}

/// The same for memory that may stay sparse: bss.
pub(super) fn advise_sparse(range: &Range<usize>) -> Result<()> {
    density::advise(range, Policy::Mapping)
}

/// Reads a word of each `step` of a range, where it is mapped, so that it is mapped by what the page cache has.
pub(super) fn touch(range: &Range<usize>, step: usize) {
    for address in range.clone().step_by(step) {
        let _ = sys::copy_words(address, &mut [0]);
    }
}

/// Brings in a page of each `step` of a staging area that is mapped to be written, the last one, as
/// [`populate`](crate::pool::populate) does. By advice, which fails where there is no memory and a touch would kill.
/// MADV_POPULATE_WRITE, Linux 5.14.
pub(super) fn bring_in(staging: &Staging, part: Range<usize>, step: usize) -> Result<()> {
    let page = rustix::param::page_size();
    for offset in part.clone().step_by(step) {
        let last = at(staging.range.start + (offset + step).min(part.end) - page);
        // SAFETY: the addresses are the area's, and populating changes no byte that any thread can read.
        unsafe { mm::madvise(last, page, Advice::LinuxPopulateWrite)? };
    }
    Ok(())
}
