//! Output of `jumbo files show` about files and processes.

use std::process::Command;

use crate::support::{Folder, has, json, jumbo, refused};

#[test]
fn what_a_file_lacks_is_said_and_the_flags_that_mend_it() {
    if !has(
        "what_a_file_lacks_is_said_and_the_flags_that_mend_it",
        &["gcc"],
    ) {
        return;
    }
    let folder = Folder::new();
    let why = |file: &str, rung: usize| {
        json(0, &["show", file])["files"][0]["rungs"][rung]["why_not"].to_string()
    };
    let program = folder.program("pie", &["-pie"], false);
    assert!(why(&program, 0).contains("p_align") && why(&program, 1).contains("load address"));
    let program = folder.program("static", &["-static"], false);
    assert!(why(&program, 1).contains("statically linked"));
    let flags = json(0, &["show", &folder.path("pie")])["files"][0]["flags"].clone();
    // Linked with these flags the file needs nothing but priming.
    let flags: Vec<&str> = flags.as_str().unwrap().split(' ').collect();
    let program = folder.program("linked", &flags, false);
    let page = json(0, &["show", &program]);
    assert!(page["files"][0]["flags"].is_null(), "{page}");
    assert!(!why(&program, 0).contains("text align"), "{page}");
    let page = jumbo(&["show", "/bin/true"]);
    let text = String::from_utf8(page.stdout).unwrap();
    assert!(
        text.contains("smaller than a huge page") && !text.contains('\x1b'),
        "{text}"
    );
}

#[test]
fn a_process_shows_the_text_that_it_maps() {
    let own = std::process::id().to_string();
    let page = json(0, &["show", &own]);
    let files = page["processes"][0]["files"].as_array().unwrap();
    let exe = std::env::current_exe().unwrap();
    let file = files
        .iter()
        .find(|file| file["path"] == exe.to_str().unwrap())
        .unwrap();
    assert!(file["rss"].as_u64().unwrap() > 0 && file["mappings"].as_array().unwrap().len() == 1);
    assert!(refused(&["show", "5000000"]).contains("./5000000"));
    assert!(refused(&["show", "/no/such/file"]).contains("No such file"));
    let folder = Folder::new();
    let fifo = folder.path("fifo");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    assert!(refused(&["show", &fifo]).contains("no regular file"));
}
