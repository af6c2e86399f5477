//! `512` pages or `1G` of memory: [`Amount`]; and times.

use std::time::Duration;

use jumbo::units::{Bytes, PageSize, Pages};

/// What was typed: a bare number is pages, one with a unit is memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Amount {
    Pages(Pages),
    Memory(Bytes),
}

impl Amount {
    /// In pages of `size`; memory that is no whole number of them is rounded up, since less would not
    /// hold it.
    pub(super) fn pages(self, size: PageSize) -> Pages {
        match self {
            Self::Pages(pages) => pages,
            Self::Memory(bytes) => Pages(bytes.0.div_ceil(size.bytes())),
        }
    }
}

impl std::str::FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.chars().all(|c| c.is_ascii_digit())
            && let Ok(pages) = text.parse()
        {
            return Ok(Self::Pages(Pages(pages)));
        }
        let bytes: Result<Bytes, _> = text.parse();
        bytes.map(Self::Memory).map_err(|_| {
            format!("`{text}` is neither a number of pages, such as 512, nor memory, such as 1G")
        })
    }
}

/// The longest time that can be given, about thirty years: clocks that are added to it do not overflow.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);

/// `2`, `0.5`: seconds.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.strip_suffix('s').unwrap_or(text).parse().ok();
    let seconds = seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| format!("`{text}` is no number of seconds"))?;
    if seconds > LONGEST {
        return Err(format!("the longest time is {} seconds", LONGEST.as_secs()));
    }
    Ok(seconds)
}

/// As [`seconds`], and not none at all: what is done again and again needs a pause.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    match seconds(text)? {
        interval if interval >= Duration::from_millis(10) => Ok(interval),
        _ => Err("the shortest interval is 0.01 seconds".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_pages_and_sizes_are_memory() {
        let pages = |text: &str| text.parse::<Amount>().unwrap().pages(PageSize::SIZE_2M).0;
        assert_eq!(
            (pages("512"), pages("1G"), pages("3M"), pages("0")),
            (512, 512, 2, 0)
        );
        for bad in ["", "-1", "1.5G", "many", "99999999999999999999"] {
            assert!(bad.parse::<Amount>().is_err(), "{bad}");
        }
    }

    #[test]
    fn seconds_may_be_parts() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(seconds("2s"), Ok(Duration::from_secs(2)));
        assert!(seconds("-1").is_err() && seconds("soon").is_err() && seconds("inf").is_err());
        assert!(interval("0").is_err());
        assert!(seconds("1e19").is_err() && interval("1e19").is_err() && seconds("1e9").is_ok());
    }
}
