//! The kernel as the referee: random operations on a pool and on the kernel's own hugetlb, which must count the
//! same after every step.
//!
//! `take` is the touch of a MAP_NORESERVE mapping, `reserve` a shared mapping, `use` a touch in it, `give` an
//! munmap or a hole in its file, a subpool a mount with `size=`, `resize` and `overcommit` the knobs of the kernel's pool. What is compared
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
#[path = "pool/random.rs"]
mod random;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;

use jumbo::pool::{Error, Model, Page, Placement, Pool, Reservation, Subpool};
use jumbo::units::Pages;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use host::{Alone, Knobs, POOL, is_unused, kernel_counters, skip};
use random::Random;

const SIZE: usize = 2 << 20;
const SEEDS: &[u64] = &[1, 2, 3, 5];
const STEPS: usize = 10_000;
/// How many of the kernel's pages a sequence may come to, at most: 8 GiB hosts must do.
const MOST: u64 = 24;
/// How often a sequence is run again when two runs do not say the same.
const RETRIES: u32 = 5;
/// How often a sequence that fails is run again to make it shorter.
const RUNS: u32 = 300;
/// The maximum of the subpool.
const QUOTA: u64 = 5;

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
    /// Takes through a subpool; for the kernel, the touch of a file on a mount with `size=`.
    TakeOf,
    /// Reserves through it.
    ReserveOf(u64),
    Resize(u64),
    Overcommit(u64),
}

impl Op {
    fn any(random: &mut Random) -> Self {
        match random.below(100) {
            0..19 => Self::Take,
            19..25 => Self::TakeOf,
            25..53 => Self::Give(random.at(1 << 20)),
            53..60 => Self::Reserve(random.below(9)),
            60..63 => Self::ReserveOf(random.below(6)),
            63..67 => Self::ReservePrivate(1 + random.below(5)),
            67..82 => Self::Use(random.at(1 << 20)),
            82..91 => Self::End(random.at(1 << 20)),
            91..96 => Self::Resize(random.below(MOST / 2)),
            _ => Self::Overcommit(random.below(MOST / 2)),
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
        // SAFETY: a new mapping replaces none.
        let address = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), length, prot, flags)? };
        Ok(Self { address, length })
    }

    fn of_file(file: &OwnedFd, pages: u64, flags: MapFlags) -> rustix::io::Result<Self> {
        let length = usize::try_from(pages).unwrap() * SIZE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let null = std::ptr::null_mut();
        // SAFETY: a new mapping replaces none.
        let address = unsafe { mm::mmap(null, length, prot, MapFlags::SHARED | flags, file, 0)? };
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
        // SAFETY: the mapping is this value's, and nothing refers into it.
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
    /// In a file that is bound by nothing, or of a mount.
    fn new(pages: u64, mount: Option<&Path>, flags: MapFlags) -> rustix::io::Result<Self> {
        let file = match mount {
            Some(folder) => rustix::fs::open(
                folder,
                OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC,
                Mode::RUSR | Mode::WUSR,
            )?,
            None => rustix::fs::memfd_create(
                c"referee",
                MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::CLOEXEC,
            )?,
        };
        rustix::fs::ftruncate(&file, pages * SIZE as u64)?;
        Ok(Self {
            mapped: Mapped::of_file(&file, pages, flags)?,
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
    Of(Page<'p>, Rc<RefCell<Shared>>, u64),
}

/// A reservation, on both sides.
enum Reserved<'p> {
    Shared(Reservation<'p>, Rc<RefCell<Shared>>),
    /// A private mapping goes as a whole, and its pages with it.
    Private(Reservation<'p>, Mapped, Vec<Page<'p>>),
}

/// Both sides.
struct Run<'p> {
    pool: &'p Pool,
    subpool: &'p Subpool<'p>,
    mount: &'p Path,
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
            Op::TakeOf => {
                let pool = self.subpool.take();
                // The kernel must not be asked then: a touch that finds no page leaves one charged to the
                // mount for good (seen on 6.18).
                if matches!(pool, Err(Error::Exhausted(_))) {
                    return self.compare();
                }
                let kernel = Shared::new(1, Some(self.mount), MapFlags::NORESERVE)
                    .and_then(|shared| shared.mapped.touch(0).map(|()| shared));
                if let Some((page, shared)) = self.both(pool, kernel)? {
                    let shared = Rc::new(RefCell::new(shared));
                    self.used.push(Used::Of(page, shared, 0));
                }
            }
            Op::ReserveOf(0) => {}
            Op::ReserveOf(pages) => {
                let kernel = Shared::new(pages, Some(self.mount), MapFlags::empty());
                let both = self.both(self.subpool.reserve(Pages(pages)), kernel)?;
                if let Some((reservation, shared)) = both {
                    let shared = Rc::new(RefCell::new(shared));
                    self.reserved.push(Reserved::Shared(reservation, shared));
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
                let kernel = Shared::new(pages, None, MapFlags::empty());
                let both = self.both(self.pool.reserve(Pages(pages)), kernel)?;
                if let Some((reservation, shared)) = both {
                    let shared = Rc::new(RefCell::new(shared));
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
                            let shared = Rc::clone(shared);
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
        let stat = rustix::fs::statvfs(self.mount).unwrap();
        let charged = (self.subpool.charged().0, stat.f_blocks - stat.f_bfree);
        let kernels = kernel_counters();
        if ours == kernels && charged.0 == charged.1 {
            return Ok(());
        }
        Err(format!(
            "(total, free, reserved, surplus): the pool has {ours:?}, the kernel {kernels:?}; charged to the \
             subpool {}, to the mount {}",
            charged.0, charged.1
        ))
    }
}

/// A mount of hugetlbfs whose size is the subpool's maximum; gone when dropped.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let options = format!("pagesize=2M,size={}", QUOTA * SIZE as u64);
        let status = Command::new("mount")
            .args(["-t", "hugetlbfs", "-o", &options, "none"])
            .arg(folder.path())
            .status();
        status
            .is_ok_and(|status| status.success())
            .then(|| Self(folder))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
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
    let mount = Mount::new().expect("hugetlbfs could be mounted before");
    write("nr_overcommit_hugepages", 0);
    write("nr_hugepages", 0);
    // Programs of others on this host, which know nothing of the lock.
    is_unused();
    // More than a sequence can ask for: the kernel's buddy allocator has more, too.
    let pool = Pool::new(Model::new(&[512]).unwrap(), Placement::ANYWHERE);
    let subpool = pool.subpool(Some(Pages(QUOTA)), Pages(0)).unwrap();
    let mut both = Run {
        pool: &pool,
        subpool: &subpool,
        mount: mount.0.path(),
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

/// What became of a sequence, once two runs say the same; `None` where another process keeps taking and giving
/// pages of the kernel's pool.
fn run_undisturbed(ops: &[Op]) -> Option<Outcome> {
    let mut before = None;
    for _ in 0..RETRIES {
        let outcome = run(ops);
        if outcome.failed.is_none() || outcome.failed == before {
            return Some(outcome);
        }
        before = outcome.failed;
    }
    None
}

/// The shortest sequence found that still fails: parts of it are left out, halves first, then less.
fn shrink(mut ops: Vec<Op>) -> (Vec<Op>, String) {
    let (mut what, mut runs) = (String::new(), 0);
    let mut fails = |ops: &mut Vec<Op>| {
        runs += 1;
        if runs > RUNS {
            return false;
        }
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
    if !is_unused() {
        return skip("another process uses the kernel's pool of 2M pages");
    }
    if Mount::new().is_none() {
        return skip("cannot mount hugetlbfs");
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
        let mut random = Random::new(seed);
        let ops: Vec<Op> = (0..steps).map(|_| Op::any(&mut random)).collect();
        let Some(outcome) = run_undisturbed(&ops) else {
            return skip("another process uses the kernel's pool of 2M pages meanwhile");
        };
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
