//! What of this process is in huge pages, by kind of memory, before and after some of it is asked for.
#![forbid(unsafe_code)]

use std::error::Error;

use jumbo::Root;
use jumbo::gather::OwnedMapping;
use jumbo::status::process::Observer;
use jumbo::units::Bytes;

fn show(observer: &Observer, when: &str) -> Result<(), Box<dyn Error>> {
    println!("{when}:");
    for (kind, memory) in observer.usage(std::process::id())?.0 {
        let share = memory.huge_share().unwrap_or(0.0) * 100.0;
        let (kind, bytes, huge) = (kind.name(), memory.bytes, memory.huge);
        println!("  {kind:<6} {bytes:>10} resident, {huge:>8} huge, {share:.1} %");
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let observer = Observer::new(&Root::host())?;
    show(&observer, "at first")?;
    let mut table = OwnedMapping::new(Bytes(64 << 20))?;
    match table.advise_huge() {
        Ok(()) => table.fill(1),
        Err(errno) => println!("no huge pages here: {errno}"),
    }
    show(&observer, "with 64 MiB advised and touched")
}
