//! `--heap=mimalloc`: mimalloc serves the whole program; on the pool, where there is one.
//!
//! [`divert`] puts mimalloc's functions where glibc's were ([`crate::next`]), so that ours go on to them.
//! Blocks that glibc handed out before (the dynamic loader's, mostly) go back to glibc: mimalloc knows its own.
//! Its arenas are the pool's addresses, whose pages come as it commits them ([`jumbo_inside::heap::managed`]);
//! beyond the pool it maps its own, which are advised. Where there is a pool, blocks of whole base pages are glibc's:
//! the program may protect or drop some of their pages, which hugetlb pages refuse. `shim.c` has the C side.

use core::ffi::{c_int, c_void};
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

use jumbo_inside::gather;
use jumbo_inside::heap::{self, managed};
use jumbo_inside::orders::PoolOrder;
use jumbo_inside::sandbox;
use rustix::io::Errno;
use rustix::mm::{self, MapFlags, MprotectFlags, ProtFlags};

use crate::next::{self, Next, set_errno};
use crate::reaper::auto;

unsafe extern "C" {
    fn jumbo_mimalloc_start(pool: *mut c_void, size: usize);
    fn jumbo_mimalloc_unit() -> usize;
    fn jumbo_mimalloc_owns(block: *const c_void) -> bool;
    fn jumbo_mimalloc_taken() -> usize;
    fn jumbo_mimalloc_malloc(size: usize) -> *mut c_void;
    fn jumbo_mimalloc_calloc(count: usize, size: usize) -> *mut c_void;
    fn jumbo_mimalloc_realloc(block: *mut c_void, size: usize) -> *mut c_void;
    fn jumbo_mimalloc_aligned(align: usize, size: usize) -> *mut c_void;
    fn jumbo_mimalloc_free(block: *mut c_void) -> bool;
    fn jumbo_mimalloc_room(block: *const c_void) -> usize;
    fn jumbo_mimalloc_trim();
    fn jumbo_mimalloc_confine();
    fn jumbo_mimalloc_before_fork();
    fn jumbo_mimalloc_after_fork();
}

/// glibc's, for its own blocks.
static FREE: Next<unsafe extern "C" fn(*mut c_void)> = Next::empty();
static ROOM: Next<unsafe extern "C" fn(*mut c_void) -> usize> = Next::empty();
static TRIM: Next<unsafe extern "C" fn(usize) -> c_int> = Next::empty();
static MEMALIGN: Next<unsafe extern "C" fn(usize, usize) -> *mut c_void> = Next::empty();

/// What asks for whole base pages goes to glibc.
static POOLED: AtomicBool = AtomicBool::new(false);

/// The library was built with it.
pub(crate) const IS_THERE: bool = true;

static STARTED: AtomicBool = AtomicBool::new(false);

/// Bytes that it has taken from the pool.
static COMMITTED: AtomicUsize = AtomicUsize::new(0);
/// What it had taken when [`auto`] was last asked to look.
static TOLD: AtomicUsize = AtomicUsize::new(0);

/// The thread whose fork holds mimalloc's locks, and the forks inside of that one. Written with the locks held.
static HOLDER: AtomicUsize = AtomicUsize::new(0);
static NESTED: AtomicU8 = AtomicU8::new(0);

/// Starts mimalloc and hands the program over to it. Once, after everything was looked up.
pub(crate) fn divert(pool: Option<PoolOrder>) {
    // SAFETY: no promise is asked for.
    let unit = unsafe { jumbo_mimalloc_unit() };
    let range = pool.map_or(0..0, |order| managed::range(order, unit));
    // SAFETY: the range is the pool's, used for nothing else, and committed by `jumbo_mimalloc_commit`.
    unsafe { jumbo_mimalloc_start(with_exposed_provenance_mut(range.start), range.len()) };
    STARTED.store(true, Ordering::Release);
    POOLED.store(!range.is_empty(), Ordering::Relaxed);

    FREE.replace(next::free.address());
    ROOM.replace(next::malloc_usable_size.address());
    TRIM.replace(next::malloc_trim.address());
    MEMALIGN.replace(next::memalign.address());
    next::free.replace(free as *mut c_void);
    next::realloc.replace(realloc as *mut c_void);
    next::malloc_usable_size.replace(malloc_usable_size as *mut c_void);
    next::malloc_trim.replace(malloc_trim as *mut c_void);
    next::memalign.replace(memalign as *mut c_void);
    next::aligned_alloc.replace(memalign as *mut c_void);
    next::posix_memalign.replace(posix_memalign as *mut c_void);
    next::valloc.replace(valloc as *mut c_void);
    next::pvalloc.replace(pvalloc as *mut c_void);
    next::calloc.replace(jumbo_mimalloc_calloc as *mut c_void);
    // Last: from now on there are blocks of mimalloc's.
    next::malloc.replace(jumbo_mimalloc_malloc as *mut c_void);
}

/// Before fork(2): mimalloc's locks are taken, so that the child finds them free.
pub(crate) fn before_fork() {
    if !STARTED.load(Ordering::Acquire) {
        return;
    }
    if HOLDER.load(Ordering::Relaxed) == heap::thread() {
        // A signal handler that forks between our handlers.
        NESTED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    // SAFETY: `after_fork` follows, in both processes.
    unsafe { jumbo_mimalloc_before_fork() };
    HOLDER.store(heap::thread(), Ordering::Relaxed);
}

/// After fork(2), in both processes.
pub(crate) fn after_fork() {
    if !STARTED.load(Ordering::Acquire) {
        return;
    }
    if NESTED.load(Ordering::Relaxed) > 0 {
        NESTED.fetch_sub(1, Ordering::Relaxed);
        return;
    }
    HOLDER.store(0, Ordering::Relaxed);
    // SAFETY: `before_fork` has taken them, in this thread.
    unsafe { jumbo_mimalloc_after_fork() };
}

/// Before a seccomp filter: it makes no more system calls than to map and unmap.
pub(crate) fn confine() {
    if STARTED.load(Ordering::Acquire) {
        // SAFETY: no promise is asked for.
        unsafe { jumbo_mimalloc_confine() };
    }
}

/// Bytes that mimalloc has taken for its blocks.
pub(crate) fn taken() -> usize {
    if STARTED.load(Ordering::Acquire) {
        // SAFETY: no promise is asked for.
        unsafe { jumbo_mimalloc_taken() }.saturating_add(COMMITTED.load(Ordering::Relaxed))
    } else {
        0
    }
}

/// mimalloc may have taken more. It holds no lock.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_asked() {
    // To look any further takes system calls.
    let taken = taken();
    if TOLD.load(Ordering::Relaxed) != taken {
        TOLD.store(taken, Ordering::Relaxed);
        auto::asked();
    }
}

fn is_mimallocs(block: *const c_void) -> bool {
    // SAFETY: any address may be asked about.
    unsafe { jumbo_mimalloc_owns(block) }
}

/// # Safety
/// As for free(3).
unsafe extern "C" fn free(block: *mut c_void) {
    // SAFETY: the caller's promise; a block that is not mimalloc's is left alone.
    if !unsafe { jumbo_mimalloc_free(block) } && !block.is_null() {
        // SAFETY: the caller's promise; the block is glibc's.
        unsafe { (FREE.get())(block) }
    }
}

/// # Safety
/// As for realloc(3); `block` is not null.
unsafe extern "C" fn realloc(block: *mut c_void, size: usize) -> *mut c_void {
    if size == 0 {
        // As glibc does.
        // SAFETY: the caller's promise.
        unsafe { free(block) };
        return core::ptr::null_mut();
    }
    if is_mimallocs(block) {
        // SAFETY: the caller's promise; the block is mimalloc's.
        return unsafe { jumbo_mimalloc_realloc(block, size) };
    }
    // SAFETY: the caller's promise; the block is glibc's, and has the room that it says.
    unsafe {
        let room = (ROOM.get())(block);
        let moved = jumbo_mimalloc_malloc(size);
        if !moved.is_null() {
            heap::copy(block.addr(), moved.addr(), room.min(size));
            (FREE.get())(block);
        }
        moved
    }
}

/// # Safety
/// As for malloc_usable_size(3).
unsafe extern "C" fn malloc_usable_size(block: *mut c_void) -> usize {
    if is_mimallocs(block) {
        // SAFETY: the caller's promise; the block is mimalloc's.
        return unsafe { jumbo_mimalloc_room(block) };
    }
    // SAFETY: the caller's promise; the block is glibc's, or null.
    unsafe { (ROOM.get())(block) }
}

extern "C" fn malloc_trim(pad: usize) -> c_int {
    // SAFETY: as for malloc_trim(3).
    unsafe {
        jumbo_mimalloc_trim();
        (TRIM.get())(pad);
    }
    1
}

/// memalign(3) and aligned_alloc(3): an alignment that is no power of two is rounded up to one, as by
/// glibc.
extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    let Some(align) = align
        .checked_next_power_of_two()
        .filter(|align| *align <= usize::MAX / 2)
    else {
        set_errno(libc::EINVAL);
        return core::ptr::null_mut();
    };
    // SAFETY: a power of two.
    unsafe { aligned(align, size) }
}

/// A block at a multiple of `align`.
///
/// # Safety
/// `align` is a power of two.
unsafe fn aligned(align: usize, size: usize) -> *mut c_void {
    if POOLED.load(Ordering::Relaxed) && align >= rustix::param::page_size() {
        managed::beyond(size);
        // SAFETY: the caller's promise; the block is not mimalloc's, and goes back to glibc.
        return unsafe { (MEMALIGN.get())(align, size) };
    }
    // SAFETY: the caller's promise.
    unsafe { jumbo_mimalloc_aligned(align, size) }
}

/// # Safety
/// As for posix_memalign(3).
unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    // It is left alone.
    let errno = next::errno();
    // SAFETY: a power of two.
    let block = unsafe { aligned(align, size) };
    set_errno(errno);
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller's promise.
    unsafe { out.write(block) };
    0
}

extern "C" fn valloc(size: usize) -> *mut c_void {
    memalign(rustix::param::page_size(), size)
}

extern "C" fn pvalloc(size: usize) -> *mut c_void {
    let page = rustix::param::page_size();
    match size.checked_next_multiple_of(page) {
        Some(size) => memalign(page, size),
        None => {
            set_errno(libc::ENOMEM);
            core::ptr::null_mut()
        }
    }
}

/// The commit function of the pool's arena: `mi_commit_fun_t`. What it commits is never promised to be zero.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_commit(
    commit: bool,
    start: *mut c_void,
    size: usize,
    is_zero: *mut bool,
    _argument: *mut c_void,
) -> bool {
    if !is_zero.is_null() {
        // SAFETY: mimalloc passes null or a place of its own.
        unsafe { is_zero.write(false) };
    }
    if commit {
        COMMITTED.fetch_add(size, Ordering::Relaxed);
        // SAFETY: mimalloc commits parts of the range that it was given.
        unsafe { managed::commit(start.addr(), size) }
    } else {
        // SAFETY: mimalloc gives up what it committed.
        unsafe { managed::uncommit(start.addr(), size) }
    }
}

/// mmap(2) of anonymous memory, for mimalloc.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_map(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
) -> isize {
    let prot = ProtFlags::from_bits_retain(prot.cast_unsigned());
    // The bit says what rustix's function says itself.
    let flags = MapFlags::from_bits_retain((flags & !libc::MAP_ANONYMOUS).cast_unsigned());
    // SAFETY: mimalloc maps at addresses of the kernel's choice, or over memory of its own.
    match unsafe { mm::mmap_anonymous(addr, len, prot, flags) } {
        Ok(address) => {
            // Its tables, at the start, are no matter.
            if prot.contains(ProtFlags::WRITE) && STARTED.load(Ordering::Relaxed) {
                managed::beyond(len);
            }
            managed::advise(address.addr(), len);
            address.expose_provenance().cast_signed()
        }
        Err(errno) => -isize::try_from(errno.raw_os_error()).unwrap_or(1),
    }
}

/// munmap(2), for mimalloc.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_unmap(addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: mimalloc unmaps memory of its own, without blocks in it.
    answer(unsafe { mm::munmap(addr, len) })
}

/// madvise(2), for mimalloc.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_advise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    let advice = match advice {
        libc::MADV_DONTNEED => mm::Advice::LinuxDontNeed,
        libc::MADV_FREE => mm::Advice::LinuxFree,
        libc::MADV_HUGEPAGE => mm::Advice::LinuxHugepage,
        _ => return answer(Err(Errno::INVAL)),
    };
    if !sandbox::allows_advice() {
        let drops = advice != mm::Advice::LinuxHugepage;
        return answer(match drops {
            // SAFETY: mimalloc drops memory of its own, without blocks in it.
            true => unsafe { managed::renew(addr.addr(), len) },
            false => Err(Errno::PERM),
        });
    }
    if advice == mm::Advice::LinuxDontNeed && gather::is_large(len) {
        // A freed block's: no lock is held.
        // SAFETY: mimalloc drops memory of its own, without blocks in it.
        if let Some(result) = unsafe { gather::discard(addr.addr(), len) } {
            return answer(result);
        }
    }
    // SAFETY: mimalloc drops memory of its own, without blocks in it.
    answer(unsafe { mm::madvise(addr, len, advice) })
}

/// mprotect(2), for mimalloc.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_protect(addr: *mut c_void, len: usize, prot: c_int) -> c_int {
    let prot = MprotectFlags::from_bits_retain(prot.cast_unsigned());
    // SAFETY: mimalloc protects memory of its own.
    answer(unsafe { mm::mprotect(addr, len, prot) })
}

fn answer(result: rustix::io::Result<()>) -> c_int {
    result.map_or_else(|errno| -errno.raw_os_error(), |()| 0)
}
