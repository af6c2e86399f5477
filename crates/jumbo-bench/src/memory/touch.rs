//! Cost of touching memory: by huge and by base page faults ([`first_touch`]), and when the host
//! may have reclaimed it ([`touch_after_a_while`]).

use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

use jumbo::units::{Bytes, PageSize};

use super::{RawBlock, check_available, own_usage};
use crate::Error;
use crate::task::AllocCall;

/// Cost of the first touch of 1 MiB on this host: see [`first_touch`].
#[derive(Clone, Copy, Debug)]
pub struct FirstTouch {
    /// Time by base page faults.
    pub base: Duration,
    /// Time by huge page faults.
    pub huge: Duration,
}

/// Measures the first touch of 8 MiB, in some ten milliseconds.
///
/// # Errors
/// The memory is not available, or no huge page is free: nothing to compare.
pub fn first_touch() -> Result<FirstTouch, Error> {
    let touch = |advice| touch(Bytes(8 << 20), advice).map(|took| took / 8);
    // The first touch fetches the memory from the host of a virtual machine.
    touch(libc::MADV_HUGEPAGE)?;
    let (mut base, mut huge) = (Duration::MAX, Duration::MAX);
    // The minimum of three: other processes may run meanwhile.
    for _ in 0..3 {
        huge = huge.min(touch(libc::MADV_HUGEPAGE)?);
        base = base.min(touch(libc::MADV_NOHUGEPAGE)?);
    }
    Ok(FirstTouch { base, huge })
}

/// Cost of touching memory in huge pages: see [`touch_after_a_while`].
#[derive(Clone, Copy, Debug)]
pub struct AfterAWhile {
    /// Size of the memory.
    pub size: Bytes,
    /// Time after it had been free for a while.
    pub first: Duration,
    /// Time right after it was freed.
    pub again: Duration,
}

/// Size of the touched memory: enough for more than a time slice of another process.
const TOUCHED_BYTES: Bytes = Bytes(256 << 20);

/// Pause after which the kernel has reported free memory to the host: it waits two seconds.
const REPORTING_DELAY: Duration = Duration::from_secs(3);

const ROUNDS: usize = 3;

/// Measures the touch of 256 MiB that have been free for some seconds, so that the host of a
/// virtual machine may have reclaimed them, and again right after they were freed. Takes some ten
/// seconds, most of them asleep. Calls `progress` with the round and the number of rounds.
///
/// # Errors
/// The memory is not available, or too few huge pages are free.
pub fn touch_after_a_while(progress: impl Fn(usize, usize)) -> Result<AfterAWhile, Error> {
    check_available(TOUCHED_BYTES + TOUCHED_BYTES)?;
    let mut times = [[Duration::ZERO; ROUNDS]; 2];
    for round in 0..ROUNDS {
        progress(round, ROUNDS);
        sleep(REPORTING_DELAY);
        for times in &mut times {
            times[round] = touch(TOUCHED_BYTES, libc::MADV_HUGEPAGE)?;
        }
    }
    times.iter_mut().for_each(|times| times.sort_unstable());
    let [first, again] = times.map(|times| times[ROUNDS / 2]);
    Ok(AfterAWhile {
        size: TOUCHED_BYTES,
        first,
        again,
    })
}

/// Times a touch of `size` bytes; at least 7/8 must come in pages of the advised size.
fn touch(size: Bytes, advice: libc::c_int) -> Result<Duration, Error> {
    let mut memory = RawBlock::take(AllocCall::MapHuge, size)?;
    memory.advise(advice)?;
    let (before, clock) = (own_usage()?.ru_minflt, Instant::now());
    memory.touch();
    let (took, faults) = (clock.elapsed(), own_usage()?.ru_minflt - before);
    memory.give_back()?;
    let base = rustix::param::page_size() as u64;
    match came_in_huge_pages(size, base, faults.unsigned_abs()) == (advice == libc::MADV_HUGEPAGE) {
        true => Ok(took),
        false => Err(Error::Map(io::Error::from(io::ErrorKind::OutOfMemory))),
    }
}

/// Reports whether at least 7/8 of `size` came in huge pages, by the number of faults.
fn came_in_huge_pages(size: Bytes, base: u64, faults: u64) -> bool {
    faults < size.0 / PageSize::SIZE_2M.bytes() + size.0 / base / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_size_of_a_touch_follows_from_its_faults() {
        let is_huge = |faults| came_in_huge_pages(Bytes(8 << 20), 4096, faults);
        assert!(is_huge(4), "one for each huge page");
        assert!(
            is_huge(3 + 200) && !is_huge(2 + 512),
            "an eighth may be in base pages"
        );
        assert!(!is_huge(2048), "one for each base page");
    }
}
