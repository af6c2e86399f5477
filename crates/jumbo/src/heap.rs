//! The heap of `jumbo run` for a Rust program, without the command: [`Heap`], a global allocator.
//!
//! ```
//! use jumbo::heap::Heap;
//!
//! #[global_allocator]
//! static HEAP: Heap = Heap;
//!
//! fn main() {
//!     let table = vec![1_u8; 64 << 20];
//!     assert_eq!(table[table.len() - 1], 1);
//! }
//! ```
//!
//! Blocks get huge pages as the program fills them, within the bound of `jumbo run`: what is huge and
//! not touched is at most 16 MiB or 5 % of the resident memory. The C library's allocator serves what
//! the heap does not: other architectures' page sizes, a process under `jumbo run`, which has the
//! heap already, what the heap would have to grow for after [`Heap::confine`], and all with `JUMBO=off`
//! in the environment.
//!
//! It is for programs: two heaps in one process, as a shared library with one would make, have the
//! same addresses.
//!
//! A thread of the heap, `jumbo-watch`, scans the memory while the program fills it. A program that changes
//! its user, its namespaces or its root, or installs a seccomp filter, calls [`Heap::confine`] first.
#![expect(unsafe_code, reason = "an allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::unix::ffi::OsStrExt as _;
use std::ptr::{self, null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU8, Ordering};

use jumbo_inside::events::{self, Mechanism, Side};
use jumbo_inside::heap::{self, HeapSettings, Resize};
use jumbo_inside::orders::{MaxWaste, is_off};
use jumbo_inside::slab::{self, Block, Cache, Freed};
use jumbo_inside::{density, gather, sandbox, watch};
use rustix::process::getpid;
use rustix::rand::{GetRandomFlags, getrandom};

use jumbo_sys::files::Root;
use jumbo_sys::thp;

/// Alignment of every block of the slabs.
const ALIGN: usize = 16;

/// Progress of the start: [`UNUSED`], [`STARTING`], [`READY`] or [`OFF`].
static STATE: AtomicU8 = AtomicU8::new(UNUSED);
const UNUSED: u8 = 0;
/// The C library's allocator serves, also for the start itself.
const STARTING: u8 = 1;
const READY: u8 = 2;
const OFF: u8 = 3;

thread_local! {
    /// Cache of the thread, which outlives it: the slabs find caches of dead threads.
    static CACHE: Cell<*mut Cache> = const { Cell::new(null_mut()) };
}

/// A global allocator on huge pages. It starts at the first allocation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap;

impl Heap {
    /// Ends the thread of the heap, and makes no system call from now on that a filter could refuse:
    /// memory that is allocated later comes from free blocks, or from the C library. It cannot be
    /// undone. For programs that change their user, namespaces or root, or install a filter.
    pub fn confine(self) {
        if STATE.load(Ordering::Acquire) == READY {
            Mechanisms::before_confinement();
            let _entered = sandbox::enter();
            Mechanisms::confining(true);
        }
    }

    /// Reports whether the heap serves: not before the first allocation, nor under `jumbo run`.
    pub fn is_on(self) -> bool {
        STATE.load(Ordering::Acquire) == READY
    }
}

/// Events of a process without the preload library: forks, and the confinement.
type Mechanisms = events::list![
    Slabs,
    watch::Events,
    heap::Events,
    gather::Events,
    density::Events
];

struct Slabs;

impl Mechanism for Slabs {
    fn lock_for_fork() {
        slab::lock();
    }

    unsafe fn unlock_after_fork(_side: Side) {
        // SAFETY: after `lock_for_fork`, in its thread or the original's.
        unsafe { slab::unlock() };
    }

    unsafe fn is_forked(process: u32) {
        slab::forked(process.cast_signed(), CACHE.get());
    }
}

unsafe extern "C" fn before_fork() {
    events::before_fork::<Mechanisms>();
}

unsafe extern "C" fn after_fork() {
    // SAFETY: the C library calls both around fork(2), in one thread.
    unsafe { events::after_fork::<Mechanisms>() };
}

unsafe extern "C" fn after_fork_child() {
    let process = getpid().as_raw_nonzero().get().unsigned_abs();
    // SAFETY: as above; this is the child.
    unsafe { events::after_fork_child::<Mechanisms>(process) };
}

/// Reports whether the heap serves, after its start at the first call.
#[inline(always)]
fn is_ready() -> bool {
    STATE.load(Ordering::Acquire) == READY || starts()
}

#[cold]
#[inline(never)]
fn starts() -> bool {
    let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
    if STATE.load(relaxed) != UNUSED
        || STATE
            .compare_exchange(UNUSED, STARTING, acquire, relaxed)
            .is_err()
    {
        return false;
    }
    let is_started = start();
    let state = if is_started { READY } else { OFF };
    STATE.store(state, Ordering::Release);
    is_started
}

fn start() -> bool {
    let variable = std::env::var_os("JUMBO").unwrap_or_default();
    if is_off(variable.as_bytes())
        || is_under_jumbo()
        || rustix::param::page_size() != heap::BASE_PAGE
    {
        return false;
    }
    let pmd = thp::pmd_size(&Root::host()).map(|pmd| pmd.bytes());
    let Some(pmd) = pmd.ok().and_then(|pmd| usize::try_from(pmd).ok()) else {
        return false;
    };
    sandbox::detect(0, 0, false);
    if !sandbox::allows_advice() {
        return false;
    }
    let settings = HeapSettings {
        pmd,
        max_waste: match heap::thp_disabled() {
            true => MaxWaste::Unbounded,
            false => MaxWaste::DEFAULT,
        },
        huge_at_once: false,
        keep: None,
        pool: None,
    };
    // SAFETY: the state admits one thread once, and no block exists yet.
    if !unsafe { heap::start(settings) } {
        return false;
    }
    let mut bytes = [0; size_of::<usize>()];
    // Early in boot there may be no randomness yet; a fixed address is better than none.
    let _ = getrandom(&mut bytes, GetRandomFlags::NONBLOCK);
    slab::start(usize::from_ne_bytes(bytes) >> 16);
    // SAFETY: the handlers are functions of this program, which is not unloaded.
    unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_child)) == 0
    }
}

/// Reports whether the library of `jumbo run` is in this process, or may be: it has the same
/// addresses, and hides from dl_iterate_phdr(3).
fn is_under_jumbo() -> bool {
    let maps = Root::host().read("proc/self/maps");
    maps.map_or(true, |maps| maps.contains("libjumbo_preload"))
}

/// Reports whether a block is one of the slabs. The library of `jumbo run` has the same addresses.
#[inline(always)]
fn is_slabs(address: usize) -> bool {
    slab::is_ours(address) && STATE.load(Ordering::Relaxed) == READY
}

#[inline(always)]
fn is_large(address: usize) -> bool {
    heap::is_ours(address) && STATE.load(Ordering::Relaxed) == READY
}

/// Allocates a block; null: the C library may have one.
fn allocate(layout: Layout, zeroed: bool) -> *mut u8 {
    if !is_ready() {
        return null_mut();
    }
    let (size, align) = (layout.size(), layout.align());
    let small = match align <= ALIGN {
        true => Some(size),
        false => slab::aligned(size, align),
    };
    if let Some(size) = small.filter(|size| *size <= slab::MAX_BYTES) {
        let Some(Block { address, is_dirty }) = small_block(size, align <= ALIGN) else {
            return null_mut();
        };
        let block = with_exposed_provenance_mut::<u8>(address);
        if zeroed && is_dirty {
            // SAFETY: a new block of at least that size.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        return block;
    }
    if size < heap::LARGE_BLOCK_BYTES {
        return null_mut();
    }
    // A fork ended the thread that scans.
    watch::resume();
    heap::allocate(size, align, zeroed).map_or(null_mut(), with_exposed_provenance_mut)
}

#[inline(always)]
fn small_block(size: usize, is_usual: bool) -> Option<Block> {
    if is_usual {
        // SAFETY: the thread's cache; the size is one of the slabs.
        let block = unsafe { slab::allocate(CACHE.get(), size) };
        return block.or_else(|| refill(size));
    }
    growing(size, || slab::allocate_aligned(size))
}

#[cold]
#[inline(never)]
fn refill(size: usize) -> Option<Block> {
    let block = growing(size, || {
        let mut cache = CACHE.get();
        // SAFETY: the thread's cache, and stored as such.
        let block = unsafe { slab::refill(&mut cache, size) };
        CACHE.set(cache);
        block
    });
    sweep();
    block
}

fn growing(size: usize, allocate: impl Fn() -> Option<Block>) -> Option<Block> {
    /// Other threads may take what the heap has grown by.
    const MAX_TRIES: usize = 4;
    for _ in 0..MAX_TRIES {
        if let Some(block) = allocate() {
            return Some(block);
        }
        watch::resume();
        if !slab::grow(size) {
            break;
        }
    }
    None
}

fn sweep() {
    if let Some(sweep) = slab::due_sweep() {
        sweep();
    }
}

/// Frees a block of the slabs.
///
/// # Safety
/// The program gives the block up.
#[inline(always)]
unsafe fn free_small(address: usize) {
    // SAFETY: the caller's promise; the thread's cache.
    match unsafe { slab::free(CACHE.get(), address) } {
        Freed::Done => {}
        Freed::Full => put_aside(address),
        // A bug of unsafe code in the program.
        Freed::Invalid | Freed::Twice => std::process::abort(),
    }
}

#[cold]
#[inline(never)]
fn put_aside(address: usize) {
    let mut cache = CACHE.get();
    // SAFETY: the block is live, and the program gives it up.
    unsafe { slab::put_aside(&mut cache, address) };
    CACHE.set(cache);
    sweep();
}

// SAFETY: a block is at least as large and aligned as its layout, and belongs to its caller alone.
// The allocators tell their blocks by their addresses. Nothing here unwinds.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let block = allocate(layout, false);
        match block.is_null() {
            // SAFETY: the caller's promise.
            true => unsafe { System.alloc(layout) },
            false => block,
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let block = allocate(layout, true);
        match block.is_null() {
            // SAFETY: the caller's promise.
            true => unsafe { System.alloc_zeroed(layout) },
            false => block,
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let address = block.addr();
        // SAFETY: the caller's promise, in each case.
        unsafe {
            if is_slabs(address) {
                free_small(address);
            } else if is_large(address) {
                if !heap::release(address) {
                    std::process::abort();
                }
            } else {
                System.dealloc(block, layout);
            }
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let address = block.addr();
        // A block of the C library stays there: it may grow in place.
        if !is_slabs(address) && !is_large(address) {
            // SAFETY: the caller's promise.
            return unsafe { System.realloc(block, layout, size) };
        }
        // A block may move to any page.
        if is_large(address) && size >= heap::LARGE_BLOCK_BYTES && layout.align() <= heap::BASE_PAGE
        {
            // SAFETY: the caller's promise.
            if let Resize::Done(moved) = unsafe { heap::resize(address, size) } {
                return with_exposed_provenance_mut(moved);
            }
        }
        let room = match is_slabs(address) {
            true => slab::room(address).unwrap_or(0),
            false => 0,
        };
        if (room / 2..=room).contains(&size) {
            return block;
        }
        // SAFETY: the caller's promise: the size, rounded up to the alignment, is no overflow.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: two blocks of at least that size, and the first is given up.
        unsafe {
            let new = self.alloc(wanted);
            if !new.is_null() {
                ptr::copy_nonoverlapping(block, new, layout.size().min(size));
                self.dealloc(block, layout);
            }
            new
        }
    }
}
