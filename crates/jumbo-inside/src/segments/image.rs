//! One copy of text for all processes of a user that run the file: `take`.
//!
//! The copy is an *image*: a memfd in huge folios, sealed, that each process maps private, to be read and executed. There is
//! no registry and nothing on a file system. Each process that uses an image has a descriptor of it ([`DESCRIPTORS`]), and finds an image in the descriptors of the others, under /proc. So an image goes when its last user goes, however it ends.
//!
//! The name says which part of which file it is, and proves nothing. What is taken was made by this user, cannot be
//! changed any more (its seals), and holds byte for byte what this process runs. A process of another user is not even asked.
//!
//! A maker verifies its own image as well, after it is sealed. Another process of the same user can open any descriptor of this
//! process through /proc/PID/fd, and write until the seal. The seal fails while a writable mapping exists (F_SEAL_WRITE, fcntl(2)).
//!
//! A PMD maps what is alike modulo its size in memory and in the image. So one image serves processes that have the text at
//! addresses that are alike: those of a program with fixed addresses, of one that was aligned (`jumbo text align`), and of
//! libraries that the kernel aligns. Another position-independent program has an image of its own under `--text=shared`, which
//! only a process with the text at the same distance from a PMD's bounds can use; `auto` makes none for it.
//!
//! Two that start at once make one image: each announces its own before it looks for others'; who finds one that is
//! being made waits for it, and of two that are announced that of the lower process ID is made. (Within the few microseconds between
//! looking and beginning both may be made; then later processes take one of them.)

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
use super::guard::alone;
use super::memory::{self, Staging};
use super::{Looking, Stop};
use crate::density::{self, Policy};
use crate::ledger::text_reason as reason;
use crate::proc::{MapsLine, Path, each_mapping};
use crate::standing;
use crate::sync::Deadline;
use crate::sys::{self, Pages};

/// How the names of images begin.
pub const NAME: &str = "jumbo-text";
/// The descriptors by which images are found: far above those that programs count on, and below the usual limit of 1024.
/// One for the program's own text, and some for libraries.
pub const DESCRIPTORS: core::ops::Range<i32> = FIRST..FIRST + 8;
const FIRST: i32 = 960;
/// No process can write to it, or change how long it is.
const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);
/// So many huge pages are collapsed at once: the kernel has all CPUs drain their lists for each call.
const AT_ONCE: usize = 32;
/// The size of one that is not begun yet, but will be.
const ANNOUNCED: u64 = 1;
/// How long another process that makes one may get on with nothing.
const PATIENCE: Duration = Duration::from_millis(200);
/// Maximum time in all for images of other processes: no process can hold up a start for longer.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(3);

/// The name of a segment's image: the file's own name, its device and inode, and which part of it. It has to be known for this
/// long, and with what the kernel adds it must fit where links are read.
type ImageName = Path<200>;
const LINK: usize = 256;

/// Shows an empty image of a segment, for the thread that may fill it later: it has descriptors of its own. Only at the start,
/// when no other thread could miss a number in between.
pub(super) fn reserve(segment: &Segment) {
    let mut name = ImageName::new();
    if let Some(name) = named(segment, &mut name)
        && let Ok(image) = create(name)
    {
        keep(show(&image));
    }
}

/// Moves a segment onto its image, which is made where there is none: true then. The reason where it stays as it is.
pub(super) fn take(
    segment: &Segment,
    looking: &Looking,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<bool, u32> {
    let mut name = ImageName::new();
    let name = named(segment, &mut name).ok_or(reason::NO_MEMORY)?;
    let own = create(name)?;
    let file = rustix::fs::fstat(&own)
        .map_err(|_| reason::NO_MEMORY)?
        .st_dev;
    let mut wanted = Wanted {
        link: name,
        device: (rustix::fs::major(file), rustix::fs::minor(file)),
        size: place(segment, pmd) + segment.len() as u64,
        rejected: [0; REJECTED],
        rejections: 0,
        waiting: 0,
    };
    // Shown before others are looked for. What a thread of ours opens no process sees but by what was reserved.
    let (own, shown) = match stop.is_never() {
        true => {
            let shown = show(&own);
            (own, shown)
        }
        false => (wanted.reserved().unwrap_or(own), None),
    };
    if is_within_limit(wanted.size) {
        let _ = rustix::fs::ftruncate(&own, ANNOUNCED);
    }
    let taken = take_one(&own, &mut wanted, segment, looking, pmd, stop);
    match taken {
        Ok(true) => keep(shown),
        // None that others would wait for; one that is sealed stays as it is.
        _ => withdraw(&own),
    }
    taken
}

/// Makes an image that is not ready one that no process waits for, without memory. Its length may be sealed already.
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

/// Another process's image, or `own`, filled.
fn take_one(
    own: &OwnedFd,
    wanted: &mut Wanted<'_>,
    segment: &Segment,
    looking: &Looking,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<bool, u32> {
    let (mut deadline, mut progress) = (Deadline::after(PATIENCE), 0);
    let end = Deadline::after(SEARCH_TIMEOUT);
    while !end.has_passed() {
        stop.check()?;
        // A thread of ours has no capability in effect otherwise.
        let found = match stop.is_never() {
            true => wanted.find(),
            false => standing::with_capabilities(|| wanted.find()),
        };
        match found {
            Some(Other::Ready(image)) => {
                match attach(segment, &image, looking, pmd, stop) {
                    // It is of what the file was once, or on base pages.
                    Err(reason::CHANGED) if looking.check(segment).is_ok() => wanted.reject(&image),
                    Err(reason::NO_SHARED_HUGE) => wanted.reject(&image),
                    Err(why) => return Err(why),
                    Ok(()) => {
                        if stop.is_never() {
                            // Others find it when its maker has gone.
                            keep(show(&image));
                        }
                        return Ok(false);
                    }
                }
            }
            Some(Other::BeingMade { blocks, inode }) => {
                if wanted.waiting != inode {
                    (deadline, progress) = (Deadline::after(PATIENCE), blocks);
                    wanted.waiting = inode;
                } else if blocks > progress {
                    (deadline, progress) = (Deadline::after(PATIENCE), blocks);
                } else if deadline.has_passed() {
                    // It has got on with nothing: never again for this one.
                    wanted.reject_inode(inode);
                    continue;
                }
                stop.check_before_wait()?;
                pause();
            }
            None => break,
        }
        if wanted.rejections > REJECTED {
            break;
        }
    }
    let image = make(own, segment, looking, pmd, stop)?;
    match attach(segment, &image, looking, pmd, stop) {
        Ok(()) => Ok(true),
        // Another process wrote to it before it was sealed: no process shall find it again.
        Err(reason::CHANGED) if looking.check(segment).is_ok() => {
            let _ = rustix::fs::fchmod(own, Mode::empty());
            Err(reason::TAMPERED)
        }
        Err(why) => Err(why),
    }
}

/// Beyond that limit SIGXFSZ would end the program.
fn is_within_limit(size: u64) -> bool {
    let limit = getrlimit(Resource::Fsize).current;
    limit.is_none_or(|limit| limit >= size)
}

/// The name, and the key: two segments have the same one where they are the same part of the same file.
fn named<'a>(segment: &Segment, name: &'a mut ImageName) -> Option<&'a core::ffi::CStr> {
    let (((major, minor), inode), length) = (segment.file, segment.len());
    let file = core::str::from_utf8(segment.name.bytes()).unwrap_or("");
    let offset = segment.offset;
    name.write(format_args!(
        "{NAME}:{file}:{major:x}-{minor:x}-{inode}-{offset:x}-{length:x}"
    ))
}

/// Where in its image text begins: where it does in its file, if the addresses allow, so that tools that know the file by the
/// image's build ID find the symbols.
fn place(segment: &Segment, pmd: usize) -> u64 {
    let away = (segment.start as u64).wrapping_sub(segment.offset) & (pmd as u64 - 1);
    segment.offset + away
}

/// Puts the file's first page into its image, if this process has it mapped: the kernel finds the build ID there
/// (PERF_RECORD_MISC_MMAP_BUILD_ID of perf_event_open(2), Linux 5.12). Of no consequence where it cannot.
fn identify(own: &OwnedFd, segment: &Segment, place: u64) {
    const PAGE: usize = 4096;
    let mut first = [0usize; PAGE / size_of::<usize>()];
    let is_first = |mapping: &MapsLine| {
        mapping.file() == segment.file
            && mapping.offset == 0
            && place >= PAGE as u64
            && sys::copy_words(mapping.start, &mut first) == Ok(first.len())
    };
    if each_mapping(is_first) == Ok(true) {
        let _ = rustix::io::pwrite(own, memory::bytes(&first), 0);
    }
}

/// A descriptor of an image by which others find it. `None` where none of the numbers is free, or they are above the limit.
fn show(image: &OwnedFd) -> Option<OwnedFd> {
    let shown = rustix::io::fcntl_dupfd_cloexec(image, FIRST).ok();
    shown.filter(|shown| DESCRIPTORS.contains(&rustix::fd::AsRawFd::as_raw_fd(shown)))
}

/// Leaves it open for the rest of the process's life, or until the program closes what it does not know.
fn keep(shown: Option<OwnedFd>) {
    let _ = shown.map(rustix::fd::IntoRawFd::into_raw_fd);
}

fn pause() {
    let time = LOOK.try_into().unwrap_or_default();
    let _ = rustix::thread::nanosleep(&time);
}

/// An empty memfd that can be sealed, and executed: where Linux 6.3 and later would have it said.
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

/// What another process has.
enum Other {
    Ready(OwnedFd),
    /// One that is being filled: 512-byte blocks that are there.
    BeingMade {
        blocks: u64,
        inode: u64,
    },
}

/// What is looked for.
struct Wanted<'a> {
    /// As in the link, without what the kernel puts around it.
    link: &'a core::ffi::CStr,
    /// The kernel's own mount of shared memory: no other file system is ever asked.
    device: (u32, u32),
    size: u64,
    /// Images that hold something else: their inodes, the latest ones.
    rejected: [u64; REJECTED],
    rejections: usize,
    /// The inode of the image that this process waits for; 0: none.
    waiting: u64,
}

const REJECTED: usize = 8;

impl Wanted<'_> {
    /// Does without an image from now on.
    fn reject(&mut self, image: &OwnedFd) {
        self.reject_inode(rustix::fs::fstat(image).map_or(0, |stat| stat.st_ino));
    }

    fn reject_inode(&mut self, inode: u64) {
        if let Some(place) = self.rejected.get_mut(self.rejections % REJECTED) {
            *place = inode;
        }
        self.rejections += 1;
    }

    /// Looks through the processes of this user.
    fn find(&self) -> Option<Other> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(CWD, c"/proc", flags, Mode::empty()).ok()?;
        let (user, own) = (
            rustix::process::geteuid(),
            rustix::process::getpid().as_raw_nonzero().get(),
        );
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut entries = RawDir::new(&folder, &mut buffer);
        let mut being_made = None;
        while let Some(Ok(entry)) = entries.next() {
            let number = entry
                .file_name()
                .to_str()
                .ok()
                .and_then(|name| name.parse::<i32>().ok());
            let Some(number) = number else {
                continue;
            };
            // Who its owner is the kernel says; a process that may do more than its user belongs to root here.
            let stat = rustix::fs::statat(&folder, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW);
            if !stat.is_ok_and(|stat| stat.st_uid == user.as_raw()) {
                continue;
            }
            for descriptor in DESCRIPTORS {
                match self.look(&folder, number, descriptor) {
                    Some(Found::Ready(image)) => return Some(Other::Ready(image)),
                    // What this process has itself serves only when it is whole: it could not be mapped then.
                    Some(Found::Begun { .. }) if number == own => {}
                    // Two that have not begun: the one with the lower number does.
                    Some(Found::Begun { blocks: 0, .. }) if number > own => {}
                    // The one that this process waits for already, or the first.
                    Some(Found::Begun { blocks, inode })
                        if being_made.is_none() || inode == self.waiting =>
                    {
                        being_made = Some(Other::BeingMade { blocks, inode });
                    }
                    Some(Found::Begun { .. }) | None => {}
                }
            }
        }
        being_made
    }

    /// This process's own that is shown, empty, to be filled.
    fn reserved(&self) -> Option<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(CWD, c"/proc", flags, Mode::empty()).ok()?;
        let own = rustix::process::getpid().as_raw_nonzero().get();
        DESCRIPTORS.into_iter().find_map(|descriptor| {
            let (there, stat) = self.named(&folder, own, descriptor)?;
            let is_empty = stat.stx_size == 0 && stat.stx_mode & 0o200 != 0;
            let there = is_empty.then_some(there)?;
            open_again(&there, OFlags::RDWR).ok()
        })
    }

    /// Looks at one descriptor of one process.
    fn look(&self, folder: &OwnedFd, process: i32, descriptor: i32) -> Option<Found> {
        let (there, stat) = self.named(folder, process, descriptor)?;
        // `jumbo text images --remove` takes the mode away.
        let is_wanted = stat.stx_mode & 0o400 != 0 && !self.rejected.contains(&stat.stx_ino);
        match stat.stx_size {
            ANNOUNCED if is_wanted => Some(Found::Begun {
                blocks: 0,
                inode: stat.stx_ino,
            }),
            size if size == self.size && is_wanted => {
                let image = open_again(&there, OFlags::RDONLY).ok()?;
                let seals = rustix::fs::fcntl_get_seals(&image).ok()?;
                Some(match seals.contains(SEALS) {
                    true => Found::Ready(image),
                    false => Found::Begun {
                        blocks: stat.stx_blocks.max(1),
                        inode: stat.stx_ino,
                    },
                })
            }
            _ => None,
        }
    }

    /// A memfd of this user that has the right name, not opened yet. Nothing here waits for a file system of another's.
    fn named(
        &self,
        folder: &OwnedFd,
        process: i32,
        descriptor: i32,
    ) -> Option<(OwnedFd, rustix::fs::Statx)> {
        let (mut path, mut link) = (Path::<48>::new(), [0u8; LINK]);
        let path = path.write(format_args!("{process}/fd/{descriptor}"))?;
        let length = rustix::fs::readlinkat_raw(folder, path, &mut link[..]).ok()?;
        let name = link.get(..length)?;
        let name = name.strip_prefix(b"/memfd:")?.strip_suffix(b" (deleted)")?;
        if name != self.link.to_bytes() {
            return None;
        }
        // The name may be that of any file: what it is says the kernel, without opening it.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let there = rustix::fs::openat(folder, path, flags, Mode::empty()).ok()?;
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(&there, c"", flags, StatxFlags::BASIC_STATS).ok()?;
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        let user = rustix::process::geteuid().as_raw();
        (device == self.device && stat.stx_uid == user).then_some((there, stat))
    }
}

/// A descriptor of another process that has the right name.
enum Found {
    /// 512-byte blocks that are there; 0: it is announced.
    Begun {
        blocks: u64,
        inode: u64,
    },
    Ready(OwnedFd),
}

/// The same file, by another description. A mapping of one that is open for writing would keep `auto` from starting a reaper.
fn open_again(file: impl AsFd, access: OFlags) -> Result<OwnedFd> {
    let mut path = Path::<48>::new();
    let number = rustix::fd::AsRawFd::as_raw_fd(&file.as_fd());
    // Of this thread: it may have descriptors of its own.
    let path = path
        .write(format_args!("/proc/thread-self/fd/{number}"))
        .ok_or(Errno::NAMETOOLONG)?;
    rustix::fs::openat(CWD, path, access | OFlags::CLOEXEC, Mode::empty())
}

/// Fills an empty image and seals it.
pub(super) fn make(
    own: &OwnedFd,
    segment: &Segment,
    looking: &Looking,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<OwnedFd, u32> {
    let (range, place) = (segment.range(), place(segment, pmd));
    if !is_within_limit(place + range.len() as u64) {
        return Err(reason::NO_MEMORY);
    }
    rustix::fs::ftruncate(own, place + range.len() as u64)
        // From here on: another process that cut it would end this one by SIGBUS.
        .and_then(|()| rustix::fs::fcntl_add_seals(own, SealFlags::SHRINK | SealFlags::GROW))
        .map_err(|_| reason::NO_MEMORY)?;
    identify(own, segment, place);
    let staging = Staging::reserve(&range, pmd).map_err(|_| reason::NO_MEMORY)?;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    staging
        .map_file(own, place, prot, true)
        .map_err(|_| reason::NO_MEMORY)?;
    let here = staging.range();
    let whole = blocks(&here, pmd);
    for first in whole.clone().step_by(AT_ONCE * pmd) {
        stop.check()?;
        let part = first..whole.end.min(first + AT_ONCE * pmd);
        // A collapse takes one page of each huge one at least.
        let offsets = part.start - here.start..part.end - here.start;
        memory::bring_in(&staging, offsets, pmd).map_err(|_| reason::NO_MEMORY)?;
        density::collapse(&part, Policy::Segment).map_err(|_| reason::NO_SHARED_HUGE)?;
    }
    for part in (0..range.len()).step_by(pmd) {
        stop.check()?;
        let part = part..range.len().min(part + pmd);
        #[expect(unsafe_code, reason = "reads the program's text")]
        // SAFETY: the area stands in for the range, and was mapped to be written.
        let copied = unsafe { staging.copy(&range, part) };
        copied.map_err(|_| reason::GONE)?;
    }
    drop(staging);
    // What was copied is what the file has, or it is no image of the file.
    looking.check(segment)?;
    rustix::fs::fchmod(own, Mode::RUSR | Mode::XUSR)
        .and_then(|()| rustix::fs::fcntl_add_seals(own, SEALS))
        .and_then(|()| open_again(own, OFlags::RDONLY))
        .map_err(|_| reason::NO_MEMORY)
}

/// Whether an image holds what a segment does.
fn verify(
    staging: &Staging,
    segment: &Segment,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<(), u32> {
    let range = segment.range();
    for part in (0..range.len()).step_by(pmd) {
        stop.check()?;
        let part = part..range.len().min(part + pmd);
        #[expect(unsafe_code, reason = "compares text with its image")]
        // SAFETY: the area stands in for the range, and can be read. The image is sealed.
        let same = unsafe { staging.equals(&range, part) };
        match same {
            Ok(true) => {}
            Ok(false) => return Err(reason::CHANGED),
            Err(_) => return Err(reason::GONE),
        }
    }
    Ok(())
}

/// Maps an image in the place of a segment, if it holds the same. The image is sealed.
pub(super) fn attach(
    segment: &Segment,
    image: &OwnedFd,
    looking: &Looking,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<(), u32> {
    let (range, place) = (segment.range(), place(segment, pmd));
    let staging = Staging::reserve(&range, pmd).map_err(|_| reason::NO_MEMORY)?;
    // As it will be: whether it may be executed is found out here.
    let prot = ProtFlags::READ | ProtFlags::EXEC;
    staging
        .map_file(image, place, prot, false)
        .map_err(|errno| match errno {
            Errno::ACCESS | Errno::PERM => reason::NOT_EXECUTABLE,
            _ => reason::NO_MEMORY,
        })?;
    verify(&staging, segment, pmd, stop)?;
    let here = blocks(&staging.range(), pmd);
    if looking.pages(here.clone(), Pages::Huge).unwrap_or(0) < here.len() / 2 {
        return Err(reason::NO_SHARED_HUGE);
    }
    alone(|| {
        looking.check(segment)?;
        stop.check()?;
        #[expect(unsafe_code, reason = "maps an image over text")]
        // SAFETY: the segment is mapped as it was, no page of it was changed, no thread changes that, and the image holds the same.
        unsafe { memory::map_over(&range, image, place) }.map_err(|_| reason::NO_MEMORY)
    })
}
