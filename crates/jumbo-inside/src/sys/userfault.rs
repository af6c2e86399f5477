//! Page faults that a thread of this process answers: [`Userfault`].
#![expect(unsafe_code, reason = "ioctls that rustix lacks")]

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, Result};
use rustix::ioctl::{Opcode, opcode};
use rustix::mm::UserfaultfdFlags;

use super::control;

/// `UFFD_USER_MODE_ONLY` of <linux/userfaultfd.h>, which rustix does not name.
const USER_MODE_ONLY: u32 = 1;
/// `UFFD_API`.
const API: u64 = 0xAA;
const REGISTER_MODE_MISSING: u64 = 1;
const ZEROPAGE_MODE_DONTWAKE: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    length: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Zeropage {
    range: Range,
    mode: u64,
    /// How many bytes were filled, or a negative errno.
    filled: i64,
}

/// `struct uffd_msg`: the event, and of a fault flags, address and thread.
const MESSAGE: usize = 32;
const ADDRESS: core::ops::Range<usize> = 16..24;

const UFFDIO_API: Opcode = opcode::read_write::<Api>(0xAA, 0x3F);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<Register>(0xAA, 0);
const UFFDIO_UNREGISTER: Opcode = opcode::read::<Range>(0xAA, 1);
const UFFDIO_WAKE: Opcode = opcode::read::<Range>(0xAA, 2);
const UFFDIO_ZEROPAGE: Opcode = opcode::read_write::<Zeropage>(0xAA, 4);

/// Ranges of this process's memory whose first touches wait for an answer. Where it is closed no range is one any more,
/// and all who wait go on: the kernel then does what it would have done.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

impl Userfault {
    /// One that answers faults of user space alone, which takes no privilege: a system call that touches memory of such a
    /// range that is not there fails with EFAULT. Reads do not wait.
    ///
    /// # References
    /// userfaultfd(2); Linux 5.11.
    ///
    /// # Errors
    /// EINVAL: a kernel before 5.11; ENOSYS: one without it; EPERM: seccomp; EMFILE.
    pub fn open() -> Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC
            | UserfaultfdFlags::NONBLOCK
            | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
        // SAFETY: the descriptor watches no memory until it is told to.
        let this = Self(unsafe { rustix::mm::userfaultfd(flags)? });
        let mut api = Api {
            api: API,
            features: 0,
            ioctls: 0,
        };
        // SAFETY: the request reads and writes a `struct uffdio_api`.
        unsafe { control(&this.0, UFFDIO_API, &mut api)? };
        Ok(this)
    }

    /// From now on who touches a page of the range that is not there waits for [`Userfault::wake`].
    ///
    /// # References
    /// UFFDIO_REGISTER: ioctl_userfaultfd(2); of shared memory Linux 4.11.
    ///
    /// # Errors
    /// EBUSY: another one has it; EINVAL: nothing mapped, or nothing that can be; ENOMEM: too many mappings.
    pub fn register(&self, address: usize, length: usize) -> Result<()> {
        let mut register = Register {
            range: range(address, length),
            mode: REGISTER_MODE_MISSING,
            ioctls: 0,
        };
        // SAFETY: the request reads and writes a `struct uffdio_register`. What the memory holds stays as it is.
        unsafe { control(&self.0, UFFDIO_REGISTER, &mut register).map(drop) }
    }

    /// The end of that; who waits goes on.
    ///
    /// # Errors
    /// EINVAL: nothing is mapped there; ENOMEM: too many mappings.
    pub fn unregister(&self, address: usize, length: usize) -> Result<()> {
        // SAFETY: the request reads a `struct uffdio_range`. What the memory holds stays as it is.
        unsafe { control(&self.0, UFFDIO_UNREGISTER, &mut range(address, length)).map(drop) }
    }

    /// Puts pages of zeroes there from `address` on, until it comes to one that it cannot. How many bytes it filled, and the
    /// answer to the last of its calls. Who waits for them goes on with [`Userfault::wake`].
    ///
    /// # References
    /// UFFDIO_ZEROPAGE: ioctl_userfaultfd(2).
    ///
    /// # Errors
    /// EEXIST: the page is there; ENOENT: the range is not of one registered mapping; ENOMEM: no memory, or a memory
    /// cgroup's limit; EAGAIN: try again.
    pub fn zero(&self, address: usize, length: usize) -> (usize, Result<()>) {
        let mut done = 0;
        loop {
            let mut zeropage = Zeropage {
                range: range(address + done, length - done),
                mode: ZEROPAGE_MODE_DONTWAKE,
                filled: 0,
            };
            // SAFETY: the request reads and writes a `struct uffdio_zeropage`. It maps zeroes where nothing is, in a range that
            // was registered: what the first touch finds without it.
            let answer = unsafe { control(&self.0, UFFDIO_ZEROPAGE, &mut zeropage) };
            let filled = usize::try_from(zeropage.filled).unwrap_or(0);
            done += filled;
            match answer {
                // Part of it: the next call says why not more.
                Err(Errno::AGAIN) if filled > 0 && done < length => {}
                answer => return (done, answer.map(drop)),
            }
        }
    }

    /// Has those who wait for a page of the range try again.
    pub fn wake(&self, address: usize, length: usize) {
        // SAFETY: the request reads a `struct uffdio_range`.
        let _ = unsafe { control(&self.0, UFFDIO_WAKE, &mut range(address, length)) };
    }

    /// The address of a touch that waits; `None`: there is none now.
    ///
    /// # Errors
    /// Those of read(2).
    pub fn next(&self) -> Result<Option<usize>> {
        let mut message = [0u8; MESSAGE];
        match rustix::io::read(&self.0, &mut message) {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(errno) => return Err(errno),
            Ok(_) => {}
        }
        let address = message
            .get(ADDRESS)
            .and_then(<[u8]>::first_chunk)
            .map(|bytes| usize::from_ne_bytes(*bytes));
        Ok(address.filter(|_| message.first() == Some(&EVENT_PAGEFAULT)))
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn range(address: usize, length: usize) -> Range {
    Range {
        start: address as u64,
        length: length as u64,
    }
}
