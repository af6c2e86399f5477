//! What is known of glibc's insides: whose thread this is ([`thread`]), and where its malloc keeps the tunable that
//! has it advise its heap ([`follow`]).
//!
//! The launcher sets that tunable, so that a heap grows on huge pages; glibc then calls madvise(2) each time it grows.
//! Behind a filter that does not let that pass it must not, nor while the heap has not earned huge pages, and there is no
//! function to tell it. So the word is found that it looks at (`mp_.thp_pagesize`, malloc/malloc.c), and is 0 meanwhile, as
//! it is without the tunable. Where it is not found for certain, all is left as it is.

use core::ffi::c_int;
use core::ops::Range;
use core::ptr::{self, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use jumbo_inside::heap::main_heap;
use jumbo_inside::sandbox;
use rustix::thread::gettid;

use crate::{next, symbols};

/// The ID of the calling thread as the C library has it, by pthread_getcpuclockid(3), which makes no system call. The kernel
/// reads the ID out of such a clock's number: its upper 29 bits, inverted (`CPUCLOCK_PID`, include/linux/posix-timers.h).
/// 0 where it cannot be told. In a child of vfork(2) it is the parent's.
pub(crate) fn thread() -> u32 {
    let mut clock = -1;
    // SAFETY: the calling thread lives, and the number is written to `clock`.
    match unsafe { (next::pthread_getcpuclockid.get())(libc::pthread_self(), &raw mut clock) } {
        // Before glibc 2.34 it is libpthread's, which a program with one thread may not load.
        libc::ENOENT if !sandbox::is_entered() => gettid().as_raw_nonzero().get().cast_unsigned(),
        _ => (!(clock >> 3)).cast_unsigned(),
    }
}

/// What the word is while the tunable is in force; 0: it is none of ours.
static PAGE: AtomicUsize = AtomicUsize::new(0);
/// Where it is, once that was asked.
static PLACE: AtomicPtr<AtomicUsize> = AtomicPtr::new(ptr::null_mut());

/// glibc's data: asked at the start, since the dynamic loader answers under its lock, and malloc may be called under that.
static DATA: (AtomicUsize, AtomicUsize) = (AtomicUsize::new(0), AtomicUsize::new(0));

/// The launcher set the tunable. At the start of the program.
pub(crate) fn watch(pmd: usize) {
    let data = data();
    DATA.0.store(data.start, Ordering::Relaxed);
    DATA.1.store(data.end, Ordering::Relaxed);
    PAGE.store(pmd, Ordering::Relaxed);
    follow();
}

/// Whether the heap has earned the advice for its next step.
static IS_EARNED: AtomicBool = AtomicBool::new(true);

/// Has glibc advise the next steps of its heap, or not; and whether it did before.
#[cold]
pub(crate) fn earn(is_earned: bool) -> bool {
    let before = IS_EARNED.swap(is_earned, Ordering::Relaxed);
    if before != is_earned {
        follow();
    }
    before
}

/// Sets the size from which on glibc maps a block by itself, as it would have done by now. mallopt(3).
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
        // Before, the word is not found that says whether glibc advises its heap.
        next::start_malloc();
    }
    for (parameter, bytes) in [
        (libc::M_MMAP_THRESHOLD, threshold),
        (libc::M_TRIM_THRESHOLD, 2 * threshold),
    ] {
        if let Ok(bytes) = c_int::try_from(bytes) {
            // SAFETY: it changes a word of glibc's.
            unsafe { (next::mallopt.get())(parameter, bytes) };
        }
    }
}

/// Whether glibc's malloc has to be kept from advising its heap, which it does once it has initialised itself.
pub(crate) fn is_to_be_told() -> bool {
    PAGE.load(Ordering::Relaxed) != 0 && !sandbox::allows_advice()
}

/// Has glibc advise its heap where that is harmless, and only there. Before its malloc has initialised itself, the word
/// is not found: [`crate::next`] asks again then.
pub(crate) fn follow() {
    let page = PAGE.load(Ordering::Relaxed);
    let advises = sandbox::allows_advice() && IS_EARNED.load(Ordering::Relaxed);
    if page == 0 || advises && PLACE.load(Ordering::Acquire).is_null() {
        return;
    }
    if PLACE.load(Ordering::Acquire).is_null() {
        PLACE.store(find(page), Ordering::Release);
    }
    // SAFETY: null, or a word of glibc's that it reads at any time and never writes after its start.
    if let Some(word) = unsafe { PLACE.load(Ordering::Acquire).as_ref() } {
        word.store(if advises { page } else { 0 }, Ordering::Relaxed);
    }
}

/// Where glibc's data is.
fn data() -> Range<usize> {
    let mut data = 0..0;
    symbols::each(&mut |object| {
        // No other library has one of that name.
        let is_glibc = object.symbol(c"__libc_malloc").is_some();
        data = object.data().filter(|_| is_glibc).unwrap_or(0..0);
        is_glibc
    });
    data
}

/// The one word in glibc's data that is `page` and has around it what stands there in `struct malloc_par`; null where
/// there is none, or more than one.
fn find(page: usize) -> *mut AtomicUsize {
    let data = DATA.0.load(Ordering::Relaxed)..DATA.1.load(Ordering::Relaxed);
    // SAFETY: glibc's data, mapped as long as the process lives. Others may write there, so it is read word by word.
    let word = |at: usize| unsafe { with_exposed_provenance_mut::<usize>(at).read_volatile() };
    let size = size_of::<usize>();
    let (first, last) = (data.start.next_multiple_of(size), data.end & !(size - 1));
    let mut found = (first..last)
        .step_by(size)
        .skip(BEFORE)
        .take_while(|at| at + size < last)
        .filter(|at| word(*at) == page)
        .filter(|at| {
            let before: [usize; BEFORE] = core::array::from_fn(|back| word(at - (back + 1) * size));
            are_parameters(before, word(at + size))
        });
    match (found.next(), found.next()) {
        (Some(at), None) => with_exposed_provenance_mut(at),
        _ => ptr::null_mut(),
    }
}

/// How many words before it are looked at.
const BEFORE: usize = 3;

/// Whether these are, backwards, arena_max, arena_test and mmap_threshold, and behind is
/// hp_pagesize, which is 0 with `hugetlb=1`. glibc 2.35 and later.
fn are_parameters(before: [usize; BEFORE], behind: usize) -> bool {
    const FEW: usize = 1 << 16;
    const MOST: usize = 64 << 20;
    let [arena_max, arena_test, mmap_threshold] = before;
    arena_max < FEW && (1..FEW).contains(&arena_test) && mmap_threshold <= MOST && behind == 0
}
