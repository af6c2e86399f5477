//! What an executable's own headers say about how it is loaded: [`Executable`].

use object::elf;
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, FileKind, ReadRef};

/// An ELF executable, as far as the loader is concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Executable {
    /// What it runs on.
    pub machine: Machine,
    /// Its loader (PT_INTERP); `None` where it is statically linked.
    pub loader: Option<String>,
    /// It carries a note of the Go linker, or Go's build information.
    pub go: bool,
}

/// What runs a binary: two with the same one can share a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Machine {
    /// `e_machine`.
    pub number: u16,
    /// 32 or 64 bits.
    pub bits: u8,
    /// Byte order.
    pub little_endian: bool,
}

impl Executable {
    /// Reads the headers at the start of `data`.
    ///
    /// # Errors
    /// What is wrong with them, in words.
    pub fn read<'data, R: ReadRef<'data>>(data: R) -> Result<Self, String> {
        match FileKind::parse(data) {
            Ok(FileKind::Elf32) => read::<elf::FileHeader32<Endianness>, R>(data, 32),
            Ok(FileKind::Elf64) => read::<elf::FileHeader64<Endianness>, R>(data, 64),
            Ok(_) => Err(String::from("it is no ELF executable")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// True where the loader is glibc's, whose LD_PRELOAD takes libjumbo_preload.so.
    pub fn has_glibc_loader(&self) -> bool {
        let Some(name) = self
            .loader
            .as_deref()
            .and_then(|path| path.rsplit('/').next())
        else {
            return false;
        };
        // ld-linux-x86-64.so.2, ld-linux-aarch64.so.1, ld-linux.so.2; ld64.so.1 on s390x and ppc64.
        name.starts_with("ld-linux") || name.starts_with("ld64.so")
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
            // A note that cannot be read ends the search and says nothing about the rest.
            while let Ok(Some(note)) = notes.next() {
                executable.go |= note.name() == b"Go";
            }
        }
    }
    // Stripped of its notes a Go program keeps this; one without readable sections has none to show.
    let sections = header.sections(endian, data);
    executable.go |= sections.is_ok_and(|sections| {
        let found = sections.section_by_name(endian, b".go.buildinfo");
        found.is_some()
    });
    Ok(executable)
}
