//! The one leaf of `gather` that frees: [`Kernel`], and the calls that decide what may be freed how.
//!
//! Raw system calls all (rustix's, which neither touch errno nor call a function that could be
//! interposed). Sizes and addresses are bytes, multiples of the page size.
#![expect(unsafe_code, reason = "the leaf that gives memory back")]

use core::ptr::{self, with_exposed_provenance_mut as at};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::io::Result;
use rustix::mm::{self, Advice, MapFlags, MremapFlags, MsyncFlags, ProtFlags};

use super::batch::{Batch, Entry, FreeError, Operation};
use super::handover::Executor;
use super::queue::Piece;
pub(super) use crate::sys::unmap;

/// Carries out what the queue says. The caller of [`Batch::push`] has vouched for each range.
#[derive(Debug)]
pub(super) struct Kernel;

impl Executor for Kernel {
    fn free(&self, piece: &Piece) -> core::result::Result<(), FreeError> {
        let mut refused = Ok(());
        for range in piece.ranges() {
            // SAFETY: pieces are cut from batches that are not done.
            refused = refused.and(unsafe { free(*range) });
        }
        refused
    }

    fn close(&self, batch: Batch) {
        for entry in batch.entries() {
            if entry.operation() == Operation::Unmap {
                // The kernel refuses only what would split a mapping when there are too many, and this
                // is whole mappings.
                // SAFETY: what `Batch::push` was promised.
                let _ = unsafe { unmap(entry.start(), entry.length()) };
            }
        }
    }
}

/// Frees one range, or all of it that the kernel does not refuse.
///
/// # Safety
/// The range is in a batch ([`Batch::push`]) that is not done.
pub(super) unsafe fn free(range: Entry) -> core::result::Result<(), FreeError> {
    let advise = |advice| {
        // SAFETY: what `Batch::push` was promised.
        let answer = unsafe { mm::madvise(at(range.start()), range.length(), advice) };
        answer.map_err(|errno| range.refused(errno))
    };
    match range.operation() {
        Operation::Zap | Operation::Drop => advise(Advice::LinuxDontNeed),
        Operation::Punch { .. } => advise(Advice::LinuxRemove),
        Operation::Unmap => {
            // What cannot be emptied beforehand is freed when it is unmapped.
            let _ = advise(Advice::LinuxDontNeed);
            Ok(())
        }
    }
}

/// Keeps a range out of the children of forks. MADV_DONTFORK, Linux 2.6.16.
///
/// # Safety
/// No child uses the range.
pub(super) unsafe fn keep_from_children(address: usize, length: usize) -> Result<()> {
    // SAFETY: the caller's promise; here what it holds does not change.
    unsafe { mm::madvise(at(address), length, Advice::LinuxDontFork) }
}

/// Sets the word at `place`, which is 0 again in each copy of this memory (fork(2), a bare clone(2)), and stays what it is where
/// the memory is shared. The first call makes it, where the kernel can: MADV_WIPEONFORK, Linux 4.14.
pub(super) fn mark(place: &AtomicPtr<AtomicU32>) {
    if let Some(word) = word(place) {
        return word.store(1, Ordering::Relaxed);
    }
    let page = rustix::param::page_size();
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping, where the kernel likes, replaces none.
    let Ok(new) = (unsafe { mm::mmap_anonymous(ptr::null_mut(), page, prot, flags) }) else {
        return;
    };
    // SAFETY: as above: it is ours alone, and of zeroes.
    let is_wiped = unsafe {
        new.cast::<u32>().write(1);
        mm::madvise(new, page, Advice::LinuxWipeOnFork).is_ok()
    };
    let (success, failure) = (Ordering::Release, Ordering::Relaxed);
    // Another thread may be first: it has set its word then.
    if !is_wiped
        || place
            .compare_exchange(ptr::null_mut(), new.cast(), success, failure)
            .is_err()
    {
        // SAFETY: as above.
        let _ = unsafe { unmap(new.expose_provenance(), page) };
    }
}

/// The word of [`mark`].
pub(super) fn word(place: &AtomicPtr<AtomicU32>) -> Option<&'static AtomicU32> {
    // SAFETY: null, or a page of zeroes that is never unmapped, and shared by atomics alone.
    unsafe { place.load(Ordering::Acquire).as_ref() }
}

/// Whether a range is mapped without a hole (else `ENOMEM`) and no part of it is locked (else `EBUSY`).
/// It costs a look at each mapping, and nothing else: msync(2) with MS_ASYNC has written nothing since
/// Linux 2.6.19, and MS_INVALIDATE only asks for locks.
pub(crate) fn is_whole_and_unlocked(address: usize, length: usize) -> Result<()> {
    let flags = MsyncFlags::ASYNC | MsyncFlags::INVALIDATE;
    // SAFETY: nothing is read or written.
    unsafe { mm::msync(at(address), length, flags) }
}

/// Whether the mapping at `address` may be moved: a sealed one (mseal(2), Linux 6.10) is refused, where Linux is 6.17 or
/// later. mremap(2) to the same size and place.
pub(super) fn may_change(address: usize) -> bool {
    let page = rustix::param::page_size();
    // SAFETY: nothing moves or changes its size.
    unsafe { mm::mremap(at(address), page, page, MremapFlags::empty()) }.is_ok()
}

/// Whether the kernel counts the page at `address` among its own: it refuses (`EINVAL`) what a driver has
/// mapped, and hugetlb pages. MADV_COLD, Linux 5.4; the page is only sooner reclaimed.
pub(super) fn is_ordinary(address: usize, page: usize) -> Result<()> {
    // SAFETY: what the page holds does not change.
    unsafe { mm::madvise(at(address), page, Advice::LinuxCold) }
}
