//! The next definitions of interposed functions, as dlsym(3) finds them with RTLD_NEXT.
//!
//! The first call of any of them looks all of them up: the dynamic loader allocates long before
//! this library's constructor runs. Until then each [`Next`] holds a stub that does the lookup;
//! afterwards a call through it is a load and a jump. A function that the C library lacks keeps its
//! stub, which searches again: before glibc 2.34 a program may load libpthread and libdl later.
//!
//! Nothing here allocates. glibc's malloc initialises itself in the program's first call, and moves
//! the program break then: some programs (GCL's, which write an image of themselves) need the break
//! where the kernel put it. So allocating functions keep their stubs until that call; see
//! [`begin`].

use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use crate::own_stack;
use crate::symbols::{self, Object, Visit};

/// Next definition of a function of type `F`. The address is the first field, for jumps of machine
/// code.
#[repr(C)]
pub(crate) struct Next<F> {
    address: AtomicPtr<c_void>,
    stub: *mut c_void,
    found: AtomicPtr<c_void>,
    name: &'static CStr,
    _type: core::marker::PhantomData<fn() -> F>,
}

// SAFETY: the only field that is not `Sync` is the stub's address, which never changes.
unsafe impl<F> Sync for Next<F> {}

impl<F: Copy> Next<F> {
    const fn new(name: &'static CStr, stub: *mut c_void) -> Self {
        assert!(size_of::<F>() == size_of::<*mut c_void>());
        Self {
            address: AtomicPtr::new(stub),
            stub,
            found: AtomicPtr::new(core::ptr::null_mut()),
            name,
            _type: core::marker::PhantomData,
        }
    }

    /// Returns the function to call.
    #[inline(always)]
    pub(crate) fn get(&self) -> F {
        let address = self.address.load(Ordering::Relaxed);
        // SAFETY: stub and definition are functions of type F; an `F` has the size of a pointer by
        // the assertion in `new`, and the address is never null.
        unsafe { core::mem::transmute_copy(&address) }
    }

    /// Uses the definition of an object, unless an earlier object had one.
    fn resolve_in(&self, object: &Object<'_>) {
        if !self.is_found()
            && let Some((address, true)) = object.symbol(self.name)
        {
            self.found.store(address, Ordering::Relaxed);
            self.address.store(address, Ordering::Relaxed);
        }
    }

    /// Searches again, in libraries that were loaded meanwhile.
    #[cold]
    fn resolve_late(&self) -> bool {
        symbols::each_behind(&mut |object| {
            self.resolve_in(object);
            self.is_found()
        });
        self.is_found()
    }

    /// Reports whether there is a next definition.
    pub(crate) fn is_found(&self) -> bool {
        !self.found.load(Ordering::Relaxed).is_null()
    }

    /// Returns the address of the next definition, or of the stub if there is none.
    pub(crate) fn address(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if found.is_null() { self.stub } else { found }
    }
}

/// [`Next`] of any function type.
trait Deferred {
    /// Routes calls through the stub.
    fn defer(&self);
    /// Routes calls to the next definition.
    fn publish(&self);
    /// Reports whether calls go through the stub although the definition is known.
    fn is_deferred(&self) -> bool;
}

impl<F: Copy> Deferred for Next<F> {
    fn defer(&self) {
        self.address.store(self.stub, Ordering::Relaxed);
    }

    fn publish(&self) {
        self.address.store(self.address(), Ordering::Relaxed);
    }

    fn is_deferred(&self) -> bool {
        let address = self.address.load(Ordering::Relaxed);
        address == self.stub && self.is_found()
    }
}

/// Figures of a C library without these functions.
// SAFETY: numbers alone, for which zero is valid.
const NO_INFO: libc::mallinfo = unsafe { core::mem::zeroed() };
// SAFETY: as above.
const NO_INFO2: libc::mallinfo2 = unsafe { core::mem::zeroed() };

/// thrd_error of glibc's <threads.h>.
const THRD_ERROR: c_int = 2;

/// Declares the functions, their stubs, and `resolve_all`.
macro_rules! next {
    ($($name:ident: fn($($argument:ident: $type:ty),*) $(-> $result:ty)?, else $failed:expr;)*) => {
        $(
            #[allow(non_upper_case_globals, reason = "named as the functions are")]
            pub(crate) static $name: Next<unsafe extern "C" fn($($type),*) $(-> $result)?> = {
                unsafe extern "C" fn stub($($argument: $type),*) $(-> $result)? {
                    if !look_up() || !$name.is_found() && !$name.resolve_late() {
                        return $failed;
                    }
                    if $name.is_deferred() {
                        begin();
                    }
                    // SAFETY: the caller's promise.
                    unsafe { ($name.get())($($argument),*) }
                }
                // SAFETY: the bytes end with the only zero, which `concat!` adds.
                let text = unsafe {
                    CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes())
                };
                Next::new(text, stub as *mut c_void)
            };
        )*

        fn resolve_all() {
            symbols::each_behind(&mut |object| {
                $($name.resolve_in(object);)*
                false
            });
        }
    };
}

next! {
    malloc: fn(size: usize) -> *mut c_void, else no_memory();
    calloc: fn(count: usize, size: usize) -> *mut c_void, else no_memory();
    realloc: fn(pointer: *mut c_void, size: usize) -> *mut c_void, else no_memory();
    free: fn(_pointer: *mut c_void), else nothing();
    memalign: fn(align: usize, size: usize) -> *mut c_void, else no_memory();
    aligned_alloc: fn(align: usize, size: usize) -> *mut c_void, else no_memory();
    posix_memalign: fn(out: *mut *mut c_void, align: usize, size: usize) -> c_int, else libc::ENOMEM;
    valloc: fn(size: usize) -> *mut c_void, else no_memory();
    pvalloc: fn(size: usize) -> *mut c_void, else no_memory();
    malloc_usable_size: fn(_pointer: *mut c_void) -> usize, else 0;
    malloc_trim: fn(_pad: usize) -> c_int, else 0;
    malloc_stats: fn(), else nothing();
    mallinfo: fn() -> libc::mallinfo, else NO_INFO;
    mallinfo2: fn() -> libc::mallinfo2, else NO_INFO2;
    mallopt: fn(_parameter: c_int, _value: c_int) -> c_int, else 0;
    mmap: fn(addr: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, off: libc::off_t)
        -> *mut c_void, else failed_map();
    mremap: fn(addr: *mut c_void, old: usize, new: usize, flags: c_int, to: *mut c_void)
        -> *mut c_void, else failed_map();
    pthread_exit: fn(_value: *mut c_void), else nothing();
    thrd_exit: fn(_value: c_int), else nothing();
    // Jumped to, with the arguments of the caller.
    execve: fn() -> c_int, else failed();
    execveat: fn() -> c_int, else failed();
    fexecve: fn() -> c_int, else failed();
    execv: fn() -> c_int, else failed();
    execvp: fn() -> c_int, else failed();
    execvpe: fn() -> c_int, else failed();
    execl: fn() -> c_int, else failed();
    execlp: fn() -> c_int, else failed();
    execle: fn() -> c_int, else failed();
    waitpid: fn() -> c_int, else failed();
    wait3: fn() -> c_int, else failed();
    wait4: fn() -> c_int, else failed();
    waitid: fn() -> c_int, else failed();
    _exit: fn() -> c_int, else failed();
    _Exit: fn() -> c_int, else failed();
    quick_exit: fn() -> c_int, else failed();
    mprotect: fn(_addr: *mut c_void, _len: usize, _prot: c_int) -> c_int, else failed();
    pkey_mprotect: fn(_addr: *mut c_void, _len: usize, _prot: c_int, _key: c_int) -> c_int, else failed();
    mseal: fn(_addr: *mut c_void, _len: usize, _flags: c_ulong) -> c_int, else failed();
    dlclose: fn(_handle: *mut c_void) -> c_int, else failed();
    dlopen: fn(_path: *const c_char, _flags: c_int) -> *mut c_void, else no_memory();
    dlmopen: fn(_space: c_long, _path: *const c_char, _flags: c_int) -> *mut c_void, else no_memory();
    dl_iterate_phdr: fn(_visit: Visit, _argument: *mut c_void) -> c_int, else 0;
    munmap: fn(_addr: *mut c_void, _len: usize) -> c_int, else failed();
    sbrk: fn(increment: isize) -> *mut c_void, else failed_map();
    brk: fn(_addr: *mut c_void) -> c_int, else failed();
    mlockall: fn(_flags: c_int) -> c_int, else failed();
    mlock: fn(_addr: *const c_void, _len: usize) -> c_int, else failed();
    mlock2: fn(_addr: *const c_void, _len: usize, _flags: c_uint) -> c_int, else failed();
    madvise: fn(_addr: *mut c_void, _len: usize, _advice: c_int) -> c_int, else failed();
    munlockall: fn() -> c_int, else failed();
    pthread_create: fn(thread: *mut libc::pthread_t, attributes: *const libc::pthread_attr_t,
        start: crate::threads::Start, argument: *mut c_void) -> c_int, else libc::EAGAIN;
    thrd_create: fn(thread: *mut libc::pthread_t, start: extern "C" fn(*mut c_void) -> c_int,
        argument: *mut c_void) -> c_int, else THRD_ERROR;
    prctl: fn(_option: c_int, _a: c_ulong, _b: c_ulong, _c: c_ulong, _d: c_ulong) -> c_int, else failed();
    syscall: fn(_number: c_long, _a: c_long, _b: c_long, _c: c_long, _d: c_long, _e: c_long, _f: c_long)
        -> c_long, else failed();
    unshare: fn(_flags: c_int) -> c_int, else failed();
    setns: fn(_descriptor: c_int, _kind: c_int) -> c_int, else failed();
    chroot: fn(_path: *const c_char) -> c_int, else failed();
    pivot_root: fn(_root: *const c_char, _old: *const c_char) -> c_int, else failed();
    setuid: fn(_id: libc::uid_t) -> c_int, else failed();
    seteuid: fn(_id: libc::uid_t) -> c_int, else failed();
    setreuid: fn(_real: libc::uid_t, _effective: libc::uid_t) -> c_int, else failed();
    setresuid: fn(_real: libc::uid_t, _effective: libc::uid_t, _saved: libc::uid_t) -> c_int, else failed();
    setgid: fn(_id: libc::gid_t) -> c_int, else failed();
    setegid: fn(_id: libc::gid_t) -> c_int, else failed();
    setregid: fn(_real: libc::gid_t, _effective: libc::gid_t) -> c_int, else failed();
    setresgid: fn(_real: libc::gid_t, _effective: libc::gid_t, _saved: libc::gid_t) -> c_int, else failed();
    setgroups: fn(_count: usize, _groups: *const libc::gid_t) -> c_int, else failed();
    initgroups: fn(_user: *const c_char, _group: libc::gid_t) -> c_int, else failed();
    capset: fn(_header: *mut c_void, _data: *const c_void) -> c_int, else failed();
    ioctl: fn(_descriptor: c_int, _request: c_ulong, _argument: c_ulong) -> c_int, else failed();
    shmdt: fn(_at: *const c_void) -> c_int, else failed();
    fallocate: fn(_descriptor: c_int, _mode: c_int, _offset: libc::off_t, _length: libc::off_t) -> c_int, else failed();
    shmat: fn(_id: c_int, _at: *const c_void, _flags: c_int) -> *mut c_void, else failed_map();
    sigaltstack: fn(_new: *const libc::stack_t, _old: *mut libc::stack_t) -> c_int, else failed();
    flock: fn(_descriptor: c_int, _operation: c_int) -> c_int, else failed();
    fcntl: fn(_descriptor: c_int, _command: c_int, _argument: c_ulong) -> c_int, else failed();
    fflush: fn(_stream: *mut c_void) -> c_int, else failed();
    io_uring_register_buffers: fn(_ring: *mut c_void, _vectors: *const c_void, _count: c_uint) -> c_int,
        else -libc::ENOSYS;
    io_uring_register_buffers_tags: fn(_ring: *mut c_void, _vectors: *const c_void, _tags: *const c_void,
        _count: c_uint) -> c_int, else -libc::ENOSYS;
    // Not interposed. Some C libraries lack them, and would refuse to load a library that imports
    // them.
    _IO_list_lock: fn(), else nothing();
    _IO_list_unlock: fn(), else nothing();
    _IO_list_resetlock: fn(), else nothing();
    __register_atfork: fn(prepare: unsafe extern "C" fn(), parent: unsafe extern "C" fn(), child: unsafe extern "C" fn(),
        _object: *mut c_void) -> c_int, else libc::ENOMEM;
    pthread_atfork: fn(prepare: unsafe extern "C" fn(), parent: unsafe extern "C" fn(), child: unsafe extern "C" fn())
        -> c_int, else libc::ENOMEM;
    pthread_attr_init: fn(attributes: *mut libc::pthread_attr_t) -> c_int, else libc::ENOMEM;
    pthread_attr_destroy: fn(attributes: *mut libc::pthread_attr_t) -> c_int, else libc::ENOMEM;
    pthread_attr_getstacksize: fn(attributes: *const libc::pthread_attr_t, size: *mut usize) -> c_int, else libc::ENOENT;
    pthread_attr_getguardsize: fn(attributes: *const libc::pthread_attr_t, size: *mut usize) -> c_int, else libc::ENOENT;
    pthread_getcpuclockid: fn(thread: libc::pthread_t, clock: *mut libc::clockid_t) -> c_int, else libc::ENOENT;
}

/// `__libc_single_threaded` of glibc 2.32 and later; null elsewhere.
static SINGLE_THREADED: AtomicPtr<c_char> = AtomicPtr::new(core::ptr::null_mut());

/// Reports whether the process has one thread, as far as the C library knows.
pub(crate) fn is_single_threaded() -> bool {
    let variable = SINGLE_THREADED.load(Ordering::Relaxed);
    // SAFETY: glibc's own variable, read as glibc documents it.
    !variable.is_null() && unsafe { variable.read_volatile() } != 0
}

/// Reports whether the C library is glibc.
pub(crate) fn is_glibc() -> bool {
    look_up();
    // No compatibility layer of another C library has it.
    _IO_list_lock.is_found()
}

/// Looks up all next definitions, once. False in a signal handler that interrupted the lookup.
pub(crate) fn look_up() -> bool {
    /// Thread that does the lookup; 0: none.
    static BUSY: AtomicUsize = AtomicUsize::new(0);
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.load(Ordering::Acquire) {
        return true;
    }
    let me = jumbo_sys::thread_pointer();
    loop {
        match BUSY.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => break,
            Err(owner) if owner == me => return false,
            Err(_) => core::hint::spin_loop(),
        }
    }
    if !DONE.load(Ordering::Relaxed) {
        resolve_all();
        symbols::each(&mut |object| {
            let variable = object.symbol(c"__libc_single_threaded");
            let variable = variable.map_or(core::ptr::null_mut(), |(at, _)| at);
            SINGLE_THREADED.store(variable.cast(), Ordering::Relaxed);
            !variable.is_null()
        });
        if _IO_list_lock.is_found() && family_is_libcs() {
            ALLOCATING.iter().for_each(|next| next.defer());
        }
        DONE.store(true, Ordering::Release);
    }
    BUSY.store(0, Ordering::Release);
    true
}

/// Functions that initialise glibc's malloc.
static ALLOCATING: [&(dyn Deferred + Sync); 8] = [
    &malloc,
    &calloc,
    &realloc,
    &memalign,
    &aligned_alloc,
    &posix_memalign,
    &valloc,
    &pvalloc,
];

/// Initialises glibc's malloc while the process has one thread: glibc takes no lock for it, since
/// pthread_create(3) allocates and so comes later. Here the first block of glibc's own may be wanted
/// by several threads at once. Up to glibc 2.36 the initialisation is a cancellation point, too
/// (getrandom(2)).
pub(crate) fn initialise_malloc() {
    static IS_DONE: AtomicBool = AtomicBool::new(false);
    if !IS_DONE.swap(true, Ordering::Relaxed) && malloc.is_deferred() {
        initialise();
    }
}

/// Allocates the first block of glibc's malloc, unless a call already did: a seccomp filter may forbid
/// it later. Blocks of the program's earlier calls may be this library's.
pub(crate) fn start_malloc() {
    if malloc.is_deferred() {
        begin();
        own_stack::on(allocate_once);
    }
}

/// Has glibc serve all threads from its first arena, unless it has others. mallopt(3).
pub(crate) fn use_one_arena() {
    // SAFETY: the call changes a parameter.
    unsafe { (mallopt.get())(libc::M_ARENA_MAX, 1) };
}

/// Initialises glibc's malloc before its first call.
#[cold]
fn begin() {
    ALLOCATING.iter().for_each(|next| next.publish());
    initialise();
}

/// Initialises glibc's malloc without an allocation: mallopt(3) of a parameter that it does not know.
fn initialise() {
    // SAFETY: the call changes no parameter. The program break does not move.
    unsafe { (mallopt.get())(0, 0) };
}

/// Allocates a block, so that later allocations need no initialisation.
fn allocate_once() {
    // SAFETY: the next definitions, looked up; the block is not used.
    unsafe { (free.get())((malloc.get())(1)) };
}

/// Result of functions without a result. free(3) may do nothing: no block comes from a function that
/// was never looked up.
fn nothing() {}

fn no_memory() -> *mut c_void {
    set_errno(libc::ENOMEM);
    core::ptr::null_mut()
}

fn failed_map() -> *mut c_void {
    set_errno(libc::ENOMEM);
    libc::MAP_FAILED
}

/// Result of functions that the C library lacks: -1 and ENOSYS.
fn failed<T: From<i8>>() -> T {
    set_errno(libc::ENOSYS);
    T::from(-1)
}

/// Returns errno.
pub(crate) fn errno() -> c_int {
    // SAFETY: errno is this thread's own.
    unsafe { *libc::__errno_location() }
}

/// Sets errno.
pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: errno is this thread's own.
    unsafe { *libc::__errno_location() = errno };
}

/// Reports whether the program's `malloc` family is this library's, and the next one the C
/// library's: all of it, since the family that allocated a block must free it.
pub(crate) fn malloc_is_libcs() -> bool {
    // Other allocators interpose malloc_usable_size as well, and hardly any program takes its
    // address.
    let names = [
        c"malloc",
        c"free",
        c"calloc",
        c"realloc",
        c"malloc_usable_size",
    ];
    look_up() && family_is_libcs() && names.into_iter().all(is_ours_or_a_stub)
}

/// Reports whether the next definitions of the `malloc` family are the C library's.
fn family_is_libcs() -> bool {
    let family = [
        malloc.address(),
        free.address(),
        calloc.address(),
        realloc.address(),
    ];
    let mut are_libcs = false;
    symbols::each_behind(&mut |object| {
        let is_libc = object
            .symbol(c"__libc_start_main")
            .is_some_and(|(_, is_defined)| is_defined);
        are_libcs = is_libc && family.iter().all(|address| object.contains(address.addr()));
        is_libc
    });
    are_libcs
}

/// Reports whether the program's function of that name is this library's.
///
/// A program that is linked to fixed addresses and takes the function's address has a stub of that
/// name, which calls the next definition (Node does).
fn is_ours_or_a_stub(name: &CStr) -> bool {
    let mut is_ours = false;
    symbols::each(&mut |object| {
        let found = object.symbol(name);
        is_ours = found.is_some_and(|(_, is_defined)| !is_defined || object.is_this_library());
        found.is_some()
    });
    is_ours
}
