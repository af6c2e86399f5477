//! Tests of a program whose global allocator is `jumbo::heap::Heap`: this one.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]
#![expect(unsafe_code, reason = "allocates by layout, and forks")]

use std::alloc::{GlobalAlloc as _, Layout};
use std::collections::HashMap;
use std::fs::read_to_string;
use std::thread;
use std::time::{Duration, Instant};

use jumbo::Root;
use jumbo::heap::Heap;
use jumbo::status::process::usage;

#[global_allocator]
static HEAP: Heap = Heap;

/// The heap serves, unless this host has no THP.
fn serves() -> bool {
    let has_thp = Root::host()
        .path("sys/kernel/mm/transparent_hugepage")
        .exists();
    assert!(HEAP.is_on() || !has_thp);
    HEAP.is_on()
}

/// In this order: the more a program forks, the later its memory is scanned again.
#[test]
fn a_program_has_huge_pages_keeps_its_bytes_and_forks() {
    memory_that_fills_is_huge();
    blocks_of_all_sizes_and_alignments_keep_their_bytes();
    a_child_allocates_while_threads_do();
}

fn blocks_of_all_sizes_and_alignments_keep_their_bytes() {
    let work = |seed: u64| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut live: Vec<(*mut u8, Layout, u8)> = Vec::new();
        for round in 0..3000_u32 {
            let size = 1 << random.u32(0..20);
            let size = size + random.usize(0..size);
            let layout = Layout::from_size_align(size, 1 << random.u32(0..14)).unwrap();
            let mark = random.u8(..);
            // SAFETY: blocks of these layouts, used within their sizes, and freed once.
            unsafe {
                match random.u32(0..4) {
                    0 if !live.is_empty() => {
                        let (block, before, old) = live.swap_remove(random.usize(..live.len()));
                        let block = HEAP.realloc(block, before, size);
                        let layout = Layout::from_size_align(size, before.align()).unwrap();
                        assert!(block.addr().is_multiple_of(before.align()));
                        assert_eq!(*block, old);
                        assert_eq!(*block.add(size.min(before.size()) - 1), old);
                        block.write_bytes(mark, size);
                        live.push((block, layout, mark));
                    }
                    1 if live.len() > 200 => {
                        let (block, layout, old) = live.swap_remove(random.usize(..live.len()));
                        assert_eq!((*block, *block.add(layout.size() - 1)), (old, old));
                        HEAP.dealloc(block, layout);
                    }
                    _ => {
                        let is_zeroed = round % 3 == 0;
                        let block = match is_zeroed {
                            true => HEAP.alloc_zeroed(layout),
                            false => HEAP.alloc(layout),
                        };
                        assert!(block.addr().is_multiple_of(layout.align()));
                        assert!(!is_zeroed || *block == 0 && *block.add(size - 1) == 0);
                        block.write_bytes(mark, size);
                        live.push((block, layout, mark));
                    }
                }
                if live.len() > 400 {
                    for (block, layout, old) in live.drain(..200) {
                        assert_eq!((*block, *block.add(layout.size() - 1)), (old, old));
                        HEAP.dealloc(block, layout);
                    }
                }
            }
        }
        for (block, layout, old) in live {
            // SAFETY: as above.
            unsafe {
                assert_eq!((*block, *block.add(layout.size() - 1)), (old, old));
                HEAP.dealloc(block, layout);
            }
        }
    };
    serves();
    thread::scope(|scope| {
        for seed in 0..4 {
            scope.spawn(move || work(seed));
        }
    });
}

fn memory_that_fills_is_huge() {
    let enabled = read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if !serves() || enabled.is_ok_and(|enabled| enabled.contains("[never]")) {
        return;
    }
    let table: HashMap<u64, [u64; 8]> = (0..2_000_000).map(|key| (key, [key; 8])).collect();
    assert_eq!(table[&1234], [1234; 8]);
    // On a busy host, or one with little free memory in one piece, it is collapsed afterwards.
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        let memory = usage(&Root::host(), std::process::id()).unwrap().total();
        // The bound would allow 95 percent.
        if memory.huge.0 as f64 / memory.bytes.0 as f64 > 0.5 {
            break;
        }
        assert!(Instant::now() < end, "{} of {}", memory.huge, memory.bytes);
        thread::sleep(Duration::from_millis(100));
    }
}

fn a_child_allocates_while_threads_do() {
    serves();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !is_over.load(relaxed) {
                    drop(
                        (0..1000)
                            .map(|size| vec![1_u8; size * 7])
                            .collect::<Vec<_>>(),
                    );
                }
            });
        }
        for _ in 0..50 {
            // SAFETY: the child allocates, frees and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let blocks: Vec<_> = (0..300).map(|size| vec![2_u8; size * 1000]).collect();
                let sum: usize = blocks.iter().map(Vec::len).sum();
                // SAFETY: ends the child.
                unsafe { libc::_exit(i32::from(sum != 44_850_000)) };
            }
            let mut status = 0;
            // SAFETY: waits for the child.
            let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!((waited, status), (child, 0));
        }
        is_over.store(true, relaxed);
    });
}
