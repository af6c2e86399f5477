//! The leaf that accesses memory: staging areas, copies, comparisons, and the one call that
//! replaces a range of text or data.
//!
//! All functions make raw system calls or plain accesses. Sizes and addresses are bytes, multiples
//! of the base page.
#![expect(unsafe_code, reason = "the leaf that maps and moves")]

use core::ffi::c_void;
use core::ops::Range;
use core::ptr::{self, with_exposed_provenance, with_exposed_provenance_mut};

use rustix::fd::AsFd;
use rustix::io::{Errno, Result};
use rustix::mm::{self, MapFlags, ProtFlags};

use crate::density::{self, Policy};
use jumbo_sys as sys;

fn at(address: usize) -> *mut c_void {
    with_exposed_provenance_mut(address)
}

/// Reserved addresses, congruent to a target range modulo the PMD size. Drop unmaps them, except
/// for a mapping that was moved away.
#[derive(Debug)]
pub(super) struct StagingArea {
    whole: Range<usize>,
    range: Range<usize>,
    is_moved: bool,
}

impl StagingArea {
    /// Reserves addresses for the target range `like`.
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

    pub(super) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Maps private writable memory there, and advises huge pages.
    pub(super) fn map_anonymous(&self) -> Result<()> {
        let (prot, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::FIXED,
        );
        // SAFETY: the addresses are this value's, and no code uses their content.
        unsafe {
            mm::mmap_anonymous(at(self.range.start), self.range.len(), prot, flags)?;
        }
        // A failure leaves base pages.
        let _ = advise(&self.range);
        Ok(())
    }

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
        // SAFETY: the addresses are this value's, and no code uses their content.
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

    /// Copies a part of `from`, by offsets from its start. EFAULT if it is not mapped any more.
    ///
    /// # Safety
    /// `from` is the target range; this area is mapped writable.
    pub(super) unsafe fn copy(&self, from: &Range<usize>, part: Range<usize>) -> Result<()> {
        let (source, target) = (from.start + part.start, self.range.start + part.start);
        // SAFETY: the caller's promise.
        match unsafe { sys::copy_bytes(source, target, part.len())? } {
            copied if copied == part.len() => Ok(()),
            _ => Err(Errno::FAULT),
        }
    }

    /// Reports whether a part of `other` and of this area are equal. EFAULT if `other` is not
    /// mapped any more.
    ///
    /// # Safety
    /// `other` is the target range; this area is readable and does not change.
    pub(super) unsafe fn equals(&self, other: &Range<usize>, part: Range<usize>) -> Result<bool> {
        const WORDS: usize = 2048;
        const STEP: usize = WORDS * size_of::<usize>();
        let mut words = [0usize; WORDS];
        for offset in part.clone().step_by(STEP) {
            let length = (part.end - offset).min(STEP) / size_of::<usize>();
            let theirs = words.get_mut(..length).unwrap_or_default();
            if sys::copy_words(other.start + offset, theirs)? != length {
                return Err(Errno::FAULT);
            }
            let ours = with_exposed_provenance::<usize>(self.range.start + offset);
            // SAFETY: the caller's promise. Base pages are whole words.
            let ours = unsafe { core::slice::from_raw_parts(ours, length) };
            // No early exit, so that the compiler can vectorize.
            let pairs = ours.iter().zip(theirs.iter());
            if pairs.fold(0, |found, (one, other)| found | one ^ other) != 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Moves this area's mapping over `range` by one mremap(2): a thread finds either the old
    /// mapping or the new one. On failure nothing changes.
    ///
    /// # Safety
    /// `range` is the target range, and both hold the same bytes.
    pub(super) unsafe fn move_over(mut self, range: &Range<usize>) -> Result<()> {
        let (from, length) = (self.range.start, self.range.len());
        // SAFETY: the caller's promise.
        let moved = replace(range, || unsafe {
            sys::move_mapping(from, range.start, length)
        });
        self.is_moved = moved.is_ok();
        moved
    }
}

impl Drop for StagingArea {
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

/// Makes a call that replaces the mapping at `range`. The kernel unmaps the old mapping first, and
/// can lack memory for the new one: then the call is repeated ([`sys::insist`]).
fn replace(range: &Range<usize>, call: impl Fn() -> Result<()>) -> Result<()> {
    let result = call();
    match result.is_ok() || sys::is_mapped(range.start) {
        true => result,
        false => sys::insist(call),
    }
}

/// Maps `file` at `offset` over `range`, private, readable and executable, by one mmap(2): a thread
/// finds either the old mapping or the new one.
///
/// # Safety
/// The file and the range hold the same bytes.
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

pub(super) fn bytes(words: &[usize]) -> &[u8] {
    // SAFETY: a word has no padding, and the borrow is the same.
    unsafe { core::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

pub(super) fn advise(range: &Range<usize>) -> Result<()> {
    density::advise(range, Policy::Segment)
}

/// Advises huge pages for memory that may stay sparse: bss.
pub(super) fn advise_sparse(range: &Range<usize>) -> Result<()> {
    density::advise(range, Policy::Mapping)
}

/// Reads a word of each `step` bytes of a range, so that the page cache maps its folios there.
pub(super) fn touch(range: &Range<usize>, step: usize) {
    for address in range.clone().step_by(step) {
        let _ = sys::copy_words(address, &mut [0]);
    }
}

/// Populates the last page of each `step` bytes in a writable staging area, as
/// [`populate`](crate::pool::populate) does. MADV_POPULATE_WRITE (Linux 5.14) fails without memory,
/// where a touch would trigger the OOM killer.
pub(super) fn populate_each(staging: &StagingArea, part: Range<usize>, step: usize) -> Result<()> {
    let page = rustix::param::page_size();
    for offset in part.clone().step_by(step) {
        let last = staging.range.start + (offset + step).min(part.end) - page;
        // SAFETY: the addresses are the area's, and populating changes no byte.
        unsafe { sys::advise(last, page, libc::MADV_POPULATE_WRITE)? };
    }
    Ok(())
}
