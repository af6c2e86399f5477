//! Bound on freed memory that stays resident: [`Keep`].

use core::fmt;
use core::str::FromStr;

use jumbo_sys::units::{Bytes, SizeError};

/// Bound that the user set (`--keep`). The heap's own rule is in docs/design/heap.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// A number of bytes.
    Size(usize),
    /// Percentage, at most 100, of the peak of the program's large blocks.
    Percent(u32),
}

impl Keep {
    /// Returns the bound in bytes, for a peak of `peak` bytes in large blocks.
    pub fn of(self, peak: usize) -> usize {
        match self {
            Self::Size(bytes) => bytes,
            Self::Percent(percent) => {
                let percent = usize::try_from(percent).unwrap_or(0);
                peak / 100 * percent + peak % 100 * percent / 100
            }
        }
    }
}

/// Error of parsing a [`Keep`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeepError {
    /// Invalid size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// Invalid percentage, ending with `%`.
    #[error("not a percentage: expected 0% to 100%")]
    Percent,
}

/// Parses the form that users type: `64M`, `10%`.
impl FromStr for Keep {
    type Err = KeepError;

    fn from_str(text: &str) -> Result<Self, KeepError> {
        let Some(percent) = text.strip_suffix('%') else {
            let bytes: Bytes = text.parse()?;
            return Ok(Self::Size(usize::try_from(bytes.0).unwrap_or(usize::MAX)));
        };
        let percent = percent.parse().ok().filter(|percent| *percent <= 100);
        percent.map(Self::Percent).ok_or(KeepError::Percent)
    }
}

/// Formats a text that parses to the same value: bytes without a unit, or a percentage.
impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(bytes) => write!(f, "{bytes}"),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_percentages_are_told_apart() {
        assert_eq!("64M".parse(), Ok(Keep::Size(64 << 20)));
        assert_eq!("0".parse(), Ok(Keep::Size(0)));
        assert_eq!("10%".parse(), Ok(Keep::Percent(10)));
        for wrong in ["101%", "%", "-1%", "1.5%", "", "much", "-1", "5 percent"] {
            assert!(wrong.parse::<Keep>().is_err(), "{wrong}");
        }
        for keep in [Keep::Size(123), Keep::Percent(100)] {
            assert_eq!(keep.to_string().parse(), Ok(keep));
        }
    }

    #[test]
    fn a_percentage_is_of_the_peak() {
        assert_eq!(Keep::Percent(10).of(1055), 105);
        assert_eq!(Keep::Percent(100).of(usize::MAX), usize::MAX);
        assert_eq!(Keep::Size(7).of(0), 7);
    }
}
