//! What the kernel loaded, by the program headers in memory: [`Program`]. No system call, so that a program with little text
//! pays nothing.

use core::ops::Range;
use core::ptr::with_exposed_provenance;

use super::find;

/// Where the program's headers are: AT_PHDR, AT_PHNUM and AT_ENTRY of getauxval(3).
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The address of the first.
    pub headers: usize,
    /// How many there are.
    pub count: usize,
    /// Where the program begins: an address in its text.
    pub entry: usize,
}

/// A part of the program that was loaded, in whole base pages.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub(super) range: Range<usize>,
    /// Where it begins in the file.
    offset: usize,
}

impl Loaded {
    /// As of a [`Segment`](super::find::Segment).
    pub(super) fn is_alike_everywhere(&self, pmd: usize) -> bool {
        find::is_alike_everywhere(&self.range, self.offset as u64, pmd)
    }

    /// Whether the page cache can map it by PMDs.
    pub(super) fn is_congruent(&self, pmd: usize) -> bool {
        find::is_congruent(self.range.start, self.offset as u64, pmd)
    }
}

/// The headers, and what was added to the addresses in them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout<'a> {
    headers: &'a [libc::Elf64_Phdr],
    base: usize,
}

impl Program {
    /// The layout; `None` where it cannot be told.
    ///
    /// # Safety
    /// The headers are there.
    #[expect(unsafe_code, reason = "reads the program's headers")]
    pub(super) unsafe fn layout(&self) -> Option<Layout<'_>> {
        let headers = with_exposed_provenance::<libc::Elf64_Phdr>(self.headers);
        if headers.is_null() || !headers.is_aligned() {
            return None;
        }
        // SAFETY: the caller's promise. The kernel maps them read-only.
        let headers = unsafe { core::slice::from_raw_parts(headers, self.count) };
        // The table says where it was to be itself. Without that entry a program is where it was linked to be.
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

    /// What can be executed and not written.
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

    /// What can be written, each as the part that comes from the file and the zeroes behind it, to the byte, without what is
    /// protected once it was relocated (PT_GNU_RELRO).
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

/// Addresses have 64 bits here.
fn number(value: u64) -> usize {
    usize::try_from(value).unwrap_or(0)
}
