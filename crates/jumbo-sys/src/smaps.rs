//! /proc/PID/smaps and smaps_rollup (proc_pid_smaps(5)): [`mappings`].
//!
//! It has its own line parser, because the run report reads smaps of a whole process tree every few
//! milliseconds, and procfs-core puts the 22 fields of each mapping into a hash map under allocated
//! names. For 325 mappings that took 970 µs, beside the 1480 µs of the kernel; this parser takes a
//! sixth and allocates nothing.

#[cfg(feature = "std")]
mod text;

#[cfg(feature = "std")]
pub use text::Smaps;

use crate::maps::Lines;
use crate::proc::{kib, number};
use crate::units::{Bytes, PageSize};

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
    /// Path of the file up to a byte that is no UTF-8, a name in brackets, or empty.
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

/// Returns the mappings in the text of a file. Unknown lines are ignored: kernels add fields, and the
/// end of a process can truncate the file.
pub fn mappings(text: &[u8]) -> impl Iterator<Item = Mapping<'_>> {
    let mut lines = text.split(|byte| *byte == b'\n').peekable();
    core::iter::from_fn(move || {
        let mut mapping = lines.by_ref().find_map(header)?;
        let is_field = |line: &&[u8]| line.first().is_some_and(u8::is_ascii_uppercase);
        while let Some(line) = lines.next_if(is_field) {
            field(&mut mapping, line);
        }
        Some(mapping)
    })
}

fn header(line: &[u8]) -> Option<Mapping<'_>> {
    let (line, path) = Lines::parse(line)?;
    let device = |number: u64| u32::try_from(number).ok();
    (line.end >= line.start).then_some(Mapping {
        start: line.start as u64,
        end: line.end as u64,
        read: line.readable,
        write: line.writable,
        execute: line.executable,
        shared: !line.private,
        offset: line.offset,
        device: (device(line.device.0)?, device(line.device.1)?),
        inode: line.inode,
        path: path.utf8_chunks().next().map_or("", |chunk| chunk.valid()),
        ..Mapping::default()
    })
}

fn field(mapping: &mut Mapping<'_>, line: &[u8]) {
    let mut parts = line.splitn(2, |byte| *byte == b':');
    let (Some(key), Some(value)) = (parts.next(), parts.next()) else {
        return;
    };
    let kib = || kib(value).unwrap_or_default();
    match key {
        b"Rss" => mapping.rss = kib(),
        b"Pss" => mapping.pss = kib(),
        b"Anonymous" => mapping.anonymous = kib(),
        b"AnonHugePages" => mapping.anon_huge_pages = kib(),
        b"ShmemPmdMapped" => mapping.shmem_pmd_mapped = kib(),
        b"FilePmdMapped" => mapping.file_pmd_mapped = kib(),
        b"Shared_Hugetlb" => mapping.shared_hugetlb = kib(),
        b"Private_Hugetlb" => mapping.private_hugetlb = kib(),
        b"Swap" => mapping.swap = kib(),
        b"KernelPageSize" => mapping.kernel_page_size = PageSize::new(kib().0).ok(),
        b"THPeligible" => mapping.thp_eligible = number(value) == Some(1),
        b"VmFlags" => {
            let has = |wanted: &[u8]| value.split(|byte| *byte == b' ').any(|flag| flag == wanted);
            (mapping.advised, mapping.declined) = (has(b"hg"), has(b"nh"));
        }
        _ => {}
    }
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
        let [a, b] = &mappings(TEXT.as_bytes()).collect::<Vec<_>>()[..] else {
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
    fn accepts_truncated_and_invalid_text() {
        for cut in 0..TEXT.len() {
            assert!(mappings(&TEXT.as_bytes()[..cut]).count() <= 2);
        }
        for text in [
            "Rss: 1 kB\n\nx y z\n",
            "VmFlags: rd wr mr mw me ac sd\n",
            "\n",
        ] {
            assert_eq!(mappings(text.as_bytes()).count(), 0, "{text}");
        }
    }

    #[test]
    fn a_path_ends_before_a_byte_that_is_no_text() {
        let line =
            b"1000-2000 r--p 00000000 00:00 7                          /a\xff/b\nRss: 4 kB\n";
        let mapping = mappings(line).next().unwrap();
        assert_eq!((mapping.path, mapping.rss), ("/a", Bytes(4096)));
    }

    /// The sum of a field over the file, without this parser.
    fn sum_of(text: &str, key: &str) -> u64 {
        let values = text.lines().filter_map(|line| line.strip_prefix(key));
        values
            .map(|value| value.trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10)
            .sum()
    }

    #[test]
    fn all_mappings_of_this_process_are_read() {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let found: Vec<_> = mappings(text.as_bytes()).collect();
        assert_eq!(found.len(), text.matches("\nVmFlags:").count());
        let sum = |of: fn(&Mapping<'_>) -> Bytes| found.iter().map(of).sum::<Bytes>().0;
        assert_eq!(sum(|mapping| mapping.size()), sum_of(&text, "Size:"));
        assert_eq!(sum(|mapping| mapping.rss), sum_of(&text, "Rss:"));
        assert_eq!(
            sum(|mapping| mapping.anonymous),
            sum_of(&text, "Anonymous:")
        );
        assert!(found.iter().any(|mapping| mapping.path == "[stack]"));
    }

    proptest! {
        #[test]
        fn accepts_any_text(text in "([0-9a-f-]{0,20} [rwxsp-]{0,5} ?|[A-Z][a-z]{0,3}:| |[0-9]{1,22}|kB|\n|.){0,60}") {
            for mapping in mappings(text.as_bytes()) {
                prop_assert!(mapping.start <= mapping.end);
            }
        }

        #[test]
        fn accepts_any_bytes(bytes: Vec<u8>) {
            let _ = mappings(&bytes).count();
        }
    }
}
