//! The huge page that the kernel has ready for the next collapse: [`prepare_huge_page`].
//!
//! MADV_COLLAPSE copies under the write lock of the address space: no other thread can map memory or
//! take a page fault meanwhile. A virtual machine may have to ask its host for the memory of a free
//! huge page (free page reporting, Linux 5.7): then the copy takes 5 to 8 ms, otherwise 0.5 ms. So a
//! huge page is touched and freed right before. The kernel allocates what this CPU freed last (its
//! lists hold huge pages since Linux 5.14; mm/page_alloc.c).
#![expect(unsafe_code, reason = "writes to memory of its own")]

use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Result;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use super::{map_at, unmap};

/// Address of the page. The kernel chooses none there by itself, so no mapping of the program comes
/// and goes at this place.
const ADDRESS: usize = 0x2f78_0000_0000;

/// Makes the kernel allocate and free a huge page of `bytes` on this CPU; false without effect: where
/// a resource limit of the program would count it, or before Linux 6.4, where a page fault holds the
/// lock of the address space.
pub fn prepare_huge_page(bytes: usize) -> bool {
    let is_limited = |resource| getrlimit(resource).current.is_some();
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::NORESERVE);
    if !has_vma_locks()
        || [Resource::As, Resource::Data].into_iter().any(is_limited)
        || map_at(ADDRESS, bytes, access, flags).is_err()
    {
        return false;
    }
    let touched = touch(bytes);
    // SAFETY: mapped above; no other code knows it.
    let _ = unsafe { unmap(ADDRESS, bytes) };
    touched.is_ok()
}

/// Touches the new mapping. Its first page fault takes the lock of the address space, for an
/// anon_vma: so that one is of a base page.
fn touch(bytes: usize) -> Result<()> {
    let at = with_exposed_provenance_mut::<u8>(ADDRESS);
    let advise = |advice| {
        // SAFETY: the mapping of the caller, which nothing else uses.
        unsafe { super::advise(ADDRESS, bytes, advice) }
    };
    advise(libc::MADV_DONTFORK)?;
    advise(libc::MADV_NOHUGEPAGE)?;
    // SAFETY: as above; it is writable.
    unsafe { at.write_volatile(1) };
    advise(libc::MADV_DONTNEED)?;
    advise(libc::MADV_HUGEPAGE)?;
    // SAFETY: as above.
    unsafe { at.write_volatile(1) };
    Ok(())
}

/// Reports whether page faults take a lock of their mapping alone (Linux 6.4).
fn has_vma_locks() -> bool {
    const UNKNOWN: u8 = 2;
    static HAS: AtomicU8 = AtomicU8::new(UNKNOWN);
    if HAS.load(Ordering::Relaxed) == UNKNOWN {
        let name = rustix::system::uname();
        let version = super::version(name.release().to_str().unwrap_or_default());
        HAS.store((version >= Some((6, 4))).into(), Ordering::Relaxed);
    }
    HAS.load(Ordering::Relaxed) == 1
}
