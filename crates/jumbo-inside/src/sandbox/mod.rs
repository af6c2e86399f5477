//! Detects a seccomp filter on this process: [`is_entered`], [`allows_advice`].
//!
//! A filter allows the system calls of its program. It may kill for a call that the program itself
//! never makes, so jumbo checks here before such calls, and omits them under a filter. Filters from
//! before the start are found by [`detect`]. Those that the program installs through the C library
//! are reported by the preload library ([`enter`]). A filter installed by the program's own system
//! call instruction is unknown until exec.
//!
//! The heap needs madvise(2), which most filters allow. A new filter is evaluated for each advice
//! ([`super::bpf`]), since some filters judge by it; [`sys::advise`] makes no call that it does not
//! allow. The other calls of the heap are also those of the C library's allocator: they map, unmap,
//! move and protect.
//!
//! Containers start all programs under a filter. A child process tries the calls under an inherited
//! filter, and may be killed for them ([`ask()`]). The launcher does so, and passes the number of
//! filters that proved harmless; without a launcher the library does. A filter that is harmless to
//! all calls is ignored: mechanisms handle a failed call as on a kernel without it.
//!
//! A filter may be for all threads, and another one may be about to make a call because there was no
//! filter: both are in a guarded region ([`sys::guarded`]), and [`enter`] waits for its end.
//!
//! A forked child inherits filter and result. The parent of a vfork(2) child shares its memory, so
//! it counts a filter that the child installs. A child of a bare clone(2) looks the same.

use core::ffi::{CStr, c_int};
use core::sync::atomic::{AtomicU32, Ordering};

use crate::bpf::{self, Call};
use jumbo_sys as sys;
use jumbo_sys::proc::number;

mod ask;

pub use ask::{Answer, ask};

crate::one_page! {
    /// Reasons to assume a filter.
    static FILTER_COUNT: AtomicU32 = AtomicU32::new(0);

    /// Filters among them that let a thread block signals and change its alternate stack.
    static LETTING_COUNT: AtomicU32 = AtomicU32::new(0);
}

/// Reports whether a filter was installed after the start. An earlier one, of a container, let the
/// dynamic loader open and read files; a later one may not.
pub fn is_entered_later() -> bool {
    sys::is_filtered()
}

/// Reports whether a filter is in force or being installed.
pub fn is_entered() -> bool {
    FILTER_COUNT.load(Ordering::Acquire) != 0
}

/// Reports whether a thread may block its signals and change its alternate signal stack.
pub fn allows_signals() -> bool {
    FILTER_COUNT.load(Ordering::Acquire) == LETTING_COUNT.load(Ordering::Acquire)
}

/// Reports whether jumbo's usual advice is harmless, as far as known; [`sys::allows`] reports it of
/// one advice.
#[inline(always)]
pub fn allows_advice() -> bool {
    sys::allows_usual()
}

/// Filter being installed. It counts from [`enter`] on, since the kernel may accept it.
#[derive(Debug)]
#[must_use]
pub struct Entering(());

/// Reports whether programs can read the host's clock without a system call. An unknown one is taken for
/// readable.
fn is_clock_readable() -> bool {
    /// arch/x86/include/asm/vdso/clocksource.h, and that of arm64.
    const READABLE: [&[u8]; 4] = [
        b"tsc",
        b"kvm-clock",
        b"hyperv_clocksource_tsc_page",
        b"arch_sys_counter",
    ];
    const SOURCE: &core::ffi::CStr =
        c"/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let mut text = [0u8; 64];
    sys::proc::read(SOURCE, &mut text)
        .map_or(true, |name| READABLE.contains(&name.trim_ascii_end()))
}

/// Records that a filter is about to be installed. Waits for other threads that make calls of jumbo
/// because there was none ([`sys::guarded`]).
pub fn enter() -> Entering {
    sys::block();
    sys::confine_clock(is_clock_readable);
    FILTER_COUNT.fetch_add(1, Ordering::AcqRel);
    sys::mark_filter();
    sys::wait_for_guarded();
    Entering(())
}

impl Entering {
    /// Records that the kernel refused the filter.
    pub fn refused(self) {
        FILTER_COUNT.fetch_sub(1, Ordering::AcqRel);
        sys::unmark_filter();
        if !is_entered_later() {
            sys::release_clock();
        }
        sys::unblock();
    }

    /// Records whether the filter, which the kernel accepted, lets signals be blocked. Without this
    /// [`allows_signals`] is false.
    pub fn accepted(&self, filter: &[libc::sock_filter]) {
        let calls = [
            (libc::SYS_rt_sigprocmask, libc::SIG_BLOCK),
            (libc::SYS_rt_sigprocmask, libc::SIG_SETMASK),
            (libc::SYS_sigaltstack, 1 << 12),
        ];
        let lets = |(number, first): (libc::c_long, c_int)| {
            let here = lets as *const () as usize;
            let arguments = [first.cast_unsigned() as usize, 1 << 12, 1 << 12, 8, 0, 0];
            bpf::passes(filter, &Call::new(number, here, arguments))
        };
        if calls.into_iter().all(lets) {
            LETTING_COUNT.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Records that the kernel accepted the filter. `None`: unknown, or the strict mode.
    pub fn installed(self, filter: Option<&[libc::sock_filter]>) {
        if let Some(filter) = filter {
            sys::forbid_unless(|advice| lets(filter, advice));
            sys::unblock();
        }
    }
}

/// Reports whether a filter allows an advice.
fn lets(filter: &[libc::sock_filter], advice: c_int) -> bool {
    let advice = advice.cast_unsigned() as usize;
    let here = lets as *const () as usize;
    let call = Call::new(libc::SYS_madvise, here, [1 << 45, 2 << 20, advice, 0, 0, 0]);
    bpf::allows(filter, &call)
}

/// Detects filters from before the start: `Seccomp` in /proc/self/status (proc_pid_status(5), Linux
/// 3.8). An unreadable file counts as a filter. Call it only at the program's start, when the
/// dynamic loader has just opened and read files, too.
///
/// `tried`: filters that the launcher found harmless to all calls. `launched_under`: filters of the
/// launcher itself ([`known`]), under which advice is harmless. With more filters, or without a
/// launcher, the filters are probed.
pub fn detect(tried: u32, launched_under: u32, is_container: bool) {
    let found = inherited();
    let answer = match found {
        Some(0) => return,
        Some(count) if count == tried => Answer::Harmless,
        Some(count) if count <= launched_under => Answer::Advice,
        None if launched_under == UNKNOWN_COUNT => Answer::Advice,
        _ => ask(false, is_container),
    };
    if answer == Answer::Harmless {
        return;
    }
    FILTER_COUNT.fetch_add(1, Ordering::AcqRel);
    match answer {
        // Only the usual advice was tried alone.
        Answer::Advice => sys::forbid_unless(|advice| sys::USUAL.contains(&advice)),
        _ => sys::block(),
    }
}

/// Variable that Kubernetes sets in its containers, which have no marker file. Containers of podman
/// with `--read-only` have none, either; there the orders of a CDI device say so.
pub const CONTAINER: &str = "KUBERNETES_SERVICE_HOST";

const UNKNOWN_COUNT: u32 = u32::MAX;

/// Returns the number of filters of this process, for [`detect`].
pub fn known() -> u32 {
    inherited().unwrap_or(UNKNOWN_COUNT)
}

/// Returns the number of filters of this process: 0, or `Seccomp_filters` in /proc/self/status
/// (Linux 5.9). `None`: unknown, or unreadable.
pub fn inherited() -> Option<u32> {
    let mut text = [0u8; 4096];
    filters(status(c"/proc/self/status", &mut text)?)
}

fn status<'a>(path: &CStr, text: &'a mut [u8; 4096]) -> Option<&'a [u8]> {
    let length = sys::open(path).and_then(|file| rustix::io::read(&file, &mut *text));
    text.get(..length.ok()?)
}

fn filters(status: &[u8]) -> Option<u32> {
    match field(status, b"\nSeccomp:\t")? {
        0 => Some(0),
        _ => field(status, b"\nSeccomp_filters:\t").filter(|count| *count > 0),
    }
}

/// Returns the number after `key`. The kernel escapes a newline in the process name.
fn field(status: &[u8], key: &[u8]) -> Option<u32> {
    let at = status.windows(key.len()).position(|window| window == key)?;
    let number = number(status.get(at + key.len()..)?)?;
    u32::try_from(number).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_read_from_the_status() {
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
