//! Sums the numbers of an array file (f64, little endian) on huge pages: `sum_file FILE`.
#![expect(unsafe_code, reason = "promises that nobody writes to the file")]

use std::error::Error;
use std::fs::File;
use std::time::Instant;

use jumbo::file::Map;
use jumbo::units::Bytes;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: sum_file FILE")?;
    let (file, start) = (File::open(&path)?, Instant::now());
    // SAFETY: an array file is written once.
    let mapped = unsafe { Map::open(&file, true)? };
    let map = match mapped.is_huge() {
        true => mapped,
        false => Map::copy(&file, 0)?,
    };
    let opened = start.elapsed();
    let numbers = map.chunks_exact(size_of::<f64>());
    let sum: f64 = numbers
        .filter_map(|bytes| bytes.try_into().ok().map(f64::from_le_bytes))
        .sum();
    println!(
        "{path}: {} {}, {} of it huge, opened in {opened:?}; sum {sum}",
        Bytes(map.len() as u64),
        map.method(),
        map.huge()
    );
    Ok(())
}
