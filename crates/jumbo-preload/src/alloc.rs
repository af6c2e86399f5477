//! The `malloc` family: malloc(3), posix_memalign(3), malloc_usable_size(3), malloc_trim(3).
//!
//! The size selects the allocator: [`crate::mimalloc`] for small blocks, [`jumbo_inside::heap`] for
//! blocks of [`MIN_LARGE_BYTES`] and more, and the program's own for others and as the fallback.
//! The constructor enables the first two if the program's allocator is the C library's.

use core::ffi::{c_int, c_void};
use core::ptr::{self, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicUsize, Ordering};

use jumbo_inside::density::program_break;
use jumbo_inside::gather;
use jumbo_inside::heap::main_heap::{self, Part};
use jumbo_inside::heap::{self, Resize};
use jumbo_inside::{sandbox, sys};

use crate::end::invalid;
use crate::glibc;
use crate::main_heap::{between, from_glibc, heap_end, in_main_heap, part};
use crate::mimalloc;
use crate::next::{self, set_errno};
use crate::own_stack::on;
use crate::reaper::auto;

/// Minimum size of a block of the heap; the maximum value disables it.
static MIN_LARGE_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Sizes that only the program's allocator serves: [`PLAIN_BYTES`] of them from here on. Advice to
/// [`plain_or`], which the general path verifies.
static MIN_PLAIN_BYTES: AtomicUsize = AtomicUsize::new(0);
static PLAIN_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);

/// glibc's MALLOC_ALIGNMENT, which every block has.
pub(crate) const ALIGN: usize = 16;

/// Enables the heap.
pub(crate) fn divert() {
    MIN_LARGE_BYTES.store(heap::LARGE_BLOCK_BYTES, Ordering::Release);
    set_plain();
    program_break::observe();
}

/// Sets the sizes that only the program's allocator serves, after a change of the others.
pub(crate) fn set_plain() {
    let min = mimalloc::usual_size_limit();
    MIN_PLAIN_BYTES.store(min, Ordering::Relaxed);
    loop {
        let reuses = mimalloc::may_reuse();
        let bytes = match reuses {
            true => 0,
            false => MIN_LARGE_BYTES.load(Ordering::Relaxed).saturating_sub(min),
        };
        PLAIN_BYTES.store(bytes, Ordering::SeqCst);
        // Another thread may have stored the result of an earlier change meanwhile, or this one.
        if mimalloc::may_reuse() == reuses {
            return;
        }
    }
}

/// Reports whether blocks of the program may be this library's.
pub(crate) fn is_diverted() -> bool {
    MIN_LARGE_BYTES.load(Ordering::Relaxed) != usize::MAX || mimalloc::has_served()
}

#[inline(always)]
fn is_large(size: usize) -> bool {
    size >= MIN_LARGE_BYTES.load(Ordering::Relaxed)
}

/// Allocates a block from the heap. The program's allocator refuses sizes above PTRDIFF_MAX.
#[cold]
#[inline(never)]
fn large(size: usize, align: usize, zeroed: bool) -> Option<*mut c_void> {
    if isize::try_from(size).is_err() || !align.is_power_of_two() {
        return None;
    }
    on(|| {
        let block = heap::allocate(size, align, zeroed)?;
        auto::allocated();
        if gather::is_large(size) {
            gather::prepare(size);
        }
        Some(with_exposed_provenance_mut(block))
    })
}

/// Passes a block of glibc to the heap, which follows the growth of glibc's heaps.
#[inline(always)]
fn observed(pointer: *mut c_void) -> *mut c_void {
    let block = pointer.addr();
    let is_known = program_break::is_known(block)
        || heap::arena::is_known(block)
        || heap::arena::is_at_start(block) && !program_break::is_beyond(block);
    match is_known {
        true => pointer,
        false => on(|| grown(pointer)),
    }
}

/// Follows a growth of glibc's heaps that a block may reveal.
#[cold]
#[inline(never)]
fn grown(pointer: *mut c_void) -> *mut c_void {
    if MIN_LARGE_BYTES.load(Ordering::Relaxed) != usize::MAX {
        if let Some(growth) = program_break::seen(pointer.addr()) {
            glibc::earn(growth.may_advise);
            heap::about_to_fill(growth.bytes);
        }
        // SAFETY: glibc's malloc has just returned the block (MIN_LARGE_BYTES is not set for
        // another allocator), and the program does not have it yet.
        if unsafe { heap::arena::check(pointer.addr()) } {
            auto::region();
            heap::about_to_fill(heap::arena::HEAP_MAX_BYTES);
        }
    }
    pointer
}

/// Allocates a block of the program's allocator by `plain`, as most are; others by `general`, which
/// also handles a failure of `plain`.
#[inline(always)]
fn plain_or(
    size: usize,
    plain: impl FnOnce() -> *mut c_void,
    general: impl FnOnce() -> *mut c_void,
) -> *mut c_void {
    let above = size.wrapping_sub(MIN_PLAIN_BYTES.load(Ordering::Relaxed));
    if above < PLAIN_BYTES.load(Ordering::Relaxed) && !gather::may_be_pending() {
        return observed(plain());
    }
    general()
}

/// Allocates a block by `allocate` of the program's allocator.
#[inline(always)]
fn fallback(allocate: impl Fn() -> *mut c_void) -> *mut c_void {
    observed(drained(&allocate))
}

/// Calls `allocate`, again after pending frees if there is no memory.
#[inline(always)]
pub(crate) fn drained(allocate: &impl Fn() -> *mut c_void) -> *mut c_void {
    match gather::is_pending() {
        false => allocate(),
        true => on(|| after_pending(allocate)),
    }
}

#[cold]
#[inline(never)]
fn after_pending(allocate: &impl Fn() -> *mut c_void) -> *mut c_void {
    let before = next::errno();
    let mut block = allocate();
    if block.is_null() && gather::drain() {
        block = allocate();
        if !block.is_null() {
            set_errno(before);
        }
    }
    block
}

/// Allocates a small block from mimalloc, a large one from the heap; others, and as the fallback,
/// by `allocate` of the program's allocator.
#[inline(always)]
fn block(
    size: usize,
    align: usize,
    zeroed: bool,
    allocate: impl Fn() -> *mut c_void,
) -> *mut c_void {
    let block = mimalloc::allocate(size, align, zeroed);
    if !block.is_null() {
        return block;
    }
    if is_large(size) {
        match part(size, align) {
            Part::All => return on(|| in_main_heap(size, allocate)),
            Part::Free => {
                if let Some(block) = on(|| between(size, align, zeroed)) {
                    return block;
                }
            }
            Part::None => {}
        }
        if let Some(block) = large(size, align, zeroed) {
            return block;
        }
    }
    fallback(allocate)
}

/// malloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    // SAFETY: the same call.
    let plain = || unsafe { (next::malloc.get())(size) };
    plain_or(size, plain, || other(size))
}

/// malloc(3) of a size that is not plain.
#[inline(never)]
fn other(size: usize) -> *mut c_void {
    match mimalloc::is_small(size) {
        true => mimalloc::malloc(size),
        false => general(size),
    }
}

#[inline(never)]
fn general(size: usize) -> *mut c_void {
    // SAFETY: malloc(3).
    block(size, ALIGN, false, || unsafe { (next::malloc.get())(size) })
}

/// malloc(3) of a small size for which mimalloc has no block.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn jumbo_malloc_other(size: usize) -> *mut c_void {
    // SAFETY: malloc(3).
    fallback(|| unsafe { (next::malloc.get())(size) })
}

/// Allocates a small block from glibc, and reports whether glibc has more free memory of that size,
/// in a heap of more than `max` bytes.
#[unsafe(no_mangle)]
extern "C" fn jumbo_malloc_asked(
    size: usize,
    zeroed: bool,
    max: usize,
    has_more: &mut bool,
) -> *mut c_void {
    // SAFETY: calloc(3), malloc(3).
    let block = fallback(|| unsafe {
        match zeroed {
            true => (next::calloc.get())(1, size),
            false => (next::malloc.get())(size),
        }
    });
    // SAFETY: mimalloc is in use beside glibc's malloc alone, which has just returned the block.
    *has_more = block.is_null() || unsafe { heap::arena::has_free(block.addr(), max, heap_end()) };
    block
}

/// calloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    // The allocator refuses an overflow.
    let bytes = count.saturating_mul(size);
    // SAFETY: the same call.
    let plain = || unsafe { (next::calloc.get())(count, size) };
    plain_or(bytes, plain, || allocate_zeroed(bytes, count, size))
}

/// calloc(3) of any size, in `bytes` together.
#[inline(never)]
fn allocate_zeroed(bytes: usize, count: usize, size: usize) -> *mut c_void {
    // SAFETY: calloc(3).
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
    if heap::may_hold(pointer.addr()) || mimalloc::is_elsewhere() {
        // SAFETY: the caller's promise.
        return unsafe { free_any(pointer) };
    }
    // SAFETY: the same call.
    unsafe { (next::free.get())(pointer) }
}

/// free(3) of any block.
///
/// # Safety
/// As for [`free`].
#[inline(never)]
unsafe fn free_any(pointer: *mut c_void) {
    if heap::is_ours(pointer.addr()) {
        // SAFETY: the caller's promise.
        return unsafe { release(pointer) };
    }
    // SAFETY: the caller's promise.
    unsafe { mimalloc::free(pointer) }
}

/// free(3) of a block that is neither the heap's nor mimalloc's.
///
/// # Safety
/// As for [`free`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn jumbo_free_other(pointer: *mut c_void) {
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
/// As for [`free`]; the block is in the heap's window.
#[cold]
#[inline(never)]
unsafe fn release(pointer: *mut c_void) {
    // SAFETY: the caller's promise.
    if !on(|| unsafe { heap::release(pointer.addr()) }) {
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
        return on(|| unsafe { resize(pointer, size) });
    }
    // SAFETY: the caller's promise.
    if let Some(room) = unsafe { mimalloc::room(pointer) } {
        // SAFETY: the caller's promise; the size is mimalloc's.
        return unsafe { resize_small(pointer, room, size) };
    }
    // SAFETY: the same call.
    let resize = || unsafe { (next::realloc.get())(pointer, size) };
    if is_large(size) {
        // SAFETY: the caller's promise.
        return on(|| unsafe { resize_large(pointer, size, resize) });
    }
    if size == 0 {
        // realloc(3) frees the block and returns null.
        return resize();
    }
    fallback(resize)
}

/// Resizes a block of the heap.
///
/// # Safety
/// As for [`realloc`]; the block is in the heap's window.
#[cold]
#[inline(never)]
unsafe fn resize(pointer: *mut c_void, size: usize) -> *mut c_void {
    if size == 0 {
        // As glibc does.
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
                auto::allocated();
                return with_exposed_provenance_mut(block);
            }
            Resize::Copy(room) => Some(room),
            Resize::Unknown => None,
        }
    };
    let Some(room) = room else {
        invalid("realloc(): invalid pointer")
    };
    // glibc's main heap is not tried: in plain, glibc would map the block again.
    let allocate = || match is_large(size) {
        true => large(size, ALIGN, false).unwrap_or_else(|| malloc(size)),
        false => malloc(size),
    };
    // SAFETY: the caller's promise; the size is the heap's.
    unsafe { moved_or_kept(pointer, room, size, allocate) }
}

/// Resizes a block of mimalloc with that room.
///
/// # Safety
/// As for [`realloc`].
unsafe fn resize_small(pointer: *mut c_void, room: usize, size: usize) -> *mut c_void {
    if size == 0 {
        // As glibc does.
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

/// Variant of [`moved`] that keeps the block without memory for a smaller one: programs do not
/// expect a failure.
///
/// # Safety
/// As for [`moved`].
unsafe fn moved_or_kept(
    pointer: *mut c_void,
    room: usize,
    size: usize,
    allocate: impl FnOnce() -> *mut c_void,
) -> *mut c_void {
    let before = next::errno();
    // SAFETY: the caller's promise.
    let block = unsafe { moved(pointer, room, size, allocate) };
    if block.is_null() && size <= room {
        set_errno(before);
        return pointer;
    }
    block
}

/// Moves the contents of `pointer` to a new block of `allocate`, and frees the old one; null
/// without memory.
///
/// # Safety
/// As for [`realloc`]; the block has that room, and the new one has `size` bytes.
unsafe fn moved(
    pointer: *mut c_void,
    room: usize,
    size: usize,
    allocate: impl FnOnce() -> *mut c_void,
) -> *mut c_void {
    let block = allocate();
    if !block.is_null() {
        // SAFETY: the caller's promise; both blocks have that size, and the copy precedes the free.
        unsafe {
            heap::copy(pointer.addr(), block.addr(), room.min(size));
            match heap::is_ours(pointer.addr()) {
                true => drop(heap::release_copied(pointer.addr())),
                false => free(pointer),
            }
        }
    }
    block
}

/// Resizes a block of the program's allocator to a large size.
///
/// # Safety
/// As for [`realloc`]; `resize` is that of the program's allocator.
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
        // The block may grow in place, or move to free memory.
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
            fallback(resize)
        } else {
            from
        };
    };
    // SAFETY: the caller's promise, or glibc has just mapped `from`; both blocks have that size,
    // and the copy precedes the free.
    unsafe {
        copy_out(from, block, room.min(size), from != pointer);
        (next::free.get())(from);
    }
    block
}

/// Copies the start of a block piece by piece. If glibc has mapped the block (`is_mapped`), drops
/// each piece, so that the contents are not resident twice.
///
/// # Safety
/// Both blocks have `length` bytes, and nothing else uses them.
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
            // SAFETY: whole pages that were copied.
            let _ = unsafe { sys::advise(first, last - first, libc::MADV_DONTNEED) };
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
            let allocate = || unsafe { (next::memalign.get())(align, size) };
            let before = next::errno();
            block = match part(size, align) {
                Part::All => on(|| in_main_heap(size, allocate)),
                Part::Free => on(|| between(size, align, false)).unwrap_or(ptr::null_mut()),
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
    let allocate = || unsafe { (next::posix_memalign.get())(out, align, size) };
    let error = allocate();
    if error == libc::ENOMEM && gather::is_pending() && gather::drain() {
        return allocate();
    }
    if error == 0 {
        // SAFETY: posix_memalign(3) has just written it.
        observed(unsafe { *out });
    }
    error
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
        return on(|| unsafe { heap::room(pointer.addr()) }).unwrap_or(0);
    }
    // SAFETY: the same call.
    unsafe { mimalloc::room(pointer).unwrap_or_else(|| (next::malloc_usable_size.get())(pointer)) }
}

/// mallopt(3).
///
/// # Safety
/// As for the C library's.
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
    let trimmed = on(|| heap::trim() | mimalloc::trim());
    // SAFETY: the same call.
    let result = unsafe { (next::malloc_trim.get())(pad) };
    c_int::from(trimmed || result != 0)
}
