//! Repeated summaries of many processes: [`Glances`].
//!
//! Each takes one read of smaps, by one child for several processes (`aside`). smaps holds the
//! target's mmap lock for reading while it walks the page tables, so the caller decides on the
//! interval. Only pagemap tells which blocks are dense enough for a huge page
//! ([`Plan`](crate::promote::Plan)), so [`Glance::gain`] is an estimate.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::kernel::smaps::{Mapping, Smaps};
use crate::kernel::{FileError, Root, aside};
use crate::units::Bytes;

use super::covered::{counts_of_each, is_in};
use super::process::Observer;
use super::{Huge, Kind};

/// Memory of a process: huge, potentially huge, and wasted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Glance {
    /// Memory mapped by PMD.
    pub huge: Huge,
    /// Resident private memory on base pages that may become huge: in mappings with a whole aligned
    /// block, at least half a block each.
    pub gain: Bytes,
    /// True where the process maps the preload library.
    pub covered: bool,
    /// Upper bound of untouched huge memory; `None` without the library or without its counters.
    pub waste: Option<Bytes>,
}

/// Reads summaries of processes.
#[derive(Debug)]
pub struct Glances {
    root: Root,
    observer: Observer,
}

impl Glances {
    /// Creates a reader for the processes of `root`.
    ///
    /// # Errors
    /// [`FileError`] where the PMD size is unknown.
    pub fn new(root: &Root) -> Result<Self, FileError> {
        Ok(Self {
            root: root.clone(),
            observer: Observer::new(root)?,
        })
    }

    /// Reads each of these processes in turn.
    pub fn look(&self, pids: &[u32]) -> Vec<Result<Glance, FileError>> {
        let texts = aside::texts(&self.root, pids, "smaps").into_iter();
        let all: Vec<_> = texts.map(|text| text.map(Smaps::of)).collect();
        let read = pids.iter().zip(&all);
        let covered: Vec<_> = read
            .filter_map(|(pid, smaps)| Some((*pid, smaps.as_ref().ok()?)))
            .filter(|(_, smaps)| is_in(smaps))
            .collect();
        let counts = counts_of_each(&self.root, &covered).into_iter();
        let wastes = counts.map(|counts| counts.ok().map(|counts| Bytes(counts.untouched)));
        let pids_covered = covered.iter().map(|(pid, _)| *pid);
        let wastes: BTreeMap<_, _> = pids_covered.zip(wastes).collect();
        let glance = |(pid, smaps): (&u32, Result<Smaps, FileError>)| {
            let mut glance = self.of(&smaps?);
            if let Some(waste) = wastes.get(pid) {
                // The program can write any value.
                let waste = waste.map(|waste| waste.min(glance.huge.anon));
                (glance.covered, glance.waste) = (true, waste);
            }
            Ok(glance)
        };
        pids.iter().zip(all).map(glance).collect()
    }

    fn of(&self, smaps: &Smaps) -> Glance {
        let mut glance = Glance::default();
        self.observer.visit(smaps, |kind, mapping| {
            glance.huge.anon += mapping.anon_huge_pages;
            glance.huge.shmem += mapping.shmem_pmd_mapped;
            glance.huge.file += mapping.file_pmd_mapped;
            let is_private = kind == Kind::Heap || kind == Kind::Data && mapping.inode == 0;
            if is_private {
                glance.gain += self.gain(mapping);
            }
        });
        glance
    }

    fn gain(&self, mapping: &Mapping<'_>) -> Bytes {
        let pmd = self.observer.pmd_size();
        let first = pmd.align_up(mapping.start);
        let holds = first.is_some_and(|first| first + pmd.bytes() <= mapping.end);
        let rest = Bytes(mapping.rss.0.saturating_sub(mapping.pmd_mapped().0));
        match holds && !mapping.declined && rest.0 >= pmd.bytes() / 2 {
            true => rest,
            false => Bytes(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake::host;

    #[test]
    fn only_dense_memory_in_whole_blocks_may_become_huge() {
        let mapping = |range: &str, more: &str, kib: u64, huge: u64, flags: &str| {
            format!(
                "{range} {more}\nRss: {kib} kB\nAnonHugePages: {huge} kB\nVmFlags: rd wr {flags}\n"
            )
        };
        let anon = "rw-p 00000000 00:00 0 ";
        let smaps = [
            // 6 of 8 MiB are resident, 2 of them huge.
            mapping("7f0000000000-7f0000800000", anon, 6144, 2048, ""),
            // Too small, too sparse, declined, a stack, a file.
            mapping("7f0001000000-7f00011ff000", anon, 1024, 0, ""),
            mapping("7f0002000000-7f0002800000", anon, 512, 0, ""),
            mapping("7f0003000000-7f0003800000", anon, 8192, 0, "nh"),
            mapping(
                "7f0004000000-7f0004800000",
                "rw-p 0 00:00 0 [stack]",
                8192,
                0,
                "",
            ),
            mapping(
                "7f0005000000-7f0005800000",
                "r--p 0 08:01 7 /lib/x",
                8192,
                0,
                "",
            ),
        ];
        let (_folder, root) = host(&[("proc/1/smaps", &smaps.concat())]);
        let glances = Glances::new(&root).unwrap();
        let [seen, gone] = &glances.look(&[1, 2])[..] else {
            panic!("two results expected");
        };
        let seen = seen.as_ref().unwrap();
        assert_eq!((seen.gain.0 >> 20, seen.huge.anon.0 >> 20), (4, 2));
        assert_eq!((seen.covered, seen.waste), (false, None));
        assert!(gone.as_ref().unwrap_err().is_missing());
    }
}
