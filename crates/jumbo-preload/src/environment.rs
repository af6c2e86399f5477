//! The environment that children inherit, and its changes in place: [`Environment`].

use core::ffi::{CStr, c_char, c_long};

use jumbo_inside::bpf::{self, Call};
use jumbo_inside::orders::Orders;
use jumbo_inside::sandbox;
use rustix::fs::Access;
use rustix::io::Errno;
use rustix::thread::gettid;

use crate::glibc;

/// End of this library's entry in LD_PRELOAD.
const LIBRARY: &[u8] = b"libjumbo_preload.so";

unsafe extern "C" {
    static mut environ: *mut *mut c_char;
}

/// System calls of this library at a program's start, and of the dynamic loader.
const START_CALLS: &[c_long] = &[
    libc::SYS_openat,
    libc::SYS_read,
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_brk,
    libc::SYS_getrandom,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_sched_getaffinity,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sysinfo,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_futex,
    libc::SYS_madvise,
    libc::SYS_faccessat,
    libc::SYS_mincore,
];

/// Adapts the environment to a new seccomp filter, which executed programs inherit: counts a filter
/// that allows advice and all calls of a start. `None`: an unknown filter.
pub(crate) fn entered(filter: Option<&[libc::sock_filter]>) {
    let environment = Environment::current();
    let name = Orders::VARIABLE.as_bytes();
    let Some(text) = environment
        .value(name)
        .and_then(|value| core::str::from_utf8(value).ok())
    else {
        return;
    };
    let orders = Orders::decode(text);
    let allows_start = |filter: &[libc::sock_filter]| {
        let here = entered as *const () as usize;
        let thp = libc::PR_GET_THP_DISABLE.cast_unsigned() as usize;
        let mut calls = START_CALLS.iter();
        calls.all(|call| bpf::allows(filter, &Call::new(*call, here, [thp, 0, 0, 0, 0, 0])))
    };
    if sandbox::allows_advice()
        && let Some(digits) = Orders::launched_digits(text)
        && filter.is_some_and(allows_start)
    {
        let known = orders.launched_under.saturating_add(1);
        environment.overwrite(name, digits.start, known);
    }
}

/// Removes the launcher's entries, so that children run without jumbo. Shortens the strings in
/// place.
pub(crate) fn leave(environment: &Environment) {
    environment.cut(
        b"LD_PRELOAD",
        |entry| entry.ends_with(LIBRARY),
        |byte| byte == b':' || byte == b' ',
    );
    environment.remove(Orders::VARIABLE.as_bytes());
}

/// Removes the launcher's entries after a change of the root, if this library is not below the new
/// one: the dynamic loader would print an error in each child.
pub(crate) fn rooted() {
    // A vfork(2) child uses the memory of its parent, whose root stays: its thread ID differs from
    // the one in glibc's thread block. A seccomp filter may kill a caller of gettid(2).
    if sandbox::is_entered_later()
        || gettid().as_raw_nonzero().get().unsigned_abs() != glibc::thread()
    {
        return;
    }
    let environment = Environment::current();
    if environment.value(Orders::VARIABLE.as_bytes()).is_none() {
        return;
    }
    let preloaded = environment.value(b"LD_PRELOAD").unwrap_or_default();
    let mut entries = preloaded.split(|byte| *byte == b':' || *byte == b' ');
    let Some(ours) = entries.find(|entry| entry.ends_with(LIBRARY)) else {
        return;
    };
    if rustix::fs::access(ours, Access::READ_OK) == Err(Errno::NOENT) {
        leave(&environment);
    }
}

/// Environment of the process.
pub(crate) struct Environment(*mut *mut c_char);

impl Environment {
    /// # Safety
    /// `vector` is null, or an environment in the layout of execve(2), which no other code changes
    /// while this value lives.
    pub(crate) const unsafe fn new(vector: *mut *mut c_char) -> Self {
        Self(vector)
    }

    /// Returns the environment of the C library.
    pub(crate) fn current() -> Self {
        // SAFETY: the C library's vector; as for getenv(3), the program ensures that no thread
        // changes it now.
        unsafe { Self::new((&raw const environ).read()) }
    }

    /// Returns the vector.
    pub(crate) const fn vector(&self) -> *const *const c_char {
        self.0.cast_const().cast()
    }

    fn slots(&self) -> impl Iterator<Item = *mut *mut c_char> {
        let mut slot = self.0;
        core::iter::from_fn(move || {
            // SAFETY: the promise to `new`: a null pointer ends the vector.
            if slot.is_null() || unsafe { slot.read() }.is_null() {
                return None;
            }
            let this = slot;
            // SAFETY: this entry is not the last one.
            slot = unsafe { slot.add(1) };
            Some(this)
        })
    }

    /// Returns the slot of `name`, and the offset of the value in its string.
    fn find(&self, name: &[u8]) -> Option<(*mut *mut c_char, usize)> {
        self.slots().find_map(|slot| {
            // SAFETY: the promise to `new`: each entry is a terminated string.
            let entry = unsafe { CStr::from_ptr(slot.read()) }.to_bytes();
            let rest = entry.strip_prefix(name)?;
            rest.starts_with(b"=").then_some((slot, name.len() + 1))
        })
    }

    pub(crate) fn value(&self, name: &[u8]) -> Option<&[u8]> {
        let (slot, offset) = self.find(name)?;
        // SAFETY: as in `find`; the offset is within the string.
        Some(&unsafe { CStr::from_ptr(slot.read()) }.to_bytes()[offset..])
    }

    /// Overwrites the ten digits at an offset of a value with a number.
    pub(crate) fn overwrite(&self, name: &[u8], at: usize, mut number: u32) {
        let Some((slot, offset)) = self.find(name) else {
            return;
        };
        for place in (0..10).rev() {
            let digit = b'0' + u8::try_from(number % 10).unwrap_or(0);
            number /= 10;
            // SAFETY: the string is writable (on the stack), no other thread reads it now, and the
            // caller found ten digits there.
            unsafe {
                slot.read()
                    .add(offset + at + place)
                    .cast::<u8>()
                    .write(digit)
            };
        }
    }

    /// Returns the address of the digit for orphans in the orders, or null.
    pub(crate) fn orphans_digit(&self) -> *mut u8 {
        let found = self.find(Orders::VARIABLE.as_bytes());
        let orders = self.value(Orders::VARIABLE.as_bytes());
        let orders = orders.and_then(|value| core::str::from_utf8(value).ok());
        match (found, orders.and_then(Orders::orphans_digit)) {
            // SAFETY: as in `value`: it is a byte of the string.
            (Some((slot, offset)), Some(at)) => unsafe { slot.read().add(offset + at).cast() },
            _ => core::ptr::null_mut(),
        }
    }

    /// Removes `unwanted` entries from a list, and the variable if none is left.
    fn cut(&self, name: &[u8], unwanted: impl Fn(&[u8]) -> bool, separator: impl Fn(u8) -> bool) {
        let Some((slot, offset)) = self.find(name) else {
            return;
        };
        // SAFETY: the string is terminated and writable (on the stack), no other thread reads it
        // now, and `length` is that of the rest of it.
        let value = unsafe {
            let start = slot.read().add(offset).cast::<u8>();
            let length = CStr::from_ptr(start.cast()).to_bytes().len();
            core::slice::from_raw_parts_mut(start, length + 1)
        };
        let length = value.len() - 1;
        let (mut from, mut to) = (0, 0);
        while from < length {
            let end = value[from..length]
                .iter()
                .position(|byte| separator(*byte))
                .map_or(length, |at| from + at);
            if !unwanted(&value[from..end]) {
                if to > 0 {
                    // The separator before this entry.
                    value[to] = value[from - 1];
                    to += 1;
                }
                value.copy_within(from..end, to);
                to += end - from;
            }
            from = end + 1;
        }
        value[to..].fill(0);
        if to == 0 {
            self.remove(name);
        }
    }

    fn remove(&self, name: &[u8]) {
        let Some((slot, _)) = self.find(name) else {
            return;
        };
        let mut to = slot;
        loop {
            // SAFETY: `to` starts at an entry and stops at the vector's null pointer.
            unsafe {
                let next = to.add(1).read();
                to.write(next);
                if next.is_null() {
                    return;
                }
                to = to.add(1);
            }
        }
    }
}
