//! The `malloc` family: malloc(3), posix_memalign(3), malloc_usable_size(3), malloc_trim(3).
//!
//! The size selects the allocator: [`jumbo_inside::slab`] below 128 KiB, [`jumbo_inside::heap`] for
//! blocks of [`MIN_LARGE_BYTES`] and more, and the program's own as the fallback.
//! The constructor enables the first two if the program's allocator is the C library's.

use core::ffi::{c_int, c_void};
use core::ptr::{self, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use jumbo_inside::debug;
use jumbo_inside::gather;
use jumbo_inside::heap::{self, Resize};
use jumbo_inside::slab;

use crate::end::invalid;
use crate::next::{self, set_errno};
use crate::own_stack::on;
use crate::reaper::auto;
use crate::small;

/// Minimum size of a block of the heap; the maximum value disables it.
static MIN_LARGE_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);

/// The allocator of the program is the C library's, so that this library may serve in its place.
static SERVES: AtomicBool = AtomicBool::new(false);

/// Makes this library answer in place of the C library's allocator.
pub(crate) fn serve() {
    SERVES.store(true, Ordering::Release);
}

/// Hands a call on to the next definition where this library does not serve: as the first statement it
/// is a jump, so that the stack traces of a sanitizer or a profiler begin with the caller.
macro_rules! pass_on {
    ($name:ident($($argument:expr),*)) => {
        if !SERVES.load(Ordering::Relaxed) {
            // SAFETY: the same call.
            return unsafe { (next::$name.get())($($argument),*) };
        }
    };
}

/// glibc's MALLOC_ALIGNMENT, which every block has.
pub(crate) const ALIGN: usize = 16;

/// Enables the heap of large blocks.
pub(crate) fn divert() {
    MIN_LARGE_BYTES.store(heap::LARGE_BLOCK_BYTES, Ordering::Release);
}

/// Reports whether blocks of the program may be this library's.
pub(crate) fn is_diverted() -> bool {
    MIN_LARGE_BYTES.load(Ordering::Relaxed) != usize::MAX || slab::is_on()
}

#[inline(always)]
fn is_large(size: usize) -> bool {
    size >= MIN_LARGE_BYTES.load(Ordering::Relaxed)
}

/// Allocates a block from the heap. The program's allocator refuses sizes above PTRDIFF_MAX.
#[cold]
#[inline(never)]
fn large(size: usize, align: usize, zeroed: bool, filled: usize) -> Option<*mut c_void> {
    if isize::try_from(size).is_err() || !align.is_power_of_two() {
        return None;
    }
    on(|| {
        let block = heap::allocate_filled(size, align, zeroed, filled)?;
        auto::allocated();
        if gather::is_large(size) {
            gather::prepare(size);
        }
        debug::flush();
        Some(with_exposed_provenance_mut(block))
    })
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

/// Allocates a block of the slabs or of the heap; others, and as the fallback, by `allocate` of the
/// program's allocator.
#[inline(always)]
fn block(
    size: usize,
    align: usize,
    zeroed: bool,
    allocate: impl Fn() -> *mut c_void,
) -> *mut c_void {
    own(size, align, zeroed).unwrap_or_else(|| {
        small::passed(size);
        let block = drained(&allocate);
        if is_over_aligned(align) {
            libcs::add(block);
        }
        block
    })
}

/// Allocates a block of the slabs or of the heap.
#[inline(always)]
fn own(size: usize, align: usize, zeroed: bool) -> Option<*mut c_void> {
    let block = small::allocate(size, align, zeroed);
    if !block.is_null() {
        return Some(block);
    }
    match is_large(size) || is_over_aligned(align) && libcs::is_full() {
        true => large(size, align, zeroed, size),
        false => None,
    }
}

/// Reports whether the slabs serve, but no blocks of that alignment.
fn is_over_aligned(align: usize) -> bool {
    align > heap::BASE_PAGE && slab::is_on()
}

/// Blocks of the C library beside the slabs: those aligned to more than a page. Its allocator is fast
/// for few of them, but what they leave when they are freed serves no other block, so the heap has the
/// others.
mod libcs {
    use super::{AtomicUsize, Ordering, c_void, next};

    const MAX_BYTES: usize = 8 << 20;
    static BYTES: AtomicUsize = AtomicUsize::new(0);

    fn room(block: *mut c_void) -> usize {
        // SAFETY: null, or a block of the C library.
        unsafe { (next::malloc_usable_size.get())(block) }
    }

    /// Reports whether there are many.
    pub(super) fn is_full() -> bool {
        BYTES.load(Ordering::Relaxed) >= MAX_BYTES
    }

    /// Counts a new block, or null.
    #[cold]
    #[inline(never)]
    pub(super) fn add(block: *mut c_void) {
        BYTES.fetch_add(room(block), Ordering::Relaxed);
    }

    /// Counts a block of the C library, or null, that is freed, or resized and so no longer aligned.
    #[inline(always)]
    pub(super) fn remove(block: *mut c_void) {
        if BYTES.load(Ordering::Relaxed) != 0 {
            let room = room(block);
            let less = |bytes: usize| Some(bytes.saturating_sub(room));
            let _ = BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }
}

/// malloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    if size <= slab::MAX_BYTES {
        let block = small::cached(size);
        if !block.is_null() {
            return block;
        }
    }
    other(size)
}

/// malloc(3) of a size that the cache of the thread does not have.
#[inline(never)]
fn other(size: usize) -> *mut c_void {
    pass_on!(malloc(size));
    // SAFETY: malloc(3).
    block(size, ALIGN, false, || unsafe { (next::malloc.get())(size) })
}

/// calloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    pass_on!(calloc(count, size));
    // The allocator refuses an overflow.
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
    if small::is_ours(pointer) {
        // SAFETY: the caller's promise.
        return unsafe { small::free(pointer) };
    }
    // SAFETY: the caller's promise.
    unsafe { free_other(pointer) }
}

/// free(3) of a block that is not one of the slabs.
///
/// # Safety
/// As for [`free`].
#[inline(never)]
unsafe fn free_other(pointer: *mut c_void) {
    // SAFETY: the caller's promise; the same call.
    unsafe {
        match heap::is_ours(pointer.addr()) {
            true => release(pointer),
            false => {
                libcs::remove(pointer);
                (next::free.get())(pointer);
            }
        }
    }
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
    pass_on!(realloc(pointer, size));
    if pointer.is_null() {
        return malloc(size);
    }
    if heap::is_ours(pointer.addr()) {
        // SAFETY: the caller's promise.
        return on(|| unsafe { resize(pointer, size) });
    }
    if let Some(room) = small::room(pointer) {
        // SAFETY: the caller's promise; the size is the slab's.
        return unsafe { resize_small(pointer, room, size) };
    }
    libcs::remove(pointer);
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
    small::passed(size);
    drained(&resize)
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
    // SAFETY: the caller's promise; the size is the heap's.
    unsafe { moved_or_kept(pointer, room, size, || grown(size, room)) }
}

/// Resizes a block of the slabs with that room.
///
/// # Safety
/// As for [`realloc`].
unsafe fn resize_small(pointer: *mut c_void, room: usize, size: usize) -> *mut c_void {
    if room == 0 {
        invalid("realloc(): invalid pointer");
    }
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
    unsafe { moved_or_kept(pointer, room, size, || grown(size, room)) }
}

/// Allocates a block for one that grows beyond `room`.
fn grown(size: usize, room: usize) -> *mut c_void {
    let block = (is_large(size) && size > room).then(|| large(size, ALIGN, false, room));
    block.flatten().unwrap_or_else(|| malloc(size))
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
    let Some(block) = large(size, ALIGN, false, size) else {
        return drained(&resize);
    };
    // SAFETY: the caller's promise; both blocks have that size, and the copy precedes the free.
    unsafe {
        let room = (next::malloc_usable_size.get())(pointer);
        heap::copy(pointer.addr(), block.addr(), room.min(size));
        (next::free.get())(pointer);
    }
    block
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
    pass_on!(memalign(align, size));
    if !align.is_power_of_two() {
        // SAFETY: the same call.
        return unsafe { (next::memalign.get())(align, size) };
    }
    // SAFETY: the same call.
    block(size, align, false, || unsafe {
        (next::memalign.get())(align, size)
    })
}

/// aligned_alloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    pass_on!(aligned_alloc(align, size));
    if !align.is_power_of_two() {
        // Refused since glibc 2.38, and by musl.
        // SAFETY: the same call.
        return unsafe { (next::aligned_alloc.get())(align, size) };
    }
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
    pass_on!(posix_memalign(out, align, size));
    if align.is_power_of_two()
        && align.is_multiple_of(size_of::<*mut c_void>())
        && let Some(block) = own(size, align, false)
    {
        // SAFETY: the caller's promise.
        unsafe { out.write(block) };
        return 0;
    }
    // SAFETY: the same call.
    let allocate = || unsafe { (next::posix_memalign.get())(out, align, size) };
    let mut error = allocate();
    if error == libc::ENOMEM && gather::is_pending() {
        let saved = next::errno();
        if gather::drain() {
            error = allocate();
        }
        set_errno(saved);
    }
    if error == 0 && is_over_aligned(align) {
        // SAFETY: the caller's promise; the call has written it.
        libcs::add(unsafe { *out });
    }
    error
}

/// valloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn valloc(size: usize) -> *mut c_void {
    pass_on!(valloc(size));
    // SAFETY: the same call.
    block(size, rustix::param::page_size(), false, || unsafe {
        (next::valloc.get())(size)
    })
}

/// pvalloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(size: usize) -> *mut c_void {
    pass_on!(pvalloc(size));
    let page = rustix::param::page_size();
    // The C library refuses an overflow.
    let rounded = size.checked_next_multiple_of(page).unwrap_or(size);
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
    pass_on!(malloc_usable_size(pointer));
    if heap::is_ours(pointer.addr()) {
        // SAFETY: the caller's promise.
        return on(|| unsafe { heap::room(pointer.addr()) }).unwrap_or(0);
    }
    // SAFETY: the same call.
    small::room(pointer).unwrap_or_else(|| unsafe { (next::malloc_usable_size.get())(pointer) })
}

/// malloc_trim(3).
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(pad: usize) -> c_int {
    let trimmed = on(|| heap::trim() | small::trim());
    // SAFETY: the same call.
    let result = unsafe { (next::malloc_trim.get())(pad) };
    c_int::from(trimmed || result != 0)
}
