//! Requirements of tests on the host, shared by the test targets.

use std::io::Write as _;
use std::path::PathBuf;

/// Reports that the calling test cannot run here. With `JUMBO_TEST_STRICT=1` that is a failure.
#[track_caller]
pub(crate) fn skip(reason: &str) {
    let place = std::panic::Location::caller();
    // libtest names the thread of a test after the test, unless it runs tests one by one.
    let name = match std::thread::current().name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => place.to_string(),
    };
    assert!(
        std::env::var_os("JUMBO_TEST_STRICT").is_none_or(|value| value != "1"),
        "SKIP {name}: {reason} (JUMBO_TEST_STRICT=1)"
    );
    // Not eprintln!, which libtest captures when the test passes.
    let _ = writeln!(std::io::stderr(), "SKIP {name}: {reason}");
}

/// Returns the path of an installed command; `None`, and a reported skip, without one.
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
