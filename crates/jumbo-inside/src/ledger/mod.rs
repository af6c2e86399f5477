//! The ledger: what the preload library did in each process, in memory that the launcher shares.
//!
//! `jumbo run` makes a memfd, and each covered process maps it through `/proc/LAUNCHER/fd/N` (so
//! that no descriptor is inherited and no file is left behind), claims a [`Slot`] and counts in it.
//! What was counted outlives the process, however it ended: a report after SIGKILL is whole.
//!
//! Invariant: counters only, no pointers. A process can write nonsense into its launcher's report and
//! nothing worse.

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

/// Slots in a ledger; processes past that are counted by [`Ledger::claimed`] alone.
pub const SLOTS: usize = 1000;

/// Stands for the layout of [`Ledger`] and [`Slot`]: it changes when they do.
const MAGIC: u32 = 0x6a6d_6239;

/// The shared memory, as both sides see it.
#[repr(C)]
#[derive(Debug)]
pub struct Ledger {
    magic: AtomicU32,
    claimed: AtomicU32,
    /// The bytes of pool pages that all processes of the run have, and may have; none where each has a pool of its own.
    pub pool: Quota,
    _pad: [u64; 12],
    slots: [Slot; SLOTS],
}

counters! {
    /// The process, in its own PID namespace; 0 while the slot is being set up.
    pid: AtomicU32 as u32, last;
    /// Facts found at start: [`flag`].
    flags: AtomicU32 as u32, bits;
    /// Large allocations now alive in the window.
    large_live: AtomicU64 as u64, sum;
    /// The most of them there ever were.
    large_peak: AtomicU64 as u64, sum;
    /// How many large allocations were made (a count).
    large_calls: AtomicU64 as u64, sum;
    /// Large allocations that the window could not serve and the program's allocator did.
    large_fallback: AtomicU64 as u64, sum;
    /// Memory newly put under MADV_HUGEPAGE, over the whole life (allocations and mappings).
    advised: AtomicU64 as u64, sum;
    /// Advised memory that was not known to be touched at the last scan: what may be huge for nothing.
    untouched: AtomicU64 as u64, sum;
    /// Private memory in blocks that were advised or collapsed and are mapped, `untouched` included. 0 where huge pages
    /// are not earned: such blocks are not tracked.
    huge: AtomicU64 as u64, sum;
    /// Memory whose MADV_HUGEPAGE the kernel refused.
    refused: AtomicU64 as u64, sum;
    /// The errno of the last refusal.
    refused_errno: AtomicU64 as u64, last;
    /// Anonymous mappings the program made and jumbo advised.
    maps_advised: AtomicU64 as u64, sum;
    /// Anonymous mappings left alone: no whole huge page fits, or huge pages make no sense there.
    maps_left: AtomicU64 as u64, sum;
    /// glibc thread arenas put under MADV_HUGEPAGE.
    arenas_advised: AtomicU64 as u64, sum;
    /// Bytes collapsed with MADV_COLLAPSE.
    collapsed: AtomicU64 as u64, sum;
    /// Freed by several threads at once.
    free_gathered: AtomicU64 as u64, sum;
    /// Large ranges that were looked at and freed by the caller alone: huge-mapped, or nothing to gain.
    free_inline: AtomicU64 as u64, sum;
    /// Freed after the call had returned (part of `free_gathered`).
    free_background: AtomicU64 as u64, sum;
    /// Now waiting to be freed in the background.
    free_pending: AtomicU64 as u64, sum;
    /// The most threads that freed at once (a count).
    free_workers: AtomicU64 as u64, most;
    /// Allocations that waited for memory being freed in the background (a count).
    free_waits: AtomicU64 as u64, sum;
    /// Hugetlb pages of the pool now held, and the most of them there ever were.
    pool_hugetlb: AtomicU64 as u64, sum;
    /// The peak of `pool_hugetlb`.
    pool_hugetlb_peak: AtomicU64 as u64, most;
    /// THPs of the pool now held.
    pool_thp: AtomicU64 as u64, sum;
    /// The peak of `pool_thp`.
    pool_thp_peak: AtomicU64 as u64, most;
    /// Asked for while there was a pool, and served without it.
    pool_beyond: AtomicU64 as u64, sum;
    /// Moved from hugetlb pages to THPs, before a fork or a thread.
    pool_moved: AtomicU64 as u64, sum;
    /// Should have been moved, and could not be.
    pool_stuck: AtomicU64 as u64, sum;
    /// What this process is charged with in [`Ledger::pool`].
    pool_charged: AtomicU64 as u64, sum;
    /// The process, as the PID namespace of its /proc has it; 0 where it is charged with nothing.
    pool_owner: AtomicU32 as u32, last;
    /// Why the pool was not better: bits of [`pool_reason`].
    pool_reasons: AtomicU32 as u32, bits;
    /// Text of the program and of the libraries that were asked for, in segments of a PMD at least.
    text: AtomicU64 as u64, sum;
    /// What of it huge folios of the page cache mapped when it was looked at.
    text_file: AtomicU64 as u64, sum;
    /// What of it was moved onto an image that processes share.
    text_shared: AtomicU64 as u64, sum;
    /// How long the moves took, in nanoseconds.
    text_ns: AtomicU64 as u64, sum;
    /// Why it was not more: bits of [`text_reason`].
    text_reasons: AtomicU32 as u32, bits;
    /// Images of text that this process made, for itself and others (a count).
    text_images: AtomicU32 as u32, sum;
    /// The program's data that was copied onto huge pages.
    data_moved: AtomicU64 as u64, sum;
    /// The program's bss that was advised.
    data_advised: AtomicU64 as u64, sum;
    /// Shared mappings of a PMD at least that the program made.
    shm: AtomicU64 as u64, sum;
    /// What of them the kernel took the advice for.
    shm_advised: AtomicU64 as u64, sum;
    /// Collapsed onto huge pages once they were touched, in blocks of what a PMD maps.
    shm_collapsed: AtomicU64 as u64, sum;
    /// Blocks that no huge page was to be had for (a count).
    shm_fallback: AtomicU64 as u64, sum;
    /// Blocks that a memory cgroup's limit left no room for (a count).
    shm_fallback_charge: AtomicU64 as u64, sum;
    /// On hugetlb pages.
    shm_hugetlb: AtomicU64 as u64, sum;
    /// Mappings that hugetlb pages were asked for, and not to be had (a count).
    shm_hugetlb_fallback: AtomicU64 as u64, sum;
    /// Brought in by the user-space rung: in blocks of [`Slot::shm_user_block`].
    shm_user: AtomicU64 as u64, sum;
    /// Blocks that it brought in (a count): so often the kernel was entered at the most, where each base page would have been a
    /// fault.
    shm_user_alloc: AtomicU64 as u64, sum;
    /// Blocks that it left to the kernel, for want of memory (a count).
    shm_user_fallback: AtomicU64 as u64, sum;
    /// Blocks that a memory cgroup's limit left no room for (a count).
    shm_user_fallback_charge: AtomicU64 as u64, sum;
    /// The size of its blocks.
    shm_user_block: AtomicU64 as u64, most;
    /// Why it was not more: bits of [`shm_reason`].
    shm_reasons: AtomicU32 as u32, bits;
    /// What became of the reaper: a code of [`crate::reaper::State`].
    reaper: AtomicU32 as u32, last;
    /// The reaper's process ID, as its process's namespace has it; 0 where none was started.
    reaper_pid: AtomicU32 as u32, last;
    /// What the reaper gave back.
    reaper_freed: AtomicU64 as u64, sum;
    /// How long that took, in nanoseconds.
    reaper_ns: AtomicU64 as u64, sum;
}

/// Bits of [`Slot::pool_reasons`].
pub mod pool_reason {
    /// The pool and its overcommit were used up.
    pub const FULL: u32 = 1;
    /// The kernel's hugetlb pool had no page left, and no surplus page could be had.
    pub const NONE_FREE: u32 = 1 << 1;
    /// This kernel has no hugetlb pages of that size.
    pub const NO_SIZE: u32 = 1 << 2;
    /// A control group's hugetlb limit.
    pub const HUGETLB_LIMIT: u32 = 1 << 3;
    /// Hugetlb pages were given up before a fork.
    pub const FORK: u32 = 1 << 4;
    /// Hugetlb pages were given up because the program has threads.
    pub const THREADS: u32 = 1 << 5;
    /// The memory cgroup, or the host, had no room for THPs.
    pub const NO_ROOM: u32 = 1 << 6;
    /// Memory could not be collapsed: no free huge page, or THP switched off for the process.
    pub const FRAGMENTED: u32 = 1 << 7;
    /// Hugetlb pages were not taken: what they hold might find no room when it has to move before a fork.
    pub const UNMOVABLE: u32 = 1 << 8;
    /// Hugetlb pages were given up before a seccomp filter or a new root.
    pub const CONFINED: u32 = 1 << 9;
    /// What hugetlb pages held could not be moved: no room, or a filter.
    pub const STUCK_ROOM: u32 = 1 << 10;
    /// The same: the kernel refused a mapping.
    pub const STUCK_MAPPINGS: u32 = 1 << 11;
    /// The same: another thread was there.
    pub const STUCK_THREADS: u32 = 1 << 12;
    /// More was asked for at once than the pool and its overcommit.
    pub const LARGER: u32 = 1 << 13;
}

/// Bits of [`Slot::shm_reasons`].
pub mod shm_reason {
    /// The kernel does not take the advice: a kernel without huge pages for shared memory, or told so by the program.
    pub const REFUSED: u32 = 1;
    /// The PMD size's `shmem_enabled` does not allow a collapse.
    pub const NOT_ALLOWED: u32 = 1 << 1;
    /// No huge page was free.
    pub const NO_HUGE: u32 = 1 << 2;
    /// No memory, no descriptor or no thread was to be had.
    pub const NO_MEMORY: u32 = 1 << 3;
    /// The program runs under a seccomp filter.
    pub const FILTER: u32 = 1 << 4;
    /// No hugetlb page of that size, or too few, or a cgroup's limit of them.
    pub const NO_HUGETLB: u32 = 1 << 5;
    /// The mapping is not of whole hugetlb pages, or wanted at a place of the program's.
    pub const NOT_WHOLE: u32 = 1 << 6;
    /// userfaultfd(2) is not to be had: a kernel without it, or not for user mode.
    pub const NO_USERFAULTFD: u32 = 1 << 7;
    /// The thread that looks had to go, and did not come again.
    pub const ENDED: u32 = 1 << 8;
    /// More mappings than are looked after.
    pub const TOO_MANY: u32 = 1 << 9;
    /// Blocks were touched in part, or have holes.
    pub const IN_PART: u32 = 1 << 10;
}

/// Bits of [`Slot::text_reasons`].
pub mod text_reason {
    /// Its addresses are not congruent to its place in the file, so the page cache cannot map it by PMDs.
    pub const NOT_CONGRUENT: u32 = 1;
    /// The page cache has it in small folios.
    pub const SMALL_FOLIOS: u32 = 1 << 1;
    /// Pages of it were written to: text relocations, breakpoints, a program that patches itself.
    pub const CHANGED: u32 = 1 << 2;
    /// The kernel cannot say how it is mapped: PAGEMAP_SCAN, Linux 6.7, or no /proc.
    pub const UNKNOWN: u32 = 1 << 3;
    /// The kernel refused memory that is executable and no file's: vm.memfd_noexec, or a security module.
    pub const NOT_EXECUTABLE: u32 = 1 << 4;
    /// No huge page for shared memory: the host's shmem controls, or none free.
    pub const NO_SHARED_HUGE: u32 = 1 << 5;
    /// No memory, or no mapping, or a limit.
    pub const NO_MEMORY: u32 = 1 << 7;
    /// A seccomp filter is at work: nothing is moved behind one.
    pub const FILTER: u32 = 1 << 8;
    /// The program has not lived, or has not touched, as much as makes a copy worth while.
    pub const NOT_YET: u32 = 1 << 9;
    /// The mapping was another one by then.
    pub const GONE: u32 = 1 << 10;
    /// Asked for at the start, when the process had several threads: data is not copied.
    pub const THREADS: u32 = 1 << 11;
    /// A call that wants a process without threads of ours, or a change of user, came first.
    pub const ENDED: u32 = 1 << 12;
    /// Another process of the same user wrote to the image before it was sealed.
    pub const TAMPERED: u32 = 1 << 13;
}

/// Bits of [`Slot::flags`].
pub mod flag {
    /// `malloc` and its family are diverted: the next definition is glibc's.
    pub const MALLOC: u32 = 1;
    /// The program has another allocator; only its mappings are covered.
    pub const FOREIGN_MALLOC: u32 = 1 << 1;
    /// `mmap` and its family are covered.
    pub const MAPS: u32 = 1 << 2;
    /// The window could not be placed in this address space.
    pub const NO_WINDOW: u32 = 1 << 3;
    /// The process was told by its parent or itself not to use THP (PR_SET_THP_DISABLE).
    pub const THP_DISABLED: u32 = 1 << 4;
    /// glibc's own heap advises THP: glibc.malloc.hugetlb is 1 or more in its tunables.
    pub const TUNABLE: u32 = 1 << 5;
    /// mimalloc serves small blocks, of threads that ask for many; or all, from a pool.
    pub const MIMALLOC: u32 = 1 << 6;
}

impl Ledger {
    /// What the memfd is called in /proc/PID/maps.
    pub const NAME: &'static str = "jumbo-ledger";

    /// A new, empty ledger and the memfd that others map it through.
    ///
    /// # Errors
    /// The errno of memfd_create(2) (3.17), ftruncate(2) or mmap(2).
    pub fn create() -> Result<(&'static Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(Self::NAME, flags)?;
        rustix::fs::ftruncate(&fd, size_of::<Self>() as u64)?;
        // No process can take the memory away from under the others.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        let ledger = Self::map(&fd)?;
        ledger.magic.store(MAGIC, Ordering::Release);
        Ok((ledger, fd))
    }

    /// Maps the ledger behind `fd` for the rest of this process's life.
    ///
    /// # Errors
    /// The errno of fstat(2) or mmap(2); `EINVAL` where the file is too short to be a ledger.
    pub fn map(fd: impl AsFd) -> Result<&'static Self> {
        let stat = rustix::fs::fstat(&fd)?;
        if u64::try_from(stat.st_size).unwrap_or(0) < size_of::<Self>() as u64 {
            return Err(rustix::io::Errno::INVAL);
        }
        map_shared(fd)
    }

    /// True where the memory was set up by [`Ledger::create`].
    pub fn is_valid(&self) -> bool {
        self.magic.load(Ordering::Acquire) == MAGIC
    }

    /// A slot for this process, or `None` when all are taken.
    pub fn claim(&self, pid: u32) -> Option<&Slot> {
        let index = self.claimed.fetch_add(1, Ordering::Relaxed);
        let slot = self.slots.get(usize::try_from(index).ok()?)?;
        slot.pid.store(pid, Ordering::Release);
        Some(slot)
    }

    /// How many slots were asked for; past [`SLOTS`] that many processes went uncounted.
    pub fn claimed(&self) -> u32 {
        self.claimed.load(Ordering::Relaxed)
    }

    /// The slots in use, in the order of their claims.
    pub fn slots(&self) -> impl Iterator<Item = &Slot> {
        let used = usize::try_from(self.claimed()).unwrap_or(SLOTS).min(SLOTS);
        self.slots[..used]
            .iter()
            .filter(|slot| slot.pid.load(Ordering::Acquire) != 0)
    }
}

impl Slot {
    /// Adds `bytes` to a counter. Relaxed: each counter stands alone.
    pub fn add(counter: &AtomicU64, bytes: u64) {
        counter.fetch_add(bytes, Ordering::Relaxed);
    }
}

#[expect(
    unsafe_code,
    reason = "the one place where the shared memory becomes a type"
)]
fn map_shared(fd: impl AsFd) -> Result<&'static Ledger> {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice disturbs no other memory.
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
    // SAFETY: the mapping is page-aligned, as long as the type (the caller checked the file's length),
    // never unmapped, and every field is an atomic for which any bit pattern is valid.
    Ok(unsafe { &*memory.cast::<Ledger>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_mapping_sees_the_counts_of_the_first() {
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
        for _ in 0..SLOTS {
            let _ = ledger.claim(8);
        }
        assert!(ledger.claim(9).is_none());
        assert_eq!(ledger.slots().count(), SLOTS);
    }

    #[test]
    fn a_short_file_is_refused() {
        let fd = rustix::fs::memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(Ledger::map(&fd).unwrap_err(), rustix::io::Errno::INVAL);
    }
}
