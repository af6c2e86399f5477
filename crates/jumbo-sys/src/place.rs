//! Mappings that replace nothing: [`map_at`], [`reserve`], [`map_own`]; and [`unmap`].

use core::ffi::c_void;
use core::ops::Range;
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::{Errno, Result};
use rustix::mm::{self, MapFlags, ProtFlags};

/// Addresses of jumbo's own tables and stacks. The kernel would choose some just below the
/// program's mappings, where a stack of the program may be about to grow (MAP_GROWSDOWN).
pub const OWN: Range<usize> = 0x2f60_0000_0000..0x2f80_0000_0000;
/// Addresses of the slabs (`jumbo_inside::slab`), and of their headers.
pub const SLABS: Range<usize> = 0x3000_0000_0000..0x3400_0000_0000;
static NEXT_OWN: AtomicUsize = AtomicUsize::new(OWN.start);

/// Sets the address of the first own mapping, by a random number.
pub fn place_own(random: usize) {
    const MIB: usize = 1 << 20;
    // Not at the start of a huge page: with THP set to always, small tables would get one.
    let offset = random % (OWN.len() / 2) / (2 * MIB) * (2 * MIB) + MIB;
    let start = OWN.start + offset;
    NEXT_OWN.store(start + RESERVED_BYTES, Ordering::Relaxed);
    if reserve(start, RESERVED_BYTES).is_ok() {
        RESERVED.store(start, Ordering::Relaxed);
    }
}

/// Start of the reserved part of [`OWN`]; 0 without one. So the program finds no address free that a
/// later table takes (MAP_FIXED_NOREPLACE).
static RESERVED: AtomicUsize = AtomicUsize::new(0);
/// Used bytes of the reserved part.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Small: mlockall(2) counts it against RLIMIT_MEMLOCK.
const RESERVED_BYTES: usize = 256 << 10;

/// Takes `length` bytes of the reserved part; `None` if they do not fit.
fn take_reserved(length: usize) -> Option<usize> {
    let start = RESERVED.load(Ordering::Relaxed);
    let fits = |used: usize| {
        used.checked_add(length)
            .filter(|end| *end <= RESERVED_BYTES)
    };
    let relaxed = Ordering::Relaxed;
    let offset = (start != 0).then(|| USED.fetch_update(relaxed, relaxed, fits));
    offset?.ok().map(|offset| start + offset)
}

/// Returns an address for jumbo's next own mapping: a hint, maybe in use. Null: the kernel is to
/// choose.
fn own_hint(length: usize) -> *mut c_void {
    if length > OWN.len() / 2 {
        return core::ptr::null_mut();
    }
    // Contiguous, so that they are one mapping.
    let at = NEXT_OWN.fetch_add(length, Ordering::Relaxed);
    with_exposed_provenance_mut(if at + length <= OWN.end { at } else { 0 })
}

/// Maps anonymous memory among jumbo's [own](OWN) addresses, or else at the kernel's choice.
/// `flags`: MAP_PRIVATE or MAP_SHARED, and others but MAP_FIXED.
///
/// # Errors
/// Those of mmap(2).
#[expect(unsafe_code, reason = "takes an address")]
pub fn map_own(length: usize, prot: ProtFlags, flags: MapFlags) -> Result<*mut c_void> {
    let pages = length.checked_next_multiple_of(rustix::param::page_size());
    let pages = pages.ok_or(Errno::NOMEM)?;
    let flags = flags.difference(MapFlags::FIXED);
    let (at, flags) = match take_reserved(pages) {
        Some(at) => (with_exposed_provenance_mut(at), flags | MapFlags::FIXED),
        None => (own_hint(pages), flags),
    };
    // SAFETY: a hint replaces no mapping; in the reservation, each address is given once.
    unsafe { mm::mmap_anonymous(at, length, prot, flags) }
}

/// Maps private anonymous memory at the free `address`. `flags` are added to MAP_PRIVATE,
/// MAP_ANONYMOUS and MAP_FIXED_NOREPLACE.
///
/// # References
/// MAP_FIXED_NOREPLACE: mmap(2), Linux 4.17. Older kernels treat the address as a hint, so the
/// result is compared.
///
/// # Errors
/// EEXIST: the range is not free; those of mmap(2).
#[expect(unsafe_code, reason = "takes an address")]
pub fn map_at(address: usize, length: usize, prot: ProtFlags, flags: MapFlags) -> Result<()> {
    let flags = flags | MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    let at = with_exposed_provenance_mut(address);
    // SAFETY: MAP_FIXED_NOREPLACE never replaces a mapping.
    let mapped = unsafe { mm::mmap_anonymous(at, length, prot, flags)? };
    if mapped.addr() == address {
        return Ok(());
    }
    // SAFETY: a new mapping, elsewhere, whose address no other code knows.
    let _ = unsafe { unmap(mapped.expose_provenance(), length) };
    Err(Errno::EXIST)
}

/// Reserves `length` bytes of address space at `address`, without memory, and for no core dump:
/// gcore(1) writes what has no access, too.
///
/// # Errors
/// As [`map_at`].
#[expect(unsafe_code, reason = "advises memory")]
pub fn reserve(address: usize, length: usize) -> Result<()> {
    map_at(address, length, ProtFlags::empty(), MapFlags::NORESERVE)?;
    // SAFETY: mapped above, without content.
    let _ = unsafe { super::advise(address, length, libc::MADV_DONTDUMP) };
    Ok(())
}

/// Maps private zero memory over other memory: without its content and advice.
///
/// # Errors
/// Those of mmap(2).
///
/// # Safety
/// The caller owns the range, and nothing needs its content.
#[expect(unsafe_code, reason = "replaces memory")]
pub unsafe fn map_anew(address: usize, length: usize) -> Result<()> {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let at = with_exposed_provenance_mut(address);
    // SAFETY: the caller's promise.
    unsafe { mm::mmap_anonymous(at, length, prot, flags | MapFlags::FIXED).map(drop) }
}

/// Reserves `length` bytes of address space where the kernel chooses, without memory.
///
/// # Errors
/// Those of mmap(2).
#[expect(unsafe_code, reason = "takes an address")]
pub fn reserve_anywhere(length: usize) -> Result<usize> {
    let (prot, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: at an address of the kernel's choice, which replaces no mapping.
    let start = unsafe { mm::mmap_anonymous(core::ptr::null_mut(), length, prot, flags)? };
    Ok(start.expose_provenance())
}

/// munmap(2).
///
/// # Errors
/// Those of munmap(2).
///
/// # Safety
/// The caller owns the range, and nothing uses its memory.
#[expect(unsafe_code, reason = "invalidates pointers")]
pub unsafe fn unmap(address: usize, length: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { mm::munmap(with_exposed_provenance_mut(address), length) }
}
