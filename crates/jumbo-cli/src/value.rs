//! Numbers and times on the command line, with errors in words.

use std::str::FromStr;
use std::time::Duration;

/// A number from 0 on.
pub(crate) fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| String::from("expected a whole number"))
}

/// A number from 1 on, for a type that has no 0.
pub(crate) fn positive<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| String::from("expected a whole number of at least 1"))
}

/// The ID of a process.
pub(crate) fn process(text: &str) -> Result<u32, String> {
    let pid = text.parse().ok();
    pid.filter(|pid| i32::try_from(*pid).is_ok_and(|pid| pid > 0))
        .ok_or_else(|| String::from("expected the number of a process"))
}

/// The longest time that can be given, about thirty years: clocks that are added to it do not
/// overflow.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);

/// `2`, `0.5`, `2s`: seconds.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.strip_suffix('s').unwrap_or(text).parse().ok();
    let seconds = seconds
        .filter(|seconds| *seconds >= 0.0)
        .ok_or("expected a number of seconds, such as 2 or 0.5")?;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|time| *time <= LONGEST)
        .ok_or_else(|| format!("the longest time is {} seconds", LONGEST.as_secs()))
}

/// As [`seconds`], and not none at all: what is done again and again needs a pause.
pub(crate) fn interval(text: &str) -> Result<Duration, String> {
    match seconds(text)? {
        interval if interval >= Duration::from_millis(10) => Ok(interval),
        _ => Err("the shortest interval is 0.01 seconds".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_may_be_parts() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(seconds("2s"), Ok(Duration::from_secs(2)));
        for bad in ["-1", "soon", "nan", "", "2m"] {
            assert!(seconds(bad).unwrap_err().contains("0.5"), "{bad}");
        }
        assert!(interval("0").is_err());
        for long in ["inf", "1e19"] {
            assert!(seconds(long).unwrap_err().contains("longest"), "{long}");
            assert!(interval(long).is_err());
        }
        assert!(seconds("1e9").is_ok());
    }

    #[test]
    fn numbers_are_refused_in_words() {
        assert_eq!(whole("0"), Ok(0_usize));
        assert_eq!(positive("1"), Ok(std::num::NonZeroUsize::MIN));
        for bad in ["-1", "1.5", "many", ""] {
            assert!(whole::<usize>(bad).unwrap_err().contains("whole number"));
        }
        assert!(
            positive::<std::num::NonZeroU32>("0")
                .unwrap_err()
                .contains("at least 1")
        );
    }
}
