//! The one leaf of the table that maps memory and gives it back: [`Mapped`].
//!
//! Two mappings: the section table, and one descriptor for each base page, found by address arithmetic. Both are addresses alone until
//! they are written to. A third is the reserve: memory that is held so that it can be let go right before descriptors need as much.
//! None has huge pages, whatever the host's `enabled` says: a huge page there would undo what is saved.
//!
//! At the limit of a memory cgroup a touch does not fail, it kills. So memory for descriptors is asked for before ([`Room`]), with a
//! look at the limits each time, and put there by MADV_POPULATE_WRITE (Linux 5.14) while no thread knows of it.
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
use super::{Error, Geometry, RESERVE_MOST};
use crate::kernel::{Reserved, at, lock, sys};
use crate::units::Bytes;

/// Writers of different GiB meet in a lock where their numbers are alike.
const LOCKS: usize = 64;
/// What is left to the rest of the cgroup wherever no reserve is let go first: its other threads do not ask.
const LEFT: usize = 1 << 20;
/// How often a thread that waits looks before it lets others run.
const SPINS: u32 = 100;

/// Private anonymous memory between two pages without access, so that the kernel merges it with no neighbour.
#[derive(Debug)]
pub(super) struct Mapping {
    _reserved: Reserved,
    address: usize,
    length: usize,
}

/// A table's memory.
pub(super) struct Mapped {
    // The slices are of the mappings, and private to this value.
    sections: &'static [Section<AtomicU64>],
    descriptors: &'static [Descriptor<AtomicU64>],
    /// The section table and the descriptors, which are unmapped with this value.
    mappings: [Mapping; 2],
    /// What the descriptors of a section fill.
    section: usize,
    reserve: Mutex<Reserve>,
    room: Room,
    locks: [Mutex<()>; LOCKS],
}

/// Memory at hand: the first `filled` bytes of its mapping are resident.
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
        // SAFETY: the range is the mapping just made, which no other code knows of. It was locked if the program locks all that
        // is to come, and access would fill it then.
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

    /// Makes bytes of it resident, or leaves it as it was.
    fn populate(&self, bytes: Range<usize>) -> Result<()> {
        let at = at(self.address + bytes.start);
        // SAFETY: populating changes no byte that can be read.
        let populated = unsafe { mm::madvise(at, bytes.len(), Advice::LinuxPopulateWrite) };
        populated.inspect_err(|_| {
            let _ = self.discard(bytes);
        })
    }

    /// Gives back what bytes of it hold; they are zeroes from then on.
    fn discard(&self, bytes: Range<usize>) -> Result<()> {
        debug_assert!(bytes.end <= self.length);
        // SAFETY: the range is of this mapping, which is atomic words that may be any number at any time: they only count for what
        // the state of their section says.
        unsafe { sys::discard(self.address + bytes.start, bytes.len()) }
    }

    /// All of it as zeroed entries.
    ///
    /// # Safety
    /// Zeroes are a `T`, of which every byte may change at any time. The slice is not used after the mapping's end.
    unsafe fn entries<T>(&self) -> &'static [T] {
        let count = self.length / size_of::<T>();
        // SAFETY: readable and writable memory of that length, aligned to a page; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance(self.address), count) }
    }
}

impl Mapped {
    /// For so many sections.
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
        let most = usize::try_from(RESERVE_MOST).unwrap_or(0) * needed(section);
        let reserve = Reserve {
            mapping: Mapping::new(most, c"jumbo-vmemmap-reserve")?,
            filled: 0,
            wanted: 0,
        };
        // SAFETY: zeroes are entries of both kinds, which are atomic words. The slices go with the mappings, in this value, which
        // lends them out for no longer than itself.
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

    /// Where it is: the section table, the descriptors, the reserve.
    pub(super) fn addresses(&self) -> [Range<u64>; 3] {
        let [sections, descriptors] = &self.mappings;
        let reserve = lock(&self.reserve).mapping.addresses();
        [sections.addresses(), descriptors.addresses(), reserve]
    }

    /// Holds memory for the descriptors of so many sections; says how many bytes there are.
    pub(super) fn hold(&self, sections: u64) -> Bytes {
        let mut reserve = lock(&self.reserve);
        let sections = usize::try_from(sections.min(RESERVE_MOST)).unwrap_or(0);
        reserve.wanted = sections * needed(self.section);
        let beyond = reserve.filled.saturating_sub(reserve.wanted);
        reserve.let_go(beyond);
        self.fill(&mut reserve);
        Bytes(reserve.filled as u64)
    }

    fn fill(&self, reserve: &mut Reserve) {
        let (filled, wanted) = (reserve.filled, reserve.wanted);
        if filled < wanted
            && let Some(_claim) = self.claim(needed(wanted - filled) + LEFT)
            && reserve.mapping.populate(filled..wanted).is_ok()
        {
            reserve.filled = wanted;
        }
    }

    fn claim(&self, bytes: usize) -> Option<Claim<'_>> {
        // A touch for which there was room a moment ago may be one too many now.
        self.room.remeasure();
        self.room.claim(bytes)
    }

    /// Room for so many bytes: what the cgroup has, else what the reserve has.
    fn claim_or_let_go(&self, bytes: usize) -> Option<Claim<'_>> {
        if let Some(claim) = self.claim(bytes + LEFT) {
            return Some(claim);
        }
        let mut reserve = lock(&self.reserve);
        reserve.let_go(bytes).then(|| self.claim(bytes)).flatten()
    }

    fn bytes_of(&self, sections: &Range<usize>) -> Range<usize> {
        sections.start * self.section..sections.end * self.section
    }
}

impl Reserve {
    /// Gives so many bytes back to the kernel; false where it has less than that.
    fn let_go(&mut self, bytes: usize) -> bool {
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

/// What `bytes` of descriptors take with their page tables: one of each level, and one for each 2 MiB (with 4 KiB base pages).
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
        let claim = self.claim_or_let_go(needed(bytes.len()));
        let Some(_claim) = claim else {
            return Err(error("a look at the limits")(Errno::NOMEM));
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
        if times < SPINS {
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
