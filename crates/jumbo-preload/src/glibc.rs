//! Internals of glibc: the thread's ID ([`thread`]) and stack ([`stack`]), and the variable by which
//! its malloc advises its heap ([`follow`]).
//!
//! The launcher sets the tunable `glibc.malloc.hugetlb=1`: glibc then calls madvise(2) each time
//! its heap grows. It must not do so under a filter that forbids that, nor while the heap has not
//! earned huge pages, and no function changes it. So jumbo finds the variable (`mp_.thp_pagesize`,
//! malloc/malloc.c) and sets it to 0 meanwhile, as without the tunable. If the search is not
//! unique, nothing changes.

use core::ffi::c_int;
use core::ops::Range;
use core::ptr::{self, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use jumbo_inside::heap::{self, main_heap};
use jumbo_inside::sandbox;
use rustix::thread::gettid;

use crate::{next, symbols};

/// Returns the calling thread's ID in the C library, by pthread_getcpuclockid(3), without a system
/// call. The upper 29 bits of the clock's number are the inverted ID (`CPUCLOCK_PID`,
/// include/linux/posix-timers.h). 0 if it is not available. In a vfork(2) child it is the parent's.
pub(crate) fn thread() -> u32 {
    let mut clock = -1;
    // SAFETY: the calling thread is alive, and the number is written to `clock`.
    match unsafe { (next::pthread_getcpuclockid.get())(libc::pthread_self(), &raw mut clock) } {
        // Before glibc 2.34 the function is in libpthread, which a program with one thread may not
        // load.
        libc::ENOENT if !sandbox::is_entered() => gettid().as_raw_nonzero().get().cast_unsigned(),
        _ => (!(clock >> 3)).cast_unsigned(),
    }
}

/// Place of the stack's bounds in glibc's `struct pthread`; 0: not searched yet.
static STACK_AT: AtomicUsize = AtomicUsize::new(0);
/// glibc has the bounds in no known form.
const NOWHERE: usize = usize::MAX;

/// Returns the addresses of the stack with which the calling thread began; `None` for the first
/// thread, and without glibc. A thread on a stack of another kind is outside of them.
///
/// `struct pthread` is in the upper part of the stack, and has its start, length and guard in a row
/// (`stackblock`, nptl/descr.h). Their place differs between versions, so it is searched once.
pub(crate) fn stack() -> Option<Range<usize>> {
    /// Part of `struct pthread` that all versions have.
    const BYTES: usize = if cfg!(target_arch = "x86_64") {
        0x880
    } else {
        0x680
    };
    const WORD: usize = size_of::<usize>();
    // SAFETY: any thread may call it.
    let thread = unsafe { libc::pthread_self() };
    let thread = usize::try_from(thread).ok()?;
    let place = STACK_AT.load(Ordering::Relaxed);
    if thread == FIRST.load(Ordering::Relaxed) || place == NOWHERE {
        return None;
    }
    let word = |at: usize| {
        let at = with_exposed_provenance_mut::<usize>(thread + at);
        // SAFETY: within the structure of the calling thread, which glibc does not change meanwhile.
        unsafe { at.read_volatile() }
    };
    let bounds = |at: usize| {
        let [start, length, guard] = [0, 1, 2].map(|index| word(at + index * WORD));
        is_stack(thread, start, length, guard).then(|| start + guard..thread)
    };
    if place != 0 {
        return bounds(place);
    }
    let places = (WORD..BYTES - 2 * WORD).step_by(WORD);
    let found = places.into_iter().find(|at| bounds(*at).is_some());
    STACK_AT.store(found.unwrap_or(NOWHERE), Ordering::Relaxed);
    bounds(found?)
}

/// Reports whether a stack with these values may have the structure of a thread at its end.
fn is_stack(thread: usize, start: usize, length: usize, guard: usize) -> bool {
    /// The structure, and the thread-locals on some processors.
    const MAX_END: usize = 64 << 10;
    /// Other values of the structure are not this plausible: numbers, addresses, zeroes.
    const LENGTHS: Range<usize> = 16 << 10..1 << 36;
    const MIN_START: usize = 1 << 20;
    let end = start.wrapping_add(length);
    (MIN_START..thread).contains(&start)
        && LENGTHS.contains(&length)
        && end.wrapping_sub(thread) <= MAX_END
        && guard < length
        && guard.is_multiple_of(heap::BASE_PAGE)
}

/// The first thread.
static FIRST: AtomicUsize = AtomicUsize::new(0);

/// Learns the first thread, in that thread. Without glibc, no thread has known bounds.
pub(crate) fn start() {
    // SAFETY: any thread may call it.
    let thread = usize::try_from(unsafe { libc::pthread_self() });
    FIRST.store(thread.unwrap_or(0), Ordering::Relaxed);
    if !next::is_glibc() {
        STACK_AT.store(NOWHERE, Ordering::Relaxed);
    }
}

/// Value of the variable while the tunable is in force; 0 if jumbo did not set the tunable.
static PMD_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Address of the variable, once it is found.
static VARIABLE: AtomicPtr<AtomicUsize> = AtomicPtr::new(ptr::null_mut());

/// Start and end of glibc's data. Looked up at the start, since the dynamic loader takes a lock for
/// that, under which malloc may be called.
static DATA: (AtomicUsize, AtomicUsize) = (AtomicUsize::new(0), AtomicUsize::new(0));

/// Starts to control the advice, at the start of a program with the launcher's tunable.
pub(crate) fn watch(pmd: usize) {
    let data = data();
    DATA.0.store(data.start, Ordering::Relaxed);
    DATA.1.store(data.end, Ordering::Relaxed);
    PMD_BYTES.store(pmd, Ordering::Relaxed);
    follow();
}

/// Set if the heap has earned the advice for its next step.
static IS_EARNED: AtomicBool = AtomicBool::new(true);

/// Sets whether glibc advises the next steps of its heap. Returns the previous value.
#[cold]
pub(crate) fn earn(is_earned: bool) -> bool {
    let before = IS_EARNED.swap(is_earned, Ordering::Relaxed);
    if before != is_earned {
        follow();
    }
    before
}

/// Sets glibc's mmap and trim thresholds by mallopt(3) to the values that they would have in a
/// plain program.
pub(crate) fn set_threshold() {
    static THRESHOLD: AtomicUsize = AtomicUsize::new(0);
    let Some(threshold) = main_heap::threshold() else {
        return;
    };
    let before = THRESHOLD.swap(threshold, Ordering::Relaxed);
    if before == threshold {
        return;
    }
    if before == 0 {
        // `follow` finds the variable only after the initialisation.
        next::start_malloc();
    }
    for (parameter, bytes) in [
        (libc::M_MMAP_THRESHOLD, threshold),
        (libc::M_TRIM_THRESHOLD, 2 * threshold),
    ] {
        if let Ok(bytes) = c_int::try_from(bytes) {
            // SAFETY: the call changes a variable of glibc.
            unsafe { (next::mallopt.get())(parameter, bytes) };
        }
    }
}

/// Reports whether glibc's malloc must not advise its heap, which it would do once it is
/// initialised.
pub(crate) fn must_not_advise() -> bool {
    PMD_BYTES.load(Ordering::Relaxed) != 0 && !sandbox::allows_advice()
}

/// Enables glibc's advice if it is allowed and earned, else disables it. The variable is not found
/// before malloc is initialised; [`crate::next`] calls this again then.
pub(crate) fn follow() {
    let pmd = PMD_BYTES.load(Ordering::Relaxed);
    let advises = sandbox::allows_advice() && IS_EARNED.load(Ordering::Relaxed);
    if pmd == 0 || advises && VARIABLE.load(Ordering::Acquire).is_null() {
        return;
    }
    if VARIABLE.load(Ordering::Acquire).is_null() {
        VARIABLE.store(find(pmd), Ordering::Release);
    }
    // SAFETY: null, or a word that glibc reads at any time and never writes after its start.
    if let Some(word) = unsafe { VARIABLE.load(Ordering::Acquire).as_ref() } {
        word.store(if advises { pmd } else { 0 }, Ordering::Relaxed);
    }
}

/// Returns the addresses of glibc's data.
fn data() -> Range<usize> {
    let mut data = 0..0;
    symbols::each(&mut |object| {
        // Only glibc has a symbol of this name.
        let is_glibc = object.symbol(c"__libc_malloc").is_some();
        data = object.data().filter(|_| is_glibc).unwrap_or(0..0);
        is_glibc
    });
    data
}

/// Finds `mp_.thp_pagesize` by its value and its neighbours in `struct malloc_par`; null unless
/// exactly one word matches.
fn find(pmd: usize) -> *mut AtomicUsize {
    let data = DATA.0.load(Ordering::Relaxed)..DATA.1.load(Ordering::Relaxed);
    // SAFETY: glibc's data, mapped as long as the process lives. Other threads may write there, so
    // it is read word by word.
    let word = |at: usize| unsafe { with_exposed_provenance_mut::<usize>(at).read_volatile() };
    let size = size_of::<usize>();
    let (first, last) = (data.start.next_multiple_of(size), data.end & !(size - 1));
    let mut found = (first..last)
        .step_by(size)
        .skip(WORDS_BEFORE)
        .take_while(|at| at + size < last)
        .filter(|at| word(*at) == pmd)
        .filter(|at| {
            let before = core::array::from_fn(|back| word(at - (back + 1) * size));
            are_neighbours(before, word(at + size))
        });
    match (found.next(), found.next()) {
        (Some(at), None) => with_exposed_provenance_mut(at),
        _ => ptr::null_mut(),
    }
}

/// Number of words that are checked before the variable.
const WORDS_BEFORE: usize = 3;

/// Reports whether the words before are, backwards, plausible values of arena_max, arena_test and
/// mmap_threshold, and the word after is hp_pagesize, which is 0 with `hugetlb=1`. glibc 2.35 and
/// later.
fn are_neighbours(before: [usize; WORDS_BEFORE], after: usize) -> bool {
    const MAX_ARENAS: usize = 1 << 16;
    const MAX_THRESHOLD: usize = 64 << 20;
    let [arena_max, arena_test, mmap_threshold] = before;
    arena_max < MAX_ARENAS
        && (1..MAX_ARENAS).contains(&arena_test)
        && mmap_threshold <= MAX_THRESHOLD
        && after == 0
}
