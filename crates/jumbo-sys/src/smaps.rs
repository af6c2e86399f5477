//! /proc/PID/smaps and smaps_rollup (proc_pid_smaps(5)): [`Mapping`], one at a time.
//!
//! It has its own line parser, because the run report reads smaps of a whole process tree every few
//! milliseconds, and procfs-core puts the 22 fields of each mapping into a hash map under allocated
//! names. For 325 mappings that took 970 µs, beside the 1480 µs of the kernel; this parser takes a
//! sixth and allocates nothing.

use crate::files::{FileError, Root};
use crate::units::{Bytes, PageSize};

/// Text of one smaps file.
#[derive(Debug)]
pub struct Smaps(String);

/// One mapping and its resident memory, with the field names of the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mapping<'a> {
    /// First address.
    pub start: u64,
    /// End address.
    pub end: u64,
    /// `r` of the permissions.
    pub read: bool,
    /// `w` of the permissions.
    pub write: bool,
    /// `x` of the permissions.
    pub execute: bool,
    /// `s` of the permissions: shared.
    pub shared: bool,
    /// File offset.
    pub offset: u64,
    /// Major and minor number of the file's device; 0 without a file.
    pub device: (u32, u32),
    /// Inode of the file; 0 without a file.
    pub inode: u64,
    /// Path of the file, a name in brackets, or empty.
    pub path: &'a str,
    /// Page size of the mapping: the base page, or hugetlb's.
    pub kernel_page_size: Option<PageSize>,
    /// Resident, without hugetlb.
    pub rss: Bytes,
    /// Resident, each page divided by the number of processes that map it.
    pub pss: Bytes,
    /// Anonymous pages among the resident ones.
    pub anonymous: Bytes,
    /// Anonymous, mapped by PMD.
    pub anon_huge_pages: Bytes,
    /// Shared memory, mapped by PMD.
    pub shmem_pmd_mapped: Bytes,
    /// Page cache, mapped by PMD.
    pub file_pmd_mapped: Bytes,
    /// hugetlb pages that other processes map too.
    pub shared_hugetlb: Bytes,
    /// hugetlb pages of only this process.
    pub private_hugetlb: Bytes,
    /// Anonymous memory in swap.
    pub swap: Bytes,
    /// A fault could allocate a THP. False for file mappings that do get them.
    pub thp_eligible: bool,
    /// `hg` of VmFlags: MADV_HUGEPAGE was given.
    pub advised: bool,
    /// `nh` of VmFlags: MADV_NOHUGEPAGE was given.
    pub declined: bool,
}

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

    /// Returns the mappings by ascending address, without overlaps. Unknown lines are ignored:
    /// kernels add fields, and the end of a process can truncate the file.
    pub fn mappings(&self) -> impl Iterator<Item = Mapping<'_>> {
        let mut found: Vec<Mapping<'_>> = Vec::new();
        let mut lines = self.0.lines().peekable();
        while let Some(mut mapping) = lines.by_ref().find_map(header) {
            while let Some(line) =
                lines.next_if(|line| line.starts_with(|c: char| c.is_ascii_uppercase()))
            {
                field(&mut mapping, line);
            }
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

impl Mapping<'_> {
    /// Returns the mapped size, resident or not.
    pub fn size(&self) -> Bytes {
        Bytes(self.end - self.start)
    }

    /// Returns the resident hugetlb pages, which `Rss` excludes.
    pub fn hugetlb(&self) -> Bytes {
        self.shared_hugetlb + self.private_hugetlb
    }

    /// Returns the resident THPs mapped by PMD.
    pub fn pmd_mapped(&self) -> Bytes {
        self.anon_huge_pages + self.shmem_pmd_mapped + self.file_pmd_mapped
    }
}

/// `START-END PERMS OFFSET DEVICE INODE [PATH]`, the path behind a column of blanks.
fn header(line: &str) -> Option<Mapping<'_>> {
    let mut parts = line.splitn(6, ' ');
    let (start, end) = parts.next()?.split_once('-')?;
    let &[read, write, execute, shared] = parts.next()?.as_bytes() else {
        return None;
    };
    let offset = parts.next()?;
    let (major, minor) = parts.next()?.split_once(':')?;
    let device = |number| u32::from_str_radix(number, 16).ok();
    let inode = parts.next()?.parse().ok()?;
    let path = parts.next().unwrap_or("").trim_start();
    let (start, end) = (hex(start)?, hex(end)?);
    (end >= start).then_some(Mapping {
        start,
        end,
        read: read == b'r',
        write: write == b'w',
        execute: execute == b'x',
        shared: shared == b's',
        offset: hex(offset)?,
        device: (device(major)?, device(minor)?),
        inode,
        path,
        ..Mapping::default()
    })
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

fn field(mapping: &mut Mapping<'_>, line: &str) {
    let Some((key, value)) = line.split_once(':') else {
        return;
    };
    let kib = || kib(value).unwrap_or_default();
    match key {
        "Rss" => mapping.rss = kib(),
        "Pss" => mapping.pss = kib(),
        "Anonymous" => mapping.anonymous = kib(),
        "AnonHugePages" => mapping.anon_huge_pages = kib(),
        "ShmemPmdMapped" => mapping.shmem_pmd_mapped = kib(),
        "FilePmdMapped" => mapping.file_pmd_mapped = kib(),
        "Shared_Hugetlb" => mapping.shared_hugetlb = kib(),
        "Private_Hugetlb" => mapping.private_hugetlb = kib(),
        "Swap" => mapping.swap = kib(),
        "KernelPageSize" => mapping.kernel_page_size = PageSize::new(kib().0).ok(),
        "THPeligible" => mapping.thp_eligible = value.trim() == "1",
        "VmFlags" => {
            mapping.advised = value.split_ascii_whitespace().any(|flag| flag == "hg");
            mapping.declined = value.split_ascii_whitespace().any(|flag| flag == "nh");
        }
        _ => {}
    }
}

/// A value as smaps, status and meminfo write it: `    1234 kB`.
pub fn kib(value: &str) -> Option<Bytes> {
    let number = value.trim().strip_suffix("kB")?.trim_end();
    number.parse().ok().map(Bytes::from_kib)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = "\
7f0000000000-7f0000400000 rw-s 00001000 00:01 77                         /memfd:a b (deleted)
Size:               4096 kB
KernelPageSize:        4 kB
Rss:                2052 kB
ShmemPmdMapped:     2048 kB
Novelty:               9 kB
THPeligible:           1
VmFlags: rd wr sh mr hg
7f0000400000-7f0000800000 r-xp 00000000 00:00 0 
KernelPageSize:     2048 kB
Rss:                   0 kB
Private_Hugetlb:    4096 kB
VmFlags: rd ex nh
";

    #[test]
    fn mappings_are_read() {
        let smaps = Smaps(TEXT.to_owned());
        let [a, b] = &smaps.mappings().collect::<Vec<_>>()[..] else {
            panic!("two mappings");
        };
        assert_eq!(
            (a.path, a.offset, a.inode),
            ("/memfd:a b (deleted)", 4096, 77)
        );
        assert!(a.read && a.write && !a.execute && a.shared && a.thp_eligible && a.advised);
        assert_eq!((a.rss.0, a.pmd_mapped().0), (2052 << 10, 2 << 20));
        assert!(b.execute && !b.shared && b.declined && !b.advised && b.path.is_empty());
        assert_eq!(b.kernel_page_size, Some(PageSize::SIZE_2M));
        assert_eq!((b.hugetlb().0, b.size().0), (4 << 20, 4 << 20));
    }

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
    fn accepts_truncated_and_invalid_text() {
        for cut in 0..TEXT.len() {
            assert!(Smaps(TEXT[..cut].to_owned()).mappings().count() <= 2);
        }
        assert_eq!(
            Smaps("Rss: 1 kB\n\nx y z\n".to_owned()).mappings().count(),
            0
        );
    }

    proptest! {
        #[test]
        fn accepts_any_text(text in "([0-9a-f-]{0,20} [rwxsp-]{0,5} ?|[A-Z][a-z]{0,3}:| |[0-9]{1,22}|kB|\n|.){0,60}") {
            for mapping in Smaps(text).mappings() {
                prop_assert!(mapping.start <= mapping.end);
            }
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
