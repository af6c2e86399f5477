//! The cost of touching memory: by huge faults and by base ones ([`first_touch`]), and when the
//! host may have taken it back ([`touch_after_a_while`]).

use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

use jumbo::units::{Bytes, PageSize};
use jumbo_host::kernel::Root;

use super::{Block, room, warm};
use crate::Error;
use crate::task::By;

/// The cost of the first touch of a MiB on this host, now: see [`first_touch`].
#[derive(Clone, Copy, Debug)]
pub struct FirstTouch {
    /// By faults on base pages.
    pub base: Duration,
    /// By faults on huge pages.
    pub huge: Duration,
}

/// Measures the first touch of memory, in some ten milliseconds and 8 MiB.
///
/// # Errors
/// There is no such memory, or the kernel had no huge page free: then there is nothing to compare.
pub fn first_touch() -> Result<FirstTouch, Error> {
    let touch = |advice| touch(Bytes(8 << 20), advice).map(|took| took / 8);
    // The first fetches the memory from a virtual machine's host, where it went back to it.
    touch(libc::MADV_HUGEPAGE)?;
    let (mut base, mut huge) = (Duration::MAX, Duration::MAX);
    // The least of a few: what is more was another process's turn.
    for _ in 0..3 {
        huge = huge.min(touch(libc::MADV_HUGEPAGE)?);
        base = base.min(touch(libc::MADV_NOHUGEPAGE)?);
    }
    Ok(FirstTouch { base, huge })
}

/// The cost of touching memory in huge pages: see [`touch_after_a_while`].
#[derive(Clone, Copy, Debug)]
pub struct AfterAWhile {
    /// How much memory.
    pub size: Bytes,
    /// When it had been free for a while.
    pub first: Duration,
    /// Right after it was given back.
    pub again: Duration,
}

/// How much memory is touched: enough that waiting for a host is longer than a turn of another process.
const SIZE: Bytes = Bytes(256 << 20);

/// After this the kernel has reported to a host what became free: it waits two seconds.
const A_WHILE: Duration = Duration::from_secs(3);

/// How often it is measured; the median counts.
const ROUNDS: usize = 3;

/// Measures what touching 256 MiB takes that have been free for some seconds, which the host of a virtual machine may have taken
/// back, against the same memory right after it was given back. It takes some ten seconds, most of it asleep; `progress` is called
/// with the round and the number of rounds.
///
/// # Errors
/// There is no such memory, or there were too few huge pages.
pub fn touch_after_a_while(
    root: &Root,
    progress: impl Fn(usize, usize),
) -> Result<AfterAWhile, Error> {
    room(root, SIZE + SIZE)?;
    let mut times = [[Duration::ZERO; ROUNDS]; 2];
    for round in 0..ROUNDS {
        progress(round, ROUNDS);
        sleep(A_WHILE);
        for times in &mut times {
            times[round] = touch(SIZE, libc::MADV_HUGEPAGE)?;
        }
    }
    times.iter_mut().for_each(|times| times.sort_unstable());
    let [first, again] = times.map(|times| times[ROUNDS / 2]);
    Ok(AfterAWhile {
        size: SIZE,
        first,
        again,
    })
}

/// Touches new memory of `size` bytes under an advice, and gives it back; how long the touch took. It must have come in the pages that
/// were advised, but for an eighth.
fn touch(size: Bytes, advice: libc::c_int) -> Result<Duration, Error> {
    let mut memory = Block::take(By::MapHuge, size)?;
    memory.advise(advice)?;
    let (before, clock) = (warm::own_faults()?, Instant::now());
    memory.touch();
    let (took, faults) = (clock.elapsed(), warm::own_faults()? - before);
    memory.give_back()?;
    let base = rustix::param::page_size() as u64;
    match came_in_huge_pages(size, base, faults) == (advice == libc::MADV_HUGEPAGE) {
        true => Ok(took),
        false => Err(Error::Map(io::Error::from(io::ErrorKind::OutOfMemory))),
    }
}

/// Whether so many faults brought `size` in huge pages, but for an eighth.
fn came_in_huge_pages(size: Bytes, base: u64, faults: u64) -> bool {
    faults < size.0 / PageSize::SIZE_2M.bytes() + size.0 / base / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touch_is_of_the_pages_that_its_faults_say() {
        let is_huge = |faults| came_in_huge_pages(Bytes(8 << 20), 4096, faults);
        assert!(is_huge(4), "one for each huge page");
        assert!(
            is_huge(3 + 200) && !is_huge(2 + 512),
            "an eighth may be in base pages"
        );
        assert!(!is_huge(2048), "one for each base page");
    }
}
