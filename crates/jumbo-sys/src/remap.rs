//! Moves of page tables: [`move_mapping`], or [`move_units`] for a range of several mappings;
//! [`insist`].

use core::ptr::with_exposed_provenance_mut;

use rustix::io::Result;
use rustix::mm::{self, MremapFlags};

/// `mremap(from, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to)`: moves the pages at `from` to
/// `to`.
///
/// # References
/// mremap(2). Whole page tables move if both addresses have the same offset in the range that a
/// table maps (Linux 5.10: a PMD, and on x86-64 and arm64 a PUD).
///
/// # Errors
/// EFAULT: several mappings (before Linux 6.17), or none; ENOMEM: too many mappings
/// (vm.max_map_count) or no memory for page tables; EPERM: sealed (mseal(2)); EINVAL: a mapping
/// that cannot move. A single mapping has not moved then; of several, Linux 6.17 and later may have
/// moved some. `to` may be unmapped in any case.
///
/// # Safety
/// The caller owns the mapping at `from`, and discards the memory at `to`.
#[expect(unsafe_code, reason = "invalidates pointers")]
pub unsafe fn move_mapping(from: usize, to: usize, length: usize) -> Result<()> {
    let at = with_exposed_provenance_mut;
    let flags = MremapFlags::MAYMOVE;
    // SAFETY: the caller's promise.
    unsafe { mm::mremap_fixed(at(from), length, length, flags, at(to)).map(drop) }
}

/// Variant of [`move_mapping`] that moves unit by unit, up to each multiple of `unit`: for a range
/// of mappings that meet only there. It reads no list of mappings, and a failure moves nothing.
/// `keeps`: empty mappings stay at `from` (MREMAP_DONTUNMAP, Linux 5.7).
///
/// # Errors
/// The error of the first unit that fails. The earlier units move back. Only a lack of memory for
/// page tables can prevent that (see [`insist`]); the program gets SIGSEGV there then.
///
/// # Safety
/// As for [`move_mapping`]; and no thread maps memory in the range meanwhile.
#[expect(unsafe_code, reason = "as above")]
pub unsafe fn move_units(
    from: usize,
    to: usize,
    length: usize,
    unit: usize,
    keeps: bool,
) -> Result<()> {
    let kept = if keeps {
        MremapFlags::DONTUNMAP
    } else {
        MremapFlags::empty()
    };
    let move_out = |from: usize, to: usize, length: usize| {
        let (at, flags) = (with_exposed_provenance_mut, MremapFlags::MAYMOVE | kept);
        // SAFETY: the caller's promise, for a part of the range.
        unsafe { mm::mremap_fixed(at(from), length, length, flags, at(to)).map(drop) }
    };
    let rest =
        |moved: usize| ((from + moved + 1).next_multiple_of(unit) - from).min(length) - moved;
    let mut moved = 0;
    while moved < length {
        let answer = move_out(from + moved, to + moved, rest(moved));
        if answer.is_err() {
            let end = moved;
            moved = 0;
            while moved < end {
                let (at, length) = (moved, rest(moved));
                // SAFETY: the unit came from there.
                let _ = insist(|| unsafe { move_mapping(to + at, from + at, length) });
                moved += length;
            }
            return answer;
        }
        moved += rest(moved);
    }
    Ok(())
}

/// Repeats a call until it succeeds, each millisecond for 10 s. For calls whose failure leaves a
/// hole in the program's memory, and that fail only while the kernel lacks memory for its own data.
///
/// # Errors
/// The error of the last call.
pub fn insist(call: impl Fn() -> Result<()>) -> Result<()> {
    const MAX_RETRIES: u32 = 10_000;
    let interval = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    let mut answer = call();
    for _ in 0..MAX_RETRIES {
        if answer.is_ok() {
            break;
        }
        let _ = rustix::thread::nanosleep(&interval);
        answer = call();
    }
    answer
}

/// Reports whether a page is mapped, by msync(2) with MS_ASYNC: since Linux 2.6.19 it writes
/// nothing and only checks the mapping.
#[expect(unsafe_code, reason = "takes an address")]
pub fn is_mapped(address: usize) -> bool {
    let (flags, page) = (mm::MsyncFlags::ASYNC, rustix::param::page_size());
    // SAFETY: the call reads and writes no memory.
    unsafe { mm::msync(with_exposed_provenance_mut(address), page, flags) }.is_ok()
}
