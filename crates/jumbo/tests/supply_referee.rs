//! Comparison of the pool of `jumbo run --pool` with the kernel: random pages mapped at chosen
//! addresses and freed, and the same on hugetlb, whose counters must be equal after every step.
//!
//! The counters and the quota are those of `jumbo::pool`, which `pool_referee` compares. Here the
//! tests use the heap's interface, with the ledger that the processes of a run share.
#![allow(unsafe_code, reason = "both sides map and unmap memory")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "pool/host.rs"]
#[allow(dead_code, reason = "shared with the pool's other tests")]
mod host;
#[path = "pool/random.rs"]
mod random;

use std::sync::atomic::Ordering;

use jumbo_inside::heap::supply::{Before, PageSupply};
use jumbo_inside::ledger::{Ledger, Slot};
use jumbo_inside::orders::PoolOrder;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use host::{Alone, Knobs, POOL, is_unused, kernel_counters, skip};
use random::Random;

const PAGE: usize = 2 << 20;
const BASE_ADDRESS: usize = 0x1500_0000_0000;
/// Size of the pool and of its overcommit, in pages.
const POOL_PAGES: usize = 6;
const OVERCOMMIT_PAGES: usize = 4;
const SEEDS: &[u64] = &[1, 2, 3, 4];
const STEPS: usize = 500;

/// Adjacent pages, at this place of the pool, and those of the kernel.
struct Piece {
    place: usize,
    pages: usize,
    kernel: usize,
}

fn order(size: usize, overcommit: usize, each: bool) -> PoolOrder {
    PoolOrder {
        size: size * PAGE,
        page: PAGE,
        overcommit: overcommit * PAGE,
        warm: None,
        nofork: false,
        each,
    }
}

/// Maps and populates pages of the kernel's pool; all or none.
fn map_kernel(pages: usize) -> Option<usize> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping replaces none, and populating it changes nothing.
    unsafe {
        let start = mm::mmap_anonymous(std::ptr::null_mut(), pages * PAGE, prot, flags).ok()?;
        let populated = mm::madvise(start, pages * PAGE, Advice::LinuxPopulateWrite);
        if populated.is_err() {
            mm::munmap(start, pages * PAGE).unwrap();
        }
        populated.ok().map(|()| start.expose_provenance())
    }
}

fn unmap_kernel(start: usize, pages: usize) {
    // SAFETY: the pages are a part of what `map_kernel` mapped, and no reference points into it.
    unsafe { mm::munmap(std::ptr::with_exposed_provenance_mut(start), pages * PAGE).unwrap() };
}

/// Runs `work` in a child, which has one thread: the pool gives hugetlb pages only to such
/// processes.
fn in_child(work: impl FnOnce() -> Result<(), String>) {
    // SAFETY: the child runs `work` and `_exit`; glibc's malloc can be used after a fork.
    let status = unsafe {
        match libc::fork() {
            0 => {
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                let failed = match result {
                    Ok(Ok(())) => 0,
                    Ok(Err(why)) => {
                        eprintln!("{why}");
                        1
                    }
                    Err(_) => 2,
                };
                libc::_exit(failed)
            }
            pid => {
                let mut status = 0;
                assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
                status
            }
        }
    };
    assert_eq!(status, 0, "the child failed");
}

/// Creates a supply with a ledger of its own and the limit of the order.
fn supply(order: PoolOrder) -> (PageSupply, &'static Ledger) {
    let (ledger, _) = Ledger::create().unwrap();
    ledger.pool.set((order.size + order.overcommit) as u64);
    jumbo_inside::heap::count_in(ledger, std::process::id());
    let supply = PageSupply::new();
    assert!(supply.start(order, PAGE, BASE_ADDRESS));
    (supply, ledger)
}

fn slot(ledger: &'static Ledger) -> &'static Slot {
    ledger.slots().next().unwrap()
}

fn is_possible() -> bool {
    if !rustix::process::geteuid().is_root() {
        skip("needs root, for the kernel's pool");
        return false;
    }
    if std::fs::metadata(POOL).is_err() || !is_unused() {
        skip("the kernel has no pool of 2M pages, or another program uses it");
        return false;
    }
    true
}

fn set(knobs: &mut Knobs, persistent: usize, overcommit: usize) {
    assert!(knobs.set(format!("{POOL}/nr_overcommit_hugepages"), overcommit));
    assert!(knobs.set(format!("{POOL}/nr_hugepages"), persistent));
    assert_eq!(kernel_counters()[0], persistent as u64, "not enough memory");
}

/// Returns a place for `pages` pages that overlaps none in use.
fn place_for(pages: usize, pieces: &[Piece], random: &mut Random) -> usize {
    loop {
        let place = random.at(200);
        let ends = |piece: &Piece| piece.place + piece.pages;
        let free = |piece: &Piece| ends(piece) <= place || place + pages <= piece.place;
        if pieces.iter().all(free) {
            return place;
        }
    }
}

/// Runs one sequence on THPs alone. The kernel's pool has the size of the order and must agree on
/// every result.
fn books(seed: u64) -> Result<(), String> {
    // The limit is that of the pool alone, or of the ledger as well.
    let each = seed.is_multiple_of(2);
    let (supply, ledger) = supply(order(POOL_PAGES, OVERCOMMIT_PAGES, each));
    // No hugetlb pages: the kernel side uses them.
    supply.evacuate(Before::Confinement);
    let mut random = Random::new(seed);
    let mut pieces: Vec<Piece> = Vec::new();
    let (mut brought, mut refused) = (0, 0);
    for step in 0..STEPS {
        if random.at(2) == 0 {
            let pages = 1 + random.at(4);
            let place = place_for(pages, &pieces, &mut random);
            let ours = supply.map(BASE_ADDRESS + place * PAGE, pages * PAGE);
            match (ours, map_kernel(pages)) {
                (Ok(()), Some(kernel)) => {
                    brought += 1;
                    pieces.push(Piece {
                        place,
                        pages,
                        kernel,
                    });
                }
                (Err(_), None) => refused += 1,
                (ours, kernel) => {
                    let kernel = kernel.is_some();
                    return Err(format!(
                        "step {step}: {pages} pages: {ours:?}, the kernel {kernel}"
                    ));
                }
            }
        } else if !pieces.is_empty() {
            let at = random.at(pieces.len());
            let piece = &mut pieces[at];
            // A part of it, from its start.
            let pages = 1 + random.at(piece.pages);
            // SAFETY: the pages are the piece's, and no reference points into them.
            unsafe {
                supply
                    .unmap(BASE_ADDRESS + piece.place * PAGE, pages * PAGE)
                    .unwrap()
            };
            unmap_kernel(piece.kernel, pages);
            piece.place += pages;
            piece.kernel += pages * PAGE;
            piece.pages -= pages;
            if piece.pages == 0 {
                pieces.swap_remove(at);
            }
        }
        let [total, free, _, surplus] = kernel_counters();
        let counts = supply.counts();
        let charged = ledger.pool.charged() / PAGE as u64;
        let ours = (counts.total(), counts.surplus(), charged);
        let charges = if each { 0 } else { total - free };
        if ours != (total - free, surplus, charges) {
            return Err(format!(
                "step {step}: ours (used, surplus, charged) are {ours:?}, the kernel's (used, surplus) {:?}",
                (total - free, surplus)
            ));
        }
    }
    for piece in pieces {
        // SAFETY: the pages are the piece's, and no reference points into them.
        unsafe {
            supply
                .unmap(BASE_ADDRESS + piece.place * PAGE, piece.pages * PAGE)
                .unwrap()
        };
        unmap_kernel(piece.kernel, piece.pages);
    }
    let left = (supply.counts().total(), ledger.pool.charged());
    if left != (0, 0) || refused * 20 < brought {
        return Err(format!("{left:?} left; {refused} of {brought} refused"));
    }
    Ok(())
}

#[test]
fn the_heaps_pool_counts_as_the_kernel_does() {
    let _alone = Alone::new();
    if !is_possible() {
        return;
    }
    let mut knobs = Knobs::new();
    set(&mut knobs, POOL_PAGES, OVERCOMMIT_PAGES);
    for seed in SEEDS {
        in_child(|| books(*seed).map_err(|why| format!("seed {seed}: {why}")));
    }
}

fn word(page: usize) -> *mut u64 {
    std::ptr::with_exposed_provenance_mut(BASE_ADDRESS + page * PAGE)
}

/// Runs one sequence on hugetlb pages, as far as available: each is counted, and keeps its contents
/// while others come and go, and when all move to THPs before a fork.
fn pages(seed: u64, persistent: u64) -> Result<(), String> {
    let (supply, ledger) = supply(order(2 * POOL_PAGES, OVERCOMMIT_PAGES, false));
    let mut random = Random::new(seed);
    let mut pieces: Vec<Piece> = Vec::new();
    let (mut moved, mut had) = (false, false);
    for step in 0..STEPS {
        if step == STEPS / 2 {
            supply.evacuate(Before::Fork);
            moved = true;
        }
        if random.at(2) == 0 {
            let pages = 1 + random.at(4);
            let place = place_for(pages, &pieces, &mut random);
            if supply
                .map(BASE_ADDRESS + place * PAGE, pages * PAGE)
                .is_ok()
            {
                for page in place..place + pages {
                    // SAFETY: the page has just been brought, zeroed, for this piece alone.
                    unsafe {
                        if word(page).read() != 0 {
                            return Err(format!("step {step}: page {page} is not zero"));
                        }
                        word(page).write((page as u64) << 32 | 7);
                    }
                }
                pieces.push(Piece {
                    place,
                    pages,
                    kernel: 0,
                });
            }
        } else if !pieces.is_empty() {
            let piece = pieces.swap_remove(random.at(pieces.len()));
            // SAFETY: the pages are the piece's, and no reference points into them.
            unsafe {
                supply
                    .unmap(BASE_ADDRESS + piece.place * PAGE, piece.pages * PAGE)
                    .unwrap()
            };
        }
        for page in pieces
            .iter()
            .flat_map(|piece| piece.place..piece.place + piece.pages)
        {
            // SAFETY: the page is there, and this process has one thread.
            if unsafe { word(page).read() } != (page as u64) << 32 | 7 {
                return Err(format!("step {step}: page {page} holds something else"));
            }
        }
        let [total, free, ..] = kernel_counters();
        let held = pieces.iter().map(|piece| piece.pages as u64).sum::<u64>();
        let of =
            |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed) / PAGE as u64;
        let slot = slot(ledger);
        let (hugetlb, thp) = (of(&slot.pool_hugetlb), of(&slot.pool_thp));
        had |= hugetlb > 0;
        let counts = (
            hugetlb,
            hugetlb + thp,
            supply.counts().total(),
            of(&slot.pool_charged),
        );
        if counts != (total - free, held, held, held) || moved && hugetlb > 0 {
            return Err(format!(
                "step {step}: (hugetlb, all, books, charged) {counts:?}; the kernel has {} in use, we know of {held}",
                total - free
            ));
        }
    }
    if !had && persistent > 0 {
        return Err("no hugetlb page was taken".to_owned());
    }
    Ok(())
}

#[test]
fn the_heaps_pages_are_the_kernels_and_keep_what_they_hold() {
    let _alone = Alone::new();
    if !is_possible() {
        return;
    }
    let mut knobs = Knobs::new();
    for (seed, persistent) in SEEDS.iter().zip([0u64, 3, 8, 16]) {
        set(&mut knobs, usize::try_from(persistent).unwrap(), 0);
        in_child(|| pages(*seed, persistent).map_err(|why| format!("seed {seed}: {why}")));
    }
}

/// A mapping of the program in the place of a spare mapping of the pool.
#[test]
fn what_is_in_the_place_of_a_spare_mapping_stays() {
    const SPARE: usize = BASE_ADDRESS - 6 * 4096;
    let _alone = Alone::new();
    in_child(|| {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let place = std::ptr::with_exposed_provenance_mut(SPARE);
        // SAFETY: nothing is mapped there.
        let ours = unsafe { mm::mmap_anonymous(place, 4096, prot, flags).unwrap() };
        let (supply, _) = supply(order(POOL_PAGES, 0, true));
        // A page may be unavailable.
        let _ = supply.map(BASE_ADDRESS, PAGE);
        supply.evacuate(Before::Fork);
        // SAFETY: mapped above.
        let there = unsafe { mm::madvise(ours, 4096, Advice::LinuxPopulateWrite) };
        there.map_err(|errno| format!("the mapping is gone: {errno}"))
    });
}
