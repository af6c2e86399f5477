//! Tests of the slabs: against a model, over threads, and where memory is sparse.

use std::collections::BTreeMap;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::{Mutex, MutexGuard, Once, mpsc};
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::orders::MaxWaste;

/// Serializes the tests: they look at counters of the process.
static ALONE: Mutex<()> = Mutex::new(());

fn start() -> MutexGuard<'static, ()> {
    static STARTED: Once = Once::new();
    let held = ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    STARTED.call_once(|| {
        density::start(class::CHUNK_BYTES, MaxWaste::Percent(5), false);
        super::start(12345);
    });
    held
}

/// Cache of a thread.
struct Heap(*mut Cache);

impl Heap {
    fn new() -> Self {
        Self(null_mut())
    }

    fn allocate(&mut self, size: usize) -> Block {
        loop {
            // SAFETY: the cache is this thread's.
            let block =
                unsafe { super::allocate(self.0, size).or_else(|| refill(&mut self.0, size)) };
            if let Some(sweep) = due_sweep() {
                sweep();
            }
            match block {
                Some(block) => return block,
                None => assert!(grow(size)),
            }
        }
    }

    fn free(&mut self, address: usize) -> Freed {
        // SAFETY: the cache is this thread's, and the caller uses the block no more.
        unsafe {
            match super::free(self.0, address) {
                Freed::Full => put_aside(&mut self.0, address),
                other => return other,
            }
        }
        if let Some(sweep) = due_sweep() {
            sweep();
        }
        Freed::Done
    }
}

fn bytes(address: usize, length: usize) -> &'static mut [u8] {
    // SAFETY: a block of the test, of that length.
    unsafe { std::slice::from_raw_parts_mut(with_exposed_provenance_mut(address), length) }
}

/// Blocks that the test has, by address: size and content.
#[derive(Default)]
struct Model(BTreeMap<usize, (usize, u8)>);

impl Model {
    fn add(&mut self, block: Block, size: usize, content: u8) {
        let address = block.address;
        assert!(address.is_multiple_of(16) && is_ours(address));
        let room = room(address).unwrap();
        assert!(room >= size);
        if let Some((before, (length, _))) = self.0.range(..=address).next_back() {
            assert!(
                before + length <= address,
                "a block overlaps the one before"
            );
        }
        if let Some((after, _)) = self.0.range(address..).next() {
            assert!(address + room <= *after, "a block overlaps the next one");
        }
        if !block.is_dirty {
            assert!(bytes(address, size).iter().all(|byte| *byte == 0));
        }
        bytes(address, room).fill(content);
        self.0.insert(address, (room, content));
    }

    fn remove(&mut self, at: usize) -> Option<usize> {
        let address = *self.0.keys().nth(at % self.0.len().max(1))?;
        self.remove_at(address);
        Some(address)
    }

    fn remove_at(&mut self, address: usize) {
        let (room, content) = self.0.remove(&address).unwrap();
        assert!(bytes(address, room).iter().all(|byte| *byte == content));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]
    #[test]
    fn live_blocks_neither_overlap_nor_change(
        steps in prop::collection::vec((0usize..MAX_BYTES, 0usize..12, any::<usize>()), 1..400),
    ) {
        let _alone = start();
        let (mut heap, mut model) = (Heap::new(), Model::default());
        for (size, shift, at) in steps {
            if at % 5 < 3 {
                let size = size >> shift;
                let block = heap.allocate(size);
                model.add(block, size, u8::try_from(at % 255).unwrap());
            } else if let Some(address) = model.remove(at) {
                prop_assert_eq!(heap.free(address), Freed::Done);
            }
        }
        while let Some(address) = model.remove(0) {
            prop_assert_eq!(heap.free(address), Freed::Done);
        }
    }
}

#[test]
fn a_misused_block_is_found() {
    let _alone = start();
    let mut heap = Heap::new();
    for size in [20, 100, 5000, 100_000] {
        let address = heap.allocate(size).address;
        assert_eq!(heap.free(address + 16), Freed::Invalid, "within {size}");
        assert_eq!(heap.free(address), Freed::Done);
        // A slab without a block may be gone.
        let again = heap.free(address);
        assert!(again == Freed::Twice || size == 100_000 && again == Freed::Invalid);
        assert_eq!(room(address), None);
    }
}

/// A block whose slab could not be asked, since another thread held its lock for too long.
#[test]
fn a_block_that_was_lost_is_found() {
    const SIZE: usize = 1000;
    let _alone = start();
    let class = class::of(SIZE);
    let (begun, is_held) = mpsc::channel();
    let (end, may_end) = mpsc::channel();
    let mut blocks = [0; 2];
    for block in &mut blocks {
        while !cache::take_one(class, block) {
            assert!(grow(SIZE));
        }
    }
    // SAFETY: blocks of a slab.
    let [lost, other] = blocks.map(|block| unsafe { find(block) }.unwrap().0);
    thread::scope(|scope| {
        scope.spawn(move || {
            central::with(class, |_| {
                begun.send(()).unwrap();
                may_end.recv().unwrap();
            })
        });
        is_held.recv().unwrap();
        // SAFETY: this thread has the block.
        unsafe { central::put(class, &raw mut blocks[0], 1) };
        assert_eq!(lost.load(Ordering::Relaxed), state::LOST);
        end.send(()).unwrap();
    });
    // SAFETY: as above.
    unsafe { central::put(class, &raw mut blocks[1], 1) };
    for state in [lost, other] {
        assert_eq!(state.load(Ordering::Relaxed) & state::KIND, state::FREE);
    }
}

/// The blocks at hand of a thread that has ended.
#[test]
fn what_an_ended_thread_had_goes_back() {
    const SIZE: usize = 3000;
    let _alone = start();
    // `None`: its slab went back as well.
    let state_of = |block: usize| {
        // SAFETY: the address of a block.
        let state = unsafe { find(block) }?.0;
        Some(state.load(Ordering::Relaxed) & state::KIND)
    };
    let block = thread::spawn(|| {
        let mut heap = Heap::new();
        let block = heap.allocate(SIZE).address;
        assert_eq!(heap.free(block), Freed::Done);
        block
    });
    let block = block.join().unwrap();
    // The kernel may still know the thread.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while state_of(block) == Some(state::CACHED) {
        assert!(std::time::Instant::now() < end);
        cache::drain_ended(usize::MAX);
    }
    assert!(matches!(state_of(block), None | Some(state::FREE)));
}

#[test]
fn aligned_blocks_are() {
    let _alone = start();
    for align in [32, 64, 256, 4096] {
        for size in [1, 40, 100, 1000, 1100, 5000, 70_000] {
            let rounded = aligned(size, align).unwrap();
            assert!(rounded >= size);
            let block = loop {
                match allocate_aligned(rounded) {
                    Some(block) => break block,
                    None => assert!(grow(rounded)),
                }
            };
            assert!(block.address.is_multiple_of(align), "{size} at {align}");
            assert_eq!(Heap::new().free(block.address), Freed::Done);
        }
    }
    assert_eq!(aligned(100, 8192), None);
    assert_eq!(aligned(MAX_BYTES, 4096), None);
}

#[test]
fn threads_exchange_blocks() {
    let _alone = start();
    let (to, from) = mpsc::channel::<(usize, usize, u8)>();
    let takers: Vec<_> = (0..3)
        .map(|number| {
            let to = to.clone();
            thread::spawn(move || {
                let mut heap = Heap::new();
                for at in 0..20_000_usize {
                    let (size, content) = (at * 7 % 3000, u8::try_from(at % 251).unwrap());
                    let address = heap.allocate(size).address;
                    bytes(address, size).fill(content);
                    if at % 3 == number {
                        assert_eq!(heap.free(address), Freed::Done);
                    } else {
                        to.send((address, size, content)).unwrap();
                    }
                }
                // SAFETY: the cache is this thread's.
                unsafe { trim(heap.0) };
            })
        })
        .collect();
    drop(to);
    let mut heap = Heap::new();
    for (address, size, content) in from {
        assert!(bytes(address, size).iter().all(|byte| *byte == content));
        assert_eq!(heap.free(address), Freed::Done);
    }
    takers.into_iter().for_each(|taker| taker.join().unwrap());
}

#[test]
fn sparse_memory_serves_larger_sizes() {
    sparse_memory_serves(32, |number| 33 + number * 13 % 150);
}

#[test]
fn sparse_memory_serves_smaller_sizes() {
    sparse_memory_serves(320, |number| 1 + number * 13 % 250);
}

fn sparse_memory_serves(first: usize, size_of: fn(usize) -> usize) {
    let _alone = start();
    let (mut heap, mut model) = (Heap::new(), Model::default());
    let count = (16 << 20) / first;
    let mut small: Vec<usize> = (0..count).map(|_| heap.allocate(first).address).collect();
    small.retain(|address| {
        let stays = (address / first).is_multiple_of(100);
        match stays {
            true => bytes(*address, first).fill(7),
            false => assert_eq!(heap.free(*address), Freed::Done),
        }
        stays
    });
    let (idle, mapped) = (central::idle(), mapped());
    assert!(idle > 8 << 20, "{idle} bytes are idle");
    for number in 0..40_000_usize {
        let size = size_of(number);
        let block = heap.allocate(size);
        model.add(block, size, 9);
    }
    assert!(
        super::mapped() <= mapped + (2 << 20),
        "sparse memory was not used"
    );
    assert!(central::idle() < idle);
    for address in &small {
        assert!(bytes(*address, first).iter().all(|byte| *byte == 7));
    }
    // Pieces end in any order.
    for address in model.0.keys().copied().collect::<Vec<_>>() {
        if address / 16 % 3 == 0 {
            model.remove_at(address);
            assert_eq!(heap.free(address), Freed::Done);
        }
    }
    while let Some(address) = model.remove(0) {
        assert_eq!(heap.free(address), Freed::Done);
    }
    small
        .into_iter()
        .for_each(|address| assert_eq!(heap.free(address), Freed::Done));
    // SAFETY: the cache is this thread's.
    unsafe { trim(heap.0) };
    assert!(
        central::idle() < 4 << 20,
        "{} bytes are idle",
        central::idle()
    );
}

#[test]
fn dropped_pages_are_zero_again() {
    let _alone = start();
    let mut heap = Heap::new();
    let all: Vec<usize> = (0..64).map(|_| heap.allocate(60_000).address).collect();
    for address in &all {
        bytes(*address, 60_000).fill(1);
    }
    all.iter()
        .for_each(|address| assert_eq!(heap.free(*address), Freed::Done));
    // SAFETY: the cache is this thread's.
    unsafe { trim(heap.0) };
    let mut model = Model::default();
    for _ in 0..64 {
        model.add(heap.allocate(60_000), 60_000, 2);
    }
    while let Some(address) = model.remove(0) {
        assert_eq!(heap.free(address), Freed::Done);
    }
}
