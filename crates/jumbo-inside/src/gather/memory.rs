//! System calls that free memory: [`Kernel`], and the checks before.
//!
//! All are raw calls of rustix, which neither set errno nor call a function that can be interposed.
//! Sizes and addresses are bytes, multiples of the page size.
#![expect(unsafe_code, reason = "the leaf that frees memory")]

use core::ptr::{self, with_exposed_provenance_mut as at};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::io::Result;
use rustix::mm::{self, MapFlags, MremapFlags, MsyncFlags, ProtFlags};

use super::batch::{Batch, FreeError, FreeRange, Operation};
use super::handover::Executor;
use super::queue::Piece;
pub(super) use jumbo_sys::unmap;
use jumbo_sys::{self as sys, map_own};

/// Performs the actions of the queue. The caller of [`Batch::push`] has vouched for each range.
#[derive(Debug)]
pub(super) struct Kernel;

impl Executor for Kernel {
    fn free(&self, piece: &Piece) -> core::result::Result<(), FreeError> {
        let mut refused = Ok(());
        for range in piece.ranges() {
            // SAFETY: a piece belongs to a batch that is not done.
            refused = refused.and(unsafe { free(*range) });
        }
        refused
    }

    fn close(&self, batch: Batch) {
        for entry in batch.entries() {
            if entry.operation() == Operation::Unmap {
                // The kernel refuses only to split mappings beyond its limit; these are whole.
                // SAFETY: the promise of [`Batch::push`].
                let _ = unsafe { unmap(entry.start(), entry.length()) };
            }
        }
    }
}

/// Frees a range, as far as the kernel allows.
///
/// # Safety
/// The range is in a batch ([`Batch::push`]) that is not done.
pub(super) unsafe fn free(range: FreeRange) -> core::result::Result<(), FreeError> {
    // SAFETY: the promise of [`Batch::push`].
    let advise = |advice| unsafe { sys::advise(range.start(), range.length(), advice) };
    let answer = match range.operation() {
        // SAFETY: as above.
        Operation::Zap => unsafe { sys::discard(range.start(), range.length()) },
        Operation::Drop => advise(libc::MADV_DONTNEED),
        Operation::Punch { .. } => advise(libc::MADV_REMOVE),
        Operation::Unmap => {
            // munmap(2) frees what this call cannot.
            let _ = advise(libc::MADV_DONTNEED);
            Ok(())
        }
    };
    answer.map_err(|errno| range.error(errno))
}

/// Excludes a range from forked children. MADV_DONTFORK, Linux 2.6.16.
///
/// # Safety
/// No child uses the range.
pub(super) unsafe fn keep_from_children(address: usize, length: usize) -> Result<()> {
    // SAFETY: the caller's promise; the content does not change.
    unsafe { sys::advise(address, length, libc::MADV_DONTFORK) }
}

/// Sets the word at `place`. The kernel clears it in each copy of this memory (fork(2), a bare
/// clone(2)), but not where the memory is shared. The first call maps it, on kernels with
/// MADV_WIPEONFORK (Linux 4.14).
pub(super) fn mark(place: &AtomicPtr<AtomicU32>) {
    if let Some(word) = word(place) {
        return word.store(1, Ordering::Relaxed);
    }
    let page = rustix::param::page_size();
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let Ok(new) = map_own(page, prot, flags) else {
        return;
    };
    // SAFETY: as above: the page is unused and zeroed.
    let is_wiped = unsafe {
        new.cast::<u32>().write(1);
        sys::advise(new.expose_provenance(), page, libc::MADV_WIPEONFORK).is_ok()
    };
    let (success, failure) = (Ordering::Release, Ordering::Relaxed);
    // Another thread may have been first, and has set its word.
    if !is_wiped
        || place
            .compare_exchange(ptr::null_mut(), new.cast(), success, failure)
            .is_err()
    {
        // SAFETY: as above.
        let _ = unsafe { unmap(new.expose_provenance(), page) };
    }
}

/// Returns the word of [`mark`].
pub(super) fn word(place: &AtomicPtr<AtomicU32>) -> Option<&'static AtomicU32> {
    // SAFETY: null, or a zeroed page that is never unmapped and only used by atomics.
    unsafe { place.load(Ordering::Acquire).as_ref() }
}

/// Checks that a range is mapped without a hole (`ENOMEM`) and not locked (`EBUSY`). msync(2) with
/// MS_ASYNC writes nothing since Linux 2.6.19, and MS_INVALIDATE only checks for locks.
pub(crate) fn is_whole_and_unlocked(address: usize, length: usize) -> Result<()> {
    let flags = MsyncFlags::ASYNC | MsyncFlags::INVALIDATE;
    // SAFETY: no memory is read or written.
    unsafe { mm::msync(at(address), length, flags) }
}

/// Reports whether the mapping at `address` may be moved: Linux 6.17 refuses a sealed one
/// (mseal(2), Linux 6.10). mremap(2) to the same size and place.
pub(super) fn may_change(address: usize) -> bool {
    let page = rustix::param::page_size();
    // SAFETY: neither place nor size changes.
    unsafe { mm::mremap(at(address), page, page, MremapFlags::empty()) }.is_ok()
}

/// Checks that the page at `address` belongs neither to a driver nor to hugetlb (`EINVAL`).
/// MADV_COLD, Linux 5.4; the page is only reclaimed sooner.
pub(super) fn is_ordinary(address: usize, page: usize) -> Result<()> {
    // SAFETY: the content of the page does not change.
    unsafe { sys::advise(address, page, libc::MADV_COLD) }
}
