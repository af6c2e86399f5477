//! The kernel as the referee: random operations on a pool and on the kernel's own hugetlb, which must count the
//! same after every step.
//!
//! `take` is the touch of a MAP_NORESERVE mapping, `reserve` a shared mapping, `use` a touch in it, `give` an
//! munmap or a hole in its file, `resize` and `overcommit` the knobs of the kernel's pool. What is compared
//! is (total, free, reserved, surplus), and whether each operation succeeded.
//!
//! `JUMBO_REFEREE_SEEDS` (a list) and `JUMBO_REFEREE_STEPS` ask for others than the usual ones. A sequence that
//! fails is made shorter as long as it fails, and printed with its seed.
#![allow(unsafe_code, reason = "the kernel's side maps and unmaps memory")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "pool/host.rs"]
#[allow(dead_code, reason = "shared with the pool's other tests")]
mod host;

use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::fs;
use std::os::fd::OwnedFd;

use jumbo::pool::{Model, Page, Placement, Pool, Reservation};
use jumbo::units::Pages;
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use host::{Alone, Knobs, POOL, kernel_counters, skip};

const SIZE: usize = 2 << 20;
const SEEDS: &[u64] = &[1, 2, 3, 5];
const STEPS: usize = 10_000;
/// How many of the kernel's pages a sequence may come to, at most: 8 GiB hosts must do.
const MOST: u64 = 24;

#[derive(Clone, Copy, Debug)]
enum Op {
    Take,
    Give(usize),
    /// A shared mapping of a file.
    Reserve(u64),
    /// A private mapping that reserves.
    ReservePrivate(u64),
    Use(usize),
    End(usize),
    Resize(u64),
    Overcommit(u64),
}

/// A small generator (xorshift), so that a failure can be run again from its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }

    fn any(&mut self) -> usize {
        usize::try_from(self.below(1 << 20)).unwrap()
    }

    fn operation(&mut self) -> Op {
        match self.below(100) {
            0..25 => Op::Take,
            25..53 => Op::Give(self.any()),
            53..63 => Op::Reserve(self.below(9)),
            63..67 => Op::ReservePrivate(1 + self.below(5)),
            67..82 => Op::Use(self.any()),
            82..91 => Op::End(self.any()),
            91..96 => Op::Resize(self.below(MOST / 2)),
            _ => Op::Overcommit(self.below(MOST / 2)),
        }
    }
}

/// A mapping of the kernel's side; unmapped when dropped.
struct Mapped {
    address: *mut c_void,
    length: usize,
}

impl Mapped {
    fn new(pages: u64, flags: MapFlags) -> rustix::io::Result<Self> {
        let length = usize::try_from(pages).unwrap() * SIZE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = flags | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        // SAFETY: a new mapping disturbs nobody.
        let address = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), length, prot, flags)? };
        Ok(Self { address, length })
    }

    fn of_file(file: &OwnedFd, pages: u64) -> rustix::io::Result<Self> {
        let length = usize::try_from(pages).unwrap() * SIZE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let null = std::ptr::null_mut();
        // SAFETY: a new mapping disturbs nobody.
        let address = unsafe { mm::mmap(null, length, prot, MapFlags::SHARED, file, 0)? };
        Ok(Self { address, length })
    }

    fn touch(&self, page: usize) -> rustix::io::Result<()> {
        // SAFETY: the page is within the mapping, and populating it changes nothing.
        unsafe {
            let start = self.address.byte_add(page * SIZE);
            mm::madvise(start, SIZE, Advice::LinuxPopulateWrite)
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nobody refers into it.
        unsafe { mm::munmap(self.address, self.length).unwrap() };
    }
}

/// A reservation on the kernel's side: which of its pages were used, and which of those are still.
struct Shared {
    file: OwnedFd,
    mapped: Mapped,
    used: u64,
}

impl Shared {
    fn new(pages: u64) -> rustix::io::Result<Self> {
        let file = rustix::fs::memfd_create(
            c"referee",
            MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::CLOEXEC,
        )?;
        rustix::fs::ftruncate(&file, pages * SIZE as u64)?;
        Ok(Self {
            mapped: Mapped::of_file(&file, pages)?,
            file,
            used: 0,
        })
    }

    fn punch(&self, page: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, length) = (page * SIZE as u64, SIZE as u64);
        rustix::fs::fallocate(&self.file, flags, offset, length).unwrap();
    }

    /// Ends what is left of the reservation. A hole would not do: it gives back pages, not promises.
    fn cut(&self) {
        rustix::fs::ftruncate(&self.file, self.used * SIZE as u64).unwrap();
    }
}

/// A page in use, on both sides.
enum Used<'p> {
    /// A mapping of its own.
    Alone(Page<'p>, Mapped),
    /// A page of a shared file; the file, and the page's number there.
    Of(Page<'p>, std::rc::Rc<std::cell::RefCell<Shared>>, u64),
}

/// A reservation, on both sides.
enum Reserved<'p> {
    Shared(Reservation<'p>, std::rc::Rc<std::cell::RefCell<Shared>>),
    /// A private mapping goes as a whole, and its pages with it.
    Private(Reservation<'p>, Mapped, Vec<Page<'p>>),
}

/// Both sides.
struct Run<'p> {
    pool: &'p Pool,
    used: Vec<Used<'p>>,
    reserved: Vec<Reserved<'p>>,
    succeeded: usize,
    refused: usize,
}

fn write(name: &str, value: u64) {
    fs::write(format!("{POOL}/{name}"), value.to_string()).unwrap();
}

impl Run<'_> {
    fn both<T, K>(
        &mut self,
        pool: Result<T, jumbo::pool::Error>,
        kernel: rustix::io::Result<K>,
    ) -> Result<Option<(T, K)>, String> {
        match (pool, kernel) {
            (Ok(pool), Ok(kernel)) => {
                self.succeeded += 1;
                Ok(Some((pool, kernel)))
            }
            (Err(_), Err(_)) => {
                self.refused += 1;
                Ok(None)
            }
            (Ok(_), Err(errno)) => Err(format!("the kernel refuses: {errno}")),
            (Err(error), Ok(_)) => Err(format!("only the pool refuses: {error}")),
        }
    }

    fn step(&mut self, op: Op) -> Result<(), String> {
        match op {
            Op::Take => {
                let kernel = Mapped::new(1, MapFlags::PRIVATE | MapFlags::NORESERVE)
                    .and_then(|mapped| mapped.touch(0).map(|()| mapped));
                let pool = self.pool.take();
                if let Some((page, mapped)) = self.both(pool, kernel)? {
                    self.used.push(Used::Alone(page, mapped));
                }
            }
            Op::Give(at) if !self.used.is_empty() => {
                match self.used.swap_remove(at % self.used.len()) {
                    Used::Alone(page, mapped) => drop((page, mapped)),
                    Used::Of(page, shared, number) => {
                        shared.borrow().punch(number);
                        drop(page);
                    }
                }
            }
            Op::Reserve(0) => {}
            Op::Reserve(pages) => {
                let both = self.both(self.pool.reserve(Pages(pages)), Shared::new(pages))?;
                if let Some((reservation, shared)) = both {
                    let shared = std::rc::Rc::new(std::cell::RefCell::new(shared));
                    self.reserved.push(Reserved::Shared(reservation, shared));
                }
            }
            Op::ReservePrivate(pages) => {
                let kernel = Mapped::new(pages, MapFlags::PRIVATE);
                let both = self.both(self.pool.reserve(Pages(pages)), kernel)?;
                if let Some((reservation, mapped)) = both {
                    let private = Reserved::Private(reservation, mapped, Vec::new());
                    self.reserved.push(private);
                }
            }
            Op::Use(at) if !self.reserved.is_empty() => {
                let at = at % self.reserved.len();
                match &mut self.reserved[at] {
                    Reserved::Shared(reservation, shared) => {
                        if let Some(page) = reservation.take() {
                            let number = shared.borrow().used;
                            let touched = shared
                                .borrow()
                                .mapped
                                .touch(usize::try_from(number).unwrap());
                            touched.map_err(|errno| format!("a reserved page: {errno}"))?;
                            shared.borrow_mut().used += 1;
                            let shared = std::rc::Rc::clone(shared);
                            self.used.push(Used::Of(page, shared, number));
                        }
                    }
                    Reserved::Private(reservation, mapped, pages) => {
                        if let Some(page) = reservation.take() {
                            let touched = mapped.touch(pages.len());
                            touched.map_err(|errno| format!("a reserved page: {errno}"))?;
                            pages.push(page);
                        }
                    }
                }
            }
            Op::End(at) if !self.reserved.is_empty() => {
                match self.reserved.swap_remove(at % self.reserved.len()) {
                    Reserved::Shared(reservation, shared) => {
                        shared.borrow().cut();
                        drop(reservation);
                    }
                    Reserved::Private(reservation, mapped, pages) => {
                        drop((pages, reservation, mapped));
                    }
                }
            }
            Op::Resize(pages) => {
                write("nr_hugepages", pages);
                self.pool.resize(Pages(pages));
            }
            Op::Overcommit(pages) => {
                write("nr_overcommit_hugepages", pages);
                self.pool.set_overcommit(Pages(pages));
            }
            Op::Give(_) | Op::Use(_) | Op::End(_) => {}
        }
        self.compare()
    }

    fn compare(&self) -> Result<(), String> {
        self.pool.verify()?;
        let counters = self.pool.counters();
        let ours = [
            counters.total,
            counters.free,
            counters.reserved,
            counters.surplus,
        ]
        .map(|pages| pages.0);
        let kernels = kernel_counters();
        if ours == kernels {
            Ok(())
        } else {
            Err(format!(
                "(total, free, reserved, surplus): the pool has {ours:?}, the kernel {kernels:?}"
            ))
        }
    }
}

/// What became of a sequence.
struct Outcome {
    /// The step that failed, and how.
    failed: Option<(usize, String)>,
    succeeded: usize,
    refused: usize,
}

fn run(ops: &[Op]) -> Outcome {
    write("nr_overcommit_hugepages", 0);
    write("nr_hugepages", 0);
    // More than a sequence can ask for: the kernel's buddy allocator has more, too.
    let pool = Pool::new(Model::new(&[512]).unwrap(), Placement::ANYWHERE);
    let mut both = Run {
        pool: &pool,
        used: Vec::new(),
        reserved: Vec::new(),
        succeeded: 0,
        refused: 0,
    };
    let step = |(at, op): (usize, &Op)| both.step(*op).err().map(|what| (at, what));
    let mut failed = ops.iter().enumerate().find_map(step);
    let (succeeded, refused) = (both.succeeded, both.refused);
    // In the end all is given back, to both.
    while failed.is_none() && both.used.len() + both.reserved.len() > 0 {
        let end = if both.used.is_empty() {
            Op::End(0)
        } else {
            Op::Give(0)
        };
        failed = both.step(end).err().map(|what| (ops.len(), what));
    }
    Outcome {
        failed,
        succeeded,
        refused,
    }
}

/// The shortest sequence found that still fails: parts of it are left out, halves first, then less.
fn shrink(mut ops: Vec<Op>) -> (Vec<Op>, String) {
    let mut what = String::new();
    let mut fails = |ops: &mut Vec<Op>| {
        let Some((at, why)) = run(ops).failed else {
            return false;
        };
        ops.truncate(at + 1);
        what = why;
        true
    };
    assert!(fails(&mut ops), "it failed once and not again");
    let mut parts: VecDeque<usize> =
        std::iter::successors(Some(ops.len() / 2), |n| (*n > 1).then_some(n / 2)).collect();
    // The last pass is repeated while it still finds something to leave out.
    while let Some(part) = parts.pop_front() {
        let (mut at, mut shorter) = (0, false);
        while at < ops.len() && part > 0 {
            let mut without = ops.clone();
            without.drain(at..(at + part).min(ops.len()));
            if fails(&mut without) {
                ops = without;
                shorter = true;
            } else {
                at += part;
            }
        }
        if part == 1 && shorter {
            parts.push_back(1);
        }
    }
    fails(&mut ops);
    (ops, what)
}

fn variable<T>(name: &str, parse: impl Fn(&str) -> T, usual: T) -> T {
    std::env::var(name).map_or(usual, |text| parse(&text))
}

#[test]
fn the_pool_counts_as_the_kernel_does() {
    let _alone = Alone::new();
    if !rustix::process::geteuid().is_root() {
        return skip("needs root, for the kernel's pool");
    }
    if fs::metadata(POOL).is_err() {
        return skip("the kernel has no pool of 2M pages");
    }
    if kernel_counters() != [0; 4] {
        return skip("somebody uses the kernel's pool of 2M pages");
    }
    let mut knobs = Knobs::new();
    for knob in ["nr_hugepages", "nr_overcommit_hugepages"] {
        assert!(knobs.set(format!("{POOL}/{knob}"), 0), "{knob}");
    }
    let number = |text: &str| text.trim().parse().expect("a number");
    let steps = variable(
        "JUMBO_REFEREE_STEPS",
        |text| usize::try_from(number(text)).unwrap(),
        STEPS,
    );
    let list = |text: &str| text.split(',').map(number).collect();
    for seed in variable("JUMBO_REFEREE_SEEDS", list, SEEDS.to_vec()) {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let ops: Vec<Op> = (0..steps).map(|_| random.operation()).collect();
        let outcome = run(&ops);
        println!(
            "seed {seed}: {steps} operations; of those that can fail {} succeeded and {} were refused, on both sides",
            outcome.succeeded, outcome.refused
        );
        if let Some((at, what)) = outcome.failed {
            let (short, last) = shrink(ops[..(at + 1).min(ops.len())].to_vec());
            let mut text = String::new();
            for op in &short {
                writeln!(text, "  {op:?}").unwrap();
            }
            drop(knobs);
            panic!(
                "seed {seed}, step {at}: {what}\nshortened to {} operations:\n{text}which ends in: {last}",
                short.len()
            );
        }
        assert!(
            outcome.refused * 20 > outcome.succeeded,
            "the limits were hardly met"
        );
    }
}
