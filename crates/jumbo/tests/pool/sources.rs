//! Tests of the real sources: the kernel's pool and THPs, also in a forked child.
#![allow(unsafe_code, reason = "fork")]

use crate::books;
use std::fs;

use jumbo::pool::{Error, Hugetlb, Page, Placement, Pool, Populate, Thp};
use jumbo::units::{PageSize, Pages};
use jumbo_host::host_pools::steer;
use jumbo_host::kernel::Root;
use jumbo_host::knobs::{Group, Journal, Knob};

use crate::host::{Alone, Knobs, POOL, is_unused, kernel_counters, skip};

const SIZE: PageSize = PageSize::SIZE_2M;
pub(crate) const BYTES: usize = 2 << 20;

pub(crate) fn tuple(pool: &Pool) -> [u64; 4] {
    books::check(pool);
    let counters = pool.counters();
    [
        counters.total,
        counters.free,
        counters.reserved,
        counters.surplus,
    ]
    .map(|pages| pages.0)
}

/// The kernel's pool of 2 MiB pages for one test, restored on drop.
pub(crate) struct KernelPool {
    // Restored before the lock is released.
    knobs: Knobs,
    _alone: Alone,
}

impl KernelPool {
    /// Sets the pool; `None`, and a reported skip, if that fails.
    #[track_caller]
    pub(crate) fn with(persistent: u64, overcommit: u64) -> Option<Self> {
        let alone = Alone::new();
        if !rustix::process::geteuid().is_root() {
            skip("needs root, for the kernel's pool");
        } else if fs::metadata(POOL).is_err() {
            skip("the kernel has no pool of 2M pages");
        } else if !is_unused() {
            skip("another process uses the kernel's pool of 2M pages");
        } else {
            let mut knobs = Knobs::new();
            assert!(knobs.set(format!("{POOL}/nr_hugepages"), persistent));
            assert!(knobs.set(format!("{POOL}/nr_overcommit_hugepages"), overcommit));
            if kernel_counters()[0] == persistent {
                return Some(Self {
                    knobs,
                    _alone: alone,
                });
            }
            skip("the kernel has no memory for its pool");
        }
        None
    }

    fn set(&mut self, knob: &str, value: u64) {
        assert!(self.knobs.set(format!("{POOL}/{knob}"), value));
    }
}

pub(crate) fn hugetlb() -> Pool {
    let source = Hugetlb::with_capacity(&Root::host(), SIZE, Pages(64)).unwrap();
    Pool::new(source, Placement::ANYWHERE)
}

pub(crate) fn thp(capacity: u64) -> Pool {
    let source = Thp::with_capacity(&Root::host(), Pages(capacity)).unwrap();
    Pool::new(source, Placement::ANYWHERE)
}

/// Excludes other tests of THPs, so that they can be counted; `None`, and a reported skip, without
/// THP.
#[track_caller]
pub(crate) fn with_thp() -> Option<Alone> {
    if fs::metadata("/sys/kernel/mm/transparent_hugepage").is_ok() {
        return Some(Alone::new());
    }
    skip("this kernel has no THP");
    None
}

/// Returns the bytes of anonymous memory that are PMD-mapped.
pub(crate) fn anonymous_huge() -> usize {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = rollup
        .lines()
        .find(|line| line.starts_with("AnonHugePages:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().nth(1));
    kib.unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn eight_hugetlb_pages_and_four_of_overcommit() {
    let Some(mut kernel) = KernelPool::with(8, 4) else {
        return;
    };
    let pool = hugetlb();
    assert_eq!(pool.resize(Pages(8)).persistent, Pages(8));
    assert_eq!(kernel_counters(), [8, 0, 0, 0]);
    pool.set_overcommit(Pages(4));
    let mut pages: Vec<Page> = (0..12).map(|_| pool.take().unwrap()).collect();
    for page in &mut pages {
        page.bytes_mut().fill(5);
    }
    assert_eq!(kernel_counters(), [12, 0, 0, 4]);
    assert_eq!(
        pool.take().unwrap_err().to_string(),
        "pool exhausted: 8 pages, overcommit 4: 12 taken; 1 wanted"
    );
    // The pool's rules permit more; the kernel has none and refuses.
    pool.set_overcommit(Pages(6));
    let error = pool.take().unwrap_err();
    assert!(matches!(error, Error::Source(_)), "{error}");
    assert!(matches!(pool.reserve(Pages(2)), Err(Error::Source(_))));
    drop(pages);
    assert_eq!(tuple(&pool), [8, 8, 0, 0]);
    assert_eq!(kernel_counters(), [8, 0, 0, 0]);
    kernel.set("nr_overcommit_hugepages", 0);
    drop(pool);
    assert_eq!(kernel_counters(), [8, 8, 0, 0]);
}

#[test]
fn hugetlb_regions() {
    let Some(_kernel) = KernelPool::with(8, 0) else {
        return;
    };
    let pool = hugetlb();
    assert_eq!(pool.resize(Pages(6)).persistent, Pages(6));
    let mut private = pool.region(Pages(2), Populate::OnTake).unwrap();
    private.bytes_mut(0..2).unwrap().fill(1);
    drop(private);
    assert_eq!(tuple(&pool), [6, 6, 0, 0]);
    drop(pool);
    assert_eq!(kernel_counters(), [8, 8, 0, 0]);
}

#[test]
fn the_kernels_pool_grows_for_one_of_ours_and_is_put_back() {
    let Some(_kernel) = KernelPool::with(2, 1) else {
        return;
    };
    let (root, folder) = (Root::host(), tempfile::tempdir().unwrap());
    let journal = Journal::at(&root, folder.path().join("jumbo"));
    let locked = journal.lock(&Group::pool(SIZE), "test").unwrap();
    let pools = jumbo_host::kernel::hugetlb::pools(&root).unwrap().unwrap();
    let before = pools.iter().find(|pool| pool.size == SIZE).unwrap();
    let mut steering = steer(&root, &locked, before, "test").unwrap();
    let knob = Knob::persistent(SIZE, None);
    let written = steering.set(&knob, Pages(8)).unwrap();
    assert_eq!(written.after, Some(Pages(8).into()));
    assert_eq!(kernel_counters(), [8, 8, 0, 0]);
    let pool = hugetlb();
    assert_eq!(pool.resize(Pages(5)).persistent, Pages(5));
    assert!(steering.put_back().unwrap().complete);
    // Five pages are in use, two were there before: the excess is surplus and is freed with its
    // user.
    assert_eq!(kernel_counters(), [5, 0, 0, 3]);
    drop(pool);
    assert_eq!(kernel_counters(), [2, 2, 0, 0]);
}

#[test]
fn a_page_of_a_gibibyte_or_an_error() {
    const GIGANTIC: &str = "/sys/kernel/mm/hugepages/hugepages-1048576kB";
    let _alone = Alone::new();
    if !rustix::process::geteuid().is_root() {
        return skip("needs root, for the kernel's pool");
    }
    let free = || fs::read_to_string(format!("{GIGANTIC}/free_hugepages"));
    let mut knobs = Knobs::new();
    if !knobs.set(format!("{GIGANTIC}/nr_hugepages"), 1) {
        return skip("the kernel has no pool of 1G pages");
    }
    let size = PageSize::SIZE_1G;
    let source = Hugetlb::with_capacity(&Root::host(), size, Pages(4)).unwrap();
    let pool = Pool::new(source, Placement::of_thread().unwrap());
    if free().unwrap() != "1\n" {
        // Memory is too fragmented for a 1 GiB page: the pool must report that.
        let stopped = pool.resize(Pages(1)).stopped;
        assert!(matches!(stopped, Some(Error::Source(_))), "{stopped:?}");
        return;
    }
    assert_eq!(pool.resize(Pages(2)).persistent, Pages(1));
    let mut page = pool.take().unwrap();
    page.bytes_mut()[(1 << 30) - 1] = 1;
    assert_eq!((page.size(), free().unwrap()), (size, "0\n".to_owned()));
    drop(page);
    drop(pool);
    assert_eq!(free().unwrap(), "1\n");
}

#[test]
fn thp_pages_are_huge_and_stay_so_in_a_region() {
    let Some(_alone) = with_thp() else {
        return;
    };
    let pool = thp(16);
    let before = anonymous_huge();
    assert_eq!(pool.resize(Pages(4)).stopped, None);
    assert_eq!(anonymous_huge() - before, 4 * BYTES);
    let mut page = pool.take().unwrap();
    assert!(page.bytes().iter().all(|byte| *byte == 0));
    page.bytes_mut().fill(3);
    let mut region = pool.region(Pages(3), Populate::UpFront).unwrap();
    region.bytes_mut(0..3).unwrap().fill(4);
    assert_eq!(anonymous_huge() - before, 4 * BYTES);
    drop(region);
    assert_eq!(tuple(&pool), [4, 3, 0, 0]);
    drop(page);
    assert_eq!(anonymous_huge() - before, 4 * BYTES);
    let all: Vec<Page> = (0..4).map(|_| pool.take_zeroed().unwrap()).collect();
    for page in &all {
        assert!(page.bytes().iter().all(|byte| *byte == 0));
    }
    drop(all);
    pool.resize(Pages(1));
    assert_eq!(anonymous_huge() - before, BYTES);
}

/// Runs `work` in a child of fork(2); returns 0 if `work` returned true.
fn in_child(work: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child runs `work` and `_exit`; glibc's malloc can be used after a fork.
    unsafe {
        match libc::fork() {
            0 => libc::_exit(i32::from(!work())),
            pid => {
                let mut status = 0;
                assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
                status
            }
        }
    }
}

#[test]
fn a_forked_child_leaves_hugetlb_pages_alone() {
    let Some(_kernel) = KernelPool::with(4, 0) else {
        return;
    };
    let pool = hugetlb();
    pool.resize(Pages(2));
    pool.set_overcommit(Pages(2));
    let mut pages: Vec<Page> = (0..3).map(|_| pool.take().unwrap()).collect();
    pages[2].bytes_mut().fill(6);
    let status = in_child(|| {
        let refused = pool.take().is_err_and(|error| error == Error::Forked)
            && pool
                .reserve(Pages(1))
                .is_err_and(|error| error == Error::Forked)
            && pool.resize(Pages(1)).stopped == Some(Error::Forked);
        // Stands for a destructor at exit: a surplus page returns to the source.
        pages.truncate(1);
        refused
    });
    assert_eq!(status, 0);
    assert!(pages[2].bytes().iter().all(|byte| *byte == 6));
    assert_eq!(kernel_counters(), [4, 1, 0, 0]);
    drop(pages);
    assert_eq!(tuple(&pool), [2, 2, 0, 0]);
}

#[test]
fn a_forked_child_keeps_what_it_has_at_the_places_of_hugetlb_pages() {
    const WORD: usize = 0x6a75_6d62;
    let Some(_kernel) = KernelPool::with(6, 0) else {
        return;
    };
    /// Maps memory of the child at the address of a parent's page.
    fn occupy(address: usize) {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: the child has nothing there, or the call fails.
        unsafe {
            let place = std::ptr::with_exposed_provenance_mut(address);
            let got = libc::mmap(place, BYTES, access, flags, -1, 0);
            if got != place {
                libc::_exit(2);
            }
            got.cast::<usize>().write(WORD);
        }
    }
    let kept = |address: usize| {
        let place = std::ptr::with_exposed_provenance_mut::<usize>(address);
        // SAFETY: mapped by `occupy`; if it is gone or inaccessible the child dies, which the
        // parent sees.
        unsafe {
            let kept = place.read_volatile() == WORD;
            place.write_volatile(0);
            kept
        }
    };
    let owned = Box::into_raw(Box::new(hugetlb()));
    // SAFETY: it lives until it becomes a box again, once in each process, when nothing borrows it
    // any more.
    let pool = unsafe { &*owned };
    pool.resize(Pages(2));
    pool.set_overcommit(Pages(4));
    let mut pages: Vec<Page> = (0..3).map(|_| pool.take().unwrap()).collect();
    let mut region = pool.region(Pages(2), Populate::UpFront).unwrap();
    let mut places: Vec<usize> = pages
        .iter_mut()
        .map(|page| page.as_ptr().as_ptr().expose_provenance())
        .collect();
    places.push(
        region
            .bytes_mut(0..2)
            .unwrap()
            .as_mut_ptr()
            .expose_provenance(),
    );
    let status = in_child(|| {
        places.iter().for_each(|place| occupy(*place));
        drop((pages, region));
        // SAFETY: as above.
        drop(unsafe { Box::from_raw(owned) });
        places.iter().all(|place| kept(*place))
    });
    // SAFETY: as above; the pages went with the closure.
    drop(unsafe { Box::from_raw(owned) });
    assert_eq!(status, 0);
}

#[test]
fn a_forked_child_has_thp_pages_of_its_own() {
    let Some(_alone) = with_thp() else {
        return;
    };
    let pool = thp(8);
    pool.resize(Pages(2));
    let mut page = pool.take().unwrap();
    page.bytes_mut().fill(6);
    let status = in_child(|| {
        let mut other = pool.take().unwrap();
        other.bytes_mut().fill(7);
        page.bytes_mut().fill(8);
        drop(other);
        true
    });
    assert_eq!(status, 0);
    assert!(page.bytes().iter().all(|byte| *byte == 6));
}
