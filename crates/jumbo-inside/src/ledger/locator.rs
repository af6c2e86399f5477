//! [`Locator`]: how another process finds the [`Slot`] of this one when no launcher has a ledger.
//!
//! The preload library exports one as a data symbol. A reader that may read this process's memory follows
//! it to the slot; nothing inside the process looks at it.

use core::sync::atomic::AtomicPtr;

use super::{MAGIC, Slot, stats};

/// What stands behind [`Locator::SYMBOL`].
#[repr(C)]
#[derive(Debug)]
pub struct Locator {
    /// Which layout of [`Slot`] the process was built with.
    pub magic: u32,
    /// The size of that slot.
    pub size: u32,
    /// Where the address of the slot is: it moves when the process joins a ledger, and when it forks.
    pub slot: &'static AtomicPtr<Slot>,
}

impl Locator {
    /// The name under which the preload library exports it.
    pub const SYMBOL: &'static str = "jumbo_slot";

    /// The locator of this process's slot.
    #[expect(clippy::new_without_default, reason = "made once, in a static")]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a slot is some hundred bytes"
    )]
    pub const fn new() -> Self {
        Self {
            magic: MAGIC,
            size: size_of::<Slot>() as u32,
            slot: &stats::SLOT,
        }
    }
}
