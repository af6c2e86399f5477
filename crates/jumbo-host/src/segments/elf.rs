//! The ELF headers that decide how a file is mapped: [`Object`] and its [`Segment`]s.

use object::elf::{self, FileHeader64};
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _, SectionHeader as _};
use object::{LittleEndian, ReadRef};
use serde::Serialize;

use super::{Error, Sizes};
use crate::policy::elf::{Bounded, Executable};
use crate::units::{Bytes, PageSize, Pages};

/// The only supported byte order.
pub(super) const LE: LittleEndian = LittleEndian;
/// The only supported file header.
pub(super) type Header = FileHeader64<LittleEndian>;

/// Kind of an ELF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ObjectKind {
    /// Executable at fixed addresses (ET_EXEC).
    Executable,
    /// Position-independent executable.
    Pie,
    /// Shared library.
    Library,
}

/// Linker of a file, as far as its flags differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Linker {
    /// GNU ld, or an unknown one.
    Gnu,
    /// gold.
    Gold,
    /// LLVM's lld.
    Lld,
    /// mold.
    Mold,
    /// Go's linker.
    Go,
}

/// An executable or shared library of 64 bits and little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Kind of the file.
    pub kind: ObjectKind,
    /// Headers for the loader.
    pub executable: Executable,
    /// Linker that made the file.
    pub linker: Linker,
    /// Build ID, in hexadecimal.
    pub build_id: Option<String>,
    /// The loader writes into the text (DT_TEXTREL).
    pub text_relocations: bool,
    /// PT_LOAD segments by ascending address.
    pub segments: Vec<Segment>,
}

/// One PT_LOAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// Offset in the file.
    pub offset: u64,
    /// Address in memory, relative to the load address unless the file has fixed addresses.
    pub address: u64,
    /// Size in the file.
    pub file_size: Bytes,
    /// Size in memory.
    pub memory_size: Bytes,
    /// `p_align`.
    pub align: u64,
    /// `R` of its flags.
    pub read: bool,
    /// `W` of its flags.
    pub write: bool,
    /// `E` of its flags.
    pub execute: bool,
}

impl Object {
    /// Reads the headers, the dynamic section and the notes.
    ///
    /// # Errors
    /// [`Error::NotElf`], [`Error::Foreign`].
    pub fn read<'data, R: ReadRef<'data>>(data: R) -> Result<Self, Error> {
        let executable = Executable::read(data).map_err(Error::NotElf)?;
        let machine = executable.machine;
        if machine.bits != 64 || !machine.little_endian {
            let order = ["big", "little"][usize::from(machine.little_endian)];
            let bits = machine.bits;
            return Err(Error::Foreign(format!("{bits} bits, {order}-endian")));
        }
        let data = Bounded(data);
        let header = Header::parse(data)?;
        let programs = header.program_headers(LE, data)?;
        let (mut is_pie, mut has_soname, mut text_relocations) = (false, false, false);
        let mut build_id = None;
        for program in programs {
            for entry in program.dynamic(LE, data)?.unwrap_or_default() {
                let (tag, value) = (entry.d_tag(LE), entry.d_val(LE));
                match tag {
                    elf::DT_NULL => break,
                    elf::DT_SONAME => has_soname = true,
                    elf::DT_TEXTREL => text_relocations = true,
                    elf::DT_FLAGS => {
                        text_relocations |= value & elf::DF_TEXTREL.0 != 0;
                    }
                    elf::DT_FLAGS_1 => is_pie |= value & elf::DF_1_PIE.0 != 0,
                    _ => {}
                }
            }
            let Some(mut notes) = program.notes(LE, data)? else {
                continue;
            };
            while let Ok(Some(note)) = notes.next() {
                if note.name() == elf::ELF_NOTE_GNU && note.n_type(LE) == elf::NT_GNU_BUILD_ID {
                    build_id = Some(note.desc().iter().map(|b| format!("{b:02x}")).collect());
                }
            }
        }
        let kind = match header.e_type(LE) {
            elf::ET_EXEC => ObjectKind::Executable,
            elf::ET_DYN if is_pie || (executable.loader.is_some() && !has_soname) => {
                ObjectKind::Pie
            }
            elf::ET_DYN => ObjectKind::Library,
            other => return Err(Error::NotLoaded(other.0)),
        };
        let loads = programs.iter().filter(|p| p.p_type(LE) == elf::PT_LOAD);
        let mut segments: Vec<_> = loads.map(Segment::of).collect();
        segments.sort_by_key(|segment| segment.address);
        let length = data.len().unwrap_or_default();
        let end = |segment: &Segment| segment.offset.checked_add(segment.file_size.0);
        if !segments
            .iter()
            .all(|segment| end(segment).is_some_and(|end| end <= length))
        {
            let why = "a segment lies behind the end of the file".to_owned();
            return Err(Error::NotElf(why));
        }
        Ok(Self {
            kind,
            linker: linker(header, data, &executable),
            executable,
            build_id,
            text_relocations,
            segments,
        })
    }

    /// Returns the executable segments.
    pub fn text(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(|segment| segment.execute)
    }

    /// Returns the minimum alignment of the load address.
    pub fn load_align(&self) -> u64 {
        let aligns = self.segments.iter().map(|segment| segment.align);
        match self.kind {
            ObjectKind::Executable => u64::MAX,
            _ => aligns.max().unwrap_or_default(),
        }
    }
}

impl Segment {
    pub(super) fn of(program: &elf::ProgramHeader64<LittleEndian>) -> Self {
        let flags = program.p_flags(LE);
        let has = |flag: elf::ProgramFlags| flags.0 & flag.0 != 0;
        Self {
            offset: program.p_offset(LE),
            address: program.p_vaddr(LE),
            file_size: Bytes(program.p_filesz(LE)),
            memory_size: Bytes(program.p_memsz(LE)),
            align: program.p_align(LE),
            read: has(elf::PF_R),
            write: has(elf::PF_W),
            execute: has(elf::PF_X),
        }
    }

    /// Reports whether address and offset are equal modulo `pmd`, as a PMD mapping requires.
    pub fn is_congruent(&self, pmd: PageSize) -> bool {
        self.address.wrapping_sub(self.offset) & (pmd.bytes() - 1) == 0
    }

    /// Returns the range of the whole huge pages, for an aligned load address.
    pub fn whole(&self, sizes: Sizes) -> std::ops::Range<u64> {
        let end = self.address.saturating_add(self.file_size.0);
        let (first, last) = (
            sizes.base.align_down(self.address),
            sizes.base.align_up(end),
        );
        let start = sizes.pmd.align_up(first).unwrap_or(u64::MAX);
        let end = sizes.pmd.align_down(last.unwrap_or(end));
        start..end.max(start)
    }

    /// Returns the number of huge pages in [`Segment::whole`].
    pub fn whole_pages(&self, sizes: Sizes) -> Pages {
        let whole = self.whole(sizes);
        Bytes(whole.end - whole.start).whole_pages(sizes.pmd)
    }

    /// Returns the file offsets of the huge pages in [`Segment::whole`]; none unless congruent.
    pub fn offsets(&self, sizes: Sizes) -> impl Iterator<Item = u64> + use<> {
        let whole = self.whole(sizes);
        let start = whole
            .start
            .wrapping_sub(self.address.wrapping_sub(self.offset));
        let pages = self
            .is_congruent(sizes.pmd)
            .then(|| self.whole_pages(sizes).0);
        (0..pages.unwrap_or_default()).map(move |page| start + page * sizes.pmd.bytes())
    }
}

/// Detects the linker by its note, or its line in `.comment`.
fn linker<'data, R: ReadRef<'data>>(header: &Header, data: R, executable: &Executable) -> Linker {
    let Ok(sections) = header.sections(LE, data) else {
        return Linker::Gnu;
    };
    let named = |name: &[u8]| {
        sections
            .section_by_name(LE, name)
            .map(|(_, section)| section)
    };
    let comment = named(b".comment").and_then(|section| section.data(LE, data).ok());
    let has = |name: &[u8]| {
        let mut windows = comment.unwrap_or_default().windows(name.len());
        windows.any(|window| window == name)
    };
    match () {
        () if executable.go && comment.is_none() => Linker::Go,
        () if has(b" LLD ") => Linker::Lld,
        () if has(b"mold ") => Linker::Mold,
        () if named(b".note.gnu.gold-version").is_some() => Linker::Gold,
        () => Linker::Gnu,
    }
}
