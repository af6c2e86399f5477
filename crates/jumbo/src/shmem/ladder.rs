//! Methods for shared memory on huge pages: [`Rung`], and their selection: [`Standing`].

use rustix::io::Errno;

use super::policy::{Advice, Controls, Mapped, Refusal};
use crate::units::PageSize;

/// A method for huge pages; a better one is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Rung {
    /// Base pages.
    Base,
    /// First touches, subject to the kernel's controls.
    Kernel,
    /// Touch and collapse ([`super::Region::collapse`]): pages of the PMD size, without privilege.
    Collapse,
    /// Populated pages of the kernel's hugetlb pool.
    Hugetlb,
}

/// Reason against a method.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Why {
    /// The kernel's pool has too few pages.
    #[error(
        "no {size} pages of the kernel's pool: {errno}; hint: `jumbo pool set {size} --overcommit SIZE`"
    )]
    NoPages {
        /// The page size.
        size: PageSize,
        /// The errno, in words.
        errno: String,
    },
    /// The region is not a multiple of the page size.
    #[error("it is no whole number of {0} pages")]
    NotWhole(PageSize),
    /// The size is not among the requested ones.
    #[error("{0} is not among the sizes asked for")]
    Size(PageSize),
    /// A first touch allocates the PMD size already.
    #[error("a first touch brings {0} without it")]
    Needless(PageSize),
    /// The controls allow no huge folio, or none of the requested sizes.
    #[error(
        "the kernel's controls give no such size to a first touch; hint: `jumbo thp show --shmem`"
    )]
    Controls,
    /// A control forbids the collapse.
    #[error("{0}")]
    Refused(#[from] Refusal),
    /// The controls cannot be read, or have an unknown word.
    #[error("what the kernel allows to shared memory is not known: {0}")]
    Unknown(String),
}

/// The method that a region uses, and the reasons against better ones.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Standing {
    /// The method in use.
    pub rung: Rung,
    /// Folio sizes that a first touch tries, in order; on hugetlb its page size.
    pub sizes: Vec<PageSize>,
    /// Requested methods that were not available, from the highest down.
    pub refused: Vec<(Rung, Why)>,
}

/// Describes the errno of a failed hugetlb population.
pub(super) fn no_pages(errno: Errno) -> String {
    let why = match errno {
        Errno::FAULT | Errno::NOMEM => {
            "the pool and its overcommit, or a cgroup's limit, are used up"
        }
        Errno::INVAL => "a kernel before Linux 5.14",
        _ => "the kernel's answer",
    };
    format!("{why} ({errno})")
}

/// Selects the method below hugetlb, and its advice. `mapped` has the first block; `sizes` are the
/// requested ones, `None`: any.
pub(super) fn stand(
    controls: Result<&Controls, &str>,
    mapped: &Mapped,
    sizes: Option<&[PageSize]>,
    up_to: Rung,
    mut refused: Vec<(Rung, Why)>,
) -> (Standing, Advice) {
    let wanted = |size: PageSize| sizes.is_none_or(|sizes| sizes.contains(&size));
    // Sizes that were not requested must not be allocated.
    let advice = match (up_to, sizes) {
        (Rung::Base, _) | (_, Some(_)) => Advice::NoHuge,
        (_, None) => Advice::Huge,
    };
    let (mut rung, mut tried, mut given) = (Rung::Base, Vec::new(), advice);
    match controls {
        _ if up_to == Rung::Base => {}
        Err(unknown) => {
            refused.push((up_to, Why::Unknown(unknown.to_owned())));
            given = Advice::Huge;
        }
        Ok(controls) => {
            let (pmd, start) = (controls.pmd(), mapped.range.start);
            let with = |advice| Mapped {
                advice,
                ..mapped.clone()
            };
            let tries = |advice| controls.tried(&with(advice), start);
            // The advice with which a first touch allocates a requested size.
            let fits = |advice: &Advice| tries(*advice).first().is_some_and(|size| wanted(*size));
            let touch = [Advice::Huge, Advice::None].into_iter().find(fits);
            let brings_pmd = touch.is_some_and(|advice| tries(advice).first() == Some(&pmd));
            let against = match controls.collapses(&with(Advice::Huge), start) {
                _ if !wanted(pmd) => Some(Why::Size(pmd)),
                Err(refusal) => Some(Why::from(refusal)),
                Ok(()) => brings_pmd.then_some(Why::Needless(pmd)),
            };
            let collapses = up_to >= Rung::Collapse && against.is_none();
            let against = against.filter(|_| up_to >= Rung::Collapse);
            refused.extend(against.map(|why| (Rung::Collapse, why)));
            match touch {
                _ if collapses => {
                    (rung, tried, given) = (Rung::Collapse, tries(Advice::Huge), Advice::Huge);
                }
                Some(advice) => (rung, tried, given) = (Rung::Kernel, tries(advice), advice),
                None => refused.push((Rung::Kernel, Why::Controls)),
            }
        }
    }
    let standing = Standing {
        rung,
        sizes: tried,
        refused,
    };
    (standing, given)
}
