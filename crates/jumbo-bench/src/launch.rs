//! Launch modes of a program: [`Launch`]; and [`Peer`], an allocator for LD_PRELOAD.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Launch mode of a program: the only difference between the sides of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Launch {
    /// Unchanged.
    Plain,
    /// With `jumbo run` and these options.
    Jumbo(String),
    /// With another allocator through LD_PRELOAD.
    Preload(Peer),
}

/// Variables that change `malloc`, and so would change all sides at once.
const MALLOC_VARIABLES: [&str; 10] = [
    "JUMBO",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "JUMBO_ORDERS",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_PERTURB_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
];

impl Launch {
    /// `jumbo run` with its defaults.
    pub(crate) const JUMBO: Self = Self::Jumbo(String::new());

    /// `jumbo run` with these options, and huge pages from the first touch.
    pub(crate) fn at_once(options: &str) -> Self {
        Self::Jumbo(format!("{options} --max-waste=unbounded").trim().to_owned())
    }

    /// Name of the side in a table.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Plain => "plain".to_owned(),
            Self::Preload(peer) => peer.name.to_owned(),
            Self::Jumbo(options) => format!("jumbo run {options}").trim_end().to_owned(),
        }
    }

    /// Command that starts `program`, without any other setting that changes `malloc`.
    pub(crate) fn command(&self, jumbo: &Path, program: &OsStr) -> Command {
        let alone = match self {
            Self::Jumbo(options) => &Self::Jumbo(format!("--no-config {options}")),
            other => other,
        };
        alone.command_without(&MALLOC_VARIABLES, jumbo, program)
    }

    /// Command without those `variables`; the program keeps all others.
    pub(crate) fn command_without(
        &self,
        variables: &[&str],
        jumbo: &Path,
        program: &OsStr,
    ) -> Command {
        let mut command = Command::new(program);
        if let Self::Jumbo(options) = self {
            command = Command::new(jumbo);
            command.arg("run");
            if !options.contains("--report") && !options.contains("--quiet") {
                command.arg("--report=none");
            }
            command
                .args(options.split_whitespace())
                .arg("--")
                .arg(program);
        }
        for variable in variables {
            command.env_remove(variable);
        }
        match self {
            Self::Plain | Self::Jumbo(_) => &mut command,
            Self::Preload(peer) => {
                let library = Some(&peer.library).filter(|path| !path.as_os_str().is_empty());
                command
                    .envs(library.map(|path| ("LD_PRELOAD", path)))
                    .envs(peer.set.iter().copied())
            }
        };
        command
    }
}

/// Finds a program in the PATH or in the folders `beside`.
pub(crate) fn on_path(program: &str, beside: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let mut paths = std::env::split_paths(&paths).chain(beside);
    paths.find_map(|folder| Some(folder.join(program)).filter(|path| path.is_file()))
}

pub(crate) fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(OsStr::to_string_lossy)
        .collect::<Vec<_>>()
        .join(" ")
}

type Setting = (&'static str, &'static str);

/// An allocator of this host, with its settings for huge pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    /// Empty: none.
    pub(crate) library: PathBuf,
    pub(crate) set: &'static [Setting],
}

/// Name of this architecture in the cache of the dynamic linker.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: &str = "x86-64";
#[cfg(not(target_arch = "x86_64"))]
const ARCHITECTURE: &str = "AArch64";

/// Names of allocators, their libraries, Debian packages, and settings for huge pages.
const KNOWN_PEERS: [(&str, &str, &str, &[Setting]); 4] = [
    // glibc's own, which needs no library.
    (
        "tunable",
        "",
        "",
        &[("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")],
    ),
    (
        "jemalloc",
        "libjemalloc.so",
        "libjemalloc2",
        &[("MALLOC_CONF", "thp:always")],
    ),
    (
        "tcmalloc",
        "libtcmalloc_minimal.so libtcmalloc.so",
        "libtcmalloc-minimal4",
        &[],
    ),
    (
        "mimalloc",
        "libmimalloc.so",
        "libmimalloc2.0",
        // The second is the name before 2.1.
        &[
            ("MIMALLOC_ALLOW_LARGE_OS_PAGES", "1"),
            ("MIMALLOC_LARGE_OS_PAGES", "1"),
        ],
    ),
];

impl Peer {
    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        KNOWN_PEERS.into_iter().map(|(name, ..)| name)
    }

    pub(crate) fn find(name: &str) -> Result<Self, String> {
        // On Debian /sbin is not in the PATH of ordinary users.
        let cache = ["ldconfig", "/sbin/ldconfig"].into_iter().find_map(|tool| {
            let output = Command::new(tool).arg("-p").output().ok()?;
            String::from_utf8(output.stdout).ok()
        });
        Self::listed(name, &cache.unwrap_or_default())
    }

    /// Finds an allocator in the output of `ldconfig -p`.
    fn listed(name: &str, cache: &str) -> Result<Self, String> {
        let mut known = KNOWN_PEERS.into_iter();
        let Some((name, files, package, set)) = known.find(|(known, ..)| *known == name) else {
            return Err(format!("there is no peer `{name}`"));
        };
        if files.is_empty() {
            let library = PathBuf::new();
            return Ok(Self { name, library, set });
        }
        let library = files.split(' ').find_map(|start| {
            let mut lines = cache.lines().map(str::trim);
            lines.find_map(|line| {
                let (_, path) = line.strip_prefix(start)?.split_once("=> ")?;
                // The cache lists other architectures too.
                line.contains(ARCHITECTURE).then(|| PathBuf::from(path))
            })
        });
        let library = library.ok_or_else(|| format!("not installed (Debian: {package})"))?;
        Ok(Self { name, library, set })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_found_in_the_cache_or_reported_missing() {
        let cache = "2 libs found\n\tlibtcmalloc.so.4 (libc6,ARCH) => /l/libtcmalloc.so.4\n\
                     \tlibjemalloc.so.2 (libc6) => /32/libjemalloc.so.2\n\
                     \tlibjemalloc.so.2 (libc6,ARCH) => /l/libjemalloc.so.2\n";
        let cache = &cache.replace("ARCH", ARCHITECTURE);
        let found = |name| Peer::listed(name, cache).map(|peer| peer.library);
        assert_eq!(found("tcmalloc"), Ok("/l/libtcmalloc.so.4".into()));
        assert_eq!(found("jemalloc"), Ok("/l/libjemalloc.so.2".into()));
        assert!(found("mimalloc").unwrap_err().contains("libmimalloc"));
        assert_eq!(found("tunable"), Ok(PathBuf::new()));
        assert!(found("nedmalloc").unwrap_err().contains("no peer"));
    }

    #[test]
    fn the_sides_differ_only_in_their_launch() {
        let jumbo = Path::new("/j");
        let options = Launch::Jumbo("--heap=glibc --pool=64M".to_owned());
        let typed = line(&options.command(jumbo, OsStr::new("/p")));
        assert_eq!(
            typed,
            "/j run --report=none --no-config --heap=glibc --pool=64M -- /p"
        );
        assert_eq!(options.name(), "jumbo run --heap=glibc --pool=64M");
        assert_eq!(Launch::JUMBO.name(), "jumbo run");
        for launch in [Launch::Plain, Launch::JUMBO] {
            let command = launch.command(jumbo, OsStr::new("/p"));
            assert!(line(&command).ends_with("/p"));
            assert!(command.get_envs().all(|(_, value)| value.is_none()));
        }
    }
}
