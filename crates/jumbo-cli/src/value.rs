//! Numbers and times on the command line.

use std::str::FromStr;
use std::time::Duration;

use jumbo::units::{Bytes, SizeError};
use jumbo_host::kernel::Root;
use jumbo_host::status;

/// Parses a number of at least 0.
pub(crate) fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| String::from("expected a whole number"))
}

/// Parses a number of at least 1, for a type without 0.
pub(crate) fn positive<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| String::from("expected a whole number of at least 1"))
}

/// Parses a size with a unit. A bare number is ambiguous: programs read it in units of their own.
pub(crate) fn size_with_unit(text: &str) -> Result<Bytes, String> {
    let size: Bytes = text.parse().map_err(|error: SizeError| error.to_string())?;
    match text.trim().bytes().all(|digit| digit.is_ascii_digit()) && size.0 > 0 {
        true => Err(format!(
            "it has no unit: {text}M is {text} MiB, {text}G is {text} GiB"
        )),
        false => Ok(size),
    }
}

pub(crate) fn process(text: &str) -> Result<u32, String> {
    let pid = text.parse().ok();
    pid.filter(|pid| i32::try_from(*pid).is_ok_and(|pid| pid > 0))
        .ok_or_else(|| String::from("expected the number of a process"))
}

/// Finds the processes by PID or name, without this one. A PID stays where there is no process.
pub(crate) fn processes(root: &Root, text: &str) -> anyhow::Result<Vec<u32>> {
    if let Ok(pid) = process(text) {
        return Ok(vec![pid]);
    }
    let mut found = status::find(root, text)?;
    found.retain(|pid| *pid != std::process::id());
    match found.is_empty() {
        true => Err(no_process(text)),
        false => Ok(found),
    }
}

/// The error where no process has this PID or name.
pub(crate) fn no_process(text: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "no process is `{text}`, neither by PID nor by name\n\
         hint: names are those of `ps -e`, whole: `jumbo status` lists the largest processes"
    )
}

/// Finds the one process by PID or name.
pub(crate) fn one_process(root: &Root, text: &str) -> anyhow::Result<u32> {
    match processes(root, text)?.as_slice() {
        [pid] => Ok(*pid),
        several => anyhow::bail!(
            "{} processes are `{text}`\nhint: give the PID of one: {}",
            several.len(),
            several
                .iter()
                .map(u32::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    }
}

/// Maximum time, about thirty years: added to a clock it does not overflow.
const MAX_TIME: Duration = Duration::from_secs(1_000_000_000);

/// Parses seconds: `2`, `0.5`, `2s`.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.strip_suffix('s').unwrap_or(text).parse().ok();
    let seconds = seconds
        .filter(|seconds| *seconds >= 0.0)
        .ok_or("expected a number of seconds, such as 2 or 0.5")?;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|time| *time <= MAX_TIME)
        .ok_or_else(|| format!("the longest time is {} seconds", MAX_TIME.as_secs()))
}

/// Parses [`seconds`] of at least 0.01: a loop needs a pause.
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
    fn seconds_may_have_a_fraction() {
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
    fn a_size_of_a_plan_has_a_unit() {
        assert_eq!(size_with_unit("200M"), Ok(Bytes(200 << 20)));
        assert_eq!(size_with_unit("0"), Ok(Bytes(0)));
        assert!(
            size_with_unit("200")
                .unwrap_err()
                .contains("200M is 200 MiB")
        );
        assert!(size_with_unit("many").is_err());
    }

    #[test]
    fn errors_name_the_expected_number() {
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
