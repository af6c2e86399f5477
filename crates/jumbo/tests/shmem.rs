//! Tests of `shmem::Region` on this kernel: compared with a model, and on each method.
#![allow(unsafe_code, reason = "a child of fork(2), and files that are shared")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "pool/host.rs"]
#[allow(dead_code, reason = "shared with the pool's tests")]
mod host;

use std::cell::Cell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use jumbo::shmem::policy::Refusal;
use jumbo::shmem::{Blocks, Error, Region, Rung, Why};
use jumbo::units::{Bytes, PageSize};
use jumbo_host::kernel::memory::Memory;
use jumbo_host::kernel::{Root, thp};
use proptest::prelude::*;
use rustix::fs::{SealFlags, fcntl_add_seals};

use host::{Alone, Knobs, skip};

const PMD: usize = 2 << 20;
const MIB: u64 = 1 << 20;

fn region(size: u64) -> Region {
    Region::builder(Bytes(size)).build().unwrap()
}

fn file(region: &Region) -> BorrowedFd<'_> {
    // SAFETY: the file is only sealed and inspected.
    unsafe { region.file() }
}

/// An operation on a region and on a vector. Positions and lengths are in 1/1000 of the total.
#[derive(Clone, Debug)]
enum Op {
    Grow(u64),
    Shrink(u64),
    Punch(u64, u64),
    Write(u64, usize, u8),
    Read(u64, usize),
    Collapse(Blocks),
}

fn op() -> impl Strategy<Value = Op> {
    let part = || 0..=1000u64;
    let blocks = prop_oneof![
        Just(Blocks::Whole),
        Just(Blocks::Touched),
        Just(Blocks::All)
    ];
    prop_oneof![
        part().prop_map(Op::Grow),
        part().prop_map(Op::Shrink),
        (part(), part()).prop_map(|(from, to)| Op::Punch(from, to)),
        (part(), 1..100_000usize, any::<u8>())
            .prop_map(|(at, length, byte)| Op::Write(at, length, byte)),
        (part(), 1..100_000usize).prop_map(|(at, length)| Op::Read(at, length)),
        blocks.prop_map(Op::Collapse),
    ]
}

/// Returns `part` thousandths of a length plus a few bytes, so that pages are cut.
fn at(length: usize, part: u64) -> usize {
    let part = usize::try_from(part).unwrap();
    (length / 1000 * part + part % 7).min(length)
}

/// Reports success. The kernel's pool may lack pages, which must not change anything.
fn had_pages(done: Result<(), Error>, rung: Rung) -> bool {
    match done {
        Ok(()) => true,
        Err(Error::NoPages { .. }) if rung == Rung::Hugetlb => false,
        Err(error) => panic!("{error}"),
    }
}

/// Runs the operations; returns the method that the region used.
fn run(ops: &[Op], up_to: Rung) -> Rung {
    const CAPACITY: usize = 5 * PMD;
    let builder = Region::builder(Bytes(PMD as u64)).capacity(Bytes(CAPACITY as u64));
    let mut region = builder.up_to(up_to).build().unwrap();
    let rung = region.standing().rung;
    let mut model = vec![0u8; PMD];
    for op in ops {
        match op {
            Op::Grow(part) => {
                let to = at(CAPACITY, *part);
                if had_pages(region.grow(Bytes(to as u64)), rung) {
                    model.resize(to.max(model.len()), 0);
                }
            }
            Op::Shrink(part) => {
                let to = at(model.len(), *part).max(1);
                region.shrink(Bytes(to as u64)).unwrap();
                model.truncate(to);
            }
            Op::Punch(from, to) => {
                let (from, to) = (at(model.len(), *from), at(model.len(), *to));
                let range = from.min(to)..from.max(to);
                region.punch(range.clone()).unwrap();
                model[range].fill(0);
            }
            Op::Write(place, length, byte) => {
                let start = at(model.len(), *place);
                let range = start..(start + length).min(model.len());
                if had_pages(region.write(start, &vec![*byte; range.len()]), rung) {
                    model[range].fill(*byte);
                }
            }
            Op::Read(place, length) => {
                let start = at(model.len(), *place);
                let range = start..(start + length).min(model.len());
                let mut bytes = vec![1; range.len()];
                if had_pages(region.read(start, &mut bytes), rung) {
                    assert_eq!(bytes, model[range]);
                }
            }
            Op::Collapse(blocks) => match region.collapse(*blocks) {
                // The host's controls may forbid it.
                Ok(_)
                | Err(Error::Call {
                    operation: "MADV_COLLAPSE",
                    ..
                }) => {}
                Err(error) => panic!("{error}"),
            },
        }
    }
    assert_eq!(region.size(), Bytes(model.len() as u64));
    let mut bytes = vec![1; model.len()];
    if had_pages(region.read(0, &mut bytes), rung) {
        let mut both = bytes.iter().zip(&model);
        assert_eq!(both.position(|(ours, model)| ours != model), None);
    }
    region.free().unwrap();
    rung
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_region_is_a_vector_whatever_is_done_to_it(ops in proptest::collection::vec(op(), 1..40)) {
        run(&ops, Rung::Collapse);
    }
}

#[test]
fn a_region_of_hugetlb_pages_is_a_vector_too() {
    let _alone = Alone::new();
    let mut knobs = Knobs::new();
    // Fewer pages than a region may need.
    if !knobs.set(PathBuf::from(host::POOL).join("nr_overcommit_hugepages"), 4) {
        return skip("cannot let the kernel's pool of 2M pages grow");
    }
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(15));
    let ops = proptest::collection::vec(op(), 1..30);
    // Other programs may have taken the pages.
    let on_hugetlb = Cell::new(0);
    let done = runner.run(&ops, |ops| {
        let rung = run(&ops, Rung::Hugetlb);
        on_hugetlb.set(on_hugetlb.get() + u32::from(rung == Rung::Hugetlb));
        Ok(())
    });
    done.unwrap();
    assert!(on_hugetlb.get() > 0);
}

/// Sets the controls of shared memory to `values`, by size in KiB. `None`, and a reported skip, if
/// that fails.
fn controls(top: &str, values: &[(u64, &str)]) -> Option<(Knobs, Alone)> {
    let alone = Alone::new();
    let folder = PathBuf::from("/").join(thp::FOLDER);
    let mut knobs = Knobs::new();
    let table = thp::Thp::read_controls(&Root::host()).unwrap()?;
    for (size, _) in table
        .sizes
        .iter()
        .filter(|(_, of)| of.shmem_enabled.is_some())
    {
        let value = values.iter().find(|(kib, _)| *kib == size.kib());
        let file = folder.join(format!("hugepages-{}kB/shmem_enabled", size.kib()));
        if !knobs.set(file, value.map_or("never", |(_, value)| value)) {
            skip("needs root, and controls for each size of shared memory");
            return None;
        }
    }
    assert!(knobs.set(folder.join("shmem_enabled"), top));
    Some((knobs, alone))
}

#[test]
fn touched_blocks_are_collapsed_and_holes_are_left_alone() {
    let Some(_held) = controls("never", &[(2048, "inherit")]) else {
        return;
    };
    let mut region = region(8 * MIB);
    assert_eq!(region.standing().rung, Rung::Collapse);
    assert_eq!(region.standing().refused, []);
    // The first block is full; the second has one byte; the third has a hole; the fourth is empty.
    region.write(0, &vec![1; PMD]).unwrap();
    region.write(PMD + 5, &[2]).unwrap();
    region.write(2 * PMD, &vec![3; PMD]).unwrap();
    region.punch(2 * PMD + 4096..2 * PMD + 8192).unwrap();
    let whole = region.collapse(Blocks::Whole).unwrap();
    assert_eq!((whole.collapsed, whole.untouched, whole.holes), (1, 2, 1));
    let touched = region.collapse(Blocks::Touched).unwrap();
    assert_eq!(
        (touched.collapsed, touched.already, touched.untouched),
        (1, 1, 1)
    );
    assert_eq!(region.huge(), Some(Bytes(4 * MIB)));
    let all = region.collapse(Blocks::All).unwrap();
    assert_eq!((all.collapsed, all.holes), (1, 1), "the hole stays");
    // A write fills the hole.
    region.write(2 * PMD, &vec![4; PMD]).unwrap();
    assert_eq!(region.collapse(Blocks::Whole).unwrap().collapsed, 1);
    assert_eq!(region.huge(), Some(Bytes(8 * MIB)));
    let counts = region.counts();
    assert_eq!(
        (
            counts[&PageSize::SIZE_2M].shmem_alloc,
            counts[&PageSize::SIZE_2M].shmem_fallback
        ),
        (4, 0)
    );
    let mut byte = [0];
    region.read(PMD + 5, &mut byte).unwrap();
    assert_eq!(byte, [2]);
}

#[test]
fn a_region_of_64_kib_folios_is_collapsed_later() {
    let Some(_held) = controls("never", &[(64, "advise"), (2048, "inherit")]) else {
        return;
    };
    let small = PageSize::new(64 << 10).unwrap();
    let builder = Region::builder(Bytes(2 * MIB))
        .sizes(&[small])
        .up_to(Rung::Collapse);
    let first = builder.build().unwrap();
    assert_eq!(
        (first.standing().rung, &first.standing().sizes[..]),
        (Rung::Kernel, &[small][..])
    );
    assert_eq!(
        first.standing().refused,
        [(Rung::Collapse, Why::Size(PageSize::SIZE_2M))]
    );

    let region = region(2 * MIB);
    assert_eq!(
        (region.standing().rung, &region.standing().sizes[..]),
        (Rung::Collapse, &[small][..])
    );
    let file = PathBuf::from("/")
        .join(thp::FOLDER)
        .join("hugepages-64kB/stats/shmem_alloc");
    let count = || {
        std::fs::read_to_string(&file)
            .unwrap()
            .trim()
            .parse::<u64>()
            .unwrap()
    };
    let before = count();
    region.write(0, &vec![1; PMD]).unwrap();
    assert!(count() >= before + 32, "64 KiB folios came by advice");
    assert_eq!(region.collapse(Blocks::Whole).unwrap().collapsed, 1);
    assert_eq!(region.huge(), Some(Bytes(2 * MIB)));
}

#[test]
fn what_keeps_a_region_from_a_rung_is_named() {
    let refused = |builder: jumbo::shmem::Builder| {
        let region = builder.build().unwrap();
        let standing = region.standing();
        (standing.rung, standing.refused.clone())
    };
    let large = || Region::builder(Bytes(4 * MIB));
    let pmd = PageSize::SIZE_2M;
    if let Some(_held) = controls("never", &[]) {
        let why = Why::Refused(Refusal::Never(pmd));
        let below = [(Rung::Collapse, why), (Rung::Kernel, Why::Controls)];
        assert_eq!(refused(large()), (Rung::Base, below.to_vec()));
        assert_eq!(refused(large().up_to(Rung::Base)), (Rung::Base, vec![]));
        let region = large().build().unwrap();
        region.write(0, &[1]).unwrap();
        let error = region.collapse(Blocks::Touched).unwrap_err();
        assert!(error.to_string().contains("MADV_COLLAPSE"), "{error}");
    }
    if let Some(_held) = controls("advise", &[(2048, "inherit")]) {
        let needless = (Rung::Collapse, Why::Needless(pmd));
        assert_eq!(refused(large()), (Rung::Kernel, vec![needless]));
        let part = Region::builder(Bytes(3 * MIB)).up_to(Rung::Hugetlb);
        assert_eq!(refused(part).1[0], (Rung::Hugetlb, Why::NotWhole(pmd)));
        assert_eq!(refused(large().up_to(Rung::Kernel)), (Rung::Kernel, vec![]));
    }
    if let Some((mut knobs, _alone)) = controls("never", &[(2048, "inherit")])
        && host::is_unused()
        && knobs.set(PathBuf::from(host::POOL).join("nr_overcommit_hugepages"), 0)
    {
        let (rung, refused) = refused(large().up_to(Rung::Hugetlb));
        assert_eq!(rung, Rung::Collapse);
        assert!(
            matches!(&refused[..], [(Rung::Hugetlb, Why::NoPages { .. })]),
            "{refused:?}"
        );
    }
}

#[test]
fn a_hole_in_hugetlb_pages_is_an_error_and_no_signal_where_no_page_is_left() {
    let _alone = Alone::new();
    let mut knobs = Knobs::new();
    let pages = PathBuf::from(host::POOL).join("nr_overcommit_hugepages");
    if !host::is_unused() || !knobs.set(&pages, 2) {
        return skip("the pool of 2M pages is in use, or cannot be changed");
    }
    let builder = Region::builder(Bytes(4 * MIB))
        .capacity(Bytes(8 * MIB))
        .up_to(Rung::Hugetlb);
    let mut region = builder.build().unwrap();
    assert_eq!(region.standing().rung, Rung::Hugetlb);
    assert_eq!(region.huge(), Some(Bytes(4 * MIB)));
    assert_eq!(region.counts()[&PageSize::SIZE_2M].shmem_alloc, 2);
    region.write(0, &[7; 4096]).unwrap();
    let more = region.grow(Bytes(8 * MIB)).unwrap_err();
    assert!(matches!(more, Error::NoPages { .. }), "{more}");
    assert_eq!(region.size(), Bytes(4 * MIB));
    region.punch(PMD..2 * PMD).unwrap();
    assert!(knobs.set(&pages, 0));
    // Without a hole no memory is requested.
    region.write(0, &[7; 4096]).unwrap();
    assert!(matches!(
        region.write(PMD, &[1]),
        Err(Error::NoPages { .. })
    ));
    assert!(knobs.set(&pages, 2));
    region.write(PMD, &[1]).unwrap();
    let mut bytes = [0; 4];
    region.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 4]);
    drop(region);
    assert!(host::is_unused());
}

#[test]
fn where_another_process_has_sealed_the_file_a_region_is_not_cut() {
    let mut whole = region(4 * MIB);
    whole.write(0, &vec![9; 2 * PMD]).unwrap();
    fcntl_add_seals(file(&whole), SealFlags::SHRINK).unwrap();
    assert!(matches!(
        whole.shrink(Bytes(2 * MIB)),
        Err(Error::Call { .. })
    ));
    let mut byte = [0];
    whole.read(3 * PMD / 2, &mut byte).unwrap();
    assert_eq!((whole.size(), byte), (Bytes(4 * MIB), [9]));
}

#[test]
fn a_sealed_region_keeps_its_size_here_and_elsewhere() {
    let mut region = region(3 * MIB);
    region.write(0, &[1; 100]).unwrap();
    region.seal().unwrap();
    region.seal().unwrap();
    assert!(matches!(region.grow(Bytes(4 * MIB)), Err(Error::Sealed)));
    assert!(matches!(region.shrink(Bytes(MIB)), Err(Error::Sealed)));
    let file: OwnedFd = file(&region).try_clone_to_owned().unwrap();
    assert!(rustix::fs::ftruncate(&file, 0).is_err());
    region.punch(0..50).unwrap();
    let mut bytes = [9; 2];
    region.read(49, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 1]);
}

#[test]
fn what_makes_no_sense_is_refused_and_changes_nothing() {
    let root = Root::host();
    assert!(matches!(
        Region::builder(Bytes(0)).build_at(&root),
        Err(Error::Empty)
    ));
    let small = Region::builder(Bytes(2 * MIB)).capacity(Bytes(MIB));
    assert!(matches!(small.build_at(&root), Err(Error::Capacity { .. })));
    let vast = Region::builder(Bytes(1 << 62));
    assert!(matches!(vast.build_at(&root), Err(Error::Call { .. })));
    let mut region = region(5000);
    assert!(matches!(
        region.grow(Bytes(5001)),
        Err(Error::Capacity { .. })
    ));
    assert!(matches!(region.shrink(Bytes(0)), Err(Error::Empty)));
    assert!(matches!(
        region.bytes(4000..5001),
        Err(Error::Beyond { .. })
    ));
    assert!(matches!(
        region.read(usize::MAX, &mut [0]),
        Err(Error::Beyond { .. })
    ));
    assert!(matches!(region.punch(1..9000), Err(Error::Beyond { .. })));
    assert_eq!(region.bytes(0..5000).unwrap().len(), 5000);
    assert_eq!(region.size(), Bytes(5000));
}

#[test]
fn a_forked_child_shares_it() {
    let region = region(2 * MIB);
    // SAFETY: the child stores a byte and exits, without a call of the C library that could wait
    // for another thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let stored = region.write(5, &[7]).is_ok();
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(!stored)) };
    }
    let mut status = 0;
    // SAFETY: the child is this test's own.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    let mut byte = [0];
    region.read(5, &mut byte).unwrap();
    assert_eq!(byte, [7]);
}

#[test]
fn what_threads_write_while_it_is_collapsed_is_there_afterwards() {
    let Some(_held) = controls("never", &[(2048, "inherit")]) else {
        return;
    };
    const THREADS: u8 = 3;
    let region = region(16 * MIB);
    let pages = region.size().0 / 4096;
    let done = AtomicBool::new(false);
    let collapsed = std::thread::scope(|scope| {
        for thread in 1..=THREADS {
            let (region, done) = (&region, &done);
            scope.spawn(move || {
                for round in 0..8u8 {
                    for page in 0..pages {
                        // Each thread has its own bytes in each page.
                        let at = usize::try_from(page * 4096).unwrap() + usize::from(thread) * 64;
                        let mut last = [0];
                        region.read(at, &mut last).unwrap();
                        assert_eq!(last, [if round == 0 { 0 } else { thread + round - 1 }]);
                        region.write(at, &[thread + round]).unwrap();
                    }
                }
                done.store(true, Ordering::Relaxed);
            });
        }
        let mut collapsed = 0;
        while !done.load(Ordering::Relaxed) {
            collapsed += region.collapse(Blocks::Touched).unwrap().collapsed;
        }
        collapsed
    });
    assert!(collapsed > 0);
    for page in 0..pages {
        for thread in 1..=THREADS {
            let at = usize::try_from(page * 4096).unwrap() + usize::from(thread) * 64;
            let mut last = [0];
            region.read(at, &mut last).unwrap();
            assert_eq!(last, [thread + 7], "page {page}");
        }
    }
}

#[test]
fn what_is_freed_is_the_hosts_again() {
    let _alone = Alone::new();
    const SHMEM_BYTES: u64 = 512 * MIB;
    let region = region(SHMEM_BYTES);
    // Another descriptor of the file keeps no memory.
    let _held = file(&region).try_clone_to_owned().unwrap();
    for page in 0..SHMEM_BYTES / 4096 {
        region
            .write(usize::try_from(page * 4096).unwrap(), &[1])
            .unwrap();
    }
    let shared = || Memory::read(&Root::host()).unwrap().shmem;
    let full = shared();
    region.free().unwrap();
    assert!(
        shared().0 + SHMEM_BYTES / 2 < full.0,
        "{full} before, {} after",
        shared()
    );
}
