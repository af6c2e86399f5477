//! Symbols of loaded objects: [`each`], [`Object`].
//!
//! Before glibc 2.34 dlsym(3) is in libdl, which a program may not load. So the library reads the
//! symbol tables itself, in lookup order, and imports no symbol that a C library may lack. Nothing
//! here allocates, or leaves a message for dlerror(3).

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ops::Range;
use core::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use core::slice;
use core::sync::atomic::{AtomicPtr, Ordering};

/// Tag and value of an entry of the dynamic section, of 64 bits each (elf.h).
type Dynamic = [usize; 2];
const DT_HASH: usize = 4;
const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_GNU_HASH: usize = 0x6fff_fef5;
const DT_VERSYM: usize = 0x6fff_fff0;
/// Flag of a version: the definition is not the default.
const VERSYM_HIDDEN: u16 = 0x8000;

/// Loaded object and its tables; a missing table is null.
pub(crate) struct Object<'a> {
    base: usize,
    headers: &'a [libc::Elf64_Phdr],
    symbols: *const libc::Elf64_Sym,
    strings: *const u8,
    /// DT_GNU_HASH.
    gnu_hash: *const u32,
    /// DT_HASH.
    sysv_hash: *const u32,
    versions: *const u16,
}

impl<'a> Object<'a> {
    /// # Safety
    /// dl_iterate_phdr(3) passed `found`, and the object stays loaded during `'a`.
    pub(crate) unsafe fn new(found: &'a libc::dl_phdr_info) -> Self {
        let base = address(found.dlpi_addr);
        // SAFETY: the table has `dlpi_phnum` entries.
        let headers =
            unsafe { slice::from_raw_parts(found.dlpi_phdr, usize::from(found.dlpi_phnum)) };
        let dynamic = headers.iter().find(|it| it.p_type == libc::PT_DYNAMIC);
        let dynamic = dynamic.map_or(core::ptr::null(), |dynamic| {
            with_exposed_provenance(base + address(dynamic.p_vaddr))
        });
        // SAFETY: the dynamic section of that object.
        unsafe { Self::with(base, headers, dynamic) }
    }

    /// # Safety
    /// `dynamic` is null, or the dynamic section of the object at `base`, which stays loaded during
    /// `'a`.
    unsafe fn with(base: usize, headers: &'a [libc::Elf64_Phdr], dynamic: *const Dynamic) -> Self {
        let mut this = Self {
            base,
            headers,
            symbols: core::ptr::null(),
            strings: core::ptr::null(),
            gnu_hash: core::ptr::null(),
            sysv_hash: core::ptr::null(),
            versions: core::ptr::null(),
        };
        if dynamic.is_null() {
            return this;
        }
        let mut entry = dynamic;
        // SAFETY: the section ends with an entry of tag 0.
        while let [tag @ 1..=usize::MAX, value] = unsafe { entry.read() } {
            // glibc relocates the offsets in place; musl does not, and the vDSO is read-only.
            let at = if value < base { base + value } else { value };
            match tag {
                DT_HASH => this.sysv_hash = with_exposed_provenance(at),
                DT_GNU_HASH => this.gnu_hash = with_exposed_provenance(at),
                DT_STRTAB => this.strings = with_exposed_provenance(at),
                DT_SYMTAB => this.symbols = with_exposed_provenance(at),
                DT_VERSYM => this.versions = with_exposed_provenance(at),
                _ => {}
            }
            // SAFETY: the last entry has tag 0.
            entry = unsafe { entry.add(1) };
        }
        this
    }

    /// Returns the addresses of a segment.
    fn range(&self, segment: &libc::Elf64_Phdr) -> Range<usize> {
        let start = self.base + address(segment.p_vaddr);
        start..start + address(segment.p_memsz)
    }

    fn segments(&self) -> impl Iterator<Item = &libc::Elf64_Phdr> {
        let headers = self.headers.iter();
        headers.filter(|segment| segment.p_type == libc::PT_LOAD)
    }

    /// Reports whether a segment contains the address.
    pub(crate) fn contains(&self, address: usize) -> bool {
        self.segments()
            .any(|segment| self.range(segment).contains(&address))
    }

    /// Reports whether this library is the object.
    pub(crate) fn is_this_library(&self) -> bool {
        self.contains(each as *const () as usize)
    }

    /// Returns the addresses from the first segment to the end of the last.
    pub(crate) fn image(&self) -> Range<usize> {
        let starts = self.segments().map(|segment| self.range(segment).start);
        let ends = self.segments().map(|segment| self.range(segment).end);
        starts.min().unwrap_or(0)..ends.max().unwrap_or(0)
    }

    /// Returns the bytes of each thread's data of the object, padding included.
    pub(crate) fn thread_bytes(&self) -> usize {
        let headers = self.headers.iter();
        let data = headers.filter(|segment| segment.p_type == libc::PT_TLS);
        data.map(|segment| address(segment.p_memsz.saturating_add(segment.p_align)))
            .sum()
    }

    /// Returns the address of the symbol's default version, and whether the object defines it: an
    /// executable at fixed addresses has a stub for each function whose address it takes.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<(*mut c_void, bool)> {
        let index = if !self.gnu_hash.is_null() {
            self.by_gnu_hash(name)
        } else if !self.sysv_hash.is_null() {
            // SAFETY: the second word of the table is the number of symbols.
            let count = unsafe { self.sysv_hash.add(1).read() };
            (1..count as usize).find(|index| self.is(*index, name))
        } else {
            None
        }?;
        // SAFETY: `is` has read it.
        let symbol = unsafe { &*self.symbols.add(index) };
        let at = with_exposed_provenance_mut(self.base + address(symbol.st_value));
        Some((at, symbol.st_shndx != 0))
    }

    /// Returns the index of a symbol. The table has the number of buckets, the index of the first
    /// symbol, the number of words in the Bloom filter, and a shift; then the filter; the buckets;
    /// and a word for each symbol, whose lowest bit ends a bucket.
    fn by_gnu_hash(&self, name: &CStr) -> Option<usize> {
        let bytes = name.to_bytes().iter();
        let hash = bytes.fold(5381_u32, |hash, byte| {
            hash.wrapping_mul(33).wrapping_add(u32::from(*byte))
        });
        // SAFETY: the table of a loaded object, with the sizes in its first words.
        unsafe {
            let [buckets, first, filter, shift] = self.gnu_hash.cast::<[u32; 4]>().read();
            if buckets == 0 || filter == 0 {
                return None;
            }
            let words = self.gnu_hash.add(4).cast::<u64>();
            let word = words.add((hash / 64 % filter) as usize).read();
            let bits = 1 << (hash % 64) | 1 << ((hash >> shift) % 64);
            if word & bits != bits {
                return None;
            }
            let table = words.add(filter as usize).cast::<u32>();
            let chains = table.add(buckets as usize);
            let mut index = table.add((hash % buckets) as usize).read();
            if index < first {
                return None;
            }
            loop {
                let found = chains.add((index - first) as usize).read();
                if (found ^ hash) < 2 && self.is(index as usize, name) {
                    return Some(index as usize);
                }
                if found & 1 != 0 {
                    return None;
                }
                index += 1;
            }
        }
    }

    /// Reports whether the symbol of that index has the name, an address, and the default version.
    fn is(&self, index: usize, name: &CStr) -> bool {
        const STT_TLS: u8 = 6;
        if self.symbols.is_null() || self.strings.is_null() {
            return false;
        }
        // SAFETY: the index comes from the object's own table; names are terminated.
        unsafe {
            let symbol = &*self.symbols.add(index);
            let is_default =
                self.versions.is_null() || self.versions.add(index).read() & VERSYM_HIDDEN == 0;
            symbol.st_value != 0
                && symbol.st_info & 0xf != STT_TLS
                && is_default
                && CStr::from_ptr(self.strings.add(symbol.st_name as usize).cast()) == name
        }
    }
}

/// Converts an offset or address of a 64-bit ELF file.
const fn address(of: u64) -> usize {
    of as usize
}

/// `struct link_map` of <link.h>: an object that the dynamic loader has loaded.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
    next: *const LinkMap,
}

/// `struct r_debug` of <link.h>, which the dynamic loader keeps for debuggers.
#[repr(C)]
struct LoaderDebug {
    version: c_int,
    first: *const LinkMap,
}

/// Gives the address of a variable of the dynamic loader: null where it has none of that name.
macro_rules! loaders_variable {
    ($name:literal) => {{
        let found: *const c_void;
        // SAFETY: reads the address of a weak symbol from the global offset table.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            core::arch::asm!(
                concat!(".weak ", $name),
                concat!("mov {}, qword ptr [rip + ", $name, "@GOTPCREL]"),
                out(reg) found,
                options(nostack, readonly, preserves_flags),
            );
        }
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            core::arch::asm!(
                concat!(".weak ", $name),
                concat!("adrp {0}, :got:", $name),
                concat!("ldr {0}, [{0}, :got_lo12:", $name, "]"),
                out(reg) found,
                options(nostack, readonly, preserves_flags),
            );
        }
        found
    }};
}

/// Returns what the dynamic loader keeps for debuggers: `_r_debug` of <link.h> in glibc, and what
/// `_dl_debug_addr` points to in musl.
fn loader_debug() -> *const LoaderDebug {
    let variable = loaders_variable!("_r_debug");
    if !variable.is_null() {
        return variable.cast();
    }
    let pointer = loaders_variable!("_dl_debug_addr").cast::<*const LoaderDebug>();
    // SAFETY: null, or a pointer of the loader's that it never changes.
    unsafe { pointer.as_ref() }.map_or(core::ptr::null(), |debug| *debug)
}

/// Reports whether the dynamic loader is glibc's.
pub(crate) fn is_glibcs_loader() -> bool {
    !loaders_variable!("_r_debug").is_null()
}

/// Callback of dl_iterate_phdr(3): object, size of its description, and the caller's argument.
pub(crate) type Visit = unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int;

type Iterate = unsafe extern "C" fn(Option<Visit>, *mut c_void) -> c_int;

/// Returns dl_iterate_phdr(3) of the C library itself.
///
/// A program or a sanitizer's library may define that function, and need not be ready for a call
/// before its own start; this library [defines it](crate::objects), too. So the loader's list for
/// debuggers leads to the C library's definition.
fn iterate() -> Option<Iterate> {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
    let mut function = FOUND.load(Ordering::Relaxed);
    if function.is_null() {
        function = libcs_iterate()?;
        FOUND.store(function, Ordering::Relaxed);
    }
    // SAFETY: a definition of dl_iterate_phdr(3).
    Some(unsafe { core::mem::transmute::<*mut c_void, Iterate>(function) })
}

/// Returns the dynamic section of this library. The linker defines the symbol for each object itself; that
/// of an exported function may lead to another object's.
fn own_dynamic() -> *const Dynamic {
    unsafe extern "C" {
        #[link_name = "_DYNAMIC"]
        static OWN: Dynamic;
    }
    &raw const OWN
}

fn libcs_iterate() -> Option<*mut c_void> {
    // SAFETY: null or the loader's variable.
    let debug = unsafe { loader_debug().as_ref() }?;
    let (mut next, mut first) = (debug.first, None);
    // SAFETY: null or an entry of the loader's list. The first lookup precedes the program's start,
    // so no object is unloaded meanwhile.
    while let Some(map) = unsafe { next.as_ref() } {
        // SAFETY: the loader's description of the object.
        let object = unsafe { Object::with(map.base, &[], map.dynamic) };
        let defined = |name| object.symbol(name).filter(|(_, is_defined)| *is_defined);
        let found = defined(c"dl_iterate_phdr").map(|(at, _)| at);
        if let Some(found) = found.filter(|_| map.dynamic != own_dynamic()) {
            // Another object may define one of the two: a tracer wraps the program's start.
            if defined(c"__libc_start_main").is_some() {
                return Some(found);
            }
            first = first.or(Some(found));
        }
        next = map.next;
    }
    first
}

/// Calls `visit` with each object in lookup order, until it returns true.
pub(crate) fn each(mut visit: &mut dyn FnMut(&Object<'_>) -> bool) {
    unsafe extern "C" fn show(
        object: *mut libc::dl_phdr_info,
        _size: usize,
        visit: *mut c_void,
    ) -> c_int {
        // SAFETY: dl_iterate_phdr(3) passes an object that stays loaded meanwhile, and `visit`.
        unsafe {
            let visit = &mut *visit.cast::<&mut dyn FnMut(&Object<'_>) -> bool>();
            c_int::from(visit(&Object::new(&*object)))
        }
    }
    if let Some(iterate) = iterate() {
        // SAFETY: `visit` outlives the call.
        unsafe { iterate(Some(show), (&raw mut visit).cast()) };
    }
}

/// Variant of [`each`] for the objects after this library, which dlsym(3) searches with RTLD_NEXT.
pub(crate) fn each_behind(visit: &mut dyn FnMut(&Object<'_>) -> bool) {
    let mut is_behind = false;
    each(&mut |object| {
        if is_behind {
            return visit(object);
        }
        is_behind = object.is_this_library();
        false
    });
}
