//! Alternating rounds: [`alternate`], [`alternate_all`].

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
