//! Requirements of tests on the host, and the lock on its global state.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Reports that the calling test cannot run here. With `JUMBO_TEST_STRICT=1` that is a failure.
#[track_caller]
pub(crate) fn skip(reason: &str) {
    let place = std::panic::Location::caller();
    assert!(
        std::env::var_os("JUMBO_TEST_STRICT").is_none_or(|value| value != "1"),
        "SKIP {place}: {reason} (JUMBO_TEST_STRICT=1)"
    );
    // Not eprintln!, which libtest captures when the test passes.
    let _ = writeln!(std::io::stderr(), "SKIP {place}: {reason}");
}

/// Exclusive lock on the host's global state, across all test processes.
pub(crate) struct Alone(#[expect(dead_code, reason = "held")] File);

impl Alone {
    pub(crate) fn new() -> Self {
        let file = std::env::temp_dir().join("jumbo-e2e.lock");
        // Opened read-only if another user created it.
        let file = File::create(&file).or_else(|_| File::open(&file)).unwrap();
        file.lock().unwrap();
        Self(file)
    }
}

/// Kernel knobs, restored on drop in reverse order, after a panic, too.
pub(crate) struct Knobs(Vec<(PathBuf, String)>);

impl Knobs {
    pub(crate) fn new() -> Self {
        Self(Vec::new())
    }

    /// Sets a knob; returns false if that fails.
    pub(crate) fn set(&mut self, path: impl AsRef<Path>, value: impl ToString) -> bool {
        let path = path.as_ref();
        let Ok(before) = fs::read_to_string(path) else {
            return false;
        };
        if fs::write(path, value.to_string()).is_err() {
            return false;
        }
        if self.0.iter().all(|(known, _)| known != path) {
            self.0.push((path.to_owned(), chosen(&before).to_owned()));
        }
        true
    }
}

/// Returns the `[chosen]` word of a knob that lists its values; otherwise the whole text.
fn chosen(text: &str) -> &str {
    text.split(['[', ']']).nth(1).unwrap_or(text.trim())
}

impl Drop for Knobs {
    fn drop(&mut self) {
        for (path, before) in self.0.drain(..).rev() {
            let put_back = fs::write(&path, before);
            if !std::thread::panicking() {
                put_back.unwrap();
            }
        }
    }
}

/// Folder of the kernel's pool of 2 MiB pages.
pub(crate) const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Time limit for other programs to free their pages.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Reports whether the kernel's pool is or becomes empty: a killed program takes a moment to exit.
pub(crate) fn is_unused() -> bool {
    let start = Instant::now();
    while kernel_counters() != [0; 4] {
        if start.elapsed() > TIMEOUT {
            say_who_uses_it();
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Prints the kernel's counters, and the processes that map hugetlb pages.
fn say_who_uses_it() {
    let mut err = std::io::stderr();
    let _ = writeln!(
        err,
        "[total, free, reserved, surplus]: {:?}",
        kernel_counters()
    );
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let status = fs::read_to_string(process.path().join("status")).unwrap_or_default();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        if let Some(mapped) = field("HugetlbPages:")
            && mapped.trim() != "0 kB"
        {
            let (pid, name) = (process.file_name(), field("Name:").unwrap_or_default());
            let _ = writeln!(err, "{}{name}: {}", pid.display(), mapped.trim());
        }
    }
}

/// Returns (total, free, reserved, surplus) of the kernel's pool of 2 MiB pages.
pub(crate) fn kernel_counters() -> [u64; 4] {
    ["nr", "free", "resv", "surplus"].map(|name| {
        let text = fs::read_to_string(format!("{POOL}/{name}_hugepages")).unwrap();
        text.trim().parse().unwrap()
    })
}
