//! Frees memory of the program's own with all its CPUs: `gather [MIB]`.
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::Instant;

use jumbo::gather::{Gather, OwnedMapping, Tunables};
use jumbo::units::Bytes;

const MAPPING: u64 = 64 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mib = std::env::args()
        .nth(1)
        .map_or(Ok(1024), |mib| mib.parse::<u64>())?;
    let mut tables = Vec::new();
    while (tables.len() as u64) * MAPPING < mib << 20 {
        let mut table = OwnedMapping::new(Bytes(MAPPING))?;
        // One thread frees huge pages as fast as several do. A kernel without them refuses.
        let _ = table.advise_base();
        table.fill(1);
        tables.push(table);
    }
    let (count, start) = (tables.len(), Instant::now());
    let mut gather = Gather::new(Tunables::default());
    for table in tables {
        gather.free(table);
    }
    let freed = gather.finish()?;
    println!(
        "freed {} in {count} mappings by {} threads in {:?}",
        Bytes(freed.bytes),
        freed.threads,
        start.elapsed()
    );
    Ok(())
}
