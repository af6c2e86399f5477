//! Failures of a call: [`Failure`], its errno and message; [`call()`], which every function goes
//! through.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::fmt::Display;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use jumbo::pool::{self, SetupError};
use jumbo::{FileError, gather, shmem};
use rustix::io::Errno;

use crate::gate;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// An errno, and what failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) errno: c_int,
    pub(crate) message: String,
}

pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(errno: Errno, message: impl Display) -> Self {
        let (errno, message) = (errno.raw_os_error(), message.to_string());
        Self { errno, message }
    }

    pub(crate) fn invalid(message: impl Display) -> Self {
        Self::new(Errno::INVAL, message)
    }
}

/// Returns the result of `body`, or `failed` with errno and the message set; also after a panic.
pub(crate) fn call<T>(failed: T, body: impl FnOnce() -> Outcome<T>) -> T {
    let panicked = |_| {
        let message = "a defect of libjumbo, whose message is on stderr";
        Err(Failure::new(Errno::NOTRECOVERABLE, message))
    };
    let passed = || gate::pass(body);
    let outcome = catch_unwind(AssertUnwindSafe(passed)).unwrap_or_else(panicked);
    outcome.unwrap_or_else(|failure| {
        note(&failure.message);
        // SAFETY: the C library's errno of this thread. Last: the lines above may change it.
        unsafe { *libc::__errno_location() = failure.errno };
        failed
    })
}

/// Returns a descriptor of the library's own for one of the program.
///
/// # Errors
/// EBADF; EMFILE.
pub(crate) fn own_descriptor(fd: c_int) -> Outcome<OwnedFd> {
    if fd < 0 {
        return Err(Failure::new(Errno::BADF, format!("descriptor {fd}")));
    }
    // SAFETY: of this call alone, and fcntl(2) says whether it is open.
    let theirs = unsafe { BorrowedFd::borrow_raw(fd) };
    let own = rustix::io::fcntl_dupfd_cloexec(theirs, 0);
    own.map_err(|errno| Failure::new(errno, format!("descriptor {fd}")))
}

/// Leaves a message for `jumbo_error`.
pub(crate) fn note(message: &str) {
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    // A thread that is ending has no message any more.
    let _ = MESSAGE.try_with(|last| last.replace(message));
}

/// The same, for functions that return 0 or -1.
pub(crate) fn status(body: impl FnOnce() -> Outcome<()>) -> c_int {
    call(-1, || body().map(|()| 0))
}

/// Returns the message of the last failure in this thread, or of the last `JUMBO_ANY` without
/// hugetlb pages; empty before the first. The text is valid until the next one in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_error() -> *const c_char {
    let message = MESSAGE.try_with(|message| message.borrow().as_ptr());
    message.unwrap_or(c"".as_ptr())
}

impl From<pool::Error> for Failure {
    fn from(error: pool::Error) -> Self {
        use pool::Error;
        let errno = match &error {
            Error::Source(source) => match source.errno {
                // The kernel's answers to a shortage, by its source.
                Errno::FAULT | Errno::BUSY | Errno::AGAIN => Errno::NOMEM,
                errno => errno,
            },
            Error::Forked => Errno::OWNERDEAD,
            Error::Placement => Errno::NODEV,
            _ => Errno::NOMEM,
        };
        Self::new(errno, error)
    }
}

impl From<SetupError> for Failure {
    fn from(error: SetupError) -> Self {
        match error {
            SetupError::Call { errno, .. } => Self::new(errno, error),
            SetupError::File(error) => error.into(),
            SetupError::Window(_) => Self::new(Errno::NOMEM, error),
            _ => Self::new(Errno::NOTSUP, error),
        }
    }
}

impl From<shmem::Error> for Failure {
    fn from(error: shmem::Error) -> Self {
        use shmem::Error;
        let errno = match &error {
            Error::Call { errno, .. } => *errno,
            Error::Sealed => Errno::PERM,
            Error::NoPages { .. } => Errno::NOMEM,
            Error::Host(_) => Errno::IO,
            _ => Errno::INVAL,
        };
        Self::new(errno, error)
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        let errno = match &error {
            FileError::Io { source, .. } => errno_of(source),
            _ => Errno::IO,
        };
        Self::new(errno, error)
    }
}

impl From<gather::FreeError> for Failure {
    fn from(error: gather::FreeError) -> Self {
        Self::new(error.errno, error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::new(errno_of(&error), error)
    }
}

fn errno_of(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::Unsupported => Errno::NOSYS,
        io::ErrorKind::InvalidInput => Errno::INVAL,
        _ => Errno::from_io_error(error).unwrap_or(Errno::IO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_of_the_call() {
        assert_eq!(status(|| panic!("a test of panics")), -1);
        let errno = io::Error::last_os_error().raw_os_error();
        assert_eq!(errno, Some(libc::ENOTRECOVERABLE));
        // SAFETY: the text is this thread's, and no call changes it here.
        let message = unsafe { std::ffi::CStr::from_ptr(jumbo_error()) };
        assert!(message.to_str().unwrap().contains("defect"));
    }
}
