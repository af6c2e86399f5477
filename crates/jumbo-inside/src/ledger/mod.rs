//! The ledger: counters of the preload library in each process, in memory shared with the launcher.
//!
//! `jumbo run` creates a memfd. Each covered process maps it through `/proc/LAUNCHER/fd/N` (so no
//! descriptor is inherited and no file is left behind), claims a [`Slot`] and counts in it. The
//! counters outlive the process, so a report is complete even after SIGKILL.
//!
//! Invariant: counters only, no pointers. A process can corrupt its launcher's report, nothing
//! else.

mod charges;
#[macro_use]
mod counters;
mod locator;
pub(crate) mod stats;

pub use locator::Locator;

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use rustix::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Result;
use rustix::mm::{MapFlags, ProtFlags};

use crate::pool::Quota;

/// Maximum number of slots in a ledger; [`Ledger::claimed`] also counts the processes without one.
pub const MAX_SLOTS: usize = 1000;

/// Version of the layout of [`Ledger`] and [`Slot`].
const MAGIC: u32 = 0x6a6d_623a;

/// Layout of the shared memory.
#[repr(C)]
#[derive(Debug)]
pub struct Ledger {
    magic: AtomicU32,
    claimed: AtomicU32,
    /// Quota of pool bytes for all processes of the run; 0 if each process has its own pool.
    pub pool: Quota,
    _pad: [u64; 12],
    slots: [Slot; MAX_SLOTS],
}

counters! {
    /// PID in the process's own namespace; 0 while the slot is being set up.
    pid: AtomicU32 as u32, last;
    /// State found at the start: bits of [`flag`].
    flags: AtomicU32 as u32, bits;
    /// Bytes of live large allocations in the window.
    large_live: AtomicU64 as u64, sum;
    /// Peak of `large_live`.
    large_peak: AtomicU64 as u64, sum;
    /// Number of large allocations.
    large_calls: AtomicU64 as u64, sum;
    /// Large allocations that the program's allocator served, because the window could not.
    large_fallback: AtomicU64 as u64, sum;
    /// Bytes ever advised by MADV_HUGEPAGE (allocations and mappings).
    advised: AtomicU64 as u64, sum;
    /// Advised memory not known to be touched at the last scan.
    untouched: AtomicU64 as u64, sum;
    /// Private memory in mapped blocks that were advised or collapsed, `untouched` included. 0 with
    /// `--max-waste=unbounded`, which tracks no blocks.
    huge: AtomicU64 as u64, sum;
    /// Bytes that began on base pages, since the first touch of a huge page took longer.
    costly: AtomicU64 as u64, sum;
    /// CPU time of the last first touch of a huge page that took longer, in nanoseconds.
    touch_huge_ns: AtomicU64 as u64, most;
    /// CPU time of the first touches of the base pages in its place, in nanoseconds.
    touch_base_ns: AtomicU64 as u64, most;
    /// Bytes for which the kernel refused MADV_HUGEPAGE.
    refused: AtomicU64 as u64, sum;
    /// errno of the last refusal.
    refused_errno: AtomicU64 as u64, last;
    /// Advised anonymous mappings of the program.
    maps_advised: AtomicU64 as u64, sum;
    /// Anonymous mappings of at least a huge page that are left as the program asked for them.
    maps_left: AtomicU64 as u64, sum;
    /// Data files mapped to read, and advised.
    files_advised: AtomicU64 as u64, sum;
    /// Bytes collapsed by MADV_COLLAPSE.
    collapsed: AtomicU64 as u64, sum;
    /// Freed by several threads at once.
    free_gathered: AtomicU64 as u64, sum;
    /// Large ranges freed by the caller alone: mapped by huge pages, or no gain expected.
    free_inline: AtomicU64 as u64, sum;
    /// Freed after the call returned (part of `free_gathered`).
    free_background: AtomicU64 as u64, sum;
    /// Pending background frees.
    free_pending: AtomicU64 as u64, sum;
    /// Maximum number of threads that freed at once.
    free_workers: AtomicU64 as u64, most;
    /// Number of allocations that waited for a background free.
    free_waits: AtomicU64 as u64, sum;
    /// Made resident by several threads at once.
    populated: AtomicU64 as u64, sum;
    /// Maximum number of threads that made memory resident at once.
    populate_workers: AtomicU64 as u64, most;
    /// Hugetlb pages of the pool, currently held.
    pool_hugetlb: AtomicU64 as u64, sum;
    /// Peak of `pool_hugetlb`.
    pool_hugetlb_peak: AtomicU64 as u64, most;
    /// THPs of the pool, currently held.
    pool_thp: AtomicU64 as u64, sum;
    /// Peak of `pool_thp`.
    pool_thp_peak: AtomicU64 as u64, most;
    /// Allocations that bypassed the pool.
    pool_beyond: AtomicU64 as u64, sum;
    /// Memory moved from hugetlb pages to THPs, before a fork or a new thread.
    pool_moved: AtomicU64 as u64, sum;
    /// Memory whose move to THPs failed.
    pool_stuck: AtomicU64 as u64, sum;
    /// Charge of this process in [`Ledger::pool`].
    pool_charged: AtomicU64 as u64, sum;
    /// PID in the namespace of the process's /proc; 0 without a charge.
    pool_owner: AtomicU32 as u32, last;
    /// Reasons for missing pool pages: bits of [`pool_reason`].
    pool_reasons: AtomicU32 as u32, bits;
    /// Text of the program and of the configured libraries, in segments of at least a PMD.
    text: AtomicU64 as u64, sum;
    /// Text mapped by huge folios of the page cache at the last check.
    text_file: AtomicU64 as u64, sum;
    /// Text moved onto a shared image.
    text_shared: AtomicU64 as u64, sum;
    /// Duration of the moves, in nanoseconds.
    text_ns: AtomicU64 as u64, sum;
    /// Reasons for text not on huge pages: bits of [`text_reason`].
    text_reasons: AtomicU32 as u32, bits;
    /// Number of text images that this process made.
    text_images: AtomicU32 as u32, sum;
    /// Data of the program, copied onto huge pages.
    data_moved: AtomicU64 as u64, sum;
    /// Advised bss of the program.
    data_advised: AtomicU64 as u64, sum;
    /// Shared mappings of at least a PMD.
    shm: AtomicU64 as u64, sum;
    /// Advised part of `shm`.
    shm_advised: AtomicU64 as u64, sum;
    /// Shared memory collapsed after its touch, in PMD-sized blocks.
    shm_collapsed: AtomicU64 as u64, sum;
    /// Number of blocks without a free huge page.
    shm_fallback: AtomicU64 as u64, sum;
    /// Number of blocks refused for a memory cgroup's limit.
    shm_fallback_charge: AtomicU64 as u64, sum;
    /// Shared memory on hugetlb pages.
    shm_hugetlb: AtomicU64 as u64, sum;
    /// Number of mappings for which hugetlb pages were configured, but not available.
    shm_hugetlb_fallback: AtomicU64 as u64, sum;
    /// Reasons for shared memory not on huge pages: bits of [`shm_reason`].
    shm_reasons: AtomicU32 as u32, bits;
    /// State of the reaper: a code of [`crate::reaper::State`].
    reaper: AtomicU32 as u32, last;
    /// PID of the reaper in its process's namespace; 0 if none was started.
    reaper_pid: AtomicU32 as u32, last;
    /// Bytes that the reaper freed.
    reaper_freed: AtomicU64 as u64, sum;
    /// Duration of the reaper's frees, in nanoseconds.
    reaper_ns: AtomicU64 as u64, sum;
}

/// Bits of [`Slot::pool_reasons`].
pub mod pool_reason {
    /// The pool and its overcommit were exhausted.
    pub const FULL: u32 = 1;
    /// The kernel's hugetlb pool had no free page, and no surplus page was available.
    pub const NONE_FREE: u32 = 1 << 1;
    /// No hugetlb pages of that size on this kernel.
    pub const NO_SIZE: u32 = 1 << 2;
    /// Hugetlb limit of a cgroup.
    pub const HUGETLB_LIMIT: u32 = 1 << 3;
    /// Hugetlb pages were released before a fork.
    pub const FORK: u32 = 1 << 4;
    /// Hugetlb pages were released because the program has threads.
    pub const THREADS: u32 = 1 << 5;
    /// No room for THPs in the memory cgroup or on the host.
    pub const NO_ROOM: u32 = 1 << 6;
    /// A collapse failed: no free huge page, or THP disabled for the process.
    pub const FRAGMENTED: u32 = 1 << 7;
    /// Hugetlb pages were not used: their content might find no room for a move before a fork.
    pub const UNMOVABLE: u32 = 1 << 8;
    /// Hugetlb pages were released before a seccomp filter or a new root.
    pub const CONFINED: u32 = 1 << 9;
    /// A move from hugetlb pages failed: no room, or a seccomp filter.
    pub const STUCK_ROOM: u32 = 1 << 10;
    /// A move from hugetlb pages failed: the kernel refused a mapping.
    pub const STUCK_MAPPINGS: u32 = 1 << 11;
    /// A move from hugetlb pages failed: the process had another thread.
    pub const STUCK_THREADS: u32 = 1 << 12;
    /// One allocation was larger than the pool and its overcommit.
    pub const LARGER: u32 = 1 << 13;
}

/// Bits of [`Slot::shm_reasons`].
pub mod shm_reason {
    /// The kernel refused the advice: it has no huge pages for shared memory, or the program
    /// disabled THP.
    pub const REFUSED: u32 = 1;
    /// The PMD size's `shmem_enabled` does not allow a collapse.
    pub const NOT_ALLOWED: u32 = 1 << 1;
    /// No free huge page.
    pub const NO_HUGE: u32 = 1 << 2;
    /// No memory, descriptor or thread was available.
    pub const NO_MEMORY: u32 = 1 << 3;
    /// A seccomp filter is active.
    pub const FILTER: u32 = 1 << 4;
    /// Too few hugetlb pages of that size, or a cgroup's hugetlb limit.
    pub const NO_HUGETLB: u32 = 1 << 5;
    /// The mapping is not a multiple of the hugetlb page size.
    pub const NOT_WHOLE: u32 = 1 << 6;
    /// The scanner exited and was not restarted.
    pub const ENDED: u32 = 1 << 7;
    /// The table of mappings is full.
    pub const TOO_MANY: u32 = 1 << 8;
    /// Blocks were touched only in part, or have holes.
    pub const IN_PART: u32 = 1 << 9;
}

/// Bits of [`Slot::text_reasons`].
pub mod text_reason {
    /// Addresses and file offsets are not congruent, so the page cache cannot map the text by PMDs.
    pub const NOT_CONGRUENT: u32 = 1;
    /// The page cache has the text in small folios.
    pub const SMALL_FOLIOS: u32 = 1 << 1;
    /// Pages of the text were written: relocations, breakpoints, a program that patches itself.
    pub const CHANGED: u32 = 1 << 2;
    /// The kernel cannot report how the text is mapped: no PAGEMAP_SCAN (Linux 6.7), or no /proc.
    pub const UNKNOWN: u32 = 1 << 3;
    /// The kernel refused an executable memfd: vm.memfd_noexec, or a security module.
    pub const NOT_EXECUTABLE: u32 = 1 << 4;
    /// No huge page for shared memory: the host's shmem controls, or no free one.
    pub const NO_SHARED_HUGE: u32 = 1 << 5;
    /// No memory or no mapping was available, or a limit was reached.
    pub const NO_MEMORY: u32 = 1 << 7;
    /// A seccomp filter is active: text is not moved under one.
    pub const FILTER: u32 = 1 << 8;
    /// The program has not used enough CPU time, or not touched enough text, for a copy.
    pub const NOT_YET: u32 = 1 << 9;
    /// The mapping was replaced during the move.
    pub const GONE: u32 = 1 << 10;
    /// The process had several threads at the start, so data was not copied.
    pub const THREADS: u32 = 1 << 11;
    /// A call that excludes jumbo's threads, or a change of user, came first.
    pub const ENDED: u32 = 1 << 12;
    /// Another process of the same user wrote to the image before the seal.
    pub const TAMPERED: u32 = 1 << 13;
}

/// Bits of [`Slot::flags`].
pub mod flag {
    /// `malloc` and its family are diverted: the next definition is glibc's.
    pub const MALLOC: u32 = 1;
    /// The program has another allocator: only its mappings are covered.
    pub const FOREIGN_MALLOC: u32 = 1 << 1;
    /// `mmap` and its family are covered.
    pub const MAPS: u32 = 1 << 2;
    /// The window could not be placed in this address space.
    pub const NO_WINDOW: u32 = 1 << 3;
    /// THP is disabled for the process (PR_SET_THP_DISABLE).
    pub const THP_DISABLED: u32 = 1 << 4;
    /// jumbo's slabs serve the small blocks.
    pub const SLABS: u32 = 1 << 5;
    /// The program has a sanitizer that fixes the layout of the address space: nothing is covered.
    pub const SANITIZER: u32 = 1 << 6;
}

impl Ledger {
    /// Name of the memfd in /proc/PID/maps.
    pub const NAME: &'static str = "jumbo-ledger";

    /// Creates an empty ledger; returns it with its memfd.
    ///
    /// # Errors
    /// The errno of memfd_create(2) (3.17), ftruncate(2) or mmap(2).
    pub fn create() -> Result<(&'static Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(Self::NAME, flags)?;
        rustix::fs::ftruncate(&fd, size_of::<Self>() as u64)?;
        // No process can truncate the memory of the others.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        let ledger = Self::map(&fd)?;
        ledger.magic.store(MAGIC, Ordering::Release);
        Ok((ledger, fd))
    }

    /// Maps the ledger in `fd` for the life of this process.
    ///
    /// # Errors
    /// The errno of fstat(2) or mmap(2); `EINVAL` if the file is too short.
    pub fn map(fd: impl AsFd) -> Result<&'static Self> {
        let stat = rustix::fs::fstat(&fd)?;
        if u64::try_from(stat.st_size).unwrap_or(0) < size_of::<Self>() as u64 {
            return Err(rustix::io::Errno::INVAL);
        }
        map_shared(fd)
    }

    /// Reports whether [`Ledger::create`] has initialized the memory.
    pub fn is_valid(&self) -> bool {
        self.magic.load(Ordering::Acquire) == MAGIC
    }

    /// Claims a slot for a process; `None` if none is free.
    pub fn claim(&self, pid: u32) -> Option<&Slot> {
        let index = self.claimed.fetch_add(1, Ordering::Relaxed);
        let slot = self.slots.get(usize::try_from(index).ok()?)?;
        slot.pid.store(pid, Ordering::Release);
        Some(slot)
    }

    /// Returns the number of claims; those beyond [`MAX_SLOTS`] got no slot.
    pub fn claimed(&self) -> u32 {
        self.claimed.load(Ordering::Relaxed)
    }

    /// Returns the claimed slots, in the order of the claims.
    pub fn slots(&self) -> impl Iterator<Item = &Slot> {
        let used = usize::try_from(self.claimed())
            .unwrap_or(MAX_SLOTS)
            .min(MAX_SLOTS);
        self.slots[..used]
            .iter()
            .filter(|slot| slot.pid.load(Ordering::Acquire) != 0)
    }
}

impl Slot {
    /// Adds `bytes` to a counter. Relaxed: counters are independent.
    pub fn add(counter: &AtomicU64, bytes: u64) {
        counter.fetch_add(bytes, Ordering::Relaxed);
    }
}

#[expect(unsafe_code, reason = "maps the shared memory as a type")]
fn map_shared(fd: impl AsFd) -> Result<&'static Ledger> {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice replaces none.
    let memory = unsafe {
        rustix::mm::mmap(
            core::ptr::null_mut(),
            size_of::<Ledger>(),
            prot,
            flags,
            fd,
            0,
        )?
    };
    // SAFETY: the mapping is page-aligned, as long as the type (the caller checked the file's
    // length), never unmapped, and every field is an atomic for which any bit pattern is valid.
    Ok(unsafe { &*memory.cast::<Ledger>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_share_their_counters() {
        let (ledger, fd) = Ledger::create().unwrap();
        let other = Ledger::map(&fd).unwrap();
        assert!(other.is_valid() && other.slots().next().is_none());
        Slot::add(&other.claim(7).unwrap().advised, 42);
        let slot = ledger.slots().next().unwrap();
        assert_eq!(
            (
                slot.pid.load(Ordering::Relaxed),
                slot.advised.load(Ordering::Relaxed)
            ),
            (7, 42)
        );
        for _ in 0..MAX_SLOTS {
            let _ = ledger.claim(8);
        }
        assert!(ledger.claim(9).is_none());
        assert_eq!(ledger.slots().count(), MAX_SLOTS);
    }

    #[test]
    fn a_short_file_is_refused() {
        let fd = rustix::fs::memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(Ledger::map(&fd).unwrap_err(), rustix::io::Errno::INVAL);
    }
}
