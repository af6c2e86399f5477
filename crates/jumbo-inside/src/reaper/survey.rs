//! What the address space holds, looked at from inside the program: [`survey()`], [`is_mapped`],
//! [`is_device`].
//!
//! While the sibling shares the memory, whatever hangs on it outlives the program: for about a
//! millisecond, but after whoever waits has been answered. So `auto` starts no sibling where such a
//! thing is there. Read from /proc with buffers on the stack; where /proc cannot be read there is no
//! sibling.

use rustix::fd::BorrowedFd;

use rustix::io::Result;

use super::mapping::{File, Lines, Mapping};
use super::{State, locks, proc};

/// What [`survey`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Private writable memory without a file, in bytes of address space.
    pub private: usize,
    /// What would outlive the program, if anything.
    pub outlives: Option<State>,
}

/// How the name of an io_uring begins: as much of it as a [`Mapping`] keeps.
const RING: &[u8] = b"anon_inode:[io_u";

/// Lists this process's mappings, and the locks that its files may have.
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
    if found.outlives.is_none() && locks::any(are_mapped)? {
        found.outlives = Some(State::LockedFile);
    }
    Ok(found)
}

/// Whether a file is mapped by this process.
pub fn is_mapped(stat: &rustix::fs::Stat) -> bool {
    each_mapping(|mapping| mapping.file() == identity(stat)).unwrap_or(true)
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
    let Ok(path) = core::ffi::CStr::from_bytes_until_nul(&path) else {
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

fn each_mapping(mut each: impl FnMut(&Mapping) -> bool) -> Result<bool> {
    let mut lines = Lines::default();
    proc::each_byte(proc::open(c"/proc/self/maps")?, |byte| {
        Ok(lines.push(byte).is_some_and(|mapping| each(&mapping)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    #[test]
    fn a_mapped_file_and_a_device_are_told() {
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

    #[test]
    fn private_memory_is_counted() {
        let before = survey().unwrap().private;
        let memory = vec![1u8; 64 << 20];
        let after = survey().unwrap().private;
        // Other tests run beside this one.
        assert!(memory.len() == 64 << 20 && after > before / 2 && after >= 64 << 20);
    }
}
