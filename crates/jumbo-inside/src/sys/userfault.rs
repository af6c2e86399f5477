//! Page faults handled by a thread of this process: [`Userfault`].
#![expect(unsafe_code, reason = "ioctls that rustix lacks")]

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, Result};
use rustix::ioctl::{Opcode, opcode};
use rustix::mm::UserfaultfdFlags;

use super::control;

// <linux/userfaultfd.h>
const UFFD_USER_MODE_ONLY: u32 = 1;
const UFFD_API: u64 = 0xAA;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
const UFFDIO_ZEROPAGE_MODE_DONTWAKE: u64 = 1;
const UFFD_EVENT_PAGEFAULT: u8 = 0x12;

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
    /// Number of filled bytes, or a negative errno.
    zeropage: i64,
}

/// Size of `struct uffd_msg`, and the offsets of a fault's address in it.
const MESSAGE_BYTES: usize = 32;
const ADDRESS_OFFSETS: core::ops::Range<usize> = 16..24;

const UFFDIO_API: Opcode = opcode::read_write::<Api>(0xAA, 0x3F);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<Register>(0xAA, 0);
const UFFDIO_UNREGISTER: Opcode = opcode::read::<Range>(0xAA, 1);
const UFFDIO_WAKE: Opcode = opcode::read::<Range>(0xAA, 2);
const UFFDIO_ZEROPAGE: Opcode = opcode::read_write::<Zeropage>(0xAA, 4);

/// Descriptor of userfaultfd(2). A first touch of a registered range waits for [`Userfault::wake`].
/// Once the descriptor is closed, the kernel handles waiting and later faults.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

impl Userfault {
    /// Opens a non-blocking descriptor for faults of user space, which needs no privilege: system
    /// calls on missing pages of a registered range fail with EFAULT.
    ///
    /// # References
    /// userfaultfd(2); Linux 5.11.
    ///
    /// # Errors
    /// EINVAL: a kernel before 5.11; ENOSYS: not configured; EPERM: seccomp; EMFILE.
    pub fn open() -> Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC
            | UserfaultfdFlags::NONBLOCK
            | UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
        // SAFETY: the descriptor affects no memory until a range is registered.
        let this = Self(unsafe { rustix::mm::userfaultfd(flags)? });
        let mut api = Api {
            api: UFFD_API,
            features: 0,
            ioctls: 0,
        };
        // SAFETY: the request reads and writes a `struct uffdio_api`.
        unsafe { control(&this.0, UFFDIO_API, &mut api)? };
        Ok(this)
    }

    /// Registers a range: a touch of a missing page waits for [`Userfault::wake`].
    ///
    /// # References
    /// UFFDIO_REGISTER: ioctl_userfaultfd(2); shared memory: Linux 4.11.
    ///
    /// # Errors
    /// EBUSY: registered elsewhere; EINVAL: not mapped, or not supported; ENOMEM: too many
    /// mappings.
    pub fn register(&self, address: usize, length: usize) -> Result<()> {
        let mut register = Register {
            range: range(address, length),
            mode: UFFDIO_REGISTER_MODE_MISSING,
            ioctls: 0,
        };
        // SAFETY: the request reads and writes a `struct uffdio_register`. The contents stay the
        // same.
        unsafe { control(&self.0, UFFDIO_REGISTER, &mut register).map(drop) }
    }

    /// Reverts [`Userfault::register`]; waiting threads go on.
    ///
    /// # Errors
    /// EINVAL: not mapped; ENOMEM: too many mappings.
    pub fn unregister(&self, address: usize, length: usize) -> Result<()> {
        // SAFETY: the request reads a `struct uffdio_range`. The contents stay the same.
        unsafe { control(&self.0, UFFDIO_UNREGISTER, &mut range(address, length)).map(drop) }
    }

    /// Fills missing pages with zeroes, from `address` up to the first failure. Returns the number
    /// of filled bytes, and the result of the last request. Waiting threads need
    /// [`Userfault::wake`].
    ///
    /// # References
    /// UFFDIO_ZEROPAGE: ioctl_userfaultfd(2).
    ///
    /// # Errors
    /// EEXIST: the page is present; ENOENT: not one registered mapping; ENOMEM: no memory, or the
    /// limit of a memory cgroup; EAGAIN: try again.
    pub fn zero(&self, address: usize, length: usize) -> (usize, Result<()>) {
        let mut done = 0;
        loop {
            let mut zeropage = Zeropage {
                range: range(address + done, length - done),
                mode: UFFDIO_ZEROPAGE_MODE_DONTWAKE,
                zeropage: 0,
            };
            // SAFETY: the request reads and writes a `struct uffdio_zeropage`. It maps zeroes at
            // missing pages of a registered range, as a first touch would.
            let answer = unsafe { control(&self.0, UFFDIO_ZEROPAGE, &mut zeropage) };
            let filled = usize::try_from(zeropage.zeropage).unwrap_or(0);
            done += filled;
            match answer {
                // Filled in part: the next request returns the error.
                Err(Errno::AGAIN) if filled > 0 && done < length => {}
                answer => return (done, answer.map(drop)),
            }
        }
    }

    /// Wakes the threads that wait for pages of the range; they repeat the touch.
    pub fn wake(&self, address: usize, length: usize) {
        // SAFETY: the request reads a `struct uffdio_range`.
        let _ = unsafe { control(&self.0, UFFDIO_WAKE, &mut range(address, length)) };
    }

    /// Returns the address of a waiting touch, or `None` without one.
    ///
    /// # Errors
    /// Those of read(2).
    pub fn next(&self) -> Result<Option<usize>> {
        let mut message = [0u8; MESSAGE_BYTES];
        match rustix::io::read(&self.0, &mut message) {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(errno) => return Err(errno),
            Ok(_) => {}
        }
        let address = message
            .get(ADDRESS_OFFSETS)
            .and_then(<[u8]>::first_chunk)
            .map(|bytes| usize::from_ne_bytes(*bytes));
        Ok(address.filter(|_| message.first() == Some(&UFFD_EVENT_PAGEFAULT)))
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
