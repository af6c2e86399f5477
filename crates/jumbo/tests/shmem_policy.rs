//! Comparison of `shmem::policy` with the kernel: for each combination of control values, object
//! size, alignment and advice the test touches one byte. The folio size that the kernel counts must
//! be the first that the policy tries.
//!
//! The values are all of the top-level control and of three sizes; the other sizes are `never`. A
//! size whose allocation failed (`shmem_fallback`) is skipped, like the kernel does: fragmented
//! memory thus shows the order of sizes. Other programs may allocate shared memory meanwhile, so a
//! combination fails only after several mismatches in a row. The test reports all of them.
#![allow(unsafe_code, reason = "mappings of the kernel's, at addresses of ours")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "pool/host.rs"]
#[allow(dead_code, reason = "shared with the pool's tests")]
mod host;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::Duration;

use jumbo::shmem::policy::{Advice, Controls, Mapped};
use jumbo::units::{Bytes, PageSize};
use jumbo_host::kernel::{Root, base_page, thp};
use jumbo_sys::collapse;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{self, MapFlags, ProtFlags};

use host::{Alone, Knobs, skip};

const TOPS: [&str; 6] = ["never", "advise", "within_size", "always", "deny", "force"];
const VALUES: [&str; 5] = ["never", "advise", "within_size", "always", "inherit"];
/// Sizes whose values vary, in KiB: two below the PMD size, and the PMD size.
const SIZES: [u64; 3] = [64, 256, 2048];
const ADVICES: [Advice; 3] = [Advice::None, Advice::Huge, Advice::NoHuge];
const PMD: u64 = 2 << 20;
const PMD_LENGTH: usize = 2 << 20;
const KIB: u64 = 1 << 10;
/// Maximum attempts of a combination that differs.
const MAX_ATTEMPTS: u32 = 6;

/// Mapping of an object, and the byte to touch.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Size of the object.
    size: u64,
    /// Offset of the mapping in the object, and its length.
    offset: u64,
    length: u64,
    /// Distance of the mapping from a multiple of the PMD size.
    skew: u64,
    /// Offset in the mapping of the byte to touch.
    touch: u64,
}

const fn shape(size: u64, skew: u64, touch: u64) -> Shape {
    let (offset, length) = (0, size);
    Shape {
        size,
        offset,
        length,
        skew,
        touch,
    }
}

const SHAPES: &[Shape] = &[
    shape(40 * KIB, 0, 0),
    shape(64 * KIB, 0, 60 * KIB),
    // The object ends within a base page.
    shape(250 * KIB, 0, 0),
    shape(100 * KIB, 0, 70 * KIB),
    shape(384 * KIB, 0, 300 * KIB),
    shape(PMD, 0, PMD - 1),
    shape(PMD, 4 * KIB, 0),
    shape(PMD, 64 * KIB, 256 * KIB),
    shape(2 * PMD, 256 * KIB, PMD),
    shape(3 * PMD, 256 * KIB, 2 * PMD),
    shape(PMD + 512 * KIB, 0, PMD + 300 * KIB),
    // A part of the object, at an aligned and at an unaligned address.
    Shape {
        size: 3 * PMD,
        offset: PMD + 256 * KIB,
        length: PMD,
        skew: 256 * KIB,
        touch: PMD / 2,
    },
    Shape {
        size: 2 * PMD,
        offset: 64 * KIB,
        length: PMD,
        skew: 0,
        touch: 512 * KIB,
    },
    // The mapping is larger than the object.
    Shape {
        size: 320 * KIB,
        offset: 0,
        length: PMD,
        skew: 0,
        touch: 300 * KIB,
    },
];
/// Files of one control, and counters of one size.
struct Size {
    control: PathBuf,
    size: PageSize,
    allocated: File,
    fell_back: File,
}

/// Address window and kernel controls of the comparison.
struct World {
    root: Root,
    sizes: Vec<Size>,
    /// Start of a reserved address range of 8 MiB, aligned to the PMD size.
    window: u64,
}

impl World {
    fn new() -> Option<Self> {
        let root = Root::host();
        let table = thp::Thp::read_controls(&root).unwrap()?;
        let folder = |size: &PageSize| {
            let name = format!("hugepages-{}kB", size.kib());
            PathBuf::from("/").join(thp::FOLDER).join(name)
        };
        let sizes = table
            .sizes
            .iter()
            .filter(|(_, of)| of.shmem_enabled.is_some());
        let sizes = sizes.map(|(size, _)| Size {
            control: folder(size).join("shmem_enabled"),
            size: *size,
            allocated: File::open(folder(size).join("stats/shmem_alloc")).unwrap(),
            fell_back: File::open(folder(size).join("stats/shmem_fallback")).unwrap(),
        });
        let sizes: Vec<_> = sizes.collect();
        if table.pmd_size.bytes() != PMD || sizes.is_empty() {
            return None;
        }
        let none = std::ptr::null_mut();
        // SAFETY: a new mapping replaces none.
        let window = unsafe {
            mm::mmap_anonymous(none, 10 << 20, ProtFlags::empty(), MapFlags::PRIVATE).unwrap()
        };
        Some(Self {
            root,
            sizes,
            window: (window.addr() as u64).next_multiple_of(PMD),
        })
    }

    /// Returns the allocations and fallbacks of each size.
    fn counts(&self) -> Vec<[u64; 2]> {
        let count = |file: &File| {
            let mut text = [0; 32];
            let length = file.read_at(&mut text, 0).unwrap();
            let text = str::from_utf8(&text[..length]).unwrap();
            text.trim().parse::<u64>().unwrap()
        };
        let sizes = self.sizes.iter();
        sizes
            .map(|size| [&size.allocated, &size.fell_back].map(count))
            .collect()
    }

    fn controls(&self) -> Controls {
        let table = thp::Thp::read_controls(&self.root).unwrap().unwrap();
        Controls::of(&table, base_page(&self.root)).unwrap()
    }

    /// Maps an object over the window.
    fn map(&self, shape: Shape, advice: Advice) -> (Mapped, Object) {
        let address = self.window + shape.skew;
        let object = Object::map(shape, address);
        let length = usize::try_from(shape.length).unwrap();
        let value = match advice {
            Advice::None => None,
            Advice::Huge => Some(mm::Advice::LinuxHugepage),
            Advice::NoHuge => Some(mm::Advice::LinuxNoHugepage),
        };
        if let Some(value) = value {
            // SAFETY: advice about a mapping of ours, which changes no byte of it.
            unsafe { mm::madvise(pointer(address), length, value).unwrap() };
        }
        let mapped = Mapped {
            size: Bytes(shape.size),
            range: address..address + shape.length,
            offset: shape.offset,
            advice,
        };
        (mapped, object)
    }

    /// Returns the sizes that the kernel allocated for one touch, and the expected ones.
    fn touch(&self, controls: &Controls, shape: Shape, advice: Advice) -> [Vec<PageSize>; 2] {
        let (mapped, _object) = self.map(shape, advice);
        let address = mapped.range.start + shape.touch;
        let before = self.counts();
        // SAFETY: the byte is mapped, writable, and within the object.
        unsafe { pointer(address).cast::<u8>().write_volatile(1) };
        let after = self.counts();
        let rose = |which: usize| {
            let both = before.iter().zip(&after).zip(&self.sizes);
            both.filter(move |((before, after), _)| after[which] > before[which])
                .map(|(_, size)| size.size)
                .collect::<Vec<_>>()
        };
        let fell_back = rose(1);
        let tried = controls.tried(&mapped, address);
        let first = tried.into_iter().find(|size| !fell_back.contains(size));
        [rose(0), first.into_iter().collect()]
    }

    /// Reports whether the kernel collapses the block of one touched byte, and whether it should.
    /// Transient errors are retried.
    fn collapse(&self, controls: &Controls, shape: Shape, advice: Advice) -> [bool; 2] {
        let (mapped, _object) = self.map(shape, advice);
        let address = mapped.range.start + shape.touch;
        // SAFETY: as in `touch`.
        unsafe { pointer(address).cast::<u8>().write_volatile(1) };
        let expected = controls.collapses(&mapped, address);
        let block = address & !(PMD - 1);
        let obtained = loop {
            match collapse(pointer(block).addr(), PMD_LENGTH) {
                Err(Errno::AGAIN | Errno::NOMEM | Errno::BUSY) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => break other,
            }
        };
        [obtained.is_ok(), expected.is_ok()]
    }
}

fn pointer(address: u64) -> *mut libc::c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

/// A mapped object; on drop its pages are freed and the window is empty again.
struct Object {
    address: u64,
    length: u64,
}

impl Object {
    fn map(shape: Shape, address: u64) -> Self {
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let (at, length) = (pointer(address), usize::try_from(shape.length).unwrap());
        // `mmap` itself only creates objects of the size of their mapping.
        let is_plain = (shape.offset, shape.length) == (0, shape.size);
        // SAFETY: it replaces a part of the window, which nothing else uses.
        unsafe {
            if is_plain && shape.size.is_multiple_of(4 * KIB) {
                mm::mmap_anonymous(at, length, prot, flags).unwrap();
            } else {
                let file = memfd_create(c"object", MemfdFlags::CLOEXEC).unwrap();
                ftruncate(&file, shape.size).unwrap();
                mm::mmap(at, length, prot, flags, &file, shape.offset).unwrap();
            }
        }
        let length = shape.length;
        Self { address, length }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        let (at, length) = (pointer(self.address), usize::try_from(self.length).unwrap());
        // SAFETY: it replaces this object's own mapping, of which no reference is left.
        unsafe { mm::mmap_anonymous(at, length, ProtFlags::empty(), flags).unwrap() };
    }
}

/// Adds all differences of one table to `differ`.
fn compare(world: &World, values: &str, every_collapse: bool, differ: &mut Vec<String>) -> usize {
    let controls = world.controls();
    let mut compared = 0;
    let mut check = |what: &str, try_it: &dyn Fn() -> [String; 2]| {
        compared += 1;
        let mut last = try_it();
        for _ in 0..MAX_ATTEMPTS {
            if last[0] == last[1] {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
            last = try_it();
        }
        let [kernel, policy] = last;
        differ.push(format!(
            "{values}: {what}: the kernel {kernel}, the policy {policy}"
        ));
    };
    for shape in SHAPES.iter().copied() {
        for advice in ADVICES {
            let what = format!("{shape:?}, advice {advice:?}");
            check(&what, &|| {
                world
                    .touch(&controls, shape, advice)
                    .map(|sizes| format!("{sizes:?}"))
            });
            let collapses = every_collapse && (shape.length >= PMD || shape.skew > 0);
            if collapses && shape.size >= PMD {
                check(&format!("{what}, collapse"), &|| {
                    world
                        .collapse(&controls, shape, advice)
                        .map(|done| done.to_string())
                });
            }
        }
    }
    compared
}

#[test]
fn the_kernel_allocates_what_the_policy_says() {
    let _alone = Alone::new();
    let folder = PathBuf::from("/").join(thp::FOLDER);
    let Some(world) = World::new() else {
        return skip("this kernel has no sizes of shared memory, or another PMD size");
    };
    let mut knobs = Knobs::new();
    if !knobs.set(folder.join("shmem_enabled"), "never") {
        return skip("needs root, and a kernel whose controls can be written");
    }
    for size in &world.sizes {
        assert!(knobs.set(&size.control, "never"));
    }
    let [small, middle, pmd] =
        SIZES.map(|kib| folder.join(format!("hugepages-{kib}kB/shmem_enabled")));
    let (mut tables, mut refused, mut compared, mut differ) = (0, 0, 0, Vec::new());
    for top in TOPS {
        // The kernel accepts `force` only if the PMD size alone inherits.
        let others = [(&small, "never"), (&middle, "never"), (&pmd, "inherit")];
        assert!(others.iter().all(|(knob, value)| knobs.set(knob, value)));
        assert!(knobs.set(folder.join("shmem_enabled"), top), "{top}");
        for of_pmd in VALUES {
            assert!(knobs.set(&pmd, of_pmd), "2M {of_pmd} under {top}");
            for of_middle in VALUES {
                let middle_set = knobs.set(&middle, of_middle);
                for of_small in VALUES {
                    let values =
                        format!("top {top}, 2M {of_pmd}, 256K {of_middle}, 64K {of_small}");
                    if !(knobs.set(&small, of_small) && middle_set) {
                        let known = top == "force" && [of_middle, of_small].contains(&"inherit");
                        assert!(known, "{values}: refused by the kernel");
                        refused += 1;
                        continue;
                    }
                    // Only the PMD size can be collapsed to, so the other values change nothing.
                    let once = [of_middle, of_small] == ["never"; 2];
                    compared += compare(&world, &values, once, &mut differ);
                    tables += 1;
                }
            }
        }
    }
    drop(knobs);
    eprintln!("{compared} combinations in {tables} tables compared");
    assert_eq!(tables + refused, TOPS.len() * VALUES.len().pow(3));
    let shown = differ
        .iter()
        .take(40)
        .cloned()
        .collect::<Vec<_>>()
        .join("\n");
    assert!(
        differ.is_empty(),
        "{} of {compared} differ:\n{shown}",
        differ.len()
    );
}
