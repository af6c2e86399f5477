//! [`Side`]: what is compared, what the kernel's pool must have for it, and what its samples must show.

use std::borrow::Cow;

use jumbo::units::{Bytes, Pages};

use super::SIZE;
use super::keeper::Wanted;
use super::task::{Arrays, Counted, Provision, Source, Supply, Task, Way};
use super::worker::EXCHANGED;
use crate::memory::Memory;
use crate::{Error, claim};

/// So much of what a side was to have it must have, in percent.
const MOST: u64 = 95;

/// Where a pool's pages are not what they should be.
const ALONE: &str = "measure while nobody else uses the kernel's pool of 2 MiB pages: `jumbo pool show` says who does";

/// One way to have pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Side {
    pub(super) task: Task,
    /// The baseline once more.
    pub(super) again: bool,
}

impl Side {
    pub(super) const fn new(task: Task) -> Self {
        Self { task, again: false }
    }

    pub(super) const fn again(task: Task) -> Self {
        Self { task, again: true }
    }

    /// As the table shows it.
    pub(super) fn name(&self) -> Cow<'static, str> {
        let name = match self.task {
            Task::Stream { arrays, .. } => match arrays {
                Arrays::BasePages => "base pages".to_owned(),
                Arrays::Region(supply) => format!("region of a {} pool", supply.pool_name()),
            },
            Task::FirstUse { supply, .. } => supply.name(),
            Task::Exchange { way, .. } => way.name().to_owned(),
            Task::Keep => "keeper".to_owned(),
        };
        if self.again {
            format!("{name} again").into()
        } else {
            name.into()
        }
    }

    /// What the kernel's pool must have beyond what it had; `None` where it has no part in it.
    pub(super) fn wanted(&self) -> Option<Wanted> {
        let of = |supply: Supply, pages: Pages| match supply {
            Supply {
                source: Source::Thp,
                ..
            } => None,
            Supply {
                provision: Provision::Surplus,
                ..
            } => Some(Wanted {
                overcommit: pages,
                ..Wanted::default()
            }),
            _ => Some(Wanted {
                persistent: pages,
                ..Wanted::default()
            }),
        };
        match self.task {
            Task::Stream { arrays, size, .. } => match arrays {
                Arrays::BasePages => None,
                Arrays::Region(supply) => of(supply, size.whole_pages(SIZE)),
            },
            Task::FirstUse { supply, pages, .. } => of(supply, pages),
            Task::Exchange { way, .. } => match way {
                Way::Take(Source::Thp) | Way::TakeZeroed(Source::Thp) | Way::MapThp => None,
                _ => Some(Wanted {
                    persistent: EXCHANGED,
                    ..Wanted::default()
                }),
            },
            Task::Keep => None,
        }
    }

    /// How much memory it touches.
    pub(super) fn size(&self) -> Bytes {
        match self.task {
            Task::Stream { size, .. } => size,
            Task::FirstUse { pages, .. } => pages.bytes(SIZE),
            Task::Exchange { .. } => EXCHANGED.bytes(SIZE),
            Task::Keep => Bytes(0),
        }
    }

    /// Whether a sample is of what this side's name says.
    pub(super) fn check(&self, memory: &Memory, counted: &Counted) -> Result<(), Error> {
        let found = match self.task {
            Task::Stream { arrays, size, .. } => match arrays {
                Arrays::BasePages => {
                    return claim::base_pages(crate::child::Launch::Plain, memory, size);
                }
                Arrays::Region(supply) => supply.found_wrong(memory, counted, size),
            },
            Task::FirstUse { supply, pages, .. } => {
                supply.found_wrong(memory, counted, pages.bytes(SIZE))
            }
            Task::Exchange { way, .. } => way.found_wrong(memory, counted),
            Task::Keep => None,
        };
        match found {
            None => Ok(()),
            Some(found) => Err(Error::Claim {
                variant: self.name().into_owned(),
                found,
                hint: ALONE,
            }),
        }
    }
}

impl Supply {
    /// A page of it, in a few words.
    pub(super) fn name(self) -> String {
        let provision = match self.provision {
            Provision::Held => "held",
            Provision::Persistent => "persistent",
            Provision::Surplus => "surplus",
        };
        format!("{provision} ({})", self.source.name())
    }

    /// The pool, in a few words.
    fn pool_name(self) -> String {
        let provision = match self.provision {
            Provision::Held | Provision::Persistent => "preallocated",
            Provision::Surplus => "dynamic",
        };
        format!("{provision} {}", self.source.name())
    }

    fn found_wrong(self, memory: &Memory, counted: &Counted, size: Bytes) -> Option<String> {
        let pages = size.whole_pages(SIZE);
        let (ours, kernels) = match self.provision {
            Provision::Held => (Pages(0), Pages(0)),
            Provision::Persistent => (pages, Pages(0)),
            Provision::Surplus => (pages, pages),
        };
        let is_hugetlb = self.source == Source::Hugetlb;
        if memory.preloaded {
            Some("jumbo's preload library is in it".to_owned())
        } else if memory.huge.0 < size.0 / 100 * MOST {
            Some(format!("{} of {size} are in huge pages", memory.huge))
        } else if counted.used != pages {
            Some(format!("{} of {pages} pages are taken", counted.used))
        } else if counted.surplus != ours {
            Some(format!(
                "{} pages of the pool are surplus and not {ours}",
                counted.surplus
            ))
        } else if is_hugetlb && counted.kernel_surplus != kernels {
            let found = counted.kernel_surplus;
            Some(format!(
                "{found} pages of the kernel's pool are surplus and not {kernels}"
            ))
        } else {
            None
        }
    }
}

impl Source {
    /// What the pages are.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hugetlb => "hugetlb",
            Self::Thp => "thp",
        }
    }
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Take(Source::Hugetlb) => "take, give (hugetlb)",
            Self::Take(Source::Thp) => "take, give (thp)",
            Self::TakeZeroed(Source::Hugetlb) => "take zeroed, give (hugetlb)",
            Self::TakeZeroed(Source::Thp) => "take zeroed, give (thp)",
            Self::Map => "mmap, munmap (hugetlb)",
            Self::MapTouched => "mmap, touch, munmap (hugetlb)",
            Self::MapThp => "mmap, advise, touch, munmap (thp)",
        }
    }

    fn found_wrong(self, memory: &Memory, counted: &Counted) -> Option<String> {
        let page = SIZE.bytes();
        match self {
            Self::Take(_) | Self::TakeZeroed(_) => {
                let held = EXCHANGED.bytes(SIZE).0 / 100 * MOST;
                (counted.used != Pages(1) || counted.surplus != Pages(0) || memory.huge.0 < held)
                    .then(|| {
                        let (used, surplus) = (counted.used, counted.surplus);
                        let huge = memory.huge;
                        format!("{used} pages are taken, {surplus} are surplus, {huge} are in huge pages")
                    })
            }
            Self::Map if counted.kernel_reserved < Pages(1) => {
                Some("the kernel has promised no page".to_owned())
            }
            Self::MapTouched | Self::MapThp if memory.huge.0 < page => {
                Some(format!("{} are in huge pages", memory.huge))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: Pages = Pages(10);
    const SIDES: [(Source, Provision); 5] = [
        (Source::Hugetlb, Provision::Held),
        (Source::Hugetlb, Provision::Persistent),
        (Source::Hugetlb, Provision::Surplus),
        (Source::Thp, Provision::Held),
        (Source::Thp, Provision::Surplus),
    ];

    fn side((source, provision): (Source, Provision)) -> Side {
        Side::new(Task::FirstUse {
            supply: Supply { source, provision },
            pages: PAGES,
            times: 1,
        })
    }

    #[test]
    fn what_is_surplus_is_not_in_the_kernels_pool_before() {
        let wanted = SIDES.map(|which| {
            let wanted = side(which).wanted();
            wanted.map(|wanted| (wanted.persistent.0, wanted.overcommit.0))
        });
        assert_eq!(
            wanted,
            [Some((10, 0)), Some((10, 0)), Some((0, 10)), None, None]
        );
    }

    #[test]
    fn pages_that_came_from_elsewhere_are_refused() {
        // Taken; surplus of our pool, and of the kernel's; in huge pages; and for which sides that is right.
        for (used, ours, kernels, huge, right) in [
            (10, 0, 0, 10, [true, false, false, true, false]),
            (10, 10, 0, 10, [false, true, false, false, true]),
            (10, 10, 10, 10, [false, false, true, false, true]),
            (9, 0, 0, 10, [false; 5]),
            (10, 0, 0, 9, [false; 5]),
            (10, 10, 10, 9, [false; 5]),
        ] {
            let memory = Memory {
                resident: Bytes(32 << 20),
                huge: Pages(huge).bytes(SIZE),
                preloaded: false,
            };
            let counted = Counted {
                used: Pages(used),
                surplus: Pages(ours),
                kernel_surplus: Pages(kernels),
                kernel_reserved: Pages(0),
            };
            let fine = SIDES.map(|which| side(which).check(&memory, &counted).is_ok());
            assert_eq!(fine, right, "{memory:?} {counted:?}");
            let preloaded = Memory {
                preloaded: true,
                ..memory
            };
            let fine = SIDES.map(|which| side(which).check(&preloaded, &counted).is_ok());
            assert_eq!(fine, [false; 5]);
        }
    }

    #[test]
    fn a_mapping_without_a_page_is_refused() {
        let memory = |huge| Memory {
            resident: Bytes(0),
            huge,
            preloaded: false,
        };
        let page = Bytes(SIZE.bytes());
        let promised = Counted {
            kernel_reserved: Pages(1),
            ..Counted::default()
        };
        let fine = |way, huge, counted: &Counted| {
            let side = Side::new(Task::Exchange { way, threads: 1 });
            side.check(&memory(huge), counted).is_ok()
        };
        assert!(fine(Way::Map, Bytes(0), &promised));
        assert!(!fine(Way::Map, Bytes(0), &Counted::default()));
        for way in [Way::MapTouched, Way::MapThp] {
            assert!(fine(way, page, &Counted::default()) && !fine(way, Bytes(0), &promised));
        }
    }
}
