//! The constructor: reads the orders, joins the ledger, starts diverting.

use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicU8, Ordering};

use jumbo_inside::gather;
use jumbo_inside::heap::{self, HeldLocks, Settings};
use jumbo_inside::ledger::{Ledger, flag};
use jumbo_inside::orders::{FreeMode, HeapMode, Orders, PoolOrder};
use jumbo_inside::sandbox;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, getrlimit};

use crate::reaper::Orphans;
use crate::{alloc, maps, mimalloc, next, reaper, streams};

#[used]
#[unsafe(link_section = ".init_array")]
static START: unsafe extern "C" fn(c_int, *mut *mut c_char, *mut *mut c_char) = start;

/// This library's file name, as it ends its entry in LD_PRELOAD.
const LIBRARY: &[u8] = b"libjumbo_preload.so";
/// What the launcher adds to GLIBC_TUNABLES.
const TUNABLE: &[u8] = b"glibc.malloc.hugetlb=1";

/// # Safety
/// Called once by the dynamic loader, with the process's own vectors, before `main`.
unsafe extern "C" fn start(_argc: c_int, _argv: *mut *mut c_char, envp: *mut *mut c_char) {
    // The caller wrote the environment of a program that may do more than the caller (set-user-ID, file
    // capabilities): its orders name a file to open, for one.
    // SAFETY: getauxval(3) reads what the kernel passed at the start.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return;
    }
    // SAFETY: errno is this thread's own; a program may rely on finding it 0 at its start.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the loader's environment: terminated strings, ended by a null pointer.
    let environment = unsafe { Environment::new(envp) };
    let text = environment.value(Orders::VARIABLE.as_bytes());
    // Without orders this is not a program of ours: the library does nothing.
    if let Some(text) = text.and_then(|value| core::str::from_utf8(value).ok()) {
        let orders = Orders::decode(text);
        obey(&orders, &environment);
        if !orders.follow {
            leave_environment(orders.tunable, &environment);
        }
    }
    next::set_errno(errno);
}

fn obey(orders: &Orders<'_>, environment: &Environment) {
    // Before anybody asks.
    sandbox::detect(orders.filters);
    if let Some(ledger) = orders.ledger.and_then(join) {
        heap::count_in(ledger, pid());
    }
    let glibc = next::malloc_is_glibcs();
    let mut flags = if glibc { 0 } else { flag::FOREIGN_MALLOC };
    let tunables = environment.value(b"GLIBC_TUNABLES").unwrap_or_default();
    let hugetlb = tunables
        .split(|byte| *byte == b':')
        .filter_map(|entry| entry.strip_prefix(b"glibc.malloc.hugetlb=".as_slice()))
        .next_back();
    let ours = glibc && orders.heap != HeapMode::Off;
    let mimalloc = ours && orders.heap == HeapMode::Mimalloc && mimalloc::IS_THERE;
    let settings = Settings {
        pmd: orders.pmd,
        max_waste: usize::try_from(orders.max_waste).unwrap_or(usize::MAX),
        // With hugetlb=2 arenas have another size; with a limit on data the whole of one would count.
        arenas: ours
            && !mimalloc
            && hugetlb.is_none_or(|value| value == b"0" || value == b"1")
            && getrlimit(Resource::Data).current.is_none(),
        pool: orders.pool.filter(|_| ours),
        managed: mimalloc,
    };
    // SAFETY: the constructor runs once, and nothing is diverted yet.
    if !unsafe { heap::start(settings) } {
        flags |= flag::NO_WINDOW;
    }
    if mimalloc {
        mimalloc::divert(orders.pool);
        flags |= flag::MALLOC | flag::MIMALLOC;
    } else if ours {
        alloc::divert();
        flags |= flag::MALLOC;
    }
    if orders.maps {
        maps::cover(orders.pmd);
        flags |= flag::MAPS;
    }
    let mode = match orders.free {
        FreeMode::Sync => Some(gather::Mode::Sync),
        FreeMode::Background => Some(gather::Mode::Background),
        FreeMode::Off => None,
    };
    // Threads are made under whatever locks the caller of munmap(2) holds: of another malloc, that may be its own.
    if let Some(mode) = mode.filter(|_| glibc) {
        gather::inside(environment.0.addr());
        gather::start(gather::Settings {
            mode,
            threads: orders.free_workers,
            least: orders.free_least.unwrap_or(gather::LEAST),
            small_pages: orders.small_pages,
        });
    }
    if heap::thp_disabled() {
        flags |= flag::THP_DISABLED;
    }
    if hugetlb.is_some_and(|value| value != b"0") {
        flags |= flag::TUNABLE;
    }
    heap::note(flags);
    if let Some(pool) = orders
        .pool
        .filter(|pool| ours && is_launched(*pool, environment))
    {
        heap::warm(pool);
    }
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_child)) };
    // Another malloc maps through us.
    let orphans = Orphans {
        are_taken: orders.orphans_are_taken,
        digit: environment.orphans_digit(),
    };
    reaper::begin(orders.reaper, ours || !glibc, &orphans);
}

/// True where this process is the one to warm the pool: the first that asks, or itself after an exec. It
/// writes itself down in the environment that its children inherit.
fn is_launched(pool: PoolOrder, environment: &Environment) -> bool {
    match pool.warm {
        None => false,
        Some(0) => {
            let orders = environment.value(Orders::VARIABLE.as_bytes());
            let orders = orders.and_then(|value| core::str::from_utf8(value).ok());
            if let Some(digits) = orders.and_then(PoolOrder::warm_digits) {
                environment.overwrite(Orders::VARIABLE.as_bytes(), digits.start, pid());
            }
            true
        }
        Some(process) => process == pid(),
    }
}

fn pid() -> u32 {
    rustix::process::getpid()
        .as_raw_nonzero()
        .get()
        .unsigned_abs()
}

/// Maps the launcher's ledger. Where it cannot be had (another user by now, another PID namespace), the
/// program runs all the same and is not counted.
fn join(path: &str) -> Option<&'static Ledger> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    Ledger::map(&fd).ok().filter(|ledger| ledger.is_valid())
}

/// Which locks the fork under way holds. Written with the locks held, so by one thread at a time.
static HELD: AtomicU8 = AtomicU8::new(0);
/// Forks of this thread's inside its own fork: a signal handler that forks between our handlers.
static NESTED: AtomicU8 = AtomicU8::new(0);

unsafe extern "C" fn before_fork() {
    heap::about_to_fork();
    streams::lock();
    mimalloc::before_fork();
    let held = heap::before_fork();
    if held == HeldLocks::default() {
        // Only the thread that holds all is refused all: it is in a fork already.
        NESTED.fetch_add(1, Ordering::Relaxed);
    } else {
        HELD.store(held.bits(), Ordering::Relaxed);
    }
}

unsafe extern "C" fn after_fork() {
    release_locks();
    streams::unlock();
}

fn release_locks() {
    if NESTED.load(Ordering::Relaxed) > 0 {
        NESTED.fetch_sub(1, Ordering::Relaxed);
    } else {
        let held = HeldLocks::from_bits(HELD.load(Ordering::Relaxed));
        // SAFETY: what `before_fork` of this fork took; a nested one has not written it.
        unsafe { heap::after_fork(held) };
    }
    mimalloc::after_fork();
}

unsafe extern "C" fn after_fork_child() {
    release_locks();
    streams::reset();
    // SAFETY: this is the child.
    unsafe {
        heap::forked(pid());
        reaper::forked();
    }
}

/// Takes what the launcher added out of the environment, so that children run without us. The strings
/// are only ever cut shorter, in place.
fn leave_environment(tunable: bool, environment: &Environment) {
    environment.cut(
        b"LD_PRELOAD",
        |entry| entry.ends_with(LIBRARY),
        |byte| byte == b':' || byte == b' ',
    );
    if tunable {
        environment.cut(
            b"GLIBC_TUNABLES",
            |entry| entry == TUNABLE,
            |byte| byte == b':',
        );
    }
    environment.remove(Orders::VARIABLE.as_bytes());
}

/// The process's environment, before anybody else has looked at it.
struct Environment(*mut *mut c_char);

impl Environment {
    /// # Safety
    /// `vector` is null, or an environment as execve(2) lays it out, which nobody else changes while
    /// this lives.
    const unsafe fn new(vector: *mut *mut c_char) -> Self {
        Self(vector)
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

    fn value(&self, name: &[u8]) -> Option<&[u8]> {
        let (slot, offset) = self.find(name)?;
        // SAFETY: as in `find`; the offset is within the string.
        Some(&unsafe { CStr::from_ptr(slot.read()) }.to_bytes()[offset..])
    }

    /// Writes a number over the ten digits at an offset of a value.
    fn overwrite(&self, name: &[u8], at: usize, mut number: u32) {
        let Some((slot, offset)) = self.find(name) else {
            return;
        };
        for place in (0..10).rev() {
            let digit = b'0' + u8::try_from(number % 10).unwrap_or(0);
            number /= 10;
            // SAFETY: the string is writable (the kernel puts it on the stack), read by nobody else now,
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
    fn orphans_digit(&self) -> *mut u8 {
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
        // nobody else now; `length` does not reach past its end.
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
