//! Moving a mapping by its page tables, and taking back a move that stopped half way, or having it succeed.

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
/// cannot move. Before Linux 6.17 nothing has moved then; since, [`move_back`] has to be called. `to` may
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

/// Puts the pages back that a failed [`move_mapping`] may have moved: they are the ones at the start.
///
/// If they cannot be put back, which only a lack of memory for page tables can keep them from, the program ends by SIGSEGV where it
/// needs them: see [`insist`].
///
/// # Safety
/// The arguments are those of a [`move_mapping`] that has just failed, and no thread has mapped anything in
/// either range since.
#[expect(unsafe_code, reason = "as above")]
pub unsafe fn move_back(from: usize, to: usize, length: usize) {
    let page = rustix::param::page_size();
    let (mut moved, mut whole) = (0, length);
    // The first page that is still at its old place, by bisection.
    while moved < whole {
        let middle = moved + (whole - moved) / 2 / page * page;
        if is_mapped(from + middle) {
            whole = middle;
        } else {
            moved = middle + page;
        }
    }
    if moved > 0 {
        // SAFETY: these pages came from there.
        let _ = insist(|| unsafe { move_mapping(to, from, moved) });
    }
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
