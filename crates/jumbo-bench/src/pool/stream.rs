//! STREAM's four kernels on three arrays: [`run`].
//!
//! As in STREAM each thread has a part of its own of each array, the threads start each kernel together, and of the
//! passes the best one counts. The numbers are checked in the end: arrays that lost a page give no figure.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The figures of the kernels, in their order...
pub(super) const KERNELS: [&str; 4] = ["copy_ms", "scale_ms", "add_ms", "triad_ms"];

/// ... and all of them, added.
pub(super) const ALL: &str = "copy_ms+scale_ms+add_ms+triad_ms";

/// The factor of `scale` and `triad`, chosen so that the numbers neither grow nor vanish.
const SCALAR: f64 = 0.4;

/// The first values of the arrays.
const FIRST: [f64; 3] = [1.0, 2.0, 0.0];

/// Between two arrays, in numbers. Were they a power of two apart, all three would share sets of a cache
/// and banks of memory.
const GAP: usize = 1160;

/// How long it took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// The first touch of the arrays.
    pub(super) touch: Duration,
    /// The best pass of each kernel.
    pub(super) best: [Duration; KERNELS.len()],
}

/// A thread's part of each array.
struct Part<'m> {
    a: &'m mut [f64],
    b: &'m mut [f64],
    c: &'m mut [f64],
}

/// Where threads meet. It spins, since sleeping and waking take as long as a kernel on small arrays.
struct Meeting {
    threads: usize,
    came: AtomicUsize,
}

/// Runs all kernels so many times over three arrays in `memory`, with so many threads; what they hold in
/// the end is the error where it is wrong.
pub(super) fn run(memory: &mut [f64], threads: usize, passes: usize) -> Result<Times, f64> {
    let parts = Part::all(memory, threads);
    let meeting = Meeting {
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
    let mut all: Option<Times> = None;
    for run in runs {
        let times = run.unwrap_or(Err(f64::NAN))?;
        // They started and ended together; the thread that saw it take longest saw all of it.
        let whole = all.get_or_insert(times);
        whole.touch = whole.touch.max(times.touch);
        for (whole, best) in whole.best.iter_mut().zip(times.best) {
            *whole = best.max(*whole);
        }
    }
    all.ok_or(f64::NAN)
}

/// The work of one thread.
fn work(mut part: Part<'_>, meeting: &Meeting, passes: usize) -> Result<Times, f64> {
    let touch = meeting.together(|| part.touch());
    let mut best = [Duration::MAX; KERNELS.len()];
    for _ in 0..passes {
        for (kernel, best) in best.iter_mut().enumerate() {
            *best = meeting.together(|| part.kernel(kernel)).min(*best);
        }
    }
    part.check(passes)?;
    Ok(Times { touch, best })
}

impl<'m> Part<'m> {
    /// The three arrays, cut into a part for each thread.
    fn all(memory: &'m mut [f64], threads: usize) -> Vec<Self> {
        let length = (memory.len() / 3).saturating_sub(GAP);
        let cut = length.div_ceil(threads.max(1)).max(1);
        let mut arrays = memory
            .chunks_mut(length + GAP)
            .filter_map(|array| array.get_mut(..length))
            .map(|array| array.chunks_mut(cut));
        let (Some(a), Some(b), Some(c)) = (arrays.next(), arrays.next(), arrays.next()) else {
            return Vec::new();
        };
        let parts = a.zip(b).zip(c);
        parts.map(|((a, b), c)| Self { a, b, c }).collect()
    }

    /// First touch.
    fn touch(&mut self) {
        let [a, b, c] = FIRST;
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

    /// Whether each number is what so many passes make of it; the first that is not is the error.
    fn check(&self, passes: usize) -> Result<(), f64> {
        let [mut a, mut b, mut c] = FIRST;
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

impl Meeting {
    /// How long it takes until all threads have done it that begin it together.
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
            // The thread that is missing may need this CPU.
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
    fn any_number_of_threads_does_all_of_it() {
        for threads in 1..=5 {
            let mut memory = vec![7.0; 3 * (GAP + 1003)];
            let times = run(&mut memory, threads, 3).unwrap();
            assert!(times.best.iter().all(|best| *best < Duration::MAX));
            // What lies between the arrays belongs to none of them.
            assert_eq!(
                memory.iter().filter(|&&value| value == 7.0).count(),
                3 * GAP
            );
        }
    }

    #[test]
    fn a_number_that_was_lost_is_noticed() {
        let mut memory = vec![0.0; 3 * (GAP + 100)];
        run(&mut memory, 1, 2).unwrap();
        let mut parts = Part::all(&mut memory, 1);
        parts[0].check(2).unwrap();
        parts[0].b[99] = 0.0;
        assert_eq!(parts[0].check(2), Err(0.0));
    }
}
