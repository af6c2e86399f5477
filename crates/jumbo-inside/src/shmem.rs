//! The program's shared memory on huge pages: [`start`], [`mapped`].
//!
//! Methods, in order of preference, for each shared mapping of at least a PMD (anonymous, of a
//! memfd, of a file on tmpfs, of System V):
//!
//! 1. hugetlb pages ([`map_hugetlb`]), if configured;
//! 2. *touch and collapse* ([`crate::density`]): the thread of [`crate::watch`] collapses touched
//!    memory;
//! 3. the kernel's controls: the mapping is aligned and advised, and the kernel uses the folio
//!    sizes that its controls allow.
//!
//! Named memory (a descriptor, a key) is advised and collapsed, never replaced: its size, its
//! seals, and its content for write(2) and other processes stay the same.
//!
//! Invariant: no byte of shared memory changes here.

use core::ptr::null_mut;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rustix::fd::BorrowedFd;
use rustix::fs::Stat;
use rustix::mm::{self, MapFlags, ProtFlags};

use crate::density::{self, Policy, record_reason};
use crate::heap::warm::in_parallel;
use crate::ledger::{Slot, shm_reason as reason, stats};
use crate::orders::{Mode as _, Orders, ShmMode};
use crate::pool::populate;
use crate::{heap, sandbox};
use jumbo_sys::proc::is_alone;
use jumbo_sys::{self as sys, unmap};

pub use density::leave;

/// Minimum length of a covered mapping: the PMD size; `usize::MAX` until [`start`].
static MIN_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Index of the mode in [`ShmMode::ALL`].
static MODE: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Copy of [`Orders::shm_sizes`].
static SIZES: AtomicUsize = AtomicUsize::new(0);

/// Minimum size of a scanned mapping, or of the file that it is a piece of: no program was faster with smaller ones.
const MIN_SCANNED_BYTES: usize = 32 << 20;

/// `f_type` of tmpfs, which holds memfds too (linux/magic.h).
const TMPFS_MAGIC: libc::c_long = 0x0102_1994;

/// Starts covering shared mappings.
pub fn start(orders: &Orders<'_>) {
    let (mode, sizes, pmd) = (orders.shm, orders.shm_sizes, orders.pmd);
    if mode == ShmMode::Off || !pmd.is_power_of_two() {
        return;
    }
    let index = ShmMode::ALL.iter().position(|(_, other)| *other == mode);
    MODE.store(index.unwrap_or(usize::MAX), Ordering::Relaxed);
    SIZES.store(sizes, Ordering::Relaxed);
    if mode != ShmMode::Advise && (sizes == 0 || sizes & pmd != 0) {
        density::start_sharing();
    }
    MIN_BYTES.store(pmd, Ordering::Release);
}

/// Reports whether mmap(2) with these arguments maps shared memory that is covered.
#[inline(always)]
pub fn is_covered(length: usize, flags: i32) -> bool {
    length >= MIN_BYTES.load(Ordering::Relaxed)
        && matches!(
            flags & libc::MAP_TYPE,
            libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE
        )
}

/// Reports whether a System V segment of `length` bytes is covered.
pub fn covers(length: usize) -> bool {
    length >= MIN_BYTES.load(Ordering::Relaxed) && !sandbox::is_entered()
}

fn mode() -> ShmMode {
    let mode = ShmMode::ALL.get(MODE.load(Ordering::Relaxed));
    mode.map_or(ShmMode::Off, |(_, mode)| *mode)
}

/// Properties of a new shared mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedMapping {
    /// Bytes from the start that this process may collapse. Another process's memory
    /// would be charged to this one's control group. So the process writes to them and was the
    /// first to map them, and mincore(2) reports their pages. (For a file that it may not write,
    /// mincore(2) reports all pages present.)
    pub own_bytes: usize,
    /// The memory has no name: only the program's own processes can punch holes in it.
    pub is_anonymous: bool,
    /// Size of a file that is mapped in part, else 0.
    pub file_bytes: usize,
}

/// Files that were empty when this process allocated their memory, by inode; 0: a free place.
static ALLOCATED: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];
/// Place of the next file.
static NEXT_ALLOCATED: AtomicUsize = AtomicUsize::new(0);

fn is_empty_and_ours(stat: &Stat) -> bool {
    stat.st_blocks == 0 && stat.st_uid == rustix::process::geteuid().as_raw()
}

fn inode(stat: &Stat) -> u64 {
    stat.st_dev.rotate_left(48) ^ stat.st_ino
}

fn is_allocated(stat: &Stat) -> bool {
    let inode = inode(stat);
    ALLOCATED
        .iter()
        .any(|known| known.load(Ordering::Relaxed) == inode)
}

/// Notes that the program is about to allocate memory of a file (fallocate(2)): it is charged to this
/// process. A heap in a memfd is allocated before it is mapped.
pub fn allocating(file: BorrowedFd<'_>) {
    if MIN_BYTES.load(Ordering::Relaxed) != usize::MAX {
        sys::guarded(|| note_allocated(file));
    }
}

fn note_allocated(file: BorrowedFd<'_>) {
    if sandbox::is_entered() || rustix::fs::fcntl_get_seals(file).is_err() {
        return;
    }
    if let Ok(stat) = rustix::fs::fstat(file)
        && is_empty_and_ours(&stat)
        && !is_allocated(&stat)
    {
        let place = NEXT_ALLOCATED.fetch_add(1, Ordering::Relaxed) % ALLOCATED.len();
        if let Some(place) = ALLOCATED.get(place) {
            place.store(inode(&stat), Ordering::Relaxed);
        }
    }
}

/// Returns the properties of a mapping of `length` bytes of `file` at `offset`; `None` unless it is
/// on tmpfs, and under a seccomp filter, which may kill the process for these calls.
///
/// Only memfds and files on tmpfs and hugetlbfs have seals: no other file system is queried,
/// because it may not reply.
pub fn inspect(file: BorrowedFd<'_>, offset: usize, length: usize) -> Option<SharedMapping> {
    sys::guarded(|| inspect_now(file, offset, length))
}

fn inspect_now(file: BorrowedFd<'_>, offset: usize, length: usize) -> Option<SharedMapping> {
    if sandbox::is_entered() || rustix::fs::fcntl_get_seals(file).is_err() {
        return None;
    }
    let stat = rustix::fs::fstat(file).ok()?;
    let mount = rustix::fs::fstatfs(file).ok()?;
    let size = usize::try_from(stat.st_size).ok()?;
    let ours = is_empty_and_ours(&stat) || is_allocated(&stat);
    let within = size.saturating_sub(offset).min(length);
    (mount.f_type as libc::c_long == TMPFS_MAGIC).then_some(SharedMapping {
        own_bytes: if ours { within } else { 0 },
        is_anonymous: false,
        file_bytes: if length < size { size } else { 0 },
    })
}

/// Reports whether a file is neither a memfd nor on tmpfs or hugetlbfs; false under a seccomp filter,
/// as for [`inspect`].
pub fn is_on_disk(file: BorrowedFd<'_>) -> bool {
    sys::guarded(|| !sandbox::is_entered() && rustix::fs::fcntl_get_seals(file).is_err())
}

/// Returns an address hint for mmap(2) at which PMDs can map `length` bytes of a file at `offset`.
pub fn address_hint(length: usize, offset: usize) -> Option<usize> {
    let past = offset & (MIN_BYTES.load(Ordering::Relaxed).checked_sub(1)?);
    let address = heap::maps::place_shared(length.checked_add(past)?)?;
    Some(address + past)
}

/// Maps anonymous shared memory, readable and writable, on hugetlb pages; `None` if they are not
/// configured or not available.
///
/// Populates it at once: a cgroup's hugetlb limit would cause a SIGBUS later.
pub fn map_hugetlb(length: usize) -> Option<usize> {
    (mode() == ShmMode::Hugetlb).then(|| sys::guarded(|| map_on_hugetlb(length)))?
}

fn map_on_hugetlb(length: usize) -> Option<usize> {
    if sandbox::is_entered() {
        return None;
    }
    let pmd = MIN_BYTES.load(Ordering::Relaxed);
    let sizes = match SIZES.load(Ordering::Relaxed) {
        0 => pmd,
        sizes => sizes,
    };
    let mut why = reason::NOT_WHOLE;
    let bits = (0..usize::BITS).rev().filter(|bit| sizes & 1 << bit != 0);
    for bit in bits.filter(|bit| length.is_multiple_of(1 << bit)) {
        if let Some(address) = map_populated(length, bit) {
            Slot::add(&stats::slot().shm, length as u64);
            Slot::add(&stats::slot().shm_hugetlb, length as u64);
            return Some(address);
        }
        why = reason::NO_HUGETLB;
    }
    Slot::add(&stats::slot().shm_hugetlb_fallback, 1);
    record_reason(why);
    None
}

#[expect(unsafe_code, reason = "maps memory")]
fn map_populated(length: usize, bit: u32) -> Option<usize> {
    let (prot, page) = (
        ProtFlags::READ | ProtFlags::WRITE,
        bit << libc::MAP_HUGE_SHIFT,
    );
    let flags = MapFlags::SHARED | MapFlags::HUGETLB | MapFlags::from_bits_retain(page);
    // SAFETY: a new mapping at an address of the kernel's choice replaces none.
    let address = unsafe { mm::mmap_anonymous(null_mut(), length, prot, flags) }.ok()?;
    let fill = |at, length| populate(at, length, 1 << bit);
    let at = address.expose_provenance();
    // With other threads: one of them may change a property of all threads (setuid), and the C
    // library would not change threads made here.
    let filled = match is_alone() {
        Some(true) => in_parallel(&fill, 1 << bit, (at, length)),
        _ => fill(at, length),
    };
    if filled.is_err() {
        // SAFETY: this mapping, which no other code has seen.
        let _ = unsafe { unmap(at, length) };
        return None;
    }
    Some(at)
}

/// Puts shared memory that the program has mapped on huge pages, by the best available method.
pub fn mapped(address: usize, length: usize, known: SharedMapping) {
    let slot = stats::slot();
    Slot::add(&slot.shm, length as u64);
    let length = length.next_multiple_of(rustix::param::page_size());
    if density::advise(&(address..address + length), Policy::Shared).is_err() {
        return record_reason(reason::REFUSED);
    }
    Slot::add(&slot.shm_advised, length as u64);
    let ours = known.own_bytes.min(length) & !(rustix::param::page_size() - 1);
    if ours.max(known.file_bytes) >= MIN_SCANNED_BYTES && ours >= MIN_BYTES.load(Ordering::Relaxed)
    {
        let is_piece = known.file_bytes != 0;
        density::share(&(address..address + ours), known.is_anonymous, is_piece);
    }
}
