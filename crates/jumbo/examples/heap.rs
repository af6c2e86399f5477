//! Fills a map of boxes, and reads it at random, with the heap of `jumbo run`: `heap [MILLIONS]`.
//! With `JUMBO=off` the C library's allocator serves.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::error::Error;
use std::time::Instant;

use jumbo::Root;
use jumbo::heap::Heap;
use jumbo::status::process::usage;

#[global_allocator]
static HEAP: Heap = Heap;

fn main() -> Result<(), Box<dyn Error>> {
    let millions = std::env::args()
        .nth(1)
        .map_or(Ok(4), |millions| millions.parse::<u64>())?;
    let (mut map, start) = (HashMap::new(), Instant::now());
    let mut state = 1_u64;
    let mut random = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        state >> 40
    };
    for number in 0..millions * 1_000_000 {
        map.insert(random(), Box::new([number; 4]));
    }
    let reads = millions * 2_000_000;
    let found = (0..reads).filter(|_| map.contains_key(&random())).count();
    let took = start.elapsed();
    let memory = usage(&Root::host(), std::process::id())?.total();
    let whose = if HEAP.is_on() {
        "jumbo's heap"
    } else {
        "the C library's heap"
    };
    println!(
        "{whose}: {took:.2?}, {found} of {reads} found, {} of {} in huge pages",
        memory.huge, memory.bytes
    );
    Ok(())
}
