//! A program of libhugetlbfs, built with this header and with Debian's, on this library and on
//! Debian's.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

#[expect(dead_code, reason = "what the tests of the pool need besides")]
#[path = "../../jumbo/tests/pool/host.rs"]
mod host;
#[path = "../../../tests/support/needs.rs"]
mod needs;

use needs::skip;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// The library, laid out as for packages.
static INSTALLED: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libhugetlbfs");
    let script = format!("{CRATE}/../../packaging/libhugetlbfs");
    output(Command::new(script).arg(&folder));
    folder
});

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Builds the program with a header and a library.
fn build(name: &str, include: &Path, library: &Path) -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut command = Command::new(needs::command("cc")?);
    command
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-I"])
        .arg(include);
    command.arg("-o").arg(&program);
    command.arg(format!("{CRATE}/tests/programs/interface.c"));
    output(command.arg("-L").arg(library).arg("-lhugetlbfs"));
    Some(program)
}

/// Runs it, in a mount namespace with hugetlbfs if `with` has `mount`.
fn run(program: &Path, library: &Path, with: &str, variables: &[(&str, &str)]) -> String {
    let (mut command, mount) = match with.contains("mount") {
        true => (
            Command::new("unshare"),
            "mkdir -p \"$MNT\"; mount -t hugetlbfs none \"$MNT\";",
        ),
        false => (Command::new("env"), ""),
    };
    if !mount.is_empty() {
        command.arg("--mount");
    }
    let script = format!(
        "set -e; {mount} LD_LIBRARY_PATH=$LIBRARY exec {} {with}",
        program.display()
    );
    command.args(["sh", "-c", &script]).env("LIBRARY", library);
    command.env("MNT", Path::new(env!("CARGO_TARGET_TMPDIR")).join("mount"));
    output(command.envs(variables.iter().copied()))
}

/// Lets the kernel's pool grow; false after a reported skip.
fn with_pages(knobs: &mut host::Knobs) -> bool {
    let is_set = knobs.set(Path::new(host::POOL).join("nr_overcommit_hugepages"), 64);
    if !is_set {
        skip("cannot let the kernel's pool of 2M pages grow");
    }
    is_set
}

#[test]
fn its_own_header_and_library() {
    let library = &*INSTALLED;
    let Some(program) = build("own", &library.join("include"), library) else {
        return;
    };
    let _alone = host::Alone::new();
    let printed = run(&program, library, "", &[]);
    assert!(
        printed.ends_with("none, and smaller ones\na segment of 100 bytes\n"),
        "{printed}"
    );
    let mut knobs = host::Knobs::new();
    if !with_pages(&mut knobs) {
        return;
    }
    let printed = run(&program, library, "pages", &[("HUGETLB_SHM", "yes")]);
    assert!(printed.contains("pages of the pool\n"), "{printed}");
    assert!(
        printed.contains("a segment of 2097152 bytes\n"),
        "{printed}"
    );
    if rustix::process::geteuid().is_root() {
        // libhugetlbfs does not find such a mount.
        let folder = format!("{}/huge pages", env!("CARGO_TARGET_TMPDIR"));
        let variables = [("MNT", folder.as_str()), ("HUGETLB_PATH", &folder)];
        let printed = run(&program, library, "mount,pages", &variables);
        assert!(
            printed.contains("/huge pages\npages of the pool\n"),
            "{printed}"
        );
    }
    let no_reserve = [("HUGETLB_NO_RESERVE", "yes")];
    assert!(run(&program, library, "pages", &no_reserve).contains("pages of the pool"));
}

/// Downloads Debian's packages and unpacks them.
fn debian(folder: &Path) -> Option<(PathBuf, PathBuf)> {
    needs::command("apt-get")?;
    let names = ["libhugetlbfs-dev", "libhugetlbfs0"];
    let got = Command::new("apt-get")
        .arg("download")
        .args(names)
        .current_dir(folder)
        .output();
    if !got.is_ok_and(|got| got.status.success()) {
        skip("apt-get cannot download libhugetlbfs-dev");
        return None;
    }
    let unpack = "for package in *.deb; do dpkg-deb -x $package .; done; ls -d usr/lib/*-linux-gnu";
    let library = output(Command::new("sh").args(["-ec", unpack]).current_dir(folder));
    Some((folder.join("usr/include"), folder.join(library.trim())))
}

#[test]
#[cfg_attr(
    not(feature = "full"),
    ignore = "takes long, or a network: --features full"
)]
fn a_program_of_debians_library_runs_with_only_the_path_changed() {
    let folder = tempfile::tempdir().unwrap();
    let Some((include, theirs)) = debian(folder.path()) else {
        return;
    };
    let Some(program) = build("debian", &include, &theirs) else {
        return;
    };
    let ours = &*INSTALLED;
    // What its test suite and no header declares is not of the interface.
    let private = ["__tp_kernel_default_hugepage_size_reset", "cachecolor"];
    let interface = symbols(&theirs.join("libhugetlbfs.so.0"));
    let interface: Vec<_> = interface
        .into_iter()
        .filter(|symbol| !private.iter().any(|name| symbol.starts_with(name)))
        .collect();
    assert_eq!(symbols(&ours.join("libhugetlbfs.so.0")), interface);

    let _alone = host::Alone::new();
    let mut knobs = host::Knobs::new();
    if !rustix::process::geteuid().is_root() || !with_pages(&mut knobs) {
        return skip("needs root, for pages and a mount");
    }
    for variables in [&[][..], &[("HUGETLB_SHM", "yes")]] {
        let printed = run(&program, ours, "mount,pages", variables);
        assert_eq!(printed, run(&program, &theirs, "mount,pages", variables));
        assert!(printed.contains("pages of the pool"), "{printed}");
    }
}

/// Returns the symbols that a library defines, with their versions.
fn symbols(library: &Path) -> Vec<String> {
    let mut command = Command::new("nm");
    command.args(["--dynamic", "--defined-only"]).arg(library);
    let lines = output(&mut command);
    lines
        .lines()
        .filter_map(|line| line.split(' ').nth(2))
        .map(str::to_owned)
        .collect()
}

#[test]
fn each_function_has_a_row_in_the_document() {
    if needs::command("nm").is_none() {
        return;
    }
    let document = include_str!("../../../docs/libhugetlbfs.md");
    let symbols = symbols(&INSTALLED.join("libhugetlbfs.so.0"));
    assert_eq!(symbols.len(), 16, "{symbols:?}");
    for name in symbols
        .iter()
        .map(|symbol| symbol.split('@').next().unwrap())
    {
        let is_version = name.contains("_1.") || name.contains("_2.");
        assert!(
            is_version || document.contains(&format!("`{name}`")),
            "{name}"
        );
    }
}

#[test]
fn a_variable_without_effect_is_named() {
    let library = &*INSTALLED;
    let Some(program) = build("variables", &library.join("include"), library) else {
        return;
    };
    let mut command = Command::new(program);
    command
        .env("LD_LIBRARY_PATH", library)
        .env("HUGETLB_MORECORE", "yes");
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr.contains("HUGETLB_MORECORE=yes has no effect"),
        "{stderr}"
    );
}
