//! The program's shared memory on huge pages: [`start`], [`mapped`].
//!
//! A ladder, for each shared mapping of a PMD at least that the program makes: anonymous, of a memfd, of a file on tmpfs, of
//! System V:
//!
//! 1. hugetlb pages ([`map_hugetlb`]), where they were asked for;
//! 2. user-space population ([`user`]), where it was asked for;
//! 3. *touch and collapse* ([`crate::density`]): what the program has touched is collapsed, by the thread of [`crate::watch`];
//! 4. the kernel's controls as they are: the mapping is aligned and advised, and the kernel uses the folio sizes that its
//!    controls allow.
//!
//! Memory that has a name (a descriptor, a key) is advised and collapsed, and never replaced: its size, its seals, what
//! write(2) and other processes find in it stay as they are.
//!
//! Invariant: no byte of shared memory is changed here.

pub mod user;

use core::ptr::null_mut;
use core::sync::atomic::{AtomicUsize, Ordering};

use rustix::fd::BorrowedFd;
use rustix::mm::{self, MapFlags, ProtFlags};

use crate::density::{self, Policy, record_reason};
use crate::events::Mechanism;
use crate::heap::warm::in_parallel;
use crate::ledger::{Slot, shm_reason as reason, stats};
use crate::orders::{Mode as _, ShmMode};
use crate::pool::populate;
use crate::proc::is_alone;
use crate::sys::unmap;
use crate::{heap, sandbox};

pub use density::leave;

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How.
    pub mode: ShmMode,
    /// In which sizes: see [`crate::orders::Orders::shm_sizes`].
    pub sizes: usize,
    /// The PMD size.
    pub pmd: usize,
    /// How much of a block may not have been touched when it is collapsed, in percent.
    pub max_waste: usize,
}

/// The length from which on shared mappings are covered; larger than any where they are not.
static LEAST: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The place of the mode among [`ShmMode::ALL`].
static MODE: AtomicUsize = AtomicUsize::new(usize::MAX);
static SIZES: AtomicUsize = AtomicUsize::new(0);

/// Below that nothing is collapsed: no program was faster for it.
const MIN_SCANNED_BYTES: usize = 32 << 20;

/// What a touch brings in where no size was asked for.
const DEFAULT_BLOCK_BYTES: usize = 64 << 10;

/// `f_type` of tmpfs, which memfds are on too (linux/magic.h).
const TMPFS_MAGIC: libc::c_long = 0x0102_1994;

/// Starts covering shared mappings.
pub fn start(settings: Settings) {
    let place = |mode| ShmMode::ALL.iter().position(|(_, other)| *other == mode);
    if settings.mode == ShmMode::Off || !settings.pmd.is_power_of_two() {
        return;
    }
    MODE.store(
        place(settings.mode).unwrap_or(usize::MAX),
        Ordering::Relaxed,
    );
    SIZES.store(settings.sizes, Ordering::Relaxed);
    user::allow_waste(settings.max_waste);
    let allowed = match settings.sizes {
        0 => true,
        sizes => sizes & settings.pmd != 0,
    };
    if settings.mode != ShmMode::Advise && allowed {
        density::start_sharing();
    }
    LEAST.store(settings.pmd, Ordering::Release);
}

/// Whether a mapping with these arguments of mmap(2) is one of shared memory that is covered.
#[inline(always)]
pub fn is_covered(length: usize, flags: i32) -> bool {
    length >= LEAST.load(Ordering::Relaxed)
        && matches!(
            flags & libc::MAP_TYPE,
            libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE
        )
}

/// Whether a segment of so many bytes is covered.
pub fn covers(length: usize) -> bool {
    length >= LEAST.load(Ordering::Relaxed) && !sandbox::is_entered()
}

fn mode() -> ShmMode {
    let mode = ShmMode::ALL.get(MODE.load(Ordering::Relaxed));
    mode.map_or(ShmMode::Off, |(_, mode)| *mode)
}

/// What is known of memory that was mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// So much of it this process may have looked after: it writes to it, was the first to map it, and mincore(2) says what is
    /// there. (To a process that may not write to a file it says that all is.) Another process's memory would be charged to this
    /// one's control group when it is collapsed.
    pub ours: usize,
    /// It has no name: only the program's own processes can punch holes in it.
    pub nameless: bool,
    /// The file system has room for all of it: what the program does not touch may come in too.
    pub has_room: bool,
}

/// What is known of a mapping of `length` bytes of `file` from `offset` on; `None` where the file is no shared memory. Not asked under
/// a seccomp filter, which may end who asks.
///
/// Seals are what memfds and files on tmpfs and hugetlbfs have: any other file system, which may not answer, is not asked.
pub fn look_at(file: BorrowedFd<'_>, offset: usize, length: usize) -> Option<Known> {
    if sandbox::is_entered() || rustix::fs::fcntl_get_seals(file).is_err() {
        return None;
    }
    let stat = rustix::fs::fstat(file).ok()?;
    let mount = rustix::fs::fstatfs(file).ok()?;
    let size = usize::try_from(stat.st_size).ok()?;
    let ours = stat.st_blocks == 0 && stat.st_uid == rustix::process::geteuid().as_raw();
    let within = size.saturating_sub(offset).min(length);
    // A mount without a limit, as that of memfds, has no number of blocks.
    let left = mount.f_bavail.saturating_mul(mount.f_bsize.cast_unsigned());
    let has_room = mount.f_blocks == 0 || left >= within as u64;
    (mount.f_type as libc::c_long == TMPFS_MAGIC).then_some(Known {
        ours: if ours { within } else { 0 },
        nameless: false,
        has_room,
    })
}

/// A good address for a mapping of `length` bytes from `offset` on, as a hint for mmap(2): one PMDs can map.
pub fn place(length: usize, offset: usize) -> Option<usize> {
    let past = offset & (LEAST.load(Ordering::Relaxed).checked_sub(1)?);
    let address = heap::maps::place_shared(length.checked_add(past)?)?;
    Some(address + past)
}

/// Anonymous shared memory on hugetlb pages, all of it there; `None` where they were not asked for, or are not to be had. It is
/// readable and writable.
///
/// It is populated at once: what the hugetlb limit of a cgroup refuses would be a SIGBUS later.
pub fn map_hugetlb(length: usize) -> Option<usize> {
    if mode() != ShmMode::Hugetlb || sandbox::is_entered() {
        return None;
    }
    let pmd = LEAST.load(Ordering::Relaxed);
    let sizes = match SIZES.load(Ordering::Relaxed) {
        0 => pmd,
        sizes => sizes,
    };
    let mut why = reason::NOT_WHOLE;
    let bits = (0..usize::BITS).rev().filter(|bit| sizes & 1 << bit != 0);
    for bit in bits.filter(|bit| length.is_multiple_of(1 << bit)) {
        match populated(length, bit) {
            Some(address) => {
                Slot::add(&stats::slot().shm, length as u64);
                Slot::add(&stats::slot().shm_hugetlb, length as u64);
                return Some(address);
            }
            None => why = reason::NO_HUGETLB,
        }
    }
    Slot::add(&stats::slot().shm_hugetlb_fallback, 1);
    record_reason(why);
    None
}

#[expect(unsafe_code, reason = "maps memory")]
fn populated(length: usize, bit: u32) -> Option<usize> {
    let (prot, page) = (
        ProtFlags::READ | ProtFlags::WRITE,
        bit << libc::MAP_HUGE_SHIFT,
    );
    let flags = MapFlags::SHARED | MapFlags::HUGETLB | MapFlags::from_bits_retain(page);
    // SAFETY: a new mapping, where the kernel likes, replaces none.
    let address = unsafe { mm::mmap_anonymous(null_mut(), length, prot, flags) }.ok()?;
    let fill = |at, length| populate(at, length, 1 << bit);
    let at = address.expose_provenance();
    // The program's other threads may make a change that concerns all threads, and ours would be left out.
    let filled = match is_alone() {
        Some(true) => in_parallel(&fill, 1 << bit, (at, length)),
        _ => fill(at, length),
    };
    if filled.is_err() {
        // SAFETY: this mapping, which no other code has seen.
        let _ = unsafe { unmap(address.expose_provenance(), length) };
        return None;
    }
    Some(address.expose_provenance())
}

/// The program has mapped shared memory: takes it as far up the ladder as it goes.
pub fn mapped(address: usize, length: usize, known: Known) {
    let slot = stats::slot();
    Slot::add(&slot.shm, length as u64);
    let length = length.next_multiple_of(rustix::param::page_size());
    if density::advise(&(address..address + length), Policy::Shared).is_err() {
        return record_reason(reason::REFUSED);
    }
    Slot::add(&slot.shm_advised, length as u64);
    let ours = known.ours.min(length) & !(rustix::param::page_size() - 1);
    // What is not known to be there cannot be brought in before a system call.
    if ours > 0 && mode() == ShmMode::User {
        let answer = match known.has_room {
            _ if density::has_left() => Err(user::Reason::Ended),
            false => Err(user::Reason::NoMemory),
            true => user::register(address, ours, block()),
        };
        match answer {
            Ok(()) => return,
            Err(why) => record_reason(why.bit()),
        }
    }
    if ours >= MIN_SCANNED_BYTES {
        density::share(&(address..address + ours), known.nameless);
    }
}

/// What a touch brings in: the largest size that was asked for.
fn block() -> usize {
    let sizes = SIZES.load(Ordering::Relaxed);
    sizes
        .checked_ilog2()
        .map_or(DEFAULT_BLOCK_BYTES, |bit| 1 << bit)
}

/// The events that concern memory which processes share.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    #[inline(always)]
    fn unmapping(address: usize, length: usize) {
        user::forget(address, length);
    }

    fn advising(address: usize, length: usize, advice: i32) {
        match advice {
            libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE => user::touch(address, length),
            // The kernel collapses no range with holes that a userfaultfd could fill: EBUSY. It looks at the page behind
            // the end too (collapse_file in mm/khugepaged.c, Linux 6.18).
            libc::MADV_COLLAPSE => user::forget(address, length.saturating_add(1)),
            _ => {}
        }
    }

    fn locking(address: usize, length: usize) {
        user::touch(address, length);
    }
}
