//! The leaf of the table that maps and frees memory: [`Mapped`].
//!
//! Two mappings: the section table, and one descriptor for each base page, found by address
//! arithmetic. Both are only addresses until they are written. A third mapping is the reserve:
//! memory that is released right before descriptors need as much. None has huge pages, whatever the
//! host's `enabled` is: they would undo the savings.
//!
//! At the limit of a memory cgroup a touch kills. So the room for descriptors is checked first
//! ([`Room`]), and MADV_POPULATE_WRITE (Linux 5.14) allocates them before any thread uses them.
#![expect(
    unsafe_code,
    reason = "the leaf that maps the table and gives its memory back"
)]

use std::array;
use std::ffi::CStr;
use std::fmt;
use std::mem::size_of;
use std::ops::Range;
use std::ptr::with_exposed_provenance;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

use jumbo_inside::pool::{Claim, Room};
use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice, MprotectFlags};

use super::table::Store;
use super::words::{Descriptor, Section};
use super::{Error, Geometry, MAX_RESERVE_SECTIONS};
use crate::mutex::lock;
use crate::units::Bytes;
use jumbo_sys::{self as sys, Reserved, at};

/// Number of writer locks; the GiB of a page selects one.
const LOCKS: usize = 64;
/// Room left for other threads in the cgroup, unless the reserve is released.
const MIN_FREE_BYTES: usize = 1 << 20;
/// Maximum number of spins of a waiting thread before it yields.
const MAX_SPINS: u32 = 100;

/// Private anonymous memory between two pages without access, so that the kernel merges it with no
/// neighbour.
#[derive(Debug)]
pub(super) struct Mapping {
    _reserved: Reserved,
    address: usize,
    length: usize,
}

pub(super) struct Mapped {
    // The slices point into the mappings, and stay private to this value.
    sections: &'static [Section<AtomicU64>],
    descriptors: &'static [Descriptor<AtomicU64>],
    /// The section table and the descriptors, unmapped by drop.
    mappings: [Mapping; 2],
    /// Bytes of the descriptors of a section.
    section: usize,
    reserve: Mutex<Reserve>,
    room: Room,
    locks: [Mutex<()>; LOCKS],
}

/// The reserve: the first `filled` bytes of its mapping are resident.
#[derive(Debug)]
struct Reserve {
    mapping: Mapping,
    filled: usize,
    wanted: usize,
}

impl Mapping {
    fn new(length: usize, name: &CStr) -> std::result::Result<Self, Error> {
        let error = |operation| {
            move |errno| Error::Setup {
                bytes: Bytes(length as u64),
                operation,
                errno,
            }
        };
        let page = rustix::param::page_size();
        let reserved = Reserved::new(length.saturating_add(page), page).map_err(error("mmap"))?;
        let mapping = Self {
            address: reserved.address + page,
            _reserved: reserved,
            length,
        };
        let at = at(mapping.address);
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the range is the new mapping, unknown to other code. The munlock prevents that
        // access populates it after mlockall(MCL_FUTURE).
        unsafe {
            let _ = mm::munlock(at, length);
            match mm::madvise(at, length, Advice::LinuxNoHugepage) {
                // A kernel without huge pages.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => return Err(error("MADV_NOHUGEPAGE")(errno)),
            }
            mm::mprotect(at, length, access).map_err(error("mprotect"))?;
        }
        sys::name(mapping.address, length, name);
        Ok(mapping)
    }

    pub(super) fn addresses(&self) -> Range<u64> {
        self.address as u64..(self.address + self.length) as u64
    }

    /// Populates bytes; changes nothing on failure.
    fn populate(&self, bytes: Range<usize>) -> Result<()> {
        let at = at(self.address + bytes.start);
        // SAFETY: populating changes no byte.
        let populated = unsafe { mm::madvise(at, bytes.len(), Advice::LinuxPopulateWrite) };
        populated.inspect_err(|_| {
            let _ = self.discard(bytes);
        })
    }

    /// Frees bytes, which then read as zeroes.
    fn discard(&self, bytes: Range<usize>) -> Result<()> {
        debug_assert!(bytes.end <= self.length);
        // SAFETY: the range is in this mapping of atomic words, which may have any value: the state
        // of their section decides whether they are used.
        unsafe { sys::discard_locked(self.address + bytes.start, bytes.len()) }
    }

    /// Returns all of it as zeroed entries.
    ///
    /// # Safety
    /// Zeroes are a valid `T`, of which every byte may change at any time. The slice is not used
    /// after the unmap.
    unsafe fn entries<T>(&self) -> &'static [T] {
        let count = self.length / size_of::<T>();
        // SAFETY: the memory is readable, writable, of that length and page-aligned; the rest is
        // the caller's promise.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance(self.address), count) }
    }
}

impl Mapped {
    /// Maps the memory for that many sections.
    pub(super) fn new(geometry: Geometry, sections: usize) -> std::result::Result<Self, Error> {
        let bytes = |count: usize, size: u64| {
            let bytes = Bytes((count as u64).saturating_mul(size));
            let length = usize::try_from(bytes.0).ok();
            let length =
                length.and_then(|n| n.checked_next_multiple_of(rustix::param::page_size()));
            length.ok_or(Error::Setup {
                bytes,
                operation: "mmap",
                errno: Errno::NOMEM,
            })
        };
        let section = bytes(1, geometry.descriptors(geometry.section()).0)?;
        let table = bytes(sections, size_of::<Section<AtomicU64>>() as u64)?;
        let mappings = [
            Mapping::new(table, c"jumbo-vmemmap-sections")?,
            Mapping::new(bytes(sections, section as u64)?, c"jumbo-vmemmap")?,
        ];
        let max = usize::try_from(MAX_RESERVE_SECTIONS).unwrap_or(0) * needed(section);
        let reserve = Reserve {
            mapping: Mapping::new(max, c"jumbo-vmemmap-reserve")?,
            filled: 0,
            wanted: 0,
        };
        // SAFETY: zeroes are valid entries of both types, which are atomic words. The slices and
        // the mappings are in this value, which lends them only for its own life.
        let (sections, descriptors) = unsafe { (mappings[0].entries(), mappings[1].entries()) };
        Ok(Self {
            sections,
            descriptors,
            mappings,
            section,
            reserve: Mutex::new(reserve),
            room: Room::new(0),
            locks: array::from_fn(|_| Mutex::new(())),
        })
    }

    /// Returns the addresses of the section table, the descriptors and the reserve.
    pub(super) fn addresses(&self) -> [Range<u64>; 3] {
        let [sections, descriptors] = &self.mappings;
        let reserve = lock(&self.reserve).mapping.addresses();
        [sections.addresses(), descriptors.addresses(), reserve]
    }

    /// Reserves memory for the descriptors of that many sections; returns its size.
    pub(super) fn hold(&self, sections: u64) -> Bytes {
        let mut reserve = lock(&self.reserve);
        let sections = usize::try_from(sections.min(MAX_RESERVE_SECTIONS)).unwrap_or(0);
        reserve.wanted = sections * needed(self.section);
        let beyond = reserve.filled.saturating_sub(reserve.wanted);
        reserve.release(beyond);
        self.fill(&mut reserve);
        Bytes(reserve.filled as u64)
    }

    fn fill(&self, reserve: &mut Reserve) {
        let (filled, wanted) = (reserve.filled, reserve.wanted);
        if filled < wanted
            && let Some(_claim) = self.claim(needed(wanted - filled) + MIN_FREE_BYTES)
            && reserve.mapping.populate(filled..wanted).is_ok()
        {
            reserve.filled = wanted;
        }
    }

    fn claim(&self, bytes: usize) -> Option<Claim<'_>> {
        // The room may have changed since the last check.
        self.room.remeasure();
        self.room.claim(bytes)
    }

    /// Claims room for `bytes`: of the cgroup, else of the reserve.
    fn claim_or_release(&self, bytes: usize) -> Option<Claim<'_>> {
        if let Some(claim) = self.claim(bytes + MIN_FREE_BYTES) {
            return Some(claim);
        }
        let mut reserve = lock(&self.reserve);
        reserve.release(bytes).then(|| self.claim(bytes)).flatten()
    }

    fn bytes_of(&self, sections: &Range<usize>) -> Range<usize> {
        sections.start * self.section..sections.end * self.section
    }
}

impl Reserve {
    /// Releases `bytes` to the kernel; false if it has less.
    fn release(&mut self, bytes: usize) -> bool {
        let Some(left) = self.filled.checked_sub(bytes) else {
            return false;
        };
        let gone = bytes == 0 || self.mapping.discard(left..self.filled).is_ok();
        if gone {
            self.filled = left;
        }
        gone
    }
}

/// Returns the memory of `bytes` of descriptors with their page tables: one of each level, and one
/// for each 2 MiB (with 4 KiB base pages).
fn needed(bytes: usize) -> usize {
    let page = rustix::param::page_size();
    let tables = bytes.div_ceil(page / 8 * page) + 1;
    bytes + tables * page
}

impl Store for Mapped {
    type Word = AtomicU64;

    #[inline]
    fn section(&self, section: usize) -> &Section<AtomicU64> {
        &self.sections[section]
    }

    #[inline]
    fn descriptor(&self, page: usize) -> &Descriptor<AtomicU64> {
        &self.descriptors[page]
    }

    fn populate(&self, sections: Range<usize>) -> std::result::Result<(), Error> {
        let bytes = self.bytes_of(&sections);
        let error = |operation| {
            let bytes = Bytes(bytes.len() as u64);
            move |errno| Error::Memory {
                bytes,
                operation,
                errno,
            }
        };
        let claim = self.claim_or_release(needed(bytes.len()));
        let Some(_claim) = claim else {
            return Err(error("check of the limits")(Errno::NOMEM));
        };
        let populated = self.mappings[1].populate(bytes.clone());
        populated.map_err(error("MADV_POPULATE_WRITE"))
    }

    fn give_back(&self, sections: Range<usize>) -> Result<()> {
        self.mappings[1].discard(self.bytes_of(&sections))?;
        self.fill(&mut lock(&self.reserve));
        Ok(())
    }

    fn alone<R>(&self, at: usize, work: impl FnOnce() -> R) -> R {
        let _held = lock(&self.locks[at % LOCKS]);
        work()
    }

    fn relax(&self, times: u32) {
        if times < MAX_SPINS {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut it = f.debug_struct("Mapped");
        it.field("mappings", &self.mappings).finish_non_exhaustive()
    }
}
