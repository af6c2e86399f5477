//! Registration of buffers with io_uring: io_uring_register(2), and liburing's functions.

use core::ffi::{c_int, c_long, c_uint, c_void};
use core::ptr::with_exposed_provenance;

use jumbo_inside::populate;
use jumbo_sys as sys;
use rustix::io::Errno;

use crate::next;
use crate::own_stack::on;

/// io_uring_register(2), by its number. Not inlined: the caller's frame is to be small.
#[inline(never)]
pub(crate) fn register(
    operation: c_uint,
    argument: *const c_void,
    count: c_uint,
    call: impl Fn(*const c_void) -> c_long,
) -> c_long {
    let errno = next::errno();
    let failing = |argument| {
        next::set_errno(errno);
        let answer = call(argument);
        let error = (answer == -1).then(|| Errno::from_raw_os_error(next::errno()));
        (answer, error)
    };
    let mut words = [0; REGISTER_WORDS];
    match operation {
        REGISTER_BUFFERS => on(|| {
            let count = count as usize;
            populate::register(argument.addr(), count, |vectors| {
                failing(with_exposed_provenance(vectors))
            })
        }),
        REGISTER_BUFFERS2
            if sys::unfiltered(|| sys::copy_words(argument.addr(), &mut words))
                == Some(Ok(REGISTER_WORDS)) =>
        {
            let [count, reserved, vectors, tags] = words;
            on(|| {
                populate::register(vectors, count & u32::MAX as usize, |vectors| {
                    failing([count, reserved, vectors, tags].as_ptr().cast())
                })
            })
        }
        _ => call(argument),
    }
}

/// IORING_REGISTER_BUFFERS (linux/io_uring.h), Linux 5.1: iovecs.
const REGISTER_BUFFERS: c_uint = 0;
/// IORING_REGISTER_BUFFERS2, Linux 5.13: a `struct io_uring_rsrc_register` with their number in 32 bits,
/// flags, a reserved word, and the addresses of the iovecs and of their tags.
const REGISTER_BUFFERS2: c_uint = 15;
const REGISTER_WORDS: usize = 4;

/// io_uring_register_buffers(3) of liburing, which makes its calls in machine code.
///
/// # Safety
/// As for liburing's.
pub(crate) unsafe fn register_by_liburing(
    call: impl Fn(*mut c_void, *const c_void, c_uint) -> c_int,
    ring: *mut c_void,
    vectors: *const c_void,
    count: c_uint,
) -> c_int {
    populate::register(vectors.addr(), count as usize, |vectors| {
        failing_by_answer(call(ring, with_exposed_provenance(vectors), count))
    })
}

/// io_uring_register_buffers_tags(3) of liburing.
///
/// # Safety
/// As for liburing's.
pub(crate) unsafe fn register_with_tags(
    call: impl Fn(*mut c_void, *const c_void, *const c_void, c_uint) -> c_int,
    ring: *mut c_void,
    vectors: *const c_void,
    tags: *const c_void,
    count: c_uint,
) -> c_int {
    populate::register(vectors.addr(), count as usize, |vectors| {
        failing_by_answer(call(ring, with_exposed_provenance(vectors), tags, count))
    })
}

/// Returns the answer of a function that returns negative error numbers, and the error.
fn failing_by_answer(answer: c_int) -> (c_int, Option<Errno>) {
    let error = (answer < 0).then(|| Errno::from_raw_os_error(answer.wrapping_neg()));
    (answer, error)
}
