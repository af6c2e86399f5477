//! How much freed memory stays for the program's next allocations: [`Keep`].

use core::fmt;
use core::str::FromStr;

use crate::units::{Bytes, SizeError};

/// What the user said about it (`--keep`). Where nothing was said, the heap has a rule of its own: see
/// docs/design/heap.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// So many bytes.
    Size(usize),
    /// So many percent of the peak that the program had in large blocks so far; at peak 100.
    Percent(u32),
}

impl Keep {
    /// In bytes, where the program had `peak` bytes at once so far.
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

/// Why a text is no [`Keep`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeepError {
    /// It is no size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// It ends with `%`, and is no percentage.
    #[error("not a percentage: expected 0% to 100%")]
    Percent,
}

/// As it is typed: `64M`, `10%`.
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

/// What is parsed to the same again: bytes without a unit, or a percentage.
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
    fn a_percentage_is_of_the_most() {
        assert_eq!(Keep::Percent(10).of(1055), 105);
        assert_eq!(Keep::Percent(100).of(usize::MAX), usize::MAX);
        assert_eq!(Keep::Size(7).of(0), 7);
    }
}
