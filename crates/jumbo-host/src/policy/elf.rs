//! The ELF headers that decide how a program is loaded: [`Executable`].

use std::ops::Range;

use object::elf;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader};
use object::{Endianness, FileKind, ReadRef};

/// Headers of an ELF executable that concern the loader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Executable {
    /// Machine that runs it.
    pub machine: Machine,
    /// Path of the loader (PT_INTERP); `None` where the program is statically linked.
    pub loader: Option<String>,
    /// A note of the Go linker, or Go's build information, is present.
    pub go: bool,
}

/// Machine of a binary. Binaries of the same machine can share a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// `e_machine`.
    pub number: u16,
    /// 32 or 64 bits.
    pub bits: u8,
    /// Byte order.
    pub little_endian: bool,
}

/// Largest table of section names that is read. The tables of executables have some hundred bytes.
const MAX_NAMES_BYTES: u64 = 1 << 20;

/// Largest piece that is read. A file may claim more, in a hole of it, and the kernel runs it.
const MAX_READ_BYTES: u64 = 16 << 20;

/// A file of which no larger piece is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounded<R>(pub(crate) R);

impl<'data, R: ReadRef<'data>> ReadRef<'data> for Bounded<R> {
    fn len(self) -> Result<u64, ()> {
        self.0.len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'data [u8], ()> {
        match size {
            0..=MAX_READ_BYTES => self.0.read_bytes_at(offset, size),
            _ => Err(()),
        }
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'data [u8], ()> {
        self.0.read_bytes_at_until(range, delimiter)
    }
}

impl Machine {
    /// The machine that this code was built for.
    pub const OWN: Self = Self {
        number: if cfg!(target_arch = "x86_64") {
            elf::EM_X86_64.0
        } else if cfg!(target_arch = "aarch64") {
            elf::EM_AARCH64.0
        } else {
            panic!("add the ELF machine of this architecture")
        },
        bits: if cfg!(target_pointer_width = "64") {
            64
        } else {
            32
        },
        little_endian: cfg!(target_endian = "little"),
    };
}

impl Executable {
    /// Reads the headers at the start of `data`.
    ///
    /// # Errors
    /// The fault, in words.
    pub fn read<'data, R: ReadRef<'data>>(data: R) -> Result<Self, String> {
        let data = Bounded(data);
        match FileKind::parse(data) {
            Ok(FileKind::Elf32) => read::<elf::FileHeader32<Endianness>, _>(data, 32),
            Ok(FileKind::Elf64) => read::<elf::FileHeader64<Endianness>, _>(data, 64),
            Ok(_) => Err(String::from("it is no ELF executable")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Reports whether the loader is glibc's or musl's, which can load libjumbo_preload.so.
    pub fn has_known_loader(&self) -> bool {
        let path = self.loader.as_deref().unwrap_or_default();
        let name = path.rsplit('/').next().unwrap_or_default();
        // ld-linux-x86-64.so.2, ld-linux-aarch64.so.1, ld-linux.so.2; ld64.so.1 on s390x and ppc64.
        let known = ["ld-linux", "ld64.so", "ld-musl-"];
        known.iter().any(|known| name.starts_with(known))
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match (elf::Machine(self.number), self.bits) {
            (elf::EM_X86_64, 64) => "x86-64",
            (elf::EM_X86_64, _) => "x32",
            (elf::EM_386, _) => "i386",
            (elf::EM_AARCH64, _) => "arm64",
            (elf::EM_ARM, _) => "arm",
            (elf::EM_RISCV, _) => "RISC-V",
            (elf::EM_S390, _) => "s390",
            (elf::EM_PPC64, _) => "ppc64",
            (elf::EM_LOONGARCH, _) => "LoongArch",
            (other, _) => return write!(f, "ELF machine {}, {} bits", other.0, self.bits),
        };
        f.write_str(name)
    }
}

fn read<'data, E, R>(data: R, bits: u8) -> Result<Executable, String>
where
    E: FileHeader<Endian = Endianness>,
    R: ReadRef<'data>,
{
    let words = |error: object::read::Error| error.to_string();
    let header = E::parse(data).map_err(words)?;
    let endian = header.endian().map_err(words)?;
    let mut executable = Executable {
        machine: Machine {
            number: header.e_machine(endian).0,
            bits,
            little_endian: endian == Endianness::Little,
        },
        loader: None,
        go: false,
    };
    for segment in header.program_headers(endian, data).map_err(words)? {
        if let Some(loader) = segment.interpreter(endian, data).map_err(words)? {
            executable.loader = Some(String::from_utf8_lossy(loader).into_owned());
        }
        if let Some(mut notes) = segment.notes(endian, data).map_err(words)? {
            // A malformed note ends the search, without an error.
            while let Ok(Some(note)) = notes.next() {
                executable.go |= note.name() == b"Go";
            }
        }
    }
    // Go programs that were stripped of notes keep this section.
    executable.go |= has_section(header, endian, data, b".go.buildinfo\0").unwrap_or(false);
    Ok(executable)
}

/// Reports whether a section has this `name`, which ends with a zero byte; `None` where the
/// sections cannot be read. One read of all names saves two system calls per section.
fn has_section<'data, E, R>(header: &E, endian: Endianness, data: R, name: &[u8]) -> Option<bool>
where
    E: FileHeader<Endian = Endianness>,
    R: ReadRef<'data>,
{
    let sections = header.section_headers(endian, data).ok()?;
    let index = header.section_strings_index(endian, data).ok()?;
    let (offset, size) = sections.get(index.0)?.file_range(endian)?;
    let names = data.read_bytes_at(offset, size.min(MAX_NAMES_BYTES)).ok()?;
    Some(sections.iter().any(|section| {
        let start = usize::try_from(section.sh_name(endian)).unwrap_or(usize::MAX);
        names
            .get(start..)
            .is_some_and(|rest| rest.starts_with(name))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_machine_is_that_of_the_executable() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        assert_eq!(Executable::read(&own[..]).unwrap().machine, Machine::OWN);
    }

    /// A sparse file, whose note of 100 GiB the kernel does not look at.
    #[test]
    fn a_segment_without_bounds_is_an_error() {
        let mut own = std::fs::read("/proc/self/exe").unwrap();
        own.truncate(4096);
        let header = elf::FileHeader64::<Endianness>::parse(&own[..]).unwrap();
        let first = usize::try_from(header.e_phoff(Endianness::Little)).unwrap();
        // p_type, and p_filesz of the first entry.
        own[first..first + 4].copy_from_slice(&elf::PT_NOTE.0.to_le_bytes());
        own[first + 32..first + 40].copy_from_slice(&(100_u64 << 30).to_le_bytes());
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &own).unwrap();
        file.set_len(200 << 30).unwrap();
        let read = Executable::read(&object::ReadCache::new(&file));
        assert!(read.is_err(), "{read:?}");
    }

    #[test]
    fn sections_are_found_by_their_whole_name() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        let header = elf::FileHeader64::<Endianness>::parse(&own[..]).unwrap();
        let endian = header.endian().unwrap();
        let has = |name| has_section(header, endian, &own[..], name);
        assert_eq!(has(b".text\0"), Some(true));
        assert_eq!(has(b".tex\0"), Some(false));
    }
}
