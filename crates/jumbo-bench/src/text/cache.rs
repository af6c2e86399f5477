//! What the page cache has of a file: [`discard`], [`prime`].

use std::fs::File;
use std::ptr::null_mut;

use jumbo::kernel::Root;
use jumbo::kernel::smaps::Smaps;
use jumbo::units::Bytes;
use rustix::fs::{Advice, fadvise};
use rustix::mm::{self, MapFlags, ProtFlags};

use super::program::HUGE;
use crate::Error;

/// Empties the page cache of a file whose pages are on the disk, and that no process maps.
pub(super) fn discard(file: &File) -> Result<(), Error> {
    Ok(fadvise(file, 0, None, Advice::DontNeed)?)
}

/// Reads a part of a file that is not in the page cache into huge folios, and says how much of it is in such then. `offset` is
/// a multiple of their size.
pub(super) fn prime(file: &File, offset: u64, size: Bytes) -> Result<Bytes, Error> {
    let map = |errno: rustix::io::Errno| Error::Map(errno.into());
    let length = usize::try_from(size.0).unwrap_or(usize::MAX);
    let huge = usize::try_from(HUGE).unwrap_or(usize::MAX);
    let (none, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping at an address of the kernel's choice disturbs no other memory.
    let wide =
        unsafe { mm::mmap_anonymous(null_mut(), length + huge, none, flags) }.map_err(map)?;
    // SAFETY: the mapping is larger by as much as this may be.
    let start = unsafe { wide.byte_add(wide.addr().wrapping_neg() % huge) };
    let (read, flags) = (ProtFlags::READ, MapFlags::PRIVATE | MapFlags::FIXED);
    // SAFETY: it takes the place of a part of the mapping above, of which no other code knows.
    let mapped = unsafe { mm::mmap(start, length, read, flags, file, offset) }.and_then(|_| {
        // SAFETY: advice changes no byte.
        unsafe { mm::madvise(start, length, mm::Advice::LinuxHugepage) }
    });
    let primed = mapped.map_err(map).and_then(|()| {
        for at in (0..length).step_by(huge) {
            // SAFETY: it is mapped to be read. Volatile, because nothing uses what is read.
            unsafe { start.byte_add(at).cast::<u8>().read_volatile() };
        }
        let smaps = Smaps::read(&Root::host(), std::process::id())?;
        let mut mappings = smaps.mappings();
        let this = mappings.find(|mapping| mapping.start == start.addr() as u64);
        Ok(this.map_or(Bytes(0), |mapping| mapping.file_pmd_mapped))
    });
    // SAFETY: the range was mapped above, and no other code knows of it.
    unsafe { mm::munmap(wide, length + huge) }.map_err(map)?;
    primed
}
