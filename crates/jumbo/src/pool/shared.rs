//! Pages side by side, for several processes: [`SharedRegion`], and [`Mapped`] on the other side.
//!
//! The pages are a file of their own, so that its descriptor gives away these pages and no others of the
//! pool. They replace as many pages in the pool's books: the kernel reserves the file's pages first, then the
//! free pages that they replace are given back, and at the end the other way round. The reservation is the
//! file's (of hugetlb), so it goes with the descriptor.

use std::ffi::CStr;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU8;

use rustix::fs::SealFlags;
use rustix::io::Errno;

use super::error::{SetupError, SourceError};
use super::frame::{Frame, List};
use super::gather::Exclusive;
use super::shard::lock;
use super::window::Mapping;
use super::{Error, NodeSet, Pool, Populate, source};
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
    pool: &'p Pool,
    /// The pages of the pool that it stands for, none of which has memory: those that count as reserved,
    promised: List,
    /// and those that count as used.
    used: List,
    mapped: Option<Mapped>,
    populated: Box<[bool]>,
}

/// A shared region in a process that was handed its descriptor.
#[derive(Debug)]
pub struct Mapped {
    file: OwnedFd,
    mapping: Mapping,
    length: usize,
    page: usize,
}

/// The places that a region stands for.
struct Claim {
    /// With memory, which is to be given back.
    free: List,
    /// Without.
    surplus: List,
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
        self.check_here()?;
        let (mapping, length) = self.addresses(pages)?;
        let mut claim = self.claim(pages.0)?;
        let mut released = List::new();
        // The free pages stay until the file has its own, so that nobody takes them away in between; but where
        // there is no room for both they go first.
        let file = match self.source.open(name, &mapping, length) {
            Err(_) if claim.free.len() > 0 => {
                self.release_all(&mut claim.free, &mut released);
                self.source.open(name, &mapping, length)
            }
            opened => opened,
        };
        self.release_all(&mut claim.free, &mut released);
        released.move_to(&mut claim.surplus, pages.0, &self.links);
        let mut region = SharedRegion {
            pool: self,
            promised: claim.surplus,
            used: List::new(),
            mapped: None,
            populated: (0..pages.0).map(|_| false).collect(),
        };
        let page = self.source.window().page();
        region.mapped = Some(Mapped {
            file: file.map_err(Error::Source)?,
            mapping,
            length,
            page,
        });
        region.seal();
        if populate == Populate::UpFront || !self.source.promises() {
            for at in 0..region.populated.len() {
                region.populate(at)?;
            }
        }
        Ok(region)
    }

    /// Takes pages out of the books for a region: free ones, and places for surplus ones.
    fn claim(&self, wanted: u64) -> Result<Claim, Error> {
        let allowed = self.placement.allowed().and(self.nodes());
        let mut claim = Claim {
            free: List::new(),
            surplus: List::new(),
        };
        let mut all = self.exclusive();
        all.gather_caches();
        let free = all.state.listed(allowed);
        let shortage = wanted.saturating_sub(free);
        let surplus = all.state.surplus(NodeSet::ALL) + all.state.pending;
        if surplus.saturating_add(shortage) > all.state.overcommit && shortage > 0 {
            let held = self.held(NodeSet::ALL);
            return Err(Error::Exhausted(all.state.exhausted(wanted, held, allowed)));
        }
        for _ in 0..shortage {
            match self.claim_hole(&mut all) {
                Some(frame) => claim.surplus.push(&self.links, frame),
                None => {
                    while let Some(frame) = claim.surplus.pop(&self.links) {
                        all.state.push_hole(frame, &self.links);
                    }
                    return Err(Error::Window {
                        capacity: self.source.window().capacity(),
                    });
                }
            }
        }
        for _ in 0..wanted - shortage {
            if let Some(frame) = all.state.pop_placed(self.placement, &self.links) {
                self.hold(frame.node());
                claim.free.push(&self.links, frame);
            }
        }
        let mut counted = List::new();
        while let Some(frame) = claim.surplus.pop(&self.links) {
            all.state.join_surplus(frame.node());
            self.hold(frame.node());
            counted.push(&self.links, frame);
        }
        claim.surplus = counted;
        all.close_caches();
        Ok(claim)
    }

    fn claim_hole(&self, all: &mut Exclusive<'_>) -> Option<Frame> {
        let mut nodes = self.placement.tiers(self.nodes()).into_iter();
        nodes.find_map(|tier| {
            let mut tier = tier.iter();
            tier.find_map(|node| all.state.pop_hole(node, &self.links))
        })
    }

    fn release_all(&self, frames: &mut List, released: &mut List) {
        while let Some(frame) = frames.pop(&self.links) {
            self.source.release(&frame);
            released.push(&self.links, frame);
        }
    }

    /// Takes back a place without memory: it goes where its node has surplus, else it is populated again.
    fn restore(&self, frame: Frame, promised: bool) {
        let mut state = lock(&self.state);
        if promised {
            self.unhold(frame.node());
        }
        if state.node(frame.node()).surplus > 0 {
            state.lose(frame, &self.links);
            return;
        }
        drop(state);
        match self.source.populate(&frame) {
            Ok(()) => self.give_frame(frame),
            Err(_) => lock(&self.state).lose(frame, &self.links),
        }
    }
}

impl SharedRegion<'_> {
    /// How many pages it has.
    pub fn pages(&self) -> Pages {
        Pages(self.populated.len() as u64)
    }

    /// Its descriptor, to be handed to another process ([`Mapped::of`] there).
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.mapped.as_ref().map(|mapped| mapped.file.as_fd())
    }

    /// The bytes of page `at`, which is populated where it was not.
    ///
    /// # Errors
    /// [`Error::Source`]: a cgroup's limit; there is no such page in the region.
    pub fn page(&mut self, at: usize) -> Result<&[AtomicU8], Error> {
        self.populate(at)?;
        match &self.mapped {
            Some(mapped) => Ok(mapped.resident(at * mapped.page, mapped.page)),
            None => Ok(&[]),
        }
    }

    fn populate(&mut self, at: usize) -> Result<(), Error> {
        let Some(mapped) = &self.mapped else {
            return Ok(());
        };
        match self.populated.get(at) {
            Some(false) => {}
            Some(true) => return Ok(()),
            None => {
                return Err(Error::Source(SourceError {
                    node: NodeId(0),
                    operation: "page",
                    errno: Errno::INVAL,
                    why: "there is no such page in the region",
                }));
            }
        }
        let place = source::Slot {
            mapping: &mapped.mapping,
            offset: at * mapped.page,
        };
        self.pool.source.touch(&place).map_err(Error::Source)?;
        self.populated[at] = true;
        // Which of them it is does not matter: they are all alike, and without memory.
        if let Some(frame) = self.promised.pop(&self.pool.links) {
            self.pool.unhold(frame.node());
            self.used.push(&self.pool.links, frame);
        }
        Ok(())
    }

    /// Nobody can cut the file short under those who have it mapped, which would kill them.
    fn seal(&self) {
        if let Some(mapped) = &self.mapped {
            let _ = rustix::fs::fcntl_add_seals(&mapped.file, SEALS);
        }
    }
}

impl Drop for SharedRegion<'_> {
    fn drop(&mut self) {
        // First its memory, so that the kernel has the pages that are wanted in its stead.
        drop(self.mapped.take());
        while let Some(frame) = self.promised.pop(&self.pool.links) {
            self.pool.restore(frame, true);
        }
        while let Some(frame) = self.used.pop(&self.pool.links) {
            self.pool.restore(frame, false);
        }
    }
}

impl Mapped {
    /// Maps a region whose descriptor this process was handed.
    ///
    /// # Errors
    /// [`SetupError::Size`] where the file is none that a [`SharedRegion`] makes: it could be cut short under the
    /// mapping; [`SetupError::Call`] where it cannot be mapped.
    pub fn of(file: OwnedFd) -> Result<Self, SetupError> {
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
            Mapping::reserve(length, align).map_err(SetupError::call("mmap of addresses"))?;
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
        let populated = self
            .mapping
            .populate(first, range.end.next_multiple_of(self.page) - first);
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
