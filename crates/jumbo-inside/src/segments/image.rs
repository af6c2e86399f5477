//! One copy of text for all processes of a user that run the file: [`take`].
//!
//! The copy is an *image*: a memfd in huge folios, sealed, that each process maps private, to be read and executed. There is
//! no registry and nothing on a file system. Each process that uses an image has a descriptor of it ([`FIRST`] and a few
//! more), and finds an image in the descriptors of the others, under /proc. So an image goes when its last user goes, however it ends.
//!
//! The name says which part of which file it is, and proves nothing. What is taken was made by this user, cannot be
//! changed any more (its seals), and holds byte for byte what this process runs. A process of another user is not even asked.
//!
//! Two that start at once make one image: each shows its own, still empty, before it looks for others'; who finds one that is
//! being made waits for it, and of two empty ones that of the lower process ID is made. (Within the few microseconds between
//! looking and beginning both may be made; then later processes take one of them.)

use core::mem::MaybeUninit;
use core::time::Duration;

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, MemfdFlags, Mode, OFlags, RawDir, SealFlags, StatxFlags};
use rustix::io::{Errno, Result};
use rustix::mm::ProtFlags;

use super::find::{Segment, blocks};
use super::memory::{self, Staging};
use super::{Looking, Stop};
use crate::ledger::text_reason as reason;
use crate::proc::Path;
use crate::sync::Deadline;
use crate::sys::{self, Pages};

/// How the names of images begin.
pub const NAME: &str = "jumbo-text";
/// The descriptors by which images are found: far above those that programs count on, and below the usual limit of 1024.
const FIRST: i32 = 960;
/// So many are looked at in each process: the program's own text and some libraries.
const DESCRIPTORS: i32 = 8;
/// Nobody can write to it, or change how long it is.
const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);
/// How long another process may take to make one.
const PATIENCE: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(3);

/// The name of a segment's image: the file's own name, its device and inode, and which part of it. It has to be known for this
/// long, and with what the kernel adds it must fit where links are read.
type ImageName = Path<200>;
const LINK: usize = 256;

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
    let wanted = Wanted {
        link: name,
        device: (rustix::fs::major(file), rustix::fs::minor(file)),
        size: (segment.start & (pmd - 1)) + segment.len(),
    };
    // Shown before others are looked for.
    let own = match rustix::io::fcntl_dupfd_cloexec(&own, FIRST) {
        Ok(shown) => shown,
        // Too low a limit: others cannot find it, and it serves this process.
        Err(_) => own,
    };
    let deadline = Deadline::after(PATIENCE);
    loop {
        stop.check()?;
        match wanted.find() {
            Some(Other::Ready(image)) => {
                drop(own);
                return attach(segment, &image, looking, pmd, stop).map(|()| {
                    // It stays open, so that others find it when its maker has gone.
                    keep(image);
                    false
                });
            }
            Some(Other::BeingMade) if !deadline.has_passed() => {
                stop.check_before_wait()?;
                pause();
            }
            _ => break,
        }
    }
    let image = make(own, segment, looking, pmd, stop)?;
    attach(segment, &image, looking, pmd, stop)?;
    keep(image);
    Ok(true)
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

/// Leaves a descriptor open for the rest of the process's life, or until the program closes what it does not know.
fn keep(image: OwnedFd) {
    let shown = match rustix::fd::AsRawFd::as_raw_fd(&image) {
        number if number >= FIRST => Ok(image),
        _ => rustix::io::fcntl_dupfd_cloexec(&image, FIRST),
    };
    if let Ok(shown) = shown {
        let _ = rustix::fd::IntoRawFd::into_raw_fd(shown);
    }
}

fn pause() {
    let time = LOOK.try_into().unwrap_or_default();
    let _ = rustix::thread::nanosleep(&time);
}

/// An empty memfd that can be sealed, and executed: where Linux 6.3 and later would have it said.
fn create(name: &core::ffi::CStr) -> core::result::Result<OwnedFd, u32> {
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
    BeingMade,
}

/// What is looked for.
struct Wanted<'a> {
    /// As in the link, without what the kernel puts around it.
    link: &'a core::ffi::CStr,
    /// The kernel's own mount of shared memory: no other file system is ever asked.
    device: (u32, u32),
    size: usize,
}

impl Wanted<'_> {
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
        let mut being_made = false;
        while let Some(Ok(entry)) = entries.next() {
            let number = entry
                .file_name()
                .to_str()
                .ok()
                .and_then(|name| name.parse::<i32>().ok());
            let Some(number) = number.filter(|number| *number != own) else {
                continue;
            };
            // Who its owner is the kernel says; a process that may do more than its user belongs to root here.
            let stat = rustix::fs::statat(&folder, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW);
            if !stat.is_ok_and(|stat| stat.st_uid == user.as_raw()) {
                continue;
            }
            for descriptor in FIRST..FIRST + DESCRIPTORS {
                match self.look(&folder, number, descriptor) {
                    Some(Found::Ready(image)) => return Some(Other::Ready(image)),
                    // Two that have not begun: the one with the lower number does.
                    Some(Found::Empty) => being_made |= number < own,
                    Some(Found::Begun) => being_made = true,
                    None => {}
                }
            }
        }
        being_made.then_some(Other::BeingMade)
    }

    /// Looks at one descriptor of one process. Nothing here waits for a file system of another's.
    fn look(&self, folder: &OwnedFd, process: i32, descriptor: i32) -> Option<Found> {
        let (mut path, mut link) = (Path::<48>::new(), [0u8; LINK]);
        let path = path.write(format_args!("{process}/fd/{descriptor}"))?;
        let length = rustix::fs::readlinkat_raw(folder, path, &mut link[..]).ok()?;
        let name = link
            .get(..length)?
            .strip_prefix(b"/memfd:")?
            .strip_suffix(b" (deleted)")?;
        if name != self.link.to_bytes() {
            return None;
        }
        // The name may be that of any file: what it is says the kernel, without opening it.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let there = rustix::fs::openat(folder, path, flags, Mode::empty()).ok()?;
        let asked = StatxFlags::UID | StatxFlags::MODE | StatxFlags::SIZE;
        let stat = rustix::fs::statx(
            &there,
            c"",
            AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC,
            asked,
        )
        .ok()?;
        let user = rustix::process::geteuid().as_raw();
        if (stat.stx_dev_major, stat.stx_dev_minor) != self.device || stat.stx_uid != user {
            return None;
        }
        // `jumbo text images --remove` takes the mode away.
        if stat.stx_mode & 0o400 == 0 {
            return None;
        }
        if stat.stx_size == 0 {
            return Some(Found::Empty);
        }
        if stat.stx_size != self.size as u64 {
            return None;
        }
        let image = reopen(&there).ok()?;
        let seals = rustix::fs::fcntl_get_seals(&image).ok()?;
        Some(match seals.contains(SEALS) {
            true => Found::Ready(image),
            false => Found::Begun,
        })
    }
}

/// A descriptor of another process that has the right name.
enum Found {
    Empty,
    Begun,
    Ready(OwnedFd),
}

/// The same file, to be read: a mapping of one that is open for writing would keep `auto` from starting a reaper.
fn reopen(file: impl AsFd) -> Result<OwnedFd> {
    let mut path = Path::<48>::new();
    let number = rustix::fd::AsRawFd::as_raw_fd(&file.as_fd());
    let path = path
        .write(format_args!("/proc/self/fd/{number}"))
        .ok_or(Errno::NAMETOOLONG)?;
    rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Fills an empty image and seals it.
fn make(
    own: OwnedFd,
    segment: &Segment,
    looking: &Looking,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<OwnedFd, u32> {
    let range = segment.range();
    let head = range.start & (pmd - 1);
    rustix::fs::ftruncate(&own, (head + range.len()) as u64).map_err(|_| reason::NO_MEMORY)?;
    let staging = Staging::reserve(&range, pmd).map_err(|_| reason::NO_MEMORY)?;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    staging
        .map_file(&own, head as u64, prot, true)
        .map_err(|_| reason::NO_MEMORY)?;
    let here = staging.range();
    let whole = blocks(&here, pmd);
    let mut next = 0;
    while next < range.len() {
        stop.check()?;
        // Up to the next bound of a block: what a collapse has cleared is copied to while the processor's caches have it.
        let part = next..range
            .len()
            .min((here.start + next + 1).next_multiple_of(pmd) - here.start);
        if whole.contains(&(here.start + part.start)) {
            // A collapse takes one page at least.
            memory::bring_in(&staging, part.clone(), pmd);
            sys::collapse(here.start + part.start, pmd).map_err(|_| reason::NO_SHARED_HUGE)?;
        }
        next = part.end;
        #[expect(unsafe_code, reason = "reads the program's text")]
        // SAFETY: the area stands in for the range, and was mapped to be written.
        let copied = unsafe { staging.copy(&range, part) };
        copied.map_err(|_| reason::GONE)?;
    }
    drop(staging);
    // What was copied is what the file has, or it is no image of the file.
    looking.check(segment)?;
    let sealed = rustix::fs::fchmod(&own, Mode::RUSR | Mode::XUSR)
        .and_then(|()| rustix::fs::fcntl_add_seals(&own, SEALS))
        .and_then(|()| reopen(&own));
    let image = sealed.map_err(|_| reason::NO_MEMORY)?;
    // Shown before the first one goes.
    rustix::io::fcntl_dupfd_cloexec(&image, FIRST).or(Ok(image))
}

/// Maps an image in the place of a segment, if it holds the same.
fn attach(
    segment: &Segment,
    image: &OwnedFd,
    looking: &Looking,
    pmd: usize,
    stop: &Stop,
) -> core::result::Result<(), u32> {
    let range = segment.range();
    let head = (range.start & (pmd - 1)) as u64;
    let staging = Staging::reserve(&range, pmd).map_err(|_| reason::NO_MEMORY)?;
    // As it will be: whether it may be executed is found out here.
    let prot = ProtFlags::READ | ProtFlags::EXEC;
    staging
        .map_file(image, head, prot, false)
        .map_err(|errno| match errno {
            Errno::ACCESS | Errno::PERM => reason::NOT_EXECUTABLE,
            _ => reason::NO_MEMORY,
        })?;
    for part in (0..range.len()).step_by(pmd) {
        stop.check()?;
        let part = part..range.len().min(part + pmd);
        #[expect(unsafe_code, reason = "compares text with its image")]
        // SAFETY: the area stands in for the range. The image is sealed.
        let same = unsafe { staging.equals(&range, part) };
        match same {
            Ok(true) => {}
            Ok(false) => return Err(reason::CHANGED),
            Err(_) => return Err(reason::GONE),
        }
    }
    let here = blocks(&staging.range(), pmd);
    if looking.pages(here.clone(), Pages::Huge).unwrap_or(0) < here.len() / 2 {
        return Err(reason::NO_SHARED_HUGE);
    }
    looking.check(segment)?;
    stop.check()?;
    #[expect(unsafe_code, reason = "maps an image over text")]
    // SAFETY: the segment is mapped as it was, no page of it was changed, and the image holds the same.
    unsafe { memory::map_over(&range, image, head) }.map_err(|_| reason::NO_MEMORY)
}
