//! Static arrays, as STREAM has them: a program whose bss they are ([`program`]), and they themselves from inside ([`arrays`]).

use std::fs::File;
use std::path::Path;
use std::ptr::with_exposed_provenance_mut;
use std::slice::from_raw_parts_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::smaps::Smaps;

use crate::Error;
use crate::elf::{HUGE, Segment, with_segment};

/// A copy of `executable` with so many bytes of bss more. It goes with this process.
pub(super) fn program(executable: &Path, size: Bytes) -> Result<File, Error> {
    let size = Bytes(size.0.next_multiple_of(HUGE));
    with_segment(executable, Segment::Zeroes(size), |_| Ok(()))
}

/// Those have been handed out.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The first `size` bytes of what [`program`] added to this one. To be asked once, and before there is any allocation as large.
pub(super) fn arrays(root: &Root, size: Bytes) -> Result<&'static mut [u8], Error> {
    let none = || Error::Corrupt("the program has no static arrays".to_owned());
    let maps = Smaps::read_maps(root, std::process::id())?;
    // The heap follows, in the same mapping where its address is not random.
    let mut bss = maps.mappings().filter(|mapping| {
        mapping.write && !mapping.execute && !mapping.shared && mapping.path.is_empty()
    });
    let bss = bss.find(|mapping| mapping.size() >= size && mapping.start.is_multiple_of(HUGE));
    let start = bss.ok_or_else(none)?.start;
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(none());
    }
    let (Ok(start), Ok(length)) = (usize::try_from(start), usize::try_from(size.0)) else {
        return Err(none());
    };
    // SAFETY: the program was made with a segment of at least as many zeroes, which can be read and written as long as it
    // runs and has no symbol: nothing in it names them. It was found by what it is: the mappings of programs lie below those that are
    // made later, and the caller has made none as large. `TAKEN` was not set, so no other reference to it was made.
    Ok(unsafe { from_raw_parts_mut(with_exposed_provenance_mut(start), length) })
}
