//! Kernel side of the comparison: mappings, shared files, and a mount of hugetlbfs.

use std::cell::RefCell;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use super::host::kernel_counters;
use super::{Answer, Op, Side, text, write};

const PAGE_BYTES: usize = 2 << 20;

/// A mapping, unmapped on drop.
struct Mapped {
    address: *mut c_void,
    length: usize,
}

impl Mapped {
    fn new(pages: u64, flags: MapFlags) -> rustix::io::Result<Self> {
        let length = usize::try_from(pages).unwrap() * PAGE_BYTES;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = flags | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        // SAFETY: a new mapping replaces none.
        let address = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), length, prot, flags)? };
        Ok(Self { address, length })
    }

    fn of_file(file: &OwnedFd, pages: u64) -> rustix::io::Result<Self> {
        let length = usize::try_from(pages).unwrap() * PAGE_BYTES;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let null = std::ptr::null_mut();
        // SAFETY: a new mapping replaces none.
        let address = unsafe { mm::mmap(null, length, prot, MapFlags::SHARED, file, 0)? };
        Ok(Self { address, length })
    }

    fn pages(&self) -> u64 {
        (self.length / PAGE_BYTES) as u64
    }

    fn touch(&self, page: u64) -> rustix::io::Result<()> {
        // SAFETY: the page is within the mapping, and populating it changes nothing.
        unsafe {
            let start = self
                .address
                .byte_add(usize::try_from(page).unwrap() * PAGE_BYTES);
            mm::madvise(start, PAGE_BYTES, Advice::LinuxPopulateWrite)
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nothing refers into it.
        unsafe { mm::munmap(self.address, self.length).unwrap() };
    }
}

/// A reservation in the kernel, with its pages used so far and those still in use.
struct Shared {
    file: OwnedFd,
    mapped: Mapped,
    used: u64,
}

impl Shared {
    fn new(pages: u64) -> rustix::io::Result<Self> {
        let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create(c"referee", flags)?;
        rustix::fs::ftruncate(&file, pages * PAGE_BYTES as u64)?;
        Ok(Self {
            mapped: Mapped::of_file(&file, pages)?,
            file,
            used: 0,
        })
    }

    fn punch(&self, page: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, length) = (page * PAGE_BYTES as u64, PAGE_BYTES as u64);
        rustix::fs::fallocate(&self.file, flags, offset, length).unwrap();
    }

    /// Ends the rest of the reservation. A hole would free pages, but not reservations.
    fn cut(&self) {
        for pages in (self.used..self.mapped.pages()).rev() {
            rustix::fs::ftruncate(&self.file, pages * PAGE_BYTES as u64).unwrap();
        }
    }
}

/// A hugetlb page in use.
enum Touched {
    /// A mapping of its own.
    Alone(#[expect(dead_code, reason = "unmapped when dropped")] Mapped),
    /// A page of a shared file, by its number.
    Of(Rc<RefCell<Shared>>, u64),
}

/// A reservation in the kernel.
enum Kept {
    Shared(Rc<RefCell<Shared>>),
    /// A private mapping, freed as a whole, with the number of its touched pages.
    Private(Mapped, u64),
}

impl Kept {
    fn end(self) {
        if let Self::Shared(shared) = self {
            shared.borrow().cut();
        }
    }
}

/// State of the kernel side.
pub(super) struct Kernels {
    used: Vec<Touched>,
    reserved: Vec<Kept>,
}

impl Kernels {
    /// Starts with no page reserved or in use.
    pub(super) fn new() -> Self {
        Self {
            used: Vec::new(),
            reserved: Vec::new(),
        }
    }

    fn keep(&mut self, kept: rustix::io::Result<Kept>) -> Answer {
        Some(text(kept.map(|kept| self.reserved.push(kept))))
    }
}

impl Side for Kernels {
    fn step(&mut self, op: Op) -> Result<Answer, String> {
        let reserved_page = |errno| format!("a reserved page: {errno}");
        Ok(match op {
            Op::Take => {
                let mapped = Mapped::new(1, MapFlags::PRIVATE | MapFlags::NORESERVE);
                let touched = mapped.and_then(|mapped| mapped.touch(0).map(|()| mapped));
                Some(text(
                    touched.map(|mapped| self.used.push(Touched::Alone(mapped))),
                ))
            }
            Op::Reserve(pages @ 1..) => {
                let shared = |shared| Kept::Shared(Rc::new(RefCell::new(shared)));
                self.keep(Shared::new(pages).map(shared))
            }
            Op::ReservePrivate(pages) => {
                let mapped = Mapped::new(pages, MapFlags::PRIVATE);
                self.keep(mapped.map(|mapped| Kept::Private(mapped, 0)))
            }
            Op::Give(at) if !self.used.is_empty() => {
                if let Touched::Of(shared, page) = self.used.swap_remove(at % self.used.len()) {
                    shared.borrow().punch(page);
                }
                None
            }
            Op::Use(at) if !self.reserved.is_empty() => {
                let at = at % self.reserved.len();
                match &mut self.reserved[at] {
                    Kept::Shared(shared) => {
                        let number = shared.borrow().used;
                        if number < shared.borrow().mapped.pages() {
                            shared.borrow_mut().used += 1;
                            let touched = shared.borrow().mapped.touch(number);
                            touched.map_err(reserved_page)?;
                            self.used.push(Touched::Of(Rc::clone(shared), number));
                        }
                    }
                    Kept::Private(mapped, used) => {
                        if *used < mapped.pages() {
                            mapped.touch(*used).map_err(reserved_page)?;
                            *used += 1;
                        }
                    }
                }
                None
            }
            Op::End(at) if !self.reserved.is_empty() => {
                self.reserved.swap_remove(at % self.reserved.len()).end();
                None
            }
            Op::Resize(pages) => {
                write("nr_hugepages", pages);
                None
            }
            Op::Overcommit(pages) => {
                write("nr_overcommit_hugepages", pages);
                None
            }
            _ => None,
        })
    }

    fn counters(&self) -> [u64; 4] {
        kernel_counters()
    }
}
