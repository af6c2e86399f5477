//! Alternating rounds: [`alternate`], [`alternate_all`].

use crate::Error;

/// Measures so many variants once in each round and returns the samples of each variant, round by round.
///
/// The order rotates from round to round and every second round runs backwards, so that no variant always comes
/// first or always follows the same other one: what a run leaves behind (a fragmented machine, a warm or a
/// throttled processor) falls on all of them.
///
/// # Errors
/// The first one of `measure`, which is given the round and the variant.
pub fn alternate_all<S, E>(
    rounds: usize,
    variants: usize,
    mut measure: impl FnMut(usize, usize) -> Result<S, E>,
) -> Result<Vec<Vec<S>>, E> {
    let mut samples: Vec<_> = (0..variants).map(|_| Vec::with_capacity(rounds)).collect();
    for round in 0..rounds {
        for variant in order(round, variants) {
            samples[variant].push(measure(round, variant)?);
        }
    }
    Ok(samples)
}

/// [`alternate_all`] where the number of variants is known beforehand.
///
/// # Errors
/// As [`alternate_all`].
pub fn alternate<const N: usize, S, E>(
    rounds: usize,
    measure: impl FnMut(usize, usize) -> Result<S, E>,
) -> Result<[Vec<S>; N], E> {
    let mut samples = alternate_all(rounds, N, measure)?.into_iter();
    Ok(std::array::from_fn(|_| samples.next().unwrap_or_default()))
}

/// How often a sample is tried whose memory, or whose CPUs, somebody else took.
const TRIES: usize = 3;

/// A sample that is what it was to be.
///
/// # Errors
/// The last one of `measure`.
pub(crate) fn undisturbed<S>(mut measure: impl FnMut() -> Result<S, Error>) -> Result<S, Error> {
    for _ in 1..TRIES {
        match measure() {
            Err(error) if error.is_disturbed() => {}
            measured => return measured,
        }
    }
    measure()
}

fn order(round: usize, variants: usize) -> Vec<usize> {
    let mut order: Vec<_> = (0..variants).collect();
    order.rotate_left(round % variants.max(1));
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use jumbo::units::Bytes;

    #[test]
    fn a_disturbed_sample_is_taken_again_a_few_times() {
        let mut left = 2;
        let mut measure = || {
            left -= 1;
            match left {
                0 => Ok(()),
                _ => Err(Error::NotBack(Bytes(1))),
            }
        };
        assert!(undisturbed(&mut measure).is_ok());
        let mut count = 0;
        let mut never = |error: fn() -> Error| {
            count = 0;
            let failed = undisturbed(|| {
                count += 1;
                Err::<(), _>(error())
            });
            assert!(failed.is_err());
            count
        };
        assert_eq!(never(|| Error::NotBack(Bytes(1))), TRIES);
        assert_eq!(never(|| Error::Malloc(Bytes(1))), 1);
    }

    #[test]
    fn each_variant_runs_once_a_round_and_none_is_always_first() {
        let mut seen = Vec::new();
        let samples: [Vec<(usize, usize)>; 4] = alternate(5, |round, variant| {
            seen.push((round, variant));
            Ok::<_, ()>((round, variant))
        })
        .unwrap();
        for (variant, samples) in samples.iter().enumerate() {
            let expected: Vec<_> = (0..5).map(|round| (round, variant)).collect();
            assert_eq!(*samples, expected);
        }
        for position in 0..4 {
            let there: std::collections::BTreeSet<_> =
                (0..5).map(|round| seen[round * 4 + position].1).collect();
            assert!(there.len() > 1, "position {position}: always {there:?}");
        }
    }

    #[test]
    fn the_first_failure_ends_it() {
        let mut calls = 0;
        let failed: Result<[Vec<()>; 3], &str> = alternate(9, |round, _| {
            calls += 1;
            if round == 1 {
                Err("worker died")
            } else {
                Ok(())
            }
        });
        assert_eq!((failed.unwrap_err(), calls), ("worker died", 4));
    }
}
