//! The constructor: reads the configuration, joins the ledger, starts the mechanisms.

use core::ffi::{CStr, c_char, c_int};
use core::fmt::Write as _;
use core::ptr;

use jumbo_inside::gather;
use jumbo_inside::heap::{self, HeapSettings};
use jumbo_inside::ledger::{Ledger, flag};
use jumbo_inside::orders::{FreeMode, HeapMode, MaxWaste, Orders, PoolOrder};
use jumbo_inside::{debug, orders, populate, sandbox, shmem, watch};
use jumbo_sys as sys;
use rustix::fd::AsRawFd as _;
use rustix::fs::{CWD, FileType, Mode, OFlags};

use crate::environment::{self, Environment};
use crate::mechanisms::{after_fork, after_fork_child, before_fork};
use crate::{alloc, glibc, maps, next, own_stack, reaper, small, symbols, system, text};

#[used]
#[unsafe(link_section = ".init_array")]
static START: unsafe extern "C" fn(c_int, *mut *mut c_char, *mut *mut c_char) = start;

/// # Safety
/// The dynamic loader calls it once, with the process's vectors, before `main`.
unsafe extern "C" fn start(_argc: c_int, _argv: *mut *mut c_char, envp: *mut *mut c_char) {
    // glibc has not set `environ` yet; musl passes no vectors to constructors.
    let environment = match symbols::is_glibcs_loader() {
        // SAFETY: the loader's environment: terminated strings, ended by a null pointer.
        true => unsafe { Environment::new(envp) },
        false => Environment::current(),
    };
    if environment.value(b"JUMBO").is_some_and(orders::is_off) {
        return;
    }
    // SAFETY: the vector that the kernel passed.
    unsafe { system::start(environment.vector()) };
    // The environment of a program with more privileges than its caller (set-user-ID, file
    // capabilities) is not trusted: it names a file to open, for example.
    if system::auxiliary(libc::AT_SECURE) != Some(0) {
        return;
    }
    let vdso = system::auxiliary(libc::AT_SYSINFO_EHDR);
    sys::set_vdso(vdso.and_then(|at| usize::try_from(at).ok()).unwrap_or(0));
    debug::start(environment.value(b"JUMBO_DEBUG"));
    let text = environment.value(Orders::VARIABLE.as_bytes());
    let Some(text) = text.and_then(|value| core::str::from_utf8(value).ok()) else {
        return;
    };
    // A program may rely on an errno of 0 at its start.
    let errno = next::errno();
    sys::note_one_thread(false);
    watch::unless(&watch::Outlives(jumbo_inside::reaper::would_outlive));
    let orders = Orders::decode(text);
    configure(&orders, &environment);
    if !orders.follow {
        environment::leave(&environment);
    }
    next::set_errno(errno);
}

fn configure(orders: &Orders<'_>, environment: &Environment) {
    // `jumbo run` checks this too; the variable may come from elsewhere.
    if rustix::param::page_size() != heap::BASE_PAGE {
        return;
    }
    own_stack::start();
    let is_container =
        orders.container || environment.value(sandbox::CONTAINER.as_bytes()).is_some();
    sandbox::detect(orders.filters, orders.launched_under, is_container);
    let is_libcs = next::malloc_is_libcs();
    // The filter may not allow the system calls below either.
    if !sandbox::allows_advice() {
        return;
    }
    if let Some(ledger) = orders.ledger.and_then(join) {
        heap::count_in(ledger, process());
    }
    if has_sanitizer() {
        heap::add_flags(flag::SANITIZER);
        return;
    }
    let mut flags = 0;
    match is_libcs {
        true => alloc::serve(),
        false => flags |= flag::FOREIGN_MALLOC,
    }
    let ours = is_libcs && orders.heap != HeapMode::Off;
    let has_slabs = ours && orders.heap == HeapMode::On && !is_tuned(environment);
    let settings = HeapSettings {
        pmd: orders.pmd,
        // Without huge pages there is no waste, and no advice that splits mappings.
        max_waste: match orders.small_pages || heap::thp_disabled() {
            true => MaxWaste::Unbounded,
            false => orders.max_waste,
        },
        huge_at_once: orders.huge_at_once,
        keep: orders.keep,
        pool: orders.pool.filter(|_| ours),
    };
    // SAFETY: the constructor runs once, and nothing is diverted yet.
    if !unsafe { heap::start(settings) } {
        flags |= flag::NO_WINDOW;
    }
    if ours {
        flags |= flag::MALLOC;
        next::initialise_malloc();
        alloc::divert();
        if has_slabs && flags & flag::NO_WINDOW == 0 {
            small::start();
            flags |= flag::SLABS;
        } else {
            small::follow();
        }
    }
    if orders.maps {
        maps::cover(orders.pmd);
        flags |= flag::MAPS;
    }
    maps::cover_files(orders);
    shmem::start(orders);
    let mode = match orders.free {
        FreeMode::Sync => Some(gather::Mode::Sync),
        FreeMode::Background => Some(gather::Mode::Background),
        FreeMode::Off => None,
    };
    // Memory of another allocator is unmapped synchronously.
    if let Some(mode) = mode.filter(|_| is_libcs) {
        gather::start(gather::GatherSettings {
            mode,
            threads: orders.free_workers,
            min_bytes: orders.free_least.unwrap_or(gather::MIN_BYTES),
            small_pages: orders.small_pages,
        });
    }
    populate::start(
        orders.populate_workers,
        orders.free_least.unwrap_or(populate::MIN_BYTES),
    );
    if heap::thp_disabled() {
        flags |= flag::THP_DISABLED;
    }
    heap::add_flags(flags);
    debug::note([flags as usize, 0, 0], |line, [flags, ..]| {
        write!(line, "started, with flags {flags:#x} (ledger::flag)")
    });
    // SAFETY: the constructor runs once.
    unsafe { text::start(orders) };
    if let Some(pool) = orders
        .pool
        .filter(|pool| ours && is_launched(*pool, environment))
    {
        heap::warm(pool);
    }
    // SAFETY: pthread_atfork(3), which glibc does not export by that name. The handlers are in this
    // library, which is never unloaded, so they belong to no object.
    unsafe {
        match next::is_glibc() {
            true => (next::__register_atfork.get())(
                before_fork,
                after_fork,
                after_fork_child,
                ptr::null_mut(),
            ),
            false => (next::pthread_atfork.get())(before_fork, after_fork, after_fork_child),
        }
    };
    // The mappings of another malloc are interposed, so its memory is counted.
    let is_counted = ours || !is_libcs;
    reaper::begin(
        orders.reaper,
        is_counted,
        orders.orphans,
        environment.orphans_digit(),
    );
}

/// Reports whether the program has a sanitizer that gives each range of addresses a use, and ends
/// the program for memory elsewhere.
///
/// A program with a static ThreadSanitizer of gcc (`-static-libtsan`) may export no symbol of the
/// sanitizer. It exports the functions that it replaces, among them one that only ThreadSanitizer does.
fn has_sanitizer() -> bool {
    const NAMES: [&CStr; 3] = [c"__tsan_init", c"__msan_init", c"__hwasan_init"];
    let (mut is_found, mut is_program) = (false, true);
    symbols::each(&mut |object| {
        let defines = |name| {
            object
                .symbol(name)
                .is_some_and(|(_, is_defined)| is_defined)
        };
        is_found = NAMES.into_iter().any(defines) || is_program && defines(c"_setjmp");
        is_program = false;
        is_found
    });
    is_found
}

/// Reports whether the user tunes glibc's malloc: by the variables of mallopt(3), or by tunables
/// (glibc's manual, "Memory Allocation Tunables") other than `hugetlb=1`, which asks for huge pages.
fn is_tuned(environment: &Environment) -> bool {
    const VARIABLES: [&[u8]; 8] = [
        b"MALLOC_CHECK_",
        b"MALLOC_PERTURB_",
        b"MALLOC_ARENA_MAX",
        b"MALLOC_ARENA_TEST",
        b"MALLOC_TOP_PAD_",
        b"MALLOC_TRIM_THRESHOLD_",
        b"MALLOC_MMAP_MAX_",
        b"MALLOC_MMAP_THRESHOLD_",
    ];
    let tunables = environment.value(b"GLIBC_TUNABLES").unwrap_or_default();
    let is_of_malloc =
        |entry: &[u8]| entry.starts_with(b"glibc.malloc.") && entry != b"glibc.malloc.hugetlb=1";
    VARIABLES
        .iter()
        .any(|name| environment.value(name).is_some())
        || tunables.split(|byte| *byte == b':').any(is_of_malloc)
}

/// Reports whether this process warms the pool: the first one that calls this, also after an exec.
/// It records its ID in the environment that its children inherit.
fn is_launched(pool: PoolOrder, environment: &Environment) -> bool {
    match pool.warm {
        None => false,
        Some(0) => {
            let orders = environment.value(Orders::VARIABLE.as_bytes());
            let orders = orders.and_then(|value| core::str::from_utf8(value).ok());
            if let Some(digits) = orders.and_then(PoolOrder::warm_digits) {
                environment.overwrite(Orders::VARIABLE.as_bytes(), digits.start, process());
            }
            true
        }
        Some(launched) => launched == process(),
    }
}

/// Returns the process ID without a system call, in the first thread or the only one of a fork's
/// child: a seccomp filter may kill a caller of getpid(2).
fn process() -> u32 {
    glibc::thread()
}

/// Maps the launcher's ledger. Without access (another user by now, another PID namespace) the
/// program runs uncounted.
fn join(path: &str) -> Option<&'static Ledger> {
    // Another process may have the number by now, and its descriptor be a FIFO or a device, which an
    // open of more than the place would change. A memfd has no name.
    let place =
        rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let stat = rustix::fs::fstat(&place).ok()?;
    if stat.st_nlink != 0 || !FileType::from_raw_mode(stat.st_mode).is_file() {
        return None;
    }
    let mut name = sys::proc::Path::<32>::EMPTY;
    let name = name.write(format_args!("/proc/self/fd/{}", place.as_raw_fd()))?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(CWD, name, flags, Mode::empty()).ok()?;
    Ledger::map(&fd).ok().filter(|ledger| ledger.is_valid())
}
