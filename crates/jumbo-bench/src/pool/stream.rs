//! STREAM's four kernels on three arrays: [`run`].
//!
//! As in STREAM, each thread has its own part of each array, the threads start each kernel
//! together, and the best pass counts. The values are checked at the end, which detects a lost
//! page.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Figures of the kernels, in order.
pub(super) const KERNELS: [&str; 4] = ["copy_ms", "scale_ms", "add_ms", "triad_ms"];

/// Sum of all of [`KERNELS`].
pub(super) const KERNELS_MS: &str = "copy_ms+scale_ms+add_ms+triad_ms";

/// Factor of `scale` and `triad`: with it the values neither grow nor vanish.
const SCALAR: f64 = 0.4;

const INITIAL_VALUES: [f64; 3] = [1.0, 2.0, 0.0];

/// Gap between two arrays, in numbers: a power of two would make them share cache sets.
const ARRAY_GAP: usize = 1160;

#[derive(Clone, Copy, Debug)]
pub(super) struct StreamTimes {
    /// First touch of the arrays.
    pub(super) touch: Duration,
    /// Best pass of each kernel.
    pub(super) best: [Duration; KERNELS.len()],
}

/// Part of each array that belongs to one thread.
struct ThreadPart<'m> {
    a: &'m mut [f64],
    b: &'m mut [f64],
    c: &'m mut [f64],
}

/// Barrier that spins: sleeping and waking takes as long as a kernel on small arrays.
struct SpinBarrier {
    threads: usize,
    came: AtomicUsize,
}

/// Runs all kernels `passes` times over three arrays in `memory`. The error is a wrong final value.
pub(super) fn run(memory: &mut [f64], threads: usize, passes: usize) -> Result<StreamTimes, f64> {
    let parts = ThreadPart::all(memory, threads);
    let meeting = SpinBarrier {
        threads: parts.len(),
        came: AtomicUsize::new(0),
    };
    let runs: Vec<_> = std::thread::scope(|scope| {
        let threads = parts.into_iter().map(|part| {
            let meeting = &meeting;
            scope.spawn(move || work(part, meeting, passes))
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let mut all: Option<StreamTimes> = None;
    for run in runs {
        let times = run.unwrap_or(Err(f64::NAN))?;
        // The threads start and end together: the longest time covers all of them.
        let whole = all.get_or_insert(times);
        whole.touch = whole.touch.max(times.touch);
        for (whole, best) in whole.best.iter_mut().zip(times.best) {
            *whole = best.max(*whole);
        }
    }
    all.ok_or(f64::NAN)
}

fn work(
    mut part: ThreadPart<'_>,
    meeting: &SpinBarrier,
    passes: usize,
) -> Result<StreamTimes, f64> {
    let touch = meeting.together(|| part.touch());
    let mut best = [Duration::MAX; KERNELS.len()];
    for _ in 0..passes {
        for (kernel, best) in best.iter_mut().enumerate() {
            *best = meeting.together(|| part.kernel(kernel)).min(*best);
        }
    }
    part.check(passes)?;
    Ok(StreamTimes { touch, best })
}

impl<'m> ThreadPart<'m> {
    /// Splits the three arrays into one part per thread.
    fn all(memory: &'m mut [f64], threads: usize) -> Vec<Self> {
        let length = (memory.len() / 3).saturating_sub(ARRAY_GAP);
        let cut = length.div_ceil(threads.max(1)).max(1);
        let mut arrays = memory
            .chunks_mut(length + ARRAY_GAP)
            .filter_map(|array| array.get_mut(..length))
            .map(|array| array.chunks_mut(cut));
        let (Some(a), Some(b), Some(c)) = (arrays.next(), arrays.next(), arrays.next()) else {
            return Vec::new();
        };
        let parts = a.zip(b).zip(c);
        parts.map(|((a, b), c)| Self { a, b, c }).collect()
    }

    /// Initialises the arrays, by a first touch.
    fn touch(&mut self) {
        let [a, b, c] = INITIAL_VALUES;
        self.a.fill(a);
        self.b.fill(b);
        self.c.fill(c);
    }

    fn kernel(&mut self, kernel: usize) {
        let (a, b, c) = (&mut *self.a, &mut *self.b, &mut *self.c);
        match kernel {
            0 => c.copy_from_slice(a),
            1 => b.iter_mut().zip(c).for_each(|(b, c)| *b = SCALAR * *c),
            2 => {
                let sums = c.iter_mut().zip(a.iter().zip(b));
                sums.for_each(|(c, (a, b))| *c = *a + *b);
            }
            _ => {
                let sums = a.iter_mut().zip(b.iter().zip(c));
                sums.for_each(|(a, (b, c))| *a = *b + SCALAR * *c);
            }
        }
    }

    /// Checks each value after `passes` passes; the error is the first wrong one.
    fn check(&self, passes: usize) -> Result<(), f64> {
        let [mut a, mut b, mut c] = INITIAL_VALUES;
        for _ in 0..passes {
            c = a;
            b = SCALAR * c;
            c = a + b;
            a = b + SCALAR * c;
        }
        let wrong =
            |array: &[f64], right: f64| array.iter().find(|&&value| value != right).copied();
        let wrong = wrong(self.a, a).or(wrong(self.b, b)).or(wrong(self.c, c));
        wrong.map_or(Ok(()), Err)
    }
}

impl SpinBarrier {
    /// Time from a common start of all threads until all have finished.
    fn together(&self, work: impl FnOnce()) -> Duration {
        self.meet();
        let clock = Instant::now();
        work();
        self.meet();
        clock.elapsed()
    }

    fn meet(&self) {
        let turn = self.came.fetch_add(1, Ordering::AcqRel) / self.threads;
        let mut spins = 0u32;
        while self.came.load(Ordering::Acquire) < (turn + 1) * self.threads {
            spins += 1;
            // The missing thread may need this CPU.
            if spins.is_multiple_of(1 << 12) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_threads_covers_all_memory() {
        for threads in 1..=5 {
            let mut memory = vec![7.0; 3 * (ARRAY_GAP + 1003)];
            let times = run(&mut memory, threads, 3).unwrap();
            assert!(times.best.iter().all(|best| *best < Duration::MAX));
            // The gaps between the arrays are untouched.
            assert_eq!(
                memory.iter().filter(|&&value| value == 7.0).count(),
                3 * ARRAY_GAP
            );
        }
    }

    #[test]
    fn a_lost_value_is_detected() {
        let mut memory = vec![0.0; 3 * (ARRAY_GAP + 100)];
        run(&mut memory, 1, 2).unwrap();
        let mut parts = ThreadPart::all(&mut memory, 1);
        parts[0].check(2).unwrap();
        parts[0].b[99] = 0.0;
        assert_eq!(parts[0].check(2), Err(0.0));
    }
}
