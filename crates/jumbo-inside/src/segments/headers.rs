//! The loaded segments of the program, from its program headers in memory: [`Program`]. It makes no
//! system call, so a program with little text pays nothing.

use core::ops::Range;
use core::ptr::with_exposed_provenance;

use super::find;

/// Address of the program's headers: AT_PHDR, AT_PHNUM and AT_ENTRY of getauxval(3).
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Address of the first header.
    pub headers: usize,
    /// Number of headers.
    pub count: usize,
    /// Entry point: an address in the program's text.
    pub entry: usize,
}

/// A loaded segment of the program, in whole base pages.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub(super) range: Range<usize>,
    /// File offset.
    offset: usize,
}

impl Loaded {
    /// Same as [`Segment::is_shareable`](super::find::Segment::is_shareable).
    pub(super) fn is_shareable(&self, pmd: usize) -> bool {
        find::is_shareable(&self.range, self.offset as u64, pmd)
    }

    /// Reports whether the page cache can map it by PMDs.
    pub(super) fn is_congruent(&self, pmd: usize) -> bool {
        find::is_congruent(self.range.start, self.offset as u64, pmd)
    }
}

/// Program headers, and the load bias of their addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout<'a> {
    headers: &'a [libc::Elf64_Phdr],
    base: usize,
}

impl Program {
    /// Returns the layout; `None` if the headers do not describe the program.
    ///
    /// # Safety
    /// The headers are mapped.
    #[expect(unsafe_code, reason = "reads the program's headers")]
    pub(super) unsafe fn layout(&self) -> Option<Layout<'_>> {
        let headers = with_exposed_provenance::<libc::Elf64_Phdr>(self.headers);
        if headers.is_null() || !headers.is_aligned() {
            return None;
        }
        // SAFETY: the caller's promise. The kernel maps them read-only.
        let headers = unsafe { core::slice::from_raw_parts(headers, self.count) };
        // PT_PHDR has the linked address of the headers. Without it the load bias is 0.
        let own = headers.iter().find(|header| header.p_type == libc::PT_PHDR);
        let base = own.map_or(Some(0), |own| self.headers.checked_sub(number(own.p_vaddr)))?;
        let layout = Layout { headers, base };
        let holds_entry = layout.text().any(|text| text.range.contains(&self.entry));
        holds_entry.then_some(layout)
    }
}

impl<'a> Layout<'a> {
    fn loaded(self, flags: u32) -> impl Iterator<Item = &'a libc::Elf64_Phdr> {
        let loaded = move |header: &&libc::Elf64_Phdr| {
            let rwx = libc::PF_R | libc::PF_W | libc::PF_X;
            header.p_type == libc::PT_LOAD && header.p_flags & rwx == flags
        };
        self.headers.iter().filter(loaded)
    }

    /// Returns the executable read-only segments.
    pub(super) fn text(self) -> impl Iterator<Item = Loaded> {
        let page = rustix::param::page_size();
        self.loaded(libc::PF_R | libc::PF_X).map(move |header| {
            let start = self.base.wrapping_add(number(header.p_vaddr));
            let end = start.wrapping_add(number(header.p_filesz));
            Loaded {
                range: start & !(page - 1)..end.next_multiple_of(page),
                offset: number(header.p_offset) & !(page - 1),
            }
        })
    }

    /// Returns the writable segments without PT_GNU_RELRO, each as the exact ranges of its file
    /// data and of the zeroes after it.
    pub(super) fn data(self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let at = move |address| self.base.wrapping_add(number(address));
        let relro = self
            .headers
            .iter()
            .find(|header| header.p_type == libc::PT_GNU_RELRO);
        let relro = relro.map_or(0..0, |header| {
            at(header.p_vaddr)..at(header.p_vaddr) + number(header.p_memsz)
        });
        self.loaded(libc::PF_R | libc::PF_W).map(move |header| {
            let start = at(header.p_vaddr);
            let (file, end) = (
                start + number(header.p_filesz),
                start + number(header.p_memsz),
            );
            let first = if relro.contains(&start) {
                relro.end
            } else {
                start
            };
            (first..file.max(first), file.max(first)..end.max(first))
        })
    }
}

/// Converts an ELF field: addresses have 64 bits on the supported targets.
fn number(value: u64) -> usize {
    usize::try_from(value).unwrap_or(0)
}
