//! Where a window's memory comes from: [`Backing`].

use rustix::io::{Errno, Result};

use super::memory;
use super::supply::SUPPLY;
use crate::density;
use crate::gather::Leaving;

/// A source of fresh, private, zeroed memory at given addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// Mapped and advised; what it becomes is seen when it is touched.
    Advised,
    /// Pages of the pool, of which there is a limited number.
    Pool,
}

impl Backing {
    /// Maps `length` bytes at `address`, which must be free (`EEXIST`): of the pool, whole pages.
    pub(super) fn map(self, address: usize, length: usize) -> Result<()> {
        match self {
            Self::Advised => {
                memory::map(address, length)?;
                // A refusal is counted; the memory is as good as the program's own would be.
                let _ = memory::advise(address, length);
                Ok(())
            }
            Self::Pool => SUPPLY.map(address, length),
        }
    }

    /// Unmaps what [`Backing::map`] mapped, or a part of it: whole pages of the pool. A large range is handed to
    /// `leaving`, where there is one.
    ///
    /// # Safety
    /// `map` mapped the range, and nothing uses what it holds.
    #[expect(unsafe_code, reason = "unmaps memory")]
    pub(super) unsafe fn unmap(
        self,
        address: usize,
        length: usize,
        leaving: Option<&mut Leaving>,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            if self == Self::Pool {
                return SUPPLY.unmap(address, length);
            }
            density::forget_private(&(address..address + length));
            if leaving.is_some_and(|leaving| leaving.take(address, length)) {
                return Ok(());
            }
            memory::unmap(address, length)
        }
    }

    /// Gives the memory of a range back and keeps its addresses. The pool takes whole pages alone.
    ///
    /// # Errors
    /// EINVAL of the pool; those of madvise(2), of locked memory for one.
    ///
    /// # Safety
    /// As for [`Backing::unmap`].
    #[expect(unsafe_code, reason = "drops what memory holds")]
    pub(super) unsafe fn discard(self, address: usize, length: usize) -> Result<()> {
        match self {
            Self::Pool => Err(Errno::INVAL),
            Self::Advised => {
                density::dropped(&(address..address + length));
                // SAFETY: the caller's promise.
                unsafe { memory::discard(address, length) }
            }
        }
    }
}
