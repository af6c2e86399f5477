//! What a sample must show, so that it is of what the name of its side says: [`Claim`]s. A comparison of anything else
//! would prove nothing.

use std::ops::RangeInclusive;

use jumbo::units::{Bytes, PageSize};

use crate::Error;
use crate::child::Launch;
use crate::worker::Figures;

/// What a figure of a sample must be.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    figure: &'static str,
    range: RangeInclusive<u64>,
    /// What to do where it is not.
    hint: &'static str,
}

const DOCTOR: &str = "`jumbo doctor` shows what keeps memory off huge pages on this host";
const BASE_PAGES: &str =
    "compare with base pages: set /sys/kernel/mm/transparent_hugepage/enabled to `madvise`";
const ALONE: &str = "measure while no other program uses the kernel's pool of 2 MiB pages: \
                     `jumbo pool show` says which do";

const DESCRIBED: &str = "this is a fault of `jumbo bench`: say so where jumbo comes from";
const THP: &str =
    "`jumbo thp` shows the kernel's controls; measure while no other program takes shared memory";

const TEXT: &str = "`jumbo run --report` shows why text is not on huge pages on this host";

/// Where jumbo did not do what was asked of it.
pub(crate) const DRY_RUN: &str = "`jumbo run --dry-run -- true` shows what `jumbo run` does";

/// Where memory that was freed is not free.
pub(crate) const QUIET: &str = "measure on a machine on which nothing else takes memory";

/// Where memory does not suffice.
pub(crate) const LESS: &str = "measure less, with --size";

/// So much of what a worker was to have it must have, in percent. Beside it there are a few MiB of its own.
pub(crate) const MOST: u64 = 95;

/// So much of a block must have been freed the way the side's name says: its ends are the caller's.
const MOST_FREED: u64 = 90;

/// None of its memory is on huge pages.
pub(crate) fn no_huge() -> Vec<Claim> {
    vec![Claim::new("huge_bytes", 0..=0, BASE_PAGES)]
}

/// So much memory, and none of it on huge pages.
pub(crate) fn base(size: Bytes) -> Vec<Claim> {
    let mut claims = no_huge();
    claims.push(resident(size));
    claims
}

/// Half of its memory is on huge pages: alignment and small remainders cost a few percent; with half on base pages it
/// is another program.
pub(crate) fn half_huge() -> Vec<Claim> {
    vec![Claim::new("huge_percent", 50..=u64::MAX, DOCTOR)]
}

/// So much memory on huge pages.
pub(crate) fn huge(size: Bytes) -> Vec<Claim> {
    vec![Claim::most_of("huge_bytes", MOST, size, DOCTOR)]
}

/// So much memory on pages of the kernel's pool.
pub(crate) fn hugetlb(size: Bytes) -> Vec<Claim> {
    vec![Claim::most_of("hugetlb_bytes", MOST, size, ALONE)]
}

/// So much memory is resident, on whatever pages.
pub(crate) fn resident(size: Bytes) -> Claim {
    Claim::most_of("resident_bytes", MOST, size, LESS)
}

/// So much memory came as this figure counts it.
pub(crate) fn sized(figure: &'static str, size: Bytes) -> Claim {
    Claim::most_of(figure, MOST, size, THP)
}

/// So much of it did not.
pub(crate) fn at_most(figure: &'static str, bytes: u64) -> Claim {
    Claim::new(figure, 0..=bytes, THP)
}

/// So many times as much, within a tenth.
pub(crate) fn times(figure: &'static str, times: u64) -> Claim {
    Claim::new(figure, times * 9 / 10..=times * 11 / 10, DRY_RUN)
}

/// Memory of `size` bytes came by a page fault for each block of that size; a process has some more.
pub(crate) fn faults(figure: &'static str, size: Bytes, block: PageSize) -> Claim {
    let blocks = size.0 / block.bytes();
    Claim::new(figure, blocks / 100 * MOST..=blocks / 4 * 5 + 2000, THP)
}

/// So much of what a group of programs shares is on huge pages, in percent.
pub(crate) fn shared_percent(range: RangeInclusive<u64>) -> Claim {
    Claim::new("shared_huge_percent", range, THP)
}

/// So many pages of a pool.
pub(crate) fn pages(figure: &'static str, range: RangeInclusive<u64>) -> Claim {
    Claim::new(figure, range, ALONE)
}

/// So many bytes were kept to describe pages.
pub(crate) fn kept(range: RangeInclusive<u64>) -> Claim {
    Claim::new("kept_bytes", range, DESCRIBED)
}

/// The memory was free again in the end.
pub(crate) fn back() -> Claim {
    Claim::new("back_ms", 0..=u64::MAX, QUIET)
}

/// A block of `size` bytes was freed in the background.
pub(crate) fn freed_later(size: Bytes) -> Claim {
    Claim::most_of("background_bytes", MOST_FREED, size, DRY_RUN)
}

/// Blocks of `size` bytes were freed by up to so many threads, on a machine with so many CPUs.
pub(crate) fn freed_by(threads: u32, size: Bytes, cpus: u64) -> Vec<Claim> {
    let most = u64::from(threads);
    if threads == 1 {
        return vec![Claim::new("freeing_threads", 0..=1, DRY_RUN)];
    }
    // Threads that find no CPU find nothing left to free.
    let at_work = Claim::new("freeing_threads", cpus.min(most)..=most, DRY_RUN);
    let gathered = Claim::most_of("gathered_bytes", MOST_FREED, size, DRY_RUN);
    vec![at_work, gathered]
}

/// So much text was touched, on whatever pages.
pub(crate) fn text(touched: Bytes) -> Vec<Claim> {
    vec![Claim::most_of("text_resident_bytes", MOST, touched, LESS)]
}

/// So much text was touched, and none of it is on huge pages.
pub(crate) fn text_on_base(touched: Bytes) -> Vec<Claim> {
    let mut claims = text(touched);
    claims.push(Claim::new("text_huge_bytes", 0..=0, DOCTOR));
    claims
}

/// At least half of the text that was touched is on huge pages, which this figure counts.
pub(crate) fn text_on_huge(figure: &'static str, touched: Bytes) -> Vec<Claim> {
    let mut claims = text(touched);
    claims.push(Claim::most_of(figure, 50, touched, TEXT));
    claims
}

/// Whether the figures of a program that was started so are what `claims` say; else an [`Error::Claim`].
pub(crate) fn check(claims: &[Claim], launch: &Launch, figures: &Figures) -> Result<(), Error> {
    let library = "preload_libraries";
    let preload = match launch {
        Launch::Jumbo(_) => Claim::new(library, 1..=u64::MAX, DRY_RUN),
        _ => Claim::new(library, 0..=0, "see /etc/ld.so.preload"),
    };
    let mut all = std::iter::once(&preload).chain(claims);
    all.try_for_each(|claim| claim.check(figures))
}

impl Claim {
    fn new(figure: &'static str, range: RangeInclusive<u64>, hint: &'static str) -> Self {
        Self {
            figure,
            range,
            hint,
        }
    }

    /// At least so many percent of `size`.
    fn most_of(figure: &'static str, percent: u64, size: Bytes, hint: &'static str) -> Self {
        Self::new(figure, size.0 / 100 * percent..=u64::MAX, hint)
    }

    fn check(&self, figures: &Figures) -> Result<(), Error> {
        let (&least, &most) = (self.range.start(), self.range.end());
        let found = figures.get(self.figure).copied();
        if found.is_some_and(|found| found >= least as f64 && found <= most as f64) {
            return Ok(());
        }
        let show = |value: f64| match self.figure.ends_with("bytes") {
            true => format!("{:.1} MiB", value / f64::from(1 << 20)),
            false => value.to_string(),
        };
        let right = match most {
            u64::MAX => format!("at least {}", show(least as f64)),
            most if most == least => show(least as f64),
            most => format!("{} to {}", show(least as f64), show(most as f64)),
        };
        let found = found.map_or("none".to_owned(), show);
        let what = self.figure.replace('_', " ");
        let found = format!("{what}: {found}, and not {right}");
        Err(Error::claim(found, self.hint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::with;

    #[test]
    fn a_side_that_is_not_what_it_claims_is_refused() {
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
            (Launch::Tunable, &half_huge(), 100, 90, false, true),
            (Launch::Tunable, &half_huge(), 100, 90, true, false),
            (Launch::JUMBO, &half_huge(), 100, 40, true, false),
            (Launch::Plain, &huge(Bytes(100)), 100, 96, false, true),
            (Launch::Plain, &hugetlb(Bytes(100)), 100, 96, false, false),
        ] {
            let figures = with(
                Figures::new(),
                [
                    ("resident_bytes", f64::from(resident)),
                    ("huge_bytes", f64::from(huge)),
                    ("huge_percent", f64::from(huge)),
                    ("hugetlb_bytes", 0.0),
                    ("preload_libraries", f64::from(u8::from(preloaded))),
                ],
            );
            let checked = check(claims, &launch, &figures);
            assert_eq!(
                checked.is_ok(),
                fine,
                "{launch:?} {figures:?} {claims:?} {checked:?}"
            );
        }
    }

    #[test]
    fn a_refusal_says_what_was_found_and_what_is_right() {
        let figures = with(
            Figures::new(),
            [("preload_libraries", 0.0), ("huge_bytes", 2e6)],
        );
        let said = |claims: &[Claim]| {
            let refused = check(claims, &Launch::Plain, &figures).unwrap_err();
            refused.of_side("plain").to_string()
        };
        assert_eq!(
            said(&no_huge()),
            "the run named `plain` is not what its name says: huge bytes: 1.9 MiB, and not 0.0 MiB"
        );
        assert!(said(&[back()]).ends_with("back ms: none, and not at least 0"));
        assert!(said(&[pages("used_pages", 1..=2)]).ends_with("none, and not 1 to 2"));
    }

    #[test]
    fn a_side_that_freed_in_another_way_is_refused() {
        let size = Bytes(1000);
        let by = |threads| freed_by(threads, size, 2);
        let (one, four, later) = (by(1), by(4), vec![freed_later(size)]);
        for (claims, gathered, background, threads, fine) in [
            (&one, 0, 0, 0, true),
            (&one, 1000, 0, 1, true),
            (&one, 1000, 0, 2, false),
            (&four, 950, 0, 4, true),
            (&four, 950, 0, 3, true),
            (&four, 950, 0, 1, false),
            (&four, 950, 0, 5, false),
            (&four, 500, 0, 4, false),
            (&four, 0, 0, 0, false),
            (&later, 1000, 1000, 2, true),
            (&later, 1000, 100, 2, false),
            (&vec![back()], 0, 0, 0, false),
        ] {
            let figures = with(
                Figures::new(),
                [
                    ("gathered_bytes", f64::from(gathered)),
                    ("background_bytes", f64::from(background)),
                    ("freeing_threads", f64::from(threads)),
                    ("preload_libraries", 1.0),
                ],
            );
            let checked = check(claims, &Launch::JUMBO, &figures);
            assert_eq!(checked.is_ok(), fine, "{claims:?} {figures:?} {checked:?}");
        }
    }
}
