//! Tests of `jumbo cdi` in a temporary folder, and of the drop-in of `jumbo unit`.
//!
//! `tests/containers/cdi` runs containers.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The command with the configuration of `folder` and a restrictive umask.
fn jumbo(folder: &Path, words: &str) -> Output {
    let script = format!("umask 077; exec {} {words}", env!("CARGO_BIN_EXE_jumbo"));
    let mut command = Command::new("sh");
    for variable in [
        "LD_PRELOAD",
        "JUMBO_PRELOAD",
        "JUMBO_ORDERS",
        "GLIBC_TUNABLES",
        "JUMBO",
    ] {
        command.env_remove(variable);
    }
    let command = command.args(["-c", &script]).current_dir(folder);
    command
        .env("XDG_CONFIG_HOME", folder.join("config"))
        .output()
        .unwrap()
}

fn stdout(folder: &Path, words: &str) -> String {
    let output = jumbo(folder, words);
    assert!(output.status.success(), "{words}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(folder: &Path, words: &str) -> Value {
    serde_json::from_str(&stdout(folder, words)).unwrap()
}

/// Returns all files below `folder`, each with its inode, mode and time.
fn listing(folder: &Path) -> Vec<(PathBuf, u64, u32, i64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let of = fs::symlink_metadata(&path).unwrap();
        if of.is_dir() {
            found.extend(listing(&path));
        }
        let time = if of.is_dir() { 0 } else { of.mtime_nsec() };
        found.push((path, of.ino(), of.mode(), time));
    }
    found.sort();
    found
}

fn names(folder: &Path) -> Vec<PathBuf> {
    listing(folder).into_iter().map(|entry| entry.0).collect()
}

#[test]
fn what_generate_makes_is_shown_and_removed_again() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let profiles = folder.join("config/jumbo/profiles");
    fs::create_dir_all(&profiles).unwrap();
    fs::write(profiles.join("mine.toml"), "max-waste = 2\n").unwrap();
    // A program named like a profile is not a profile.
    fs::write(folder.join("node"), "\u{7f}ELF").unwrap();
    for there in ["", "there/cdi"] {
        fs::create_dir_all(folder.join(there)).unwrap();
        let before = names(folder);
        let dir = if there.is_empty() { "new/cdi" } else { there };
        let planned = json(folder, &format!("cdi generate --dir {dir} --dry-run"));
        assert_eq!(names(folder), before);

        let printed = stdout(folder, &format!("cdi generate --dir {dir}"));
        assert!(
            printed.contains("written") && printed.contains("--device jumbo.dev/memory=default")
        );
        let file = folder.join(dir).join("jumbo.json");
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), planned);
        assert!(!text.contains("LD_PRELOAD"), "{text}");
        let made = listing(folder);
        assert!(stdout(folder, &format!("cdi generate --dir {dir}")).contains("as it was"));
        assert_eq!(listing(folder), made);

        assert_eq!(planned["cdiVersion"], "0.5.0");
        let devices = planned["devices"].as_array().unwrap();
        let device = |name| {
            devices
                .iter()
                .find(|device| device["name"] == name)
                .unwrap()
        };
        let orders = |name| device(name)["containerEdits"]["env"][0].as_str().unwrap();
        for (name, order) in [
            ("default", "max_waste=5,"),
            ("mine", "max_waste=2,"),
            ("node", "text=file,"),
            ("node", "container=1,"),
            ("postgresql", "pmd="),
        ] {
            assert!(orders(name).contains(order), "{name}: {}", orders(name));
        }
        let mounts = planned["containerEdits"]["mounts"].as_array().unwrap();
        let host = |at: usize| Path::new(mounts[at]["hostPath"].as_str().unwrap());
        // Users of containers must be able to read them, whatever the umask.
        for path in [
            &file,
            host(0),
            host(1),
            &host(0).join("lib64/libjumbo_preload.so"),
        ] {
            assert_eq!(
                fs::metadata(path).unwrap().mode() & 0o444,
                0o444,
                "{path:?}"
            );
        }
        let library = format!("/usr/lib/jumbo/{VERSION}/$LIB/libjumbo_preload.so\n");
        assert_eq!(fs::read_to_string(host(1)).unwrap(), library);

        let show = || json(folder, &format!("cdi show --json --dir {dir}"));
        let shown = show();
        assert_eq!(
            (&shown["version"], &shown["is_current"]),
            (&VERSION.into(), &true.into())
        );
        assert_eq!(shown["mounts"][1]["is_there"], true);
        let variables = &shown["devices"]["jumbo.dev/memory=mine"];
        assert_eq!(variables.as_object().unwrap().len(), 1, "{variables}");
        let own = "--preload /opt/own.so";
        let mounted = fs::metadata(host(1)).unwrap().ino();
        let printed = stdout(folder, &format!("cdi generate --dir {dir} {own}"));
        assert!(printed.contains("in containers that run too"), "{printed}");
        // Running containers have mounted the inode, not the path.
        assert_eq!(fs::metadata(host(1)).unwrap().ino(), mounted);
        let other = jumbo(folder, &format!("cdi generate --dir {dir} --library l2"));
        let other = String::from_utf8(other.stderr).unwrap();
        assert!(other.contains("hint: jumbo cdi remove"), "{other}");
        assert_eq!(
            fs::read_to_string(host(1)).unwrap(),
            format!("/opt/own.so\n{library}")
        );
        fs::remove_file(host(0).join("libjumbo_preload.so")).unwrap();
        fs::remove_file(host(1)).unwrap();
        let shown = show();
        assert_eq!(
            (&shown["is_current"], &shown["mounts"][1]["is_there"]),
            (&false.into(), &false.into())
        );
        let printed = stdout(folder, &format!("cdi show --dir {dir}"));
        assert!(
            printed.contains("missing") && printed.contains("hint: jumbo cdi generate"),
            "{printed}"
        );

        stdout(folder, &format!("cdi generate --dir {dir}"));
        // The folder of an earlier version stays for running containers.
        let old = host(0).with_file_name("0.0.1");
        assert!(
            Command::new("cp")
                .arg("-a")
                .args([host(0), &old])
                .status()
                .unwrap()
                .success()
        );
        let record = host(0).with_file_name("folders");
        let noted = fs::read_to_string(&record).unwrap();
        fs::write(&record, format!("{}\n{noted}", old.display())).unwrap();
        // A container that was made with a device looks its name up again.
        let engines = folder.join("engines");
        fs::create_dir(&engines).unwrap();
        let podman = engines.join("podman");
        let device =
            r#"[{"Config": {"CreateCommand": ["--device", "jumbo.dev/memory=node"]}}, {}]"#;
        let script = format!("#!/bin/sh\n[ $1 = ps ] && echo a b || echo '{device}'\n");
        fs::write(&podman, script).unwrap();
        fs::set_permissions(&podman, fs::Permissions::from_mode(0o755)).unwrap();
        let remove = |options: &str| {
            let path = format!("PATH={}:$PATH", engines.display());
            let words = format!("cdi remove --dir {dir} {options}");
            let script = format!("{path} exec {} {words}", env!("CARGO_BIN_EXE_jumbo"));
            let shell = Command::new("sh")
                .args(["-c", &script])
                .current_dir(folder)
                .output();
            shell.unwrap()
        };
        let refused = remove("");
        let error = String::from_utf8(refused.stderr).unwrap();
        assert!(
            error.contains("podman has 1 container") && error.contains("hint: --keep-names"),
            "{error}"
        );
        assert!(remove("--keep-names").status.success());
        let left: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(left["devices"].as_array().unwrap().len(), devices.len());
        assert_eq!(left["containerEdits"]["mounts"], Value::Array(Vec::new()));
        let shown = jumbo(folder, &format!("cdi show --dir {dir}"));
        let shown = String::from_utf8(shown.stderr).unwrap();
        assert!(shown.contains("only the names"), "{shown}");
        stdout(folder, &format!("cdi generate --dir {dir}"));
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
        assert!(remove("--force").status.success());
        fs::remove_dir_all(&engines).unwrap();
        // The folder of the names may be of others by now.
        let own = folder.join(dir).parent().unwrap().to_owned();
        for left in [&folder.join(dir), &own]
            .into_iter()
            .filter(|left| !before.contains(left))
        {
            fs::remove_dir(left).unwrap();
        }
        assert_eq!(names(folder), before);
        stdout(folder, &format!("cdi remove --dir {dir}"));
        assert_eq!(
            jumbo(folder, &format!("cdi show --dir {dir}"))
                .status
                .code(),
            Some(1)
        );
    }
}

#[test]
fn files_of_others_stay_and_a_failure_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::create_dir_all(folder.join("cdi")).unwrap();
    fs::create_dir_all(folder.join("lib").join(VERSION)).unwrap();
    fs::write(folder.join("file"), "").unwrap();
    fs::write(
        folder.join("cdi/jumbo.json"),
        r#"{"cdiVersion": "0.5.0", "kind": "x.y/z"}"#,
    )
    .unwrap();
    let before = listing(folder);
    for (words, printed) in [
        ("generate --dir cdi", "move it away"),
        ("remove --dir cdi", "move it away"),
        ("show --dir cdi", "move it away"),
        ("generate --dir new --library lib", "files of others"),
        ("generate --dir file/cdi --library new", "Not a directory"),
        ("generate --dir new --preload 'a b'", "separates names"),
    ] {
        let output = jumbo(folder, &format!("cdi {words}"));
        let code = if printed == "separates names" { 2 } else { 1 };
        assert_eq!(output.status.code(), Some(code), "{words}: {output:?}");
        assert!(
            String::from_utf8(output.stderr).unwrap().contains(printed),
            "{words}"
        );
        assert_eq!(listing(folder), before, "{words}");
    }
}

#[test]
fn no_file_is_written_through_a_link_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("victim"), "text").unwrap();
    let version = folder.join("open/jumbo-cdi/0.0.1");
    fs::create_dir_all(&version).unwrap();
    std::os::unix::fs::symlink(folder.join("victim"), version.join("ld.so.preload")).unwrap();
    let noted = version.to_str().unwrap();
    fs::write(folder.join("open/jumbo-cdi/folders"), noted).unwrap();
    fs::set_permissions(folder.join("open"), fs::Permissions::from_mode(0o777)).unwrap();
    let before = listing(folder);
    let output = jumbo(folder, "cdi generate --dir open/cdi");
    let printed = String::from_utf8(output.stderr).unwrap();
    assert!(printed.contains("any user may write to"), "{printed}");
    assert_eq!(listing(folder), before);
    assert_eq!(fs::read_to_string(folder.join("victim")).unwrap(), "text");
}

#[test]
fn systemd_takes_the_drop_in() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::create_dir(folder.join("own.service.d")).unwrap();
    fs::write(
        folder.join("own.service"),
        "[Service]\nExecStart=/bin/true\n",
    )
    .unwrap();
    fs::write(folder.join("own.toml"), "max-waste = 7\n").unwrap();
    let text = stdout(folder, "unit own --profile ./own.toml");
    for part in [
        "own.service.d/jumbo.conf",
        "\"LD_PRELOAD=/",
        "libjumbo_preload.so\"",
        "max_waste=7,",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(jumbo(folder, "unit 'a b'").status.code(), Some(2));
    let verify = |text: &str| {
        fs::write(folder.join("own.service.d/jumbo.conf"), text).unwrap();
        let mut systemd = Command::new("systemd-analyze");
        systemd
            .arg("verify")
            .arg(folder.join("own.service"))
            .output()
    };
    let Ok(refused) = verify("[Service]\nNo=such\n") else {
        let strict = std::env::var_os("JUMBO_TEST_STRICT").is_some_and(|value| value == "1");
        assert!(
            !strict,
            "SKIP systemd_takes_the_drop_in: systemd-analyze is not installed (JUMBO_TEST_STRICT=1)"
        );
        let skip = "SKIP systemd_takes_the_drop_in: systemd-analyze is not installed";
        return writeln!(std::io::stderr(), "{skip}").unwrap();
    };
    assert!(
        String::from_utf8(refused.stderr)
            .unwrap()
            .contains("jumbo.conf")
    );
    let taken = verify(&text).unwrap();
    let printed = String::from_utf8(taken.stderr).unwrap();
    assert!(
        taken.status.success() && !printed.contains("jumbo.conf"),
        "{printed}"
    );
}
