//! Shared memory of the program's own on huge pages, whatever the host's controls say: `shared_buffers [MIB]`.
#![forbid(unsafe_code)]

use std::error::Error;
use std::thread;
use std::time::Instant;

use jumbo::shmem::{Blocks, Region, Rung};
use jumbo::units::Bytes;

/// One page of a database's buffers.
const PAGE: usize = 8 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    let mib = std::env::args()
        .nth(1)
        .map_or(Ok(256), |mib| mib.parse::<u64>())?;
    let size = Bytes(mib << 20);
    // From the highest rung down: pages of the kernel's pool, then what any user can have.
    let builder = Region::builder(size).capacity(Bytes(2 * size.0));
    let mut buffers = builder.up_to(Rung::Hugetlb).build()?;
    let standing = buffers.standing();
    println!("{size} on the rung {:?}", standing.rung);
    for (rung, why) in &standing.refused {
        println!("  not {rung:?}: {why}");
    }

    // Four writers share it; the region has their bytes as atomics.
    let pages = buffers.size().0 / PAGE as u64;
    thread::scope(|scope| {
        for writer in 0..4u8 {
            let buffers = &buffers;
            scope.spawn(move || {
                for page in (u64::from(writer)..pages).step_by(4) {
                    let at = usize::try_from(page).unwrap_or(0) * PAGE;
                    let _ = buffers.write(at, &[writer; PAGE]);
                }
            });
        }
    });
    let collapsed = buffers.collapse(Blocks::Whole)?;
    let huge = buffers.huge().unwrap_or_default();
    println!("{huge} of it huge: {collapsed:?}");

    // A cache that is emptied gives its pages back, and one that grows keeps its addresses.
    buffers.punch(0..PAGE * 8)?;
    buffers.grow(Bytes(size.0 + (2 << 20)))?;
    let mut page = [1; PAGE];
    buffers.read(0, &mut page)?;
    let start = Instant::now();
    buffers.free()?;
    println!(
        "emptied: {}; freed in {:?}",
        page == [0; PAGE],
        start.elapsed()
    );
    Ok(())
}
