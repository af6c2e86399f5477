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
    let mut on = |rung, sizes, why: Option<(Rung, Why)>| {
        refused.extend(why);
        let refused = std::mem::take(&mut refused);
        Standing {
            rung,
            sizes,
            refused,
        }
    };
    if up_to == Rung::Base {
        return (on(Rung::Base, Vec::new(), None), Advice::NoHuge);
    }
    let controls = match controls {
        Ok(controls) => controls,
        Err(unknown) => {
            let why = Why::Unknown(unknown.to_owned());
            return (on(Rung::Base, Vec::new(), Some((up_to, why))), Advice::Huge);
        }
    };
    let start = mapped.range.start;
    let with = |advice| Mapped {
        advice,
        ..mapped.clone()
    };
    let tried = |advice| controls.tried(&with(advice), start);
    let collapses = match (up_to >= Rung::Collapse, wanted(controls.pmd)) {
        (true, true) => controls
            .collapses(&with(Advice::Huge), start)
            .map_err(Why::from),
        (_, false) => Err(Why::Size(controls.pmd)),
        (false, _) => Err(Why::Controls),
    };
    // The advice under which a first touch brings a size that was asked for.
    let fits = |advice: &Advice| tried(*advice).first().is_some_and(|size| wanted(*size));
    let advice = [Advice::Huge, Advice::None].into_iter().find(fits);
    if let Some(advice) = advice
        && (tried(advice).first() == Some(&controls.pmd)
            || collapses.is_err()
            || up_to < Rung::Collapse)
    {
        let why = match collapses {
            Ok(()) => Why::Needless(controls.pmd),
            Err(why) => why,
        };
        let why = (up_to >= Rung::Collapse).then_some((Rung::Collapse, why));
        return (on(Rung::Kernel, tried(advice), why), advice);
    }
    let why = match (collapses, up_to) {
        (Ok(()), _) => return (on(Rung::Collapse, tried(Advice::Huge), None), Advice::Huge),
        (Err(why), Rung::Collapse | Rung::Hugetlb) => Some((Rung::Collapse, why)),
        (Err(_), _) => None,
    };
    let mut standing = on(Rung::Base, Vec::new(), why);
    standing.refused.push((Rung::Kernel, Why::Controls));
    // What was not asked for is not to come either.
    let advice = match sizes {
        Some(_) => Advice::NoHuge,
        None => Advice::Huge,
    };
    (standing, advice)
}
