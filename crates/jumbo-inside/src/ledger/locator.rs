//! [`Locator`]: the address of this process's [`Slot`], for readers without a ledger.
//!
//! The preload library exports it as a data symbol. A process that may read this one's memory
//! follows it to the slot; this process does not use it.

use core::sync::atomic::AtomicPtr;

use super::{MAGIC, Slot, stats};

/// Layout of the symbol [`Locator::SYMBOL`].
#[repr(C)]
#[derive(Debug)]
pub struct Locator {
    /// Version of the layout of [`Slot`].
    pub magic: u32,
    /// Size of a slot.
    pub size: u32,
    /// Pointer to the slot: it changes when the process joins a ledger, and in a forked child.
    pub slot: &'static AtomicPtr<Slot>,
}

impl Locator {
    /// Name of the exported symbol.
    pub const SYMBOL: &'static str = "jumbo_slot";

    /// Creates the locator of this process's slot.
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
