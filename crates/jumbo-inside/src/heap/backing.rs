//! Where a window's memory comes from: [`Backing`].

use rustix::io::Result;

use super::memory;
use super::supply::SUPPLY;

/// A source of fresh, private, zeroed memory at given addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// Mapped and advised; what it becomes is seen when it is touched.
    Advised,
    /// Pages of the pool, of which there is a limited number.
    Pool,
}

impl Backing {
    /// Maps `length` bytes at `address`, which must be free (`EEXIST`), and says whether they are advised
    /// memory. The pool takes whole pages.
    pub(super) fn map(self, address: usize, length: usize) -> Result<bool> {
        match self {
            Self::Advised => {
                memory::map(address, length)?;
                // A refusal is counted; the memory is as good as the program's own would be.
                Ok(memory::advise(address, length).is_ok())
            }
            Self::Pool => SUPPLY.bring(address, length).map(|()| false),
        }
    }

    /// Unmaps what [`Backing::map`] mapped, or a part of it: whole pages of the pool.
    pub(super) fn unmap(self, address: usize, length: usize) -> Result<()> {
        match self {
            Self::Advised => memory::unmap(address, length),
            #[expect(unsafe_code, reason = "unmaps memory")]
            // SAFETY: the window asks, about pages that it got from `map` and that are in no block.
            Self::Pool => unsafe { SUPPLY.give(address, length) },
        }
    }
}
