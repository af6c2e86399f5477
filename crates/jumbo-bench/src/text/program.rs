//! `Program`: one with much text, made when it is measured.
//!
//! It is a copy of the `jumbo` executable ([`elf`](crate::elf)) with one segment more: functions of 64 bytes each that return their
//! number.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::path::{Path, PathBuf};

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::segments::prime::prime;
use jumbo_host::segments::running::Running;
use rustix::fs::{Advice, fadvise};

use crate::Error;
use crate::elf::{HUGE, Segment, path_of, with_segment};

/// The size of a function: a line of the processor's cache.
pub(super) const FUNCTION: u64 = 64;

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
        let size = Bytes(size.0.next_multiple_of(HUGE));
        let count = u32::try_from(size.0 / FUNCTION).unwrap_or(u32::MAX);
        let file = with_segment(executable, Segment::Text(size), |file| {
            (0..count).try_for_each(|number| file.write_all(&function(number)))
        })?;
        Ok(Self {
            size,
            file,
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn a_program_has_all_functions_and_is_cached_as_it_is_told() {
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
        for cached in [Cached::Base, Cached::AsRead, Cached::Dropped, Cached::Base] {
            program.cache(cached).unwrap();
        }
    }
}
