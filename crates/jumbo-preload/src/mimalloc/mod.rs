//! Small allocations of threads that ask for much come from mimalloc; with `--heap=mimalloc` and a pool all do, and its pages
//! from the pool.
//!
//! The functions of [`crate::alloc`] ask here first, by size; about what is there already, by address: mimalloc knows its own.
//! [`retreat`] has glibc asked for all that is allocated from then on.
//! mimalloc's arenas are addresses that [`jumbo_inside::heap::managed`] reserves, and opens in whole huge pages; or the pool's,
//! whose pages come as it commits them. Blocks of whole base pages are glibc's: the program may protect or drop some of
//! their pages, which hugetlb pages refuse. `shim.c` has the C side.

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
use rustix::io::Errno;
use rustix::mm::{self, MapFlags, MprotectFlags, ProtFlags};

use crate::alloc::ALIGN;
use crate::end::invalid;
use crate::next;
use crate::reaper::auto;

unsafe extern "C" {
    fn jumbo_mimalloc_start(pool: *mut c_void, size: usize);
    fn jumbo_mimalloc_unit() -> usize;
    fn jumbo_mimalloc_owns(block: *const c_void) -> bool;
    fn jumbo_mimalloc_taken() -> usize;
    fn jumbo_mimalloc_threads() -> usize;
    fn jumbo_mimalloc_malloc(size: usize) -> *mut c_void;
    fn jumbo_mimalloc_zalloc(size: usize) -> *mut c_void;
    fn jumbo_mimalloc_aligned(align: usize, size: usize) -> *mut c_void;
    fn jumbo_mimalloc_free(block: *mut c_void) -> bool;
    fn jumbo_mimalloc_room(block: *const c_void) -> usize;
    fn jumbo_mimalloc_beside(size: usize, zeroed: bool) -> *mut c_void;
    fn jumbo_mimalloc_trim() -> bool;
    fn jumbo_mimalloc_confine();
    fn jumbo_mimalloc_unconfine();
    fn jumbo_mimalloc_before_fork(is_alone: bool) -> bool;
    fn jumbo_mimalloc_after_fork();
    fn jumbo_mimalloc_forked() -> bool;
}

jumbo_inside::one_page! {
    /// Blocks smaller than this come from mimalloc: all ([`usize::MAX`]) on a pool, none (0) after a [`retreat`] and while a fork
    /// is under way.
    static BELOW: AtomicUsize = AtomicUsize::new(0);
    /// [`BELOW`] while no fork is under way.
    static USUALLY_BELOW: AtomicUsize = AtomicUsize::new(0);
    /// Why all blocks are glibc's.
    static RETREATS: AtomicU8 = AtomicU8::new(0);
}
/// Addresses that are not used yet count.
const COUNTED: u8 = 1;
/// A seccomp filter.
const CONFINED: u8 = 2;
/// The clock may not be read.
const CLOCKLESS: u8 = 4;
/// Up to 128 bytes mimalloc's blocks are at most 16 bytes apart in size, as glibc's are, and have no headers. Beyond, they are up to
/// a quarter apart: a program with objects of 1040 bytes would take a fifth more memory.
const SMALL: usize = 128 + 1;

/// The library was built with it.
pub(crate) const IS_THERE: bool = true;

jumbo_inside::one_page! {
    static STARTED: AtomicBool = AtomicBool::new(false);
}
/// It has memory elsewhere than [`managed::may_hold`] says.
static IS_ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// What mimalloc reserves for an arena is so large, at least: MI_ARENA_MIN_SIZE. Its tables are smaller.
const ARENA: usize = 32 << 20;

/// Bytes that it has taken from the pool.
static COMMITTED: AtomicUsize = AtomicUsize::new(0);
/// What it had taken when [`auto`] was last asked to look.
static TOLD: AtomicUsize = AtomicUsize::new(0);

jumbo_inside::one_page! {
    /// The thread whose fork holds mimalloc's locks, or [`ALONE`] needs none, and the forks inside of that one.
    static HOLDER: AtomicUsize = AtomicUsize::new(0);
    static NESTED: AtomicU8 = AtomicU8::new(0);
}

/// In [`HOLDER`], whose addresses are even: no lock is held, since there is no other thread.
const ALONE: usize = 1;

/// The program's first thread: mimalloc takes the one that starts it for that.
static FIRST: AtomicUsize = AtomicUsize::new(0);
/// How many threads it may serve in any case; and another one for each so many bytes that it has taken.
const FEW: usize = 16;
const FOR_EACH: usize = 20 << 20;

/// Hands the program over to mimalloc: all of it at once where there is a pool, else small blocks once it asks for much. Once.
/// False where the pool cannot be had: all is left to others then.
pub(crate) fn divert(pool: Option<PoolOrder>) -> bool {
    FIRST.store(thread_pointer(), Ordering::Relaxed);
    let Some(pool) = pool else {
        // musl's malloc takes its memory in pieces that no huge page fits in.
        serve_below(if next::is_glibc() {
            SMALL
        } else {
            heap::LARGE_BLOCK_BYTES
        });
        return true;
    };
    // SAFETY: no promise is asked for.
    let range = managed::range(pool, unsafe { jumbo_mimalloc_unit() });
    if range.is_empty() {
        return false;
    }
    start(range);
    serve_below(usize::MAX);
    true
}

fn serve_below(size: usize) {
    USUALLY_BELOW.store(size, Ordering::Relaxed);
    BELOW.store(size, Ordering::Relaxed);
}

fn start(pool: Range<usize>) {
    // SAFETY: the range is the pool's, used for nothing else, and committed by `jumbo_mimalloc_commit`.
    unsafe { jumbo_mimalloc_start(with_exposed_provenance_mut(pool.start), pool.len()) };
    STARTED.store(true, Ordering::Release);
}

/// Starts mimalloc, if this is the thread that may.
fn start_here() {
    let is_first = FIRST.load(Ordering::Relaxed) == thread_pointer();
    if is_first && is_small(0) && !STARTED.load(Ordering::Relaxed) {
        start(0..0);
    }
}

/// Before the program makes a thread, which may be one that asks for much.
pub(crate) fn before_thread() {
    start_here();
}

/// Ends the program: a free list of mimalloc's was written to.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_corrupted() -> ! {
    invalid("malloc(): corrupted free list")
}

/// A lock of mimalloc's: the C side has its one word.
type Mutex = Lock<()>;
const _: () = assert!(size_of::<Mutex>() == size_of::<u32>());

/// As pthread_mutex_lock(3) does, it waits for ever where this thread holds the lock.
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
    // SAFETY: mimalloc gives back what this thread has taken.
    unsafe { lock.release() };
    0
}

#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_holds(lock: &Mutex) -> bool {
    lock.is_own()
}

/// Has `done` called with `value` at the end of this thread. Where no key can be had, it is not: the process has one thread, as
/// a rule.
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
        // SAFETY: a key that is never deleted.
        unsafe { (next::pthread_setspecific.get())(key, value) }
    })
}

/// Whether one more thread is served by mimalloc.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_admits() -> bool {
    start_here();
    if !STARTED.load(Ordering::Acquire) {
        return false;
    }
    // SAFETY: no promise is asked for.
    unsafe { jumbo_mimalloc_threads() < FEW + taken() / FOR_EACH }
}

/// From now on blocks are glibc's. Those that are mimalloc's stay so until they are freed, or grow.
fn retreat(why: u8) {
    RETREATS.fetch_or(why, Ordering::SeqCst);
    BELOW.store(0, Ordering::SeqCst);
}

/// Blocks are mimalloc's again, unless there is a reason why not.
fn advance() {
    let usual = USUALLY_BELOW.load(Ordering::Relaxed);
    if RETREATS.load(Ordering::SeqCst) == 0 {
        BELOW.store(usual, Ordering::SeqCst);
    }
    // Another thread may just have found one.
    if RETREATS.load(Ordering::SeqCst) != 0 {
        BELOW.store(0, Ordering::SeqCst);
    }
}

/// Whether a pool is under all of the program.
pub(crate) fn has_pool() -> bool {
    USUALLY_BELOW.load(Ordering::Relaxed) == usize::MAX
}

/// From now on addresses that are not used yet count (mlockall(2), a limit): they are given up, and blocks are glibc's.
pub(crate) fn give_up_addresses() {
    retreat(COUNTED);
    if STARTED.load(Ordering::Acquire) {
        managed::close();
    }
}

/// Whether blocks of the program are mimalloc's, or may become so.
pub(crate) fn has_served() -> bool {
    USUALLY_BELOW.load(Ordering::Relaxed) != 0
}

/// Whether a block of `size` bytes is mimalloc's to give.
#[inline(always)]
fn is_small(size: usize) -> bool {
    size < BELOW.load(Ordering::Relaxed)
}

/// Before fork(2): mimalloc's locks are taken, so that the child finds them free.
pub(crate) fn before_fork() {
    if !STARTED.load(Ordering::Acquire) {
        return;
    }
    if HOLDER.load(Ordering::Relaxed) & !ALONE == thread_pointer() {
        // A signal handler that forks between our handlers.
        NESTED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    // SAFETY: `after_fork` follows, in both processes.
    let holds = unsafe { jumbo_mimalloc_before_fork(next::is_single_threaded()) };
    let alone = if holds { 0 } else { ALONE };
    HOLDER.store(thread_pointer() | alone, Ordering::Relaxed);
    // The program's own handlers may allocate, which mimalloc cannot serve meanwhile.
    BELOW.store(0, Ordering::SeqCst);
}

/// After fork(2), in both processes.
pub(crate) fn after_fork() {
    // Another thread's start may have come in between.
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
        // SAFETY: `before_fork` has taken them, in this thread.
        unsafe { jumbo_mimalloc_after_fork() };
    }
}

/// In the child of a fork, after [`after_fork`]: it has no thread but this one.
pub(crate) fn forked() {
    if STARTED.load(Ordering::Acquire) {
        // SAFETY: this is the child, and holds no lock of mimalloc's that it had not before.
        let is_sparse = unsafe { jumbo_mimalloc_forked() };
        SPARSE_THREADS.store(usize::from(is_sparse), Ordering::Relaxed);
    }
}

/// Before a seccomp filter, which may let pass what glibc calls and nothing else: mimalloc has no new blocks, and gives nothing
/// back, for which it takes system calls and the clock.
pub(crate) fn confine() {
    rest(CONFINED);
}

/// The same where the clock may not be read.
pub(crate) fn without_clock() {
    rest(CLOCKLESS);
}

fn rest(why: u8) {
    retreat(why);
    if STARTED.load(Ordering::Acquire) {
        // SAFETY: no promise is asked for.
        unsafe { jumbo_mimalloc_confine() };
    }
}

/// The kernel has refused the filter.
pub(crate) fn unconfine() {
    if sandbox::is_entered_later() {
        return;
    }
    let others = RETREATS.fetch_and(!CONFINED, Ordering::SeqCst) & !CONFINED;
    if others & CLOCKLESS == 0 && STARTED.load(Ordering::Acquire) {
        // SAFETY: no promise is asked for.
        unsafe { jumbo_mimalloc_unconfine() };
    }
    // Else the end of the fork does.
    if HOLDER.load(Ordering::SeqCst) == 0 {
        advance();
    }
    // Another thread's may just have begun.
    if sandbox::is_entered_later() {
        confine();
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

jumbo_inside::one_page! {
    /// Threads of which mimalloc keeps more than it may around the objects that are left.
    static SPARSE_THREADS: AtomicUsize = AtomicUsize::new(0);
}

/// One more thread, or one less.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_sparse(now: bool) {
    match now {
        true => SPARSE_THREADS.fetch_add(1, Ordering::Relaxed),
        false => SPARSE_THREADS.fetch_sub(1, Ordering::Relaxed),
    };
}

/// The memory that may be held beyond live objects.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_allowance() -> usize {
    density::allowance()
}

/// Drops base pages in which nothing is live. False where they stay.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_thin(addr: *mut c_void, len: usize) -> bool {
    // SAFETY: mimalloc drops memory of its own, without blocks in it.
    unsafe { managed::discard_base_pages(addr.addr(), len) }.is_ok()
}

/// A block of another size than mimalloc's: from what mimalloc keeps, where it can be had there; else null.
#[cold]
fn beside(size: usize, align: usize, zeroed: bool) -> *mut c_void {
    // After a retreat, and while a fork is under way, nothing is looked at.
    if !is_small(0) || align != ALIGN {
        return null_mut();
    }
    // SAFETY: no promise is asked for; this thread is not inside of mimalloc.
    unsafe { jumbo_mimalloc_beside(size, zeroed) }
}

/// Whether a block may be mimalloc's: most blocks of others are told by their address alone.
#[inline(always)]
fn may_own(block: *const c_void) -> bool {
    (managed::may_hold(block.addr()) || IS_ELSEWHERE.load(Ordering::Relaxed))
        && STARTED.load(Ordering::Acquire)
}

/// Whether a block is mimalloc's.
fn owns(block: *const c_void) -> bool {
    // SAFETY: any address may be asked about.
    may_own(block) && unsafe { jumbo_mimalloc_owns(block) }
}

/// A block that is mimalloc's to give; null where it is not, or where mimalloc finds no memory (a limit, or [`retreat`]
/// meanwhile): the caller asks glibc.
#[inline(always)]
pub(crate) fn allocate(size: usize, align: usize, zeroed: bool) -> *mut c_void {
    if !is_small(size) {
        return match SPARSE_THREADS.load(Ordering::Relaxed) {
            0 => null_mut(),
            _ => beside(size, align, zeroed),
        };
    }
    if align != ALIGN {
        return aligned(size, align);
    }
    // SAFETY: no promise is asked for.
    unsafe {
        match zeroed {
            true => jumbo_mimalloc_zalloc(size),
            false => jumbo_mimalloc_malloc(size),
        }
    }
}

fn aligned(size: usize, align: usize) -> *mut c_void {
    // glibc has its own ways with an alignment that is no power of two. mimalloc takes as much more as the alignment, but for
    // sizes that have it by themselves.
    let has_it = align <= ALIGN || align <= size && size.is_power_of_two();
    let fits = has_it || BELOW.load(Ordering::Relaxed) == usize::MAX;
    if fits && align.is_power_of_two() && align < rustix::param::page_size() {
        // SAFETY: a power of two.
        return unsafe { jumbo_mimalloc_aligned(align, size) };
    }
    managed::count_beyond_pool(size);
    null_mut()
}

/// free(3) of a block that is mimalloc's; false where it is not.
///
/// # Safety
/// As for free(3).
#[inline(always)]
pub(crate) unsafe fn free(block: *mut c_void) -> bool {
    // SAFETY: the caller's promise; a block that is not mimalloc's is left alone.
    may_own(block) && unsafe { jumbo_mimalloc_free(block) }
}

/// malloc_usable_size(3) of a block that is mimalloc's.
///
/// # Safety
/// As for malloc_usable_size(3).
pub(crate) unsafe fn room(block: *const c_void) -> Option<usize> {
    // SAFETY: the caller's promise.
    owns(block).then(|| unsafe { jumbo_mimalloc_room(block) })
}

/// malloc_trim(3).
pub(crate) fn trim() -> bool {
    // SAFETY: no promise is asked for.
    STARTED.load(Ordering::Acquire) && unsafe { jumbo_mimalloc_trim() }
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
    if prot == libc::PROT_NONE && len >= ARENA {
        let reserved = managed::reserve(len).map(usize::cast_signed);
        return reserved.unwrap_or(-isize::try_from(libc::ENOMEM).unwrap_or(1));
    }
    let prot = ProtFlags::from_bits_retain(prot.cast_unsigned());
    // The bit says what rustix's function says itself.
    let flags = MapFlags::from_bits_retain((flags & !libc::MAP_ANONYMOUS).cast_unsigned());
    let hint = addr.is_null().then(|| managed::table_hint(len)).flatten();
    let addr = hint.map_or(addr, with_exposed_provenance_mut);
    // SAFETY: mimalloc maps at addresses of the kernel's choice, or over memory of its own. A hint replaces nothing.
    match unsafe { mm::mmap_anonymous(addr, len, prot, flags) } {
        Ok(address) => {
            if !managed::may_hold(address.addr()) {
                IS_ELSEWHERE.store(true, Ordering::Relaxed);
            }
            // Its tables, at the start, are no matter.
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
        // SAFETY: mimalloc unmaps what it has reserved, without blocks in it.
        return answer(unsafe { managed::unreserve(addr.addr(), len) });
    }
    // SAFETY: mimalloc unmaps memory of its own, without blocks in it.
    answer(unsafe { mm::munmap(addr, len) })
}

/// madvise(2), for mimalloc.
#[unsafe(no_mangle)]
extern "C" fn jumbo_mimalloc_advise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    let advice = match advice {
        libc::MADV_DONTNEED => mm::Advice::LinuxDontNeed,
        libc::MADV_FREE => mm::Advice::LinuxFree,
        libc::MADV_HUGEPAGE => return answer(managed::advise(addr.addr(), len)),
        _ => return answer(Err(Errno::INVAL)),
    };
    managed::dropped(addr.addr(), len);
    if !sandbox::allows_advice() {
        // SAFETY: mimalloc drops memory of its own, without blocks in it.
        return answer(unsafe { managed::discard(addr.addr(), len) });
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
    if prot & libc::PROT_WRITE != 0 && managed::is_reserved(addr.addr()) {
        // SAFETY: mimalloc opens what it has reserved.
        return answer(unsafe { managed::open(addr.addr(), len) });
    }
    let prot = MprotectFlags::from_bits_retain(prot.cast_unsigned());
    // SAFETY: mimalloc protects memory of its own.
    answer(unsafe { mm::mprotect(addr, len, prot) })
}

fn answer(result: rustix::io::Result<()>) -> c_int {
    result.map_or_else(|errno| -errno.raw_os_error(), |()| 0)
}
