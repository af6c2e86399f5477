//! Moving a mapping by its page tables: whole, or in units where it may be several to the kernel. Having a call succeed.

use core::ptr::with_exposed_provenance_mut;

use rustix::io::Result;
use rustix::mm::{self, MremapFlags};

/// `mremap(from, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to)`: the pages at `from` are at `to`
/// afterwards, and nothing is at `from`.
///
/// # References
/// mremap(2). Page tables move whole where both addresses are alike modulo what they map (Linux 5.10: a
/// PMD, and on x86-64 and arm64 a PUD).
///
/// # Errors
/// EFAULT: not one mapping (before Linux 6.17), or nothing mapped there; ENOMEM: too many mappings
/// (vm.max_map_count) or no memory for page tables; EPERM: sealed (mseal(2)); EINVAL: a mapping that
/// cannot move. Nothing has moved then of what is one mapping; of several, Linux may have moved some since 6.17. `to` may
/// have been unmapped in any case.
///
/// # Safety
/// The mapping at `from` is the caller's to move, and what is at `to` the caller's to lose.
#[expect(unsafe_code, reason = "moves memory away from under its pointers")]
pub unsafe fn move_mapping(from: usize, to: usize, length: usize) -> Result<()> {
    let at = with_exposed_provenance_mut;
    let flags = MremapFlags::MAYMOVE;
    // SAFETY: the caller's promise.
    unsafe { mm::mremap_fixed(at(from), length, length, flags, at(to)).map(drop) }
}

/// As [`move_mapping`], one unit after the other, which end at multiples of `unit`: of a range that may be several mappings
/// which meet at such addresses. So no file is read, and what is refused has not moved.
///
/// # Errors
/// That of the first unit that is refused. Those in front of it are back then. If they cannot be put back, which only a lack
/// of memory for page tables can keep them from, the program ends by SIGSEGV where it needs them: see [`insist`].
///
/// # Safety
/// As for [`move_mapping`]; and no thread maps anything in the range meanwhile.
#[expect(unsafe_code, reason = "as above")]
pub unsafe fn move_units(from: usize, to: usize, length: usize, unit: usize) -> Result<()> {
    let rest =
        |moved: usize| ((from + moved + 1).next_multiple_of(unit) - from).min(length) - moved;
    let mut moved = 0;
    while moved < length {
        // SAFETY: the caller's promise, for a part of the range.
        let answer = unsafe { move_mapping(from + moved, to + moved, rest(moved)) };
        if answer.is_err() {
            let end = moved;
            moved = 0;
            while moved < end {
                let (at, length) = (moved, rest(moved));
                // SAFETY: it came from there.
                let _ = insist(|| unsafe { move_mapping(to + at, from + at, length) });
                moved += length;
            }
            return answer;
        }
        moved += rest(moved);
    }
    Ok(())
}

/// Makes a call until it succeeds, each millisecond for 10 s: one without which the program has a hole in its memory, and that
/// fails only while the kernel lacks memory for its own records.
///
/// # Errors
/// The last call's.
pub fn insist(call: impl Fn() -> Result<()>) -> Result<()> {
    const RETRIES: u32 = 10_000;
    let pause = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    let mut answer = call();
    for _ in 0..RETRIES {
        if answer.is_ok() {
            break;
        }
        let _ = rustix::thread::nanosleep(&pause);
        answer = call();
    }
    answer
}

/// Whether anything is mapped at a page. msync(2) with MS_ASYNC, which has written nothing since Linux
/// 2.6.19 and looks at mappings alone.
#[expect(unsafe_code, reason = "takes an address")]
pub fn is_mapped(address: usize) -> bool {
    let (flags, page) = (mm::MsyncFlags::ASYNC, rustix::param::page_size());
    // SAFETY: nothing is read or written.
    unsafe { mm::msync(with_exposed_provenance_mut(address), page, flags) }.is_ok()
}
