//! Tests of a release archive made from this build: install without root, on a full disk,
//! uninstall.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

#[path = "../../../tests/support/needs.rs"]
mod needs;

use needs::skip;

fn shell(wrapper: &[&str], folder: &Path, script: &str) -> String {
    let script = format!("set -eux; {script}");
    let words = [wrapper, &["sh", "-c", &script]].concat();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).current_dir(folder);
    for variable in ["LD_PRELOAD", "JUMBO_PRELOAD", "JUMBO_ORDERS", "JUMBO"] {
        command.env_remove(variable);
    }
    let output = command.env("XDG_CONFIG_HOME", folder).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Lays out `archive/` in a folder, as unpacked by users.
fn archive(folder: &Path) {
    // `packaging/files` writes to one folder, and the tests run in parallel.
    static FILES: Mutex<()> = Mutex::new(());
    let _files = FILES.lock();
    let packaging = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging");
    let jumbo = env!("CARGO_BIN_EXE_jumbo");
    let script = format!(
        "{packaging}/files {jumbo}; {packaging}/stage \"$PWD/archive\" {jumbo}; strip archive/bin/jumbo"
    );
    shell(&[], folder, &script);
}

#[test]
fn the_archive_installs_updates_and_goes_without_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().canonicalize().unwrap();
    archive(&folder);
    let install = "archive/install.sh --prefix \"a home\"";
    let jumbo =
        "archive/install.sh --prefix home >&2; home/bin/jumbo run --quiet -- printenv LD_PRELOAD";
    let library = shell(&[], &folder, jumbo);
    let expected = format!(
        "home/lib/jumbo/{}/$LIB/libjumbo_preload.so\n",
        env!("CARGO_PKG_VERSION")
    );
    assert!(library.ends_with(&expected), "{library}");
    let again = format!(
        "old=home/lib/jumbo/{version}/libjumbo_preload.so; ln $old mapped; cp $old same
         archive/install.sh --prefix home >&2; cmp mapped same; test ! mapped -ef $old
         archive/install.sh --prefix home --uninstall >&2; ls",
        version = env!("CARGO_PKG_VERSION")
    );
    assert_eq!(shell(&[], &folder, &again), "archive\nmapped\nsame\n");
    shell(&[], &folder, "unset HOME; ! archive/install.sh");
    let blank = format!("{install} >&2; {install} --uninstall >&2; ls");
    assert_eq!(shell(&[], &folder, &blank), "archive\nmapped\nsame\n");
}

#[test]
fn a_full_disk_leaves_what_was_there() {
    if !rustix::process::geteuid().is_root() {
        return skip("needs root, to mount a small file system");
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().canonicalize().unwrap();
    archive(&folder);
    let sums = "(cd disk/home && find . -type f -exec sha256sum {} + | sort)";
    // Space for 1.5 archives.
    let script = format!(
        "size=$(du -sk archive | cut -f1); mkdir disk; mount -t tmpfs -o size=$((size * 3 / 2))k none disk
         archive/install.sh --prefix disk/home >&2; {sums} >before
         if archive/install.sh --prefix disk/home >&2; then exit 1; fi
         {sums} >after; cmp before after; disk/home/bin/jumbo run --quiet -- true
         archive/install.sh --prefix disk/home --uninstall >&2; ls disk
         head -c $((size * 1024)) /dev/zero >disk/full
         if archive/install.sh --prefix disk/home >&2; then exit 1; fi; ls disk"
    );
    assert_eq!(shell(&["unshare", "--mount"], &folder, &script), "full\n");
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_wheel_has_the_command_and_a_true_record() {
    if needs::command("python3").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let wheel = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/wheel");
    let jumbo = env!("CARGO_BIN_EXE_jumbo");
    // As pip does: checks the digests of RECORD; scripts are executable.
    let script = format!(
        r#"{wheel} . {jumbo} >first; sum=$(sha256sum *.whl); {wheel} . {jumbo} >/dev/null; test "$sum" = "$(sha256sum *.whl)"
        python3 - <<'END'
import base64, csv, glob, hashlib, io, zipfile
wheel = zipfile.ZipFile(glob.glob("*.whl")[0])
[record] = [name for name in wheel.namelist() if name.endswith("/RECORD")]
rows = list(csv.reader(io.StringIO(wheel.read(record).decode())))
assert sorted(row[0] for row in rows) == sorted(wheel.namelist())
for name, digest, size in rows:
    if name != record:
        data = wheel.read(name)
        own = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == ("sha256=" + own, len(data)), name
[script] = [entry for entry in wheel.infolist() if entry.filename.endswith(".data/scripts/jumbo")]
assert script.external_attr >> 16 == 0o100755
open("jumbo", "wb").write(wheel.read(script))
END
        chmod +x jumbo; ./jumbo --version"#
    );
    let expected = format!("jumbo {}\n", env!("CARGO_PKG_VERSION"));
    assert!(shell(&[], folder.path(), &script).ends_with(&expected));
}
