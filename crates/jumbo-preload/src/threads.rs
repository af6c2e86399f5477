//! The start of a thread, pthread_create(3), and the end of the main thread before that of others,
//! pthread_exit(3), thrd_exit(3).
//!
//! A thread learns at its start how much room its stack has ([`own_stack::entered`]). The function that
//! it starts with leaves no frame: it jumps to the program's, which sees the stack as without jumbo.
//!
//! A process ends with its last thread, and the workers of [`jumbo_inside::gather`] are threads. So
//! the workers exit for good before the main thread does: later frees are synchronous. The
//! cancellation of a main thread is not detected; the process then ends once the last worker has
//! been idle long enough, 100 ms or a minute.
//!
//! Both exits unwind the stack of their thread, which Rust frames do not support. So each
//! function is a few instructions that jump to the next definition, without a Rust frame on the
//! stack.

use core::arch::naked_asm;
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use jumbo_inside::events::Mechanism as _;
use jumbo_inside::sandbox;
use jumbo_sys as sys;
use libc::{pthread_attr_t, pthread_t};

use crate::mechanisms::All;
use crate::next;
use crate::own_stack::{self, on};

/// Function that a thread starts with.
pub(crate) type Start = unsafe extern "C" fn(*mut c_void) -> *mut c_void;

/// Start of a thread that has not begun.
struct Slot {
    is_claimed: AtomicBool,
    start: AtomicPtr<c_void>,
    argument: AtomicPtr<c_void>,
    /// Size of its stack.
    stack_bytes: AtomicUsize,
}

/// Threads that are made at the same time; further ones do not learn the room of their stacks.
static SLOTS: [Slot; 32] = [const {
    Slot {
        is_claimed: AtomicBool::new(false),
        start: AtomicPtr::new(null_mut()),
        argument: AtomicPtr::new(null_mut()),
        stack_bytes: AtomicUsize::new(0),
    }
}; 32];

/// pthread_create(3).
///
/// # Safety
/// As for pthread_create(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    let slot = on(|| {
        All::before_thread();
        claim(attributes, start, argument)
    });
    let create = next::pthread_create.get();
    let Some(slot) = slot else {
        // SAFETY: the same call.
        return unsafe { create(thread, attributes, start, argument) };
    };
    let place = (&raw const *slot).cast_mut().cast();
    // SAFETY: the same call, but for the start: `enter` jumps to it.
    let answer = unsafe { create(thread, attributes, enter, place) };
    if answer != 0 {
        slot.is_claimed.store(false, Ordering::Release);
    }
    answer
}

/// Returns a slot with the start of a thread; `None` if there is none, or no room is known.
fn claim(
    attributes: *const pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> Option<&'static Slot> {
    let stack_bytes = stack_bytes(attributes)?;
    let claims = |slot: &&Slot| !slot.is_claimed.swap(true, Ordering::Acquire);
    let slot = SLOTS.iter().find(claims)?;
    let start: *const () = start as *const ();
    slot.start.store(start.cast_mut().cast(), Ordering::Relaxed);
    slot.argument.store(argument, Ordering::Relaxed);
    slot.stack_bytes.store(stack_bytes, Ordering::Relaxed);
    Some(slot)
}

/// Returns the size of the stack that a thread with the attributes gets, without its guard pages.
fn stack_bytes(attributes: *const pthread_attr_t) -> Option<usize> {
    let mut defaults = MaybeUninit::<pthread_attr_t>::uninit();
    let (mut size, mut guard) = (0, 0);
    // SAFETY: the attributes are the caller's, or initialised here.
    let is_known = unsafe {
        let is_made =
            attributes.is_null() && (next::pthread_attr_init.get())(defaults.as_mut_ptr()) == 0;
        let read = match is_made {
            true => defaults.as_ptr(),
            false => attributes,
        };
        let is_known = !read.is_null()
            && (next::pthread_attr_getstacksize.get())(read, &raw mut size) == 0
            && (next::pthread_attr_getguardsize.get())(read, &raw mut guard) == 0;
        if is_made {
            (next::pthread_attr_destroy.get())(defaults.as_mut_ptr());
        }
        is_known
    };
    is_known.then(|| size.saturating_sub(guard))
}

/// Starts a thread: learns its stack, and jumps to the program's function.
///
/// # Safety
/// `slot` is a [`Slot`] that is claimed.
#[unsafe(naked)]
unsafe extern "C" fn enter(slot: *mut c_void) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc",
        "endbr64",
        "sub rsp, 8",
        ".cfi_adjust_cfa_offset 8",
        "call {}",
        "add rsp, 8",
        ".cfi_adjust_cfa_offset -8",
        "mov rdi, rdx",
        "jmp rax",
        ".cfi_endproc",
        sym begin
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc",
        "hint #34",
        "stp x29, x30, [sp, #-16]!",
        ".cfi_adjust_cfa_offset 16",
        ".cfi_offset x30, -8",
        "bl {}",
        "ldp x29, x30, [sp], #16",
        ".cfi_adjust_cfa_offset -16",
        ".cfi_restore x30",
        "mov x16, x0",
        "mov x0, x1",
        "br x16",
        ".cfi_endproc",
        sym begin
    );
}

/// Function and argument of a thread, in two registers.
#[repr(C)]
struct Begun {
    start: *mut c_void,
    argument: *mut c_void,
}

/// Releases the slot of the calling thread, which learns its stack.
extern "C" fn begin(slot: *const c_void) -> Begun {
    // SAFETY: `enter` gets a slot.
    let slot = unsafe { &*slot.cast::<Slot>() };
    let begun = Begun {
        start: slot.start.load(Ordering::Relaxed),
        // A conservative collector would take it for a reference.
        argument: slot.argument.swap(null_mut(), Ordering::Relaxed),
    };
    own_stack::entered(slot.stack_bytes.load(Ordering::Relaxed));
    slot.is_claimed.store(false, Ordering::Release);
    begun
}

/// Forgets the threads that other threads of the parent were making, in the child of a fork.
pub(crate) fn forked() {
    for slot in &SLOTS {
        slot.is_claimed.store(false, Ordering::Relaxed);
    }
}

/// pthread_exit(3).
///
/// # Safety
/// As for pthread_exit(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_exit(value: *mut c_void) -> ! {
    // The argument is saved over the call, on an aligned stack.
    #[cfg(target_arch = "x86_64")]
    naked_asm!("push rdi", "call {}", "pop rdi", "jmp rax", sym leave_pthread);
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "stp x0, x30, [sp, #-16]!", "bl {}", "mov x16, x0", "ldp x0, x30, [sp], #16", "br x16",
        sym leave_pthread
    );
}

/// thrd_exit(3).
///
/// # Safety
/// As for thrd_exit(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thrd_exit(value: c_int) -> ! {
    #[cfg(target_arch = "x86_64")]
    naked_asm!("push rdi", "call {}", "pop rdi", "jmp rax", sym leave_thrd);
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "stp x0, x30, [sp, #-16]!", "bl {}", "mov x16, x0", "ldp x0, x30, [sp], #16", "br x16",
        sym leave_thrd
    );
}

extern "C" fn leave_pthread() -> *mut c_void {
    leave();
    next::pthread_exit.address()
}

extern "C" fn leave_thrd() -> *mut c_void {
    leave();
    next::thrd_exit.address()
}

/// Reports the end of the calling thread, perhaps by exit(2).
pub(crate) fn ending() {
    // The first thread's ID is that of the process. Under a seccomp filter there are no workers.
    let is_first =
        || !sandbox::is_entered() && rustix::thread::gettid() == rustix::process::getpid();
    if sys::guarded(is_first) {
        on(All::first_thread_ends);
    }
}

fn leave() {
    ending();
    // This may be the first interposed call.
    next::look_up();
}
