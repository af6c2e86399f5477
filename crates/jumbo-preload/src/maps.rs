//! Handlers of the `mmap` family: mmap(2), mremap(2), brk(2), mlockall(2), madvise(2).

use core::ffi::{c_int, c_long, c_uint, c_void};
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use jumbo_inside::debug;
use jumbo_inside::events::{Mapping, Mechanism as _};
use jumbo_inside::gather;
use jumbo_inside::heap::{self, maps};
use jumbo_inside::orders::{FilesMode, Orders};
use jumbo_inside::{populate, sandbox, shmem, watch};
use jumbo_sys as sys;
use libc::{
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_FIXED_NOREPLACE, MAP_GROWSDOWN, MAP_HUGETLB,
    MAP_LOCKED, MAP_NONBLOCK, MAP_NORESERVE, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, MAP_STACK,
    MREMAP_FIXED, MREMAP_MAYMOVE, PROT_EXEC, PROT_NONE, PROT_READ, PROT_WRITE, off_t,
};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;

use crate::mechanisms::{All, PMD};
use crate::next;
use crate::own_stack::{blocked, on};

/// Flag of mappings below 2 GiB, which only x86-64 has.
#[cfg(target_arch = "x86_64")]
const MAP_32BIT: c_int = libc::MAP_32BIT;
#[cfg(not(target_arch = "x86_64"))]
const MAP_32BIT: c_int = 0;

/// Flags of mappings that stay as they are: stacks grow into untouched memory, hugetlb pages are
/// huge, 32-bit addresses are rare.
const SPECIAL_FLAGS: c_int = MAP_STACK | MAP_GROWSDOWN | MAP_HUGETLB | MAP_32BIT;

/// Minimum length of a mapping of a data file that is placed; 0: none is.
static MIN_FILE_BYTES: AtomicUsize = AtomicUsize::new(0);
/// All such mappings are advised, not only those that are populated at once.
static COVERS_ALL_FILES: AtomicBool = AtomicBool::new(false);

/// Starts covering data files that are mapped to be read.
pub(crate) fn cover_files(orders: &Orders<'_>) {
    let least = match orders.files {
        FilesMode::Off => 0,
        FilesMode::Auto | FilesMode::On => orders.pmd,
    };
    COVERS_ALL_FILES.store(orders.files == FilesMode::On, Ordering::Relaxed);
    MIN_FILE_BYTES.store(least, Ordering::Release);
}

/// Starts covering mappings.
pub(crate) fn cover(pmd: usize) {
    PMD.store(pmd, Ordering::Release);
}

/// Arguments of mmap(2).
#[derive(Clone, Copy)]
struct MapRequest {
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    off: off_t,
}

impl MapRequest {
    fn is_writable(&self) -> bool {
        self.prot == PROT_READ | PROT_WRITE
    }

    /// Reports whether the kernel may choose the address.
    fn is_anywhere(&self) -> bool {
        self.addr.is_null() && self.flags & (MAP_FIXED | MAP_FIXED_NOREPLACE) == 0
    }

    /// Reports whether mmap(2) populates the mapping, and neither locks it nor skips absent pages.
    fn populates(&self) -> bool {
        self.flags & (MAP_POPULATE | MAP_NONBLOCK | MAP_LOCKED) == MAP_POPULATE
    }

    /// Reports whether the mapping is populated after mmap(2), which would populate base pages, before
    /// the advice. Under MCL_FUTURE the kernel locks and populates it, or with MCL_ONFAULT neither.
    fn is_populated_later(&self) -> bool {
        self.is_writable() && self.populates() && sys::has_populate() && !heap::locks_future()
    }

    /// Reports whether the mapping stays as the program requests it: special, or executable.
    fn is_special(&self) -> bool {
        self.flags & SPECIAL_FLAGS != 0 || self.prot & PROT_EXEC != 0
    }
}

/// mmap(2).
///
/// # Safety
/// As for mmap(2): `MAP_FIXED` replaces existing mappings.
pub(crate) unsafe fn map(
    call: impl Fn(*mut c_void, usize, c_int, c_int, c_int, off_t) -> *mut c_void,
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    off: off_t,
) -> *mut c_void {
    let _blocked = blocked(addr.addr(), len);
    if flags & (MAP_LOCKED | MAP_POPULATE) != 0 {
        heap::about_to_populate();
    }
    let request = MapRequest {
        addr,
        len,
        prot,
        flags,
        fd,
        off,
    };
    let map = || locked(|addr, flags| call(addr, len, prot, flags, fd, off), request);
    if flags & (MAP_FIXED | MAP_FIXED_NOREPLACE) != 0 {
        All::mapping_at(addr.addr(), len);
        return All::around_change(|| drained(map, request));
    }
    let mapped = drained(map, request);
    if debug::is_due() {
        on(debug::flush);
    }
    mapped
}

/// Maps memory; if a free is pending, waits for it as needed.
#[inline(always)]
fn drained(map: impl Fn() -> *mut c_void, request: MapRequest) -> *mut c_void {
    if gather::is_pending() {
        if request.flags & MAP_ANONYMOUS != 0 || request.prot & PROT_WRITE != 0 {
            gather::about_to_allocate(request.len);
        }
        return retried(map, MAP_FAILED);
    }
    map()
}

/// Makes a call that needs memory, and repeats it if it failed while a free was pending.
#[cold]
fn retried<T: PartialEq>(call: impl Fn() -> T, failed: T) -> T {
    let saved = next::errno();
    let answer = call();
    if answer == failed && gather::drain() {
        let answer = call();
        if answer != failed {
            next::set_errno(saved);
        }
        return answer;
    }
    answer
}

/// Maps memory; locks it afterwards where mmap(2) would populate base pages on one thread.
#[inline(always)]
fn locked(map: impl Fn(*mut c_void, c_int) -> *mut c_void, request: MapRequest) -> *mut c_void {
    let is_locked = request.flags & (MAP_LOCKED | MAP_ANONYMOUS) == MAP_LOCKED | MAP_ANONYMOUS;
    if is_locked
        && request.is_anywhere()
        && request.is_writable()
        && !request.is_special()
        && populate::concerns(request.len)
    {
        return locked_later(map, request);
    }
    any(map, request)
}

#[cold]
fn locked_later(
    map: impl Fn(*mut c_void, c_int) -> *mut c_void,
    request: MapRequest,
) -> *mut c_void {
    let flags = request.flags & !(MAP_LOCKED | MAP_POPULATE);
    let mapped = any(&map, MapRequest { flags, ..request });
    if mapped == MAP_FAILED || populate::lock_mapping(mapped.addr(), request.len) {
        return mapped;
    }
    All::unmapping(mapped.addr(), request.len);
    // SAFETY: mapped above, and not returned.
    unsafe { (next::munmap.get())(mapped, request.len) };
    // The kernel's own error.
    any(map, request)
}

#[inline(always)]
fn any(map: impl Fn(*mut c_void, c_int) -> *mut c_void, request: MapRequest) -> *mut c_void {
    watch::resume();
    let MapRequest { len, flags, .. } = request;
    let pmd = PMD.load(Ordering::Relaxed);
    let large = len >= maps::MIN_PACKED_BYTES && flags & MAP_ANONYMOUS != 0;
    let mapped = if let Some(mapped) = data_file(&map, request) {
        mapped
    } else if shmem::is_covered(len, flags) && sandbox::allows_advice() {
        shared(map, request)
    } else if large && pmd != 0 && flags & libc::MAP_TYPE == MAP_PRIVATE && sandbox::allows_advice()
    {
        anonymous(map, request, pmd)
    } else {
        let hint = text_place(request);
        let mapped = map(hint.unwrap_or(request.addr), flags);
        if hint.is_some() && mapped != MAP_FAILED {
            maps::advise_text(mapped.addr(), len);
        }
        mapped
    };
    All::mapped(&Mapping {
        address: mapped.addr(),
        length: len,
        protection: request.prot,
        flags,
        descriptor: request.fd,
    });
    mapped
}

/// Maps a data file that is only read, at an address where PMDs can map huge folios of it; `None` for
/// others. Not every file system chooses such an address (overlayfs).
///
/// If it is to come in by huge folios, the advice covers the whole mapping, which stays one for
/// mremap(2). What the program populates at once it reads whole: then nothing is read that it would
/// not have read.
#[inline(always)]
fn data_file(
    map: &impl Fn(*mut c_void, c_int) -> *mut c_void,
    request: MapRequest,
) -> Option<*mut c_void> {
    let MapRequest {
        addr, len, flags, ..
    } = request;
    let is_wanted = request.prot == PROT_READ
        && flags & (MAP_ANONYMOUS | SPECIAL_FLAGS) == 0
        && (1..=len).contains(&MIN_FILE_BYTES.load(Ordering::Relaxed));
    if !is_wanted || !sandbox::allows_advice() {
        return None;
    }
    // SAFETY: the program's descriptor; it is queried and not kept.
    let file = (request.fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(request.fd) })?;
    if !shmem::is_on_disk(file) {
        return None;
    }
    let offset = usize::try_from(request.off).ok();
    let place = offset.filter(|_| request.is_anywhere());
    let place = place.and_then(|offset| maps::place_file(len, offset));
    let addr = place.map_or(addr, with_exposed_provenance_mut);
    let populates = request.populates();
    // mmap(2) would read it in small folios, before the advice.
    let kept = if populates { !MAP_POPULATE } else { !0 };
    let mapped = map(addr, flags & kept);
    let is_advised = populates || COVERS_ALL_FILES.load(Ordering::Relaxed);
    if mapped == MAP_FAILED || !is_advised {
        return Some(mapped);
    }
    maps::advise_file(mapped.addr(), len);
    if populates && maps::populate_file(mapped.addr(), len) == Err(Errno::INVAL) {
        // Linux before 5.14: over the mapping just made, with the program's own flags.
        return Some(map(mapped, flags & !MAP_FIXED_NOREPLACE | MAP_FIXED));
    }
    Some(mapped)
}

/// Maps shared memory.
fn shared(map: impl Fn(*mut c_void, c_int) -> *mut c_void, request: MapRequest) -> *mut c_void {
    let MapRequest {
        addr, len, flags, ..
    } = request;
    let anonymous = flags & MAP_ANONYMOUS != 0;
    // SAFETY: the program's descriptor; it is queried and not kept.
    let file =
        (!anonymous && request.fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(request.fd) });
    let offset = if anonymous { 0 } else { request.off };
    let offset = usize::try_from(offset).ok();
    let known = match (file, offset) {
        _ if request.is_special() => None,
        (Some(file), Some(offset)) => shmem::inspect(file, offset, len),
        _ => anonymous.then_some(shmem::SharedMapping {
            own_bytes: len,
            is_anonymous: true,
            file_bytes: 0,
        }),
    };
    let Some(mut known) = known else {
        return map(addr, flags);
    };
    if request.prot & PROT_WRITE == 0 || flags & MAP_LOCKED != 0 {
        known.own_bytes = 0;
    }
    let writable = request.is_writable();
    let anywhere = request.is_anywhere();
    let plain = flags & !(MAP_NORESERVE | MAP_POPULATE) == MAP_SHARED | MAP_ANONYMOUS;
    if plain
        && writable
        && anywhere
        && let Some(address) = shmem::map_hugetlb(len)
    {
        return with_exposed_provenance_mut(address);
    }
    let hint = offset
        .filter(|_| anywhere)
        .and_then(|offset| shmem::address_hint(len, offset));
    let populate = anonymous && request.is_populated_later();
    let kept = if populate { !MAP_POPULATE } else { !0 };
    let mapped = map(hint.map_or(addr, with_exposed_provenance_mut), flags & kept);
    if mapped != MAP_FAILED {
        shmem::mapped(mapped.addr(), len, known);
        if populate {
            populate::mapping(mapped.addr(), len);
        }
    }
    mapped
}

/// Returns an address at which PMDs can map text that the program maps from a file: with the file's
/// offset from a PMD boundary. `None` for other mappings.
#[inline(always)]
fn text_place(request: MapRequest) -> Option<*mut c_void> {
    let pmd = PMD.load(Ordering::Relaxed);
    let is_text = request.prot == PROT_READ | PROT_EXEC
        && request.flags == MAP_PRIVATE
        && request.addr.is_null();
    if !is_text || pmd == 0 || request.len < pmd || !sandbox::allows_advice() {
        return None;
    }
    let offset = usize::try_from(request.off).ok()? & (pmd - 1);
    let place = maps::place_large(request.len.checked_add(offset)?)?;
    Some(with_exposed_provenance_mut(place + offset))
}

/// Maps private anonymous memory.
fn anonymous(
    map: impl Fn(*mut c_void, c_int) -> *mut c_void,
    request: MapRequest,
    pmd: usize,
) -> *mut c_void {
    let MapRequest {
        addr,
        len,
        prot,
        flags,
        ..
    } = request;
    let writable = request.is_writable();
    let anywhere = request.is_anywhere();
    // A reservation (PROT_NONE) is covered as well: the program makes it accessible later.
    let plain = flags & !MAP_NORESERVE == MAP_PRIVATE | MAP_ANONYMOUS;
    if prot == PROT_READ | PROT_WRITE | PROT_EXEC && plain && len >= pmd {
        // A heap that holds code. It stays where the program or the kernel places it, since code may
        // have to be near other code.
        let mapped = map(addr, flags);
        if mapped != MAP_FAILED {
            maps::advise_mapping(mapped.addr(), len, true);
        }
        return mapped;
    }
    if request.is_special() || len >= pmd && !writable && prot != PROT_NONE {
        maps::count_unmodified(len);
        return map(addr, flags);
    }
    if len < pmd {
        if anywhere
            && plain
            && writable
            && let Some(address) = maps::take_small(len)
        {
            return with_exposed_provenance_mut(address);
        }
        // V8 of Node 22 and later maps the pieces of its heap with access at once.
        let is_piece = plain && (writable || prot == PROT_NONE && flags & MAP_NORESERVE != 0);
        if is_piece && let Some(place) = maps::place_piece(addr.addr(), len) {
            return map(with_exposed_provenance_mut(place), flags);
        }
        return map(addr, flags);
    }
    let hint = anywhere.then(|| maps::place_large(len)).flatten();
    let populate = request.is_populated_later();
    let kept = if populate { !MAP_POPULATE } else { !0 };
    let mapped = map(hint.map_or(addr, with_exposed_provenance_mut), flags & kept);
    if mapped != MAP_FAILED {
        // A part of a reservation may be touched sparsely.
        let may_be_sparse =
            flags & MAP_FIXED != 0 && writable && flags & (MAP_POPULATE | MAP_LOCKED) == 0;
        if !may_be_sparse || !maps::commit(mapped.addr(), len) {
            maps::advise_mapping(mapped.addr(), len, prot != PROT_NONE);
        }
        if populate {
            populate::mapping(mapped.addr(), len);
        }
    }
    mapped
}

/// End of a program's addresses, unless it asks for higher ones: Documentation/arch/x86/x86_64/mm.rst,
/// Documentation/arch/arm64/memory.rst (48 bits).
const USER_END: usize = if cfg!(target_arch = "x86_64") {
    (1 << 47) - heap::BASE_PAGE
} else {
    1 << 48
};

/// Flags of mremap(2) that leave an empty mapping.
const KEEPS: c_int = MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
const FIXED_KEEPS: c_int = KEEPS | MREMAP_FIXED;

/// mremap(2), declared with its optional fifth argument: Linux's calling conventions allow that.
///
/// # Safety
/// As for mremap(2).
pub(crate) unsafe fn remap(
    call: impl Fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void,
    addr: *mut c_void,
    old: usize,
    new: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let _blocked = blocked(addr.addr(), old.max(new));
    if flags & MREMAP_FIXED != 0 {
        All::mapping_at(to.addr(), new);
    }
    All::moving(addr.addr(), old, new);
    let saved = next::errno();
    let moved_to = |moved: *mut c_void| {
        if moved != MAP_FAILED {
            All::moved(addr.addr(), old, moved.addr(), new);
        }
        moved
    };
    let remap = |flags| moved_to(All::around_change(|| call(addr, old, new, flags, to)));
    if new > old && gather::is_pending() {
        // Growth that may move the mapping is rare enough to wait.
        gather::drain();
    }
    let pmd = PMD.load(Ordering::Relaxed);
    let is_page = addr.addr().is_multiple_of(heap::BASE_PAGE);
    let grows = pmd != 0 && is_page && maps::is_placed(addr.addr()) && new > old;
    let is_forbidden = grows && maps::is_forbidden(addr.addr(), old);
    let mut moved = MAP_FAILED;
    if grows && flags == MREMAP_MAYMOVE {
        moved = remap(0);
        if moved == MAP_FAILED {
            // SAFETY: the caller allows the move.
            let place = unsafe { maps::move_grown(addr.addr(), old, new) };
            moved = moved_to(place.map_or(MAP_FAILED, with_exposed_provenance_mut));
        }
    }
    let is_split = || maps::is_split(addr.addr(), old);
    let cut = |answer: Result<usize, Errno>| match answer {
        Ok(place) => moved_to(with_exposed_provenance_mut(place)),
        Err(error) => {
            next::set_errno(error.raw_os_error());
            MAP_FAILED
        }
    };
    // The kernel would unmap the target first, and refuse the move then. What it refuses before that
    // it is left to refuse.
    let is_apart = || {
        let (from, to) = (addr.addr(), to.addr());
        let page = heap::BASE_PAGE;
        let end = |start: usize, length: usize| {
            let end = start.checked_add(length)?.checked_next_multiple_of(page);
            end.filter(|end| *end <= USER_END)
        };
        let is_aligned = (from | to).is_multiple_of(page);
        let ends = end(from, old).zip(end(to, new));
        is_aligned && ends.is_some_and(|ends| ends.0 <= to || ends.1 <= from)
    };
    if flags == MREMAP_MAYMOVE | MREMAP_FIXED && new > 0 && is_apart() && is_split() {
        // SAFETY: the caller's promise.
        moved = cut(unsafe { maps::move_cut(addr.addr(), old, new, Some(to.addr())) });
    } else if moved == MAP_FAILED {
        moved = remap(flags);
        if moved == MAP_FAILED && next::errno() == libc::EFAULT && is_split() {
            moved = match flags {
                // SAFETY: the caller's promise.
                MREMAP_MAYMOVE => cut(unsafe { maps::move_cut(addr.addr(), old, new, None) }),
                0 => cut(maps::grow_cut(addr.addr(), old, new)),
                // SAFETY: as above.
                KEEPS if old == new => cut(unsafe { maps::move_kept(addr.addr(), old, None) }),
                FIXED_KEEPS if old == new && is_apart() => {
                    // SAFETY: as above.
                    cut(unsafe { maps::move_kept(addr.addr(), old, Some(to.addr())) })
                }
                _ => cut(Err(Errno::FAULT)),
            };
        }
    }
    if moved != MAP_FAILED {
        if grows && !is_forbidden {
            maps::advise_mapping(moved.addr() + old, new - old, true);
        }
        next::set_errno(saved);
    }
    moved
}

/// munmap(2). Several threads may free a large range, or free it later; its addresses are free on
/// return.
///
/// # Safety
/// As for munmap(2).
#[inline(always)]
pub(crate) unsafe fn unmap(
    call: impl Fn(*mut c_void, usize) -> c_int,
    addr: *mut c_void,
    len: usize,
) -> c_int {
    let _blocked = blocked(addr.addr(), len);
    All::unmapping(addr.addr(), len);
    // SAFETY: the program unmaps the range.
    if unsafe { All::unmap(addr.addr(), len) } {
        return 0;
    }
    All::around_change(|| call(addr, len))
}

/// mprotect(2): text that becomes writable is not replaced.
#[inline(always)]
pub(crate) fn protect(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    on(|| {
        let _blocked = blocked(addr.addr(), len);
        let answer = All::around_change(call);
        if answer == 0 {
            All::protected(addr.addr(), len, prot);
        } else if next::errno() != libc::EINVAL {
            // Where the kernel refuses one mapping, it has changed those in front.
            let error = next::errno();
            All::protected(addr.addr(), len, prot);
            next::set_errno(error);
        }
        answer
    })
}

/// dlclose(3), which unmaps without calls of interposed functions.
///
/// # Safety
/// As for dlclose(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlclose(handle: *mut c_void) -> c_int {
    // SAFETY: the same call.
    All::around_change(|| unsafe { (next::dlclose.get())(handle) })
}

/// sbrk(2).
pub(crate) fn move_break(increment: isize, call: impl Fn() -> *mut c_void) -> *mut c_void {
    on(|| {
        let old = if increment > 0 && gather::is_pending() {
            retried(call, MAP_FAILED)
        } else {
            call()
        };
        if old != MAP_FAILED {
            grown(old.addr(), increment);
        }
        old
    })
}

/// brk(2).
pub(crate) fn set_break(call: impl Fn() -> c_int) -> c_int {
    // SAFETY: sbrk(0) changes nothing.
    let now = || unsafe { (next::sbrk.get())(0) }.addr();
    on(|| {
        let before = now();
        let answer = if gather::is_pending() {
            retried(call, -1)
        } else {
            call()
        };
        if answer == 0 {
            grown(before, now().wrapping_sub(before).cast_signed());
        }
        answer
    })
}

/// brk(2) by its number, which returns the break. `now` returns the current one.
pub(crate) fn break_moved(now: impl Fn() -> c_long, call: impl Fn() -> c_long) -> c_long {
    on(|| {
        let before = now();
        let after = call();
        if let Ok(old) = usize::try_from(before) {
            let increment = isize::try_from(after.wrapping_sub(before));
            grown(old, increment.unwrap_or(0));
        }
        after
    })
}

/// Advises a large step of the program break.
fn grown(old: usize, increment: isize) {
    let pmd = PMD.load(Ordering::Relaxed);
    if let Ok(more) = usize::try_from(increment)
        && pmd != 0
        && more >= pmd
    {
        let start = old.next_multiple_of(rustix::param::page_size());
        maps::advise_mapping(start, more - (start - old), true);
    }
}

/// mlock(2) and mlock2(2).
pub(crate) fn lock(
    addr: *const c_void,
    len: usize,
    flags: c_uint,
    call: impl FnOnce() -> c_int,
) -> c_int {
    on(|| {
        let _blocked = blocked(addr.addr(), len);
        All::locking(addr.addr(), len);
        match flags {
            0 => populate::lock(addr.addr(), len, call),
            _ => call(),
        }
    })
}

/// mlockall(2): later mappings may become resident at once.
pub(crate) fn lock_all(flags: c_int, call: impl FnOnce() -> c_int) -> c_int {
    on(|| {
        All::locking_all();
        let answer = populate::lock_all(flags, call);
        if answer == 0 {
            All::locked_all(flags & libc::MCL_FUTURE != 0);
        }
        answer
    })
}

/// munlockall(2).
pub(crate) fn unlock_all(call: impl FnOnce() -> c_int) -> c_int {
    on(|| {
        let answer = call();
        if answer == 0 {
            All::locked_all(false);
        }
        answer
    })
}

/// madvise(2).
///
/// # Safety
/// As for madvise(2): some advice drops the contents of the memory.
pub(crate) unsafe fn advise(
    call: impl Fn(*mut c_void, usize, c_int) -> c_int,
    addr: *mut c_void,
    len: usize,
    advice: c_int,
) -> c_int {
    let _blocked = blocked(addr.addr(), len);
    All::advising(addr.addr(), len, advice);
    // SAFETY: the caller's promise.
    match unsafe { All::advise(addr.addr(), len, advice) } {
        Some(Ok(())) => 0,
        Some(Err(errno)) => {
            next::set_errno(errno);
            -1
        }
        None => call(addr, len, advice),
    }
}
