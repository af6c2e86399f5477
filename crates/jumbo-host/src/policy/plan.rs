//! [`RunPlan`]: derived from the options, the host and the program.

use serde::Serialize;

use super::{
    DataMode, FilesMode, HeapMode, MaxWaste, Orders, PoolRequest, Reach, ShmMode, TextMode,
};
use crate::kernel::thp::Thp;
use crate::units::{Bytes, PageSize};

/// The host's support for huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSupport {
    /// The PMD size; `None` where the kernel has no THP.
    pub pmd: Option<PageSize>,
    /// `enabled` is `never` for that size: page faults allocate no THP.
    pub thp_never: bool,
    /// The kernel's pool has pages of the requested size, or can make some.
    pub has_pages: bool,
}

/// Plan for one program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunPlan {
    /// Configuration of the preload library; the launcher adds the ledger.
    pub orders: Orders<'static>,
    /// LD_PRELOAD and JUMBO_ORDERS go into the environment.
    pub preload: bool,
    /// Requested page size that the kernel's pool lacks: the pool uses smaller pages instead.
    pub no_pages: Option<PageSize>,
    /// The kernel has THP, as far as can be known.
    pub thp: bool,
}

/// Treatment of one kind of the program's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Kind of memory.
    pub what: &'static str,
    /// Possible folio sizes; empty where the memory stays on base pages.
    pub sizes: Vec<PageSize>,
    /// Method, or the reason for base pages.
    pub how: String,
}

impl RunPlan {
    /// Returns the plan for one program.
    pub fn new(
        requested: Orders<'static>,
        pool: Option<PoolRequest>,
        host: HostSupport,
        reach: &Reach,
    ) -> Self {
        let thp = host.pmd.is_some();
        let pmd = host.pmd.and_then(|size| usize::try_from(size.bytes()).ok());
        // A program that is out of reach may start others that are not.
        let useful = reach.is_reached() || requested.follow;
        let preload = useful && reach.tolerates_preload();
        let mut request = pool;
        let mut no_pages = None;
        // THPs are of the PMD size.
        if let (Some(pool), false) = (&mut request, host.has_pages) {
            no_pages = pool
                .page
                .take_if(|page| host.pmd.is_some_and(|pmd| *page > pmd));
        }
        let orders = Orders {
            heap: if thp { requested.heap } else { HeapMode::Off },
            pool: pmd.zip(request).map(|(pmd, request)| request.order(pmd)),
            maps: requested.maps && thp,
            text: if thp { requested.text } else { TextMode::Off },
            data: if thp { requested.data } else { DataMode::Off },
            files: if thp { requested.files } else { FilesMode::Off },
            shm: if thp { requested.shm } else { ShmMode::Off },
            small_pages: host.thp_never,
            pmd: pmd.unwrap_or(requested.pmd),
            ..requested
        };
        Self {
            orders,
            preload,
            no_pages,
            thp,
        }
    }

    /// Returns the reason for pages of another size than requested.
    pub fn why_other_pages(&self) -> Option<String> {
        let (requested, pool) = (self.no_pages?, self.orders.pool?);
        let page = PageSize::new(pool.page as u64).ok()?;
        Some(format!(
            "in pages of {page}: the kernel's pool shows none of {requested} free, and THPs are of {page}; \
             hint: jumbo pool grow {requested} N"
        ))
    }

    /// Returns the treatment of each kind of memory. `thp` has the host's controls; `None` where
    /// there are none, or they are unreadable. `thp_disabled`: PR_SET_THP_DISABLE is set.
    pub fn memory(&self, reach: &Reach, thp: Option<&Thp>, thp_disabled: bool) -> Vec<MemoryPlan> {
        let no_thp = || match thp {
            _ if thp_disabled => {
                Some("THP is switched off for this process and its children (PR_SET_THP_DISABLE)")
            }
            None if !self.thp => Some("this kernel has no transparent huge pages"),
            _ => None,
        };
        let none = reach.reason().or_else(|| no_thp().map(String::from));
        let no_size = || thp.filter(|thp| advisable(thp).is_empty()).map(why_no_size);
        let general = none.clone().or_else(no_size);
        let pmd = || PageSize::new(self.orders.pmd as u64).into_iter().collect();
        let sizes = thp.map_or_else(pmd, advisable);
        let unknown = match thp {
            Some(_) => "",
            None => "; whether the host allows it cannot be read here (/sys)",
        };
        let advised = |what, on: bool, option: &str, how: String| match &general {
            _ if !on => MemoryPlan::left(what, format!("{option}=off")),
            Some(reason) => MemoryPlan::left(what, reason),
            None => MemoryPlan {
                what,
                sizes: sizes.clone(),
                how: format!("{how}{unknown}"),
            },
        };
        let heap = self.orders.heap != HeapMode::Off;
        let wasted = match self.orders.max_waste {
            MaxWaste::Percent(percent) => format!("at most {percent} % wasted"),
            MaxWaste::Unbounded => String::from("whatever is touched of it"),
        };
        let maps = format!("mmap, aligned and advised where a whole huge page fits; {wasted}");
        vec![
            advised(LARGE_ALLOCATIONS, heap, "--heap", self.large()),
            advised(SMALL_ALLOCATIONS, heap, "--heap", self.small().to_owned()),
            advised(MAPPINGS, self.orders.maps, "--maps", maps),
            match &general {
                Some(reason) => MemoryPlan::left("text", reason),
                None => self.text(),
            },
            advised(
                "data, bss",
                self.orders.data != DataMode::Off,
                "--data",
                String::from(
                    "bss advised; whole huge pages of data copied at the start, with --data=on all of them",
                ),
            ),
            match &none {
                Some(reason) => MemoryPlan::left("data files", reason),
                None => self.files(),
            },
            match &none {
                Some(reason) => MemoryPlan::left(MemoryPlan::SHARED, reason),
                None => self.shared(),
            },
            MemoryPlan::left("stack", "the main thread's stack is left to the kernel"),
        ]
    }
}

/// Values of [`MemoryPlan::what`] for the heap.
const LARGE_ALLOCATIONS: &str = "large allocations";
const SMALL_ALLOCATIONS: &str = "small allocations";
const MAPPINGS: &str = "anonymous mappings";

impl MemoryPlan {
    /// Value of [`MemoryPlan::what`] for shared memory, whose sizes differ from private memory's.
    const SHARED: &str = "shared memory";

    /// True for allocations and private mappings.
    pub fn is_heap(&self) -> bool {
        [LARGE_ALLOCATIONS, SMALL_ALLOCATIONS, MAPPINGS].contains(&self.what)
    }

    /// Memory that stays on base pages.
    fn left(what: &'static str, why: impl Into<String>) -> Self {
        Self {
            what,
            sizes: Vec::new(),
            how: why.into(),
        }
    }
}

impl RunPlan {
    /// Returns the treatment of text. Its sizes depend on the page cache and the program's headers.
    fn text(&self) -> MemoryPlan {
        let file = "the file's own mapping where the page cache has huge folios";
        let how = match self.orders.text {
            TextMode::Off => return MemoryPlan::left("text", "--text=off"),
            TextMode::File => String::from(file),
            TextMode::Auto => format!(
                "{file}; a shared copy once the program has lived, and touched 32 MiB of it"
            ),
            TextMode::Shared => {
                String::from("one copy for all your processes that run the file, at the start")
            }
        };
        MemoryPlan {
            what: "text",
            sizes: PageSize::new(self.orders.pmd as u64).into_iter().collect(),
            how,
        }
    }

    /// Returns the treatment of data files. Their folios depend on the file system and the page cache.
    fn files(&self) -> MemoryPlan {
        let how = match self.orders.files {
            FilesMode::Off => return MemoryPlan::left("data files", "--files=off"),
            FilesMode::Auto => {
                "what it populates as it maps it to read (MAP_POPULATE) comes in by huge folios"
            }
            FilesMode::On => "what it maps to read comes in a huge page at a time",
        };
        MemoryPlan {
            what: "data files",
            sizes: PageSize::new(self.orders.pmd as u64).into_iter().collect(),
            how: how.to_owned(),
        }
    }

    /// Returns the treatment of shared memory. The kernel's controls may allow other sizes.
    fn shared(&self) -> MemoryPlan {
        let how = match self.orders.shm {
            ShmMode::Off => return MemoryPlan::left(MemoryPlan::SHARED, "--shm=off"),
            ShmMode::Advise => "aligned and advised; the rest is up to the host's shmem_enabled",
            ShmMode::Auto => {
                "aligned and advised; collapsed once it was touched, in mappings of 32 MiB and more"
            }
            ShmMode::Hugetlb => {
                "anonymous mappings of whole hugetlb pages from the kernel's pool; the rest aligned and advised"
            }
        };
        let pmd = self.orders.pmd;
        let sizes = match self.orders.shm_sizes {
            0 => pmd,
            sizes => sizes,
        };
        let bits = (0..usize::BITS).map(|bit| sizes & 1 << bit);
        MemoryPlan {
            what: MemoryPlan::SHARED,
            sizes: bits
                .filter_map(|size| PageSize::new(size as u64).ok())
                .collect(),
            how: how.to_owned(),
        }
    }

    /// Describes the source of small allocations.
    fn small(&self) -> &'static str {
        match self.orders.heap {
            HeapMode::Glibc => "the C library's heap, advised",
            _ => {
                "below 128K in jumbo's slabs, advised; with MALLOC_ variables or glibc.malloc tunables in the C library's heap"
            }
        }
    }

    fn large(&self) -> String {
        let window = "in an aligned window of their own";
        match self.pool() {
            Some(pool) => format!("malloc and its family, from {pool}; beyond it {window}"),
            None => format!("malloc and its family, {window}"),
        }
    }

    /// The pool in words.
    fn pool(&self) -> Option<String> {
        let pool = self.orders.pool?;
        let bytes = |bytes: usize| Bytes(bytes as u64);
        let page = PageSize::new(pool.page as u64).ok()?;
        let more = match pool.overcommit {
            0 => String::new(),
            more => format!(", {} more on demand", bytes(more)),
        };
        let warm = if pool.warm.is_some() {
            ", resident before the start"
        } else {
            ""
        };
        Some(format!(
            "a pool of {} in pages of {page}{more}{warm}",
            bytes(pool.size)
        ))
    }
}

/// Folio sizes that the host allows for advised anonymous memory.
fn advisable(thp: &Thp) -> Vec<PageSize> {
    let mut sizes: Vec<PageSize> = thp.sizes.keys().copied().chain([thp.pmd_size]).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes.retain(|size| {
        thp.anon(*size)
            .is_some_and(|choice| choice.is("always") || choice.is("madvise"))
    });
    sizes
}

fn why_no_size(thp: &Thp) -> String {
    let folder = "/sys/kernel/mm/transparent_hugepage";
    if thp.enabled.is("never") {
        format!("{folder}/enabled says never")
    } else {
        let kib = thp.pmd_size.kib();
        format!("{folder}/hugepages-{kib}kB/enabled says never")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: HostSupport = HostSupport {
        thp_never: false,
        pmd: Some(PageSize::SIZE_2M),
        has_pages: true,
    };

    fn plan(reach: &Reach) -> RunPlan {
        RunPlan::new(Orders::default(), None, HOST, reach)
    }

    #[test]
    fn default_plan_uses_all_mechanisms() {
        let plan = plan(&Reach::Reached);
        assert!(
            plan.preload
                && plan.orders.heap == HeapMode::On
                && plan.orders.maps
                && plan.orders.follow
        );
    }

    #[test]
    fn plan_without_thp_requests_nothing() {
        let plan = RunPlan::new(
            Orders::default(),
            None,
            HostSupport { pmd: None, ..HOST },
            &Reach::Reached,
        );
        assert!(plan.orders.heap == HeapMode::Off && !plan.orders.maps);
        for memory in plan.memory(&Reach::Reached, None, false) {
            assert!(memory.sizes.is_empty(), "{memory:?}");
        }
    }

    #[test]
    fn unreadable_controls_are_reported_as_unknown() {
        let memory = plan(&Reach::Reached).memory(&Reach::Reached, None, false);
        let large = memory.first().unwrap();
        assert_eq!(large.sizes, [PageSize::SIZE_2M], "{large:?}");
        assert!(large.how.contains("cannot be read"), "{large:?}");
    }

    /// A page of 1 GiB made of THPs would be resident as a whole, however little the program uses.
    #[test]
    fn pool_falls_back_to_the_pmd_size() {
        let pool = "2G:1G".parse().ok();
        for (has_pages, page) in [(true, 1 << 30), (false, 2 << 20)] {
            let host = HostSupport { has_pages, ..HOST };
            let plan = RunPlan::new(Orders::default(), pool, host, &Reach::Reached);
            let pool = plan.orders.pool.unwrap();
            assert_eq!((pool.page, pool.size), (page, 2 << 30));
            assert_eq!(plan.why_other_pages().is_some(), !has_pages);
        }
    }

    #[test]
    fn static_program_gets_preload_only_for_its_children() {
        assert!(plan(&Reach::Static).preload);
        let alone = Orders {
            follow: false,
            ..Orders::default()
        };
        assert!(!RunPlan::new(alone, None, HOST, &Reach::Static).preload);
    }

    #[test]
    fn unknown_loader_gets_no_library() {
        let reach = Reach::Loader(String::from("/system/bin/linker64"));
        assert!(!plan(&reach).preload);
    }
}
