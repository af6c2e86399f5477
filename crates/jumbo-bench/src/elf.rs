//! A copy of an executable with one segment more: [`with_segment`].
//!
//! What a table measures of a program's own segments (much text, large static arrays) `jumbo` itself shall not have: it would start
//! slower, or not at all where memory is promised strictly. So a copy of the `jumbo` executable gets it, a worker like any other,
//! and no compiler is needed where it is measured.
//!
//! The file has no name: it goes with the process that measures, however that ends.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use jumbo::units::Bytes;
use object::elf::{FileHeader64, PF_R, PF_W, PF_X, PT_LOAD, PT_NOTE, ProgramHeader64};
use object::pod::slice_from_bytes_mut;
use object::read::elf::FileHeader as _;
use object::{LittleEndian as LE, U32, U64};
use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::Error;

/// The size that a PMD maps where a segment is to be on huge pages; where it is more, the claim of
/// the side fails.
pub(crate) const HUGE: u64 = 2 << 20;

/// Between the program and what is added, so that the kernel makes no one mapping of both.
const APART: u64 = 1 << 16;

/// The segment that is added, in whole huge pages. It begins at a multiple of a huge page, as a
/// linker lays it out with `-z common-page-size=2M`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    /// Text from the file, at an offset that is congruent to its address: the page cache can map it by PMDs.
    Text(Bytes),
    /// Zeroes that can be written, of which the file has nothing: bss.
    Zeroes(Bytes),
}

/// A copy of `executable` with that segment, for whose content `fill` is asked.
pub(crate) fn with_segment(
    executable: &Path,
    segment: Segment,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<File, Error> {
    let folder = crate::on_disk();
    let made = make_in(&folder, executable, segment, fill);
    made.map_err(|error| Error::Program(folder.display().to_string(), error))
}

fn make_in(
    folder: &Path,
    executable: &Path,
    segment: Segment,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<File> {
    let mut bytes = fs::read(executable)?;
    let offset = (bytes.len() as u64).next_multiple_of(HUGE);
    add(&mut bytes, offset, segment)
        .ok_or_else(|| io::Error::other("this is no executable for 64 bits"))?;

    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = openat(CWD, folder, flags, Mode::RWXU)?;
    let path = path_of(&file);
    let mut file = BufWriter::with_capacity(1 << 20, File::from(file));
    file.write_all(&bytes)?;
    file.seek(SeekFrom::Start(offset))?;
    fill(&mut file)?;
    let file = file.into_inner()?;
    // Pages that are not on the disk yet cannot be dropped.
    file.sync_data()?;
    // One that is open to be written cannot be executed.
    let read = File::open(path)?;
    drop(file);
    Ok(read)
}

/// A file of this process, by which others start it.
pub(crate) fn path_of(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}

/// Makes the note of an ELF executable that segment, whose content stands in the file from `offset` on; `None` where it has none.
fn add(file: &mut [u8], offset: u64, segment: Segment) -> Option<()> {
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
    let address = U64::new(LE, (end + APART).next_multiple_of(HUGE));
    let (flags, offset, in_file, size) = match segment {
        Segment::Text(size) => (PF_R | PF_X, offset, size.0, size.0),
        Segment::Zeroes(size) => (PF_R | PF_W, 0, 0, size.0),
    };
    let note = table.iter().position(is(PT_NOTE))?;
    let last = table.iter().rposition(is(PT_LOAD))?;
    // Segments stand in the order of their addresses.
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
        p_flags: U32::new(LE, flags),
        p_offset: U64::new(LE, offset),
        p_vaddr: address,
        p_paddr: address,
        p_filesz: U64::new(LE, in_file),
        p_memsz: U64::new(LE, size),
        p_align: U64::new(LE, HUGE),
    };
    Some(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_program_with_a_segment_more_still_runs_and_leaves_no_file() {
        let executable = std::env::current_exe().unwrap();
        let size = Bytes(2 * HUGE);
        for segment in [Segment::Text(size), Segment::Zeroes(size)] {
            let text = vec![1; usize::try_from(size.0).unwrap()];
            let fill = |to: &mut dyn Write| match segment {
                Segment::Text(_) => to.write_all(&text),
                Segment::Zeroes(_) => Ok(()),
            };
            let file = with_segment(&executable, segment, fill).unwrap();
            let path = path_of(&file);
            let link = fs::read_link(&path).unwrap();
            assert!(link.to_string_lossy().ends_with("(deleted)"), "{link:?}");
            let ran = Command::new(path).arg("--list").output().unwrap();
            let list = String::from_utf8(ran.stdout).unwrap();
            assert!(list.contains("a_program_with_a_segment_more"), "{list}");
        }
    }

    #[test]
    fn what_is_no_executable_gets_no_segment() {
        for mut file in [Vec::new(), vec![0; 4096], b"#!/bin/sh\nexit\n".repeat(9)] {
            assert_eq!(add(&mut file, HUGE, Segment::Zeroes(Bytes(HUGE))), None);
        }
    }
}
