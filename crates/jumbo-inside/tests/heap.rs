//! Tests of the heap on the real kernel: patterns in random blocks, from many threads, checked at
//! every step.
//!
//! The tests share the process-wide window, like threads of a program.
#![allow(unsafe_code, reason = "tests touch raw blocks")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::sync::Once;

use jumbo_inside::heap::{self, HeapSettings, LARGE_BLOCK_BYTES, Resize};
use jumbo_inside::orders::MaxWaste;

const PMD: usize = 2 << 20;

fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let settings = HeapSettings {
            pmd: PMD,
            max_waste: MaxWaste::Percent(5),
            huge_at_once: false,
            keep: None,
            pool: None,
        };
        // SAFETY: once, before the first allocation.
        assert!(unsafe { heap::start(settings) })
    });
}

fn release(address: usize) -> bool {
    // SAFETY: the tests free a block of their own, once, or name a place where none begins.
    unsafe { heap::release(address) }
}

fn resize(address: usize, size: usize) -> Resize {
    // SAFETY: as for `release`.
    unsafe { heap::resize(address, size) }
}

/// A xorshift generator, so that a failure is reproducible from its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap() % bound
    }
}

#[derive(Clone, Copy)]
struct Block {
    address: usize,
    size: usize,
    seed: u8,
}

impl Block {
    fn bytes(&self) -> &'static mut [u8] {
        let start = std::ptr::with_exposed_provenance_mut::<u8>(self.address);
        // SAFETY: the heap gave these bytes to this block, which has one thread and one reference
        // at a time.
        unsafe { std::slice::from_raw_parts_mut(start, self.size) }
    }

    /// Returns one offset in each page, and the ends: enough to detect a shared page.
    fn marks(&self) -> impl Iterator<Item = usize> + use<> {
        let size = self.size;
        (0..size).step_by(4096).chain([size - 1])
    }

    fn fill(&self) {
        let bytes = self.bytes();
        for at in self.marks() {
            bytes[at] = self
                .seed
                .wrapping_add(u8::try_from(at >> 12 & 0xff).unwrap());
        }
    }

    fn check(&self, upto: usize) {
        let bytes = self.bytes();
        for at in self.marks().filter(|at| at % 4096 == 0 && *at < upto) {
            let expected = self
                .seed
                .wrapping_add(u8::try_from(at >> 12 & 0xff).unwrap());
            assert_eq!(
                bytes[at], expected,
                "block {:#x}+{:#x} at {at:#x}",
                self.address, self.size
            );
        }
    }
}

fn storm(seed: u64, steps: usize, bound: usize) {
    let mut random = Random(seed | 1);
    let mut blocks: Vec<Block> = Vec::new();
    for step in 0..steps {
        let total: usize = blocks.iter().map(|block| block.size).sum();
        let most = if random.below(10) == 0 {
            24 << 20
        } else {
            3 << 20
        };
        let size = LARGE_BLOCK_BYTES + random.below(most);
        let mark = u8::try_from(step & 0xff).unwrap();
        match random.below(10) {
            0..4 if total < bound => {
                let align = 1 << (4 + random.below(19));
                let zeroed = random.below(2) == 0;
                let address = heap::allocate(size, align, zeroed).expect("memory");
                assert!(heap::is_ours(address) && address.is_multiple_of(align));
                // SAFETY: a block begins there.
                assert!(unsafe { heap::room(address) }.unwrap() >= size);
                let block = Block {
                    address,
                    size,
                    seed: mark,
                };
                assert!(
                    !zeroed || block.marks().all(|at| block.bytes()[at] == 0),
                    "not zero"
                );
                block.fill();
                blocks.push(block);
            }
            4..7 if !blocks.is_empty() => {
                let which = random.below(blocks.len());
                let block = &mut blocks[which];
                let kept = block.size.min(size);
                match resize(block.address, size) {
                    Resize::Done(address) => {
                        block.address = address;
                        block.size = size;
                        Block {
                            size: kept,
                            ..*block
                        }
                        .check(kept);
                    }
                    Resize::Copy(room) => assert!(room >= block.size && size > room),
                    Resize::Unknown => panic!("a live block is unknown"),
                }
                block.fill();
            }
            _ if !blocks.is_empty() => {
                let block = blocks.swap_remove(random.below(blocks.len()));
                block.check(block.size);
                assert!(release(block.address));
            }
            _ => {}
        }
        if step % 1000 == 0 {
            heap::trim();
        }
    }
    for block in blocks {
        block.check(block.size);
        assert!(release(block.address));
    }
}

#[test]
fn random_blocks_keep_what_was_written() {
    start();
    for seed in 1..5 {
        println!("seed {seed}");
        storm(seed, 1500, 128 << 20);
    }
}

#[test]
fn threads_never_meet_in_a_page() {
    start();
    std::thread::scope(|scope| {
        for seed in 0..8u64 {
            scope.spawn(move || storm(seed * 7919 + 3, 600, 32 << 20));
        }
    });
}

#[test]
fn misuse_is_noticed_and_harms_nothing() {
    start();
    let address = heap::allocate(1 << 20, 16, false).unwrap();
    assert!(!release(address + 16));
    assert_eq!(resize(address + 8192 + 1, 5 << 20), Resize::Unknown);
    assert!(release(address));
}

#[test]
fn what_cannot_be_had_is_refused() {
    start();
    assert!(heap::allocate(1 << 50, 16, false).is_none());
    assert!(heap::allocate(isize::MAX as usize, 16, false).is_none());
    assert!(heap::allocate(LARGE_BLOCK_BYTES, 1 << 62, false).is_none());
}

#[test]
fn a_growing_block_keeps_what_was_written() {
    start();
    let mut block = Block {
        address: heap::allocate(4 << 20, 16, true).unwrap(),
        size: 4 << 20,
        seed: 9,
    };
    // A block behind it limits growth in place.
    let mut fences = Vec::new();
    while block.size < 64 << 20 {
        block.fill();
        fences.push(heap::allocate(LARGE_BLOCK_BYTES, 16, false).unwrap());
        let size = block.size + block.size / 4;
        match resize(block.address, size) {
            Resize::Done(address) => {
                block.address = address;
                block.check(block.size);
                block.size = size;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(release(block.address));
    for fence in fences {
        assert!(release(fence));
    }
}
