//! Requirements of tests on the host, and the lock on its global state.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::wait;

pub(crate) use super::needs::{command, skip};

/// Reports whether the test runs as root; otherwise reports a skip.
#[track_caller]
pub(crate) fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip("needs root");
    }
    root
}

/// Locks the host's state while a test measures huge pages; `None`, and a reported skip, if advice
/// has no effect. Any number of tests may hold the lock.
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

/// Reports whether programs get THP without advice: then a share proves nothing about jumbo.
pub(crate) fn thp_is_always() -> bool {
    fs::read_to_string(THP_ENABLED).is_ok_and(|text| text.contains("[always]"))
}

/// Switch of THP.
pub(crate) const THP_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Lock on the host's global state, shared by all tests of all processes.
pub(crate) struct Held {
    _lock: File,
}

impl Held {
    fn new(lock: fn(&File) -> std::io::Result<()>) -> Self {
        let file = std::env::temp_dir().join("jumbo-e2e.lock");
        // Opened read-only if another user created it.
        let file = File::create(&file).or_else(|_| File::open(&file)).unwrap();
        lock(&file).unwrap();
        let held = Self { _lock: file };
        held.restore();
        held
    }

    /// File with the path and the previous value of the knob that the exclusive holder has set.
    fn note() -> PathBuf {
        std::env::temp_dir().join("jumbo-e2e.knob")
    }

    /// Restores the knob of a killed test: no other test can have set one under the lock.
    fn restore(&self) {
        let note = fs::read_to_string(Self::note()).unwrap_or_default();
        if let Some((path, before)) = note.split_once('\n') {
            fs::write(path, before).unwrap();
            // Several holders of the shared lock may race here.
            let _ = fs::remove_file(Self::note());
        }
    }
}

/// Removes a cgroup whose processes have ended. A reaped process may stay in it for a moment.
pub(crate) fn remove_group(folder: &Path) {
    let start = Instant::now();
    while matches!(fs::remove_dir(folder), Err(error) if error.kind() == ErrorKind::ResourceBusy)
        && start.elapsed() < wait::TIMEOUT
    {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A changed kernel knob, restored on drop, after a panic, too. The next test restores it for a
/// killed one.
pub(crate) struct Knob {
    alone: Held,
}

impl Knob {
    /// Sets a knob under the exclusive lock; `None`, and a reported skip, if that fails.
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

/// Returns the `[chosen]` word of a knob that lists its values; otherwise the whole text.
fn chosen(text: &str) -> String {
    let inner = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    inner
        .map_or(text, |(word, _)| word)
        .trim_end_matches('\n')
        .to_owned()
}
