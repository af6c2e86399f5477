//! Tests of data files: mapped to be read under `jumbo run`, and promoted where they are mapped.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use serde_json::Value;

use crate::support::{MIB, Program, Ran, Source, compile, host, skip};

/// Writes a file in small folios, on disk.
fn small_file(path: &Path, bytes: u64) {
    let file = File::create(path).unwrap();
    for at in 0..bytes / 4096 {
        let page = [at.to_le_bytes()[0]; 4096];
        file.write_all_at(&page, at * 4096).unwrap();
    }
    file.sync_all().unwrap();
}

/// Returns the JSON outcome of `jumbo promote` for one process.
#[track_caller]
fn promoted(arguments: &[&str]) -> Value {
    let all = [&["promote", "--json"], arguments].concat();
    let ran = Program::new("true").jumbo_itself(&all);
    let page: Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    page["processes"][0].clone()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value}"))
}

/// Writes a file that is not cached.
fn cold_file(path: &Path, bytes: u64) {
    small_file(path, bytes);
    let file = File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// A data file has the same bytes, ends and signals; where the file system can, it is huge.
#[test]
fn a_data_file_that_is_mapped_to_be_read_is_huge_and_the_same() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("maps_file", &[])]);
    let data = files.path("data");
    let program = |how: &str, what: &str| {
        cold_file(&data, 16 * MIB);
        Program::new(files.path("maps_file"))
            .arg(&data)
            .arg(how)
            .arg(what)
    };
    let words = |ran: &Ran| -> Vec<u64> {
        let words = ran.stdout.split_whitespace();
        words.map(|word| word.parse().unwrap()).collect()
    };
    for what in ["whole", "truncate", "behind"] {
        for how in ["populate", "touch"] {
            for option in ["--files=auto", "--files=on", "--files=off"] {
                let plain = program(how, what).plain();
                let (jumbo, report) = program(how, what).reported_with(&[option]);
                assert_eq!(
                    plain.shell_status(),
                    jumbo.shell_status(),
                    "{what} {how} {option}: {jumbo:?}"
                );
                let (before, after) = (words(&plain), words(&jumbo));
                assert_eq!(before[0], after[0], "{what} {how} {option}");
                let advised = report.at("/obtained/ledger/files_advised").as_u64();
                let is_advised =
                    option == "--files=on" || option == "--files=auto" && how == "populate";
                let mapped = if what == "behind" { 20 * MIB } else { 16 * MIB };
                assert_eq!(
                    advised,
                    Some(if is_advised { mapped } else { 0 }),
                    "{what} {how} {option}"
                );
            }
        }
    }
}

/// overlayfs, the file system of containers, chooses an address at which no PMD fits.
#[test]
fn a_primed_file_is_mapped_by_huge_folios_on_overlayfs() {
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("maps_file", &[])]);
    for folder in ["lower", "upper", "work", "merged"] {
        std::fs::create_dir(files.path(folder)).unwrap();
    }
    let data = files.path("upper").join("data");
    cold_file(&data, 16 * MIB);
    let prime = ["files", "prime", data.to_str().unwrap()];
    let primed = Program::new("true").jumbo_itself(&prime);
    if primed.shell_status() != 0 {
        return skip(&format!("the file system here: {primed:?}"));
    }
    let root = files.path("");
    let root = root.to_str().unwrap();
    let script = format!(
        "cd {root} && mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work none merged \
         || exit 77; exec \"$@\""
    );
    let program = Program::new(files.path("maps_file"))
        .arg(files.path("merged").join("data"))
        .args(["touch", "whole"])
        .around(["unshare", "--mount", "sh", "-c", &script, "sh"]);
    let huge = |ran: &Ran| -> u64 {
        let word = ran.stdout.split_whitespace().nth(1);
        word.unwrap_or_else(|| panic!("{ran:?}")).parse().unwrap()
    };
    for option in ["--files=auto", "--files=on"] {
        let ran = program.jumbo_with(&[option]);
        if ran.shell_status() == 77 {
            return skip("overlayfs cannot be mounted here");
        }
        assert_eq!(huge(&ran), 16 << 10, "{option}");
    }
}

/// A file that a program maps and reads: planned, and collapsed where the kernel can (Linux 7.0, or
/// CONFIG_READ_ONLY_THP_FOR_FS).
#[test]
fn files_are_promoted_or_the_answer_of_the_kernel_is_said() {
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("reader", &[])]);
    let data = files.path("data");
    small_file(&data, 8 * MIB);
    let reader = Program::new(files.path("reader")).arg(&data).start_plain();
    reader.wait_for_line("ready");
    let pid = reader.pid().as_raw_nonzero().to_string();
    let done = promoted(&["--files", &pid]);
    let file = &done["plan"]["kinds"]["file"];
    let planned = number(&done["outcome"]["planned"]);
    assert!(
        planned == 8 * MIB || number(&file["huge"]) >= 8 * MIB,
        "{done}"
    );
    let refused = done["outcome"]["failures"][0]["errno"] == "EINVAL";
    assert!(
        refused || number(&done["outcome"]["obtained"]) == planned,
        "{done}"
    );
    // Without the option files stay as they are.
    let heap = promoted(&["--dry-run", &pid]);
    assert!(heap["plan"]["kinds"]["file"].is_null(), "{heap}");
}
