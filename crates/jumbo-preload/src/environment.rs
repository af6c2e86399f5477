//! What stands in the environment that children inherit, and is changed there in place: [`Environment`].

use core::ffi::{CStr, c_char, c_long};

use jumbo_inside::bpf::{self, Call};
use jumbo_inside::orders::Orders;
use jumbo_inside::sandbox;
use rustix::fs::Access;
use rustix::io::Errno;
use rustix::thread::gettid;

use crate::glibc;

/// This library's file name, as it ends its entry in LD_PRELOAD.
const LIBRARY: &[u8] = b"libjumbo_preload.so";
/// What the launcher adds to GLIBC_TUNABLES.
const TUNABLE: &[u8] = b"glibc.malloc.hugetlb=1";

unsafe extern "C" {
    static mut environ: *mut *mut c_char;
}

/// What this library calls in a program's start beyond the dynamic loader, and what is not to be told from it.
const STARTING: &[c_long] = &[
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

/// A seccomp filter is at work from now on: what is exec'd under it inherits it. One that lets all calls pass is known
/// there. Of one that does not let advice pass glibc must not hear with its tunable, which it obeys long before a library
/// of ours runs. `None`: not known.
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
    let lets = |filter: &[libc::sock_filter]| {
        let here = entered as *const () as usize;
        let thp = libc::PR_GET_THP_DISABLE.cast_unsigned() as usize;
        let mut calls = STARTING.iter();
        calls.all(|call| bpf::allows(filter, &Call::new(*call, here, [thp, 0, 0, 0, 0, 0])))
    };
    if !sandbox::allows_advice() {
        if orders.tunable {
            environment.leave_tunable();
        }
    } else if let Some(digits) = Orders::launched_digits(text)
        && filter.is_some_and(lets)
    {
        let known = orders.launched_under.saturating_add(1);
        environment.overwrite(name, digits.start, known);
    }
}

/// Takes what the launcher added out of the environment, so that children run without us. The strings
/// are only ever cut shorter, in place.
pub(crate) fn leave(tunable: bool, environment: &Environment) {
    environment.cut(
        b"LD_PRELOAD",
        |entry| entry.ends_with(LIBRARY),
        |byte| byte == b':' || byte == b' ',
    );
    if tunable {
        environment.leave_tunable();
    }
    environment.remove(Orders::VARIABLE.as_bytes());
}

/// The root is another one, unless that was refused. Where this library is not below it, children run without us: the dynamic loader
/// would complain in each.
pub(crate) fn rooted() {
    // The child of a vfork(2) has the memory of the process that goes on outside: it is not the thread that glibc takes it
    // for. A filter may end who asks.
    if sandbox::is_entered_later()
        || gettid().as_raw_nonzero().get().unsigned_abs() != glibc::thread()
    {
        return;
    }
    let environment = Environment::current();
    let text = environment.value(Orders::VARIABLE.as_bytes());
    let Some(text) = text.and_then(|value| core::str::from_utf8(value).ok()) else {
        return;
    };
    let tunable = Orders::decode(text).tunable;
    let preloaded = environment.value(b"LD_PRELOAD").unwrap_or_default();
    let mut entries = preloaded.split(|byte| *byte == b':' || *byte == b' ');
    let Some(ours) = entries.find(|entry| entry.ends_with(LIBRARY)) else {
        return;
    };
    if rustix::fs::access(ours, Access::READ_OK) == Err(Errno::NOENT) {
        leave(tunable, &environment);
    }
}

/// The process's environment.
pub(crate) struct Environment(*mut *mut c_char);

impl Environment {
    /// # Safety
    /// `vector` is null, or an environment as execve(2) lays it out, which no other code changes while
    /// this lives.
    pub(crate) const unsafe fn new(vector: *mut *mut c_char) -> Self {
        Self(vector)
    }

    /// As the C library has it.
    pub(crate) fn current() -> Self {
        // SAFETY: the C library's own; as with getenv(3), the program sees to it that no other thread changes it now.
        unsafe { Self::new((&raw const environ).read()) }
    }

    fn slots(&self) -> impl Iterator<Item = *mut *mut c_char> {
        let mut slot = self.0;
        core::iter::from_fn(move || {
            // SAFETY: `new`'s promise: the vector goes on until its null pointer.
            if slot.is_null() || unsafe { slot.read() }.is_null() {
                return None;
            }
            let this = slot;
            // SAFETY: this entry is not the last one, so there is a next.
            slot = unsafe { slot.add(1) };
            Some(this)
        })
    }

    /// The slot of `name`, and where in its string the value begins.
    fn find(&self, name: &[u8]) -> Option<(*mut *mut c_char, usize)> {
        self.slots().find_map(|slot| {
            // SAFETY: `new`'s promise: each entry is a terminated string.
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

    /// Writes a number over the ten digits at an offset of a value.
    pub(crate) fn overwrite(&self, name: &[u8], at: usize, mut number: u32) {
        let Some((slot, offset)) = self.find(name) else {
            return;
        };
        for place in (0..10).rev() {
            let digit = b'0' + u8::try_from(number % 10).unwrap_or(0);
            number /= 10;
            // SAFETY: the string is writable (the kernel puts it on the stack), read by no other thread now,
            // and the caller found ten digits there.
            unsafe {
                slot.read()
                    .add(offset + at + place)
                    .cast::<u8>()
                    .write(digit)
            };
        }
    }

    /// The digit of the orders that says whether orphans are taken; or null.
    pub(crate) fn orphans_digit(&self) -> *mut u8 {
        let found = self.find(Orders::VARIABLE.as_bytes());
        let orders = self.value(Orders::VARIABLE.as_bytes());
        let orders = orders.and_then(|value| core::str::from_utf8(value).ok());
        match (found, orders.and_then(Orders::orphans_digit)) {
            // SAFETY: `find`'s and `value`'s: it is a byte of the string.
            (Some((slot, offset)), Some(at)) => unsafe { slot.read().add(offset + at).cast() },
            _ => core::ptr::null_mut(),
        }
    }

    /// Cuts the entries that `unwanted` names out of a list, and the variable if nothing is left.
    fn cut(&self, name: &[u8], unwanted: impl Fn(&[u8]) -> bool, separator: impl Fn(u8) -> bool) {
        let Some((slot, offset)) = self.find(name) else {
            return;
        };
        // SAFETY: the string is terminated, writable (the kernel puts it on the stack), and read by
        // no other thread now; `length` does not reach past its end.
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
                    // The separator that stood in front of this entry.
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

    fn leave_tunable(&self) {
        self.cut(
            b"GLIBC_TUNABLES",
            |entry| entry == TUNABLE,
            |byte| byte == b':',
        );
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
