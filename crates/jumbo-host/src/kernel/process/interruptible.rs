//! Work in a thread that can be told to stop while it is in a system call: [`Interruptible`].
//!
//! Growing a hugetlb pool is one write(2) that can take minutes. The kernel looks for a pending signal
//! after every page and then keeps what it has got, so a signal ends it early without loss. The signal
//! must be one that the writing thread does not block, while all others are blocked (see
//! [`Signals`](super::Signals)): a Ctrl-C goes to the thread that decides what it means.

use std::os::unix::thread::JoinHandleExt as _;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{io, ptr};

use super::signals::mask;

/// Work under way in a thread of its own. For processes of ours alone: the signal gets a handler.
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
            // No thread waits any more where the receiver is gone.
            let _ = sender.send(work());
        })?;
        Ok(Self { thread, result })
    }

    /// The result, where there is one within `patience`; `Err` gives the work back, still under way.
    ///
    /// # Errors
    /// Not a failure: the work is not done yet.
    pub fn wait(self, patience: Duration) -> Result<Option<T>, Self> {
        match self.result.recv_timeout(patience) {
            Ok(result) => Ok(Some(result)),
            Err(RecvTimeoutError::Timeout) => Err(self),
            // It panicked: there will never be a result.
            Err(RecvTimeoutError::Disconnected) => Ok(None),
        }
    }

    /// Cuts the system call short that the thread is in. What it enters afterwards is not cut short, so
    /// this is repeated until the work is done.
    #[expect(unsafe_code, reason = "a signal is sent to a thread by its handle")]
    pub fn interrupt(&self) {
        // SAFETY: the thread was neither joined nor detached, as `self` holds its handle, so the ID is
        // valid, ended or not; the signal has a handler that does nothing (`start`).
        unsafe {
            libc::pthread_kill(self.thread.as_pthread_t(), number());
        }
    }
}

/// A signal that no other code sends: the last of those without a meaning.
fn number() -> libc::c_int {
    libc::SIGRTMAX()
}

extern "C" fn nothing(_: libc::c_int) {}

/// Gives the signal a handler: an ignored one would cut nothing short, and by default it kills.
#[expect(unsafe_code, reason = "the disposition is a C structure")]
fn handle() -> io::Result<()> {
    // SAFETY: all zeroes are a valid disposition (no flags, so no SA_RESTART; an empty mask); the
    // handler does nothing and so may run at any point.
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

    const MOMENT: Duration = Duration::from_secs(30);

    #[test]
    fn a_result_comes_back() {
        let work = Interruptible::start(|| 7).unwrap();
        assert_eq!(work.wait(MOMENT).unwrap(), Some(7));
    }

    #[test]
    fn a_system_call_is_cut_short() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let mut work = Interruptible::start(move || rustix::io::read(&read, &mut [0; 1])).unwrap();
        let begin = std::time::Instant::now();
        let result = loop {
            assert!(begin.elapsed() < MOMENT);
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
