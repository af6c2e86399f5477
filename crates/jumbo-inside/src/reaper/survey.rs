//! Survey of the address space from inside the program: [`survey()`], [`is_mapped`], [`is_device`],
//! [`is_written`].
//!
//! Resources bound to the memory outlive the program while the reaper shares it: about a
//! millisecond, but past the end of the parent's wait. So `auto` starts no reaper in a process with
//! such a resource, nor without /proc, which is read with buffers on the stack.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;

use rustix::fd::BorrowedFd;
use rustix::io::Result;

use super::{State, locks};
use crate::watch::{self, Job, Stop};
use jumbo_sys::maps::{File, MapsLine};
use jumbo_sys::proc::{Path, each_mapping, each_mapping_on_small_stack};

/// Result of [`survey`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Bytes of address space in private writable memory without a file.
    pub private: usize,
    /// A resource that would outlive the program.
    pub outlives: Option<State>,
}

/// Prefix of the ledger's name that a [`MapsLine`] keeps.
const LEDGER: &[u8] = b"/memfd:jumbo-led";

/// Prefix of an io_uring's name that a [`MapsLine`] keeps.
const RING: &[u8] = b"anon_inode:[io_u";

crate::one_page! {
    /// Set if the background scan found no locked file that is mapped here.
    static IS_LIST_FREE: AtomicBool = AtomicBool::new(false);
}
/// Set once the program maps a file. A lock outlives it by a mapping alone, and files of which the
/// kernel and the loader map parts have been closed without a lock.
static MAPS_FILES: AtomicBool = AtomicBool::new(false);
static JOB: Job = Job::new(4, scan_locks, |_| ());

/// Starts a background scan of the kernel's list of locks, which takes long. The next [`survey()`]
/// uses its result if it is complete. The caller must record files that are locked and mapped from
/// now on.
pub fn survey_soon() {
    IS_LIST_FREE.store(false, Ordering::Relaxed);
    watch::begin(&JOB, Duration::ZERO);
}

/// Records that the program maps a file.
#[inline(always)]
pub fn maps_file() {
    MAPS_FILES.store(true, Ordering::Relaxed);
}

fn scan_locks(_stop: &Stop) -> Option<Duration> {
    let is_free = locks::any_listed(are_mapped) == Ok(false);
    IS_LIST_FREE.store(is_free, Ordering::Release);
    None
}

/// Discards the parent's scan in the child of a fork.
pub(super) fn forked() {
    IS_LIST_FREE.store(false, Ordering::Relaxed);
}

fn is_any_locked() -> Result<bool> {
    let is_free = IS_LIST_FREE.swap(false, Ordering::Acquire);
    Ok(!is_free && locks::any_listed(are_mapped)? || locks::any_of_descriptors(are_mapped)?)
}

/// Reads this process's mappings and, if there are `min_private` bytes of private memory, the locks
/// of its files.
///
/// # Errors
/// /proc is not readable.
pub fn survey(min_private: usize) -> Result<Survey> {
    let mut found = Survey::default();
    let mut written = false;
    each_mapping(|mapping| {
        if mapping.is_private_anonymous() {
            if mapping.writable {
                found.private += mapping.end - mapping.start;
            }
        } else if found.outlives.is_none() {
            found.outlives = outliving(mapping);
            written = written || holds_writer(mapping);
        }
        false
    })?;
    if found.outlives.is_none() && found.private >= min_private && is_any_locked()? {
        found.outlives = Some(State::LockedFile);
    }
    if found.outlives.is_none() && written {
        found.outlives = Some(State::WrittenFile);
    }
    Ok(found)
}

/// Reports whether a resource would outlive the program in another process that shares the memory:
/// a mapping, on a small stack; otherwise a lock of a file that the program mapped, in the kernel's
/// list, which takes longer.
pub fn would_outlive(is_mapping: bool) -> bool {
    if !is_mapping {
        return MAPS_FILES.load(Ordering::Relaxed) && locks::any_listed(are_mapped).unwrap_or(true);
    }
    let mut before = 0;
    let is_found = each_mapping_on_small_stack(|mapping| {
        // The segments of a library follow each other.
        let is_new = core::mem::replace(&mut before, mapping.inode) != mapping.inode;
        !mapping.is_private_anonymous()
            && (outliving(mapping).is_some() || is_new && holds_writer(mapping))
    });
    is_found.unwrap_or(true)
}

/// Reports whether this process maps a file.
pub fn is_mapped(stat: &rustix::fs::Stat) -> bool {
    each_mapping(|mapping| mapping.file() == identity(stat)).unwrap_or(true)
}

/// Reports whether an open file is a device or a socket, or has no type: files of other calls than
/// open(2) have none (a VFIO device, a virtual CPU).
pub fn is_device(descriptor: BorrowedFd<'_>, stat: &rustix::fs::Stat) -> bool {
    use rustix::fs::FileType;
    /// Device number of /dev/zero.
    const ZERO: (u32, u32) = (1, 5);
    let device = (
        rustix::fs::major(stat.st_rdev),
        rustix::fs::minor(stat.st_rdev),
    );
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::CharacterDevice => device != ZERO,
        FileType::BlockDevice | FileType::Socket => true,
        FileType::Unknown => !is_ring(descriptor),
        _ => false,
    }
}

/// Reports whether a mapping of an open file keeps the file open for writing: it cannot be executed
/// (ETXTBSY), leased or sealed then.
pub fn is_written(descriptor: BorrowedFd<'_>, stat: &rustix::fs::Stat) -> bool {
    use rustix::fs::{FileType, OFlags};
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let flags = rustix::fs::fcntl_getfl(descriptor);
    is_file && flags.is_ok_and(|flags| flags.intersects(OFlags::WRONLY | OFlags::RDWR))
}

/// Reports whether a mapping keeps its file open for writing, by the permissions of its link in
/// /proc/self/map_files (Linux 3.3). False if another thread has unmapped it.
fn holds_writer(mapping: &MapsLine) -> bool {
    use rustix::fs::{AtFlags, Mode};
    // Shared memory without a path, and the ledger.
    let nameless = [b"/dev/zero".as_slice(), b"/anon_hugepage", RING];
    let ours = mapping.is_named(LEDGER);
    if mapping.inode == 0 || ours || nameless.into_iter().any(|name| mapping.is_named(name)) {
        return false;
    }
    let (start, end) = (mapping.start, mapping.end);
    let mut path = Path::<64>::EMPTY;
    let Some(path) = path.write(format_args!("/proc/self/map_files/{start:x}-{end:x}")) else {
        return true;
    };
    let link = rustix::fs::statat(rustix::fs::CWD, path, AtFlags::SYMLINK_NOFOLLOW);
    match link {
        Ok(link) => Mode::from_raw_mode(link.st_mode).contains(Mode::WUSR),
        Err(rustix::io::Errno::NOENT) => false,
        Err(_) => mapping.writable && !mapping.private,
    }
}

/// Reports whether the file is an io_uring: the program's end cancels its requests, even if another
/// process maps it.
fn is_ring(descriptor: BorrowedFd<'_>) -> bool {
    let mut name = [0u8; 32];
    let number = rustix::fd::AsRawFd::as_raw_fd(&descriptor);
    let mut path = Path::<64>::EMPTY;
    let Some(path) = path.write(format_args!("/proc/self/fd/{number}")) else {
        return false;
    };
    let read = rustix::fs::readlinkat_raw(rustix::fs::CWD, path, &mut name[..]);
    read.is_ok_and(|length| {
        name.get(..length)
            .is_some_and(|name| name.starts_with(RING))
    })
}

fn identity(stat: &rustix::fs::Stat) -> File {
    let major = rustix::fs::major(stat.st_dev);
    let minor = rustix::fs::minor(stat.st_dev);
    ((major.into(), minor.into()), stat.st_ino)
}

fn are_mapped(files: &[File]) -> Result<bool> {
    each_mapping(|mapping| files.contains(&mapping.file()))
}

fn outliving(mapping: &MapsLine) -> Option<State> {
    let named = |name: &[u8]| mapping.is_named(name);
    // File systems mounted below /dev.
    let ordinary = named(b"/dev/zero") || named(b"/dev/shm/") || named(b"/dev/hugepages/");
    if named(b"/[aio]") {
        Some(State::Aio)
    } else if named(b"/SYSV") {
        Some(State::SysvSegment)
    } else if named(RING) {
        None
    } else if (named(b"/dev/") && !ordinary)
        || [b"anon_inode:".as_slice(), b"/dmabuf:", b"socket:"]
            .into_iter()
            .any(named)
    {
        Some(State::Device)
    } else {
        None
    }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "maps a file")]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    #[test]
    fn a_mapped_file_and_a_device_are_detected() {
        let file = tempfile::tempfile().unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        assert!(!is_mapped(&stat) && !is_device(file.as_fd(), &stat));
        let program = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(is_mapped(&rustix::fs::fstat(&program).unwrap()));
        let device = |path| {
            let file = std::fs::File::open(path).unwrap();
            is_device(file.as_fd(), &rustix::fs::fstat(&file).unwrap())
        };
        assert!(device("/dev/null") && !device("/dev/zero"));
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(is_device(
            socket.as_fd(),
            &rustix::fs::fstat(&socket).unwrap()
        ));
    }

    /// Returns [`holds_writer`] of the mapping that starts there.
    fn holds_writer_at(at: usize) -> bool {
        let mut found = None;
        let is_there = |mapping: &MapsLine| {
            found = (mapping.start == at).then(|| holds_writer(mapping));
            found.is_some()
        };
        assert!(each_mapping(is_there).unwrap());
        found.unwrap()
    }

    #[test]
    fn a_mapping_that_keeps_a_file_open_for_writing_is_detected() {
        use rustix::mm::{MapFlags, ProtFlags};
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let reader = std::fs::File::open(file.path()).unwrap();
        let stat = rustix::fs::fstat(&reader).unwrap();
        assert!(is_written(file.as_file().as_fd(), &stat) && !is_written(reader.as_fd(), &stat));
        for (file, written) in [(file.as_file(), true), (&reader, false)] {
            for flags in [MapFlags::SHARED, MapFlags::PRIVATE] {
                // SAFETY: a new mapping at an address of the kernel's choice replaces none.
                let at = unsafe {
                    rustix::mm::mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, flags, file, 0)
                };
                // It stays mapped: the kernel caches the link of an address.
                let at = at.unwrap().expose_provenance();
                assert_eq!(holds_writer_at(at), written, "{flags:?}");
            }
        }
        let name = format!("/memfd:{}", crate::ledger::Ledger::NAME);
        assert!(name.as_bytes().starts_with(LEDGER));
    }

    #[test]
    fn private_memory_is_counted() {
        let before = survey(0).unwrap().private;
        let memory = vec![1u8; 64 << 20];
        let after = survey(0).unwrap().private;
        // Other tests may free memory meanwhile.
        assert!(memory.len() == 64 << 20 && after > before / 2 && after >= 64 << 20);
    }
}
