//! Anonymous shared memory on huge pages: [`Region`], with a policy for one program.
//!
//! The kernel's controls for shared memory apply to all programs of a host, and most hosts have
//! them off. A region gets huge pages by the best available method ([`Rung`]), without a change to
//! the host, and reports that method and the reasons against better ones ([`Standing`]).
//!
//! It is a memfd, mapped at fixed addresses. Children of fork(2) and other processes with its file
//! share it, so its bytes are lent as atomics.
//!
//! - `attach`: the region of another process. `ladder`: methods. `collapse`: touch and collapse. `file`: the memfd. `memory`: the addresses.
//! - [`policy`]: the sizes that the kernel's controls allow.
//!
//! Invariant: each byte of a region is mapped, and in the file; a byte that was not written since
//! the region grew over it, or since a hole was punched there, is zero.
//!
//! ```
//! use jumbo::shmem::{Blocks, Region};
//! use jumbo::units::Bytes;
//!
//! let region = Region::builder(Bytes(8 << 20)).build()?;
//! region.write(5, b"shared")?;
//! let collapsed = region.collapse(Blocks::Touched)?;
//! println!("{:?}: {collapsed:?}", region.standing());
//! let mut word = [0; 6];
//! region.read(5, &mut word)?;
//! assert_eq!(&word, b"shared");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attach;
mod builder;
mod collapse;
mod error;
mod file;
mod ladder;
mod memory;
pub mod policy;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Errno;

use crate::units::{Bytes, PageSize};
use jumbo_sys::files::{Root, base_page};
use jumbo_sys::thp::Thp;

pub use builder::Builder;
pub use collapse::{Blocks, Collapsed, Counts};
pub use error::Error;
pub use ladder::{Rung, Standing, Why};

use error::call;
use file::File;
use ladder::stand;
use memory::Addresses;
use policy::{Advice, Controls, Mapped};

/// Anonymous shared memory. Drop frees the memory that no other process has mapped.
#[derive(Debug)]
pub struct Region {
    root: Root,
    memory: Addresses,
    file: File,
    size: usize,
    capacity: usize,
    /// Unit of the file's length.
    unit: PageSize,
    pmd: PageSize,
    hugetlb: Option<PageSize>,
    sizes: Option<Vec<PageSize>>,
    up_to: Rung,
    refused: Vec<(Rung, Why)>,
    standing: Standing,
    sealed: bool,
    /// PMD-sized blocks with a punched hole.
    holes: BTreeSet<usize>,
    counts: Mutex<BTreeMap<PageSize, Counts>>,
}

impl Region {
    /// Returns a builder of a region of `size` bytes.
    pub fn builder(size: Bytes) -> Builder {
        Builder::new(size)
    }

    /// Reserves addresses and creates an empty file.
    fn reserve(
        builder: &Builder,
        root: &Root,
        unit: PageSize,
        pmd: PageSize,
        hugetlb: Option<PageSize>,
    ) -> Result<Self, Error> {
        let asked = builder.capacity.unwrap_or(builder.size);
        let file = File::new(hugetlb).map_err(call("memfd_create", asked.0))?;
        Self::over(file, builder, root, unit, pmd, hugetlb)
    }

    /// Reserves addresses for a file.
    fn over(
        file: File,
        builder: &Builder,
        root: &Root,
        unit: PageSize,
        pmd: PageSize,
        hugetlb: Option<PageSize>,
    ) -> Result<Self, Error> {
        let asked = builder.capacity.unwrap_or(builder.size);
        let huge = pmd.max(unit);
        let length = |bytes: Bytes| {
            let rounded = huge.align_up(bytes.0.max(1));
            rounded.and_then(|rounded| usize::try_from(rounded).ok())
        };
        let failed = call("mmap of addresses", asked.0);
        let lengths = length(asked).zip(length(Bytes(huge.bytes())));
        let (capacity, align) = lengths.ok_or_else(|| failed(Errno::NOMEM))?;
        Ok(Self {
            root: root.clone(),
            memory: Addresses::map(capacity, align, file.as_fd()).map_err(failed)?,
            file,
            size: 0,
            capacity: usize::try_from(asked.0).unwrap_or(capacity).min(capacity),
            unit,
            pmd,
            hugetlb,
            sizes: builder.sizes.clone(),
            up_to: builder.up_to,
            refused: Vec::new(),
            standing: Standing {
                rung: Rung::Base,
                sizes: Vec::new(),
                refused: Vec::new(),
            },
            sealed: false,
            holes: BTreeSet::new(),
            counts: Mutex::default(),
        })
    }

    /// Returns the size.
    pub fn size(&self) -> Bytes {
        Bytes(self.size as u64)
    }

    /// Returns the maximum size, for which it has addresses.
    pub fn capacity(&self) -> Bytes {
        Bytes(self.capacity as u64)
    }

    /// Returns the method in use, by the kernel's controls when the region last grew.
    pub fn standing(&self) -> &Standing {
        &self.standing
    }

    /// Returns the file, for another process to map.
    ///
    /// # Safety
    /// During the life of the region no holder of the file, in any process, truncates it (a seal
    /// prevents that: [`Region::seal`]), or on [`Rung::Hugetlb`] punches holes in it (no seal
    /// prevents that). A touch would cause SIGBUS: always beyond the end of the file, and in a hole
    /// of hugetlb without a free page.
    #[expect(unsafe_code, reason = "lends the file under mapped memory")]
    pub unsafe fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Grows the region by zeroes; its bytes do not move. On [`Rung::Hugetlb`] the new pages are
    /// populated when this returns. A size that is not larger changes nothing.
    ///
    /// On other rungs the first touch allocates a page, and a touch without memory kills the
    /// program: by the OOM killer, or by SIGBUS with `vm.overcommit_memory=2`, where the kernel
    /// charges such pages at the touch. Only [`Rung::Hugetlb`] returns an error instead.
    ///
    /// # Errors
    /// [`Error::Capacity`], [`Error::Sealed`], [`Error::Call`]; [`Error::NoPages`] on
    /// [`Rung::Hugetlb`].
    pub fn grow(&mut self, to: Bytes) -> Result<(), Error> {
        let before = self.size;
        let to = self.may_be(to)?;
        if to <= before {
            return Ok(());
        }
        if let Err(error) = self.grow_to(to) {
            // The size is unchanged; the file is truncated if possible.
            let _ = self.file.set_length(self.whole(before));
            return Err(error);
        }
        self.size = to;
        Ok(())
    }

    fn grow_to(&mut self, to: usize) -> Result<(), Error> {
        self.file
            .set_length(self.whole(to))
            .map_err(call("ftruncate", to as u64))?;
        self.back(to)
    }

    /// Backs the bytes up to `to`, which the file has.
    fn back(&mut self, to: usize) -> Result<(), Error> {
        match self.hugetlb {
            Some(size) => {
                let range = self.whole(self.size)..self.whole(to);
                let bytes = Bytes(range.len() as u64);
                let made = self.memory.populate(range, size);
                made.map_err(|errno| Error::NoPages { size, bytes, errno })?;
                self.count(size, bytes.whole_pages(size).0, 0, 0);
                let (rung, sizes) = (Rung::Hugetlb, vec![size]);
                self.standing = Standing {
                    rung,
                    sizes,
                    refused: self.refused.clone(),
                };
            }
            None => self.advise(to),
        }
        Ok(())
    }

    /// Selects the method for a region of `size` bytes, and gives its advice.
    fn advise(&mut self, size: usize) {
        let base = base_page(&self.root);
        let controls = match Thp::read_controls(&self.root) {
            Ok(Some(thp)) => {
                Controls::of(&thp, base).ok_or("a control that is not known".to_owned())
            }
            Ok(None) => Err("this kernel has no THP".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let range = self.memory.all();
        let mapped = Mapped {
            size: Bytes(size as u64),
            range: range.start as u64..range.end as u64,
            offset: 0,
            advice: Advice::None,
        };
        let sizes = self.sizes.as_deref();
        let controls = controls.as_ref().map_err(String::as_str);
        let refused = self.refused.clone();
        let (standing, advice) = stand(controls, &mapped, sizes, self.up_to, refused);
        self.standing = standing;
        // A kernel without THP refuses; `standing` reports that.
        let _ = self.memory.advise(advice);
    }

    /// Shrinks the region, and frees the rest. A touch of the rest kills other processes that have
    /// it mapped. A size that is not smaller changes nothing.
    ///
    /// # Errors
    /// [`Error::Sealed`], [`Error::Empty`]; [`Error::Call`], with EPERM and no change if another
    /// process has sealed the file. After any other error the rest may be zeroes.
    pub fn shrink(&mut self, to: Bytes) -> Result<(), Error> {
        let to = match to {
            Bytes(0) => return Err(Error::Empty),
            to => self.may_be(Bytes(to.0.min(self.size as u64)))?,
        };
        let cut = to..self.size;
        if cut.is_empty() {
            return Ok(());
        }
        let failed = |operation| call(operation, cut.len() as u64);
        let whole = self.whole(to);
        // Another process may have sealed the file: check before any byte is lost.
        if whole < self.whole(self.size) {
            self.file.may_cut().map_err(failed("ftruncate"))?;
        }
        // After any failure below, the blocks may have holes.
        let block = self.block();
        let has_hole = self.holes.contains(&(to / block));
        self.punched(&cut);
        // The rest of the last page would reappear after a grow.
        let rest = to..whole.min(self.size);
        if !rest.is_empty() {
            self.file.punch(rest).map_err(failed("fallocate"))?;
        }
        self.file.set_length(whole).map_err(failed("ftruncate"))?;
        self.size = to;
        // A later grow over the rest of the last block makes no hole.
        let end = if has_hole {
            to.div_ceil(block)
        } else {
            to / block
        };
        self.holes.retain(|block| *block < end);
        Ok(())
    }

    /// Frees the pages of a range, whose bytes become zeroes in all processes. Pages that are only
    /// partly in the range stay, with zeroes written; before Linux 5.19 a part of a hugetlb page
    /// keeps its bytes.
    ///
    /// # Errors
    /// [`Error::Beyond`]; [`Error::Call`], after which a part of the range may be zeroes.
    pub fn punch(&mut self, range: Range<usize>) -> Result<(), Error> {
        self.within(&range)?;
        if range.is_empty() {
            return Ok(());
        }
        let failed = call("fallocate", range.len() as u64);
        // First: after a failure a part of the range may have holes.
        self.punched(&range);
        self.file.punch(range).map_err(failed)
    }

    /// Records that blocks of a range may have holes.
    fn punched(&mut self, range: &Range<usize>) {
        let block = self.block();
        let blocks = range.start / block..range.end.div_ceil(block);
        self.holes.extend(blocks);
    }

    /// Seals the size for all processes with the file. They can still punch holes: a seal against
    /// that would forbid writes too.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn seal(&mut self) -> Result<(), Error> {
        if !self.sealed {
            self.file
                .seal()
                .map_err(call("F_ADD_SEALS", self.size as u64))?;
            self.sealed = true;
        }
        Ok(())
    }

    /// Returns the bytes of a range. Other threads and processes may change them at any time.
    ///
    /// # Errors
    /// [`Error::Beyond`]; [`Error::NoPages`] on [`Rung::Hugetlb`] for a punched hole without a free
    /// page.
    pub fn bytes(&self, range: Range<usize>) -> Result<&[AtomicU8], Error> {
        self.within(&range)?;
        if let Some(size) = self.hugetlb
            && let Some(pages) = self.may_lack(&range, size)
        {
            let bytes = Bytes(pages.len() as u64);
            let made = self.memory.populate(pages, size);
            made.map_err(|errno| Error::NoPages { size, bytes, errno })?;
        }
        #[expect(unsafe_code, reason = "lends the region's own memory")]
        // SAFETY: the range is mapped, and the file is long enough until the region shrinks: the
        // borrow excludes that here, and `file` for other holders. A touch allocates pages of
        // shared memory. Hugetlb pages are present: only `punch` and `shrink` free them, and they
        // are populated above.
        Ok(unsafe { self.memory.bytes(range) })
    }

    /// Returns the hugetlb pages of a range if some of them may be in a hole.
    fn may_lack(&self, range: &Range<usize>, size: PageSize) -> Option<Range<usize>> {
        let page = usize::try_from(size.bytes()).unwrap_or(usize::MAX);
        let pages = range.start / page * page..range.end.next_multiple_of(page);
        let blocks = pages.start / self.block()..pages.end.div_ceil(self.block());
        let has_hole = !range.is_empty() && self.holes.range(blocks).next().is_some();
        has_hole.then_some(pages)
    }

    /// Copies bytes at `at` into a buffer.
    ///
    /// # Errors
    /// Same as [`Region::bytes`].
    pub fn read(&self, at: usize, into: &mut [u8]) -> Result<(), Error> {
        let bytes = self.bytes(at..at.saturating_add(into.len()))?;
        for (to, from) in into.iter_mut().zip(bytes) {
            *to = from.load(Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies bytes of a buffer to `at`.
    ///
    /// # Errors
    /// Same as [`Region::bytes`].
    pub fn write(&self, at: usize, from: &[u8]) -> Result<(), Error> {
        let bytes = self.bytes(at..at.saturating_add(from.len()))?;
        for (to, from) in bytes.iter().zip(from) {
            to.store(*from, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Frees all memory now, even if other processes have it mapped: they then read zeroes. Drop
    /// leaves them their memory.
    ///
    /// # Errors
    /// [`Error::Call`]; the memory is still freed after the last process has unmapped it.
    pub fn free(self) -> Result<(), Error> {
        let failed = call("fallocate", self.size as u64);
        self.file.punch(0..self.whole(self.size)).map_err(failed)
    }

    fn within(&self, range: &Range<usize>) -> Result<(), Error> {
        match range.start <= range.end && range.end <= self.size {
            true => Ok(()),
            false => Err(Error::Beyond {
                range: range.clone(),
                size: self.size(),
            }),
        }
    }

    fn may_be(&self, to: Bytes) -> Result<usize, Error> {
        if self.sealed {
            return Err(Error::Sealed);
        }
        let fits = usize::try_from(to.0).ok().filter(|to| *to <= self.capacity);
        fits.ok_or(Error::Capacity {
            to,
            capacity: self.capacity(),
        })
    }

    /// Returns the length of the file for a region of `size` bytes.
    fn whole(&self, size: usize) -> usize {
        let unit = usize::try_from(self.unit.bytes()).unwrap_or(1);
        size.next_multiple_of(unit)
    }

    fn block(&self) -> usize {
        usize::try_from(self.pmd.bytes()).unwrap_or(usize::MAX)
    }
}
