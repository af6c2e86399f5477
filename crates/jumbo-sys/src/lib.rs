//! The kernel as jumbo uses it: system calls that rustix lacks or wraps incompletely, one wrapper
//! each; readers of /proc: [`proc`], [`maps`],
//! [`smaps`], [`cgroup`], [`mounts`]; and [`units`]. The code inside programs, the library
//! and the command use it.
//!
//! The crate has no standard library and no allocator. With the feature `std` it has the files of a
//! [`Root`](files::Root), for the library and the command: [`files`], [`thp`], [`folios`].
//!
//! - [`advise`], [`allows`]: madvise(2), as far as the program's filters allow it; [`discard`],
//!   [`discard_parts`].
//! - [`collapse()`], [`collapse_in`], [`cool_in`]: MADV_COLLAPSE and MADV_COLD, here or elsewhere.
//!   [`Destination`]: for a collapse.
//! - [`guarded`], [`unfiltered`]: calls that a filter of another thread waits for.
//! - [`Maps`], [`Vma`]: the mapping of an address. [`Pagemap`], [`Pages`], [`PageState`]: its
//!   pages.
//! - [`map_at`], [`reserve`], [`reserve_anywhere`], [`unmap`]: mappings that replace none.
//!   [`map_own`]: jumbo's own. [`move_mapping`], [`move_units`]: mremap(2). [`insist`]: a call that must succeed.
//! - [`copy_words`], [`copy_bytes`], [`copy_scattered`]: memory read without a fault.
//!   [`is_mapped`].
//! - [`Reserved`], [`Scratch`]: addresses and memory with an owner. [`discard_locked`], [`name`],
//!   [`memfd`]: anonymous memory. [`bind`], [`memory_policy`]: nodes.
//! - [`send_signal`], [`release`]: the process of a descriptor.
//! - [`Blocked`]: a guard that blocks signals. [`Apart`]: a stack with room.
//! - [`Thread`], [`clone3`]: tasks unknown to the C library; [`call`], [`wait`], [`wake`]: their
//!   system calls. [`stand_back`], [`stay_prompt`], [`leave_descriptors`]: their setup.
//! - [`open`], [`keep`], [`shut`]: files for reading, and a process that opens no more of them.
//! - [`has_one_thread`]: whether the program has made none. [`process`]: the caller's ID.
//!   [`request`]: any other system call.
//!
//! Invariant: no call here changes errno.

#![cfg_attr(not(any(test, feature = "std")), no_std)]

mod advice;
mod anonymous;
mod apart;
mod batch;
pub mod cgroup;
mod collapse;
mod copy;
mod deadline;
mod destination;
#[cfg(feature = "std")]
pub mod files;
#[cfg(feature = "std")]
pub mod folios;
mod guard;
mod kept;
pub mod maps;
pub mod mounts;
mod numa;
mod one_page;
mod pagemap;
mod pidfd;
mod place;
pub mod proc;
mod remap;
mod reserved;
mod scratch;
mod signals;
pub mod smaps;
mod task;
#[cfg(feature = "std")]
pub mod thp;
mod threads;
pub mod units;
mod vma;

pub use advice::{
    USUAL, advise, allows, allows_usual, block, discard, discard_parts, forbid_unless, unblock,
};
pub use anonymous::{discard_locked, memfd, name};
pub use apart::{Apart, Perform, apart, use_apart};
pub use batch::{stand_back, stay_prompt};
pub use collapse::{collapse, collapse_in, cool_in, has_collapse, has_populate};
pub use copy::{copy_bytes, copy_scattered, copy_words};
pub use deadline::{
    Deadline, confine_clock, cpu_time, millis, now, release_clock, set_vdso, unmapping,
};
pub use destination::{Collapsed, Destination};
pub use guard::{guarded, is_filtered, mark_filter, unfiltered, unmark_filter, wait_for_guarded};
pub use kept::{File, forget, has_missed, is_shut, keep, open, raise_descriptors, shut};
pub use numa::{PolicyMode, allowed_nodes, bind, local_node, memory_policy};
pub use pagemap::{PageState, Pagemap, Pages};
pub use pidfd::{release, send_signal};
pub use place::{
    OWN, SLABS, map_anew, map_at, map_own, place_own, reserve, reserve_anywhere, unmap,
};
pub use remap::{insist, is_mapped, move_mapping, move_units};
pub use reserved::{Reserved, at};
pub use scratch::Scratch;
pub use signals::Blocked;
pub use task::{Entry, Thread, Wait, call, clone3, tid_word, wait, wait_either, wake, word_at};
pub use threads::{has_one_thread, note_one_thread, note_thread, thread_pointer};
pub use vma::{Maps, Vma};

/// Requests of ioctl(2) that this module makes.
pub const REQUESTS: [Opcode; 2] = [pagemap::PAGEMAP_SCAN, vma::PROCMAP_QUERY];

use rustix::io::{Errno, Result};
use rustix::ioctl::Opcode;

/// Makes a system call without the C library, whose functions may be interposed.
///
/// # Safety
/// As for the call.
#[expect(unsafe_code, reason = "a system call")]
pub unsafe fn request(number: libc::c_long, arguments: [usize; 6]) -> Result<usize> {
    // SAFETY: the caller's promise.
    let result = unsafe { call(number, arguments) };
    usize::try_from(result).map_err(|_| {
        let errno = i32::try_from(result.unsigned_abs()).unwrap_or(libc::EIO);
        Errno::from_raw_os_error(errno)
    })
}

/// How THP is disabled for a process: [`thp_disable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThpDisable {
    /// Not at all.
    No,
    /// Except for advised memory: PR_THP_DISABLE_EXCEPT_ADVISED of Linux 6.18.
    ExceptAdvised,
    /// Advised memory included.
    Completely,
}

/// Returns how THP is disabled for this process.
///
/// # References
/// PR_GET_THP_DISABLE in prctl(2); Linux 3.15.
pub fn thp_disable() -> ThpDisable {
    let option = libc::PR_GET_THP_DISABLE.cast_unsigned() as usize;
    #[expect(unsafe_code, reason = "a system call")]
    // SAFETY: the option changes nothing.
    let disabled = unsafe { request(libc::SYS_prctl, [option, 0, 0, 0, 0, 0]) };
    match disabled {
        Ok(1) => ThpDisable::Completely,
        Ok(3) => ThpDisable::ExceptAdvised,
        _ => ThpDisable::No,
    }
}

/// Disables THP for this process and the children that it makes from now on.
///
/// # References
/// PR_SET_THP_DISABLE in prctl(2); Linux 3.15, and 6.18 for all but advised memory.
///
/// # Errors
/// EINVAL: an older kernel.
pub fn disable_thp(how: ThpDisable) -> Result<()> {
    let option = libc::PR_SET_THP_DISABLE.cast_unsigned() as usize;
    let [disable, flags] = match how {
        ThpDisable::No => [0, 0],
        ThpDisable::ExceptAdvised => [1, 2],
        ThpDisable::Completely => [1, 0],
    };
    #[expect(unsafe_code, reason = "a system call")]
    // SAFETY: changes only how memory is backed, never its content.
    let answer = unsafe { request(libc::SYS_prctl, [option, disable, flags, 0, 0, 0]) };
    answer.map(|_| ())
}

/// Reports whether THP is disabled for this process, advised memory included.
pub fn is_without_thp() -> bool {
    thp_disable() == ThpDisable::Completely
}

/// getpid(2).
pub fn process() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Returns the major and minor number of a kernel's release (uname(2)).
pub fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Gives the calling thread an empty descriptor table of its own: the thread and the program
/// neither use nor close each other's descriptors.
///
/// # References
/// close_range(2) with CLOSE_RANGE_UNSHARE; Linux 5.9.
///
/// # Errors
/// ENOSYS: an older kernel; ENOMEM.
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
pub fn leave_descriptors() -> Result<()> {
    const CLOSE_RANGE_UNSHARE: usize = 1 << 1;
    let all = [0, u32::MAX as usize, CLOSE_RANGE_UNSHARE, 0, 0, 0];
    // SAFETY: a range of all descriptors, so the new table copies none.
    unsafe { request(libc::SYS_close_range, all).map(drop) }
}

/// ioctl(2) with a structure that the kernel reads and writes.
///
/// # Safety
/// The request takes a `T`, writes a valid `T`, and nothing else except memory that `T` points to.
#[expect(unsafe_code, reason = "as above")]
unsafe fn control<T>(file: &File, request: Opcode, structure: &mut T) -> Result<usize> {
    let file = kept::argument(file);
    let structure = core::ptr::from_mut(structure).expose_provenance();
    let arguments = [file, request as usize, structure, 0, 0, 0];
    // SAFETY: the caller's promise.
    unsafe { self::request(libc::SYS_ioctl, arguments) }
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn a_release_begins_with_its_version() {
        assert_eq!(version("6.18.3-1-generic"), Some((6, 18)));
        assert_eq!(version("7.3-rc1"), Some((7, 3)));
        assert_eq!(version("unknown"), None);
    }
}
