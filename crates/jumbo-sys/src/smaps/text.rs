//! The text of a file: [`Smaps`].

use super::{Mapping, mappings};
use crate::files::{FileError, Root};

/// Text of one smaps file.
#[derive(Debug)]
pub struct Smaps(String);

impl Smaps {
    /// Wraps the text of a file that was read already.
    pub fn of(text: String) -> Self {
        Self(text)
    }

    /// Reads /proc/PID/smaps of this process or a program of the caller: a process that holds its
    /// lock of mappings blocks the caller. Empty for kernel threads and zombies.
    ///
    /// # Errors
    /// [`FileError::Io`]: no such process, or no permission.
    pub fn read(root: &Root, pid: u32) -> Result<Self, FileError> {
        root.read(format!("proc/{pid}/smaps")).map(Self)
    }

    /// Reads /proc/PID/maps: addresses, permissions and paths, without a walk of the page tables.
    ///
    /// # Errors
    /// Same as [`Smaps::read`].
    pub fn read_maps(root: &Root, pid: u32) -> Result<Self, FileError> {
        root.read(format!("proc/{pid}/maps")).map(Self)
    }

    /// Reads /proc/PID/smaps_rollup (Linux 4.14), which has one [`Mapping`] with the sums.
    ///
    /// # Errors
    /// Same as [`Smaps::read`]; ESRCH for kernel threads.
    pub fn read_rollup(root: &Root, pid: u32) -> Result<Self, FileError> {
        root.read(format!("proc/{pid}/smaps_rollup")).map(Self)
    }

    /// Returns the [`mappings`] by ascending address, without overlaps.
    pub fn mappings(&self) -> impl Iterator<Item = Mapping<'_>> {
        let mut found: Vec<Mapping<'_>> = Vec::new();
        for mapping in mappings(self.0.as_bytes()) {
            // Between two read(2) calls mappings may merge: the kernel continues with the mapping
            // at the last address, and prints the memory before it again.
            while found.last().is_some_and(|last| mapping.start <= last.start) {
                found.pop();
            }
            match found.last() {
                // A part of the last one: the larger count has the memory of both.
                Some(last) if mapping.start < last.end => {
                    if mapping.rss > last.rss {
                        found.pop();
                        found.push(mapping);
                    }
                }
                _ => found.push(mapping),
            }
        }
        found.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;

    #[test]
    fn memory_of_mappings_that_merged_meanwhile_counts_once() {
        let text = |ranges: &[(u32, u32)]| {
            let one = |(start, end): &(u32, u32)| {
                let kib = (end - start) / 1024;
                format!("{start:x}-{end:x} rw-p 00000000 00:00 0 \nRss: {kib} kB\n")
            };
            Smaps(ranges.iter().map(one).collect())
        };
        const PAGE: u32 = 4096;
        for (ranges, pages) in [
            // Two were printed, and then both with a third in one.
            (&[(1, 2), (2, 4), (1, 6), (8, 9)][..], 6),
            (&[(1, 2), (4, 6), (4, 8)], 5),
            // A part of the last one.
            (&[(1, 4), (3, 4), (4, 5)], 4),
            (&[(1, 2), (2, 3), (3, 4)], 3),
        ] {
            let ranges: Vec<_> = ranges.iter().map(|(a, b)| (a * PAGE, b * PAGE)).collect();
            let rss: Bytes = text(&ranges).mappings().map(|mapping| mapping.rss).sum();
            assert_eq!(rss, Bytes(pages * u64::from(PAGE)), "{ranges:?}");
        }
    }

    #[test]
    fn smaps_and_rollup_agree() {
        let root = Root::host();
        let pid = std::process::id();
        let sum: Bytes = Smaps::read(&root, pid)
            .unwrap()
            .mappings()
            .map(|m| m.rss)
            .sum();
        let rollup = Smaps::read_rollup(&root, pid).unwrap();
        let rollup = rollup.mappings().next().unwrap().rss;
        // Other tests of this process allocate between the two reads.
        assert!(
            sum.0.abs_diff(rollup.0) < 64 << 20,
            "{sum} against {rollup}"
        );
    }
}
