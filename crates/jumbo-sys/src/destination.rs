//! The huge page that the kernel has ready for the next collapse: [`Destination`].
//!
//! MADV_COLLAPSE copies under the write lock of the address space: no other thread can map memory or
//! take a page fault meanwhile. A virtual machine may have to ask its host for the memory of a free
//! huge page (free page reporting, Linux 5.7): then the copy takes 5 to 8 ms, otherwise 0.5 ms. So a
//! huge page is touched and freed right before. The kernel allocates what this CPU freed last (its
//! lists hold huge pages since Linux 5.14; mm/page_alloc.c).
#![expect(unsafe_code, reason = "writes to memory of its own")]

use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use core::time::Duration;

use rustix::io::Result;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use super::{cpu_time, map_at, millis, now, unmap};

/// Address of the page. The kernel chooses none there by itself, so no mapping of the program comes
/// and goes at this place.
const ADDRESS: usize = 0x2f78_0000_0000;

/// Time in which free memory stays warm: half the delay of free page reporting (mm/page_reporting.c).
const MAX_WARM_AGE: Duration = Duration::from_secs(1);
/// Multiple of a prepared collapse's time from which on one without preparation found cold memory.
const COLD_RATIO: u32 = 3;

/// What is known of the memory that the next collapse takes.
#[derive(Debug)]
pub struct Destination {
    /// The host had it at hand the last time, and that time.
    is_warm: AtomicBool,
    last_millis: AtomicU64,
    /// CPU time of the last prepared collapse.
    warm_micros: AtomicU64,
}

/// A collapse, and the CPU time in which its huge page was prepared; `None`: it was not.
#[derive(Debug)]
pub struct Collapsed<R> {
    /// Result of the collapse.
    pub answer: Result<R>,
    /// Time of the preparation.
    pub preparing: Option<Duration>,
}

impl Default for Destination {
    fn default() -> Self {
        Self::new()
    }
}

impl Destination {
    /// Nothing is known.
    pub const fn new() -> Self {
        Self {
            is_warm: AtomicBool::new(false),
            last_millis: AtomicU64::new(0),
            warm_micros: AtomicU64::new(0),
        }
    }

    /// Runs `collapse`, of `bytes`, with a huge page that the host has at hand. The page is prepared
    /// unless memory was warm a moment ago; a prepared collapse shows what one takes then.
    pub fn collapse<R>(&self, bytes: usize, collapse: impl FnOnce() -> Result<R>) -> Collapsed<R> {
        let relaxed = Ordering::Relaxed;
        let last = Duration::from_millis(self.last_millis.load(relaxed));
        let is_recent = now().saturating_sub(last) <= MAX_WARM_AGE;
        let began = cpu_time();
        let is_prepared = !(is_recent && self.is_warm.load(relaxed)) && prepare(bytes);
        let prepared = cpu_time();
        let preparing = is_prepared.then(|| prepared.saturating_sub(began));
        let answer = collapse();
        let taken = cpu_time().saturating_sub(prepared);
        let is_warm = match preparing {
            Some(preparing) => {
                let micros = u64::try_from(taken.as_micros()).unwrap_or(u64::MAX);
                self.warm_micros.store(micros, relaxed);
                preparing < taken * 2
            }
            None => taken < Duration::from_micros(self.warm_micros.load(relaxed)) * COLD_RATIO,
        };
        self.is_warm.store(answer.is_ok() && is_warm, relaxed);
        self.last_millis.store(millis(now()), relaxed);
        Collapsed { answer, preparing }
    }
}

/// Makes the kernel allocate and free a huge page of `bytes` on this CPU; false without effect: where
/// a resource limit of the program would count it, or before Linux 6.4, where a page fault holds the
/// lock of the address space.
fn prepare(bytes: usize) -> bool {
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
