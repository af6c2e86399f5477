//! The module of Python, from the wheel of this build in a fresh environment.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::path::Path;
use std::process::Command;

#[path = "../../../tests/support/needs.rs"]
mod needs;

fn output(command: &mut Command) -> Result<String, String> {
    // A program under the tests has no library of theirs.
    let output = command.env_remove("LD_PRELOAD").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(format!("{command:?}: {}", text(&output.stderr))),
    }
}

#[test]
#[cfg_attr(
    not(feature = "full"),
    ignore = "takes long, and a network: --features full"
)]
fn the_wheel_passes_the_tests_of_the_module() {
    let Some(python) = needs::command("python3") else {
        return;
    };
    let is_new = "import sys; sys.exit(sys.version_info < (3, 11))";
    if output(Command::new(&python).args(["-c", is_new])).is_err() {
        return needs::skip("needs Python 3.11");
    }
    let folder = tempfile::tempdir().unwrap();
    let environment = folder.path().join("environment");
    if let Err(why) = output(Command::new(&python).args(["-m", "venv"]).arg(&environment)) {
        return needs::skip(&format!("cannot make an environment of Python: {why}"));
    }
    let pip = |arguments: &[&str]| {
        let mut command = Command::new(environment.join("bin/pip"));
        output(
            command
                .args(["install", "--quiet", "--disable-pip-version-check"])
                .args(arguments),
        )
    };
    if let Err(why) = pip(&["numpy"]) {
        return needs::skip(&format!("cannot install NumPy: {why}"));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let packaging = |script: &str| Command::new(root.join("packaging").join(script));
    let module = output(&mut packaging("module")).unwrap();
    let mut wheel = packaging("wheel");
    wheel.arg(folder.path()).arg(env!("CARGO_BIN_EXE_jumbo"));
    let wheel = output(wheel.arg(module.trim())).unwrap();
    pip(&["--no-index", wheel.trim()]).unwrap();
    let version = output(Command::new(environment.join("bin/jumbo")).arg("--version")).unwrap();
    assert_eq!(version, format!("jumbo {}\n", env!("CARGO_PKG_VERSION")));
    let mut tests = Command::new("timeout");
    tests
        .args(["--verbose", "300"])
        .arg(environment.join("bin/python"));
    output(tests.arg(root.join("crates/jumbo-python/tests/check.py"))).unwrap();
}
