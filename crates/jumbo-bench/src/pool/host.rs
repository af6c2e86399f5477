//! The kernel's pool, larger for a sample than it was: [`Host`].

use jumbo::kernel::{Root, hugetlb};
use jumbo::knobs::Knob;
use jumbo::units::Pages;

use crate::keeper::{Keeper, Kept, SIZE, kernel_pool};
use crate::{Error, Settings};

/// What the kernel's pool shall have beyond what it had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Persistent pages.
    pub(crate) persistent: Pages,
    /// Its overcommit.
    pub(crate) overcommit: Pages,
}

impl Wanted {
    pub(crate) fn persistent(pages: Pages) -> Self {
        Self {
            persistent: pages,
            overcommit: Pages(0),
        }
    }
}

/// The kernel's pool of 2 MiB pages, and the right to set it.
pub(crate) struct Host {
    keeper: Keeper,
    before: Option<hugetlb::Pool>,
}

impl Host {
    /// Takes it, if it can have so many pages more, held or on demand; [`Error::Kernel`] says why not.
    pub(crate) fn take(settings: &Settings, pages: Pages) -> Result<Self, Error> {
        let keeper = Keeper::take(settings, Kept::Pool)?;
        // No other process sets it now.
        let before = kernel_pool(&Root::host())?;
        let mut host = Self { keeper, before };
        // What cannot be had is better known now than in the middle.
        host.provide(Wanted {
            persistent: pages,
            overcommit: pages,
        })?;
        Ok(host)
    }

    /// Sets it, which the kernel took so many milliseconds for; [`Error::Kernel`] says why it cannot be so.
    pub(crate) fn provide(&mut self, wanted: Wanted) -> Result<f64, Error> {
        let had =
            |count: fn(&hugetlb::Pool) -> Pages| self.before.as_ref().map_or(0, |p| count(p).0);
        let overcommit = Pages(had(|pool| pool.overcommit) + wanted.overcommit.0);
        let persistent = Pages(had(hugetlb::Pool::persistent) + wanted.persistent.0);
        self.keeper.set(vec![
            (Knob::overcommit(SIZE), overcommit.into()),
            (Knob::persistent(SIZE, None), persistent.into()),
        ])
    }

    /// Has it put back.
    pub(crate) fn give_back(self) -> Result<(), Error> {
        self.keeper.give_back()
    }
}
