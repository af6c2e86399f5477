//! The process that is measured, from its first instruction: [`run`] finds the work that it is
//! told.

use std::io;

use serde_json::Value;

use crate::work::{Known, read};
use crate::{Error, exit, fork, free, heap, keeper, pool, shmem, text, vmemmap};

/// All work but that of a keeper, which outlives the process that measures.
const ALL: [&dyn Known; 15] = [
    &heap::LOAD,
    &heap::SMALL_FREE,
    &free::BLOCKS,
    &free::RANGES,
    &free::UNMAP,
    &exit::HOLD,
    &fork::FORK,
    &pool::STREAM,
    &pool::FIRST_USE,
    &pool::EXCHANGE,
    &text::TEXT,
    &shmem::TOUCH,
    &vmemmap::DESCRIBE,
    &vmemmap::PIN,
    &vmemmap::TAKE_GIVE,
];

/// Does the work of a task, which is a JSON text of its name and what it is told, and prints the
/// figures, another.
///
/// # Errors
/// [`Error`].
pub fn run(task: &str) -> Result<(), Error> {
    let (name, told): (String, Value) = serde_json::from_str(task).map_err(io::Error::from)?;
    if name == keeper::KEEP {
        return keeper::keep(read(told)?);
    }
    let work = ALL.into_iter().find(|work| work.name() == name);
    work.ok_or_else(|| Error::Corrupt(format!("there is no work named {name:?}")))?
        .begin(told)
}
