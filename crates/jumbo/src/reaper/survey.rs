//! What the address space holds, looked at from inside the program: [`survey`], [`is_locked`].
//!
//! While the sibling shares the memory, whatever hangs on it outlives the program: for about a
//! millisecond, but after whoever waits has been answered. So `auto` starts no sibling where such a
//! thing is there. Read from /proc with buffers on the stack; where /proc cannot be read there is no
//! sibling.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};

use super::State;
use super::mapping::{Lines, Mapping};

/// What [`survey`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Private writable memory without a file, in bytes of address space.
    pub private: usize,
    /// What would outlive the program, if anything.
    pub outlives: Option<State>,
    /// Some file of this host has a lock or a lease that belongs to an open file (flock(2), fcntl(2)'s
    /// F_OFD_SETLK and F_SETLEASE): mapping it later would be such a thing.
    pub locks: bool,
}

/// How the name of an io_uring begins: as much of it as a [`Mapping`] keeps.
const RING: &[u8] = b"anon_inode:[io_u";

/// A file as the kernel names it in /proc/PID/maps and in /proc/locks: device and inode.
type File = ((u64, u64), u64);

/// Lists this process's mappings.
///
/// # Errors
/// /proc cannot be read.
pub fn survey() -> Result<Survey> {
    let mut found = Survey::default();
    each_mapping(|mapping| {
        if mapping.is_private_anonymous() {
            if mapping.writable {
                found.private += mapping.end - mapping.start;
            }
        } else if found.outlives.is_none() {
            found.outlives = outliving(mapping);
        }
        false
    })?;
    let mut mapped = false;
    each_locked(|files| {
        found.locks = true;
        mapped = mapped || each_mapping(|mapping| files.contains(&file(mapping)))?;
        Ok(mapped)
    })?;
    if mapped {
        found.outlives = found.outlives.or(Some(State::LockedFile));
    }
    Ok(found)
}

/// Whether a file has a lock that belongs to an open file, and so to its mappings.
pub fn is_locked(stat: &rustix::fs::Stat) -> bool {
    each_locked(|files| Ok(files.contains(&identity(stat)))).unwrap_or(true)
}

/// Whether a file is mapped by this process.
pub fn is_mapped(stat: &rustix::fs::Stat) -> bool {
    each_mapping(|mapping| file(mapping) == identity(stat)).unwrap_or(true)
}

/// Whether mappings of an open file would outlive the program as a device's do: it is one, or has no
/// type, as what is made by other calls than open(2) has none (a VFIO device, a virtual CPU).
pub fn is_device(descriptor: BorrowedFd<'_>, stat: &rustix::fs::Stat) -> bool {
    use rustix::fs::FileType;
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

/// Whether it is an io_uring: its end cancels what is under way, as the program's end does, whoever has
/// mapped it.
fn is_ring(descriptor: BorrowedFd<'_>) -> bool {
    let mut path = *b"/proc/self/fd/\0\0\0\0\0\0\0\0\0\0\0";
    let mut name = [0u8; 32];
    let number = rustix::path::DecInt::from_fd(descriptor);
    let number = number.as_bytes();
    let start = b"/proc/self/fd/".len();
    let Some(place) = path.get_mut(start..start + number.len()) else {
        return false;
    };
    place.copy_from_slice(number);
    let Ok(path) = std::ffi::CStr::from_bytes_until_nul(&path) else {
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

fn file(mapping: &Mapping) -> File {
    (mapping.device, mapping.inode)
}

fn outliving(mapping: &Mapping) -> Option<State> {
    let named = |name: &[u8]| mapping.is_named(name);
    // File systems that are mounted there.
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

fn open(path: &std::ffi::CStr) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::open(path, flags, Mode::empty())
}

/// Calls `each` with every byte of a file, until it says that it has seen enough.
fn each_byte(path: &std::ffi::CStr, mut each: impl FnMut(u8) -> Result<bool>) -> Result<bool> {
    let file = open(path)?;
    let mut buffer = [0u8; 2048];
    loop {
        match rustix::io::read(&file, &mut buffer) {
            Ok(0) => return Ok(false),
            Ok(length) => {
                for byte in buffer.iter().take(length) {
                    if each(*byte)? {
                        return Ok(true);
                    }
                }
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

fn each_mapping(mut each: impl FnMut(&Mapping) -> bool) -> Result<bool> {
    let mut lines = Lines::default();
    each_byte(c"/proc/self/maps", |byte| {
        Ok(lines.push(byte).is_some_and(|mapping| each(&mapping)))
    })
}

/// Calls `each` with the files that have locks of open files, some at a time.
fn each_locked(mut each: impl FnMut(&[File]) -> Result<bool>) -> Result<bool> {
    let (mut files, mut count) = ([((0, 0), 0); 32], 0);
    let (mut line, mut length) = ([0u8; 128], 0);
    let enough = each_byte(c"/proc/locks", |byte| {
        if byte != b'\n' {
            if let Some(place) = line.get_mut(length) {
                *place = byte;
                length += 1;
            }
            return Ok(false);
        }
        let locked = locked_file(line.get(..length).unwrap_or_default());
        length = 0;
        if let (Some(file), Some(place)) = (locked, files.get_mut(count)) {
            *place = file;
            count += 1;
        }
        if count < files.len() {
            return Ok(false);
        }
        count = 0;
        each(&files)
    })?;
    let rest = files.get(..count).unwrap_or_default();
    Ok(enough || (!rest.is_empty() && each(rest)?))
}

/// The file of a line of /proc/locks (proc_locks(5)) whose lock belongs to an open file. Locks of fcntl(2)'s
/// F_SETLK belong to the process and end with it.
fn locked_file(line: &[u8]) -> Option<File> {
    let mut words = line
        .split(|byte| *byte == b' ')
        .filter(|word| !word.is_empty());
    let kind = words.nth(1)?;
    if ![b"FLOCK".as_slice(), b"OFDLCK", b"LEASE"].contains(&kind) {
        return None;
    }
    let mut numbers = words.nth(3)?.split(|byte| *byte == b':');
    let mut number = |radix: u32| {
        let digits = std::str::from_utf8(numbers.next()?).ok()?;
        u64::from_str_radix(digits, radix).ok()
    };
    Some(((number(16)?, number(16)?), number(10)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    #[test]
    fn locks_of_open_files_are_told_from_those_of_processes() {
        let flock = locked_file(b"1: FLOCK  ADVISORY  WRITE 1234 fe:0a:5678 0 EOF");
        assert_eq!(flock, Some(((0xfe, 0x0a), 5678)));
        let ofd = locked_file(b"12: OFDLCK ADVISORY  READ -1 00:19:7 100 200");
        assert_eq!(ofd, Some(((0, 0x19), 7)));
        let lease = locked_file(b"3: LEASE  ACTIVE    READ  12 00:19:8 0 EOF");
        assert_eq!(lease, Some(((0, 0x19), 8)));
        for other in [
            "1: POSIX  ADVISORY  WRITE 1234 fe:0a:5678 0 EOF",
            "1: -> FLOCK  ADVISORY  WRITE 1234 fe:0a:5678 0 EOF",
            "1: FLOCK",
            "",
        ] {
            assert_eq!(locked_file(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn a_locked_file_is_found_once_it_is_mapped() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        assert!(!is_locked(&stat) && !is_mapped(&stat) && !is_device(file.as_fd(), &stat));
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        assert!(is_locked(&stat) && survey().unwrap().locks);
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

    #[test]
    fn private_memory_is_counted() {
        let before = survey().unwrap().private;
        let memory = vec![1u8; 64 << 20];
        let after = survey().unwrap().private;
        // Other tests run beside this one.
        assert!(memory.len() == 64 << 20 && after > before / 2 && after >= 64 << 20);
    }
}
