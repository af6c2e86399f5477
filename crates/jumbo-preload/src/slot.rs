//! Shows other processes where this one counts: what `jumbo status -p` reads.

use jumbo_inside::ledger::Locator;

/// Found by its name in the library's dynamic symbols; read from outside, by who may trace this process.
#[unsafe(export_name = "jumbo_slot")]
pub static LOCATOR: Locator = Locator::new();
