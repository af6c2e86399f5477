//! `TextProgram`: a generated program with much text.
//!
//! It is a copy of the `jumbo` executable ([`elf`](crate::elf)) with a segment of functions, 64
//! bytes each, that return their number.

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
use crate::elf::{HUGE_PAGE, path_of, with_segment};

/// Size of a function: one cache line.
pub(super) const FUNCTION_BYTES: u64 = 64;

/// State of a program's text in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CacheState {
    Base,
    /// PMD-sized folios.
    Primed,
    Dropped,
}

pub(super) struct TextProgram {
    pub(super) size: Bytes,
    file: File,
    cached: Cell<CacheState>,
}

impl TextProgram {
    pub(super) fn make(executable: &Path, size: Bytes) -> Result<Self, Error> {
        let size = Bytes(size.0.next_multiple_of(HUGE_PAGE));
        let count = u32::try_from(size.0 / FUNCTION_BYTES).unwrap_or(u32::MAX);
        let file = with_segment(executable, size, |file| {
            (0..count).try_for_each(|number| file.write_all(&function(number)))
        })?;
        Ok(Self {
            size,
            file,
            cached: Cell::new(CacheState::Dropped),
        })
    }

    pub(super) fn path(&self) -> PathBuf {
        path_of(&self.file)
    }

    /// Brings its text into this state of the page cache. No process may run it.
    pub(super) fn cache(&self, wanted: CacheState) -> Result<(), Error> {
        if self.cached.get() == wanted && wanted != CacheState::Dropped {
            return Ok(());
        }
        // The file is on the disk, so its pages are clean.
        fadvise(&self.file, 0, None, Advice::DontNeed)?;
        match wanted {
            CacheState::Dropped => {}
            // Random access disables readahead: base pages.
            CacheState::Base => self.read()?,
            CacheState::Primed => self.prime()?,
        }
        self.cached.set(wanted);
        Ok(())
    }

    fn prime(&self) -> Result<(), Error> {
        let root = Root::host();
        let running = Running::read(&root)?;
        let primed = prime(&root, &self.path(), &running, false, &mut |_, _| {})?;
        if primed.huge.0 * 2 < primed.whole.0 {
            let why = primed.why_not.unwrap_or_default();
            return Err(Error::claim(why, NO_HUGE_FOLIOS_HINT));
        }
        Ok(())
    }

    fn read(&self) -> io::Result<()> {
        let mut file = &self.file;
        fadvise(file, 0, None, Advice::Random)?;
        file.rewind()?;
        let mut buffer = vec![0; 1 << 17];
        while file.read(&mut buffer)? > 0 {}
        Ok(())
    }
}

const NO_HUGE_FOLIOS_HINT: &str =
    "let TMPDIR name a folder on ext4 or xfs: other file systems have no huge folios for text";

/// Machine code of the function that returns `number`.
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
    fn a_program_has_all_functions_and_every_cache_state() {
        let executable = std::env::current_exe().unwrap();
        let program = TextProgram::make(&executable, Bytes(HUGE_PAGE + 1)).unwrap();
        assert_eq!(program.size, Bytes(2 * HUGE_PAGE));
        let mut last = [0; 64];
        let end = fs::metadata(program.path()).unwrap().len();
        program
            .file
            .read_exact_at(&mut last, end - FUNCTION_BYTES)
            .unwrap();
        assert_eq!(
            last,
            function(u32::try_from(2 * HUGE_PAGE / FUNCTION_BYTES).unwrap() - 1)
        );
        for cached in [CacheState::Base, CacheState::Dropped, CacheState::Base] {
            program.cache(cached).unwrap();
        }
    }
}
