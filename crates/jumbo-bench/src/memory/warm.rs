//! Memory touched right before a sample: [`sample`].
//!
//! In a virtual machine with free page reporting the kernel returns free memory to the host after
//! two seconds. The next touch waits for the host: one to three seconds per GiB, instead of a tenth
//! of a second with huge pages. This counts as system time of the touching process.
//!
//! So the memory of a sample is touched and freed right before it. A sample with much more system
//! time than others of its side waited for the host nevertheless: it is repeated, and counted
//! ([`Retakes`]).

use std::io;

use jumbo::units::Bytes;
use serde::Serialize;

use super::{RawBlock, available};
use crate::Error;
use crate::figures::cpu_ms;
use crate::task::AllocCall;

/// Maximum number of attempts at a sample that is disturbed, or waits for the host.
const MAX_ATTEMPTS: usize = 3;

/// Ratio to the minimum system time of a side above which a sample waited for the host.
const MAX_SYSTEM_TIME_RATIO: f64 = 1.25;

/// Variation of the start of a process: the host takes as long for some 30 MiB.
const SLACK_MS: f64 = 50.0;

/// Number of samples that waited for the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Retakes {
    /// Samples that count, warm-ups included.
    pub samples: usize,
    /// Samples that were discarded and repeated.
    pub taken_again: usize,
    /// Samples that count though they waited: all attempts did.
    pub kept: usize,
}

/// Takes a sample by `measure`, which waits for its processes, after it touched as many bytes as
/// `prepare` returns. A disturbed sample is repeated. `min_system_ms` is the
/// minimum system time of the side so far.
pub(crate) fn sample<S>(
    prepare: &dyn Fn() -> Result<Bytes, Error>,
    (min_system_ms, retakes): (&mut f64, &mut Retakes),
    measure: &dyn Fn() -> Result<S, Error>,
) -> Result<S, Error> {
    let (mut waits, mut attempts) = (Vec::new(), MAX_ATTEMPTS);
    loop {
        warm(prepare()?)?;
        let before = system_ms()?;
        let sample = measure();
        let system_ms_used = system_ms()? - before;
        attempts = attempts.saturating_sub(1);
        let sample = match sample {
            Err(error) if error.is_disturbed() && attempts > 0 => continue,
            sample => sample?,
        };
        if system_ms_used <= *min_system_ms * MAX_SYSTEM_TIME_RATIO + SLACK_MS {
            *min_system_ms = min_system_ms.min(system_ms_used);
        } else {
            waits.push(system_ms_used);
            if waits.len() < MAX_ATTEMPTS {
                retakes.taken_again += 1;
                continue;
            }
            // All attempts waited: the side, or the machine, has become slower.
            *min_system_ms = waits.iter().copied().fold(system_ms_used, f64::min);
            retakes.kept += 1;
        }
        retakes.samples += 1;
        return Ok(sample);
    }
}

/// Touches and frees `size` bytes and a little more, for the program.
fn warm(size: Bytes) -> Result<(), Error> {
    // More than the available memory would invoke the OOM killer.
    let max = available()?.0 / 10 * 9;
    let size = (size.0 + size.0 / 4 + (16 << 20)).min(max);
    let mapping = RawBlock::take(AllocCall::Map, Bytes(size))?;
    // Huge pages are touched faster. A kernel without THP answers EINVAL; base pages serve as well.
    let _ = mapping.advise(libc::MADV_HUGEPAGE);
    let touched = mapping.advise(libc::MADV_POPULATE_WRITE);
    mapping.give_back()?;
    touched
}

fn system_ms() -> Result<f64, Error> {
    Ok(cpu_ms(usage(libc::RUSAGE_CHILDREN)?.ru_stime))
}

pub(crate) fn own_usage() -> Result<libc::rusage, Error> {
    usage(libc::RUSAGE_SELF)
}

fn usage(whose: libc::c_int) -> Result<libc::rusage, Error> {
    // SAFETY: all fields are integers, for which zeroes are valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes a whole `rusage` to `usage`.
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
    fn a_disturbed_sample_is_repeated() {
        let calls = Cell::new(0);
        let fail = |times: usize, error: fn() -> Error| {
            calls.set(0);
            let (mut min_system_ms, mut retakes) = (f64::INFINITY, Retakes::default());
            let state = (&mut min_system_ms, &mut retakes);
            let sample = sample(&|| Ok(Bytes(0)), state, &|| {
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
    fn a_sample_that_waited_for_the_host_is_repeated_and_counted() {
        let (mut min_system_ms, mut retakes) = (f64::INFINITY, Retakes::default());
        // Processes with much or no system time.
        let mut take = |busy: &[bool]| {
            let nth = Cell::new(0);
            let state = (&mut min_system_ms, &mut retakes);
            sample(&|| Ok(Bytes(0)), state, &|| {
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
            (retakes.samples, retakes.taken_again, retakes.kept)
        };
        assert_eq!(take(&[false]), (1, 0, 0));
        assert_eq!(take(&[true, false]), (2, 1, 0));
        assert_eq!(take(&[true, true, true]), (3, 3, 1));
        assert_eq!(
            take(&[false]),
            (4, 3, 1),
            "the min_system_ms is the min_system_ms again"
        );
    }
}
