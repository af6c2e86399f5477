//! Allocators that a user would preload instead: [`Peer`].

use std::path::PathBuf;
use std::process::Command;

/// A variable and its value.
type Setting = (&'static str, &'static str);

/// An allocator of this host, and the settings with which it takes huge pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    pub(crate) library: PathBuf,
    pub(crate) set: &'static [Setting],
}

/// What the cache says of libraries that this architecture's programs can load.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: &str = "x86-64";
#[cfg(not(target_arch = "x86_64"))]
const ARCHITECTURE: &str = "AArch64";

/// Its name, the starts of the names of its libraries, its setting, and the Debian package that has it.
type Known = (
    &'static str,
    &'static [&'static str],
    &'static [Setting],
    &'static str,
);

const KNOWN: [Known; 3] = [
    (
        "jemalloc",
        &["libjemalloc.so"],
        &[("MALLOC_CONF", "thp:always")],
        "libjemalloc2",
    ),
    (
        "tcmalloc",
        &["libtcmalloc_minimal.so", "libtcmalloc.so"],
        &[],
        "libtcmalloc-minimal4",
    ),
    (
        "mimalloc",
        &["libmimalloc.so"],
        // The second is what it was called before 2.1.
        &[
            ("MIMALLOC_ALLOW_LARGE_OS_PAGES", "1"),
            ("MIMALLOC_LARGE_OS_PAGES", "1"),
        ],
        "libmimalloc2.0",
    ),
];

impl Peer {
    /// The names that there are.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        KNOWN.into_iter().map(|known| known.0)
    }

    /// The allocator of that name, where the dynamic linker's cache has it.
    pub(super) fn find(name: &str) -> Result<Self, String> {
        // Debian's PATH of ordinary users leaves it out.
        let cache = ["ldconfig", "/sbin/ldconfig"].into_iter().find_map(|tool| {
            let output = Command::new(tool).arg("-p").output().ok()?;
            String::from_utf8(output.stdout).ok()
        });
        Self::listed(name, &cache.unwrap_or_default())
    }

    /// The same, in what `ldconfig -p` prints.
    fn listed(name: &str, cache: &str) -> Result<Self, String> {
        let mut known = KNOWN.into_iter();
        let Some((name, files, set, package)) = known.find(|known| known.0 == name) else {
            return Err(format!("there is no peer `{name}`"));
        };
        let library = files.iter().find_map(|start| {
            let mut lines = cache.lines().map(str::trim);
            lines.find_map(|line| {
                let (_, path) = line.strip_prefix(start)?.split_once("=> ")?;
                // The cache has those of other architectures too.
                line.contains(ARCHITECTURE).then(|| PathBuf::from(path))
            })
        });
        match library {
            Some(library) => Ok(Self { name, library, set }),
            None => Err(format!("not installed (Debian: {package})")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_found_in_the_cache_or_said_to_be_absent() {
        let cache = "2 libs found\n\tlibtcmalloc.so.4 (libc6,ARCH) => /l/libtcmalloc.so.4\n\
                     \tlibjemalloc.so.2 (libc6) => /32/libjemalloc.so.2\n\
                     \tlibjemalloc.so.2 (libc6,ARCH) => /l/libjemalloc.so.2\n";
        let cache = &cache.replace("ARCH", ARCHITECTURE);
        let found = |name| Peer::listed(name, cache).map(|peer| peer.library);
        assert_eq!(found("tcmalloc"), Ok("/l/libtcmalloc.so.4".into()));
        assert_eq!(found("jemalloc"), Ok("/l/libjemalloc.so.2".into()));
        assert!(found("mimalloc").unwrap_err().contains("libmimalloc"));
        assert!(found("nedmalloc").unwrap_err().contains("no peer"));
    }
}
