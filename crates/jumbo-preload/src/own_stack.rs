//! Stacks of this library's own: [`on`] runs deep work on one.
//!
//! The caller's stack may have a few KiB: that of a coroutine, or of a signal handler. So the
//! interposed functions take at most 512 bytes of it beyond the C library's own, and call what needs
//! more through [`on`]. Work that waits, or that calls the program, stays on the caller's stack.
//! `docs/design/heap.md` has the figures.

use core::arch::naked_asm;
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use jumbo_inside::heap::{self, BASE_PAGE, maps};
use jumbo_inside::sandbox;
use jumbo_sys::{self as sys, Apart, Blocked};
use libc::stack_t;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use crate::local::local;
use crate::{symbols, system};

/// Size of a stack, with a guard page at its start.
const STACK_BYTES: usize = 36 << 10;
/// Number of stacks: one bit each of [`CLAIMED`]. Together less than a huge page.
const STACKS: usize = u32::BITS as usize;

/// Start and length of the addresses of a stack that has room: all until [`start`], then those of
/// the first thread's stack, except the last part.
static AMPLE_START: AtomicUsize = AtomicUsize::new(0);
static AMPLE_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Start and length of the alternate signal stacks among these addresses.
static INNER_START: AtomicUsize = AtomicUsize::new(0);
static INNER_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Data of a thread that the C library puts above the thread pointer (ELF Handling For Thread-Local
/// Storage, variant I): none on x86-64, where all of it is below.
static ABOVE_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Room that a stack must have for any work of this library.
const ROOM_BYTES: usize = 64 << 10;

jumbo_inside::one_page! {
    /// Address of the stacks; 0 until the first use.
    static POOL: AtomicUsize = AtomicUsize::new(0);
    /// Stacks in use.
    static CLAIMED: AtomicU32 = AtomicU32::new(0);
    /// Stacks whose guard page is protected.
    static GUARDED: AtomicU32 = AtomicU32::new(0);
    /// [`FURTHER`] has stacks.
    static HAS_FURTHER: AtomicBool = AtomicBool::new(false);
    /// The program has set an alternate signal stack.
    static HAS_ALTERNATE: AtomicBool = AtomicBool::new(false);
}

/// Stacks like [`POOL`], for threads that wait in the kernel at the same time.
struct Pool {
    start: AtomicUsize,
    claimed: AtomicU32,
    guarded: AtomicU32,
}
static FURTHER: [Pool; 63] = [const {
    Pool {
        start: AtomicUsize::new(0),
        claimed: AtomicU32::new(0),
        guarded: AtomicU32::new(0),
    }
}; 63];

/// Work and its result, on the caller's stack.
struct Job<F, R> {
    work: MaybeUninit<F>,
    result: MaybeUninit<R>,
}

/// Learns the bounds of the first thread's stack, in that thread.
pub(crate) fn start() {
    static APART: Apart = Apart(apart);
    sys::use_apart(&APART);
    if cfg!(target_arch = "aarch64") {
        symbols::each(&mut |object| {
            ABOVE_BYTES.fetch_add(object.thread_bytes(), Ordering::Relaxed);
            false
        });
    }
    // More is no more ample, and the limit counts from the end of the stack.
    const MAX_BYTES: usize = 8 << 20;
    let limit = getrlimit(Resource::Stack).current;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok());
    let length = limit.map_or(MAX_BYTES, |limit| limit.min(MAX_BYTES));
    // The kernel puts the program's name at the end.
    let name = system::auxiliary(libc::AT_EXECFN).and_then(|name| usize::try_from(name).ok());
    let end = name.map_or(0, |name| name.next_multiple_of(BASE_PAGE));
    AMPLE_START.store(end.saturating_sub(length) + ROOM_BYTES, Ordering::Relaxed);
    AMPLE_BYTES.store(
        length.saturating_sub(ROOM_BYTES).min(end),
        Ordering::Relaxed,
    );
}

/// Forgets the parent's other threads, in the child of a fork.
pub(crate) fn forked() {
    if CLAIMED.load(Ordering::Relaxed) != 0 && !is_own(here()) {
        CLAIMED.store(0, Ordering::Relaxed);
        if HAS_FURTHER.load(Ordering::Relaxed) {
            let further = FURTHER.iter();
            further.for_each(|pool| pool.claimed.store(0, Ordering::Relaxed));
        }
    }
}

/// Returns an address on the present stack.
#[inline(always)]
fn here() -> usize {
    let mut marker = MaybeUninit::<u8>::uninit();
    marker.as_mut_ptr().addr()
}

#[inline(always)]
fn is_own(address: usize) -> bool {
    address.wrapping_sub(POOL.load(Ordering::Relaxed)) < STACKS * STACK_BYTES
        || HAS_FURTHER.load(Ordering::Relaxed) && is_in_further(address)
}

#[cold]
fn is_in_further(address: usize) -> bool {
    let starts = FURTHER
        .iter()
        .map(|pool| pool.start.load(Ordering::Relaxed));
    // A pool that could not be mapped has none.
    let mut mapped = starts.filter(|start| *start != 0);
    mapped.any(|start| address.wrapping_sub(start) < STACKS * STACK_BYTES)
}

/// Reports whether the present stack has room.
#[inline(always)]
fn is_ample() -> bool {
    let here = here();
    is_ample_in_first_thread(here) || is_ample_in_thread(here) || is_own(here)
}

/// Reports whether an address has room in the stack of a further thread, which [`entered`] knows.
#[inline(always)]
fn is_ample_in_thread(here: usize) -> bool {
    here.wrapping_sub(local().ample_start.get()) < local().ample_bytes.get()
}

/// Blocks signals in a further thread during a call that maps memory, and may hold a lock meanwhile: unlike
/// malloc(3), it keeps no other thread waiting while a collector suspends this one by a signal. Where the
/// work leaves the stack they are blocked in any case.
pub(crate) fn blocked(address: usize, length: usize) -> Option<Blocked> {
    let may_lock = length >= maps::MIN_PACKED_BYTES || heap::may_hold(address);
    let is_wanted = may_lock && is_ample_in_thread(here()) && sandbox::allows_signals();
    is_wanted.then(Blocked::asynchronous)
}

/// Reports to tests whether the stack of the caller has room.
#[cfg(debug_assertions)]
#[unsafe(no_mangle)]
extern "C" fn jumbo_has_room() -> bool {
    is_ample()
}

/// Learns the bounds of the calling thread's stack of `length` bytes, at its start. The C library's data
/// of the thread and the guard page are within them at most.
pub(crate) fn entered(length: usize) {
    /// More than the frames above this one, the thread's descriptor and a guard page take.
    const MARGIN_BYTES: usize = 16 << 10;
    let here = here();
    let own = sys::thread_pointer().abs_diff(here);
    let above = ABOVE_BYTES.load(Ordering::Relaxed);
    let taken = own.saturating_add(above + MARGIN_BYTES + ROOM_BYTES);
    if let Some(ample) = length.checked_sub(taken).filter(|ample| *ample < here) {
        local().ample_start.set(here - ample);
        local().ample_bytes.set(ample + MARGIN_BYTES);
    }
}

#[inline(always)]
fn is_ample_in_first_thread(here: usize) -> bool {
    let is_within = |start: &AtomicUsize, length: &AtomicUsize| {
        here.wrapping_sub(start.load(Ordering::Relaxed)) < length.load(Ordering::Relaxed)
    };
    is_within(&AMPLE_START, &AMPLE_BYTES) && !is_within(&INNER_START, &INNER_BYTES)
}

/// sigaltstack(2): an array of a function of the first thread may be the stack.
pub(crate) fn alternate(stack: *const stack_t, call: impl FnOnce() -> c_int) -> c_int {
    let answer = call();
    if answer != 0 || stack.is_null() {
        return answer;
    }
    HAS_ALTERNATE.store(true, Ordering::Relaxed);
    // SAFETY: the kernel has just read it; it need not be aligned.
    let (start, length) = unsafe {
        (
            (&raw const (*stack).ss_sp).read_unaligned().addr(),
            (&raw const (*stack).ss_size).read_unaligned(),
        )
    };
    // In part, too: a handler begins at the end.
    let last = start.saturating_add(length.saturating_sub(1));
    if is_ample_in_thread(start) || is_ample_in_thread(last) {
        local().ample_bytes.set(0);
    }
    let is_inner = is_ample_in_first_thread(start) || is_ample_in_first_thread(last);
    if AMPLE_BYTES.load(Ordering::Relaxed) != usize::MAX && is_inner {
        // All of them: a handler may run on an earlier one.
        let (before, bytes) = (
            INNER_START.load(Ordering::Relaxed),
            INNER_BYTES.load(Ordering::Relaxed),
        );
        let first = if bytes == 0 { start } else { start.min(before) };
        let end = (start + length).max(before + bytes);
        INNER_START.store(first, Ordering::Relaxed);
        INNER_BYTES.store(end - first, Ordering::Relaxed);
    }
    answer
}

/// Runs work on a stack with room: the present one, or one of this library. The work neither waits
/// for the program nor calls it, and leaves by its end alone.
#[inline(always)]
pub(crate) fn on<R>(work: impl FnOnce() -> R) -> R {
    run_if(is_ample(), work)
}

/// Runs work as [`on`] does, also where the present stack seems to have room: an array of a function
/// of the first thread may be a coroutine's.
#[inline(always)]
pub(crate) fn away<R>(work: impl FnOnce() -> R) -> R {
    run_if(is_own(here()), work)
}

/// Runs work on the present stack if that is ample, or on one of this library.
#[inline(always)]
fn run_if<R>(is_ample: bool, work: impl FnOnce() -> R) -> R {
    let mut job = Job {
        work: MaybeUninit::new(work),
        result: MaybeUninit::uninit(),
    };
    let perform = performer(&job);
    let at = (&raw mut job).cast();
    // SAFETY: the function is that of this job, and runs once.
    unsafe {
        match is_ample {
            true => perform(at),
            false => aside(at, perform),
        }
        job.result.assume_init()
    }
}

/// Performs work as [`away`] does.
///
/// # Safety
/// As for the function.
unsafe fn apart(job: *mut c_void, perform: Perform) {
    // SAFETY: the caller's promise.
    unsafe {
        match is_own(here()) {
            true => perform(job),
            false => aside(job, perform),
        }
    }
}

type Perform = unsafe extern "C" fn(*mut c_void);

#[inline(always)]
fn performer<F: FnOnce() -> R, R>(_: &Job<F, R>) -> Perform {
    perform::<F, R>
}

/// Does the work of a job. Not inlined: its frame is not to be the caller's.
///
/// # Safety
/// `job` is a [`Job`] of these types, whose work is still there.
#[inline(never)]
unsafe extern "C" fn perform<F: FnOnce() -> R, R>(job: *mut c_void) {
    let job = job.cast::<Job<F, R>>();
    // SAFETY: the caller's promise.
    unsafe {
        let work = (*job).work.assume_init_read();
        (*job).result.write(work());
    }
}

/// Performs a job on a stack of this library. Signals are blocked meanwhile: a handler would run on
/// this stack or leave it, and a collector would not find the caller's. On the caller's where a filter
/// may forbid to block them, or without memory for a stack. A handler that leaves a fault by a jump
/// keeps one for good.
///
/// # Safety
/// As for the function.
#[cold]
#[inline(never)]
unsafe fn aside(job: *mut c_void, perform: Perform) {
    if !sandbox::allows_signals() {
        // SAFETY: the caller's promise.
        return unsafe { perform(job) };
    }
    let _blocked = Blocked::asynchronous();
    let Some(bottom) = claim().or_else(claim_further) else {
        // SAFETY: as above.
        return unsafe { perform(job) };
    };
    let mut moved = Moved {
        job,
        perform,
        below: below(),
    };
    guard(bottom);
    let top = bottom + STACK_BYTES;
    // SAFETY: the stack is this thread's until it is released, and aligned as a call requires.
    unsafe { switch((&raw mut moved).cast(), run_moved, top) };
    let (_, claimed, _, bit) = place(bottom);
    claimed.fetch_and(!bit, Ordering::Release);
}

/// Job on a stack of this library.
struct Moved {
    job: *mut c_void,
    perform: Perform,
    /// Address below all that the caller's stack holds.
    below: usize,
}

/// Returns an address below the frame of the caller, and of [`switch`] when the caller calls it.
#[inline(always)]
fn below() -> usize {
    /// Red zone of x86-64, and more than the two registers that `switch` saves.
    const MARGIN_BYTES: usize = 128 + 16;
    let pointer: usize;
    // SAFETY: reads a register.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        core::arch::asm!("mov {}, rsp", out(reg) pointer, options(nomem, nostack, preserves_flags));
        #[cfg(target_arch = "aarch64")]
        core::arch::asm!("mov {}, sp", out(reg) pointer, options(nomem, nostack, preserves_flags));
    }
    pointer - MARGIN_BYTES
}

/// Performs a job that has moved off an alternate signal stack, or another one.
///
/// # Safety
/// `moved` is a [`Moved`]; the present stack is this library's.
unsafe extern "C" fn run_moved(moved: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe {
        let moved = &*moved.cast::<Moved>();
        let before = shorten_alternate(moved.below);
        (moved.perform)(moved.job);
        if let Some(before) = before {
            let _ = set_alternate(&before);
        }
    }
}

/// Ends the alternate signal stack at `below` if that is on it; returns the one before. The kernel
/// takes a stack that is left as free, and the handler of a fault would begin at its end.
fn shorten_alternate(below: usize) -> Option<stack_t> {
    if !HAS_ALTERNATE.load(Ordering::Relaxed) {
        return None;
    }
    let mut before = stack_t {
        ss_sp: ptr::null_mut(),
        ss_flags: 0,
        ss_size: 0,
    };
    let arguments = [0, (&raw mut before).expose_provenance(), 0, 0, 0, 0];
    // SAFETY: the kernel writes a stack_t to `before`.
    unsafe { sys::request(libc::SYS_sigaltstack, arguments) }.ok()?;
    let left = below.checked_sub(before.ss_sp.addr())?;
    if before.ss_flags & libc::SS_DISABLE != 0 || left >= before.ss_size {
        return None;
    }
    let mut shorter = before;
    shorter.ss_size = left;
    if set_alternate(&shorter).is_err() {
        // Too small for a handler, which then runs on this library's.
        shorter.ss_flags = libc::SS_DISABLE;
        let _ = set_alternate(&shorter);
    }
    Some(before)
}

fn set_alternate(stack: &stack_t) -> rustix::io::Result<usize> {
    let arguments = [(&raw const *stack).expose_provenance(), 0, 0, 0, 0, 0];
    // SAFETY: the kernel reads `stack`. The memory is that of the program's own stack, or a part.
    unsafe { sys::request(libc::SYS_sigaltstack, arguments) }
}

/// Returns a stack that nothing uses, of a further pool.
#[cold]
fn claim_further() -> Option<usize> {
    if sandbox::is_entered_later() {
        return None;
    }
    HAS_FURTHER.store(true, Ordering::Relaxed);
    FURTHER.iter().find_map(|pool| {
        let start = match pool.start.load(Ordering::Acquire) {
            0 => map_pool(&pool.start)?,
            start => start,
        };
        let (set, fetch) = (Ordering::Acquire, Ordering::Relaxed);
        let take = |claimed: u32| (claimed != u32::MAX).then(|| claimed | (claimed + 1));
        let before = pool.claimed.fetch_update(set, fetch, take).ok()?;
        Some(start + before.trailing_ones() as usize * STACK_BYTES)
    })
}

/// Returns the pool of a stack, as its start and its two words, and the stack's bit.
fn place(bottom: usize) -> (usize, &'static AtomicU32, &'static AtomicU32, u32) {
    let first = (POOL.load(Ordering::Relaxed), &CLAIMED, &GUARDED);
    let further = FURTHER.iter().map(|pool| {
        let start = pool.start.load(Ordering::Relaxed);
        (start, &pool.claimed, &pool.guarded)
    });
    let holds = |(start, ..): &(usize, _, _)| bottom.wrapping_sub(*start) < STACKS * STACK_BYTES;
    let (start, claimed, guarded) = further.into_iter().find(holds).unwrap_or(first);
    (
        start,
        claimed,
        guarded,
        1 << ((bottom - start) / STACK_BYTES),
    )
}

/// Protects the guard page of a stack at its first use: an overflow ends the program.
fn guard(bottom: usize) {
    let (_, _, guarded, bit) = place(bottom);
    if guarded.load(Ordering::Relaxed) & bit == 0 {
        let none = libc::PROT_NONE.cast_unsigned() as usize;
        let arguments = [bottom, BASE_PAGE, none, 0, 0, 0];
        sys::unfiltered(|| {
            // SAFETY: the page is this library's, and nothing is there.
            let _ = unsafe { sys::request(libc::SYS_mprotect, arguments) };
            guarded.fetch_or(bit, Ordering::Relaxed);
        });
    }
}

/// Returns the lowest address of a stack that nothing uses.
fn claim() -> Option<usize> {
    let pool = match POOL.load(Ordering::Acquire) {
        // The filter may allow the program's own calls alone.
        0 => sys::unfiltered(|| map_pool(&POOL))??,
        pool => pool,
    };
    let take = |claimed: u32| (claimed != u32::MAX).then(|| claimed | (claimed + 1));
    let before = CLAIMED.fetch_update(Ordering::Acquire, Ordering::Relaxed, take);
    let bit = before.ok()?.trailing_ones() as usize;
    Some(pool + bit * STACK_BYTES)
}

/// Maps the stacks and their guard pages before a seccomp filter.
pub(crate) fn prepare() {
    let is_started = AMPLE_BYTES.load(Ordering::Relaxed) != usize::MAX;
    if is_started && POOL.load(Ordering::Acquire) == 0 && !sandbox::is_entered_later() {
        map_pool(&POOL);
    }
    if let pool @ 1.. = POOL.load(Ordering::Acquire) {
        (0..STACKS).for_each(|stack| guard(pool + stack * STACK_BYTES));
    }
}

/// Maps the stacks.
#[cold]
fn map_pool(start: &AtomicUsize) -> Option<usize> {
    let (prot, flags) = (
        ProtFlags::READ | ProtFlags::WRITE,
        MapFlags::PRIVATE | MapFlags::NORESERVE,
    );
    let mapped = sys::map_own(STACKS * STACK_BYTES, prot, flags).ok()?;
    let mapped = mapped.expose_provenance();
    let stored = start.compare_exchange(0, mapped, Ordering::AcqRel, Ordering::Acquire);
    Some(match stored {
        Ok(_) => mapped,
        Err(other) => {
            // SAFETY: mapped above, and no other code knows it.
            let _ = unsafe { sys::unmap(mapped, STACKS * STACK_BYTES) };
            other
        }
    })
}

/// Calls a function on another stack. Unwinders find the caller's by the frame pointer.
///
/// # Safety
/// As for the function. `top` is the end of a stack, with the alignment of a call.
#[unsafe(naked)]
unsafe extern "C" fn switch(job: *mut c_void, perform: Perform, top: usize) {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "mov rsp, rdx",
        "call rsi",
        "mov rsp, rbp",
        "pop rbp",
        ".cfi_def_cfa rsp, 8",
        ".cfi_restore rbp",
        "ret",
        ".cfi_endproc",
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "mov x29, sp",
        ".cfi_def_cfa_register x29",
        "mov sp, x2",
        "blr x1",
        "mov sp, x29",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa sp, 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "ret",
        ".cfi_endproc",
    );
}
