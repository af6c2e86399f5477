//! A /proc and /sys tree in a temporary folder, for kernels that are not here.

#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(
    clippy::unwrap_used,
    reason = "a tree that cannot be made fails its test"
)]

use std::fs;

use jumbo::kernel::Root;

/// The tree; gone when dropped.
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
        fake
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

    /// The top-level THP controls.
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

    /// The controls of one size.
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
