//! [`Side`]: what is compared, what the kernel's pool must have for it, and what its samples must show.

use std::borrow::Cow;

use jumbo::policy::ReaperMode;
use jumbo::units::{Bytes, Pages};

use super::SIZE;
use super::keeper::Wanted;
use super::task::{Arrays, Counted, Provision, Source, Supply, Task, Way};
use super::worker::EXCHANGED;
use crate::child::{Launch, Options};
use crate::memory::Memory;
use crate::{Error, claim};

/// So much of what a side was to have it must have, in percent.
const MOST: u64 = 95;

/// What a heap takes beside what the program asks for.
const BESIDE: Bytes = Bytes(64 << 20);

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
                Arrays::Heap(supply) => {
                    format!("jumbo run --pool, {}", supply.pool_name())
                }
                Arrays::Region(supply) => format!("region of a {} pool", supply.pool_name()),
            },
            Task::FirstUse { supply, .. } => supply.name(),
            Task::Exchange { way, .. } => way.name().to_owned(),
            Task::Load { pool: None, .. } => "plain".to_owned(),
            Task::Load {
                pool: Some(source), ..
            } => format!("jumbo run --heap=mimalloc --pool, {}", source.name()),
            Task::Keep => "keeper".to_owned(),
        };
        if self.again {
            format!("{name} again").into()
        } else {
            name.into()
        }
    }

    /// How its program is started.
    pub(super) fn launch(&self) -> Launch {
        let mimalloc = match self.task {
            Task::Stream {
                arrays: Arrays::Heap(_),
                ..
            } => false,
            Task::Load { pool: Some(_), .. } => true,
            _ => return Launch::Plain,
        };
        Launch::Jumbo(Options {
            pool: Some(self.pool()),
            mimalloc,
            // The pages must be back when the next sample begins.
            reaper: Some(ReaperMode::Off),
            ..Options::NONE
        })
    }

    /// What `--pool` is told: what the program asks for, and what its allocator needs beside that.
    fn pool(&self) -> Bytes {
        let size = match self.task {
            Task::Load { size, .. } => Bytes(size.0 / 4 * 5),
            _ => self.size(),
        };
        (size + BESIDE).whole_pages(SIZE).bytes(SIZE)
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
                Arrays::Heap(supply) => of(supply, self.pool().whole_pages(SIZE)),
                Arrays::Region(supply) => of(supply, size.whole_pages(SIZE)),
            },
            Task::FirstUse { supply, pages, .. } => of(supply, pages),
            Task::Load {
                pool: Some(source), ..
            } => {
                let provision = Provision::Held;
                of(Supply { source, provision }, self.pool().whole_pages(SIZE))
            }
            Task::Exchange { way, .. } => match way {
                Way::Take(Source::Thp) | Way::TakeZeroed(Source::Thp) | Way::MapThp => None,
                _ => Some(Wanted {
                    persistent: EXCHANGED,
                    ..Wanted::default()
                }),
            },
            Task::Load { pool: None, .. } | Task::Keep => None,
        }
    }

    /// How much memory it touches.
    pub(super) fn size(&self) -> Bytes {
        match self.task {
            Task::Stream { size, .. } | Task::Load { size, .. } => size,
            Task::FirstUse { pages, .. } => pages.bytes(SIZE),
            Task::Exchange { .. } => EXCHANGED.bytes(SIZE),
            Task::Keep => Bytes(0),
        }
    }

    /// Whether a sample is of what this side's name says.
    pub(super) fn check(&self, memory: &Memory, counted: Counted) -> Result<(), Error> {
        let found = match self.task {
            Task::Stream { arrays, size, .. } => match arrays {
                Arrays::BasePages => return claim::base_pages(self.launch(), memory, size),
                Arrays::Heap(supply) => {
                    claim::launched(self.launch(), memory)?;
                    supply.heap_found_wrong(memory, counted, size)
                }
                Arrays::Region(supply) => supply.found_wrong(memory, counted, size),
            },
            Task::FirstUse { supply, pages, .. } => {
                supply.found_wrong(memory, counted, pages.bytes(SIZE))
            }
            Task::Exchange { way, .. } => way.found_wrong(memory, counted),
            Task::Load { size, pool } => {
                claim::launched(self.launch(), memory)?;
                match pool {
                    None => {
                        claim::no_huge_pages(self.launch(), memory)?;
                        None
                    }
                    Some(source) => source.found_wrong(memory, size),
                }
            }
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

    /// The same where the pool is the preload library's, of which the kernel's counters alone are seen.
    fn heap_found_wrong(self, memory: &Memory, counted: Counted, size: Bytes) -> Option<String> {
        let (found, most) = (
            counted.kernel_surplus,
            size.whole_pages(SIZE).0 / 100 * MOST,
        );
        match self.provision {
            _ if self.source == Source::Thp => self.source.found_wrong(memory, size),
            Provision::Surplus if found.0 < most => Some(format!(
                "surplus pages of the kernel's pool: {found} and not {most}"
            )),
            Provision::Held | Provision::Persistent if found > Pages(0) => {
                Some(format!("surplus pages of the kernel's pool: {found}"))
            }
            _ => self.source.found_wrong(memory, size),
        }
    }

    fn found_wrong(self, memory: &Memory, counted: Counted, size: Bytes) -> Option<String> {
        let pages = size.whole_pages(SIZE);
        let (ours, kernels) = match self.provision {
            Provision::Held => (Pages(0), Pages(0)),
            Provision::Persistent => (pages, Pages(0)),
            Provision::Surplus => (pages, pages),
        };
        let is_hugetlb = self.source == Source::Hugetlb;
        if memory.preloaded {
            Some("jumbo's preload library is in it".to_owned())
        } else if let Some(found) = self.source.found_wrong(memory, size) {
            Some(found)
        } else if counted.used != pages {
            Some(format!("pages taken: {} of {pages}", counted.used))
        } else if counted.surplus != ours {
            Some(format!(
                "surplus pages of the pool: {} and not {ours}",
                counted.surplus
            ))
        } else if is_hugetlb && counted.kernel_surplus != kernels {
            let found = counted.kernel_surplus;
            Some(format!(
                "surplus pages of the kernel's pool: {found} and not {kernels}"
            ))
        } else {
            None
        }
    }
}

impl Source {
    fn found_wrong(self, memory: &Memory, size: Bytes) -> Option<String> {
        let found = match self {
            Self::Hugetlb => memory.hugetlb,
            Self::Thp => memory.huge,
        };
        (found.0 < size.0 / 100 * MOST)
            .then(|| format!("{found} of {size} are in {} pages", self.name()))
    }

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

    fn found_wrong(self, memory: &Memory, counted: Counted) -> Option<String> {
        let page = SIZE.bytes();
        match self {
            Self::Take(_) | Self::TakeZeroed(_) => {
                let held = EXCHANGED.bytes(SIZE).0 / 100 * MOST;
                (counted.used != Pages(1) || counted.surplus != Pages(0) || memory.huge.0 < held)
                    .then(|| {
                        let (used, surplus) = (counted.used, counted.surplus);
                        let huge = memory.huge;
                        format!("pages taken: {used}, surplus: {surplus}; {huge} in huge pages")
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
                hugetlb: Pages(huge).bytes(SIZE),
                preloaded: false,
            };
            let counted = Counted {
                used: Pages(used),
                surplus: Pages(ours),
                kernel_surplus: Pages(kernels),
                kernel_reserved: Pages(0),
            };
            let fine = SIDES.map(|which| side(which).check(&memory, counted).is_ok());
            assert_eq!(fine, right, "{memory:?} {counted:?}");
            let preloaded = Memory {
                preloaded: true,
                ..memory
            };
            let fine = SIDES.map(|which| side(which).check(&preloaded, counted).is_ok());
            assert_eq!(fine, [false; 5]);
        }
    }

    #[test]
    fn a_heap_must_be_on_the_pages_that_its_side_names() {
        let size = Pages(100).bytes(SIZE);
        let side = |provision| {
            let source = Source::Hugetlb;
            Side::new(Task::Stream {
                arrays: Arrays::Heap(Supply { source, provision }),
                size,
                threads: 1,
                passes: 1,
            })
        };
        let sides = [Provision::Held, Provision::Surplus].map(side);
        let pool = sides[0].pool().whole_pages(SIZE);
        assert_eq!(sides[0].wanted().unwrap().persistent, pool);
        assert_eq!(sides[1].wanted().unwrap().overcommit, pool);
        // In huge pages, of them in hugetlb pages, surplus pages of the kernel's; for which side that is right.
        for (huge, hugetlb, surplus, right) in [
            (100, 100, 0, [true, false]),
            (100, 100, 97, [false, true]),
            (100, 100, 50, [false, false]),
            (100, 0, 0, [false, false]),
        ] {
            let memory = Memory {
                resident: size,
                huge: Pages(huge).bytes(SIZE),
                hugetlb: Pages(hugetlb).bytes(SIZE),
                preloaded: true,
            };
            let counted = Counted {
                kernel_surplus: Pages(surplus),
                ..Counted::default()
            };
            let fine = sides.map(|side| side.check(&memory, counted).is_ok());
            assert_eq!(fine, right, "{memory:?} {counted:?}");
            let plain = Memory {
                preloaded: false,
                ..memory
            };
            assert!(
                sides
                    .iter()
                    .all(|side| side.check(&plain, counted).is_err())
            );
        }
    }

    #[test]
    fn a_mapping_without_a_page_is_refused() {
        let memory = |huge| Memory {
            resident: Bytes(0),
            huge,
            hugetlb: Bytes(0),
            preloaded: false,
        };
        let page = Bytes(SIZE.bytes());
        let promised = Counted {
            kernel_reserved: Pages(1),
            ..Counted::default()
        };
        let fine = |way, huge, counted| {
            let side = Side::new(Task::Exchange { way, threads: 1 });
            side.check(&memory(huge), counted).is_ok()
        };
        assert!(fine(Way::Map, Bytes(0), promised));
        assert!(!fine(Way::Map, Bytes(0), Counted::default()));
        for way in [Way::MapTouched, Way::MapThp] {
            assert!(fine(way, page, Counted::default()) && !fine(way, Bytes(0), promised));
        }
    }
}
