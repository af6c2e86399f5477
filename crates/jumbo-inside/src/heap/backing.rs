//! Source of a window's memory: [`Backing`].

use rustix::io::{Errno, Result};

use super::memory;
use super::supply::SUPPLY;
use crate::density;
use crate::gather::PendingFree;
use jumbo_sys as sys;

/// Source of fresh, private, zeroed memory at given addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// Mapped and advised; the faults decide on huge pages.
    Advised,
    /// Pages of the pool, limited in number.
    Pool,
}

impl Backing {
    /// Maps `length` bytes at `address`, of the pool whole pages; `EEXIST` if something is there.
    pub(super) fn map(self, address: usize, length: usize) -> Result<()> {
        match self {
            Self::Advised => {
                memory::map(address, length)?;
                // A refusal is counted; the memory is still usable.
                let _ = memory::advise(address, length);
                Ok(())
            }
            Self::Pool => SUPPLY.map(address, length),
        }
    }

    /// Unmaps memory of [`Backing::map`], of the pool whole pages. `leaving` frees large ranges.
    ///
    /// # Safety
    /// `map` mapped the range, and nothing uses its content.
    #[expect(unsafe_code, reason = "unmaps memory")]
    pub(super) unsafe fn unmap(
        self,
        address: usize,
        length: usize,
        leaving: Option<&mut PendingFree>,
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

    /// Discards the content of a range, but not the pool's (`EINVAL`), and keeps its addresses. Parts of
    /// huge pages, of `huge` bytes, are free afterwards.
    ///
    /// # Safety
    /// As for [`Backing::unmap`].
    #[expect(unsafe_code, reason = "discards memory content")]
    pub(super) unsafe fn discard(self, address: usize, length: usize, huge: usize) -> Result<()> {
        match self {
            Self::Pool => Err(Errno::INVAL),
            Self::Advised => {
                density::dropped(&(address..address + length));
                // SAFETY: the caller's promise.
                unsafe { sys::discard_parts(address, length, huge) }
            }
        }
    }
}
