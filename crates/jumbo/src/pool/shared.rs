//! Pages side by side, for several processes: [`SharedRegion`], and [`Mapped`] on the other side.
//!
//! The pages are a file of their own, so that its descriptor gives away these pages and no others of the
//! pool; in the pool's books they are pages like any others (`claim`). The kernel's reservation is the file's
//! (of hugetlb), so it goes with the descriptor.

use std::ffi::CStr;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU8;

use rustix::fs::SealFlags;
use rustix::io::Errno;

use super::claim::Claim;
use super::error::{SetupError, SourceError};
use super::window::OwnedRange;
use super::{Error, Pool, Populate, source};
use crate::units::{Bytes, NodeId, Pages};

/// The file keeps its length for good.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Pages in a file that other processes can map.
///
/// While it lives the pool counts its pages: as reserved until they are populated, as used from then on.
#[derive(Debug)]
pub struct SharedRegion<'p> {
    // Before the claim: the kernel must have this memory back when the pool asks for its own again.
    mapped: Mapped,
    populated: Box<[bool]>,
    claim: Claim<'p>,
}

/// A shared region in a process that was handed its descriptor.
#[derive(Debug)]
pub struct Mapped {
    file: OwnedFd,
    mapping: OwnedRange,
    length: usize,
    page: usize,
}

impl Pool {
    /// Makes a region of `pages` zeroed pages in a file that is called `name` in /proc/PID/maps.
    ///
    /// The pages come out of the pool by the rules of [`Pool::reserve`]. With a source that cannot reserve ([`super::Thp`])
    /// they are populated up front in any case.
    ///
    /// # Errors
    /// As [`Pool::reserve`]; nothing has changed then but that free pages which the kernel did not give back to the
    /// pool are missing from its total.
    pub fn shared_region(
        &self,
        name: &CStr,
        pages: Pages,
        populate: Populate,
    ) -> Result<SharedRegion<'_>, Error> {
        let (mapping, length) = self.addresses(pages)?;
        let (file, claim) = self.claim(pages, || {
            let file = self.source.open(name, &mapping, length)?;
            // No process can cut the file short under those that have it mapped, which would kill them.
            rustix::fs::fcntl_add_seals(&file, SEALS).map_err(|errno| SourceError {
                node: NodeId(0),
                operation: "F_ADD_SEALS",
                errno,
                why: "a kernel before Linux 4.16",
            })?;
            self.bind(&mapping, length)?;
            Ok(file)
        })?;
        let mut region = SharedRegion {
            mapped: Mapped {
                file,
                mapping,
                length,
                page: self.source.window().page(),
            },
            populated: (0..pages.0).map(|_| false).collect(),
            claim,
        };
        if populate == Populate::UpFront || !self.source.promises() {
            for at in 0..region.populated.len() {
                region.populate(at)?;
            }
        }
        Ok(region)
    }
}

impl SharedRegion<'_> {
    /// How many pages it has.
    pub fn pages(&self) -> Pages {
        Pages(self.populated.len() as u64)
    }

    /// The region's descriptor, to be handed to another process ([`Mapped::of`] there).
    ///
    /// # Safety
    /// No holder of the file punches a hole into it (FALLOC_FL_PUNCH_HOLE of fallocate(2)) while bytes of the region are
    /// lent out: an access to a huge page that the pool can no longer provide ends the process by SIGBUS.
    #[expect(unsafe_code, reason = "states the holder's promise")]
    pub unsafe fn file(&self) -> BorrowedFd<'_> {
        self.mapped.file.as_fd()
    }

    /// The bytes of page `at`, which is populated where it was not.
    ///
    /// # Errors
    /// [`Error::Source`]: a cgroup's limit; there is no such page in the region.
    pub fn page(&mut self, at: usize) -> Result<&[AtomicU8], Error> {
        self.populate(at)?;
        let page = self.mapped.page;
        Ok(self.mapped.resident(at * page, page))
    }

    fn populate(&mut self, at: usize) -> Result<(), Error> {
        let Some(populated) = self.populated.get_mut(at) else {
            return Err(Error::Source(SourceError {
                node: NodeId(0),
                operation: "page",
                errno: Errno::INVAL,
                why: "there is no such page in the region",
            }));
        };
        if !*populated {
            let slot = source::Slot {
                mapping: &self.mapped.mapping,
                offset: at * self.mapped.page,
            };
            self.claim.pool.source.touch(&slot)?;
            *populated = true;
            self.claim.use_one();
        }
        Ok(())
    }
}

impl Mapped {
    /// Maps a region whose descriptor this process was handed.
    ///
    /// # Safety
    /// As for [`SharedRegion::file`]: no holder of the file punches a hole into it while bytes are lent out.
    ///
    /// # Errors
    /// [`SetupError::Size`] where the file is none that a [`SharedRegion`] makes: it could be cut short under the
    /// mapping; [`SetupError::Call`] where it cannot be mapped.
    #[expect(unsafe_code, reason = "states the holder's promise")]
    pub unsafe fn of(file: OwnedFd) -> Result<Self, SetupError> {
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(SetupError::call("F_GET_SEALS"))?;
        if !seals.contains(SEALS) {
            return Err(SetupError::Size("the file is not sealed".to_owned()));
        }
        let stat = rustix::fs::fstat(&file).map_err(SetupError::call("fstat"))?;
        let length = usize::try_from(stat.st_size).unwrap_or(0);
        let page = usize::try_from(stat.st_blksize)
            .unwrap_or(0)
            .max(rustix::param::page_size());
        if length == 0 || !length.is_multiple_of(page) {
            return Err(SetupError::Size(format!("a region of {length} bytes")));
        }
        // Huge pages of shared memory want to be aligned as they are in the file; the length tells to what.
        let align = 1 << length.trailing_zeros().min(30);
        let mapping =
            OwnedRange::reserve(length, align).map_err(SetupError::call("mmap of addresses"))?;
        mapping
            .map_part(0, length, file.as_fd(), 0)
            .map_err(SetupError::call("mmap of a shared region"))?;
        Ok(Self {
            file,
            mapping,
            length,
            page,
        })
    }

    /// Its length.
    pub fn length(&self) -> Bytes {
        Bytes(self.length as u64)
    }

    /// Its bytes in `range`, made resident where they were not. Other processes may change them at any time.
    ///
    /// # Errors
    /// [`SourceError`]: a cgroup's limit, where a touch would have killed; the range is not in the region.
    pub fn bytes(&self, range: Range<usize>) -> Result<&[AtomicU8], SourceError> {
        let error = |errno| SourceError {
            node: NodeId(0),
            operation: "MADV_POPULATE_WRITE",
            errno,
            why: "the range is not in the region, or a cgroup's hugetlb limit is used up",
        };
        if range.start > range.end || range.end > self.length {
            return Err(error(Errno::INVAL));
        }
        let first = range.start / self.page * self.page;
        let length = range.end.next_multiple_of(self.page) - first;
        let populated = self.mapping.populate(first, length, self.page);
        populated.map_err(error)?;
        Ok(self.resident(range.start, range.len()))
    }

    #[expect(unsafe_code, reason = "references into the mapping of a shared file")]
    fn resident(&self, offset: usize, length: usize) -> &[AtomicU8] {
        // SAFETY: the part was populated, the file is sealed against shrinking, and the mapping lives as long
        // as this value; what other processes write there is what atomics are for.
        unsafe { self.mapping.shared_bytes(offset, length) }
    }
}
