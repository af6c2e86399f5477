//! The measured process: [`run`] executes its `Task`.

use std::io;

use crate::figures::Figures;
use crate::json_child::{die_with_parent, send};
use crate::task::{Action, MemoryTask, Task};
use crate::{Error, files, heap, keeper, latency, life, pool, populate, shmem, text, vmemmap};

/// Executes a task, a JSON text, and prints the figures as JSON.
pub fn run(task: &str) -> Result<(), Error> {
    let task: Task = serde_json::from_str(task).map_err(io::Error::from)?;
    // A keeper outlives the process that measures.
    if let Task::Keep(kept) = task {
        return keeper::keep(kept);
    }
    die_with_parent();
    if let Task::Fragment(size) = task {
        return latency::run_fragmenter(size);
    }
    send(&figures(&task)?)?;
    // The parent examines the process before it ends.
    match task {
        Task::Text(text) if text.stays => drop(io::stdin().read_line(&mut String::new())?),
        Task::Memory(MemoryTask {
            then: Action::End { .. },
            ..
        }) => life::end()?,
        _ => {}
    }
    Ok(())
}

fn figures(task: &Task) -> Result<Figures, Error> {
    match task {
        Task::Load(size) => heap::load(*size),
        Task::SmallFree => heap::small_free(),
        Task::LargePairs => heap::large_pairs(),
        Task::Memory(memory) => life::run(memory),
        Task::Stream(arrays, size, threads, passes) => {
            pool::stream(*arrays, *size, *threads, *passes)
        }
        Task::Exchange(source, way, pages) => pool::exchange(*source, *way, *pages),
        Task::Latency(size) => latency::latency(*size),
        Task::Text(text) => text::text(text),
        Task::File(file) => files::read(file),
        Task::Populate(call, pages, size) => populate::run(*call, *pages, *size),
        Task::Touch(touch) => shmem::touch(touch),
        Task::Describe(huge) => vmemmap::describe(*huge),
        Task::Keep(_) | Task::Fragment(_) => Ok(Figures::new()),
    }
}
