//! The `malloc` family. See malloc(3), posix_memalign(3), malloc_usable_size(3), malloc_trim(3).
//!
//! Sizes decide: what is small is asked of [`crate::mimalloc`], what is at least [`LARGE_FROM`] of
//! [`jumbo_inside::heap`]; the rest, and what they cannot serve, is the business of the program's allocator. Both begin
//! with "never", and the constructor changes that where the program's allocator is glibc's.

use core::ffi::{c_int, c_void};
use core::ptr::{self, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicUsize, Ordering};

use jumbo_inside::density::program_break;
use jumbo_inside::gather;
use jumbo_inside::heap::main_heap::{self, Part};
use jumbo_inside::heap::{self, Resize, maps};
use jumbo_inside::sandbox;

use crate::end::invalid;
use crate::glibc;
use crate::mimalloc;
use crate::next::{self, set_errno};
use crate::reaper::auto;

/// The least size that is diverted.
static LARGE_FROM: AtomicUsize = AtomicUsize::new(usize::MAX);

/// glibc's MALLOC_ALIGNMENT, which every block has.
pub(crate) const ALIGN: usize = 16;

/// Starts diverting.
pub(crate) fn divert() {
    LARGE_FROM.store(heap::LARGE_BLOCK_BYTES, Ordering::Release);
}

/// Whether the program's blocks may be ours.
pub(crate) fn is_diverted() -> bool {
    LARGE_FROM.load(Ordering::Relaxed) != usize::MAX || mimalloc::has_served()
}

#[inline(always)]
fn is_large(size: usize) -> bool {
    size >= LARGE_FROM.load(Ordering::Relaxed)
}

/// A block from the heap. Sizes past PTRDIFF_MAX are left to the allocator to refuse.
#[cold]
#[inline(never)]
fn large(size: usize, align: usize, zeroed: bool) -> Option<*mut c_void> {
    if isize::try_from(size).is_err() || !align.is_power_of_two() {
        return None;
    }
    let block = heap::allocate(size, align, zeroed)?;
    auto::asked();
    if gather::is_large(size) {
        gather::prepare(size);
    }
    Some(with_exposed_provenance_mut(block))
}

/// Lets the heap look at what glibc returned.
#[inline(always)]
fn small(pointer: *mut c_void) -> *mut c_void {
    if LARGE_FROM.load(Ordering::Relaxed) != usize::MAX {
        if let Some(may_advise) = program_break::seen(pointer.addr()) {
            glibc::earn(may_advise);
        }
        // SAFETY: glibc's malloc has just returned it (another allocator leaves LARGE_FROM at its start), and the
        // program has not seen it yet.
        if unsafe { heap::arena::check(pointer.addr()) } {
            auto::region();
        }
    }
    pointer
}

/// A block from the program's allocator.
#[inline(always)]
fn behind(ask: impl Fn() -> *mut c_void) -> *mut c_void {
    match gather::is_pending() {
        false => small(ask()),
        true => small(behind_pending(ask)),
    }
}

/// The same while memory is still being freed: asked for again after that, where there is none.
#[cold]
#[inline(never)]
fn behind_pending(ask: impl Fn() -> *mut c_void) -> *mut c_void {
    let before = next::errno();
    let mut block = ask();
    if block.is_null() && gather::drain() {
        block = ask();
        if !block.is_null() {
            set_errno(before);
        }
    }
    block
}

/// A small block from mimalloc, a large one from the heap; and where they have none, from the program's allocator.
#[inline(always)]
fn block(size: usize, align: usize, zeroed: bool, ask: impl Fn() -> *mut c_void) -> *mut c_void {
    let block = mimalloc::allocate(size, align, zeroed);
    if !block.is_null() {
        return block;
    }
    if is_large(size) {
        match part(size, align) {
            Part::All => return in_main_heap(size, ask),
            Part::Free => {
                if let Some(block) = between(size, align, zeroed) {
                    return block;
                }
            }
            Part::None => {}
        }
        if let Some(block) = large(size, align, zeroed) {
            return block;
        }
    }
    behind(ask)
}

/// The part of glibc's main heap that a block may come from. glibc looks for one with room for the alignment.
fn part(size: usize, align: usize) -> Part {
    match align {
        ALIGN => main_heap::part(size),
        // More is for huge pages, which the program lays out by itself.
        _ if align.is_power_of_two() && align <= heap::BASE_PAGE => {
            main_heap::part(size.saturating_add(align + 2 * ALIGN))
        }
        _ => Part::None,
    }
}

/// A large block of glibc's main heap.
#[cold]
#[inline(never)]
fn in_main_heap(size: usize, ask: impl Fn() -> *mut c_void) -> *mut c_void {
    let block = from_glibc(|| match gather::is_pending() {
        false => ask(),
        true => behind_pending(&ask),
    });
    main_heap::record_block(size, heap_end());
    block
}

/// A block from the free memory of glibc's main heap, as glibc serves one that it would map else.
#[cold]
#[inline(never)]
fn between(size: usize, align: usize, zeroed: bool) -> Option<*mut c_void> {
    // Where there is none glibc maps the block, and has to unmap it.
    if sandbox::is_entered() || sandbox::is_entered_later() {
        return None;
    }
    let before = next::errno();
    // SAFETY: memalign(3).
    let block = from_glibc(|| unsafe { (next::memalign.get())(align, size) });
    let end = heap_end();
    let has_found = program_break::is_below(block.addr(), end);
    main_heap::record_attempt(size, has_found, end);
    if !has_found {
        // SAFETY: the block has just been allocated, and nothing uses it.
        unsafe { (next::free.get())(block) };
        set_errno(before);
        return None;
    }
    if zeroed {
        // SAFETY: as above, and it has that size.
        unsafe { block.write_bytes(0, size) };
    }
    Some(block)
}

/// A block of glibc's, of which what the main heap grows by is advised here: glibc would advise the whole step, which may
/// be more than is charged.
fn from_glibc(ask: impl Fn() -> *mut c_void) -> *mut c_void {
    glibc::set_threshold();
    let has_earned = glibc::earn(false);
    let block = ask();
    if let Some(step) = program_break::moved(heap_end()) {
        maps::advise_mapping(step.start, step.len(), true);
    }
    if has_earned {
        glibc::earn(true);
    }
    block
}

/// The end of glibc's main heap.
fn heap_end() -> usize {
    // SAFETY: it only asks.
    unsafe { (next::sbrk.get())(0) }.addr()
}

/// malloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    // SAFETY: the same call.
    block(size, ALIGN, false, || unsafe { (next::malloc.get())(size) })
}

/// calloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    // More than there can be is the allocator's to refuse.
    let bytes = count.saturating_mul(size);
    // SAFETY: the same call.
    block(bytes, ALIGN, true, || unsafe {
        (next::calloc.get())(count, size)
    })
}

/// free(3).
///
/// # Safety
/// `pointer` is null or was allocated and not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(pointer: *mut c_void) {
    if heap::is_ours(pointer.addr()) {
        // SAFETY: the caller's promise.
        return unsafe { release(pointer) };
    }
    // SAFETY: the caller's promise.
    if unsafe { mimalloc::free(pointer) } {
        return;
    }
    // SAFETY: the same call.
    unsafe { (next::free.get())(pointer) }
}

/// free_sized(3), C23.
///
/// # Safety
/// As for [`free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_sized(pointer: *mut c_void, _size: usize) {
    // SAFETY: the caller's promise.
    unsafe { free(pointer) }
}

/// free_aligned_sized(3), C23.
///
/// # Safety
/// As for [`free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_aligned_sized(pointer: *mut c_void, _align: usize, _size: usize) {
    // SAFETY: the caller's promise.
    unsafe { free(pointer) }
}

/// # Safety
/// As for [`free`]; it is in the heap's window.
#[cold]
#[inline(never)]
unsafe fn release(pointer: *mut c_void) {
    // SAFETY: the caller's promise.
    if !unsafe { heap::release(pointer.addr()) } {
        invalid("free(): invalid pointer");
    }
}

/// realloc(3).
///
/// # Safety
/// `pointer` is null or was allocated and not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(pointer: *mut c_void, size: usize) -> *mut c_void {
    if pointer.is_null() {
        return malloc(size);
    }
    if heap::is_ours(pointer.addr()) {
        // SAFETY: the caller's promise.
        return unsafe { resize(pointer, size) };
    }
    // SAFETY: the caller's promise.
    if let Some(room) = unsafe { mimalloc::room(pointer) } {
        // SAFETY: the caller's promise; mimalloc says how large it is.
        return unsafe { resize_small(pointer, room, size) };
    }
    // SAFETY: the same call.
    let resize = || unsafe { (next::realloc.get())(pointer, size) };
    if is_large(size) {
        // SAFETY: the caller's promise.
        return unsafe { resize_large(pointer, size, resize) };
    }
    if size == 0 {
        // It frees the block, and has none to give.
        return resize();
    }
    behind(resize)
}

/// A block of the heap gets another size.
///
/// # Safety
/// As for [`realloc`]; it is in the heap's window.
#[cold]
#[inline(never)]
unsafe fn resize(pointer: *mut c_void, size: usize) -> *mut c_void {
    if size == 0 {
        // As glibc does: the block is freed and there is no new one.
        // SAFETY: the caller's promise.
        unsafe { release(pointer) };
        return ptr::null_mut();
    }
    let room = if size < heap::LARGE_BLOCK_BYTES / 2 {
        // SAFETY: the caller's promise.
        unsafe { heap::room(pointer.addr()) }
    } else {
        // SAFETY: the caller's promise.
        match unsafe { heap::resize(pointer.addr(), size) } {
            Resize::Done(block) => {
                auto::asked();
                return with_exposed_provenance_mut(block);
            }
            Resize::Copy(room) => Some(room),
            Resize::Unknown => None,
        }
    };
    let Some(room) = room else {
        invalid("realloc(): invalid pointer")
    };
    // A block that glibc mapped it would map again.
    let ask = || match is_large(size) {
        true => large(size, ALIGN, false).unwrap_or_else(|| malloc(size)),
        false => malloc(size),
    };
    // SAFETY: the caller's promise; the heap says how large it is.
    unsafe { moved_or_kept(pointer, room, size, ask) }
}

/// A block of mimalloc's, which has that room, gets another size.
///
/// # Safety
/// As for [`realloc`].
unsafe fn resize_small(pointer: *mut c_void, room: usize, size: usize) -> *mut c_void {
    if size == 0 {
        // As above.
        // SAFETY: the caller's promise.
        unsafe { free(pointer) };
        return ptr::null_mut();
    }
    if size <= room && size >= room / 2 {
        return pointer;
    }
    // SAFETY: the caller's promise.
    unsafe { moved_or_kept(pointer, room, size, || malloc(size)) }
}

/// As [`moved`]; where there is no memory for a smaller one, the block as it is: programs do not expect that to fail.
///
/// # Safety
/// As for [`moved`].
unsafe fn moved_or_kept(
    pointer: *mut c_void,
    room: usize,
    size: usize,
    ask: impl FnOnce() -> *mut c_void,
) -> *mut c_void {
    let before = next::errno();
    // SAFETY: the caller's promise.
    let block = unsafe { moved(pointer, room, size, ask) };
    if block.is_null() && size <= room {
        set_errno(before);
        return pointer;
    }
    block
}

/// A new block, of `ask`, with what `pointer` holds, which is freed then; null where there is no memory.
///
/// # Safety
/// As for [`realloc`]; it has that room, and the new one has `size` bytes.
unsafe fn moved(
    pointer: *mut c_void,
    room: usize,
    size: usize,
    ask: impl FnOnce() -> *mut c_void,
) -> *mut c_void {
    let block = ask();
    if !block.is_null() {
        // SAFETY: the caller's promise, and the new one is so large; what it held is there then.
        unsafe {
            heap::copy(pointer.addr(), block.addr(), room.min(size));
            free(pointer);
        }
    }
    block
}

/// A block of the program's allocator gets a large size.
///
/// # Safety
/// As for [`realloc`], which `resize` calls.
#[cold]
#[inline(never)]
unsafe fn resize_large(
    pointer: *mut c_void,
    size: usize,
    resize: impl Fn() -> *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let room = unsafe { (next::malloc_usable_size.get())(pointer) };
    let from = match main_heap::part(size) {
        Part::All => return in_main_heap(size, resize),
        // It may grow where it is, or into free memory.
        Part::Free if !sandbox::is_entered() && !sandbox::is_entered_later() => {
            let block = from_glibc(&resize);
            if block.is_null() || program_break::is_below(block.addr(), heap_end()) {
                return block;
            }
            block
        }
        _ => pointer,
    };
    let Some(block) = large(size, ALIGN, false) else {
        return if from == pointer {
            behind(resize)
        } else {
            from
        };
    };
    // SAFETY: the caller's promise, or glibc has just mapped it; what it held is in the new block then, which has room.
    unsafe {
        copy_out(from, block, room.min(size), from != pointer);
        (next::free.get())(from);
    }
    block
}

/// Copies the start of a block, a piece at a time. Where glibc has mapped it (`is_mapped`) each piece goes at once: the block
/// is not there twice.
///
/// # Safety
/// Both have room for `length` bytes, and nothing else uses them.
unsafe fn copy_out(from: *mut c_void, to: *mut c_void, length: usize, is_mapped: bool) {
    const PIECE_BYTES: usize = 2 << 20;
    let page = rustix::param::page_size();
    for at in (0..length).step_by(PIECE_BYTES) {
        let piece = PIECE_BYTES.min(length - at);
        let start = from.addr() + at;
        // SAFETY: the caller's promise.
        unsafe { heap::copy(start, to.addr() + at, piece) };
        let (first, last) = (start.next_multiple_of(page), (start + piece) & !(page - 1));
        if is_mapped && first < last {
            let gone = with_exposed_provenance_mut(first);
            // SAFETY: whole pages of what was copied.
            unsafe { (next::madvise.get())(gone, last - first, libc::MADV_DONTNEED) };
        }
    }
}

/// reallocarray(3).
///
/// # Safety
/// As for [`realloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(
    pointer: *mut c_void,
    count: usize,
    size: usize,
) -> *mut c_void {
    match count.checked_mul(size) {
        // SAFETY: the caller's promise.
        Some(bytes) => unsafe { realloc(pointer, bytes) },
        None => {
            set_errno(libc::ENOMEM);
            ptr::null_mut()
        }
    }
}

/// memalign(3).
#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    // SAFETY: the same call.
    block(size, align, false, || unsafe {
        (next::memalign.get())(align, size)
    })
}

/// aligned_alloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    // SAFETY: the same call.
    block(size, align, false, || unsafe {
        (next::aligned_alloc.get())(align, size)
    })
}

/// posix_memalign(3).
///
/// # Safety
/// `out` points to memory for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
    if align.is_power_of_two() && align.is_multiple_of(size_of::<*mut c_void>()) {
        let mut block = mimalloc::allocate(size, align, false);
        if block.is_null() && is_large(size) {
            // SAFETY: memalign(3).
            let ask = || unsafe { (next::memalign.get())(align, size) };
            let before = next::errno();
            block = match part(size, align) {
                Part::All => in_main_heap(size, ask),
                Part::Free => between(size, align, false).unwrap_or(ptr::null_mut()),
                Part::None => ptr::null_mut(),
            };
            set_errno(before);
            if block.is_null() {
                block = large(size, align, false).unwrap_or(ptr::null_mut());
            }
        }
        if !block.is_null() {
            // SAFETY: the caller's promise.
            unsafe { out.write(block) };
            return 0;
        }
    }
    // SAFETY: the same call.
    let ask = || unsafe { (next::posix_memalign.get())(out, align, size) };
    let answer = ask();
    if answer == libc::ENOMEM && gather::is_pending() && gather::drain() {
        return ask();
    }
    if answer == 0 {
        // SAFETY: it has just been written there.
        small(unsafe { *out });
    }
    answer
}

/// valloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn valloc(size: usize) -> *mut c_void {
    // SAFETY: the same call.
    block(size, rustix::param::page_size(), false, || unsafe {
        (next::valloc.get())(size)
    })
}

/// pvalloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(size: usize) -> *mut c_void {
    let page = rustix::param::page_size();
    let rounded = size.checked_next_multiple_of(page).unwrap_or(0);
    // SAFETY: the same call.
    block(rounded, page, false, || unsafe {
        (next::pvalloc.get())(size)
    })
}

/// malloc_usable_size(3).
///
/// # Safety
/// `pointer` is null or was allocated and not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(pointer: *mut c_void) -> usize {
    if heap::is_ours(pointer.addr()) {
        // SAFETY: the caller's promise.
        return unsafe { heap::room(pointer.addr()) }.unwrap_or(0);
    }
    // SAFETY: the same call.
    unsafe { mimalloc::room(pointer).unwrap_or_else(|| (next::malloc_usable_size.get())(pointer)) }
}

/// mallopt(3).
///
/// # Safety
/// As the C library has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mallopt(parameter: c_int, value: c_int) -> c_int {
    if matches!(
        parameter,
        libc::M_MMAP_THRESHOLD | libc::M_TRIM_THRESHOLD | libc::M_TOP_PAD | libc::M_MMAP_MAX
    ) {
        main_heap::set_tuned();
    }
    // SAFETY: the same call.
    unsafe { (next::mallopt.get())(parameter, value) }
}

/// malloc_trim(3).
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(pad: usize) -> c_int {
    let ours = heap::trim() | mimalloc::trim();
    // SAFETY: the same call.
    let theirs = unsafe { (next::malloc_trim.get())(pad) };
    c_int::from(ours || theirs != 0)
}
