//! The kernel's side: mappings, shared files, and a mount of hugetlbfs.

use std::cell::RefCell;
use std::ffi::{CString, c_void};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::rc::Rc;

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use super::host::kernel_counters;
use super::{Answer, Op, QUOTA, Side, text, write};

const SIZE: usize = 2 << 20;

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

    fn pages(&self) -> u64 {
        (self.length / SIZE) as u64
    }

    fn touch(&self, page: u64) -> rustix::io::Result<()> {
        // SAFETY: the page is within the mapping, and populating it changes nothing.
        unsafe {
            let start = self.address.byte_add(usize::try_from(page).unwrap() * SIZE);
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
    /// Its file is one of the mount.
    is_of_mount: bool,
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
            is_of_mount: mount.is_some(),
        })
    }

    fn punch(&self, page: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, length) = (page * SIZE as u64, SIZE as u64);
        rustix::fs::fallocate(&self.file, flags, offset, length).unwrap();
    }

    /// Ends what is left of the reservation. A hole would not do: it gives back pages, not promises. And one after the
    /// other: of several that go at once the kernel keeps more for a minimum than it lacks (6.18,
    /// `hugepage_subpool_put_pages`).
    fn cut(&self) {
        for pages in (self.used..self.mapped.pages()).rev() {
            rustix::fs::ftruncate(&self.file, pages * SIZE as u64).unwrap();
        }
    }
}

/// A page in use on the kernel's side.
enum Touched {
    /// A mapping of its own.
    Alone(#[expect(dead_code, reason = "unmapped when dropped")] Mapped),
    /// A page of a shared file; the file, and the page's number there.
    Of(Rc<RefCell<Shared>>, u64),
}

impl Touched {
    fn is_of_mount(&self) -> bool {
        matches!(self, Self::Of(shared, _) if shared.borrow().is_of_mount)
    }
}

/// A reservation on the kernel's side.
enum Kept {
    Shared(Rc<RefCell<Shared>>),
    /// A private mapping goes as a whole, and its pages with it: so many were touched.
    Private(Mapped, u64),
}

impl Kept {
    fn is_of_mount(&self) -> bool {
        matches!(self, Self::Shared(shared) if shared.borrow().is_of_mount)
    }

    fn end(self) {
        if let Self::Shared(shared) = self {
            shared.borrow().cut();
        }
    }
}

/// The kernel.
pub(super) struct Kernels {
    used: Vec<Touched>,
    reserved: Vec<Kept>,
    mount: Option<Mount>,
    overcommit: u64,
}

impl Kernels {
    /// With a mount without a minimum. Nothing is reserved or in use.
    pub(super) fn new() -> Self {
        Self {
            used: Vec::new(),
            reserved: Vec::new(),
            mount: Some(Mount::new(0).expect("hugetlbfs could be mounted before")),
            overcommit: 0,
        }
    }

    fn shared(pages: u64, mount: Option<&Path>, flags: MapFlags) -> rustix::io::Result<Kept> {
        let shared = Shared::new(pages, mount, flags)?;
        Ok(Kept::Shared(Rc::new(RefCell::new(shared))))
    }

    /// Refuses where the mount allows so many more pages and the pool has not enough of them. The kernel must not be asked
    /// then: a touch that finds no page leaves one charged to the mount for good, and a refused reservation takes the
    /// minimum along (6.18: `hugetlb_reserve_pages` puts back what it did not take).
    fn has(&self, mount: &Mount, pages: u64) -> rustix::io::Result<()> {
        let [_, free, reserved, surplus] = kernel_counters();
        let held = mount.min.saturating_sub(mount.charged());
        let available = free - reserved + self.overcommit.saturating_sub(surplus);
        if mount.charged() + pages > QUOTA || pages.saturating_sub(held) <= available {
            return Ok(());
        }
        Err(rustix::io::Errno::NOMEM)
    }

    fn keep(&mut self, kept: rustix::io::Result<Kept>) -> Answer {
        Some(text(kept.map(|kept| self.reserved.push(kept))))
    }
}

impl Side for Kernels {
    fn step(&mut self, op: Op) -> Result<Answer, String> {
        let reserved_page = |errno| format!("a reserved page: {errno}");
        Ok(match (op, &self.mount) {
            (Op::Take, _) => {
                let mapped = Mapped::new(1, MapFlags::PRIVATE | MapFlags::NORESERVE);
                let touched = mapped.and_then(|mapped| mapped.touch(0).map(|()| mapped));
                Some(text(
                    touched.map(|mapped| self.used.push(Touched::Alone(mapped))),
                ))
            }
            (Op::TakeOf, Some(mount)) => {
                let shared = self
                    .has(mount, 1)
                    .and_then(|()| Shared::new(1, Some(mount.path()), MapFlags::NORESERVE));
                let touched = shared.and_then(|shared| shared.mapped.touch(0).map(|()| shared));
                Some(text(touched.map(|shared| {
                    let shared = Rc::new(RefCell::new(shared));
                    self.used.push(Touched::Of(shared, 0));
                })))
            }
            (Op::Reserve(pages @ 1..), _) => {
                self.keep(Self::shared(pages, None, MapFlags::empty()))
            }
            (Op::ReserveOf(pages @ 1..), Some(mount)) => {
                let kept = self
                    .has(mount, pages)
                    .and_then(|()| Self::shared(pages, Some(mount.path()), MapFlags::empty()));
                self.keep(kept)
            }
            (Op::ReservePrivate(pages), _) => {
                let mapped = Mapped::new(pages, MapFlags::PRIVATE);
                self.keep(mapped.map(|mapped| Kept::Private(mapped, 0)))
            }
            (Op::Give(at), _) if !self.used.is_empty() => {
                if let Touched::Of(shared, page) = self.used.swap_remove(at % self.used.len()) {
                    shared.borrow().punch(page);
                }
                None
            }
            (Op::Use(at), _) if !self.reserved.is_empty() => {
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
            (Op::End(at), _) if !self.reserved.is_empty() => {
                self.reserved.swap_remove(at % self.reserved.len()).end();
                None
            }
            (Op::Renew(min), _) => {
                self.used.retain(|used| !used.is_of_mount());
                let ended = self.reserved.extract_if(.., |kept| kept.is_of_mount());
                ended.for_each(Kept::end);
                self.mount = None;
                let mount = Mount::new(min);
                Some(text(mount.map(|mount| self.mount = Some(mount))))
            }
            (Op::Resize(pages), _) => {
                write("nr_hugepages", pages);
                None
            }
            (Op::Overcommit(pages), _) => {
                write("nr_overcommit_hugepages", pages);
                self.overcommit = pages;
                None
            }
            _ => None,
        })
    }

    fn counters(&self) -> Result<([u64; 4], u64), String> {
        let charged = self.mount.as_ref().map_or(0, Mount::charged);
        Ok((kernel_counters(), charged))
    }

    /// The kernel promises such a page again, and frees it all the same: it has promised more than it has then (6.18).
    fn keeps_surplus(&self) -> bool {
        false
    }
}

/// A mount of hugetlbfs whose size is a subpool's maximum; gone when dropped.
pub(super) struct Mount {
    folder: tempfile::TempDir,
    min: u64,
}

impl Mount {
    pub(super) fn new(min: u64) -> std::io::Result<Self> {
        let folder = tempfile::tempdir().unwrap();
        let bytes = SIZE as u64;
        let options = format!(
            "pagesize=2M,size={},min_size={}",
            QUOTA * bytes,
            min * bytes
        );
        let (options, path) = (CString::new(options).unwrap(), path_of(folder.path()));
        let (kind, nothing) = (c"hugetlbfs".as_ptr(), c"none".as_ptr());
        // SAFETY: strings that outlive the call.
        let answer = unsafe {
            libc::mount(
                nothing,
                path.as_ptr(),
                kind,
                0,
                options.as_ptr().cast::<c_void>(),
            )
        };
        if answer != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Self { folder, min })
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn charged(&self) -> u64 {
        let stat = rustix::fs::statvfs(self.path()).unwrap();
        stat.f_blocks - stat.f_bfree
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let path = path_of(self.path());
        // SAFETY: a string that outlives the call.
        let answer = unsafe { libc::umount2(path.as_ptr(), 0) };
        assert!(answer == 0 || std::thread::panicking(), "umount");
    }
}

fn path_of(folder: &Path) -> CString {
    CString::new(folder.as_os_str().as_bytes()).unwrap()
}
