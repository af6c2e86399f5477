//! Unit types: [`Bytes`], [`Pages`], [`PageSize`], [`Order`], [`NodeId`]. They use no other module;
//! `jumbo` re-exports them.
//!
//! Invariant: a [`PageSize`] is a power of two, so shifting and masking by it is valid.

use core::fmt::{self, Write as _};
use core::str::FromStr;

/// A number of bytes: displays as `1.5 GiB`; parses `2M`, `2MiB`, `64k`, `1g`, `4096`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Bytes(pub u64);

/// A number of pages; the context defines their size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Pages(pub u64);

/// Number of a NUMA node in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct NodeId(pub u32);

/// Size of a page or folio: a power of two, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct PageSize(u64);

/// Base-2 logarithm of the number of base pages in a folio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Order(pub u32);

/// Error of parsing a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizeError {
    /// Text that is no whole number with an optional unit.
    #[error(
        "not a size: expected a whole number, with one of the units K, M, G and T if need be, such as 2M or 1536M"
    )]
    Syntax,
    /// Sizes of 2^64 bytes and more.
    #[error("more than any machine has")]
    TooLarge,
    /// Page sizes that are no power of two.
    #[error("{0} is not a page size: expected a power of two")]
    NotPowerOfTwo(Bytes),
}

impl Bytes {
    /// Converts a `kB` field of the kernel.
    pub const fn from_kib(kib: u64) -> Self {
        Self(kib.saturating_mul(1024))
    }

    /// Returns the number of whole pages of `size` that fit.
    pub const fn whole_pages(self, size: PageSize) -> Pages {
        Pages(self.0 / size.0)
    }
}

impl core::ops::Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl core::ops::AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl core::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(items: I) -> Self {
        items.fold(Self(0), |sum, item| sum + item)
    }
}

impl Pages {
    /// Returns the memory of that many pages of `size`.
    pub const fn bytes(self, size: PageSize) -> Bytes {
        Bytes(self.0.saturating_mul(size.0))
    }
}

impl PageSize {
    /// 4 KiB, the base page of x86-64 and of most arm64 kernels.
    pub const SIZE_4K: Self = Self(4 << 10);
    /// 2 MiB, the memory that one PMD maps where the base page is 4 KiB.
    pub const SIZE_2M: Self = Self(2 << 20);
    /// 1 GiB, the memory that one PUD maps where the base page is 4 KiB.
    pub const SIZE_1G: Self = Self(1 << 30);

    /// Creates a page size.
    ///
    /// # Errors
    /// [`SizeError::NotPowerOfTwo`].
    pub const fn new(bytes: u64) -> Result<Self, SizeError> {
        if bytes.is_power_of_two() {
            Ok(Self(bytes))
        } else {
            Err(SizeError::NotPowerOfTwo(Bytes(bytes)))
        }
    }

    /// Returns the size in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Returns the size in KiB, as in the kernel's directory names (`hugepages-2048kB`).
    pub const fn kib(self) -> u64 {
        self.0 >> 10
    }

    /// Rounds `address` down to this size.
    pub const fn align_down(self, address: u64) -> u64 {
        address & !(self.0 - 1)
    }

    /// Rounds `address` up to this size; `None` past the end of the address space.
    pub const fn align_up(self, address: u64) -> Option<u64> {
        match address.checked_add(self.0 - 1) {
            Some(sum) => Some(self.align_down(sum)),
            None => None,
        }
    }

    /// Returns the order of a folio of this size over base pages of `base`.
    pub const fn order(self, base: Self) -> Order {
        Order(
            self.0
                .trailing_zeros()
                .saturating_sub(base.0.trailing_zeros()),
        )
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for PageSize {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(<u64 as serde::Deserialize>::deserialize(deserializer)?)
            .map_err(serde::de::Error::custom)
    }
}

impl Order {
    /// Returns the size of a folio of this order over base pages of `base`.
    pub const fn size(self, base: PageSize) -> PageSize {
        PageSize(base.0 << self.0)
    }
}

/// Returns the largest unit that is at most `bytes`, and its binary logarithm.
fn unit(bytes: u64) -> (&'static str, u32) {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let found = units.into_iter().find(|(_, shift)| bytes >> shift != 0);
    found.unwrap_or(("B", 0))
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, shift) = unit(self.0);
        let mut text = PaddedText::new();
        if self.0 & ((1 << shift) - 1) == 0 {
            write!(text, "{} {unit}", self.0 >> shift)?;
        } else {
            write!(text, "{:.1} {unit}", self.0 as f64 / (1u64 << shift) as f64)?;
        }
        f.pad(text.as_str())
    }
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Formats the short form that users type: `4K`, `2M`, `1G`.
impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, shift) = unit(self.0);
        let unit = unit.strip_suffix("iB").unwrap_or_default();
        let mut text = PaddedText::new();
        write!(text, "{}{unit}", self.0 >> shift)?;
        f.pad(text.as_str())
    }
}

/// A short text on the stack, which is padded as a whole.
struct PaddedText {
    bytes: [u8; 32],
    length: usize,
}

impl PaddedText {
    const fn new() -> Self {
        Self {
            bytes: [0; 32],
            length: 0,
        }
    }

    fn as_str(&self) -> &str {
        core::str::from_utf8(&self.bytes[..self.length]).unwrap_or_default()
    }
}

impl fmt::Write for PaddedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.length + text.len();
        let room = self.bytes.get_mut(self.length..end).ok_or(fmt::Error)?;
        room.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}

impl FromStr for Bytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let trimmed = text.trim();
        let digits = trimmed
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(trimmed.len());
        let shift = trimmed[digits..].trim_start();
        let names = [("", 0), ("k", 10), ("m", 20), ("g", 30), ("t", 40)];
        let is_unit = |name: &str| {
            let rest = shift
                .get(name.len()..)
                .filter(|_| shift.as_bytes()[..name.len()].eq_ignore_ascii_case(name.as_bytes()));
            let endings: &[&str] = if name.is_empty() {
                &["", "b"]
            } else {
                &["", "b", "ib"]
            };
            rest.is_some_and(|rest| endings.iter().any(|end| rest.eq_ignore_ascii_case(end)))
        };
        let unit = names.into_iter().find(|(name, _)| is_unit(name));
        let Some((_, shift)) = unit else {
            return Err(SizeError::Syntax);
        };
        if digits == 0 {
            return Err(SizeError::Syntax);
        }
        // Digits fail to parse only if there are too many.
        let number: Option<u64> = trimmed[..digits].parse().ok();
        number
            .and_then(|number| number.checked_mul(1 << shift))
            .map(Self)
            .ok_or(SizeError::TooLarge)
    }
}

impl FromStr for PageSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        Self::new(text.parse::<Bytes>()?.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_parse_and_display() {
        for (text, bytes, shown) in [
            ("4096", 4096, "4 KiB"),
            ("2M", 2 << 20, "2 MiB"),
            ("2 MiB", 2 << 20, "2 MiB"),
            ("64k", 64 << 10, "64 KiB"),
            ("1536M", 1536 << 20, "1.5 GiB"),
            ("0", 0, "0 B"),
        ] {
            let parsed: Bytes = text.parse().unwrap();
            assert_eq!(
                (parsed, parsed.to_string().as_str()),
                (Bytes(bytes), shown),
                "{text}"
            );
        }
        for bad in ["", "M", "2X", "-1", "1E", "1.5G"] {
            let error = bad.parse::<Bytes>().unwrap_err().to_string();
            assert!(error.contains("whole number"), "{bad}: {error}");
            assert!(error.contains("K, M, G and T"), "{bad}: {error}");
        }
        for much in ["99999999T", "99999999999999999999"] {
            assert_eq!(much.parse::<Bytes>(), Err(SizeError::TooLarge));
        }
        assert!("3M".parse::<PageSize>().is_err());
        assert_eq!("2M".parse::<PageSize>().unwrap().to_string(), "2M");
        assert_eq!(PageSize::SIZE_2M.order(PageSize::SIZE_4K), Order(9));
    }

    proptest! {
        #[test]
        fn align_brackets(address in 0..u64::MAX / 2, shift in 0u32..40) {
            let size = PageSize::new(1 << shift).unwrap();
            let (down, up) = (size.align_down(address), size.align_up(address).unwrap());
            prop_assert!(down <= address && address <= up && up - down <= size.bytes());
        }
    }
}
