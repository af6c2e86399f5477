//! A buffer pool, as a database has one: blocks in huge pages, of which the one that was used longest ago makes room.
//!
//! The pages are those of the kernel's hugetlb pool where it has enough, else THPs, which take no privilege.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use jumbo::kernel::{Root, hugetlb};
use jumbo::pool::{Error, Hugetlb, OwnedPage, Placement, Pool, Thp};
use jumbo::units::Pages;

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
fn pool(root: &Root) -> Result<(Pool, &'static str), Box<dyn std::error::Error>> {
    let placement = Placement::of_thread()?;
    if let Some(size) = hugetlb::default_size(root)? {
        let pool = Pool::new(Hugetlb::new(root, size)?, placement);
        match pool.resize(BUFFERS).stopped {
            None => return Ok((pool, "hugetlb pages")),
            Some(why) => println!("not from the kernel's pool: {why}"),
        }
    }
    let pool = Pool::new(Thp::new(root)?, placement);
    match pool.resize(BUFFERS).stopped {
        None => Ok((pool, "THPs")),
        Some(why) => Err(why.into()),
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (pool, source) = pool(&Root::host())?;
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
    Ok(())
}
