//! One copy of text for all processes of a user that run the file: `install`.
//!
//! The copy is an *image*: a sealed memfd in huge folios, which each process maps private, readable
//! and executable. There is no registry, and no file on a file system. Each user of an image keeps
//! a descriptor of it ([`DESCRIPTORS`]), and finds images in the descriptors of other processes
//! under /proc. So an image exists until its last user ends, however that ends.
//!
//! The name says which part of which file an image holds, and proves nothing. An accepted image was
//! made by this user, is sealed, and equals this process's text byte for byte. Processes of other
//! users are not queried.
//!
//! A maker also verifies its own image after the seal. Another process of the same user can open
//! any descriptor of this process through /proc/PID/fd, and write until the seal. The seal fails
//! while a writable mapping exists (F_SEAL_WRITE, fcntl(2)).
//!
//! A PMD maps only addresses and image offsets that are congruent modulo its size. So one image
//! serves programs with fixed addresses, aligned programs (`jumbo text align`), and libraries that
//! the kernel aligns. `--text=shared` makes an image of any other position-independent program too,
//! which serves only processes with the text at the same address modulo the PMD size; `auto` makes
//! none for it.
//!
//! Processes that start at once make one image: each announces its own before it searches for
//! others. It waits for an unfinished one; of two announced ones, that of the lower PID is made.
//! (In the few microseconds between search and start both may be made; later processes use one of
//! them.)

use core::mem::MaybeUninit;
use core::time::Duration;

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, MemfdFlags, Mode, OFlags, RawDir, SealFlags, StatxFlags,
};
use rustix::io::{Errno, Result};
use rustix::mm::ProtFlags;
use rustix::process::{Resource, getrlimit};

use super::find::{Segment, blocks};
use super::guard::exclusively;
use super::memory::{self, StagingArea};
use super::{Stop, check, count};
use crate::density::{self, Policy};
use crate::ledger::text_reason as reason;
use crate::standing;
use crate::sync::Deadline;
use crate::watch::program;
use jumbo_sys::maps::MapsLine;
use jumbo_sys::proc::{Path, each_mapping};
use jumbo_sys::{self as sys, Pagemap, Pages};

/// Prefix of the names of images.
pub const NAME: &str = "jumbo-text";
/// Descriptors at which processes find images: above those that programs expect, and below the
/// usual limit of 1024. One for the program's own text, and some for libraries.
pub const DESCRIPTORS: core::ops::Range<i32> = FIRST_DESCRIPTOR..FIRST_DESCRIPTOR + 8;
const FIRST_DESCRIPTOR: i32 = 960;
/// Seals of a finished image: no process can write to it or change its length.
const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);
/// Huge pages of one collapse: for each call the kernel makes all CPUs drain their lists.
const PAGES_PER_COLLAPSE: usize = 32;
/// Size of an image that is announced, but not begun.
const ANNOUNCED_SIZE: u64 = 1;
/// Timeout of another process's unfinished image without progress.
const STALL_TIMEOUT: Duration = Duration::from_millis(200);
/// Maximum time in all for images of other processes: no process can hold up a start for longer.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(3);
/// Number of rejected images that a search remembers.
const MAX_REJECTED: usize = 8;

/// The name of a segment's image: the file's own name, its device and inode, and the part of it.
type ImageName = Path<200>;
/// Maximum length of the link of an image's descriptor: its name, and the kernel's additions.
const MAX_LINK_BYTES: usize = 256;

/// Publishes an empty image of a segment, which the thread with its own descriptor table may fill
/// later. Only at the start, when no other thread could miss a descriptor number.
pub(super) fn reserve(segment: &Segment) {
    let mut name = ImageName::EMPTY;
    if let Some(name) = image_name(segment, &mut name)
        && let Ok(image) = create(name)
    {
        keep_open(publish(&image));
    }
}

/// Moves a segment onto its image; true if this process made the image.
pub(super) fn install(
    segment: &Segment,
    pagemap: &Pagemap,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<bool, u32> {
    let mut name = ImageName::EMPTY;
    let name = image_name(segment, &mut name).ok_or(reason::NO_MEMORY)?;
    let own = create(name)?;
    let file = rustix::fs::fstat(&own)
        .map_err(|_| reason::NO_MEMORY)?
        .st_dev;
    let mut search = Search {
        name,
        device: (rustix::fs::major(file), rustix::fs::minor(file)),
        size: image_offset(segment, pmd) + segment.len() as u64,
        rejected: [0; MAX_REJECTED],
        rejections: 0,
        awaited: 0,
    };
    // Published before the search. Other processes see only the reserved images of jumbo's thread,
    // because it has its own descriptor table.
    let (own, published) = match stop.is_never() {
        true => {
            let published = publish(&own);
            (own, published)
        }
        false => {
            let reserved = standing::with_capabilities(|| search.reserved());
            (reserved.unwrap_or(own), None)
        }
    };
    if is_within_limit(search.size) {
        let _ = rustix::fs::ftruncate(&own, ANNOUNCED_SIZE);
    }
    let installed = find_or_make(&own, &mut search, segment, pagemap, pmd, stop);
    match installed {
        Ok(true) => keep_open(published),
        // No process may wait for it; a sealed one stays.
        _ => withdraw(&own),
    }
    installed
}

/// Empties an unfinished image, so that no process waits for it. Its length may be sealed already.
fn withdraw(own: &OwnedFd) {
    let is_ready = rustix::fs::fcntl_get_seals(own).is_ok_and(|seals| seals.contains(SEALS));
    if is_ready {
        return;
    }
    let _ = rustix::fs::ftruncate(own, 0);
    let length = rustix::fs::fstat(own).map_or(0, |stat| stat.st_size);
    if let Ok(length) = u64::try_from(length)
        && length > 0
    {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fchmod(own, Mode::empty());
        let _ = rustix::fs::fallocate(own, flags, 0, length);
    }
}

/// Attaches another process's image, or fills and attaches `own`; true for `own`.
fn find_or_make(
    own: &OwnedFd,
    search: &mut Search<'_>,
    segment: &Segment,
    pagemap: &Pagemap,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<bool, u32> {
    let (mut deadline, mut progress) = (Deadline::after(STALL_TIMEOUT), 0);
    let end = Deadline::after(SEARCH_TIMEOUT);
    while !end.has_passed() {
        stop.check()?;
        // jumbo's thread has no capability in effect otherwise.
        let found = match stop.is_never() {
            true => search.find(),
            false => standing::with_capabilities(|| search.find()),
        };
        match found {
            Some(Candidate::Ready(image)) => {
                match attach(segment, &image, pagemap, pmd, stop) {
                    // The image is of an earlier version of the file, or on base pages.
                    Err(reason::CHANGED) if check(pagemap, segment).is_ok() => {
                        search.reject(&image)
                    }
                    Err(reason::NO_SHARED_HUGE) => search.reject(&image),
                    Err(why) => return Err(why),
                    Ok(()) => {
                        if stop.is_never() {
                            // Other processes find it after its maker has ended.
                            keep_open(publish(&image));
                        }
                        return Ok(false);
                    }
                }
            }
            Some(Candidate::Unfinished { blocks, inode }) => {
                if search.awaited != inode || blocks > progress {
                    (deadline, progress) = (Deadline::after(STALL_TIMEOUT), blocks);
                    search.awaited = inode;
                } else if deadline.has_passed() {
                    // No progress: reject it for good.
                    search.reject_inode(inode);
                    continue;
                }
                stop.check_before_wait()?;
                let _ = rustix::thread::nanosleep(&POLL_INTERVAL.try_into().unwrap_or_default());
            }
            None => break,
        }
        if search.rejections > MAX_REJECTED {
            break;
        }
    }
    let image = make(own, segment, pagemap, pmd, stop)?;
    match attach(segment, &image, pagemap, pmd, stop) {
        Ok(()) => Ok(true),
        // Another process wrote to it before the seal: the mode hides it from searches.
        Err(reason::CHANGED) if check(pagemap, segment).is_ok() => {
            let _ = rustix::fs::fchmod(own, Mode::empty());
            Err(reason::TAMPERED)
        }
        Err(why) => Err(why),
    }
}

/// Reports whether a file size is within RLIMIT_FSIZE: beyond it SIGXFSZ would kill the program.
fn is_within_limit(size: u64) -> bool {
    let limit = getrlimit(Resource::Fsize).current;
    limit.is_none_or(|limit| limit >= size)
}

/// Writes the name of a segment's image, which is the same for the same part of the same file.
fn image_name<'a>(segment: &Segment, name: &'a mut ImageName) -> Option<&'a core::ffi::CStr> {
    let (((major, minor), inode), length) = (segment.file, segment.len());
    let file = core::str::from_utf8(segment.name.bytes()).unwrap_or("");
    let offset = segment.offset;
    name.write(format_args!(
        "{NAME}:{file}:{major:x}-{minor:x}-{inode}-{offset:x}-{length:x}"
    ))
}

/// Returns the offset of text in its image: its file offset if that is congruent to the address, so
/// that tools that identify the file by the image's build ID find the symbols.
fn image_offset(segment: &Segment, pmd: usize) -> u64 {
    let shift = (segment.start as u64).wrapping_sub(segment.offset) & (pmd as u64 - 1);
    segment.offset + shift
}

/// Copies the file's first page into its image, if it is mapped: the kernel reads the build ID
/// there (PERF_RECORD_MISC_MMAP_BUILD_ID of perf_event_open(2), Linux 5.12). A failure is harmless.
fn copy_build_id(own: &OwnedFd, segment: &Segment, offset: u64) {
    const PAGE: usize = 4096;
    let mut first = [0usize; PAGE / size_of::<usize>()];
    let is_first = |mapping: &MapsLine| {
        mapping.file() == segment.file
            && mapping.offset == 0
            && offset >= PAGE as u64
            && sys::copy_words(mapping.start, &mut first) == Ok(first.len())
    };
    if each_mapping(is_first) == Ok(true) {
        let _ = rustix::io::pwrite(own, memory::bytes(&first), 0);
    }
}

/// Duplicates an image to one of [`DESCRIPTORS`]; `None` if no number is free or below the limit.
fn publish(image: &OwnedFd) -> Option<OwnedFd> {
    let published = rustix::io::fcntl_dupfd_cloexec(image, FIRST_DESCRIPTOR).ok();
    published.filter(|fd| DESCRIPTORS.contains(&rustix::fd::AsRawFd::as_raw_fd(fd)))
}

/// Leaves a descriptor open for the life of the process, or until the program closes it.
fn keep_open(published: Option<OwnedFd>) {
    let _ = published.map(rustix::fd::IntoRawFd::into_raw_fd);
}

/// Creates an empty memfd that can be sealed and executed (MFD_EXEC, Linux 6.3).
pub(super) fn create(name: &core::ffi::CStr) -> core::result::Result<OwnedFd, u32> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let created = match rustix::fs::memfd_create(name, flags | MemfdFlags::EXEC) {
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        created => created,
    };
    created.map_err(|errno| match errno {
        Errno::ACCESS | Errno::PERM => reason::NOT_EXECUTABLE,
        _ => reason::NO_MEMORY,
    })
}

/// An image of another process.
enum Candidate {
    Ready(OwnedFd),
    Unfinished {
        /// Allocated 512-byte blocks; 0: announced.
        blocks: u64,
        inode: u64,
    },
}

/// A search for an image.
struct Search<'a> {
    name: &'a core::ffi::CStr,
    /// The kernel's own tmpfs mount: no other file system is queried.
    device: (u32, u32),
    size: u64,
    /// Inodes of the latest images with other content.
    rejected: [u64; MAX_REJECTED],
    rejections: usize,
    /// Inode of the image that this process waits for; 0: none.
    awaited: u64,
}

impl Search<'_> {
    fn reject(&mut self, image: &OwnedFd) {
        self.reject_inode(rustix::fs::fstat(image).map_or(0, |stat| stat.st_ino));
    }

    fn reject_inode(&mut self, inode: u64) {
        if let Some(place) = self.rejected.get_mut(self.rejections % MAX_REJECTED) {
            *place = inode;
        }
        self.rejections += 1;
    }

    /// Searches the processes of this user.
    fn find(&self) -> Option<Candidate> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(CWD, c"/proc", flags, Mode::empty()).ok()?;
        let (user, own) = (rustix::process::geteuid(), program());
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut entries = RawDir::new(&folder, &mut buffer);
        let mut unfinished = None;
        while let Some(Ok(entry)) = entries.next() {
            let name = entry.file_name().to_str().ok();
            let Some(number) = name.and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            // /proc shows a process with more privilege than its user as root's.
            let stat = rustix::fs::statat(&folder, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW);
            if !stat.is_ok_and(|stat| stat.st_uid == user.as_raw()) {
                continue;
            }
            for descriptor in DESCRIPTORS {
                match self.inspect(&folder, number, descriptor) {
                    Some(Candidate::Ready(image)) => return Some(Candidate::Ready(image)),
                    // This process's own image serves only when it is ready.
                    Some(Candidate::Unfinished { .. }) if number == own => {}
                    // Of two announced images, that of the lower PID is made.
                    Some(Candidate::Unfinished { blocks: 0, .. }) if number > own => {}
                    // The awaited image, or else the first.
                    Some(found @ Candidate::Unfinished { inode, .. })
                        if unfinished.is_none() || inode == self.awaited =>
                    {
                        unfinished = Some(found);
                    }
                    Some(Candidate::Unfinished { .. }) | None => {}
                }
            }
        }
        unfinished
    }

    /// Opens the image that this process has reserved.
    fn reserved(&self) -> Option<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(CWD, c"/proc", flags, Mode::empty()).ok()?;
        let own = program();
        DESCRIPTORS.into_iter().find_map(|descriptor| {
            let (image, stat) = self.open_named(&folder, own, descriptor)?;
            let is_empty = stat.stx_size == 0 && stat.stx_mode & 0o200 != 0;
            open_again(is_empty.then_some(image)?, OFlags::RDWR).ok()
        })
    }

    /// Inspects one descriptor of one process.
    fn inspect(&self, folder: &OwnedFd, process: i32, descriptor: i32) -> Option<Candidate> {
        let (image, stat) = self.open_named(folder, process, descriptor)?;
        let inode = stat.stx_ino;
        // The maker of a corrupted image clears the mode.
        if stat.stx_mode & 0o400 == 0 || self.rejected.contains(&inode) {
            return None;
        }
        match stat.stx_size {
            ANNOUNCED_SIZE => Some(Candidate::Unfinished { blocks: 0, inode }),
            size if size == self.size => {
                let image = open_again(&image, OFlags::RDONLY).ok()?;
                let seals = rustix::fs::fcntl_get_seals(&image).ok()?;
                let blocks = stat.stx_blocks.max(1);
                Some(match seals.contains(SEALS) {
                    true => Candidate::Ready(image),
                    false => Candidate::Unfinished { blocks, inode },
                })
            }
            _ => None,
        }
    }

    /// Opens a memfd of this user with the image's name by O_PATH. Queries no other file system,
    /// which could block.
    fn open_named(
        &self,
        folder: &OwnedFd,
        process: i32,
        descriptor: i32,
    ) -> Option<(OwnedFd, rustix::fs::Statx)> {
        let (mut path, mut link) = (Path::<48>::EMPTY, [0u8; MAX_LINK_BYTES]);
        let path = path.write(format_args!("{process}/fd/{descriptor}"))?;
        let length = rustix::fs::readlinkat_raw(folder, path, &mut link[..]).ok()?;
        let name = link.get(..length)?;
        let name = name.strip_prefix(b"/memfd:")?.strip_suffix(b" (deleted)")?;
        if name != self.name.to_bytes() {
            return None;
        }
        // Any file may have this name: the kernel reports its device without opening it.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let image = rustix::fs::openat(folder, path, flags, Mode::empty()).ok()?;
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(&image, c"", flags, StatxFlags::BASIC_STATS).ok()?;
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        let user = rustix::process::geteuid().as_raw();
        (device == self.device && stat.stx_uid == user).then_some((image, stat))
    }
}

/// Opens the same file again. A mapping by a writable description would keep `auto` from starting a
/// reaper.
fn open_again(file: impl AsFd, access: OFlags) -> Result<OwnedFd> {
    let mut path = Path::<48>::EMPTY;
    let number = rustix::fd::AsRawFd::as_raw_fd(&file.as_fd());
    // The thread may have its own descriptor table.
    let path = path
        .write(format_args!("/proc/thread-self/fd/{number}"))
        .ok_or(Errno::NAMETOOLONG)?;
    rustix::fs::openat(CWD, path, access | OFlags::CLOEXEC, Mode::empty())
}

/// Fills an empty image, and seals it.
pub(super) fn make(
    own: &OwnedFd,
    segment: &Segment,
    pagemap: &Pagemap,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<OwnedFd, u32> {
    let (range, offset) = (segment.range(), image_offset(segment, pmd));
    if !is_within_limit(offset + range.len() as u64) {
        return Err(reason::NO_MEMORY);
    }
    rustix::fs::ftruncate(own, offset + range.len() as u64)
        // Before the mapping: another process that truncates it would cause a SIGBUS here.
        .and_then(|()| rustix::fs::fcntl_add_seals(own, SealFlags::SHRINK | SealFlags::GROW))
        .map_err(|_| reason::NO_MEMORY)?;
    copy_build_id(own, segment, offset);
    let staging = StagingArea::reserve(&range, pmd).map_err(|_| reason::NO_MEMORY)?;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    staging
        .map_file(own, offset, prot, true)
        .map_err(|_| reason::NO_MEMORY)?;
    let here = staging.range();
    let whole = blocks(&here, pmd);
    for first in whole.clone().step_by(PAGES_PER_COLLAPSE * pmd) {
        stop.check()?;
        let part = first..whole.end.min(first + PAGES_PER_COLLAPSE * pmd);
        // A collapse needs one present page in each huge page.
        let offsets = part.start - here.start..part.end - here.start;
        memory::populate_each(&staging, offsets, pmd).map_err(|_| reason::NO_MEMORY)?;
        density::collapse(&part, Policy::Segment).map_err(|_| reason::NO_SHARED_HUGE)?;
    }
    for part in (0..range.len()).step_by(pmd) {
        stop.check()?;
        let part = part..range.len().min(part + pmd);
        #[expect(unsafe_code, reason = "reads the program's text")]
        // SAFETY: the area was reserved for the range, and mapped writable.
        let copied = unsafe { staging.copy(&range, part) };
        copied.map_err(|_| reason::GONE)?;
    }
    drop(staging);
    // An image must hold the unchanged text of the file.
    check(pagemap, segment)?;
    rustix::fs::fchmod(own, Mode::RUSR | Mode::XUSR)
        .and_then(|()| rustix::fs::fcntl_add_seals(own, SEALS))
        .and_then(|()| open_again(own, OFlags::RDONLY))
        .map_err(|_| reason::NO_MEMORY)
}

/// Checks that an image and a segment are equal.
fn verify(
    staging: &StagingArea,
    segment: &Segment,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<(), u32> {
    let range = segment.range();
    for part in (0..range.len()).step_by(pmd) {
        stop.check()?;
        let part = part..range.len().min(part + pmd);
        #[expect(unsafe_code, reason = "compares text with its image")]
        // SAFETY: the area was reserved for the range, and is readable. The image is sealed.
        let same = unsafe { staging.equals(&range, part) };
        match same {
            Ok(true) => {}
            Ok(false) => return Err(reason::CHANGED),
            Err(_) => return Err(reason::GONE),
        }
    }
    Ok(())
}

/// Maps a sealed image over a segment, if both are equal.
pub(super) fn attach(
    segment: &Segment,
    image: &OwnedFd,
    pagemap: &Pagemap,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<(), u32> {
    let (range, offset) = (segment.range(), image_offset(segment, pmd));
    let staging = StagingArea::reserve(&range, pmd).map_err(|_| reason::NO_MEMORY)?;
    // With the final protection: an image that may not be executed fails here.
    let prot = ProtFlags::READ | ProtFlags::EXEC;
    staging
        .map_file(image, offset, prot, false)
        .map_err(|errno| match errno {
            Errno::ACCESS | Errno::PERM => reason::NOT_EXECUTABLE,
            _ => reason::NO_MEMORY,
        })?;
    verify(&staging, segment, pmd, stop)?;
    let here = blocks(&staging.range(), pmd);
    if count(pagemap, here.clone(), Pages::Huge).unwrap_or(0) < here.len() / 2 {
        return Err(reason::NO_SHARED_HUGE);
    }
    exclusively(|| {
        check(pagemap, segment)?;
        stop.check()?;
        #[expect(unsafe_code, reason = "maps an image over text")]
        // SAFETY: the segment is still mapped and unchanged, no thread changes that, and the image
        // is equal.
        unsafe { memory::map_over(&range, image, offset) }.map_err(|_| reason::NO_MEMORY)
    })
}
