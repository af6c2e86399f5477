//! The doors of the `mmap` family: mmap(2), mremap(2), brk(2), mlock(2), mlockall(2), madvise(2).

use core::ffi::{c_int, c_long, c_void};
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::Ordering;

use jumbo_inside::events::{Mapping, Mechanism as _};
use jumbo_inside::gather;
use jumbo_inside::heap::{self, maps};
use jumbo_inside::{sandbox, shmem, watch};
use libc::{
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_FIXED_NOREPLACE, MAP_GROWSDOWN, MAP_HUGETLB,
    MAP_LOCKED, MAP_NONBLOCK, MAP_NORESERVE, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, MAP_STACK,
    MREMAP_FIXED, MREMAP_MAYMOVE, PROT_EXEC, PROT_NONE, PROT_READ, PROT_WRITE, off_t,
};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;

use crate::mechanisms::{All, ODDLY_ADVISED, PMD};
use crate::next;

/// Mappings below 2 GiB, which only x86-64 has a flag for.
#[cfg(target_arch = "x86_64")]
const MAP_32BIT: c_int = libc::MAP_32BIT;
#[cfg(not(target_arch = "x86_64"))]
const MAP_32BIT: c_int = 0;

/// Starts covering mappings.
pub(crate) fn cover(pmd: usize) {
    PMD.store(pmd, Ordering::Release);
}

/// mmap(2).
///
/// # Safety
/// As for mmap(2): `MAP_FIXED` replaces what is there.
pub(crate) unsafe fn map(
    call: impl Fn(*mut c_void, usize, c_int, c_int, c_int, off_t) -> *mut c_void,
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    off: off_t,
) -> *mut c_void {
    if flags & (MAP_LOCKED | MAP_POPULATE) != 0 {
        heap::about_to_populate();
    }
    let map = || any(&call, addr, len, prot, flags, fd, off);
    if flags & (MAP_FIXED | MAP_FIXED_NOREPLACE) != 0 {
        All::mapping_at(addr.addr(), len);
        return All::around_change(|| pending(map, flags, prot, len));
    }
    pending(map, flags, prot, len)
}

/// Maps, where memory is being freed with regard to that.
#[inline(always)]
fn pending(map: impl Fn() -> *mut c_void, flags: c_int, prot: c_int, len: usize) -> *mut c_void {
    if gather::is_pending() {
        if flags & MAP_ANONYMOUS != 0 || prot & PROT_WRITE != 0 {
            gather::about_to_allocate(len);
        }
        return again(map, MAP_FAILED);
    }
    map()
}

/// Makes a call that needs memory, a second time where memory was still being freed when it failed.
#[cold]
fn again<T: PartialEq>(call: impl Fn() -> T, failed: T) -> T {
    let answer = call();
    if answer == failed && gather::drain() {
        return call();
    }
    answer
}

#[inline(always)]
fn any(
    call: &impl Fn(*mut c_void, usize, c_int, c_int, c_int, off_t) -> *mut c_void,
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    off: off_t,
) -> *mut c_void {
    watch::resume();
    let pmd = PMD.load(Ordering::Relaxed);
    let large = len >= maps::MIN_PACKED_BYTES && flags & MAP_ANONYMOUS != 0;
    let map = |addr, flags| call(addr, len, prot, flags, fd, off);
    let mapped = if shmem::is_covered(len, flags) && sandbox::allows_advice() {
        shared(map, addr, len, prot, flags, fd, off)
    } else if large && pmd != 0 && flags & libc::MAP_TYPE == MAP_PRIVATE && sandbox::allows_advice()
    {
        anonymous(map, addr, len, prot, flags, pmd)
    } else {
        let hint = text_place(addr, len, prot, flags, off);
        // Where the kernel decides, it is given a hint.
        let mapped = map(hint.unwrap_or(addr), flags);
        if hint.is_some() && mapped != MAP_FAILED {
            maps::advise_text(mapped.addr(), len);
        }
        mapped
    };
    All::mapped(&Mapping {
        address: mapped.addr(),
        length: len,
        protection: prot,
        flags,
        descriptor: fd,
    });
    mapped
}

/// Memory that processes share.
fn shared(
    map: impl Fn(*mut c_void, c_int) -> *mut c_void,
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    off: off_t,
) -> *mut c_void {
    let special = MAP_STACK | MAP_GROWSDOWN | MAP_HUGETLB | MAP_32BIT;
    let anonymous = flags & MAP_ANONYMOUS != 0;
    // SAFETY: a number of the program's; it is asked about, and not kept.
    let file = (!anonymous && fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) });
    let offset = if anonymous { 0 } else { off };
    let offset = usize::try_from(offset).ok();
    let known = match (file, offset) {
        _ if flags & special != 0 || prot & PROT_EXEC != 0 => None,
        (Some(file), Some(offset)) => shmem::look_at(file, offset, len),
        _ => anonymous.then_some(shmem::Known {
            ours: len,
            nameless: true,
            has_room: true,
        }),
    };
    let Some(mut known) = known else {
        return map(addr, flags);
    };
    if prot & PROT_WRITE == 0 || flags & MAP_LOCKED != 0 {
        known.ours = 0;
    }
    let writable = prot == PROT_READ | PROT_WRITE;
    let anywhere = addr.is_null() && flags & (MAP_FIXED | MAP_FIXED_NOREPLACE) == 0;
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
        .and_then(|offset| shmem::place(len, offset));
    // What is populated by mmap itself would be in base pages before it could be advised.
    let populate = anonymous && writable && populates(flags);
    let kept = if populate { !MAP_POPULATE } else { !0 };
    let mapped = map(hint.map_or(addr, with_exposed_provenance_mut), flags & kept);
    if mapped != MAP_FAILED {
        shmem::mapped(mapped.addr(), len, known);
        if populate {
            shmem::user::touch(mapped.addr(), len);
            maps::populate(mapped.addr(), len);
        }
    }
    mapped
}

/// Whether mmap(2) is to make pages resident, and no more than that.
fn populates(flags: c_int) -> bool {
    flags & (MAP_POPULATE | MAP_NONBLOCK | MAP_LOCKED) == MAP_POPULATE
}

/// Where text that the program maps itself, from a file, can be mapped by PMDs: as far from a PMD's bounds as it is in
/// the file. `None` where it is something else.
#[inline(always)]
fn text_place(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    off: off_t,
) -> Option<*mut c_void> {
    let pmd = PMD.load(Ordering::Relaxed);
    let is_text = prot == PROT_READ | libc::PROT_EXEC && flags == MAP_PRIVATE && addr.is_null();
    if !is_text || pmd == 0 || len < pmd || !sandbox::allows_advice() {
        return None;
    }
    let offset = usize::try_from(off).ok()? & (pmd - 1);
    let place = maps::place_large(len.checked_add(offset)?)?;
    Some(with_exposed_provenance_mut(place + offset))
}

/// Private memory without a file.
fn anonymous(
    map: impl Fn(*mut c_void, c_int) -> *mut c_void,
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    pmd: usize,
) -> *mut c_void {
    // Stacks grow into what is never touched; hugetlb is huge; 32-bit addresses and code are special.
    let special = MAP_STACK | MAP_GROWSDOWN | MAP_HUGETLB | MAP_32BIT;
    if flags & special != 0 || prot & PROT_EXEC != 0 {
        maps::count_unmodified(len);
        return map(addr, flags);
    }
    let writable = prot == PROT_READ | PROT_WRITE;
    let anywhere = addr.is_null() && flags & (MAP_FIXED | MAP_FIXED_NOREPLACE) == 0;
    let plain = flags & !MAP_NORESERVE == MAP_PRIVATE | MAP_ANONYMOUS;
    if len < pmd {
        if anywhere
            && plain
            && writable
            && let Some(address) = maps::take_small(len)
        {
            return with_exposed_provenance_mut(address);
        }
        let is_reserved = prot == PROT_NONE && flags == MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        if is_reserved && let Some(place) = maps::place_piece(addr.addr(), len) {
            return map(with_exposed_provenance_mut(place), flags);
        }
        maps::count_unmodified(len);
        return map(addr, flags);
    }
    // A reservation (PROT_NONE) is heard as well: the program makes it accessible later.
    if !writable && prot != PROT_NONE {
        maps::count_unmodified(len);
        return map(addr, flags);
    }
    let hint = if anywhere {
        maps::place_large(len)
    } else {
        None
    };
    // What is populated by mmap itself would be in base pages before it could be advised.
    let populate = writable && populates(flags);
    let mapped = map(
        hint.map_or(addr, with_exposed_provenance_mut),
        if populate {
            flags & !MAP_POPULATE
        } else {
            flags
        },
    );
    if mapped != MAP_FAILED {
        // What is made of a reservation may be touched here and there.
        let may_be_sparse =
            flags & MAP_FIXED != 0 && writable && flags & (MAP_POPULATE | MAP_LOCKED) == 0;
        if !may_be_sparse || !maps::commit(mapped.addr(), len) {
            maps::advise_mapping(mapped.addr(), len, prot != PROT_NONE);
        }
        if populate {
            maps::populate(mapped.addr(), len);
        }
    }
    mapped
}

/// mremap(2). Declared with its fifth argument, which callers leave out when it is not looked at; the
/// calling conventions of Linux let the callee name it all the same.
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
        // More memory in a place that may have to change: rare enough to wait.
        gather::drain();
    }
    let pmd = PMD.load(Ordering::Relaxed);
    let grows = pmd != 0 && maps::is_placed(addr.addr()) && new > old;
    let mut moved = MAP_FAILED;
    if grows && flags == MREMAP_MAYMOVE {
        moved = remap(0);
        if moved == MAP_FAILED {
            // SAFETY: the caller wants the mapping moved.
            let place = unsafe { maps::move_grown(addr.addr(), old, new) };
            moved = moved_to(place.map_or(MAP_FAILED, with_exposed_provenance_mut));
        }
    }
    let is_split = || !ODDLY_ADVISED.load(Ordering::Relaxed) && maps::is_split(addr.addr(), old);
    let cut = |answer: Result<usize, Errno>| match answer {
        Ok(place) => moved_to(with_exposed_provenance_mut(place)),
        Err(error) => {
            next::set_errno(error.raw_os_error());
            MAP_FAILED
        }
    };
    // The kernel would unmap what is at a place that the program wants, and refuse then.
    let is_apart = || {
        let (from, to) = (addr.addr(), to.addr());
        let page = heap::BASE_PAGE;
        let [old, new] = [old, new].map(|length| length.saturating_add(page - 1) & !(page - 1));
        let is_aligned = (from | to).is_multiple_of(page);
        is_aligned && (from.saturating_add(old) <= to || to.saturating_add(new) <= from)
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
                _ => cut(Err(Errno::FAULT)),
            };
        }
    }
    if moved != MAP_FAILED {
        if grows {
            maps::advise_mapping(moved.addr() + old, new - old, true);
        }
        next::set_errno(saved);
    }
    moved
}

/// munmap(2). A large range may be freed by several threads, or later; in any case its addresses are free
/// when this returns.
///
/// # Safety
/// As for munmap(2).
#[inline(always)]
pub(crate) unsafe fn unmap(
    call: impl Fn(*mut c_void, usize) -> c_int,
    addr: *mut c_void,
    len: usize,
) -> c_int {
    All::unmapping(addr.addr(), len);
    // SAFETY: the program gives up the range.
    if unsafe { All::unmap(addr.addr(), len) } {
        return 0;
    }
    All::around_change(|| call(addr, len))
}

/// mprotect(2): text that is about to be written to is not replaced.
#[inline(always)]
pub(crate) fn protect(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let answer = All::around_change(call);
    if answer == 0 {
        All::protected(addr.addr(), len, prot);
    }
    answer
}

/// dlclose(3), which unmaps past ours.
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
    let old = if increment > 0 && gather::is_pending() {
        again(call, MAP_FAILED)
    } else {
        call()
    };
    if old != MAP_FAILED {
        grown(old.addr(), increment);
    }
    old
}

/// brk(2).
pub(crate) fn set_break(call: impl Fn() -> c_int) -> c_int {
    // SAFETY: sbrk(0) only asks.
    let now = || unsafe { (next::sbrk.get())(0) }.addr();
    let before = now();
    let answer = if gather::is_pending() {
        again(call, -1)
    } else {
        call()
    };
    if answer == 0 {
        grown(before, now().wrapping_sub(before).cast_signed());
    }
    answer
}

/// brk(2) by its number, which answers with the break. `now` only asks.
pub(crate) fn break_moved(now: impl Fn() -> c_long, call: impl Fn() -> c_long) -> c_long {
    let before = now();
    let after = call();
    if let Ok(old) = usize::try_from(before) {
        grown(
            old,
            isize::try_from(after.wrapping_sub(before)).unwrap_or(0),
        );
    }
    after
}

/// The break has moved; a large step is advised.
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

/// mlockall(2): what is mapped from now on may be resident at once.
pub(crate) fn lock_all(flags: c_int, call: impl FnOnce() -> c_int) -> c_int {
    All::locking_all();
    let answer = call();
    if answer == 0 {
        All::locked_all(flags & libc::MCL_FUTURE != 0);
    }
    answer
}

/// munlockall(2).
pub(crate) fn unlock_all(call: impl FnOnce() -> c_int) -> c_int {
    let answer = call();
    if answer == 0 {
        All::locked_all(false);
    }
    answer
}

/// madvise(2).
///
/// # Safety
/// As for madvise(2): some advice drops what the memory holds.
pub(crate) unsafe fn advise(
    call: impl Fn(*mut c_void, usize, c_int) -> c_int,
    addr: *mut c_void,
    len: usize,
    advice: c_int,
) -> c_int {
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
