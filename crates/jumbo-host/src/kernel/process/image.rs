//! The arguments of execve(2): [`ProgramImage`].

use std::ffi::{CStr, CString, OsStr, c_char};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use super::start;

/// A program with its arguments and environment.
#[derive(Clone, Debug)]
pub struct ProgramImage {
    path: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

/// The environment of this process, byte for byte and in its order: `std::env` omits entries
/// without a `=`.
#[expect(
    unsafe_code,
    reason = "environ is the only place where the whole environment is"
)]
pub fn inherited_environment() -> Vec<CString> {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    let mut entries = Vec::new();
    // SAFETY: `environ` is null or a null-terminated array of C strings. No code calls setenv
    // meanwhile: not this crate, and its callers are single-threaded when they start a program.
    unsafe {
        let mut entry = environ;
        while !entry.is_null() && !(*entry).is_null() {
            entries.push(CStr::from_ptr(*entry).to_owned());
            entry = entry.add(1);
        }
    }
    entries
}

impl ProgramImage {
    /// Image of the program at `path` with all `arguments` (the first is its name).
    ///
    /// # Errors
    /// `InvalidInput` where the path or an argument contains a zero byte.
    pub fn new<'a>(
        path: &Path,
        arguments: impl IntoIterator<Item = &'a OsStr>,
        environment: Vec<CString>,
    ) -> io::Result<Self> {
        let arguments = arguments
            .into_iter()
            .map(|argument| CString::new(argument.as_bytes()));
        Ok(Self {
            path: CString::new(path.as_os_str().as_bytes())?,
            arguments: arguments.collect::<Result<_, _>>()?,
            environment,
        })
    }

    /// Replaces this process by the program; returns only after an error. /bin/sh runs a file of
    /// unknown format, as with execvp(3).
    ///
    /// # References
    /// execve(2), execvp(3)
    pub fn exec(&self) -> io::Error {
        start::restore();
        let error = execve(&self.path, &self.arguments, &self.environment);
        if error.raw_os_error() != Some(libc::ENOEXEC) {
            return error;
        }
        let shell = c"/bin/sh";
        let mut arguments = vec![shell.to_owned(), self.path.clone()];
        arguments.extend(self.arguments.iter().skip(1).cloned());
        execve(shell, &arguments, &self.environment)
    }
}

#[expect(unsafe_code, reason = "the system call takes arrays of raw pointers")]
fn execve(path: &CStr, arguments: &[CString], environment: &[CString]) -> io::Error {
    let pointers = |strings: &[CString]| -> Vec<*const c_char> {
        let all = strings.iter().map(|string| string.as_ptr());
        all.chain([ptr::null()]).collect()
    };
    let (arguments, environment) = (pointers(arguments), pointers(environment));
    // SAFETY: the path is a C string and both arrays are null-terminated arrays of C strings that
    // outlive the call.
    unsafe { libc::execve(path.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    io::Error::last_os_error()
}
