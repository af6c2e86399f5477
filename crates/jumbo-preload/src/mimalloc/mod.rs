//! mimalloc: small blocks of threads that allocate much; with `--heap=mimalloc` and a pool all
//! blocks, on pages of the pool.
//!
//! [`crate::alloc`] tries mimalloc first, by the size of a new block or the address of an old one.
//! After a [`retreat`] all new blocks are glibc's. [`jumbo_inside::heap::managed`] reserves the
//! arenas and opens them in whole huge pages, or commits the pool's. Blocks of whole base pages are
//! glibc's: the program may protect or drop some of their pages, which hugetlb pages refuse.
//! `shim.c` has the C side.

use core::ffi::{c_int, c_void};
use core::ops::Range;
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

use jumbo_inside::density;
use jumbo_inside::gather;
use jumbo_inside::heap::{self, managed};
use jumbo_inside::orders::PoolOrder;
use jumbo_inside::sandbox;
use jumbo_inside::sync::{Lock, thread_pointer};
use jumbo_inside::sys;
use rustix::io::Errno;
use rustix::mm::{self, MapFlags, MprotectFlags, ProtFlags};

use crate::alloc::{self, ALIGN};
use crate::end::invalid;
use crate::next;
use crate::own_stack::on;
use crate::reaper::auto;

unsafe extern "C" {
    fn jumbo_mimalloc_start(pool: *mut c_void, size: usize, is_glibc: bool);
    fn jumbo_mimalloc_unit() -> usize;
    fn jumbo_mimalloc_owns(block: *const c_void) -> bool;
    fn jumbo_mimalloc_taken() -> usize;
    fn jumbo_mimalloc_threads() -> usize;
    fn jumbo_mimalloc_malloc(size: usize) -> *mut c_void;
    fn jumbo_mimalloc_allocate(size: usize, zeroed: bool) -> *mut c_void;
    fn jumbo_mimalloc_aligned(align: usize, size: usize) -> *mut c_void;
    fn jumbo_mimalloc_free(block: *mut c_void);
    fn jumbo_mimalloc_room(block: *const c_void) -> usize;
    fn jumbo_mimalloc_reuse(size: usize, zeroed: bool) -> *mut c_void;
    fn jumbo_mimalloc_trim() -> bool;
    fn jumbo_mimalloc_confine();
    fn jumbo_mimalloc_unconfine();
    fn jumbo_mimalloc_before_fork(is_alone: bool) -> bool;
    fn jumbo_mimalloc_after_fork();
    fn jumbo_mimalloc_forked() -> bool;
}

jumbo_inside::one_page! {
    /// Upper bound of the sizes that mimalloc allocates: [`usize::MAX`] (all) on a pool, 0 (none)
    /// after a [`retreat`] and during a fork.
    static SIZE_LIMIT: AtomicUsize = AtomicUsize::new(0);
    /// [`SIZE_LIMIT`] outside of forks and retreats.
    static USUAL_SIZE_LIMIT: AtomicUsize = AtomicUsize::new(0);
    /// Reasons for a retreat: flags [`COUNTED`], [`CONFINED`], [`CLOCKLESS`].
    static RETREATS: AtomicU8 = AtomicU8::new(0);
}
/// Unused addresses count towards a limit or lock.
const COUNTED: u8 = 1;
/// A seccomp filter is in force.
const CONFINED: u8 = 2;
/// The clock is not readable.
const CLOCKLESS: u8 = 4;
/// Size limit on glibc. The size classes are 16 bytes apart up to 512 bytes, as glibc's are, and 32
/// up to 1024 (`build.rs`), and blocks have no headers. Larger classes are up to a quarter apart:
/// objects of 1040 bytes would take a fifth more memory.
const SMALL_BYTES: usize = 1024 + 1;

/// mimalloc is built in.
pub(crate) const IS_THERE: bool = true;

jumbo_inside::one_page! {
    static STARTED: AtomicBool = AtomicBool::new(false);
}
/// mimalloc has memory outside of the addresses of [`managed::may_hold`].
static IS_ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// Minimum size of an arena (MI_ARENA_MIN_SIZE). mimalloc's tables are smaller.
const MIN_ARENA_BYTES: usize = 32 << 20;

/// Bytes committed from the pool.
static COMMITTED: AtomicUsize = AtomicUsize::new(0);
/// Value of [`taken`] at the last report to [`auto`].
static REPORTED: AtomicUsize = AtomicUsize::new(0);

jumbo_inside::one_page! {
    /// Thread whose fork holds mimalloc's locks, with [`ALONE`] if it needs none.
    static HOLDER: AtomicUsize = AtomicUsize::new(0);
    /// Forks inside of that fork.
    static NESTED: AtomicU8 = AtomicU8::new(0);
}

/// Flag in [`HOLDER`], whose addresses are even: no lock is held, since there is no other thread.
const ALONE: usize = 1;

/// The program's first thread, which must start mimalloc: mimalloc treats the thread that does as
/// the main one.
static FIRST: AtomicUsize = AtomicUsize::new(0);
/// Number of threads that mimalloc serves in any case; plus one per [`BYTES_PER_THREAD`] in use.
/// Each has up to 3 MiB that is not full: a page of 64 KiB in each of 48 size classes.
const MIN_THREADS: usize = 5;
const BYTES_PER_THREAD: usize = 20 << 20;

/// Diverts allocations to mimalloc: all at once on a pool, else small blocks of threads that
/// allocate much. Once. False if the pool is not available; nothing is diverted then.
pub(crate) fn divert(pool: Option<PoolOrder>) -> bool {
    FIRST.store(thread_pointer(), Ordering::Relaxed);
    let Some(pool) = pool else {
        // musl's malloc maps its memory in pieces smaller than a huge page.
        let limit = if next::is_glibc() {
            SMALL_BYTES
        } else {
            heap::LARGE_BLOCK_BYTES
        };
        set_size_limit(limit);
        return true;
    };
    // SAFETY: no requirement.
    let range = managed::range(pool, unsafe { jumbo_mimalloc_unit() });
    if range.is_empty() {
        return false;
    }
    start(range);
    set_size_limit(usize::MAX);
    true
}

fn set_size_limit(size: usize) {
    USUAL_SIZE_LIMIT.store(size, Ordering::Relaxed);
    SIZE_LIMIT.store(size, Ordering::Relaxed);
    alloc::set_plain();
}

/// Returns the bound of the sizes that [`allocate`] serves, without [retreats](retreat) and forks.
pub(crate) fn usual_size_limit() -> usize {
    USUAL_SIZE_LIMIT.load(Ordering::Relaxed)
}

/// Reports whether [`allocate`] may serve sizes beyond the limit.
pub(crate) fn may_reuse() -> bool {
    SPARSE_THREADS.load(Ordering::SeqCst) != 0
}

/// Reports whether blocks may be outside of the addresses of [`heap::may_hold`].
#[inline(always)]
pub(crate) fn is_elsewhere() -> bool {
    IS_ELSEWHERE.load(Ordering::Relaxed)
}

fn start(pool: Range<usize>) {
    // SAFETY: the range is the pool's, has no other use, and `jumbo_mimalloc_commit` commits it.
    unsafe {
        let start = with_exposed_provenance_mut(pool.start);
        jumbo_mimalloc_start(start, pool.len(), next::is_glibc());
    }
    STARTED.store(true, Ordering::Release);
}

/// Starts mimalloc if this is the first thread. Also called before the program makes a thread,
/// which could not start mimalloc.
pub(crate) fn before_thread() {
    let is_first = FIRST.load(Ordering::Relaxed) == thread_pointer();
    if is_first && is_small(0) && !STARTED.load(Ordering::Relaxed) {
        start(0..0);
    }
}

/// Aborts after the program overwrote a free list of mimalloc.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_corrupted() -> ! {
    invalid("malloc(): corrupted free list")
}

/// Lock of mimalloc: a word on the C side.
type Mutex = Lock<()>;
const _: () = assert!(size_of::<Mutex>() == size_of::<u32>());

/// pthread_mutex_lock(3): deadlocks if this thread holds the lock.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_lock(lock: &Mutex) -> c_int {
    while !lock.acquire() {
        core::hint::spin_loop();
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_try_lock(lock: &Mutex) -> c_int {
    if lock.try_acquire() { 0 } else { libc::EBUSY }
}

#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_unlock(lock: &Mutex) -> c_int {
    // SAFETY: mimalloc releases a lock that this thread holds.
    unsafe { lock.release() };
    0
}

#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_holds(lock: &Mutex) -> bool {
    lock.is_own()
}

/// Registers `done` to be called with `value` at the end of this thread. Fails without a key; the
/// process usually has one thread then.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_at_end(
    value: *const c_void,
    done: unsafe extern "C" fn(*mut c_void),
) -> c_int {
    static KEY: Lock<Option<libc::pthread_key_t>> = Lock::new(None);
    let make = |key: &mut Option<libc::pthread_key_t>| {
        let mut new = 0;
        // SAFETY: the number is written to `new`.
        if key.is_none() && unsafe { (next::pthread_key_create.get())(&raw mut new, done) } == 0 {
            *key = Some(new);
        }
        *key
    };
    KEY.with(make).flatten().map_or(libc::ENOMEM, |key| {
        // SAFETY: the key is never deleted.
        unsafe { (next::pthread_setspecific.get())(key, value) }
    })
}

/// Reports whether mimalloc serves one more thread.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_admits() -> bool {
    on(before_thread);
    if !STARTED.load(Ordering::Acquire) {
        return false;
    }
    // SAFETY: no requirement.
    unsafe { jumbo_mimalloc_threads() < MIN_THREADS + taken() / BYTES_PER_THREAD }
}

/// Allocates new blocks from glibc. Old blocks stay mimalloc's until they are freed, or grow.
fn retreat(reason: u8) {
    RETREATS.fetch_or(reason, Ordering::SeqCst);
    SIZE_LIMIT.store(0, Ordering::SeqCst);
}

/// Allocates from mimalloc again, unless there is a reason for a retreat.
fn advance() {
    let usual = USUAL_SIZE_LIMIT.load(Ordering::Relaxed);
    if RETREATS.load(Ordering::SeqCst) == 0 {
        SIZE_LIMIT.store(usual, Ordering::SeqCst);
    }
    // Another thread may just have added a reason.
    if RETREATS.load(Ordering::SeqCst) != 0 {
        SIZE_LIMIT.store(0, Ordering::SeqCst);
    }
}

/// Reports whether all blocks come from a pool.
pub(crate) fn has_pool() -> bool {
    USUAL_SIZE_LIMIT.load(Ordering::Relaxed) == usize::MAX
}

/// Retreats and releases unused addresses, which count from now on (mlockall(2), a limit).
pub(crate) fn give_up_addresses() {
    retreat(COUNTED);
    if STARTED.load(Ordering::Acquire) {
        managed::close();
    }
}

/// Reports whether the program may have blocks of mimalloc.
pub(crate) fn has_served() -> bool {
    USUAL_SIZE_LIMIT.load(Ordering::Relaxed) != 0
}

/// Reports whether mimalloc allocates blocks of `size` bytes.
#[inline(always)]
pub(crate) fn is_small(size: usize) -> bool {
    size < SIZE_LIMIT.load(Ordering::Relaxed)
}

/// Takes mimalloc's locks before fork(2), so that the child can release them.
pub(crate) fn before_fork() {
    if !STARTED.load(Ordering::Acquire) {
        return;
    }
    if HOLDER.load(Ordering::Relaxed) & !ALONE == thread_pointer() {
        // A signal handler that forks between the fork handlers.
        NESTED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    // SAFETY: `after_fork` follows, in both processes.
    let holds = unsafe { jumbo_mimalloc_before_fork(next::is_single_threaded()) };
    let alone = if holds { 0 } else { ALONE };
    HOLDER.store(thread_pointer() | alone, Ordering::Relaxed);
    // The program's own fork handlers may allocate while the locks are held.
    SIZE_LIMIT.store(0, Ordering::SeqCst);
}

/// Releases mimalloc's locks after fork(2), in both processes.
pub(crate) fn after_fork() {
    // mimalloc may have started in another thread since `before_fork`.
    let holder = HOLDER.load(Ordering::Relaxed);
    if holder & !ALONE != thread_pointer() {
        return;
    }
    if NESTED.load(Ordering::Relaxed) > 0 {
        NESTED.fetch_sub(1, Ordering::Relaxed);
        return;
    }
    advance();
    HOLDER.store(0, Ordering::Relaxed);
    if holder & ALONE == 0 {
        // SAFETY: `before_fork` took them, in this thread.
        unsafe { jumbo_mimalloc_after_fork() };
    }
}

/// Forgets the parent's other threads, in the child of a fork after [`after_fork`].
pub(crate) fn forked() {
    if STARTED.load(Ordering::Acquire) {
        // SAFETY: this is the child, and `after_fork` has released the locks.
        let is_sparse = unsafe { jumbo_mimalloc_forked() };
        if SPARSE_THREADS.swap(usize::from(is_sparse), Ordering::SeqCst) != usize::from(is_sparse) {
            alloc::set_plain();
        }
    }
}

/// Stops allocations and purges of mimalloc before a seccomp filter, which may allow only glibc's
/// calls: a purge makes other system calls and reads the clock.
pub(crate) fn confine() {
    stop(CONFINED);
}

/// Stops allocations and purges of mimalloc before the clock becomes unreadable.
pub(crate) fn without_clock() {
    stop(CLOCKLESS);
}

fn stop(reason: u8) {
    retreat(reason);
    if STARTED.load(Ordering::Acquire) {
        // SAFETY: no requirement.
        unsafe { jumbo_mimalloc_confine() };
    }
}

/// Reverts [`confine`] after the kernel has refused the filter.
pub(crate) fn unconfine() {
    if sandbox::is_entered_later() {
        return;
    }
    let others = RETREATS.fetch_and(!CONFINED, Ordering::SeqCst) & !CONFINED;
    if others & CLOCKLESS == 0 && STARTED.load(Ordering::Acquire) {
        // SAFETY: no requirement.
        unsafe { jumbo_mimalloc_unconfine() };
    }
    // During a fork its end does this.
    if HOLDER.load(Ordering::SeqCst) == 0 {
        advance();
    }
    // Another thread may just have installed a filter.
    if sandbox::is_entered_later() {
        confine();
    }
}

/// Returns the bytes that mimalloc has taken for its blocks.
pub(crate) fn taken() -> usize {
    if STARTED.load(Ordering::Acquire) {
        // SAFETY: no requirement.
        unsafe { jumbo_mimalloc_taken() }.saturating_add(COMMITTED.load(Ordering::Relaxed))
    } else {
        0
    }
}

/// Reports an allocation of mimalloc to [`auto`]. mimalloc holds no lock.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_allocated() {
    // Only if mimalloc took more: the check may make system calls.
    let taken = taken();
    if REPORTED.load(Ordering::Relaxed) != taken {
        REPORTED.store(taken, Ordering::Relaxed);
        on(auto::allocated);
    }
}

/// Frees retained memory before mimalloc takes `size` bytes.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_grows(size: usize) {
    on(|| heap::about_to_fill(size));
}

jumbo_inside::one_page! {
    /// Number of threads whose live objects are so sparse that mimalloc keeps more than it may.
    static SPARSE_THREADS: AtomicUsize = AtomicUsize::new(0);
}

/// Counts a thread that becomes sparse, or is no longer sparse.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_sparse(now: bool) {
    match now {
        true => SPARSE_THREADS.fetch_add(1, Ordering::SeqCst),
        false => SPARSE_THREADS.fetch_sub(1, Ordering::SeqCst),
    };
    alloc::set_plain();
}

/// Returns the memory that may be held beyond live objects.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_allowance() -> usize {
    density::allowance()
}

/// Drops base pages without live blocks. False if they stay.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_thin(addr: *mut c_void, len: usize) -> bool {
    // SAFETY: mimalloc drops its own memory, without blocks in it.
    on(|| unsafe { managed::discard_base_pages(addr.addr(), len) }).is_ok()
}

/// Allocates a block above the size limit from free memory of mimalloc's pages; else null.
#[cold]
fn reuse(size: usize, align: usize, zeroed: bool) -> *mut c_void {
    // Nothing after a retreat and during a fork.
    if !is_small(0) || align != ALIGN {
        return null_mut();
    }
    // SAFETY: this thread is not inside of mimalloc.
    on(|| unsafe { jumbo_mimalloc_reuse(size, zeroed) })
}

/// Reports whether a block may be mimalloc's, by its address: a quick test that excludes most
/// others.
#[inline(always)]
fn may_own(block: *const c_void) -> bool {
    (managed::may_hold(block.addr()) || is_elsewhere()) && STARTED.load(Ordering::Acquire)
}

/// Allocates a block from mimalloc. Null if the block is not mimalloc's to allocate, or without
/// memory (a limit, a concurrent [`retreat`]): the caller allocates from glibc.
#[inline(always)]
pub(crate) fn allocate(size: usize, align: usize, zeroed: bool) -> *mut c_void {
    if !is_small(size) {
        return match SPARSE_THREADS.load(Ordering::Relaxed) {
            0 => null_mut(),
            _ => reuse(size, align, zeroed),
        };
    }
    if align != ALIGN {
        return aligned(size, align);
    }
    // SAFETY: no requirement.
    unsafe { jumbo_mimalloc_allocate(size, zeroed) }
}

fn aligned(size: usize, align: usize) -> *mut c_void {
    // glibc handles an alignment that is no power of two. mimalloc adds the alignment to the size,
    // except for sizes that are aligned by themselves.
    let is_natural = align <= ALIGN || align <= size && size.is_power_of_two();
    let fits = is_natural || SIZE_LIMIT.load(Ordering::Relaxed) == usize::MAX;
    if fits && align.is_power_of_two() && align < rustix::param::page_size() {
        // SAFETY: the alignment is a power of two.
        return unsafe { jumbo_mimalloc_aligned(align, size) };
    }
    managed::count_beyond_pool(size);
    null_mut()
}

/// malloc(3) of a small size; by [`alloc::jumbo_malloc_other`] if mimalloc has no block.
#[inline(always)]
pub(crate) fn malloc(size: usize) -> *mut c_void {
    // SAFETY: no requirement.
    unsafe { jumbo_mimalloc_malloc(size) }
}

/// free(3); by [`alloc::jumbo_free_other`] if the block is not mimalloc's.
///
/// # Safety
/// As for free(3).
#[inline(always)]
pub(crate) unsafe fn free(block: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe {
        match may_own(block) {
            true => jumbo_mimalloc_free(block),
            false => alloc::jumbo_free_other(block),
        }
    }
}

/// malloc_usable_size(3) of a block of mimalloc; `None` for other blocks.
///
/// # Safety
/// As for malloc_usable_size(3).
pub(crate) unsafe fn room(block: *const c_void) -> Option<usize> {
    // SAFETY: the first call takes any address; the second has the caller's promise.
    unsafe {
        let is_own = may_own(block) && jumbo_mimalloc_owns(block);
        is_own.then(|| jumbo_mimalloc_room(block))
    }
}

/// malloc_trim(3).
pub(crate) fn trim() -> bool {
    // SAFETY: no requirement.
    STARTED.load(Ordering::Acquire) && unsafe { jumbo_mimalloc_trim() }
}

/// `mi_commit_fun_t` of the pool's arena. Committed memory may not be zero.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_commit(
    commit: bool,
    start: *mut c_void,
    size: usize,
    is_zero: *mut bool,
    _argument: *mut c_void,
) -> bool {
    if !is_zero.is_null() {
        // SAFETY: mimalloc passes null or the address of its own variable.
        unsafe { is_zero.write(false) };
    }
    if commit {
        COMMITTED.fetch_add(size, Ordering::Relaxed);
        // SAFETY: mimalloc commits parts of the pool's range.
        on(|| unsafe { managed::commit(start.addr(), size) })
    } else {
        // SAFETY: mimalloc uncommits memory that it committed.
        on(|| unsafe { managed::uncommit(start.addr(), size) })
    }
}

/// mmap(2) of anonymous memory for mimalloc. Returns a negative errno on failure.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_map(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
) -> isize {
    if prot == libc::PROT_NONE && len >= MIN_ARENA_BYTES {
        let reserved = on(|| managed::reserve(len)).map(usize::cast_signed);
        return reserved.unwrap_or(-isize::try_from(libc::ENOMEM).unwrap_or(1));
    }
    let prot = ProtFlags::from_bits_retain(prot.cast_unsigned());
    // rustix adds the flag.
    let flags = MapFlags::from_bits_retain((flags & !libc::MAP_ANONYMOUS).cast_unsigned());
    let mapped = match addr.is_null() {
        true => sys::map_own(len, prot, flags),
        // SAFETY: mimalloc maps at a hint, which replaces nothing, or over its own memory.
        false => unsafe { mm::mmap_anonymous(addr, len, prot, flags) },
    };
    match mapped {
        Ok(address) => {
            if !managed::may_hold(address.addr()) {
                IS_ELSEWHERE.store(true, Ordering::Relaxed);
            }
            // mimalloc's tables, mapped at its start, do not count.
            if prot.contains(ProtFlags::WRITE) && STARTED.load(Ordering::Relaxed) {
                managed::count_beyond_pool(len);
            }
            address.expose_provenance().cast_signed()
        }
        Err(errno) => -isize::try_from(errno.raw_os_error()).unwrap_or(1),
    }
}

/// munmap(2), for mimalloc.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_unmap(addr: *mut c_void, len: usize) -> c_int {
    if managed::is_reserved(addr.addr()) {
        // SAFETY: mimalloc unmaps its own reservation, without blocks in it.
        return answer(on(|| unsafe { managed::unreserve(addr.addr(), len) }));
    }
    // SAFETY: mimalloc unmaps its own memory, without blocks in it.
    answer(unsafe { mm::munmap(addr, len) })
}

/// madvise(2), for mimalloc.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_advise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE => {}
        libc::MADV_HUGEPAGE => return answer(on(|| managed::advise(addr.addr(), len))),
        _ => return answer(Err(Errno::INVAL)),
    }
    on(|| managed::dropped(addr.addr(), len, may_reuse()));
    // SAFETY, of all calls below: mimalloc drops its own memory, without blocks in it.
    if !sys::allows(advice) {
        // SAFETY: as above.
        return answer(on(|| unsafe { managed::discard(addr.addr(), len) }));
    }
    if advice == libc::MADV_DONTNEED && gather::is_large(len) {
        // The memory of a freed block: mimalloc holds no lock.
        // SAFETY: as above.
        if let Some(result) = on(|| unsafe { gather::discard(addr.addr(), len) }) {
            return answer(result);
        }
    }
    // SAFETY: as above.
    answer(unsafe { sys::advise(addr.addr(), len, advice) })
}

/// mprotect(2), for mimalloc.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_protect(addr: *mut c_void, len: usize, prot: c_int) -> c_int {
    if prot & libc::PROT_WRITE != 0 && managed::is_reserved(addr.addr()) {
        // SAFETY: mimalloc opens its own reservation.
        return answer(on(|| unsafe { managed::open(addr.addr(), len) }));
    }
    let prot = MprotectFlags::from_bits_retain(prot.cast_unsigned());
    // SAFETY: mimalloc protects its own memory.
    answer(unsafe { mm::mprotect(addr, len, prot) })
}

fn answer(result: rustix::io::Result<()>) -> c_int {
    result.map_or_else(|errno| -errno.raw_os_error(), |()| 0)
}
