//! Test of the Debian package: installed in a clean root, it runs the README's first command.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

fn skip(reason: &str) {
    assert!(
        std::env::var_os("JUMBO_TEST_STRICT").is_none_or(|value| value != "1"),
        "SKIP package: {reason} (JUMBO_TEST_STRICT=1)"
    );
    let _ = writeln!(std::io::stderr(), "SKIP package: {reason}");
}

fn stdout(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the source of this host's packages and the name of its release.
fn archive() -> Option<(String, String)> {
    let mut targets = Command::new("apt-get");
    targets.args(["indextargets", "--format", "$(REPO_URI) $(CODENAME)"]);
    let targets = String::from_utf8(targets.output().ok()?.stdout).ok()?;
    let release = fs::read_to_string("/etc/os-release").ok()?;
    let codename = release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))?;
    let archive = targets
        .lines()
        .find_map(|line| line.strip_suffix(codename))?;
    Some((archive.trim_end().to_owned(), codename.to_owned()))
}

fn build(workspace: &Path) -> PathBuf {
    let packages = workspace.join("target/debian");
    let _ = fs::remove_dir_all(&packages);
    stdout(Command::new(workspace.join("packaging/deb")).arg("--fast"));
    let mut found = fs::read_dir(packages)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    found
        .find(|path| path.extension().is_some_and(|it| it == "deb"))
        .unwrap()
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_clean_root_with_the_package_runs_the_readme_s_first_command() {
    for (command, option) in [
        ("debootstrap", "--version"),
        ("cargo-deb", "--version"),
        ("jq", "--version"),
        ("unshare", "-V"),
    ] {
        if !Command::new(command)
            .arg(option)
            .output()
            .is_ok_and(|output| output.status.success())
        {
            return skip(&format!("{command} is not installed"));
        }
    }
    if !rustix::process::geteuid().is_root() {
        return skip("needs root");
    }
    let Some((archive, codename)) = archive() else {
        return skip("apt-get names no archive of this release");
    };
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let package = build(&workspace.canonicalize().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.args(["--variant=minbase", "--include=python3-minimal", &codename]);
    stdout(debootstrap.arg(&root).arg(archive));
    fs::copy(package, root.join("jumbo.deb")).unwrap();

    // The mounts end with the namespace.
    let inside = |script: &str| {
        let script = format!(
            "mount -t proc proc \"$0/proc\" && mount --rbind /sys \"$0/sys\" && exec chroot \"$0\" sh -c '{script}' 2>&1"
        );
        stdout(
            Command::new("unshare")
                .args(["--mount", "sh", "-c", &script])
                .arg(&root),
        )
    };
    inside("dpkg --install /jumbo.deb && rm /jumbo.deb");
    let installed = inside("dpkg --listfiles jumbo");
    let folder = concat!("/usr/lib/jumbo/", env!("CARGO_PKG_VERSION"));
    for name in ["", "/$LIB", "/lib/x86_64-linux-gnu", "/lib/i386-linux-gnu"] {
        let file = format!("{folder}{name}/libjumbo_preload.so");
        assert!(
            installed.lines().any(|line| line == file),
            "{file}: {installed}"
        );
    }
    for file in [
        "/usr/bin/jumbo",
        "/usr/lib/systemd/system/jumbo-export.timer",
        "/usr/share/jumbo/grafana/jumbo.json",
        "/usr/share/jumbo/prometheus/jumbo.rules.yml",
        "/usr/share/jumbo/slurm/spank_jumbo.c",
        "/usr/share/man/man1/jumbo-run.1.gz",
        "/usr/share/bash-completion/completions/jumbo",
        "/usr/share/doc/jumbo/docs/run.md",
        "/usr/share/doc/jumbo/licences/index",
        "/usr/share/doc/jumbo/profiles/postgresql.toml",
    ] {
        assert!(
            installed.lines().any(|line| line == file),
            "{file}: {installed}"
        );
    }
    let ran =
        "jumbo run --report -- /usr/bin/python3 -c \"a=[bytes(1000+i%7) for i in range(100000)]\"";
    let report = inside(&format!("cd /tmp && {ran}"));
    assert!(report.contains("exited with 0"), "{report}");
    let full = ran.replace("--report", "--report=full");
    let report = inside(&format!("cd /tmp && {full}"));
    assert!(
        report.contains("exited with 0") && report.contains("advised in 1 process"),
        "{report}"
    );
    // The package uses its own library and carries no copy beside it.
    inside(&format!(
        "test \"$(jumbo run --quiet printenv LD_PRELOAD)\" = \"{folder}/\\$LIB/libjumbo_preload.so\""
    ));
    inside("dpkg --remove jumbo && ! test -e /usr/lib/jumbo");
}
