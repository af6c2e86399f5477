//! Memory touched before it is measured: [`sample`].
//!
//! In a virtual machine with free page reporting the kernel hands free memory back to the host two seconds after it
//! became free. The first touch after that waits for the host: one to three seconds for each GiB, where a huge page
//! takes a tenth of a second for as much. Such a wait is system time of the process that touches.
//!
//! So the memory of a sample is touched and let go right before the sample. A sample whose processes had much more system
//! time than others of the same side was hit all the same: it is taken again, and counted ([`Hit`]).

use std::io;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use serde::Serialize;

use super::{Block, available};
use crate::Error;
use crate::figures::cpu_ms;
use crate::task::By;

/// How often a sample is taken that was hit.
const TRIES: usize = 3;

/// A sample was hit that had so much more system time than the least of its side, and [`SLACK_MS`] beside that.
const FACTOR: f64 = 1.25;

/// The variation of starting a process and looking at it: as much as the host takes for some 30
/// MiB.
const SLACK_MS: f64 = 50.0;

/// How often the host was waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Hit {
    /// The samples that count, warm-ups among them.
    pub samples: usize,
    /// Samples that were thrown away, and taken again.
    pub taken_again: usize,
    /// Samples that count though they were hit: the last of as many tries as there are.
    pub kept: usize,
}

/// A sample of processes that `measure` waits for, with as many bytes touched right before as `prepare` returns. Where
/// another program disturbed it, it is taken again, up to `tries` times in all. `least` is the least system time of its
/// side so far.
pub(crate) fn sample<S>(
    root: &Root,
    (prepare, mut tries): (&dyn Fn() -> Result<Bytes, Error>, usize),
    (least, hit): (&mut f64, &mut Hit),
    measure: &dyn Fn() -> Result<S, Error>,
) -> Result<S, Error> {
    let mut hits = Vec::new();
    loop {
        warm(root, prepare()?)?;
        let before = system_ms()?;
        let sample = measure();
        let took = system_ms()? - before;
        tries = tries.saturating_sub(1);
        let sample = match sample {
            Err(error) if error.is_disturbed() && tries > 0 => continue,
            sample => sample?,
        };
        if took <= *least * FACTOR + SLACK_MS {
            *least = least.min(took);
        } else {
            hits.push(took);
            if hits.len() < TRIES {
                hit.taken_again += 1;
                continue;
            }
            // So often in a row is no accident: the side, or the machine, takes as long now.
            *least = hits.iter().copied().fold(took, f64::min);
            hit.kept += 1;
        }
        hit.samples += 1;
        return Ok(sample);
    }
}

/// Touches what `size` bytes and the program around them take, and gives it back.
fn warm(root: &Root, size: Bytes) -> Result<(), Error> {
    // More than is available is never touched: that would call the OOM killer.
    let most = available(root)?.0 / 10 * 9;
    let size = (size.0 + size.0 / 4 + (16 << 20)).min(most);
    let mapping = Block::take(By::Map, Bytes(size))?;
    // Huge pages are touched sooner. A kernel without them answers EINVAL, and its base pages do as well.
    let _ = mapping.advise(libc::MADV_HUGEPAGE);
    let touched = mapping.advise(libc::MADV_POPULATE_WRITE);
    mapping.give_back()?;
    touched
}

/// The system time of all processes that this one has waited for, and of those that they have waited for.
fn system_ms() -> Result<f64, Error> {
    Ok(cpu_ms(usage(libc::RUSAGE_CHILDREN)?.ru_stime))
}

/// The user and the system time of this process, in milliseconds.
pub(crate) fn own_times() -> Result<[f64; 2], Error> {
    let usage = usage(libc::RUSAGE_SELF)?;
    Ok([usage.ru_utime, usage.ru_stime].map(cpu_ms))
}

/// The page faults of this process that needed no I/O.
pub(super) fn own_faults() -> Result<u64, Error> {
    Ok(usage(libc::RUSAGE_SELF)?.ru_minflt.unsigned_abs())
}

fn usage(whose: libc::c_int) -> Result<libc::rusage, Error> {
    // SAFETY: the structure is integers only, for which zeroes are valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes a whole `rusage` where `usage` is.
    if unsafe { libc::getrusage(whose, &raw mut usage) } != 0 {
        return Err(Error::Map(io::Error::last_os_error()));
    }
    Ok(usage)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_disturbed_sample_is_taken_again_a_few_times() {
        let calls = Cell::new(0);
        let fail = |times: usize, error: fn() -> Error| {
            calls.set(0);
            let (mut least, mut hit) = (f64::INFINITY, Hit::default());
            let state = (&mut least, &mut hit);
            let sample = sample(&Root::host(), (&|| Ok(Bytes(0)), 3), state, &|| {
                calls.set(calls.get() + 1);
                let fails = calls.get() <= times;
                if fails { Err(error()) } else { Ok(()) }
            });
            (sample.is_ok(), calls.get())
        };
        assert_eq!(fail(2, || Error::NotBack(Bytes(1))), (true, 3));
        assert_eq!(fail(9, || Error::NotBack(Bytes(1))), (false, 3));
        assert_eq!(fail(9, || Error::Malloc(Bytes(1))), (false, 1));
    }

    #[test]
    fn a_sample_that_waited_for_the_host_is_taken_again_and_counted() {
        let (mut least, mut hit) = (f64::INFINITY, Hit::default());
        // Processes that are in the kernel for a while, or not.
        let mut take = |busy: &[bool]| {
            let nth = Cell::new(0);
            let state = (&mut least, &mut hit);
            sample(&Root::host(), (&|| Ok(Bytes(0)), 3), state, &|| {
                let busy = busy.get(nth.replace(nth.get() + 1)) == Some(&true);
                let count = if busy { "count=8000" } else { "count=0" };
                let words = [
                    "if=/dev/zero",
                    "of=/dev/null",
                    "bs=1M",
                    "status=none",
                    count,
                ];
                let ended = Command::new("dd").args(words).status();
                ended.map(drop).map_err(Error::Pipe)
            })
            .unwrap();
            (hit.samples, hit.taken_again, hit.kept)
        };
        assert_eq!(take(&[false]), (1, 0, 0));
        assert_eq!(take(&[true, false]), (2, 1, 0));
        assert_eq!(take(&[true, true, true]), (3, 3, 1));
        assert_eq!(take(&[false]), (4, 3, 1), "the least is the least again");
    }
}
