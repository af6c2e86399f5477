//! Whether this process runs under a seccomp filter: [`is_entered`].
//!
//! A filter knows the system calls that its program makes, not ours: one that the program never made may
//! end it. So whoever works inside somebody else's process asks here before a call of his own, and
//! leaves it where a filter is at work. A filter is known when it was there at the start ([`detect`]), or
//! when the program installs one through the C library ([`enter`], from the preload library). One that is
//! installed by a system call in the program's own machine code is not seen.
//!
//! A forked child inherits the answer, as it inherits the filter. So does, because it shares the memory,
//! the parent of a vfork(2) child that installs one before it execs: too careful, and rightly so, since a
//! child made by a bare clone(2) cannot be told from it.

use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Mode, OFlags};

/// How many reasons there are to think so.
static FILTERS: AtomicU32 = AtomicU32::new(0);

/// True where a filter is at work, or is being installed by another thread.
pub fn is_entered() -> bool {
    FILTERS.load(Ordering::Acquire) != 0
}

/// A filter is about to be installed. Before the call, since it is at work when the call returns.
pub fn enter() {
    FILTERS.fetch_add(1, Ordering::AcqRel);
}

/// The filter of the last [`enter`] was refused by the kernel.
pub fn leave() {
    FILTERS.fetch_sub(1, Ordering::AcqRel);
}

/// Looks whether a filter was there before: `Seccomp` in /proc/self/status (proc_pid_status(5), Linux
/// 3.8). Only where files may be opened, as at a program's start, when the dynamic loader has just done
/// so. Where the file cannot be read there is taken to be one.
pub fn detect() {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    let mut text = [0u8; 4096];
    let length = rustix::fs::open(c"/proc/self/status", flags, Mode::empty())
        .and_then(|file| rustix::io::read(&file, &mut text));
    if length.map_or(true, |length| mode(&text[..length]) != Some(b'0')) {
        enter();
    }
}

/// The digit behind `Seccomp:`. A newline in the process's name is escaped there.
fn mode(status: &[u8]) -> Option<u8> {
    let key = b"\nSeccomp:\t";
    let at = status.windows(key.len()).position(|window| window == key)?;
    status.get(at + key.len()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_is_found_in_the_status() {
        let status = b"Name:\tSeccomp:\\n2\nNoNewPrivs:\t0\nSeccomp:\t2\nSeccomp_filters:\t1\n";
        assert_eq!(mode(status), Some(b'2'));
        assert_eq!(mode(b"Name:\tx\n"), None);
        assert_eq!(mode(b"Name:\tx\nSeccomp:\t"), None);
    }

    #[test]
    fn a_refused_filter_is_forgotten() {
        let before = is_entered();
        enter();
        assert!(is_entered());
        leave();
        assert_eq!(is_entered(), before);
    }
}
