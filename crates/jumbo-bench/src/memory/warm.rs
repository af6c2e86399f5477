//! Memory touched before it is measured: [`warm`].

use std::io;
use std::ptr::null_mut;

use jumbo::units::Bytes;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Touches `bytes` of memory and gives them back, so that the host of a virtual machine has pages behind them.
///
/// It is done right before each sample: with free page reporting the kernel hands free memory back to the host within
/// seconds, and the first touch after that waits for the host, up to a hundred times as long as for a fault.
pub(crate) fn warm(bytes: Bytes) -> io::Result<()> {
    let length = usize::try_from(bytes.0).map_err(io::Error::other)?;
    let (rw, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new anonymous mapping, of which nobody else knows, is touched and unmapped.
    unsafe {
        let start = mmap_anonymous(null_mut(), length, rw, private)?;
        // Huge pages are touched sooner. A kernel without them answers EINVAL, and its base pages do as well.
        let _ = madvise(start, length, Advice::LinuxHugepage);
        let touched = madvise(start, length, Advice::LinuxPopulateWrite);
        munmap(start, length)?;
        Ok(touched?)
    }
}
