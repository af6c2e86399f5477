//! Text of primed programs is huge after a plain start.

use std::fs;

use crate::support::{Folder, Running, has, has_huge_folios, json};

#[test]
fn a_program_started_plainly_is_huge() {
    let test = "a_program_started_plainly_is_huge";
    if !has(test, &["gcc"]) || !has_huge_folios(test) {
        return;
    }
    for (flags, library) in [(&["-pie"][..], false), (&["-static"], false), (&[], true)] {
        let folder = Folder::new();
        let program = folder.program("program", flags, library);
        let original = if library {
            folder.path("libbig.so")
        } else {
            program.clone()
        };
        let copy = folder.path("copy");
        json(0, &["align", &original, "-o", &copy]);
        fs::rename(&copy, &original).unwrap();
        let plan = json(0, &["prime", &original, "--dry-run"]);
        let text = plan["files"][0]["whole"].as_u64().unwrap();
        assert!(text > 0 && plan["files"][0]["huge"] == 0, "{plan}");
        let page = json(0, &["prime", &original]);
        assert_eq!(
            (&page["files"][0]["huge"], &page["files"][0]["before"]),
            (&text.into(), &0.into())
        );
        let running = Running::start(&program);
        assert_eq!(running.pmd_mapped(&original), text * 2048, "{flags:?}");
        // Huge folios stay while a process maps them.
        assert_eq!(json(0, &["prime", &original])["files"][0]["before"], text);
        let page = json(0, &["show", &original, &running.pid()]);
        assert!(
            page["files"][0]["rungs"][0]["why_not"]
                .as_array()
                .unwrap()
                .is_empty(),
            "{page}"
        );
        let files = page["processes"][0]["files"].as_array().unwrap();
        let file = files.iter().find(|file| file["path"] == *original).unwrap();
        assert_eq!(file["huge"], text << 21);
    }
}

#[test]
fn what_a_process_maps_stays_and_the_process_is_named() {
    let test = "what_a_process_maps_stays_and_the_process_is_named";
    if !has(test, &["gcc"]) || !has_huge_folios(test) {
        return;
    }
    let folder = Folder::new();
    let program = folder.program("program", &["-no-pie"], false);
    let copy = folder.path("copy");
    json(0, &["align", &program, "-o", &copy]);
    let running = Running::start(&copy);
    let page = json(1, &["prime", &copy]);
    let file = &page["files"][0];
    assert_eq!(file["mapped_by"][0]["pid"].to_string(), running.pid());
    assert!(
        file["why_not"].as_str().unwrap().contains("stop that"),
        "{page}"
    );
    drop(running);
    json(0, &["prime", &copy]);
}

#[test]
fn files_that_cannot_be_huge_are_said_and_the_others_are() {
    let test = "files_that_cannot_be_huge_are_said_and_the_others_are";
    if !has(test, &["gcc"]) || !has_huge_folios(test) {
        return;
    }
    let folder = Folder::new();
    let program = folder.program("program", &["-pie"], false);
    let (copy, none) = (folder.path("copy"), folder.path("none"));
    json(0, &["align", &program, "-o", &copy]);
    let page = json(
        3,
        &["prime", &copy, &program, &none, &folder.path("main.c")],
    );
    let why = |name: &str| {
        let files = page["files"].as_array().unwrap();
        let file = files.iter().find(|file| file["path"] == *folder.path(name));
        file.unwrap()["why_not"].to_string()
    };
    assert_eq!(why("copy"), "null");
    assert!(why("program").contains("p_align") && why("program").contains("text align"));
    assert!(why("none").contains("No such file") && why("main.c").contains("a huge page 2M"));
}
