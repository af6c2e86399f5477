//! Stacks of this library's own: [`on`] runs deep work on one, [`run`] the start of glibc's malloc.
//!
//! The caller's stack may have a few KiB: that of a coroutine, or of a signal handler. So the
//! interposed functions take at most 512 bytes of it beyond the C library's own, and call what needs
//! more through [`on`]. Work that waits, or that calls the program, stays on the caller's stack.
//! `docs/design/heap.md` has the figures.

use core::arch::naked_asm;
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use jumbo_inside::heap::BASE_PAGE;
use jumbo_inside::sandbox;
use jumbo_inside::sys::{self, Blocked};
use libc::stack_t;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use crate::system;

const STACK_BYTES: usize = 32 << 10;
/// Number of stacks: one bit each of [`CLAIMED`]. Together less than a huge page.
const STACKS: usize = u32::BITS as usize;

/// Start and length of the addresses of a stack that has room: all until [`start`], then those of
/// the first thread's stack, except the last part.
static AMPLE_START: AtomicUsize = AtomicUsize::new(0);
static AMPLE_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Start and length of the alternate signal stacks among these addresses.
static INNER_START: AtomicUsize = AtomicUsize::new(0);
static INNER_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Room that a stack must have for any work of this library.
const ROOM_BYTES: usize = 64 << 10;

jumbo_inside::one_page! {
    /// Address of the stacks; 0 until the first use.
    static POOL: AtomicUsize = AtomicUsize::new(0);
    /// Stacks in use.
    static CLAIMED: AtomicU32 = AtomicU32::new(0);
}

/// Work and its result, on the caller's stack.
struct Job<F, R> {
    work: MaybeUninit<F>,
    result: MaybeUninit<R>,
}

/// Learns the bounds of the first thread's stack, in that thread.
pub(crate) fn start() {
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
}

/// Reports whether the present stack has room.
#[inline(always)]
fn is_ample() -> bool {
    let here = here();
    is_ample_in_first_thread(here) || is_own(here)
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
    // SAFETY: the kernel has just read it; it need not be aligned.
    let (start, length) = unsafe {
        (
            (&raw const (*stack).ss_sp).read_unaligned().addr(),
            (&raw const (*stack).ss_size).read_unaligned(),
        )
    };
    if AMPLE_BYTES.load(Ordering::Relaxed) != usize::MAX && is_ample_in_first_thread(start) {
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
    let mut job = Job {
        work: MaybeUninit::new(work),
        result: MaybeUninit::uninit(),
    };
    let perform = performer(&job);
    let at = (&raw mut job).cast();
    // SAFETY: the function is that of this job, and runs once.
    unsafe {
        match is_ample() {
            true => perform(at),
            false => aside(at, perform),
        }
        job.result.assume_init()
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
/// this stack or leave it, and a collector would not find the caller's. Without a free stack, on the
/// caller's: a handler that left a fault by a jump keeps one for good.
///
/// # Safety
/// As for the function.
#[cold]
#[inline(never)]
unsafe fn aside(job: *mut c_void, perform: Perform) {
    // A filter of the program may forbid the call.
    let _blocked = (!sandbox::is_entered()).then(Blocked::asynchronous);
    let Some(bottom) = claim() else {
        // SAFETY: the caller's promise.
        return unsafe { perform(job) };
    };
    // SAFETY: the stack is this thread's until it is released, and aligned as a call requires.
    unsafe { switch(job, perform, bottom + STACK_BYTES) };
    let bit = (bottom - POOL.load(Ordering::Relaxed)) / STACK_BYTES;
    CLAIMED.fetch_and(!(1 << bit), Ordering::Release);
}

/// Returns the lowest address of a stack that nothing uses.
fn claim() -> Option<usize> {
    let pool = match POOL.load(Ordering::Acquire) {
        // The filter may allow the program's own calls alone.
        0 if sandbox::is_entered_later() => return None,
        0 => map_pool()?,
        pool => pool,
    };
    let take = |claimed: u32| (claimed != u32::MAX).then(|| claimed | (claimed + 1));
    let before = CLAIMED.fetch_update(Ordering::Acquire, Ordering::Relaxed, take);
    let bit = before.ok()?.trailing_ones() as usize;
    Some(pool + bit * STACK_BYTES)
}

/// Maps the stacks before a seccomp filter.
pub(crate) fn prepare() {
    let is_started = AMPLE_BYTES.load(Ordering::Relaxed) != usize::MAX;
    if is_started && POOL.load(Ordering::Acquire) == 0 && !sandbox::is_entered_later() {
        map_pool();
    }
}

/// Maps the stacks.
#[cold]
fn map_pool() -> Option<usize> {
    let (prot, flags) = (
        ProtFlags::READ | ProtFlags::WRITE,
        MapFlags::PRIVATE | MapFlags::NORESERVE,
    );
    let mapped = sys::map_own(STACKS * STACK_BYTES, prot, flags).ok()?;
    let mapped = mapped.expose_provenance();
    let stored = POOL.compare_exchange(0, mapped, Ordering::AcqRel, Ordering::Acquire);
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
