//! A fake /proc and /sys tree in a temporary folder.

#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(
    clippy::unwrap_used,
    reason = "a tree that cannot be made fails its test"
)]

use std::fs;

use jumbo_host::kernel::Root;

/// The tree, removed on drop.
pub(crate) struct Fake(tempfile::TempDir);

impl Fake {
    /// A kernel with base pages of that size and nothing else.
    pub(crate) fn new(base_page: u64) -> Self {
        let fake = Self(tempfile::tempdir().unwrap());
        let auxv: Vec<u8> = [6, base_page, 0, 0]
            .into_iter()
            .flat_map(u64::to_ne_bytes)
            .collect();
        fake.write("proc/self/auxv", auxv);
        fs::create_dir_all(fake.0.path().join("sys/kernel/mm")).unwrap();
        fs::create_dir_all(fake.0.path().join("sys/kernel/mm")).unwrap();
        fake
    }

    /// An idle host of 16 GiB without problems: THP and 64 KiB folios on advice, no pools.
    pub(crate) fn healthy() -> Self {
        let fake = Self::new(4096);
        fake.thp(2 << 20, "madvise", "never")
            .thp_size(64, "madvise", "never")
            .thp_size(2048, "inherit", "inherit")
            .write(
                "sys/kernel/mm/transparent_hugepage/defrag",
                "always defer [madvise] never",
            )
            .write(
                "sys/kernel/mm/transparent_hugepage/khugepaged/max_ptes_none",
                "511\n",
            )
            .meminfo(&[("AnonPages", 32 << 10)])
            .write(
                "proc/vmstat",
                "nr_memmap_pages 100\nnr_memmap_boot_pages 60000\ncompact_fail 0\n",
            )
            .write(
                "proc/buddyinfo",
                "Node 0, zone   Normal 9 9 9 9 9 9 9 9 9 100 3000\n",
            )
            .write("proc/sys/kernel/osrelease", "6.18.0\n")
            .write("proc/sys/vm/overcommit_memory", "0\n")
            .write(
                "proc/self/mountinfo",
                "22 27 0:21 / /proc rw,relatime - proc proc rw\n",
            )
            .write("proc/self/cgroup", "0::/\n")
            .process(1, "init", &[("RssAnon", 1024)], &[])
            .process(1, "init", &[("RssAnon", 1024)], &[])
            .write("proc/self/status", "Name:\tjumbo\nTHP_enabled:\t1\n");
        fake
    }

    /// Writes /proc/meminfo of a host with 16 GiB, with some fields (in KiB) set.
    pub(crate) fn meminfo(&self, fields: &[(&str, u64)]) -> &Self {
        const FIELDS: &str = "MemTotal MemFree MemAvailable Buffers Cached SwapCached Active Inactive \
            SwapTotal SwapFree Dirty Writeback AnonPages Mapped Shmem Slab PageTables CommitLimit \
            Committed_AS VmallocTotal VmallocUsed VmallocChunk AnonHugePages ShmemHugePages Hugetlb";
        let value = |field: &str| match fields.iter().find(|(name, _)| *name == field) {
            Some((_, kib)) => *kib,
            None if field.starts_with("Mem") => 16 << 20,
            None => 0,
        };
        let line = |field| format!("{field}: {} kB\n", value(field));
        self.write(
            "proc/meminfo",
            FIELDS
                .split_ascii_whitespace()
                .map(line)
                .collect::<String>(),
        )
    }

    /// Writes a hugetlb pool: total, free, reserved, surplus, overcommit.
    pub(crate) fn pool(&self, kib: u64, pages: [u64; 5]) -> &Self {
        const FILES: [&str; 5] = [
            "nr_hugepages",
            "free_hugepages",
            "resv_hugepages",
            "surplus_hugepages",
            "nr_overcommit_hugepages",
        ];
        for (file, pages) in FILES.iter().zip(pages) {
            self.write(
                &format!("sys/kernel/mm/hugepages/hugepages-{kib}kB/{file}"),
                format!("{pages}\n"),
            );
        }
        self
    }

    /// Writes a process: status fields in KiB, and huge memory in smaps_rollup.
    pub(crate) fn process(
        &self,
        pid: u32,
        name: &str,
        status: &[(&str, u64)],
        rollup: &[(&str, u64)],
    ) -> &Self {
        let lines = |fields: &[(&str, u64)]| {
            let line = |(key, kib): &(&str, u64)| format!("{key}: {kib} kB\n");
            fields.iter().map(line).collect::<String>()
        };
        self.write(&format!("proc/{pid}/comm"), format!("{name}\n"))
            .write(
                &format!("proc/{pid}/cmdline"),
                format!("/usr/bin/{name}\0--flag\0"),
            )
            .write(
                &format!("proc/{pid}/status"),
                format!(
                    "Name: {name}\nUid:\t0\t0\t0\t0\nVmSize: 9 kB\n{}THP_enabled:\t1\n",
                    lines(status)
                ),
            )
            .write(
                &format!("proc/{pid}/smaps_rollup"),
                format!(
                    "1000-2000 ---p 00000000 00:00 0    [rollup]\n{}",
                    lines(rollup)
                ),
            )
    }

    pub(crate) fn root(&self) -> Root {
        Root::at(self.0.path())
    }

    pub(crate) fn write(&self, path: &str, content: impl AsRef<[u8]>) -> &Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    /// Writes the top-level THP controls.
    pub(crate) fn thp(&self, pmd_size: u64, enabled: &str, shmem_enabled: &str) -> &Self {
        const FOLDER: &str = "sys/kernel/mm/transparent_hugepage";
        self.write(&format!("{FOLDER}/hpage_pmd_size"), pmd_size.to_string())
            .write(
                &format!("{FOLDER}/enabled"),
                choice("always madvise never", enabled),
            )
            .write(
                &format!("{FOLDER}/shmem_enabled"),
                choice("always within_size advise never deny force", shmem_enabled),
            )
    }

    /// Writes the THP controls of one size.
    pub(crate) fn thp_size(&self, kib: u64, enabled: &str, shmem_enabled: &str) -> &Self {
        let folder = format!("sys/kernel/mm/transparent_hugepage/hugepages-{kib}kB");
        self.write(
            &format!("{folder}/enabled"),
            choice("always inherit madvise never", enabled),
        )
        .write(
            &format!("{folder}/shmem_enabled"),
            choice("always inherit within_size advise never", shmem_enabled),
        )
    }
}

fn choice(words: &str, chosen: &str) -> String {
    let mark = |word| {
        if word == chosen {
            format!("[{word}]")
        } else {
            String::from(word)
        }
    };
    words.split(' ').map(mark).collect::<Vec<_>>().join(" ")
}
