//! [`RunPlan`]: from what was asked, what the host has and what the program is, what will be done.

use serde::Serialize;

use super::{
    DataMode, HeapMode, MaxWaste, Orders, PoolRequest, Reach, ShmMode, TextMode, variables,
};
use crate::kernel::thp::Thp;
use crate::units::{Bytes, PageSize};

/// What the host has, as far as a start needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSupport {
    /// The PMD size; `None` where the kernel has no THP.
    pub pmd: Option<PageSize>,
    /// Faults bring no THP of that size: `enabled` is `never`.
    pub thp_never: bool,
    /// The kernel's pool has pages of the size that was asked for, or can make some.
    pub has_pages: bool,
}

/// What becomes of glibc's tunable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tunable {
    /// It is set, in this value of GLIBC_TUNABLES.
    Set(Vec<u8>),
    /// The user gave it this value, which stays.
    Kept(String),
    /// It is not set, for this reason.
    Left(&'static str),
}

/// What will be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunPlan {
    /// For the preload library. Its ledger is the launcher's business.
    pub orders: Orders<'static>,
    /// LD_PRELOAD and JUMBO_ORDERS go into the environment.
    pub preload: bool,
    /// GLIBC_TUNABLES.
    pub tunable: Tunable,
    /// Pages of this size were asked for, and the pool is in smaller ones: the kernel has none of them.
    pub no_pages: Option<PageSize>,
    /// Huge pages are asked for, or would be: the kernel has THP, as far as can be known.
    pub thp: bool,
}

/// What happens to one kind of the program's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Which.
    pub what: &'static str,
    /// The folio sizes it can get; empty where it stays on base pages.
    pub sizes: Vec<PageSize>,
    /// By what means, or why not.
    pub how: String,
}

impl RunPlan {
    /// The plan for one program: what becomes of the orders that the user would give, and of the pool. `tunables` is the
    /// user's GLIBC_TUNABLES.
    pub fn new(
        asked: Orders<'static>,
        pool: Option<PoolRequest>,
        host: HostSupport,
        reach: &Reach,
        tunables: Option<&[u8]>,
    ) -> Self {
        let thp = host.pmd.is_some();
        let pmd = host.pmd.and_then(|size| usize::try_from(size.bytes()).ok());
        // A program that is out of reach may start others that are not.
        let useful = reach.is_reached() || asked.follow;
        let preload = useful && reach.tolerates_preload();
        let tunable = if asked.heap == HeapMode::Off {
            Tunable::Left("--heap=off")
        } else if asked.heap == HeapMode::Mimalloc && pool.is_some() {
            Tunable::Left("--heap=mimalloc: glibc's malloc is not used")
        } else if !thp {
            Tunable::Left("this kernel has no transparent huge pages")
        } else if !useful || !reach.tolerates_tunables() {
            Tunable::Left("the program is to run untouched")
        } else {
            variables::tunables(tunables).map_or_else(Tunable::Kept, Tunable::Set)
        };
        let mut request = pool;
        let mut no_pages = None;
        // What comes as THPs comes in what a PMD maps.
        if let (Some(pool), false) = (&mut request, host.has_pages) {
            no_pages = pool
                .page
                .take_if(|page| host.pmd.is_some_and(|pmd| *page > pmd));
        }
        let orders = Orders {
            heap: if thp { asked.heap } else { HeapMode::Off },
            pool: pmd.zip(request).map(|(pmd, request)| request.order(pmd)),
            maps: asked.maps && thp,
            text: if thp { asked.text } else { TextMode::Off },
            data: if thp { asked.data } else { DataMode::Off },
            shm: if thp { asked.shm } else { ShmMode::Off },
            tunable: matches!(tunable, Tunable::Set(_)),
            small_pages: host.thp_never,
            pmd: pmd.unwrap_or(asked.pmd),
            ..asked
        };
        Self {
            orders,
            preload,
            tunable,
            no_pages,
            thp,
        }
    }

    /// Why the pool is in other pages than was asked for.
    pub fn why_other_pages(&self) -> Option<String> {
        let (asked, pool) = (self.no_pages?, self.orders.pool?);
        let page = PageSize::new(pool.page as u64).ok()?;
        Some(format!(
            "in pages of {page}: the kernel's pool shows none of {asked} free, and THPs are of {page}; \
             hint: jumbo pool grow {asked} N"
        ))
    }

    /// What will be on huge pages and what will not, on a host with these controls; `None` where there are none, or
    /// they cannot be read. `thp_disabled`: the
    /// process was told to do without THP (PR_SET_THP_DISABLE), which its children inherit.
    pub fn memory(&self, reach: &Reach, thp: Option<&Thp>, thp_disabled: bool) -> Vec<MemoryPlan> {
        let none = if let Some(reason) = reach.reason() {
            Some(reason)
        } else if thp_disabled {
            Some(String::from(
                "THP is switched off for this process and its children (PR_SET_THP_DISABLE)",
            ))
        } else if thp.is_none() && !self.thp {
            Some(String::from("this kernel has no transparent huge pages"))
        } else {
            None
        };
        let no_size = || thp.filter(|thp| advisable(thp).is_empty()).map(why_no_size);
        let general = none.clone().or_else(no_size);
        // It is asked for what a PMD maps, whatever comes of it.
        let asked = || PageSize::new(self.orders.pmd as u64).into_iter().collect();
        let sizes = thp.map_or_else(asked, advisable);
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
        let tunable = variables::HUGETLB_TUNABLE;
        let how = match &self.tunable {
            _ if self.is_mimallocs() => Ok(format!("mimalloc, {}", self.arenas())),
            Tunable::Set(_) => Ok(self.small(&format!("{tunable}=1"))),
            Tunable::Kept(value) if value == "1" => {
                Ok(self.small(&format!("your own {tunable}=1")))
            }
            Tunable::Kept(value) if value != "0" => {
                Ok(format!("glibc's heap, by your own {tunable}={value}"))
            }
            Tunable::Kept(value) => Err(format!("your GLIBC_TUNABLES says {tunable}={value}")),
            Tunable::Left(reason) => Err(general.clone().unwrap_or((*reason).to_owned())),
        };
        let small = match how {
            Ok(how) => advised(SMALL, heap, "--heap", how),
            Err(why) => MemoryPlan::left(SMALL, why),
        };
        let wasted = match self.orders.max_waste {
            MaxWaste::Percent(percent) => format!("at most {percent} % wasted"),
            MaxWaste::Unbounded => String::from("whatever is touched of it"),
        };
        let maps = format!("mmap, aligned and advised where a whole huge page fits; {wasted}");
        vec![
            advised(LARGE, heap, "--heap", self.large()),
            small,
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
                Some(reason) => MemoryPlan::left(MemoryPlan::SHARED, reason),
                None => self.shared(),
            },
            MemoryPlan::left("stack", "the main thread's stack is left to the kernel"),
        ]
    }
}

/// [`MemoryPlan::what`] of the heap.
const LARGE: &str = "large allocations";
const SMALL: &str = "small allocations";
const MAPPINGS: &str = "anonymous mappings";

impl MemoryPlan {
    /// What [`MemoryPlan::what`] says of shared memory, whose sizes are not those of private memory.
    pub const SHARED: &str = "shared memory";

    /// True for allocations and private mappings.
    pub fn is_heap(&self) -> bool {
        [LARGE, SMALL, MAPPINGS].contains(&self.what)
    }

    /// What stays on base pages.
    fn left(what: &'static str, why: impl Into<String>) -> Self {
        Self {
            what,
            sizes: Vec::new(),
            how: why.into(),
        }
    }
}

impl RunPlan {
    /// What becomes of text. Which sizes it comes in decide the page cache and the program's own headers.
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

    /// What becomes of shared memory. What the kernel's controls allow comes first, whatever it is.
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
            ShmMode::User => "whole blocks at the first touch, by userfaultfd",
        };
        let pmd = self.orders.pmd;
        let sizes = match (self.orders.shm, self.orders.shm_sizes) {
            (ShmMode::User, 0) => 64 << 10,
            (_, 0) => pmd,
            (_, sizes) => sizes,
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

    /// Where small allocations come from; glibc's heap is advised by that tunable.
    fn small(&self, by: &str) -> String {
        let glibcs = format!("glibc's heap, by {by}");
        match self.orders.heap {
            HeapMode::Glibc => glibcs,
            _ => format!(
                "up to 128 bytes in mimalloc's arenas, advised, but where MALLOC_ variables, glibc.malloc tunables or a limit \
                 (ulimit -v, -d) are set; others in {glibcs}"
            ),
        }
    }

    /// By what means large allocations become huge.
    fn large(&self) -> String {
        if self.is_mimallocs() {
            return format!("mimalloc, {}", self.arenas());
        }
        let window = "in an aligned window of their own";
        match self.pool() {
            Some(pool) => format!("malloc and its family, from {pool}; beyond it {window}"),
            None => format!("malloc and its family, {window}"),
        }
    }

    /// All allocations are mimalloc's, on the pool.
    fn is_mimallocs(&self) -> bool {
        self.orders.heap == HeapMode::Mimalloc && self.orders.pool.is_some()
    }

    fn arenas(&self) -> String {
        match self.pool() {
            Some(pool) => format!("from {pool}; beyond it in advised arenas"),
            None => String::from("in advised arenas"),
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

/// The sizes that anonymous memory can have once it is advised.
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
        RunPlan::new(Orders::default(), None, HOST, reach, None)
    }

    #[test]
    fn by_default_everything_is_on() {
        let plan = plan(&Reach::Reached);
        assert!(
            plan.preload
                && plan.orders.heap == HeapMode::On
                && plan.orders.maps
                && plan.orders.follow
        );
        assert_eq!(
            plan.tunable,
            Tunable::Set(b"glibc.malloc.hugetlb=1".to_vec())
        );
    }

    #[test]
    fn without_thp_nothing_is_asked_for() {
        let plan = RunPlan::new(
            Orders::default(),
            None,
            HostSupport { pmd: None, ..HOST },
            &Reach::Reached,
            None,
        );
        assert!(plan.orders.heap == HeapMode::Off && !plan.orders.maps);
        assert!(matches!(plan.tunable, Tunable::Left(_)));
        for memory in plan.memory(&Reach::Reached, None, false) {
            assert!(memory.sizes.is_empty(), "{memory:?}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_not_said_to_be_missing() {
        let memory = plan(&Reach::Reached).memory(&Reach::Reached, None, false);
        let large = memory.first().unwrap();
        assert_eq!(large.sizes, [PageSize::SIZE_2M], "{large:?}");
        assert!(large.how.contains("cannot be read"), "{large:?}");
    }

    /// A THP of 1 GiB would be resident as a whole, whatever the program uses of it.
    #[test]
    fn a_pool_of_pages_that_are_not_there_is_in_what_a_pmd_maps() {
        let pool = "2G:1G".parse().ok();
        for (has_pages, page) in [(true, 1 << 30), (false, 2 << 20)] {
            let host = HostSupport { has_pages, ..HOST };
            let plan = RunPlan::new(Orders::default(), pool, host, &Reach::Reached, None);
            let pool = plan.orders.pool.unwrap();
            assert_eq!((pool.page, pool.size), (page, 2 << 30));
            assert_eq!(plan.why_other_pages().is_some(), !has_pages);
        }
    }

    #[test]
    fn heap_off_leaves_the_tunable_alone() {
        let asked = Orders {
            heap: HeapMode::Off,
            ..Orders::default()
        };
        let plan = RunPlan::new(asked, None, HOST, &Reach::Reached, None);
        assert!(plan.orders.heap == HeapMode::Off && plan.orders.maps);
        assert_eq!(plan.tunable, Tunable::Left("--heap=off"));
    }

    #[test]
    fn a_static_program_is_untouched_and_its_children_are_not() {
        let reach = Reach::Static { glibc: true };
        let followed = plan(&reach);
        assert!(followed.preload && matches!(followed.tunable, Tunable::Left(_)));
        let alone = Orders {
            follow: false,
            ..Orders::default()
        };
        let alone = RunPlan::new(alone, None, HOST, &reach, None);
        assert!(!alone.preload && matches!(alone.tunable, Tunable::Left(_)));
    }

    #[test]
    fn another_loader_gets_no_library() {
        let reach = Reach::Loader(String::from("/system/bin/linker64"));
        assert!(!plan(&reach).preload);
    }
}
