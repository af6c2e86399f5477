//! Symbols of the objects that are loaded: [`each`], [`Object`].
//!
//! dlsym(3) would do, but for where it is: in libdl before glibc 2.34, which a program need not load. So the library reads the
//! tables of the dynamic loader itself, in the order in which they are searched, and refers to no symbol that a C library may
//! lack. Nothing here allocates, or leaves a message for dlerror(3).

use core::ffi::{CStr, c_int, c_void};
use core::ops::Range;
use core::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use core::slice;

/// elf.h: the tag and the value of an entry of the dynamic section, both of 64 bits.
type Dynamic = [usize; 2];
const DT_HASH: usize = 4;
const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_GNU_HASH: usize = 0x6fff_fef5;
const DT_VERSYM: usize = 0x6fff_fff0;
/// Of a version: the definition is there for programs that were linked with it, and not the default.
const VERSYM_HIDDEN: u16 = 0x8000;

/// An object that is loaded, with its tables.
pub(crate) struct Object<'a> {
    base: usize,
    headers: &'a [libc::Elf64_Phdr],
    symbols: *const libc::Elf64_Sym,
    strings: *const u8,
    /// Null where it has none, as the others.
    hashed: *const u32,
    counted: *const u32,
    versions: *const u16,
}

impl<'a> Object<'a> {
    /// # Safety
    /// dl_iterate_phdr(3) passed `found`, and the object is loaded as long as this lives.
    unsafe fn new(found: &'a libc::dl_phdr_info) -> Self {
        let base = address(found.dlpi_addr);
        // SAFETY: an object's table has as many entries as it says.
        let headers =
            unsafe { slice::from_raw_parts(found.dlpi_phdr, usize::from(found.dlpi_phnum)) };
        let mut this = Self {
            base,
            headers,
            symbols: core::ptr::null(),
            strings: core::ptr::null(),
            hashed: core::ptr::null(),
            counted: core::ptr::null(),
            versions: core::ptr::null(),
        };
        let Some(dynamic) = headers.iter().find(|it| it.p_type == libc::PT_DYNAMIC) else {
            return this;
        };
        let mut entry = with_exposed_provenance::<Dynamic>(base + address(dynamic.p_vaddr));
        // SAFETY: the section ends with an entry of tag 0.
        while let [tag @ 1..=usize::MAX, value] = unsafe { entry.read() } {
            // glibc makes addresses of the offsets in place, musl does not, nor is the kernel's object written to.
            let at = if value < base { base + value } else { value };
            match tag {
                DT_HASH => this.counted = with_exposed_provenance(at),
                DT_GNU_HASH => this.hashed = with_exposed_provenance(at),
                DT_STRTAB => this.strings = with_exposed_provenance(at),
                DT_SYMTAB => this.symbols = with_exposed_provenance(at),
                DT_VERSYM => this.versions = with_exposed_provenance(at),
                _ => {}
            }
            // SAFETY: this entry is not the last one.
            entry = unsafe { entry.add(1) };
        }
        this
    }

    /// The addresses of a segment.
    fn range(&self, segment: &libc::Elf64_Phdr) -> Range<usize> {
        let start = self.base + address(segment.p_vaddr);
        start..start + address(segment.p_memsz)
    }

    fn segments(&self) -> impl Iterator<Item = &libc::Elf64_Phdr> {
        let headers = self.headers.iter();
        headers.filter(|segment| segment.p_type == libc::PT_LOAD)
    }

    /// Whether an address lies in it.
    pub(crate) fn contains(&self, address: usize) -> bool {
        self.segments()
            .any(|segment| self.range(segment).contains(&address))
    }

    /// Whether it is this library.
    pub(crate) fn is_this_library(&self) -> bool {
        self.contains(each as *const () as usize)
    }

    /// From its first segment to the end of its last.
    pub(crate) fn image(&self) -> Range<usize> {
        let starts = self.segments().map(|segment| self.range(segment).start);
        let ends = self.segments().map(|segment| self.range(segment).end);
        starts.min().unwrap_or(0)..ends.max().unwrap_or(0)
    }

    /// Its data.
    pub(crate) fn data(&self) -> Option<Range<usize>> {
        let mut segments = self.segments();
        let writable = segments.find(|segment| segment.p_flags & libc::PF_W != 0);
        writable.map(|segment| self.range(segment))
    }

    /// The address of the symbol of that name, in its default version, and whether it is defined here: an executable at fixed
    /// addresses has a stub of its own for a function whose address it takes.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<(*mut c_void, bool)> {
        let index = if !self.hashed.is_null() {
            self.by_hash(name)
        } else if !self.counted.is_null() {
            // SAFETY: the second word of the table is the number of symbols.
            let count = unsafe { self.counted.add(1).read() };
            (1..count as usize).find(|index| self.is(*index, name))
        } else {
            None
        }?;
        // SAFETY: `is` has read it.
        let symbol = unsafe { &*self.symbols.add(index) };
        let at = with_exposed_provenance_mut(self.base + address(symbol.st_value));
        Some((at, symbol.st_shndx != 0))
    }

    /// The index of a symbol, by the hash table of DT_GNU_HASH: numbers of buckets, of the first symbol, of words of the filter,
    /// and a shift; the filter; the buckets; then a word for each symbol, whose lowest bit ends a bucket.
    fn by_hash(&self, name: &CStr) -> Option<usize> {
        let bytes = name.to_bytes().iter();
        let hash = bytes.fold(5381_u32, |hash, byte| {
            hash.wrapping_mul(33).wrapping_add(u32::from(*byte))
        });
        // SAFETY: the table of an object that is loaded, which is as its first words say.
        unsafe {
            let [buckets, first, filter, shift] = self.hashed.cast::<[u32; 4]>().read();
            if buckets == 0 || filter == 0 {
                return None;
            }
            let words = self.hashed.add(4).cast::<u64>();
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

    /// Whether the symbol of that index has the name, an address, and is the default version.
    fn is(&self, index: usize, name: &CStr) -> bool {
        const STT_TLS: u8 = 6;
        if self.symbols.is_null() || self.strings.is_null() {
            return false;
        }
        // SAFETY: the caller has the index from the object's own table; names are terminated.
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

/// An offset or address of an ELF file of 64 bits.
const fn address(of: u64) -> usize {
    of.cast_signed().cast_unsigned() as usize
}

/// Shows the objects to `visit`, in the order in which symbols are looked up, until it says that it is done.
pub(crate) fn each(mut visit: &mut dyn FnMut(&Object<'_>) -> bool) {
    unsafe extern "C" fn show(
        object: *mut libc::dl_phdr_info,
        _size: usize,
        visit: *mut c_void,
    ) -> c_int {
        // SAFETY: dl_iterate_phdr(3) passes an object, which it keeps loaded meanwhile, and what it was given below.
        unsafe {
            let visit = &mut *visit.cast::<&mut dyn FnMut(&Object<'_>) -> bool>();
            c_int::from(visit(&Object::new(&*object)))
        }
    }
    // SAFETY: `visit` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(show), (&raw mut visit).cast()) };
}

/// As [`each`], for the objects behind this library: those that dlsym(3) searches with RTLD_NEXT.
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
