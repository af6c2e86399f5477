//! What the host must be for a test, and the lock around its global state.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::wait;

/// Says that the calling test cannot run here. With `JUMBO_TEST_STRICT=1` that is a failure.
#[track_caller]
pub(crate) fn skip(reason: &str) {
    let place = std::panic::Location::caller();
    // libtest names each test's thread after the test, unless it runs them one by one.
    let name = match std::thread::current().name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => place.to_string(),
    };
    assert!(
        std::env::var_os("JUMBO_TEST_STRICT").is_none_or(|value| value != "1"),
        "SKIP {name}: {reason} (JUMBO_TEST_STRICT=1)"
    );
    // Not eprintln!, which libtest keeps to itself when the test passes.
    let _ = writeln!(std::io::stderr(), "SKIP {name}: {reason}");
}

/// The path of an installed command; `None`, with the skip announced, where there is none.
#[track_caller]
pub(crate) fn command(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file());
    if found.is_none() {
        skip(&format!("{name} is not installed"));
    }
    found
}

/// True where the test runs as root; otherwise the skip is announced.
#[track_caller]
pub(crate) fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip("needs root");
    }
    root
}

/// Holds the host's global state still while huge pages are measured; `None`, with the skip
/// announced, where THP cannot be had by advice. Any number of tests may hold it.
#[track_caller]
pub(crate) fn with_thp() -> Option<Held> {
    let held = Held::new(File::lock_shared);
    match fs::read_to_string(THP_ENABLED) {
        Ok(text) if !text.contains("[never]") => Some(held),
        Ok(_) => {
            skip("THP is switched off on this host ([never])");
            None
        }
        Err(error) => {
            skip(&format!("this kernel has no THP: {error}"));
            None
        }
    }
}

/// True where programs get THP without asking: then a share proves nothing about jumbo.
pub(crate) fn thp_is_always() -> bool {
    fs::read_to_string(THP_ENABLED).is_ok_and(|text| text.contains("[always]"))
}

/// Where THP is switched on and off.
pub(crate) const THP_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// The lock on the host's global state, between all tests of all processes.
pub(crate) struct Held {
    _lock: File,
}

impl Held {
    fn new(lock: fn(&File) -> std::io::Result<()>) -> Self {
        let file = std::env::temp_dir().join("jumbo-e2e.lock");
        // Opened for reading where another user made it.
        let file = File::create(&file).or_else(|_| File::open(&file)).unwrap();
        lock(&file).unwrap();
        let held = Self { _lock: file };
        held.restore();
        held
    }

    /// Where the knob stands that the one test which holds the lock alone has set: what it was, behind its path.
    fn note() -> PathBuf {
        std::env::temp_dir().join("jumbo-e2e.knob")
    }

    /// Puts back the knob of a test that was killed: while the lock is held no other test has set one.
    fn restore(&self) {
        let note = fs::read_to_string(Self::note()).unwrap_or_default();
        if let Some((path, before)) = note.split_once('\n') {
            fs::write(path, before).unwrap();
            // Of several tests that share the lock each may be the first.
            let _ = fs::remove_file(Self::note());
        }
    }
}

/// Removes a control group whose processes have ended. A process that was waited for may still be in it for a moment.
pub(crate) fn remove_group(folder: &Path) {
    let start = Instant::now();
    while matches!(fs::remove_dir(folder), Err(error) if error.kind() == ErrorKind::ResourceBusy)
        && start.elapsed() < wait::MOMENT
    {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A kernel knob that was changed, and is changed back when this is dropped, after a panic too; by the next test where this
/// one was killed.
pub(crate) struct Knob {
    alone: Held,
}

impl Knob {
    /// Sets a knob, with every other test kept off the host's state; `None`, with the skip
    /// announced, where it cannot be set.
    #[track_caller]
    pub(crate) fn set(path: impl AsRef<Path>, value: &str) -> Option<Self> {
        let path = path.as_ref();
        let alone = Held::new(File::lock);
        let before = fs::read_to_string(path).ok().map(|text| chosen(&text));
        let noted = before.map(|before| {
            let note = format!("{}\n{before}", path.display());
            fs::write(Held::note(), note).unwrap();
        });
        match (noted, fs::write(path, value)) {
            (Some(()), Ok(())) => Some(Self { alone }),
            (_, outcome) => {
                let _ = fs::remove_file(Held::note());
                skip(&format!("cannot set {}: {outcome:?}", path.display()));
                None
            }
        }
    }
}

impl Drop for Knob {
    fn drop(&mut self) {
        self.alone.restore();
    }
}

/// The `[chosen]` word of a knob that lists its values, or all of one that does not.
fn chosen(text: &str) -> String {
    let inner = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    inner
        .map_or(text, |(word, _)| word)
        .trim_end_matches('\n')
        .to_owned()
}
