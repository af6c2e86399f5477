//! `jumbo bench populate`: memory made resident by one call, on one thread and on several.
//!
//! Each call has three sides: base pages, as the kernel gives them; huge pages that the program
//! advises itself, on one thread; and `jumbo run`. mmap(2) with MAP_POPULATE leaves no time for
//! advice, so its second side maps, advises and then calls MADV_POPULATE_WRITE.

use std::time::Instant;

use jumbo::units::Bytes;

use crate::claim;
use crate::figures::{Figures, cpu_ms, ms, with};
use crate::group::{self, Group, rows};
use crate::launch::Launch;
use crate::memory::{
    RawBlock, base_pages_only, check_available, footprint, own_memory_in, own_usage,
};
use crate::table::Table;
use crate::task::{AllocCall, PopulateCall, PopulatePages, Task};
use crate::{Error, Settings};

/// Minimum size: `jumbo run` leaves less to the caller.
pub const MIN_SIZE: Bytes = Bytes(256 << 20);

/// Measures the table, with a block of `size` bytes.
pub fn measure(settings: &Settings, size: Bytes) -> Result<Table, Error> {
    check_available(footprint(size))?;
    let table = Table::new("populate", size.to_string(), settings)?;
    let calls = [
        (PopulateCall::Map, "map", "MAP_POPULATE"),
        (PopulateCall::Advise, "advise", "MADV_POPULATE_WRITE"),
        (PopulateCall::Lock, "lock", "mlock"),
        (PopulateCall::Register, "register", "io_uring_register"),
    ];
    let groups = calls.map(|(call, name, what)| {
        let mut group = Group::new(settings, what);
        let advised = match call {
            PopulateCall::Map => PopulateCall::Advise,
            other => other,
        };
        let mut side = |launch, call, pages, claims| {
            group.work(launch, Task::Populate(call, pages, size), size, claims)
        };
        let base = side(Launch::Plain, call, PopulatePages::Base, claim::base(size));
        let huge = claim::huge(size);
        let alone = side(Launch::Plain, advised, PopulatePages::Advised, huge.clone());
        let jumbo = side(Launch::JUMBO, call, PopulatePages::Obtained, huge);
        rows! { group;
            format!("{name}_aa") => what, "call_ms", base / base;
            format!("{name}_base") => what, "call_ms", base / jumbo;
            format!("{name}_huge") => "the same, advised huge", "call_ms", alone / jumbo;
            format!("{name}_cpu") => "its CPU time", "cpu_ms", alone / jumbo;
        }
        group
    });
    group::measure(settings, table, Vec::from(groups))
}

/// [`Task::Populate`]: time of the call, and the memory.
pub(crate) fn run(call: PopulateCall, pages: PopulatePages, size: Bytes) -> Result<Figures, Error> {
    if pages == PopulatePages::Base {
        base_pages_only()?;
    }
    let by = match pages {
        PopulatePages::Advised => AllocCall::MapHuge,
        PopulatePages::Base | PopulatePages::Obtained => AllocCall::Map,
    };
    let made = match call {
        PopulateCall::Map => None,
        _ => Some(RawBlock::take(by, size)?),
    };
    let (before, clock) = (own_usage()?, Instant::now());
    let block = match made {
        None => RawBlock::populated(size)?,
        Some(block) => {
            match call {
                PopulateCall::Lock => block.lock()?,
                PopulateCall::Register => block.register()?,
                PopulateCall::Map | PopulateCall::Advise => {
                    block.advise(libc::MADV_POPULATE_WRITE)?;
                }
            }
            block
        }
    };
    let (took, after) = (clock.elapsed(), own_usage()?);
    let cpu = cpu_ms(after.ru_stime) - cpu_ms(before.ru_stime);
    let memory = own_memory_in(&[block.addresses()])?;
    Ok(with(memory, [("call_ms", ms(took)), ("cpu_ms", cpu)]))
}
