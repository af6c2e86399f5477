//! Locator of this process's counters, for other processes: `jumbo status -p` reads it.

use jumbo_inside::ledger::Locator;

/// Locator of the counters, found by its dynamic symbol; readers may trace this process.
#[unsafe(export_name = "jumbo_slot")]
pub static LOCATOR: Locator = Locator::new();
