//! The huge page that the kernel has ready for the next collapse: [`Destination`].
//!
//! MADV_COLLAPSE copies under the write lock of the address space: no other thread can map memory or
//! take a page fault meanwhile. A virtual machine may have to ask its host for the memory of a free
//! huge page (free page reporting, Linux 5.7): then the copy takes 5 to 8 ms, otherwise 0.5 ms. So a
//! mapping of our own touches and frees a huge page right before. The kernel allocates the page that
//! this CPU freed last (its lists hold huge pages since Linux 5.13; mm/page_alloc.c).
//! Compaction for the huge page takes place here too, under no lock.
#![expect(unsafe_code, reason = "maps and writes memory of its own")]

use core::ptr::{null_mut, with_exposed_provenance_mut};

use rustix::mm::{self, Advice, MapFlags, MprotectFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Addresses for a huge page.
#[derive(Debug)]
pub struct Destination {
    /// Start of the mapping, of two blocks.
    mapping: usize,
    /// The whole block in the mapping.
    block: usize,
    /// Size of a block.
    bytes: usize,
}

impl Destination {
    /// Maps addresses for a huge page of `bytes`, without memory. `None`: a resource limit of the
    /// program counts them, or the kernel refuses.
    pub fn new(bytes: usize) -> Option<Self> {
        let is_limited = |resource| getrlimit(resource).current.is_some();
        if [Resource::As, Resource::Data].into_iter().any(is_limited) {
            return None;
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a mapping at an address of the kernel's choice replaces none.
        let at = unsafe { mm::mmap_anonymous(null_mut(), 2 * bytes, ProtFlags::empty(), flags) };
        let mapping = at.ok()?.expose_provenance();
        let block = mapping.next_multiple_of(bytes);
        let new = Self {
            mapping,
            block,
            bytes,
        };
        let (place, access) = (
            with_exposed_provenance_mut(block),
            MprotectFlags::READ | MprotectFlags::WRITE,
        );
        // SAFETY: within the new mapping, to which nothing refers.
        unsafe {
            mm::madvise(place, bytes, Advice::LinuxDontFork).ok()?;
            mm::mprotect(place, bytes, access).ok()?;
        }
        // The first page fault of a mapping takes the lock of the address space for its anon_vma. A
        // base page has it for a moment, a huge page for as long as compaction takes.
        new.touch();
        // SAFETY: as above.
        unsafe { mm::madvise(place, bytes, Advice::LinuxHugepage).ok()? };
        Some(new)
    }

    /// Has the kernel allocate and free a huge page on this CPU. The thread is bound to the CPU until
    /// the result is dropped.
    pub fn prepare(&self) -> Option<Pinned> {
        let pinned = Pinned::new();
        self.touch();
        pinned
    }

    /// Writes a byte, and frees what that allocated.
    fn touch(&self) {
        // SAFETY: in the writable mapping, to which nothing refers.
        unsafe { with_exposed_provenance_mut::<u8>(self.block).write_volatile(1) };
        let place = with_exposed_provenance_mut(self.block);
        // SAFETY: as above. It fails for locked memory, which goes with the mapping.
        let _ = unsafe { mm::madvise(place, self.bytes, Advice::LinuxDontNeed) };
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and nothing refers to it.
        let _ = unsafe { mm::munmap(with_exposed_provenance_mut(self.mapping), 2 * self.bytes) };
    }
}

/// The calling thread, bound to its CPU. Dropped: allowed on its CPUs of before.
#[derive(Debug)]
pub struct Pinned {
    before: CpuSet,
}

impl Pinned {
    /// `None`: the kernel refuses, or has more than 1024 CPUs.
    fn new() -> Option<Self> {
        let before = sched_getaffinity(None).ok()?;
        let mut one = CpuSet::new();
        one.set(sched_getcpu());
        sched_setaffinity(None, &one).ok()?;
        Some(Self { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.before);
    }
}
