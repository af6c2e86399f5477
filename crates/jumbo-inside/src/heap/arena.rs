//! glibc's thread arenas on huge pages: [`check`].
//!
//! glibc's `hugetlb=1` tunable advises the main heap only. A thread's arena grows by mprotect(2) in
//! small steps, and the kernel forms no huge page across the end of accessible memory. So an arena
//! that has used up its first huge page is made accessible as a whole. Its touched part is
//! collapsed when dense; the rest is touched in order, and earns its huge pages.
//!
//! An arena's heap is found as glibc does (malloc/arena.c, `heap_for_ptr`): a chunk with
//! NON_MAIN_ARENA in its header lies in a heap of HEAP_MAX_SIZE bytes, aligned to its size.

use core::sync::atomic::{AtomicU64, Ordering};

use super::{ADVISES_ARENAS, LOCKS_FUTURE, PMD, memory};
use crate::density::{self, program_break};
use crate::ledger::{Slot, stats};

/// glibc's HEAP_MAX_SIZE on 64 bits: twice DEFAULT_MMAP_THRESHOLD_MAX.
pub const HEAP_MAX_BYTES: usize = 64 << 20;
const NON_MAIN_ARENA: usize = 4;
const IS_MMAPPED: usize = 2;

const HEAP_MAX_SHIFT: u32 = HEAP_MAX_BYTES.trailing_zeros();
/// One bit per region of 2^47 bytes of addresses, set once checked. Unused parts take no memory.
const SEEN_WORDS: usize = (1 << (47 - HEAP_MAX_SHIFT)) / 64;
crate::one_page::table! {
    static SEEN: [AtomicU64; SEEN_WORDS] = [const { AtomicU64::new(0) }; SEEN_WORDS];
}

/// Reports whether a pointer is in a region of an arena that was checked.
#[inline(always)]
pub fn is_known(pointer: usize) -> bool {
    let region = pointer >> HEAP_MAX_SHIFT;
    seen(region).load(Ordering::Relaxed) >> (region % 64) & 1 != 0
}

/// Returns the word of a region in [`SEEN`].
#[inline(always)]
fn seen(region: usize) -> &'static AtomicU64 {
    &SEEN[region / 64 % SEEN_WORDS]
}

/// Reports whether a pointer is in the first 2 MiB of a region: an arena that small stays as it is.
/// Blocks of an arena are there at random, so test [`is_known`] first, whose branch is predictable.
#[inline(always)]
pub const fn is_at_start(pointer: usize) -> bool {
    pointer & (HEAP_MAX_BYTES - (2 << 20)) == 0
}

/// Maximum rest of a heap behind its last block: two steps of its growth. A longer one is memory
/// that the program has freed.
const MAX_REST_BYTES: usize = 4 << 20;
/// Flags in a chunk's header.
const FLAGS: usize = 7;

/// Reports whether glibc has more free memory of a block's size in the block's heap, and the heap
/// has more than `max` bytes. It has none where it took the block from the end of the heap: the next
/// chunk is the last one, and short. `main_end`: end of the main heap.
///
/// # Safety
/// `pointer` was returned by glibc's malloc and is still allocated.
#[expect(unsafe_code, reason = "reads headers of glibc")]
pub unsafe fn has_free(pointer: usize, max: usize, main_end: usize) -> bool {
    const WORD: usize = size_of::<usize>();
    // SAFETY: the caller's promise.
    let header = unsafe { memory::chunk_header(pointer) };
    if header & IS_MMAPPED != 0 {
        return true;
    }
    let (length, end) = if header & NON_MAIN_ARENA == 0 {
        (program_break::heap_bytes(main_end), main_end)
    } else {
        let base = pointer & !(HEAP_MAX_BYTES - 1);
        // SAFETY: the heap of an arena begins with glibc's `heap_info`: the arena, the heap before
        // and the size of this one (malloc/arena.c, unchanged since glibc 2.3).
        let (before, length) = unsafe {
            (
                memory::word_at(base + WORD),
                memory::word_at(base + 2 * WORD),
            )
        };
        let total = if before == 0 { length } else { usize::MAX };
        (total, base + length)
    };
    let next = pointer + (header & !FLAGS);
    // SAFETY: a chunk follows each block of a heap, and the last one ends with the heap.
    let rest = unsafe { memory::chunk_header(next) } & !FLAGS;
    let is_at_end = next - 2 * WORD + rest == end && rest <= MAX_REST_BYTES;
    length > max && !is_at_end
}

/// Checks memory that glibc's malloc returned: true for the first of a region.
///
/// # Safety
/// `pointer` is null, or was returned by glibc's malloc and is still allocated.
#[expect(unsafe_code, reason = "reads behind the pointer")]
pub unsafe fn check(pointer: usize) -> bool {
    let is_aligned = pointer.is_multiple_of(2 * size_of::<usize>());
    if is_at_start(pointer) || is_known(pointer) || !is_aligned {
        return false;
    }
    // SAFETY: the caller's promise.
    let header = unsafe { memory::chunk_header(pointer) };
    if header & NON_MAIN_ARENA == 0 || header & IS_MMAPPED != 0 {
        return false;
    }
    let region = pointer >> HEAP_MAX_SHIFT;
    seen(region).fetch_or(1 << (region % 64), Ordering::Relaxed);
    // SAFETY: the caller's promise.
    unsafe { advise_arena(pointer) };
    true
}

/// # Safety
/// As for [`check`]; the block lies in an arena's heap.
#[expect(unsafe_code, reason = "makes memory accessible")]
unsafe fn advise_arena(pointer: usize) {
    let pmd = PMD.load(Ordering::Relaxed);
    // Locked memory becomes resident once it is accessible.
    let off = !ADVISES_ARENAS.load(Ordering::Relaxed) || LOCKS_FUTURE.load(Ordering::Relaxed);
    if pmd == 0 || off {
        return;
    }
    let base = pointer & !(HEAP_MAX_BYTES - 1);
    // SAFETY: the heap of an arena is glibc's, which makes the rest of it accessible as it grows.
    let unprotect = || unsafe { memory::unprotect(base, HEAP_MAX_BYTES) };
    // ENOMEM: parts of it are not mapped, so it is no arena's heap.
    let filled = (pointer + 1).next_multiple_of(pmd);
    if unprotect().is_ok() {
        density::begin_on_base_pages(&(base..filled));
        let _ = memory::advise(filled, base + HEAP_MAX_BYTES - filled);
        Slot::add(&stats::slot().arenas_advised, HEAP_MAX_BYTES as u64);
    }
}
