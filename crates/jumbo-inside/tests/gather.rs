//! Tests of large frees on the real kernel: every operation, every excluded kind of memory, and
//! refusals of the kernel.
#![allow(unsafe_code, reason = "tests map and unmap")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::{null_mut, with_exposed_provenance_mut as at};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use jumbo_inside::gather::{self, FreeError, Gather, GatherSettings, Mode, Operation, Tunables};
use jumbo_sys::units::Pages;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{Errno, Result};
use rustix::mm::{Advice, MapFlags, MprotectFlags, MsyncFlags, ProtFlags};
use rustix::mm::{madvise, mlock, mmap, mmap_anonymous, mprotect, msync, munmap};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
const RW: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Sets the mode, which is process-wide, for one test at a time; on base pages, since only those
/// use threads.
fn in_mode(mode: Mode) -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    rustix::thread::disable_transparent_huge_pages(true).unwrap();
    gather::start(GatherSettings {
        mode,
        threads: 3,
        min_bytes: MIB,
        small_pages: false,
    });
    alone
}

/// A mapping far from addresses that the kernel chooses: the stack of a new harness thread must not
/// reuse a freed range.
fn mapped(length: usize, prot: ProtFlags, flags: MapFlags) -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000_0000_0000);
    let apart = length.next_multiple_of(1 << 30) + (1 << 30);
    let place = at(NEXT.fetch_add(apart, Ordering::Relaxed));
    // SAFETY: this disturbs no other mapping.
    let start =
        unsafe { mmap_anonymous(place, length, prot, flags | MapFlags::FIXED_NOREPLACE).unwrap() };
    start.expose_provenance()
}

/// A shared mapping of a file.
fn mapped_file(file: impl AsFd, length: usize) -> usize {
    // SAFETY: this disturbs no other mapping.
    let start = unsafe { mmap(null_mut(), length, RW, MapFlags::SHARED, file, 0).unwrap() };
    start.expose_provenance()
}

/// Anonymous private memory, with its page number in each page.
fn filled(length: usize) -> usize {
    let start = mapped(length, RW, MapFlags::PRIVATE);
    fill(start, length);
    start
}

fn fill(start: usize, length: usize) {
    for page in (0..length).step_by(PAGE) {
        // SAFETY: the test's own mapping, writable, which this thread alone knows.
        unsafe { at::<usize>(start + page).write(page + 1) };
    }
}

fn read(address: usize) -> usize {
    // SAFETY: as for `fill`.
    unsafe { at::<usize>(address).read() }
}

#[track_caller]
fn assert_filled(start: usize, from: usize, upto: usize) {
    for page in (from..upto).step_by(PAGE) {
        assert_eq!(read(start + page), page + 1);
    }
}

#[track_caller]
fn assert_zero(start: usize, length: usize) {
    for page in (0..length).step_by(PAGE) {
        assert_eq!(read(start + page), 0);
    }
}

fn is_mapped(start: usize, length: usize) -> bool {
    // SAFETY: nothing is read or written.
    unsafe { msync(at(start), length, MsyncFlags::ASYNC) }.is_ok()
}

fn try_unmap(start: usize, length: usize) -> Result<()> {
    // SAFETY: a mapping of the test's own, to which it has no reference.
    unsafe { munmap(at(start), length) }
}

fn unmap(start: usize, length: usize) {
    try_unmap(start, length).unwrap();
}

fn gather_unmap(start: usize, length: usize) -> bool {
    // SAFETY: as for `try_unmap`.
    unsafe { gather::unmap(start, length) }
}

fn discard(start: usize, length: usize) -> Option<Result<()>> {
    // SAFETY: as for `try_unmap`.
    unsafe { gather::discard(start, length) }
}

fn add(
    gather: &mut Gather,
    range: Range<usize>,
    operation: Operation,
) -> std::result::Result<(), FreeError> {
    // SAFETY: as for `try_unmap`.
    unsafe { gather.add(range, operation) }
}

fn lock(start: usize, length: usize) {
    // SAFETY: what the memory holds stays.
    unsafe { mlock(at(start), length).unwrap() }
}

fn make_readable(start: usize, length: usize) -> Result<()> {
    // SAFETY: the test does not write to it afterwards.
    unsafe { mprotect(at(start), length, MprotectFlags::READ) }
}

fn map_again(start: usize, length: usize) -> Result<()> {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: this disturbs no other mapping.
    unsafe { mmap_anonymous(at(start), length, RW, flags).map(drop) }
}

/// Returns the lines of /proc/self/maps within `start..start + length`.
fn mappings(start: usize, length: usize) -> Vec<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let within = |line: &&str| {
        let (from, upto) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [from, upto] = [from, upto].map(|text| usize::from_str_radix(text, 16).unwrap());
        from < start + length && upto > start
    };
    maps.lines().filter(within).map(str::to_owned).collect()
}

fn skip(name: &str, reason: &str) {
    assert!(
        std::env::var_os("JUMBO_TEST_STRICT").is_none_or(|value| value != "1"),
        "SKIP {name}: {reason} (JUMBO_TEST_STRICT=1)"
    );
    eprintln!("SKIP {name}: {reason}");
}

/// Checks that no moved range is left to unmap.
#[track_caller]
fn assert_no_window() {
    let left = mappings(0x3400_0000_0000, 0x0c00_0000_0000);
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn unmapped_memory_is_gone_and_its_addresses_are_free() {
    for mode in [Mode::Sync, Mode::Background] {
        let _alone = in_mode(mode);
        for round in 0..10 {
            let length = (round + 2) * 3 * MIB + PAGE;
            let start = filled(length);
            assert!(gather_unmap(start, length), "{mode:?} {length}");
            assert!(mappings(start, length).is_empty());
            map_again(start, length).unwrap();
            assert_zero(start, length);
            fill(start, length);
            gather::drain();
            assert_filled(start, 0, length);
            unmap(start, length);
        }
        gather::drain();
        assert_no_window();
    }
}

#[test]
fn the_middle_of_a_mapping_leaves_both_ends() {
    let _alone = in_mode(Mode::Sync);
    let length = 16 * MIB;
    let start = filled(length);
    assert!(gather_unmap(start + 5 * PAGE, length - 12 * PAGE));
    assert_filled(start, 0, 5 * PAGE);
    assert_filled(start, length - 7 * PAGE, length);
    let ends = mappings(start, length);
    assert_eq!(ends.len(), 2, "{ends:?}");
    assert!(!is_mapped(start + 5 * PAGE, PAGE));
    unmap(start, length);
    assert_no_window();
}

/// The length is rounded up, as by munmap(2).
#[test]
fn a_part_of_a_page_is_a_page() {
    let _alone = in_mode(Mode::Sync);
    let start = filled(4 * MIB);
    assert!(gather_unmap(start, 4 * MIB - 100));
    assert!(mappings(start, 4 * MIB).is_empty());
}

#[test]
fn what_is_out_of_the_ordinary_is_left_to_the_kernel() {
    let _alone = in_mode(Mode::Sync);
    let left = |start: usize, length: usize| {
        let before = mappings(start, length);
        assert!(!gather_unmap(start, length));
        assert!(discard(start, length).is_none());
        assert_eq!(mappings(start, length), before);
    };
    let length = 8 * MIB;
    // Unaligned addresses, and lengths beyond the address space.
    let start = filled(length);
    left(start + 1, length - PAGE);
    assert!(!gather_unmap(start, usize::MAX - 4 * PAGE));
    assert!(!gather_unmap(start, usize::MAX));
    assert!(!gather_unmap(start, 0));
    assert!(!gather_unmap(start, MIB - PAGE), "small");
    assert_filled(start, 0, length);
    // A range with a hole.
    unmap(start + 3 * MIB, PAGE);
    left(start, length);
    assert_filled(start, 0, 3 * MIB);
    unmap(start, length);
    // A range with a locked page in the middle.
    let start = filled(length);
    lock(start + 5 * MIB, PAGE);
    left(start, length);
    assert_filled(start, 0, length);
    unmap(start, length);
    // A sparse range.
    let start = filled(MIB);
    let sparse = mapped(length, RW, MapFlags::PRIVATE);
    left(sparse, length);
    unmap(sparse, length);
    unmap(start, MIB);
    // A shared range.
    let shared = mapped(length, RW, MapFlags::SHARED);
    fill(shared, length);
    left(shared, length);
    assert_filled(shared, 0, length);
    unmap(shared, length);
}

#[test]
fn huge_pages_are_left_to_the_kernel() {
    let _alone = in_mode(Mode::Sync);
    rustix::thread::disable_transparent_huge_pages(false).unwrap();
    let length = 16 * MIB;
    let start = mapped(length, RW, MapFlags::PRIVATE);
    // SAFETY: what the memory holds stays.
    let advised = unsafe { madvise(at(start), length, Advice::LinuxHugepage) };
    fill(start, length);
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let huge = smaps.lines().any(|line| {
        line.starts_with("AnonHugePages:")
            && line
                .split_whitespace()
                .nth(1)
                .unwrap()
                .parse::<usize>()
                .unwrap()
                >= 8192
    });
    if advised.is_ok() && huge {
        assert!(!gather_unmap(start, length));
    } else {
        skip("huge_pages_are_left_to_the_kernel", "no THP here");
    }
    unmap(start, length);
}

/// Without room for another mapping the kernel refuses the move, and nothing changes.
#[test]
fn a_refused_split_loses_nothing() {
    let _alone = in_mode(Mode::Sync);
    let most: usize = fs::read_to_string("/proc/sys/vm/max_map_count")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    if most > 1 << 18 {
        skip(
            "a_refused_split_loses_nothing",
            &format!("vm.max_map_count is {most}"),
        );
        return;
    }
    let length = 8 * MIB;
    let start = filled(length);
    // Pages of alternating protection: a mapping each.
    let many = 2 * most * PAGE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let pieces = mapped(many, ProtFlags::empty(), flags);
    let mut page = 0;
    while make_readable(pieces + page, PAGE).is_ok() {
        page += 2 * PAGE;
    }
    assert!(!gather_unmap(start + MIB, length - 2 * MIB));
    let kernels = try_unmap(start + MIB, length - 2 * MIB);
    unmap(pieces, many);
    assert_eq!(kernels, Err(Errno::NOMEM));
    assert_filled(start, 0, length);
    unmap(start, length);
    assert_no_window();
}

/// A sealed mapping behind another one. Since Linux 6.17 one call would move both, and the first
/// has moved when the second is refused.
#[test]
fn a_move_that_stops_half_way_is_taken_back() {
    const MSEAL: i64 = 462;
    let _alone = in_mode(Mode::Sync);
    let length = 8 * MIB;
    let start = filled(length);
    // Two mappings.
    make_readable(start + length / 2, length / 2).unwrap();
    // SAFETY: the mapping is the test's own.
    let sealed = unsafe { libc::syscall(MSEAL, start + length / 2, PAGE, 0) };
    if sealed != 0 {
        skip(
            "a_move_that_stops_half_way_is_taken_back",
            "no mseal(2) here",
        );
        return unmap(start, length);
    }
    let before = mappings(start, length);
    assert!(!gather_unmap(start, length));
    assert_eq!(try_unmap(start, length), Err(Errno::PERM));
    assert_eq!(mappings(start, length), before);
    assert_filled(start, 0, length);
    assert_no_window();
    // The sealed half stays until the process ends.
    unmap(start, length / 2);
}

#[test]
fn dropped_memory_reads_as_zeroes_at_once() {
    for mode in [Mode::Sync, Mode::Background] {
        let _alone = in_mode(mode);
        let length = 24 * MIB + 3 * PAGE;
        let start = filled(length);
        assert_eq!(discard(start, length), Some(Ok(())));
        assert_zero(start, length);
        fill(start, length);
        assert_filled(start, 0, length);
        unmap(start, length);
    }
}

fn one_by_one(mode: Mode) -> Tunables {
    Tunables {
        max_active: 3,
        flush_pages: Pages(1024),
        mode,
    }
}

#[test]
fn a_gather_zaps_and_unmaps() {
    for mode in [Mode::Sync, Mode::Background] {
        let _alone = in_mode(mode);
        let start = Instant::now();
        // If a worker gets no CPU in time, the caller has freed everything by then.
        while zap_and_unmap(mode) < 2 {
            assert!(start.elapsed() < Duration::from_mins(1), "{mode:?}: alone");
        }
    }
}

/// Returns the number of threads that took part.
fn zap_and_unmap(mode: Mode) -> u32 {
    let length = 300 * MIB;
    let (zapped, gone) = (filled(length), filled(length));
    let mut gather = Gather::new(Tunables {
        max_active: 3,
        flush_pages: Pages(50_000),
        mode,
    });
    // In pieces, from both ends, each adjacent to the previous one of its side.
    let step = 3 * MIB;
    for from in (0..length / 2).step_by(step) {
        for (start, operation) in [(zapped, Operation::Zap), (gone, Operation::Unmap)] {
            let (low, high) = (start + from, start + length - from - step);
            add(&mut gather, low..low + step, operation).unwrap();
            add(&mut gather, high..high + step, operation).unwrap();
        }
    }
    let freed = gather.finish().unwrap();
    gather::drain();
    assert_eq!(freed.bytes, 2 * length as u64);
    assert_zero(zapped, length);
    assert!(mappings(gone, length).is_empty());
    unmap(zapped, length);
    freed.threads
}

#[test]
fn a_gather_punches_shared_memory() {
    let _alone = in_mode(Mode::Sync);
    let length = 8 * MIB;
    let files: Vec<_> = (0..2)
        .map(|_| {
            let file = memfd_create("punched", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, length as u64).unwrap();
            let start = mapped_file(&file, length);
            fill(start, length);
            (file, start)
        })
        .collect();
    let blocks = |index: usize| rustix::fs::fstat(&files[index].0).unwrap().st_blocks;
    assert!(blocks(0) > 0);
    let mut gather = Gather::new(one_by_one(Mode::Sync));
    for from in (0..length).step_by(MIB) {
        for (file, (_, start)) in files.iter().enumerate() {
            let operation = Operation::Punch {
                file: u16::try_from(file).unwrap(),
            };
            let from = start + from;
            add(&mut gather, from..from + MIB, operation).unwrap();
        }
    }
    gather.finish().unwrap();
    for (index, (_, start)) in files.iter().enumerate() {
        assert_eq!(blocks(index), 0);
        assert_zero(*start, length);
        unmap(*start, length);
    }
}

#[test]
fn a_gather_drops_a_files_pages_and_the_file_keeps_them() {
    let _alone = in_mode(Mode::Sync);
    let length = 4 * MIB;
    let path = std::env::temp_dir().join(format!("jumbo-gather-{}", std::process::id()));
    let new = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path);
    let file = new.unwrap();
    fs::remove_file(&path).unwrap();
    ftruncate(file.as_fd(), length as u64).unwrap();
    let start = mapped_file(&file, length);
    fill(start, length);
    let mut gather = Gather::new(one_by_one(Mode::Sync));
    add(&mut gather, start..start + length, Operation::Drop).unwrap();
    gather.finish().unwrap();
    assert_filled(start, 0, length);
    unmap(start, length);
}

#[test]
fn a_refusal_names_its_range_and_the_rest_is_freed() {
    let _alone = in_mode(Mode::Sync);
    let length = 4 * MIB;
    let (locked, free) = (filled(length), filled(length));
    lock(locked, length);
    let mut gather = Gather::new(one_by_one(Mode::Sync));
    let odd = add(&mut gather, free + 1..free + PAGE, Operation::Zap);
    assert_eq!(odd.unwrap_err().errno, Errno::INVAL);
    add(&mut gather, locked..locked + length, Operation::Zap).unwrap();
    add(&mut gather, free..free + length, Operation::Zap).unwrap();
    let refused = gather.finish().unwrap_err();
    assert_eq!((refused.address, refused.length), (locked, length));
    assert_eq!(
        (refused.operation, refused.errno),
        (Operation::Zap, Errno::INVAL)
    );
    assert_filled(locked, 0, length);
    assert_zero(free, length);
    unmap(locked, length);
    unmap(free, length);
}

/// Returns the names of this process's threads.
fn threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(name).collect()
}

#[test]
fn retired_workers_are_gone_and_come_back() {
    let _alone = in_mode(Mode::Background);
    for _ in 0..3 {
        let length = 32 * MIB;
        let start = filled(length);
        assert!(gather_unmap(start, length));
        assert!(gather::end_workers());
        assert!(!gather::is_pending());
        let left = threads();
        let ours = |name: &String| name.starts_with("jumbo-free");
        assert!(!left.iter().any(ours), "{left:?}");
        assert_no_window();
    }
}

#[test]
fn a_fork_has_neither_workers_nor_what_they_free() {
    let _alone = in_mode(Mode::Background);
    for _ in 0..5 {
        let length = 64 * MIB;
        let (start, other) = (filled(length), filled(4 * MIB));
        assert!(gather_unmap(start, length));
        let held = gather::before_fork();
        // SAFETY: the child makes no call that another thread's lock could block, and ends.
        let child = unsafe { libc::fork() };
        // SAFETY: in either process this thread holds the locks.
        unsafe { gather::after_fork(held) };
        if child == 0 {
            // SAFETY: it is the child.
            unsafe { gather::forked(std::process::id().cast_signed()) };
            let code = i32::from(!in_child(other));
            // SAFETY: the child is not to run what the test's process has to run at its end.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: `status` lives as long as the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        gather::drain();
        assert_filled(other, 0, 4 * MIB);
        unmap(other, 4 * MIB);
    }
}

/// Does not allocate: locks of other threads may be held for ever here.
fn in_child(other: usize) -> bool {
    let nothing = !gather::is_pending() && !gather::drain();
    let gone = gather_unmap(other, 4 * MIB);
    gather::drain();
    nothing && gone && !is_mapped(other, PAGE)
}
