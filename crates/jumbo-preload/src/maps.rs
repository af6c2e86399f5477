//! The `mmap` family: mmap(2), mremap(2), brk(2), mlock(2), mlockall(2), madvise(2).
//!
//! Both `mmap` and `mmap64` are defined: programs built with large-file support (CPython among them)
//! import the second name.

use core::ffi::{c_int, c_uint, c_ulong, c_void};
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use jumbo_inside::gather;
use jumbo_inside::heap::{self, maps, sparse};
use jumbo_inside::{sandbox, segments, shmem, watch};
use libc::{
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_FIXED_NOREPLACE, MAP_GROWSDOWN, MAP_HUGETLB,
    MAP_LOCKED, MAP_NONBLOCK, MAP_NORESERVE, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, MAP_STACK,
    MREMAP_FIXED, MREMAP_MAYMOVE, PROT_EXEC, PROT_NONE, PROT_READ, PROT_WRITE, off_t,
};
use rustix::fd::BorrowedFd;

use crate::reaper::auto;
use crate::{mimalloc, next, threads};

/// Mappings below 2 GiB, which only x86-64 has a flag for.
#[cfg(target_arch = "x86_64")]
const MAP_32BIT: c_int = libc::MAP_32BIT;
#[cfg(not(target_arch = "x86_64"))]
const MAP_32BIT: c_int = 0;

/// The PMD size once mappings are covered; 0 before, and where they are not.
static PMD: AtomicUsize = AtomicUsize::new(0);

/// Starts covering mappings.
pub(crate) fn cover(pmd: usize) {
    PMD.store(pmd, Ordering::Release);
}

/// mmap(2).
///
/// # Safety
/// As for mmap(2): `MAP_FIXED` replaces what is there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    off: off_t,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let map = || unsafe { any(addr, len, prot, flags, fd, off) };
    if flags & (MAP_FIXED | MAP_FIXED_NOREPLACE) != 0 {
        gather::about_to_map_at(addr.addr(), len);
        shmem::unmapped(addr.addr(), len);
        sparse::forget(addr.addr(), len);
        return segments::changing(|| pending(map, flags, prot, len));
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

/// # Safety
/// As for [`mmap`].
#[inline(always)]
unsafe fn any(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    off: off_t,
) -> *mut c_void {
    watch::resume();
    let pmd = PMD.load(Ordering::Relaxed);
    let large = len >= maps::SMALL && flags & MAP_ANONYMOUS != 0;
    let mapped = if shmem::is_covered(len, flags) && sandbox::allows_advice() {
        // SAFETY: the caller's promise.
        unsafe { shared(addr, len, prot, flags, fd, off) }
    } else if large && pmd != 0 && flags & libc::MAP_TYPE == MAP_PRIVATE && sandbox::allows_advice()
    {
        // SAFETY: the caller's promise.
        unsafe { anonymous(addr, len, prot, flags, fd, off, pmd) }
    } else {
        let hint = text_place(addr, len, prot, flags, off);
        // SAFETY: the same call: where the kernel decides, it is given a hint.
        let mapped = unsafe { (next::mmap.get())(hint.unwrap_or(addr), len, prot, flags, fd, off) };
        if hint.is_some() && mapped != MAP_FAILED {
            maps::advise_text(mapped.addr(), len);
        }
        mapped
    };
    if large {
        auto::mapped(mapped, len, prot, flags);
    } else {
        auto::mapped_file(mapped, flags, fd);
    }
    mapped
}

/// Memory that processes share.
///
/// # Safety
/// As for [`mmap`].
unsafe fn shared(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    off: off_t,
) -> *mut c_void {
    // SAFETY: the caller's promise, for whatever address and flags below.
    let map = |addr, flags| unsafe { (next::mmap.get())(addr, len, prot, flags, fd, off) };
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

/// mmap(2), by its other name.
///
/// # Safety
/// As for [`mmap`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    off: off_t,
) -> *mut c_void {
    // SAFETY: the same call: off_t has 64 bits here.
    unsafe { mmap(addr, len, prot, flags, fd, off) }
}

/// # Safety
/// As for [`mmap`].
unsafe fn anonymous(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    off: off_t,
    pmd: usize,
) -> *mut c_void {
    // SAFETY: the caller's promise, for whatever address and flags below.
    let map = |addr, flags| unsafe { (next::mmap.get())(addr, len, prot, flags, fd, off) };

    // Stacks grow into what is never touched; hugetlb is huge; 32-bit addresses and code are special.
    let special = MAP_STACK | MAP_GROWSDOWN | MAP_HUGETLB | MAP_32BIT;
    if flags & special != 0 || prot & PROT_EXEC != 0 {
        maps::left_alone(len);
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
        maps::left_alone(len);
        return map(addr, flags);
    }
    // A reservation (PROT_NONE) is advised as well: what the program makes accessible later keeps it.
    if !writable && prot != PROT_NONE {
        maps::left_alone(len);
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
        if !may_be_sparse || !sparse::commit(mapped.addr(), len) {
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    addr: *mut c_void,
    old: usize,
    new: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    if flags & MREMAP_FIXED != 0 {
        gather::about_to_map_at(to.addr(), new);
        shmem::unmapped(to.addr(), new);
        sparse::forget(to.addr(), new);
    }
    shmem::unmapped(addr.addr(), old.max(1));
    sparse::forget(addr.addr(), old);
    let remap = |flags| {
        // SAFETY: the same call.
        segments::changing(|| unsafe { (next::mremap.get())(addr, old, new, flags, to) })
    };
    if new > old && gather::is_pending() {
        // More memory in a place that may have to change: rare enough to wait.
        gather::drain();
    }
    let pmd = PMD.load(Ordering::Relaxed);
    let ours = pmd != 0 && maps::is_placed(addr.addr());
    if !ours || new <= old {
        return remap(flags);
    }
    let saved = next::errno();
    if flags != MREMAP_MAYMOVE {
        return remap(flags);
    }
    let mut moved = remap(0);
    if moved == MAP_FAILED {
        // SAFETY: the caller wants the mapping moved.
        moved = match unsafe { maps::move_grown(addr.addr(), old, new) } {
            Some(address) => with_exposed_provenance_mut(address),
            None => remap(flags),
        };
    } else {
        maps::advise_mapping(moved.addr(), new, true);
    }
    let is_seam = || !ODDLY_ADVISED.load(Ordering::Relaxed) && maps::is_packed(addr.addr(), old);
    if moved == MAP_FAILED && next::errno() == libc::EFAULT {
        moved = match is_seam() {
            // SAFETY: the caller's promise.
            true => unsafe { copy_grown(addr, old, new) },
            false => MAP_FAILED,
        };
        if moved == MAP_FAILED {
            next::set_errno(libc::EFAULT);
        }
    }
    if moved != MAP_FAILED {
        next::set_errno(saved);
    }
    moved
}

/// The program has advised memory in a way that a copy of it would lose (MADV_DONTFORK, MADV_DONTDUMP).
static ODDLY_ADVISED: AtomicBool = AtomicBool::new(false);

/// Does by hand what the kernel refuses because our packing made one mapping of the program's two of
/// its own: it merges none whose memory was shared by a fork.
///
/// # Safety
/// `addr` is private, readable and writable memory of `old` bytes, which the caller wants moved.
unsafe fn copy_grown(addr: *mut c_void, old: usize, new: usize) -> *mut c_void {
    let (prot, flags) = (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    // SAFETY: a new mapping, where the kernel likes, replaces none.
    let moved = unsafe { mmap(core::ptr::null_mut(), new, prot, flags, -1, 0) };
    if moved != MAP_FAILED {
        // SAFETY: the caller's promise, and a new mapping that is larger; the program gives the old one up for it.
        unsafe {
            heap::copy(addr.addr(), moved.addr(), old);
            munmap(addr, old);
        }
    }
    moved
}

/// munmap(2). A large range may be freed by several threads, or later; in any case its addresses are free
/// when this returns.
///
/// # Safety
/// As for munmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(addr: *mut c_void, len: usize) -> c_int {
    shmem::unmapped(addr.addr(), len);
    sparse::forget(addr.addr(), len);
    // SAFETY: the caller may unmap the range.
    if gather::is_large(len) && unsafe { gather::unmap(addr.addr(), len) } {
        return 0;
    }
    // SAFETY: the same call.
    segments::changing(|| unsafe { (next::munmap.get())(addr, len) })
}

/// mprotect(2): text that is about to be written to is not replaced.
///
/// # Safety
/// As for mprotect(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int {
    // SAFETY: the same call.
    segments::changing(|| unsafe { (next::mprotect.get())(addr, len, prot) })
}

/// dlclose(3), which unmaps past ours.
///
/// # Safety
/// As for dlclose(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlclose(handle: *mut c_void) -> c_int {
    // SAFETY: the same call.
    segments::changing(|| unsafe { (next::dlclose.get())(handle) })
}

/// ioctl(2): a program that answers page faults itself is left alone. Declared with the one argument that there is at most.
///
/// # Safety
/// As for ioctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int {
    /// `UFFDIO_REGISTER` of <linux/userfaultfd.h>.
    const REGISTER: u32 = 0xc020_aa00;
    // The kernel takes 32 bits: some callers extend the sign of an int.
    if request & c_ulong::from(u32::MAX) == c_ulong::from(REGISTER) {
        shmem::leave();
    }
    // SAFETY: the same call.
    unsafe { (next::ioctl.get())(fd, request, argument) }
}

/// sbrk(2).
///
/// # Safety
/// As for sbrk(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sbrk(increment: isize) -> *mut c_void {
    // SAFETY: the same call.
    let move_break = || unsafe { (next::sbrk.get())(increment) };
    let old = if increment > 0 && gather::is_pending() {
        again(move_break, MAP_FAILED)
    } else {
        move_break()
    };
    if old != MAP_FAILED {
        grown(old.addr(), increment);
    }
    old
}

/// brk(2).
///
/// # Safety
/// As for brk(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn brk(addr: *mut c_void) -> c_int {
    // SAFETY: sbrk(0) only asks.
    let old = unsafe { (next::sbrk.get())(0) };
    // SAFETY: the same call.
    let move_break = || unsafe { (next::brk.get())(addr) };
    let answer = if gather::is_pending() {
        again(move_break, -1)
    } else {
        move_break()
    };
    if answer == 0 && old != MAP_FAILED {
        grown(
            old.addr(),
            addr.addr()
                .cast_signed()
                .wrapping_sub(old.addr().cast_signed()),
        );
    }
    answer
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
#[unsafe(no_mangle)]
pub extern "C" fn mlockall(flags: c_int) -> c_int {
    // What is being freed is not to be locked, nor to count, and no more are the workers' stacks.
    threads::end_ours();
    mimalloc::give_up_addresses();
    // SAFETY: the same call.
    let answer = unsafe { (next::mlockall.get())(flags) };
    if answer == 0 {
        heap::lock_future(flags & libc::MCL_FUTURE != 0);
    }
    answer
}

/// munlockall(2).
#[unsafe(no_mangle)]
pub extern "C" fn munlockall() -> c_int {
    // SAFETY: the same call.
    let answer = unsafe { (next::munlockall.get())() };
    if answer == 0 {
        heap::lock_future(false);
    }
    answer
}

/// So much is about to be locked: it may be text, which is not replaced then, for the lock would be lost.
fn locked(len: usize) {
    if len >= PMD.load(Ordering::Relaxed).max(1 << 20) {
        watch::end();
    }
}

/// mlock(2): the lock would stick to the pages of a block when it is freed.
///
/// # Safety
/// None beyond C's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(addr: *const c_void, len: usize) -> c_int {
    gather::about_to_allocate(len);
    heap::changed(addr.addr());
    locked(len);
    shmem::user::touch(addr.addr(), len);
    // SAFETY: the same call.
    unsafe { (next::mlock.get())(addr, len) }
}

/// mlock2(2).
///
/// # Safety
/// None beyond C's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(addr: *const c_void, len: usize, flags: c_uint) -> c_int {
    gather::about_to_allocate(len);
    heap::changed(addr.addr());
    locked(len);
    shmem::user::touch(addr.addr(), len);
    // SAFETY: the same call.
    unsafe { (next::mlock2.get())(addr, len, flags) }
}

/// madvise(2): most advice sticks to the pages of a block when it is freed.
///
/// # Safety
/// As for madvise(2): some advice drops what the memory holds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    let passing = [
        libc::MADV_DONTNEED,
        libc::MADV_FREE,
        libc::MADV_HUGEPAGE,
        libc::MADV_WILLNEED,
    ];
    if !passing.contains(&advice) {
        heap::changed(addr.addr());
        if maps::is_placed(addr.addr()) {
            ODDLY_ADVISED.store(true, Ordering::Relaxed);
        }
    }
    if advice == libc::MADV_NOHUGEPAGE {
        sparse::forget(addr.addr(), len);
    }
    let drops = [libc::MADV_DONTNEED, libc::MADV_FREE].contains(&advice);
    // SAFETY: the caller drops what the range holds.
    if drops && unsafe { heap::discard(addr.addr(), len) } {
        return 0;
    }
    if advice == libc::MADV_MERGEABLE {
        gather::merged();
    }
    if [libc::MADV_POPULATE_READ, libc::MADV_POPULATE_WRITE].contains(&advice) {
        shmem::user::touch(addr.addr(), len);
    }
    if advice == libc::MADV_COLLAPSE {
        // The kernel collapses no range with holes that a userfaultfd could fill: EBUSY. It looks at the page behind
        // the end too (collapse_file in mm/khugepaged.c, Linux 6.18).
        shmem::user::forget(addr.addr(), len.saturating_add(1));
    }
    if advice == libc::MADV_REMOVE {
        shmem::punched();
    }
    if advice == libc::MADV_DONTNEED && gather::is_large(len) {
        // SAFETY: the caller drops what the range holds.
        match unsafe { gather::discard(addr.addr(), len) } {
            Some(Ok(())) => return 0,
            Some(Err(errno)) => {
                next::set_errno(errno.raw_os_error());
                return -1;
            }
            None => {}
        }
    }
    // SAFETY: the same call.
    unsafe { (next::madvise.get())(addr, len, advice) }
}
