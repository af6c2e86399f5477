//! `Program`: one with much text, made when it is measured.
//!
//! It is a copy of the `jumbo` executable, a worker like any other, with one segment more: functions of 64 bytes
//! each that return their number. So no compiler is needed where it is measured. The segment's addresses are congruent to its place
//! in the file, as a linker lays them out with `-z common-page-size=2M`: the page cache can map it by PMDs.
//!
//! The file has no name: it goes with the process that measures, however that ends.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use jumbo::kernel::Root;
use jumbo::segments::prime::prime;
use jumbo::segments::running::Running;
use jumbo::units::Bytes;
use rustix::fs::{Advice, CWD, Mode, OFlags, fadvise, openat};

use crate::Error;

/// What each function takes: a line of the processor's cache.
pub(super) const FUNCTION: u64 = 64;

/// What a PMD maps where the page cache has folios of that size; where it is more, the claim of the side fails.
pub(super) const HUGE: u64 = 2 << 20;

/// How the page cache holds the text of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cached {
    /// In base pages.
    Base,
    /// As the kernel reads a file ahead: in folios that grow, up to what a PMD maps where it reads far ahead.
    AsRead,
    /// In folios that a PMD maps.
    Primed,
    /// Not at all.
    Dropped,
}

/// A program with so much text.
pub(super) struct Program {
    /// Of its text.
    pub(super) size: Bytes,
    file: File,
    cached: Cell<Cached>,
}

impl Program {
    /// Makes one from `executable`.
    pub(super) fn make(executable: &Path, size: Bytes) -> Result<Self, Error> {
        let folder = folder();
        let made = Self::make_in(&folder, executable, size);
        made.map_err(|error| Error::Program(folder.display().to_string(), error))
    }

    fn make_in(folder: &Path, executable: &Path, size: Bytes) -> io::Result<Self> {
        let size = Bytes(size.0.next_multiple_of(HUGE));
        let mut bytes = fs::read(executable)?;
        let offset = (bytes.len() as u64).next_multiple_of(HUGE);
        add_segment(&mut bytes, offset, size.0)
            .ok_or_else(|| io::Error::other("this is no executable for 64 bits"))?;

        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = openat(CWD, folder, flags, Mode::RWXU)?;
        let path = path_of(&file);
        let mut file = BufWriter::with_capacity(1 << 20, File::from(file));
        file.write_all(&bytes)?;
        file.seek(SeekFrom::Start(offset))?;
        for number in 0..u32::try_from(size.0 / FUNCTION).unwrap_or(u32::MAX) {
            file.write_all(&function(number))?;
        }
        let file = file.into_inner()?;
        // Pages that are not on the disk yet cannot be dropped.
        file.sync_data()?;
        // One that is open to be written cannot be executed.
        let read = File::open(path)?;
        drop(file);
        Ok(Self {
            size,
            file: read,
            cached: Cell::new(Cached::Dropped),
        })
    }

    /// By which others start it.
    pub(super) fn path(&self) -> PathBuf {
        path_of(&self.file)
    }

    /// Has the page cache hold its text so. No process may run it.
    pub(super) fn cache(&self, wanted: Cached) -> Result<(), Error> {
        if self.cached.get() == wanted && wanted != Cached::Dropped {
            return Ok(());
        }
        // The file is on the disk.
        fadvise(&self.file, 0, None, Advice::DontNeed)?;
        match wanted {
            Cached::Dropped => {}
            // Whose reads are random is read ahead in base pages.
            Cached::Base => self.read(Advice::Random)?,
            Cached::AsRead => self.read(Advice::Normal)?,
            Cached::Primed => self.prime()?,
        }
        self.cached.set(wanted);
        Ok(())
    }

    fn prime(&self) -> Result<(), Error> {
        let root = Root::host();
        let running = Running::read(&root)?;
        let primed = prime(&root, &self.path(), &running, false, &mut |_, _| {})?;
        if primed.huge.0 * 2 < primed.text.0 {
            let why = primed.why_not.unwrap_or_default();
            return Err(Error::claim(why, NO_HUGE_FOLIOS));
        }
        Ok(())
    }

    fn read(&self, advice: Advice) -> io::Result<()> {
        let mut file = &self.file;
        fadvise(file, 0, None, advice)?;
        file.rewind()?;
        let mut buffer = vec![0; 1 << 17];
        while file.read(&mut buffer)? > 0 {}
        Ok(())
    }
}

/// Where the page cache has no huge folios.
const NO_HUGE_FOLIOS: &str =
    "let TMPDIR name a folder on ext4 or xfs: other file systems have no huge folios for text";

/// Where the program is made: on a disk, if there is one.
fn folder() -> PathBuf {
    let on_disk = || PathBuf::from("/var/tmp");
    std::env::var_os("TMPDIR").map_or_else(on_disk, PathBuf::from)
}

/// A file of this process, for others.
fn path_of(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}

/// The function that returns `number`.
fn function(number: u32) -> [u8; 64] {
    let mut code = [0; 64];
    let bytes = number.to_le_bytes();
    if cfg!(target_arch = "aarch64") {
        // movz w0, #low; movk w0, #high, lsl #16; ret
        let (low, high) = (number & 0xffff, number >> 16);
        let words = [0x5280_0000 | low << 5, 0x72a0_0000 | high << 5, 0xd65f_03c0];
        for (place, word) in code.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&u32::to_le_bytes(word));
        }
    } else {
        // mov eax, number; ret
        code[0] = 0xb8;
        code[1..5].copy_from_slice(&bytes);
        code[5] = 0xc3;
    }
    code
}

/// An entry of the program headers: `Elf64_Phdr`.
const ENTRY: usize = 56;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const READ_EXECUTE: u32 = 5;

/// Makes the note of an ELF executable a segment of text, of `size` bytes from `offset` on; `None` where it has none.
fn add_segment(file: &mut [u8], offset: u64, size: u64) -> Option<()> {
    let is_elf = file.starts_with(b"\x7fELF\x02\x01");
    let first = usize::try_from(word(file, 32)?).ok()?;
    let count = usize::from(u16::from_le_bytes(file.get(56..58)?.try_into().ok()?));
    let table = file.get_mut(first..first + ENTRY * count)?;
    let mut entries: Vec<[u8; ENTRY]> = table
        .chunks_exact(ENTRY)
        .filter_map(|entry| entry.try_into().ok())
        .collect();
    let kind = |entry: &[u8; ENTRY]| u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
    let ends = entries.iter().filter(|entry| kind(entry) == PT_LOAD);
    let end = ends
        .map(|entry| Some(word(entry, 16)? + word(entry, 40)?))
        .max()??;
    let address = end.next_multiple_of(HUGE);

    let note = entries.iter().position(|entry| kind(entry) == PT_NOTE)?;
    entries.remove(note);
    // Segments stand in the order of their addresses.
    let last = entries.iter().rposition(|entry| kind(entry) == PT_LOAD)?;
    let mut segment = [0; ENTRY];
    segment[..4].copy_from_slice(&PT_LOAD.to_le_bytes());
    segment[4..8].copy_from_slice(&READ_EXECUTE.to_le_bytes());
    let fields = [offset, address, address, size, size, HUGE];
    for (place, field) in segment[8..].chunks_exact_mut(8).zip(fields) {
        place.copy_from_slice(&field.to_le_bytes());
    }
    entries.insert(last + 1, segment);
    table.copy_from_slice(entries.as_flattened());
    is_elf.then_some(())
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + 8)?;
    bytes.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_program_with_more_text_still_runs_and_leaves_no_file() {
        let executable = std::env::current_exe().unwrap();
        let program = Program::make(&executable, Bytes(HUGE + 1)).unwrap();
        assert_eq!(program.size, Bytes(2 * HUGE));
        let mut last = [0; 64];
        let end = fs::metadata(program.path()).unwrap().len();
        program
            .file
            .read_exact_at(&mut last, end - FUNCTION)
            .unwrap();
        assert_eq!(
            last,
            function(u32::try_from(2 * HUGE / FUNCTION).unwrap() - 1)
        );
        assert!(
            fs::read_link(program.path())
                .unwrap()
                .to_string_lossy()
                .ends_with("(deleted)")
        );
        let ran = Command::new(program.path()).arg("--list").output().unwrap();
        let list = String::from_utf8(ran.stdout).unwrap();
        assert!(list.contains("a_program_with_more_text"), "{list}");
        for cached in [Cached::Base, Cached::AsRead, Cached::Dropped, Cached::Base] {
            program.cache(cached).unwrap();
        }
    }

    #[test]
    fn what_is_no_executable_gets_no_segment() {
        for mut file in [Vec::new(), vec![0; 4096], b"#!/bin/sh\nexit\n".repeat(9)] {
            assert_eq!(add_segment(&mut file, HUGE, HUGE), None);
        }
    }
}
