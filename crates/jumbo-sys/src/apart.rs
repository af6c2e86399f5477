//! Work on a stack with room: [`apart`].
#![expect(
    unsafe_code,
    reason = "passes the address of a closure to a function that switches stacks"
)]

use core::ffi::c_void;
use core::sync::atomic::{AtomicPtr, Ordering};

/// Work of [`Apart`], on the address of its arguments.
pub type Perform = unsafe extern "C" fn(*mut c_void);

/// Function that performs work on a stack with room, once.
#[derive(Debug)]
pub struct Apart(pub unsafe fn(*mut c_void, Perform));

static APART: AtomicPtr<Apart> = AtomicPtr::new(core::ptr::null_mut());

/// Has `apart` use a function. Without one it uses the caller's stack.
pub fn use_apart(apart: &'static Apart) {
    APART.store(core::ptr::from_ref(apart).cast_mut(), Ordering::Release);
}

/// Runs work on a stack with room: it takes 9 KiB, and the caller's may be a coroutine's within the
/// stack of the first thread. It waits for nothing of the program, and does not call it.
pub fn apart<R>(work: impl FnOnce() -> R) -> Option<R> {
    unsafe extern "C" fn perform<F: FnOnce() -> R, R>(job: *mut c_void) {
        // SAFETY: the job of the caller below, which is of these types.
        let (work, result) = unsafe { &mut *job.cast::<(Option<F>, Option<R>)>() };
        *result = work.take().map(|work| work());
    }
    fn performer<F: FnOnce() -> R, R>(_: &(Option<F>, Option<R>)) -> Perform {
        perform::<F, R>
    }
    let mut job = (Some(work), None);
    let perform = performer(&job);
    let at = (&raw mut job).cast();
    // SAFETY: null, or a static that was stored there. The function takes that job.
    unsafe {
        match APART.load(Ordering::Acquire).as_ref() {
            Some(Apart(run)) => run(at, perform),
            None => perform(at),
        }
    }
    job.1
}
