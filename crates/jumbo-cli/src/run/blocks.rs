//! A file read in whole blocks: [`Blocks`].
//!
//! An ELF file's headers, its loader's name and its notes are small and stand together. A reader that seeks to each of them
//! takes two system calls for each; from a block that is already there it takes none.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt as _;

/// Bytes of a block. It starts at a multiple of that.
const BLOCK: usize = 4096;

/// A reader that keeps the last block. It does not move the file's own position.
#[derive(Debug)]
pub(super) struct Blocks<'a> {
    file: &'a File,
    at: u64,
    /// Place in the file of the block in `kept`.
    start: u64,
    kept: Vec<u8>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(file: &'a File) -> Self {
        Self {
            file,
            at: 0,
            start: 0,
            kept: Vec::new(),
        }
    }

    /// The bytes of the kept block from the position on.
    fn rest(&self) -> &[u8] {
        let skip = self.at.checked_sub(self.start);
        let skip = skip.and_then(|skip| usize::try_from(skip).ok());
        skip.and_then(|skip| self.kept.get(skip..))
            .unwrap_or_default()
    }
}

impl Read for Blocks<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.rest().is_empty() {
            self.start = self.at - self.at % BLOCK as u64;
            self.kept.resize(BLOCK, 0);
            let read = self.file.read_at(&mut self.kept, self.start);
            self.kept.truncate(*read.as_ref().unwrap_or(&0));
            read?;
        }
        let rest = self.rest();
        let length = rest.len().min(buffer.len());
        buffer[..length].copy_from_slice(&rest[..length]);
        self.at += length as u64;
        Ok(length)
    }
}

impl Seek for Blocks<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (base, offset) = match to {
            SeekFrom::Start(at) => (at, 0),
            SeekFrom::Current(offset) => (self.at, offset),
            SeekFrom::End(offset) => (self.file.metadata()?.len(), offset),
        };
        let at = base.checked_add_signed(offset);
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_file_has_across_blocks() {
        let bytes: Vec<u8> = (0..10_000u32)
            .map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1])
            .collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let file = File::open(file.path()).unwrap();
        let mut blocks = Blocks::new(&file);
        for (at, length) in [(9_990, 10), (0, 64), (4_090, 5_000), (64, 10), (0, 10_000)] {
            let mut found = vec![0; length];
            blocks.seek(SeekFrom::Start(at as u64)).unwrap();
            blocks.read_exact(&mut found).unwrap();
            assert_eq!(found, bytes[at..at + length]);
        }
        assert_eq!(blocks.seek(SeekFrom::End(0)).unwrap(), 10_000);
        assert_eq!(blocks.read(&mut [0; 8]).unwrap(), 0);
        assert!(blocks.seek(SeekFrom::Current(-20_000)).is_err());
    }
}
