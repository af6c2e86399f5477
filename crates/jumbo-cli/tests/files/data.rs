//! Data files: what a program maps after `jumbo files prime`, and what `jumbo files show` says.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use crate::support::{Folder, has, has_huge_folios, json, jumbo, refused};

const MIB: u64 = 1 << 20;

/// Writes a file of that size in base pages of the page cache, on disk.
fn small_folios(path: &str, bytes: u64) {
    let page: Vec<u8> = (0..4096_u32).map(|at| at.to_le_bytes()[0]).collect();
    let file = File::create(path).unwrap();
    for at in 0..bytes / 4096 {
        std::os::unix::fs::FileExt::write_all_at(&file, &page, at * 4096).unwrap();
    }
    file.sync_all().unwrap();
    drop_cache(path);
    // With MADV_RANDOM the kernel reads page by page.
    let reader = File::open(path).unwrap();
    rustix::fs::fadvise(&reader, 0, None, rustix::fs::Advice::Random).unwrap();
    let mut page = vec![0; 4096];
    for at in 0..bytes / 4096 {
        std::os::unix::fs::FileExt::read_exact_at(&reader, &mut page, at * 4096).unwrap();
    }
}

fn drop_cache(path: &str) {
    let file = File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// KiB of the file that a program which maps and reads it has by PMD; calls `then` meanwhile.
fn mapped_by_pmd(folder: &Folder, file: &str, then: impl FnOnce(&str)) -> u64 {
    let reader = folder.path("reader");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/programs/reader.c");
    crate::support::clean("gcc", &["-o", &reader, source]);
    let mut child = Command::new(&reader)
        .arg(file)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let pid = child.id().to_string();
    let page = json(0, &["show", &pid]);
    then(&pid);
    drop(child.stdin.take());
    child.wait().unwrap();
    let files = page["processes"][0]["files"].as_array().unwrap().clone();
    let found = files.iter().find(|it| it["path"] == *file).unwrap();
    assert_eq!(found["content"], "data");
    found["huge"].as_u64().unwrap() >> 10
}

#[test]
fn a_primed_file_is_huge_in_a_program_that_maps_it() {
    let test = "a_primed_file_is_huge_in_a_program_that_maps_it";
    if !has(test, &["gcc"]) || !has_huge_folios(test) {
        return;
    }
    let folder = Folder::new();
    let file = folder.path("weights");
    small_folios(&file, 9 * MIB);
    let before = fs::read(&file).unwrap();
    drop_cache(&file);
    small_folios(&file, 9 * MIB);
    let page = json(0, &["show", &file]);
    let shown = &page["data"][0];
    assert_eq!(
        (&shown["size"], &shown["whole"]),
        (&(9 * MIB).into(), &4.into())
    );
    assert_eq!(shown["cached"]["small"], 4, "{page}");
    assert!(
        shown["why_not"][0]
            .as_str()
            .unwrap()
            .contains("files prime"),
        "{page}"
    );
    if rustix::process::geteuid().is_root() {
        assert_eq!(shown["folios"]["4096"], 8 * MIB, "{page}");
    }
    assert_eq!(mapped_by_pmd(&folder, &file, |_| ()), 0);
    let page = json(0, &["prime", &file]);
    assert_eq!(
        (&page["files"][0]["huge"], &page["files"][0]["content"]),
        (&4.into(), &"data".into())
    );
    assert_eq!(mapped_by_pmd(&folder, &file, |_| ()), 8 << 10);
    let page = json(0, &["show", &file]);
    assert_eq!(page["data"][0]["cached"]["huge"], 4, "{page}");
    assert_eq!(
        page["data"][0]["why_not"].as_array().unwrap().len(),
        0,
        "{page}"
    );
    assert_eq!(fs::read(&file).unwrap(), before);
}

#[test]
fn what_a_program_maps_stays_and_what_is_not_on_disk_does() {
    let test = "what_a_program_maps_stays_and_what_is_not_on_disk_does";
    if !has(test, &["gcc"]) || !has_huge_folios(test) {
        return;
    }
    let folder = Folder::new();
    let file = folder.path("weights");
    small_folios(&file, 8 * MIB);
    mapped_by_pmd(&folder, &file, |pid| {
        let page = json(1, &["prime", &file]);
        let why = page["files"][0]["why_not"].as_str().unwrap();
        assert!(
            why.contains("reader") && why.contains("stop that"),
            "{page}"
        );
        let page = json(0, &["show", &file]);
        assert_eq!(page["data"][0]["mapped_by"][0]["pid"].to_string(), pid);
    });
    json(0, &["prime", &file]);
}

#[test]
fn a_folder_stands_for_its_large_files() {
    let test = "a_folder_stands_for_its_large_files";
    if !has(test, &["gcc"]) || !has_huge_folios(test) {
        return;
    }
    let folder = Folder::new();
    let index = folder.path("index");
    fs::create_dir_all(format!("{index}/part")).unwrap();
    small_folios(&format!("{index}/one"), 2 * MIB);
    small_folios(&format!("{index}/part/two"), 4 * MIB);
    fs::write(format!("{index}/small"), "small").unwrap();
    std::os::unix::fs::symlink("/dev/zero", format!("{index}/link")).unwrap();
    let page = json(0, &["prime", &index]);
    let files = page["files"].as_array().unwrap();
    let paths: Vec<&str> = files
        .iter()
        .map(|file| file["path"].as_str().unwrap())
        .collect();
    assert_eq!(paths, [format!("{index}/one"), format!("{index}/part/two")]);
    let text = String::from_utf8(jumbo(&["show", &index]).stdout).unwrap();
    assert!(
        text.contains("part/two") && text.contains("4 MiB"),
        "{text}"
    );
}

#[test]
fn what_is_no_file_of_data_is_refused_with_the_reason() {
    let folder = Folder::new();
    let empty = folder.path("empty");
    File::create(&empty).unwrap();
    let page = json(
        1,
        &[
            "prime",
            &empty,
            "/dev/null",
            "/proc/self/maps",
            "/no/such/file",
        ],
    );
    let why = |index: usize| page["files"][index]["why_not"].to_string();
    assert!(why(0).contains("no regular file"), "{page}");
    assert!(why(1).contains("No such file"), "{page}");
    // A file of /proc has no size.
    assert!(why(2).contains("it has 0 B"), "{page}");
    assert!(why(3).contains("it has 0 B"), "{page}");
    assert!(refused(&["show", "/dev/null"]).contains("no regular file"));
    fs::set_permissions(&empty, fs::Permissions::from_mode(0o0)).unwrap();
    if !rustix::process::geteuid().is_root() {
        assert!(refused(&["show", &empty]).contains("Permission denied"));
    }
}
