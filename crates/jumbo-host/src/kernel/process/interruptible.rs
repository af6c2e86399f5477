//! Work in a thread whose system calls can be interrupted: [`Interruptible`].
//!
//! The growth of a hugetlb pool is one write(2) that can take minutes. The kernel checks for a
//! pending signal after each page, and keeps the pages so far: a signal ends the call early without
//! loss. The writing thread unblocks only this signal (see [`Signals`](super::Signals)): a Ctrl-C
//! goes to the thread that handles it.

use std::os::unix::thread::JoinHandleExt as _;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{io, ptr};

use super::signals::mask;

/// Work in a thread of its own. Only for processes of jumbo, because it sets a signal handler.
#[derive(Debug)]
pub struct Interruptible<T> {
    thread: JoinHandle<()>,
    result: Receiver<T>,
}

impl<T: Send + 'static> Interruptible<T> {
    /// Starts `work`.
    ///
    /// # Errors
    /// The errno of sigaction(2) or of pthread_create(3).
    pub fn start(work: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        handle()?;
        let (sender, result) = channel();
        let thread = thread::Builder::new().spawn(move || {
            mask(libc::SIG_UNBLOCK, number());
            // Fails where the receiver was dropped.
            let _ = sender.send(work());
        })?;
        Ok(Self { thread, result })
    }

    /// Waits for the result; `None` after a panic of the work.
    ///
    /// # Errors
    /// The unfinished work, after the timeout.
    pub fn wait(self, timeout: Duration) -> Result<Option<T>, Self> {
        match self.result.recv_timeout(timeout) {
            Ok(result) => Ok(Some(result)),
            Err(RecvTimeoutError::Timeout) => Err(self),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
        }
    }

    /// Interrupts the current system call of the thread. Later calls are not interrupted, so
    /// callers repeat this until the work is done.
    #[expect(unsafe_code, reason = "a signal is sent to a thread by its handle")]
    pub fn interrupt(&self) {
        // SAFETY: `self` holds the handle, so the thread was neither joined nor detached, and its
        // ID is valid, ended or not; the signal has a handler that does nothing (`start`).
        unsafe {
            libc::pthread_kill(self.thread.as_pthread_t(), number());
        }
    }
}

/// The last real-time signal, which no other code sends.
fn number() -> libc::c_int {
    libc::SIGRTMAX()
}

extern "C" fn nothing(_: libc::c_int) {}

/// Sets a handler: an ignored signal interrupts no call, and the default action kills.
#[expect(unsafe_code, reason = "the disposition is a C structure")]
fn handle() -> io::Result<()> {
    // SAFETY: all zeroes are a valid disposition (no flags, so no SA_RESTART; an empty mask); the
    // handler does nothing, so it may run at any point.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        match libc::sigaction(number(), &raw const action, ptr::null_mut()) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(30);

    #[test]
    fn the_result_is_returned() {
        let work = Interruptible::start(|| 7).unwrap();
        assert_eq!(work.wait(TEST_TIMEOUT).unwrap(), Some(7));
    }

    #[test]
    fn a_system_call_is_interrupted() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let mut work = Interruptible::start(move || rustix::io::read(&read, &mut [0; 1])).unwrap();
        let begin = std::time::Instant::now();
        let result = loop {
            assert!(begin.elapsed() < TEST_TIMEOUT);
            work = match work.wait(Duration::from_millis(1)) {
                Ok(result) => break result,
                Err(work) => work,
            };
            work.interrupt();
        };
        assert_eq!(result, Some(Err(rustix::io::Errno::INTR)));
        drop(write);
    }
}
