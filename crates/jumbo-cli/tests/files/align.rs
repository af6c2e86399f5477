//! Aligned copies equal their originals.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use crate::support::{Folder, Running, clean, has, json, jumbo, refused};

/// Checks that the copy has the original's symbols and that readelf accepts it.
#[track_caller]
fn assert_alike(original: &str, copy: &str) {
    clean("readelf", &["-lSWn", copy]);
    for flag in ["-a", "-D"] {
        let symbols = |file: &str| clean_or_none(&["nm", flag, file]);
        assert_eq!(symbols(original), symbols(copy), "{original}");
    }
    let id = |file: &str| json(0, &["show", file])["files"][0]["build_id"].clone();
    assert_eq!(id(original), id(copy));
    let text = |page: &serde_json::Value| page["files"][0]["flags"].is_null();
    assert!(text(&json(0, &["show", copy])), "{copy} is misplaced still");
}

/// Output of a program that may complain about a stripped file.
fn clean_or_none(command: &[&str]) -> Vec<u8> {
    let output = std::process::Command::new(command[0])
        .args(&command[1..])
        .output();
    output.unwrap().stdout
}

#[test]
fn the_copy_of_an_interpreter_runs() {
    if !has(
        "the_copy_of_an_interpreter_runs",
        &["python3", "readelf", "nm"],
    ) {
        return;
    }
    let folder = Folder::new();
    // The distribution's python3, whatever PATH has before it.
    let (original, copy) = ("/usr/bin/python3", folder.path("python3"));
    let report = json(0, &["align", original, "-o", &copy]);
    assert!(report["after"].as_u64().unwrap() > 0, "{report}");
    assert_alike(original, &copy);
    let sum = "import json, hashlib, sqlite3; print(json.dumps(sum(range(1000))))";
    assert_eq!(clean(&copy, &["-c", sum]), "499500\n");
    assert_eq!(
        fs::metadata(&copy).unwrap().permissions().mode() & 0o7777,
        0o755
    );
    let again = folder.path("again");
    assert_eq!(
        json(0, &["align", &copy, "-o", &again])["was_aligned"],
        true
    );
    assert!(fs::read(&copy).unwrap() == fs::read(&again).unwrap());
}

#[test]
fn programs_and_libraries_of_every_layout_run() {
    if !has(
        "programs_and_libraries_of_every_layout_run",
        &["gcc", "readelf", "nm"],
    ) {
        return;
    }
    for flags in [
        &["-pie"][..],
        &["-no-pie"],
        &["-static"],
        &["-static-pie"],
        &["-pie", "-s"],
        &["-pie", "-Wl,-z,noseparate-code"],
        &["-no-pie", "-g", "-Wl,-Ttext-segment=0x10001000"],
    ] {
        let folder = Folder::new();
        let original = folder.program("program", flags, false);
        let copy = folder.path("copy");
        let report = json(0, &["align", &original, "-o", &copy]);
        assert!(report["after"].as_u64().unwrap() > 0, "{flags:?}: {report}");
        assert_alike(&original, &copy);
        Running::start(&copy);
    }
    let folder = Folder::new();
    let program = folder.program("program", &[], true);
    let (library, copy) = (folder.path("libbig.so"), folder.path("copy"));
    json(0, &["align", &library, "-o", &copy]);
    assert_alike(&library, &copy);
    fs::rename(copy, library).unwrap();
    Running::start(&program);
}

#[test]
fn nothing_is_overwritten_that_is_not_to_be() {
    if !has("nothing_is_overwritten_that_is_not_to_be", &["gcc"]) {
        return;
    }
    let folder = Folder::new();
    let original = folder.program("program", &[], false);
    let before = fs::read(&original).unwrap();
    let (copy, link) = (folder.path("copy"), folder.path("link"));
    fs::hard_link(&original, &link).unwrap();
    for out in [&original, &link] {
        let message = refused(&["align", &original, "-o", out, "--force"]);
        assert!(
            message.contains("replace the original") && message.contains("hint: "),
            "{message}"
        );
    }
    fs::write(&copy, "other").unwrap();
    let message = refused(&["align", &original, "-o", &copy]);
    assert!(
        message.contains("exists") && message.contains("--force"),
        "{message}"
    );
    assert_eq!(fs::read_to_string(&copy).unwrap(), "other");
    fs::set_permissions(&original, fs::Permissions::from_mode(0o4751)).unwrap();
    let report = json(0, &["align", &original, "-o", &copy, "--force"]);
    assert!(
        report["notes"].to_string().contains("set-user-ID"),
        "{report}"
    );
    assert_eq!(
        fs::metadata(&copy).unwrap().permissions().mode() & 0o7777,
        0o751
    );
    assert!(fs::read(&original).unwrap() == before);
    let message = refused(&["align", &copy, "-o", &folder.path("no/where")]);
    assert!(message.contains("cannot write"), "{message}");
    let message = refused(&["align", &folder.path("main.c"), "-o", &link, "--force"]);
    assert!(message.contains("no ELF"), "{message}");
    let message = refused(&["align", "/bin/true", "-o", &link, "--force"]);
    assert!(
        message.contains("smaller than a huge page") && !message.contains("hint: "),
        "{message}"
    );
    let mut narrow = before;
    narrow[4] = 1;
    fs::write(folder.path("narrow"), narrow).unwrap();
    let message = refused(&["align", &folder.path("narrow"), "-o", &folder.path("out")]);
    assert!(
        message.contains("32 bits") || message.contains("no ELF"),
        "{message}"
    );
    assert!(jumbo(&["align", &original]).status.code() == Some(2));
    let odd = [
        "-no-pie",
        "-Wl,-Ttext-segment=0x10001000,-z,noseparate-code",
    ];
    let message = refused(&[
        "align",
        &folder.program("odd", &odd, false),
        "-o",
        &folder.path("out"),
    ]);
    assert!(
        message.contains("header of the file") && message.contains("hint: "),
        "{message}"
    );
}
