//! A copy of an executable with one more segment: [`with_segment`].
//!
//! A table measures much text. `jumbo` itself shall not have it: it would start more slowly. So a
//! copy of the executable gets the segment, and the host needs no compiler.
//!
//! The file is unlinked: it disappears with the measuring process.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use jumbo::units::Bytes;
use object::elf::{FileHeader64, PF_R, PF_X, PT_LOAD, PT_NOTE, ProgramHeader64};
use object::pod::slice_from_bytes_mut;
use object::read::elf::FileHeader as _;
use object::{LittleEndian as LE, U32, U64};
use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::Error;

/// Size that a PMD maps on hosts with 4 KiB base pages. On others the claim of the side fails.
pub(crate) const HUGE_PAGE: u64 = 2 << 20;

/// Gap between the program and the segment: the kernel must not merge their mappings.
const SEGMENT_GAP: u64 = 1 << 16;

/// Copies `executable` with `size` bytes of text: whole huge pages, aligned as by
/// `-z common-page-size=2M`, at an offset congruent to the address. `fill` writes them.
pub(crate) fn with_segment(
    executable: &Path,
    size: Bytes,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<File, Error> {
    let folder = crate::on_disk();
    let made = make_in(&folder, executable, size, fill);
    made.map_err(|error| Error::Program(folder.display().to_string(), error))
}

fn make_in(
    folder: &Path,
    executable: &Path,
    size: Bytes,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<File> {
    let mut bytes = fs::read(executable)?;
    let offset = (bytes.len() as u64).next_multiple_of(HUGE_PAGE);
    add(&mut bytes, offset, size)
        .ok_or_else(|| io::Error::other("not a 64-bit ELF executable with a note"))?;

    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = openat(CWD, folder, flags, Mode::RWXU)?;
    let path = path_of(&file);
    let mut file = BufWriter::with_capacity(1 << 20, File::from(file));
    file.write_all(&bytes)?;
    file.seek(SeekFrom::Start(offset))?;
    fill(&mut file)?;
    let file = file.into_inner()?;
    // Dirty pages cannot be dropped from the page cache.
    file.sync_data()?;
    // A file that is open for writing cannot be executed (ETXTBSY).
    let read = File::open(path)?;
    drop(file);
    Ok(read)
}

/// Path of an open file of this process, for other processes.
pub(crate) fn path_of(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}

/// Replaces the PT_NOTE entry by the segment; `None` for files without one.
fn add(file: &mut [u8], offset: u64, size: Bytes) -> Option<()> {
    let header = FileHeader64::<LE>::parse(&*file).ok()?;
    let first = usize::try_from(header.e_phoff.get(LE)).ok()?;
    let count = usize::from(header.e_phnum.get(LE));
    let (table, _) =
        slice_from_bytes_mut::<ProgramHeader64<LE>>(file.get_mut(first..)?, count).ok()?;
    let is = |kind| move |entry: &ProgramHeader64<LE>| entry.p_type.get(LE) == kind;
    let loads = table.iter().filter(|entry| is(PT_LOAD)(entry));
    let end = loads
        .map(|entry| entry.p_vaddr.get(LE) + entry.p_memsz.get(LE))
        .max()?;
    let address = U64::new(LE, (end + SEGMENT_GAP).next_multiple_of(HUGE_PAGE));
    let note = table.iter().position(is(PT_NOTE))?;
    let last = table.iter().rposition(is(PT_LOAD))?;
    // Program headers are sorted by address.
    let place = match note < last {
        true => {
            table[note..=last].rotate_left(1);
            last
        }
        false => {
            table[last + 1..=note].rotate_right(1);
            last + 1
        }
    };
    table[place] = ProgramHeader64 {
        p_type: U32::new(LE, PT_LOAD),
        p_flags: U32::new(LE, PF_R | PF_X),
        p_offset: U64::new(LE, offset),
        p_vaddr: address,
        p_paddr: address,
        p_filesz: U64::new(LE, size.0),
        p_memsz: U64::new(LE, size.0),
        p_align: U64::new(LE, HUGE_PAGE),
    };
    Some(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_program_with_an_added_segment_runs_and_leaves_no_file() {
        let executable = std::env::current_exe().unwrap();
        let size = Bytes(2 * HUGE_PAGE);
        let text = vec![1; usize::try_from(size.0).unwrap()];
        let file = with_segment(&executable, size, |to| to.write_all(&text)).unwrap();
        let path = path_of(&file);
        let link = fs::read_link(&path).unwrap();
        assert!(link.to_string_lossy().ends_with("(deleted)"), "{link:?}");
        let ran = Command::new(path).arg("--list").output().unwrap();
        let list = String::from_utf8(ran.stdout).unwrap();
        assert!(list.contains("a_program_with_an_added_segment"), "{list}");
    }

    #[test]
    fn other_files_are_rejected() {
        for mut file in [Vec::new(), vec![0; 4096], b"#!/bin/sh\nexit\n".repeat(9)] {
            assert_eq!(add(&mut file, HUGE_PAGE, Bytes(HUGE_PAGE)), None);
        }
    }
}
