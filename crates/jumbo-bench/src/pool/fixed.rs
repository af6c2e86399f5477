//! Static arrays, as in STREAM: a program with large bss ([`program`]), and access to that bss from
//! inside ([`arrays`]).

use std::fs::File;
use std::path::Path;
use std::ptr::with_exposed_provenance_mut;
use std::slice::from_raw_parts_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::smaps::Smaps;

use crate::Error;
use crate::elf::{AddedSegment, HUGE_PAGE, with_segment};

/// Copies `executable` with so many bytes of bss added.
pub(super) fn program(executable: &Path, size: Bytes) -> Result<File, Error> {
    let size = Bytes(size.0.next_multiple_of(HUGE_PAGE));
    with_segment(executable, AddedSegment::Zeroes(size), |_| Ok(()))
}

/// Set once the arrays have been borrowed.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The first `size` bytes of the bss that [`program`] added to this executable. To be called once,
/// before any allocation of that size.
pub(super) fn arrays(size: Bytes) -> Result<&'static mut [u8], Error> {
    let none = || Error::Corrupt("the program lacks its static arrays".to_owned());
    let maps = Smaps::read_maps(&Root::host(), std::process::id())?;
    // The heap may follow in the same mapping, if its address is not random.
    let mut bss = maps.mappings().filter(|mapping| {
        mapping.write && !mapping.execute && !mapping.shared && mapping.path.is_empty()
    });
    let bss = bss.find(|mapping| mapping.size() >= size && mapping.start.is_multiple_of(HUGE_PAGE));
    let start = bss.ok_or_else(none)?.start;
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(none());
    }
    let (Ok(start), Ok(length)) = (usize::try_from(start), usize::try_from(size.0)) else {
        return Err(none());
    };
    // SAFETY: the program was built with a writable segment of at least `length` zeroes, which
    // exists for the program's lifetime and has no symbol. It is the first mapping of its kind and
    // size: a program is mapped below later mappings, and the caller has made none of that size.
    // `TAKEN` was not set, so no other reference exists.
    Ok(unsafe { from_raw_parts_mut(with_exposed_provenance_mut(start), length) })
}
