//! A command installed without its library: the embedded copy, and the folder that it is written
//! to.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{jumbo, library, output, stderr};

/// Installs `ROOT/bin/jumbo` alone.
fn install(root: &Path) -> PathBuf {
    let command = root.join("bin/jumbo");
    fs::create_dir(root.join("bin")).unwrap();
    let built = env!("CARGO_BIN_EXE_jumbo");
    if fs::hard_link(built, &command).is_err() {
        // Not fs::copy: what another test starts just then has the file open for writing, too.
        let copied = Command::new("cp")
            .args([built.as_ref(), &*command])
            .status();
        assert!(copied.unwrap().success());
    }
    command
}

/// Runs `program` from another folder, with a cache in `root`.
fn run(root: &Path, program: &[&str]) -> Command {
    let mut command = Command::new(root.join("bin/jumbo"));
    for (name, _) in jumbo().get_envs() {
        command.env_remove(name);
    }
    command.env("XDG_CACHE_HOME", root.join("cache"));
    command.args(["run", "--quiet", "--"]).args(program);
    command.current_dir("/");
    command
}

fn preloaded(root: &Path) -> PathBuf {
    let output = output(&mut run(root, &["printenv", "LD_PRELOAD"]));
    assert!(output.status.success(), "{output:?}");
    let path = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim_end());
    assert!(
        fs::read(&path).unwrap() == fs::read(library()).unwrap(),
        "{}",
        path.display()
    );
    path
}

#[test]
fn a_command_alone_puts_its_library_down_once() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    install(&root);
    let path = preloaded(&root);
    assert!(path.starts_with(root.join("lib/jumbo")), "{path:?}");
    let made = || fs::metadata(&path).unwrap().modified().unwrap();
    let first = made();
    assert_eq!(preloaded(&root), path);
    assert_eq!(made(), first);
    // Stands for another build of this version, or an incomplete file after a crash.
    fs::write(&path, "").unwrap();
    assert_eq!(preloaded(&root), path);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    // An installed library takes precedence.
    fs::copy(library(), root.join("bin/libjumbo_preload.so")).unwrap();
    assert_eq!(preloaded(&root), root.join("bin/libjumbo_preload.so"));
    // An installed library of another version does not.
    fs::write(root.join("bin/libjumbo_preload.so"), "").unwrap();
    assert_eq!(preloaded(&root), path);
}

#[test]
fn where_it_cannot_be_beside_the_command_it_is_in_the_cache_and_else_all_places_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let command = install(&root);
    // Root may write to any folder, but not below a file.
    fs::write(root.join("lib"), "").unwrap();
    let path = preloaded(&root);
    assert!(path.starts_with(root.join("cache/jumbo")), "{path:?}");
    fs::remove_dir_all(root.join("cache")).unwrap();
    fs::write(root.join("cache"), "").unwrap();
    let failed = output(&mut run(&root, &["true"]));
    assert_eq!(failed.status.code(), Some(125), "{failed:?}");
    let message = stderr(&failed);
    for part in [
        "bin",
        "bin/../lib/jumbo",
        "bin/../lib",
        "lib/jumbo",
        "cache/jumbo",
        "hint:",
    ] {
        let place = match part {
            "hint:" => part.to_owned(),
            part => format!("\n  {}/", root.join(part).display()),
        };
        assert!(message.contains(&place), "{place}: {message}");
    }
    assert!(command.exists());
}
