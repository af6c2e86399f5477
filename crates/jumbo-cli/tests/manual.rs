//! Tests common to all commands: completions, manual pages, usage errors and write errors.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::process::Command;

fn jumbo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_jumbo"))
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_shell_completes_the_options_of_run() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = jumbo(&["completions", shell]);
        assert!(script.contains("max-waste"), "{shell}");
    }
}

#[test]
fn what_cannot_be_written_is_said() {
    for arguments in [
        &["completions", "bash"][..],
        &["--help"],
        &["run", "--help"],
        &["--version"],
        &["man"],
        &["status"],
        &["doctor", "--json"],
        &["bench"],
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
        let output = Command::new(env!("CARGO_BIN_EXE_jumbo"))
            .args(arguments)
            .stdout(full.unwrap())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert_eq!(
            String::from_utf8(output.stderr).unwrap(),
            "jumbo: cannot write to standard output: No space left on device (os error 28)\n",
            "{arguments:?}"
        );
    }
}

#[test]
fn there_is_a_page_for_every_command() {
    let folder = tempfile::tempdir().unwrap();
    jumbo(&["man", "--dir", folder.path().to_str().unwrap()]);
    for command in [
        "run",
        "compare",
        "fleet",
        "fleet-compare",
        "status",
        "top",
        "doctor",
        "export",
        "promote",
        "kill",
        "plan",
        "plan-postgres",
        "pool",
        "pool-set",
        "vmemmap",
        "vmemmap-on",
        "thp",
        "thp-set",
        "text",
        "text-align",
        "files-show",
        "files-prime",
        "cdi",
        "cdi-generate",
        "unit",
        "bench",
        "completions",
        "man",
    ] {
        let page = folder.path().join(format!("jumbo-{command}.1"));
        assert!(page.exists(), "{}", page.display());
    }
    let run = std::fs::read_to_string(folder.path().join("jumbo-run.1")).unwrap();
    let title = run.lines().find(|line| line.starts_with(".TH")).unwrap();
    let version = concat!("\"jumbo ", env!("CARGO_PKG_VERSION"), "\"");
    let dated = title
        .split(' ')
        .any(|part| part.len() == 10 && part.matches('-').count() == 2);
    assert!(title.contains(version) && dated, "{title}");
    for section in [
        ".SH \"EXAMPLES\"\n.nf",
        ".SH \"EXIT STATUS\"\n\\&the program's",
    ] {
        assert!(run.contains(section), "{section}: {run}");
    }
    for page in std::fs::read_dir(folder.path()).unwrap() {
        let page = std::fs::read_to_string(page.unwrap().path()).unwrap();
        sections_hold(&page);
    }
    let line = r"\&jumbo run \-\- python3 train.py";
    assert!(
        run.lines().any(|shown| shown == line) && !run.contains("EXTRA"),
        "{run}"
    );
    assert!(jumbo(&["man"]).contains(".TH jumbo"));
}

/// Checks that section titles are short and that unfilled lines fit 80 columns, indented by 7.
fn sections_hold(page: &str) {
    let mut is_list = false;
    for line in page.lines() {
        match line {
            ".nf" => is_list = true,
            ".fi" => is_list = false,
            _ => {}
        }
        if let Some(title) = line.strip_prefix(".SH ") {
            assert!(title.split(' ').count() <= 2, "{line}");
        }
        let shown = line.replace("\\&", "").replace("\\-", "-");
        assert!(!is_list || shown.chars().count() <= 73, "{line}");
    }
}

/// Returns the long option names of a help text, each with the text below it.
fn options(help: &str) -> Vec<(String, Vec<&str>)> {
    let mut found: Vec<(String, Vec<&str>)> = Vec::new();
    for line in help.lines() {
        let typed = line.trim_start();
        let is_option = line.starts_with("  ") && !line.starts_with("        ");
        if is_option && typed.starts_with('-') {
            let name = typed.split("--").nth(1).unwrap_or_default();
            let end = name.find(|c: char| c != '-' && !c.is_ascii_alphanumeric());
            found.push((name[..end.unwrap_or(name.len())].to_owned(), Vec::new()));
        } else if let (Some((_, text)), true) = (found.last_mut(), line.starts_with("        ")) {
            text.extend(Some(typed).filter(|typed| !typed.is_empty()));
        }
    }
    found.retain(|(name, _)| name != "help");
    found
}

#[test]
fn the_short_help_of_run_has_eight_options_and_the_long_one_explains_all() {
    let short = jumbo(&["run", "-h"]);
    assert_eq!(options(&short).len(), 8, "{short}");
    assert!(
        short.contains("`jumbo run --help` has all options"),
        "{short}"
    );
    let long = jumbo(&["run", "--help"]);
    let all = options(&long);
    assert!(all.len() > 20, "{long}");
    let folder = tempfile::tempdir().unwrap();
    jumbo(&["man", "--dir", folder.path().to_str().unwrap()]);
    let page = std::fs::read_to_string(folder.path().join("jumbo-run.1")).unwrap();
    let page = page.replace("\\-", "-");
    let scripts = ["bash", "zsh", "fish"].map(|shell| jumbo(&["completions", shell]));
    let workspace = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    for (name, text) in all {
        assert!((1..=3).contains(&text.len()), "--{name}: {text:?}");
        let document = text.iter().flat_map(|line| line.split(' ')).next_back();
        let document = document.filter(|word| word.starts_with("docs/"));
        let path = format!("{workspace}/{}", document.unwrap_or("no document"));
        assert!(std::path::Path::new(&path).is_file(), "--{name}: {path}");
        assert!(
            page.contains(&format!("--{name}")),
            "--{name} has no entry in the page"
        );
        for script in &scripts {
            assert!(script.contains(&name), "--{name} is not completed");
        }
    }
}

/// Returns the targets of links in a Markdown text that lead into this tree.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1);
    let targets = targets.filter_map(|rest| rest.split([')', '#']).next());
    targets.filter(|target| !target.is_empty() && !target.contains(':'))
}

#[test]
fn the_links_of_the_documents_lead_to_files() {
    let workspace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = ["", "docs", "docs/design", "docs/adr"];
    let mut checked = 0;
    for folder in folders.map(|folder| workspace.join(folder)) {
        let entries = std::fs::read_dir(&folder).unwrap();
        let files = entries.map(|entry| entry.unwrap().path());
        for file in files.filter(|file| file.extension().is_some_and(|it| it == "md")) {
            let text = std::fs::read_to_string(&file).unwrap();
            for target in links(&text) {
                let path = folder.join(target);
                assert!(path.exists(), "{}: {target}", file.display());
                checked += 1;
            }
        }
    }
    assert!(checked > 50, "{checked}");
}

#[test]
fn json_of_a_run_says_what_it_is_for() {
    let output = Command::new(env!("CARGO_BIN_EXE_jumbo"))
        .args(["run", "--json", "--", "true"])
        .output()
        .unwrap();
    let printed = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{printed}");
    assert!(
        printed.contains("hint: a report as JSON is --report=json"),
        "{printed}"
    );
    let plan = jumbo(&["run", "--dry-run", "--json", "--", "true"]);
    assert!(plan.starts_with('{'), "{plan}");
}

#[test]
fn what_is_no_number_is_refused_in_words() {
    for (arguments, expected) in [
        (&["run", "--pool", "-5", "--", "true"][..], "K, M, G and T"),
        (&["run", "--pool", "1.5G", "--", "true"], "K, M, G and T"),
        (
            &["run", "--overcommit", "-5G", "--", "true"],
            "K, M, G and T",
        ),
        (
            &["run", "--max-waste", "-1", "--", "true"],
            "a percentage from 0 to 100",
        ),
        (&["kill", "--timeout", "-1", "1"], "a number of seconds"),
        (&["kill", "--timeout", "nan", "1"], "a number of seconds"),
        (&["kill", "-9", "1"], "a signal is given with --signal"),
        (&["kill", "0"], "the number of a process"),
        (&["bench", "heap", "--rounds", "0"], "at least 1"),
        (&["bench", "heap", "--size", "-1G"], "K, M, G and T"),
        (&["bench", "free", "--workers", "-1"], "at least 1"),
        (&["status", "--top", "-1"], "a whole number"),
        (&["doctor", "--top", "1.5"], "a whole number"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_jumbo"))
            .args(arguments)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(
            text.contains(expected) && !text.contains("tip:"),
            "{arguments:?}: {text}"
        );
    }
}

#[test]
fn a_reader_that_has_enough_is_no_failure() {
    let script = format!(
        "set -o pipefail; {0} completions bash | head -n 1; {0} thp show | head -n 0",
        env!("CARGO_BIN_EXE_jumbo")
    );
    let ended = Command::new("bash").args(["-c", &script]).output().unwrap();
    assert!(
        ended.status.success() && ended.stderr.is_empty(),
        "{ended:?}"
    );
}

#[test]
fn help_and_pages_begin_with_text_and_help_holds_eighty_columns() {
    for arguments in [
        &["status"][..],
        &["doctor"],
        &["thp", "show"],
        &["pool", "show"],
        &["bench"],
    ] {
        let shown = jumbo(arguments);
        assert!(!shown.starts_with('\n'), "{arguments:?}: {shown}");
    }
    for arguments in [
        &["--help"][..],
        &["run", "--help"],
        &["run", "-h"],
        &["wait", "--help"],
        &["bench", "heap", "--help"],
    ] {
        let shown = jumbo(arguments);
        let wide = shown.lines().find(|line| line.chars().count() > 80);
        assert_eq!(wide, None, "{arguments:?}");
    }
}

#[test]
fn a_report_format_in_the_place_of_the_program_is_explained() {
    let output = Command::new(env!("CARGO_BIN_EXE_jumbo"))
        .args(["run", "--report", "json", "--", "true"])
        .output()
        .unwrap();
    let printed = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(127), "{printed}");
    assert!(
        printed.contains("PATH; hint: --report=json") && printed.matches("hint:").count() == 1,
        "{printed}"
    );
}

#[test]
fn an_option_typed_wrongly_hints_at_a_similar_one() {
    for (arguments, hint) in [
        (&["run", "--reprt", "--", "true"][..], "'--report'"),
        (&["run", "--hepl"], "'--help'"),
        (&["pool", "set", "2M", "--forse"], "'--force'"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_jumbo"))
            .args(arguments)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let printed = String::from_utf8(output.stderr).unwrap();
        assert!(printed.contains(hint), "{printed}");
    }
}
