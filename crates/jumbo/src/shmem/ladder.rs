//! How shared memory comes onto huge pages: [`Rung`], and why not on a higher one: [`Standing`].

use rustix::io::Errno;

use super::policy::{Advice, Controls, Mapped, Refusal};
use crate::units::PageSize;

/// A way onto huge pages. Higher ones are larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Rung {
    /// None: base pages.
    Base,
    /// The kernel's controls as they are: what a first touch brings.
    Kernel,
    /// Touch and collapse ([`super::Region::collapse`]): pages of the PMD size, without privilege.
    Collapse,
    /// Pages of the kernel's hugetlb pool, all of them there.
    Hugetlb,
}

/// Why memory is not on a rung.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Why {
    /// Pages of the kernel's pool are not to be had.
    #[error(
        "no {size} pages of the kernel's pool: {errno}; hint: `jumbo pool set {size} --overcommit SIZE`"
    )]
    NoPages {
        /// Their size.
        size: PageSize,
        /// The kernel's answer, in words.
        errno: String,
    },
    /// The region is no whole number of pages.
    #[error("it is no whole number of {0} pages")]
    NotWhole(PageSize),
    /// The size is none of those that were asked for.
    #[error("{0} is not among the sizes asked for")]
    Size(PageSize),
    /// A first touch brings the PMD size already.
    #[error("a first touch brings {0} without it")]
    Needless(PageSize),
    /// The controls allow no huge folio, or none of the sizes that were asked for.
    #[error(
        "the kernel's controls give no such size to a first touch; hint: `jumbo thp show --shmem`"
    )]
    Controls,
    /// A control keeps the kernel from collapsing.
    #[error("{0}")]
    Refused(#[from] Refusal),
    /// The controls cannot be read, or have a word that is not known here.
    #[error("what the kernel allows to shared memory is not known: {0}")]
    Unknown(String),
}

/// Where a region stands, and why not higher.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Standing {
    /// The rung.
    pub rung: Rung,
    /// The folio sizes that a first touch tries there, the first one first; of hugetlb, its page.
    pub sizes: Vec<PageSize>,
    /// Those that were asked for and could not be had, from the highest down.
    pub refused: Vec<(Rung, Why)>,
}

/// What the kernel's answer means to a touch of hugetlb pages.
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

/// The rung below hugetlb, and the advice that it takes. `mapped` has the first block; `sizes` are those asked for, `None`: any.
pub(super) fn stand(
    controls: Result<&Controls, &str>,
    mapped: &Mapped,
    sizes: Option<&[PageSize]>,
    up_to: Rung,
    mut refused: Vec<(Rung, Why)>,
) -> (Standing, Advice) {
    let wanted = |size: PageSize| sizes.is_none_or(|sizes| sizes.contains(&size));
    // What was not asked for is not to come either.
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
            // The advice under which a first touch brings a size that was asked for.
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
