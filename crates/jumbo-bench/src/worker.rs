//! The process that is measured, from its first instruction: [`run`] finds the work that it is told.

use std::io;

use serde_json::Value;

use crate::work::{Known, known};
use crate::{Error, exit, fork, free, heap, keeper, pool, shmem, text, vmemmap};

/// All work.
const ALL: [Known; 16] = [
    known::<heap::Load>(),
    known::<heap::SmallFree>(),
    known::<free::Blocks>(),
    known::<free::Ranges>(),
    known::<free::Unmap>(),
    known::<exit::Hold>(),
    known::<fork::Fork>(),
    known::<pool::Stream>(),
    known::<pool::FirstUse>(),
    known::<pool::Exchange>(),
    known::<text::Text>(),
    known::<shmem::Touch>(),
    known::<vmemmap::Describe>(),
    known::<vmemmap::Pin>(),
    known::<vmemmap::TakeGive>(),
    keeper::KEEP,
];

/// Does the work of a task, which is a JSON text of its name and what it is told, and prints the figures, another.
///
/// # Errors
/// [`Error`].
pub fn run(task: &str) -> Result<(), Error> {
    let (name, told): (String, Value) = serde_json::from_str(task).map_err(io::Error::from)?;
    let none = || Error::Corrupt(format!("there is no work named {name:?}"));
    let (_, work) = ALL
        .iter()
        .find(|(known, _)| *known == name)
        .ok_or_else(none)?;
    work(told)
}
