//! Conditions that a sample must meet to be what its side claims: [`Claim`]. Any other comparison
//! would prove nothing.

use std::ops::RangeInclusive;

use jumbo::units::Bytes;

use crate::Error;
use crate::error::{QUIET_HINT, SIZE_HINT};
use crate::figures::Figures;
use crate::launch::Launch;

/// Allowed range of a figure.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    figure: &'static str,
    range: RangeInclusive<u64>,
}

/// Hint for `jumbo run` without the expected effect.
pub(crate) const DRY_RUN_HINT: &str = "`jumbo run --dry-run -- true` shows what `jumbo run` does";

/// Minimum share of a worker's memory that must be as claimed. The rest is the worker's own.
pub(crate) const MIN_PERCENT: u64 = 95;

pub(crate) fn within(figure: &'static str, range: RangeInclusive<u64>) -> Claim {
    Claim { figure, range }
}

pub(crate) fn exactly(figure: &'static str, number: u64) -> Claim {
    within(figure, number..=number)
}

pub(crate) fn at_least(figure: &'static str, min: u64) -> Claim {
    within(figure, min..=u64::MAX)
}

pub(crate) fn at_least_percent(figure: &'static str, percent: u64, size: Bytes) -> Claim {
    at_least(figure, size.0 / 100 * percent)
}

/// Claims at least [`MIN_PERCENT`] of `size`.
pub(crate) fn nearly_all(figure: &'static str, size: Bytes) -> Claim {
    at_least_percent(figure, MIN_PERCENT, size)
}

pub(crate) fn no_huge() -> Vec<Claim> {
    vec![exactly("huge_bytes", 0)]
}

pub(crate) fn base(size: Bytes) -> Vec<Claim> {
    vec![exactly("huge_bytes", 0), nearly_all("resident_bytes", size)]
}

/// Claims that half of the memory is on huge pages: alignment and remainders cost a few percent.
pub(crate) fn half_huge() -> Vec<Claim> {
    vec![at_least("huge_percent", 50)]
}

pub(crate) fn huge(size: Bytes) -> Vec<Claim> {
    vec![nearly_all("huge_bytes", size)]
}

pub(crate) fn hugetlb(size: Bytes) -> Vec<Claim> {
    vec![nearly_all("hugetlb_bytes", size)]
}

/// Checks that the figures of a program meet the claims; else [`Error::Claim`].
pub(crate) fn check(claims: &[Claim], launch: &Launch, figures: &Figures) -> Result<(), Error> {
    let preload = match launch {
        Launch::Jumbo(_) => at_least("preload_libraries", 1),
        _ => exactly("preload_libraries", 0),
    };
    let mut all = std::iter::once(&preload).chain(claims);
    all.try_for_each(|claim| claim.check(figures))
}

impl Claim {
    fn hint(&self) -> &'static str {
        let is_none = *self.range.end() == 0;
        match self.figure {
            "preload_libraries" if is_none => "see /etc/ld.so.preload",
            "huge_bytes" if is_none => {
                "compare with base pages: set /sys/kernel/mm/transparent_hugepage/enabled to `madvise`"
            }
            "huge_bytes" | "huge_percent" | "text_huge_bytes" => {
                "`jumbo doctor` shows what keeps memory off huge pages on this host"
            }
            "text_file_huge_bytes" | "text_shared_huge_bytes" => {
                "`jumbo run --report` shows why text is not on huge pages on this host"
            }
            "resident_bytes" | "text_resident_bytes" => SIZE_HINT,
            "back_ms" => QUIET_HINT,
            "kept_bytes" => "this is a bug of `jumbo bench`: please report it",
            "touch_faults" | "large_folio_bytes" | "sized_folio_bytes" => {
                "`jumbo thp` shows the kernel's controls; measure while no other program allocates shared memory"
            }
            figure if figure == "hugetlb_bytes" || figure.contains("page") => {
                "measure while no other program uses the kernel's pool of 2 MiB pages: \
                 `jumbo pool show` says which do"
            }
            _ => DRY_RUN_HINT,
        }
    }

    fn check(&self, figures: &Figures) -> Result<(), Error> {
        let (&min, &max) = (self.range.start(), self.range.end());
        let found = figures.get(self.figure).copied();
        if found.is_some_and(|found| found >= min as f64 && found <= max as f64) {
            return Ok(());
        }
        let show = |value: f64| match self.figure.ends_with("bytes") {
            true => format!("{:.1} MiB", value / f64::from(1 << 20)),
            false => value.to_string(),
        };
        let expected = match max {
            u64::MAX => format!("at least {}", show(min as f64)),
            max if max == min => show(min as f64),
            max => format!("{} to {}", show(min as f64), show(max as f64)),
        };
        let found = found.map_or("none".to_owned(), show);
        let what = self.figure.replace('_', " ");
        let message = format!("{what}: {found}, expected {expected}");
        Err(Error::claim(message, self.hint()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::figures;

    #[test]
    fn a_sample_outside_of_its_claims_is_rejected() {
        let base = base(Bytes(1000));
        for (launch, claims, resident, huge, preloaded, fine) in [
            (Launch::Plain, &base, 1010, 0, false, true),
            (Launch::Plain, &base, 900, 0, false, false),
            (Launch::Plain, &base, 1010, 1, false, false),
            (Launch::Plain, &base, 1010, 0, true, false),
            (Launch::JUMBO, &base, 1010, 0, true, true),
            (Launch::JUMBO, &base, 1010, 0, false, false),
            (Launch::JUMBO, &base, 1010, 2, true, false),
            (Launch::Plain, &no_huge(), 100, 0, false, true),
            (Launch::Plain, &no_huge(), 100, 1, false, false),
            (Launch::Plain, &half_huge(), 100, 90, false, true),
            (Launch::Plain, &half_huge(), 100, 90, true, false),
            (Launch::JUMBO, &half_huge(), 100, 40, true, false),
            (Launch::Plain, &huge(Bytes(100)), 100, 96, false, true),
            (Launch::Plain, &hugetlb(Bytes(100)), 100, 96, false, false),
        ] {
            let figures = figures([
                ("resident_bytes", f64::from(resident)),
                ("huge_bytes", f64::from(huge)),
                ("huge_percent", f64::from(huge)),
                ("hugetlb_bytes", 0.0),
                ("preload_libraries", f64::from(u8::from(preloaded))),
            ]);
            let checked = check(claims, &launch, &figures);
            assert_eq!(
                checked.is_ok(),
                fine,
                "{launch:?} {figures:?} {claims:?} {checked:?}"
            );
        }
    }

    #[test]
    fn a_rejection_has_found_and_expected_values() {
        let figures = figures([("preload_libraries", 0.0), ("huge_bytes", 2e6)]);
        let said = |claims: &[Claim]| {
            let refused = check(claims, &Launch::Plain, &figures).unwrap_err();
            refused.of_side("plain").to_string()
        };
        assert_eq!(
            said(&no_huge()),
            "side `plain` does not meet its claim: huge bytes: 1.9 MiB, expected 0.0 MiB"
        );
        assert!(said(&[at_least("back_ms", 0)]).ends_with("back ms: none, expected at least 0"));
        assert!(said(&[within("used_pages", 1..=2)]).ends_with("none, expected 1 to 2"));
    }
}
