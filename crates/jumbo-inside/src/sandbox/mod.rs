//! Whether this process runs under a seccomp filter: [`is_entered`], [`allows_advice`].
//!
//! A filter knows the system calls that its program makes, not ours: one that the program never made may
//! end it. So code of ours asks here before a call that the program may never make, and
//! leaves it where a filter is at work. A filter is known when it was there at the start ([`detect`]), or
//! when the program installs one through the C library ([`enter`], from the preload library). One that is
//! installed by a system call in the program's own machine code is not seen until the program execs.
//!
//! Advice (madvise(2)) is what the heap lives by, and what most filters let pass: a filter that the program installs is
//! asked beforehand ([`super::bpf`]), and only where it would not let advice pass is none given from then on. Everything
//! else that the heap does, the C library's own allocator does too: mapping, unmapping, moving, protecting.
//!
//! Containers put a filter on all they start. Under one that was inherited, another process can make the calls
//! first, and may die of it ([`ask()`]). The launcher does, and says under how many filters they were harmless; where no
//! launcher did, the library does. A filter that is harmless to all calls is none: each mechanism takes a call that
//! fails as that of a kernel that lacks it.
//!
//! A forked child inherits the answer, as it inherits the filter. So does, because it shares the memory,
//! the parent of a vfork(2) child that installs one before it execs: too careful, and rightly so, since a
//! child made by a bare clone(2) cannot be told from it.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{CWD, Mode, OFlags};

use crate::bpf::{self, Call};

mod ask;

pub use ask::{Answer, ask};

crate::one_page! {
    /// The number of reasons to think so.
    static FILTERS: AtomicU32 = AtomicU32::new(0);

    /// One of them was there at the start.
    static FROM_START: AtomicU32 = AtomicU32::new(0);
}

/// How many reasons there are to give no advice: filters that do not let it pass, or may not.
static SILENCING: AtomicU32 = AtomicU32::new(0);

/// True where a filter came after the start: the one from before (a container's, say) has let the dynamic
/// loader open and read files, this one may not.
pub fn is_entered_later() -> bool {
    FILTERS.load(Ordering::Acquire) != FROM_START.load(Ordering::Acquire)
}

/// True where a filter is at work, or is being installed by another thread.
pub fn is_entered() -> bool {
    FILTERS.load(Ordering::Acquire) != 0
}

/// True where madvise(2) is harmless, as far as is known.
#[inline(always)]
pub fn allows_advice() -> bool {
    SILENCING.load(Ordering::Acquire) == 0
}

/// A filter that is about to be installed: at work from [`enter`] on, since it may be when the call returns.
#[derive(Debug)]
#[must_use]
pub struct Entering(());

/// A filter is about to be installed.
pub fn enter() -> Entering {
    SILENCING.fetch_add(1, Ordering::AcqRel);
    FILTERS.fetch_add(1, Ordering::AcqRel);
    Entering(())
}

impl Entering {
    /// The kernel refused the filter.
    pub fn refused(self) {
        FILTERS.fetch_sub(1, Ordering::AcqRel);
        SILENCING.fetch_sub(1, Ordering::AcqRel);
    }

    /// The kernel took it. `None`: it is not known, or lets next to nothing pass (the strict mode).
    pub fn installed(self, filter: Option<&[libc::sock_filter]>) {
        if filter.is_some_and(lets_advice) {
            SILENCING.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Whether a filter lets all advice pass that is given in the program's name: ours, and that of glibc's tunable.
fn lets_advice(filter: &[libc::sock_filter]) -> bool {
    const LENGTH: usize = 2 << 20;
    let advice = [
        libc::MADV_HUGEPAGE,
        libc::MADV_COLLAPSE,
        libc::MADV_DONTNEED,
        libc::MADV_POPULATE_WRITE,
    ];
    advice.into_iter().all(|advice| {
        let advice = advice.cast_unsigned() as usize;
        let here = lets_advice as *const () as usize;
        let call = Call::new(libc::SYS_madvise, here, [1 << 45, LENGTH, advice, 0, 0, 0]);
        bpf::lets(filter, &call)
    })
}

/// Looks whether a filter was there before: `Seccomp` in /proc/self/status (proc_pid_status(5), Linux
/// 3.8). Only where files may be opened, as at a program's start, when the dynamic loader has just done
/// so. Where the file cannot be read there is taken to be one. `tried` is the number of filters that the launcher found
/// harmless to all calls, and `launched_under` how many it has itself, tried or not: [`known`] there. Under these a program
/// is advised. Where there are more, one was put on since, or there was no launcher: the filters are asked.
pub fn detect(tried: u32, launched_under: u32, is_container: bool) {
    let found = inherited();
    let answer = match found {
        Some(0) => return,
        Some(count) if count == tried => Answer::Harmless,
        Some(count) if count <= launched_under => Answer::Advice,
        None if launched_under == UNKNOWN => Answer::Advice,
        _ => ask(false, is_container),
    };
    if answer == Answer::Harmless {
        return;
    }
    FILTERS.fetch_add(1, Ordering::AcqRel);
    FROM_START.store(1, Ordering::Release);
    if answer != Answer::Advice {
        SILENCING.fetch_add(1, Ordering::AcqRel);
    }
}

/// The variable that Kubernetes sets in its containers, which have no file that says so. Nor has podman's with
/// `--read-only`; the orders of a CDI device say it.
pub const CONTAINER: &str = "KUBERNETES_SERVICE_HOST";

/// A number of filters that is not known.
const UNKNOWN: u32 = u32::MAX;

/// How many filters this process has, for [`detect`].
pub fn known() -> u32 {
    inherited().unwrap_or(UNKNOWN)
}

/// How many filters this process has: 0, or `Seccomp_filters` of /proc/self/status (Linux 5.9). `None`
/// where it has some and cannot tell, and where the file cannot be read.
pub fn inherited() -> Option<u32> {
    let mut text = [0u8; 4096];
    filters(status(c"/proc/self/status", &mut text)?)
}

fn status<'a>(path: &CStr, text: &'a mut [u8; 4096]) -> Option<&'a [u8]> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    // As the dynamic loader does it: not by open(2), which a filter may not let pass.
    let length = rustix::fs::openat(CWD, path, flags, Mode::empty())
        .and_then(|file| rustix::io::read(&file, &mut *text));
    text.get(..length.ok()?)
}

fn filters(status: &[u8]) -> Option<u32> {
    match field(status, b"\nSeccomp:\t")? {
        0 => Some(0),
        _ => field(status, b"\nSeccomp_filters:\t").filter(|count| *count > 0),
    }
}

/// The number behind `key`. A newline in the process's name is escaped there.
fn field(status: &[u8], key: &[u8]) -> Option<u32> {
    let at = status.windows(key.len()).position(|window| window == key)?;
    let value = status.get(at + key.len()..)?;
    let digits = value.iter().take_while(|byte| byte.is_ascii_digit());
    core::str::from_utf8(value.get(..digits.count())?)
        .ok()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_are_found_in_the_status() {
        let status = b"Name:\tSeccomp:\\n2\nNoNewPrivs:\t0\nSeccomp:\t2\nSeccomp_filters:\t12\n";
        assert_eq!(filters(status), Some(12));
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t0\n"), Some(0));
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t2\n"), None, "before 5.9");
        assert_eq!(filters(b"Name:\tx\n"), None);
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t"), None);
    }

    #[test]
    fn a_refused_filter_is_forgotten() {
        let before = (is_entered(), allows_advice());
        let entering = enter();
        assert!(is_entered() && !allows_advice());
        entering.refused();
        assert_eq!((is_entered(), allows_advice()), before);
    }
}
