//! A buffer pool, as a database has one: blocks in huge pages, of which the one that was used longest ago makes room.
//!
//! The pages are those of the kernel's hugetlb pool where it has enough, else THPs, which take no privilege. Then the descriptors that
//! a buffer pool of 1 TiB would have, by address space alone: 64 bytes for each 4 KiB buffer, and next to nothing for huge ones.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use jumbo::Root;
use jumbo::pool::{Error, Hugetlb, OwnedPage, Placement, Pool, Thp};
use jumbo::units::{Bytes, Order, PageSize, Pages};
use jumbo::vmemmap::{Geometry, Vmemmap};

const BUFFERS: Pages = Pages(4);

/// The blocks in memory, the one that was used last at the end.
struct Buffers {
    pool: Arc<Pool>,
    blocks: VecDeque<(u64, OwnedPage)>,
    reads: u64,
}

impl Buffers {
    fn get(&mut self, block: u64) -> Result<&[u8], Error> {
        let at = self.blocks.iter().position(|(number, _)| *number == block);
        let found = match at.and_then(|at| self.blocks.remove(at)) {
            Some(found) => found,
            None => (block, self.read(block)?),
        };
        Ok(self.blocks.push_back_mut(found).1.bytes())
    }

    /// What a file would give: a block that begins with its number.
    fn read(&mut self, block: u64) -> Result<OwnedPage, Error> {
        let mut page = match self.pool.take_owned() {
            Err(Error::Exhausted(_)) if self.blocks.pop_front().is_some() => {
                self.pool.take_owned()?
            }
            taken => taken?,
        };
        page.bytes_mut()[..8].copy_from_slice(&block.to_le_bytes());
        self.reads += 1;
        Ok(page)
    }
}

/// A pool of that many pages, and what they are.
fn pool() -> Result<(Pool, &'static str), Box<dyn std::error::Error>> {
    let placement = Placement::of_thread()?;
    match Hugetlb::new(PageSize::SIZE_2M) {
        Ok(source) => {
            let pool = Pool::new(source, placement);
            match pool.resize(BUFFERS).stopped {
                None => return Ok((pool, "hugetlb pages")),
                Some(why) => println!("not from the kernel's pool: {why}"),
            }
        }
        Err(why) => println!("not from the kernel's pool: {why}"),
    }
    let pool = Pool::new(Thp::new()?, placement);
    match pool.resize(BUFFERS).stopped {
        None => Ok((pool, "THPs")),
        Some(why) => Err(why.into()),
    }
}

/// What the descriptors of so many addresses take, in huge pages and described in full.
fn describe(root: &Root, all: Bytes) -> Result<(), Box<dyn std::error::Error>> {
    const START: u64 = 1 << 40;
    let geometry = Geometry::of_host()?;
    let (huge, base) = (geometry.section(), geometry.base());
    let size = huge.size(base);
    let vmemmap = Vmemmap::new(START..START + all.0, geometry)?;
    let pages = all.whole_pages(size).0;
    let address = |page: u64| START + page * size.bytes();
    for page in 0..pages {
        vmemmap.prepare(address(page), huge)?;
    }
    let resident = || vmemmap.resident(root).map(|resident| resident.total());
    let without = Bytes(geometry.descriptors(huge).0 * pages);
    println!(
        "{all} in pages of {size}: {} of descriptors instead of {without}",
        resident()?
    );

    // A part of it in buffers of base pages, and huge again.
    let part = pages / 1024;
    for page in 0..part {
        vmemmap.split(address(page), Order(0))?;
    }
    println!(
        "{} of it in pages of {base}: {}",
        Bytes(part * size.bytes()),
        resident()?
    );
    for page in 0..part {
        vmemmap.merge(address(page), huge)?;
    }
    println!("and merged again: {}", resident()?);
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Root::host();
    let (pool, source) = pool()?;
    println!("{BUFFERS} {source} of {}", pool.page_size());
    let mut buffers = Buffers {
        pool: Arc::new(pool),
        blocks: VecDeque::new(),
        reads: 0,
    };
    for block in [1, 2, 3, 1, 4, 5, 1, 2] {
        assert_eq!(buffers.get(block)?[..8], u64::to_le_bytes(block));
    }
    println!("8 uses of 5 blocks, {} of them read", buffers.reads);
    describe(&root, Bytes(1 << 40))
}
