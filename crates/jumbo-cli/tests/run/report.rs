//! Report of `jumbo run`: when it is written, where, and its contents.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::support::{Running, WAIT_FOR_SAMPLE, jumbo, kill, output, skip, stderr, stdout, until};

/// A Python program that allocates 100 MB and waits until a sample includes it.
fn python() -> String {
    format!("a = [bytes(1000 + i % 7) for i in range(100000)]\n{WAIT_FOR_SAMPLE}")
}

fn report(options: &[&str], program: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let mut command = jumbo();
    command
        .args(["run", "--report=json", "--report-file"])
        .arg(&file);
    output(command.args(options).arg("--").args(program));
    serde_json::from_slice(&fs::read(&file).unwrap()).unwrap()
}

#[test]
fn the_report_has_what_is_documented() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let report = report(&[], &["python3", "-c", &python()]);
    assert_eq!(report["mode"], "parent");
    assert_eq!(report["exit"]["code"], 0);
    assert_eq!(report["program"][0], "python3");
    let heap = &report["peak"]["heap"];
    assert!(heap["bytes"].as_u64().unwrap() > 90_000_000, "{heap}");
    assert!(heap["huge_share"].is_f64(), "{heap}");
    for kind in ["heap", "text", "data", "shared", "stack", "file"] {
        for key in ["bytes", "huge", "mapped", "folios", "unknown", "narrow"] {
            assert!(!report["peak"][kind][key].is_null(), "{kind} {key}");
        }
    }
    assert!(report["faults"]["minor"].as_u64().unwrap() > 0);
    assert!(report["max_rss"].as_u64().unwrap() > 90_000_000);
    assert!(report["sampled"]["samples"].as_u64().unwrap() > 0);
    let share = report["sampled"]["share_of_max_rss"].as_f64().unwrap();
    assert!(share > 0.5 && share <= 1.0, "{share}");
    assert!(
        report["summary"].as_str().unwrap().contains("python3"),
        "{report:#}"
    );
    assert_eq!(report["requested"]["heap"], true);
    assert_eq!(report["reach"]["reached"], true, "{report:#}");
    assert!(report["obtained"]["ledger"].is_object());
    assert!(report["shortfalls"].is_array());
    // The heap may be that of python3 or, behind a shim, that of its child.
    let processes = report["processes"].as_array().unwrap();
    assert!(!processes.is_empty() && processes[0]["heap"]["bytes"].is_u64());
}

/// Zero-filled memory is dense only once the program has written it.
#[test]
fn missing_huge_pages_have_a_reason_with_the_option_that_changes_it() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let report = report(&[], &["python3", "-c", "a = bytearray(300 << 20)"]);
    let heap = &report["peak"]["heap"];
    let share = heap["huge_share"].as_f64().unwrap_or(1.0);
    let reasons = report["shortfalls"].to_string();
    let is_off = reasons.contains("\"huge pages\"");
    // The latter in a virtual machine whose host has to give the memory back.
    let options = ["--max-waste=unbounded", "--first-touch=huge"];
    let has_option = options.iter().any(|option| reasons.contains(option));
    assert!(share >= 0.9 || is_off || has_option, "{report:#}");
    assert!(!reasons.contains("nothing that was counted"), "{report:#}");
}

#[test]
fn the_report_survives_a_killed_program() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let script = python() + "os.kill(os.getpid(), 9)";
    let report = report(&[], &["python3", "-c", &script]);
    assert!(report["peak"]["heap"]["bytes"].as_u64().unwrap() > 90_000_000);
    let ended = &report["exit"];
    assert!(ended["signal"] == 9 || ended["code"] == 137, "{ended}");
}

#[test]
fn the_options_are_what_is_requested() {
    let without_heap = report(&["--heap=off", "--no-follow", "--max-waste=2"], &["true"]);
    let requested = &without_heap["requested"];
    assert_eq!(requested["heap"], false);
    assert_eq!(requested["follow"], false);
    assert_eq!(requested["max_waste"], 2);
    assert_eq!(requested["keep"], Value::Null);
    let kept = report(&["--keep=64M"], &["true"]);
    assert_eq!(kept["requested"]["keep"], "67108864");
}

#[test]
fn children_are_in_the_report() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let python = python();
    let report = report(&[], &["sh", "-c", "python3 -c \"$0\"; :", &python]);
    assert!(report["peak"]["heap"]["bytes"].as_u64().unwrap() > 90_000_000);
    assert!(
        report["processes"].as_array().unwrap().len() >= 2,
        "{report:#}"
    );
}

#[test]
fn text_goes_to_stderr_and_stdout_is_the_program_s() {
    let output = output(jumbo().args(["run", "--report", "--", "sh", "-c", "echo out; exit 6"]));
    assert_eq!(
        (output.status.code(), output.stdout.as_slice()),
        (Some(6), &b"out\n"[..])
    );
    let message = stderr(&output);
    assert!(
        message.starts_with("jumbo: sh exited with 6 after "),
        "{message}"
    );
    // Without a sample in time the share is unknown.
    for part in [
        " user, ",
        " system)",
        " of sh ",
        "; --report=full says more",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    // Continuation lines of a long reason are indented by four blanks.
    let lines = message.lines().filter(|line| !line.starts_with("    "));
    assert_eq!(lines.count(), 3, "{message}");
    assert!(
        !message.contains("folios") && !message.contains("first touches"),
        "{message}"
    );
    assert!(
        message.lines().all(|line| line.chars().count() <= 80),
        "{message}"
    );
}

#[test]
fn a_full_report_begins_with_the_three_lines_and_has_the_rest() {
    let message = stderr(&output(jumbo().args([
        "run",
        "--report=full",
        "--",
        "sh",
        "-c",
        "exit 6",
    ])));
    assert!(
        message.starts_with("jumbo: sh exited with 6 after "),
        "{message}"
    );
    for part in [
        "\n  page faults ",
        "  requested ",
        "  huge pages ",
        "  how it ran ",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(
        !message.contains("says more") && !message.contains("first touches"),
        "{message}"
    );
    assert!(
        message.lines().all(|line| line.chars().count() <= 80),
        "{message}"
    );
}

#[test]
fn the_second_line_says_what_came_of_it() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let message = |format: &str, script: &str| {
        let mut command = jumbo();
        command.args(["run", format, "--text=off", "--", "python3", "-c", script]);
        stderr(&output(&mut command))
    };
    let text = message("--report", &python());
    let mut lines = text.lines();
    let ended = lines.next().unwrap_or_default();
    assert!(
        ended.starts_with("jumbo: python3 exited with 0 after "),
        "{text}"
    );
    let second = lines.next().unwrap_or_default().trim_start();
    let (share, rest) = second.split_once(" % of the ").unwrap();
    let share: u32 = share.parse().unwrap();
    assert!(
        share <= 100 && rest.ends_with(" of python3 on huge pages; --report=full says more"),
        "{text}"
    );
    assert!(
        lines.next().is_some_and(|line| line.starts_with("  ")),
        "{text}"
    );
    // Only the full report has uncovered memory, and marks it.
    assert!(
        !text.contains("\n  stack ") && !text.contains("\n  text "),
        "{text}"
    );
    let full = message("--report=full", &python());
    let marked = |kind: &str| {
        let mut lines = full.lines().filter(|line| line.starts_with(kind));
        lines.any(|line| line.ends_with("(not covered)"))
    };
    assert!(
        marked("  stack ") && marked("  text ") && !marked("  heap "),
        "{full}"
    );
    assert!(full.matches("size unknown").count() <= 1, "{full}");
    // The run is long enough for a sample, if THP is available.
    if share >= 50 {
        assert!(full.contains("does it pay"), "{full}");
    }
    // The third line has the gain, or the reason for a low share.
    let gain = text.contains("first touches take ");
    let is_told = gain && share >= 50 || share < 90 && text.contains("why not more: ");
    assert!(is_told, "{text}");
}

#[test]
fn addresses_that_are_only_reserved_are_not_requested() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let asked = |prot: &str| {
        let script = format!("import mmap\na = mmap.mmap(-1, 4 << 30, flags=34, prot={prot})");
        // With a bound jumbo does not request untouched memory either.
        let options = ["--heap=off", "--max-waste=unbounded"];
        let report = report(&options, &["python3", "-c", &script]);
        report["requested"]["advised"].as_u64().unwrap()
    };
    assert!(asked("0") < 1 << 30);
    assert!(asked("3") >= 4 << 30);
}

#[test]
fn a_program_that_is_not_reached_is_said_in_the_short_report() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("static");
    let source = folder.path().join("main.c");
    fs::write(&source, "int main(void) { return 3; }").unwrap();
    let mut cc = Command::new("cc");
    cc.arg("-static").arg("-o").arg(&program).arg(&source);
    if !cc.status().is_ok_and(|status| status.success()) {
        return skip(
            "a_program_that_is_not_reached_is_said_in_the_short_report",
            "no static libc",
        );
    }
    let message = |format: &str| stderr(&output(jumbo().args(["run", format, "--"]).arg(&program)));
    let short = message("--report");
    let words = short.split_whitespace().collect::<Vec<_>>().join(" ");
    let third = " could not help static: it is statically linked";
    assert!(words.starts_with("jumbo: static exited with 3"), "{short}");
    assert!(words.contains(third), "{short}");
    let message = message("--report=full");
    assert!(!message.contains("glibc.malloc.hugetlb"), "{message}");
    // Without a sample the report claims nothing.
    if message.contains("it ended before") {
        assert!(message.contains("huge pages     unknown"), "{message}");
    }
}

#[test]
fn there_is_no_report_where_no_user_looks() {
    for options in [&[][..], &["--quiet"], &["--report=none"]] {
        let output = output(jumbo().arg("run").args(options).args(["--", "true"]));
        assert_eq!(stderr(&output), "", "{options:?}");
    }
}

#[test]
fn a_report_file_alone_asks_for_text_and_keeps_its_mode() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report");
    fs::write(&file, "old").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    let mut command = jumbo();
    assert!(
        output(
            command
                .args(["run", "--report-file"])
                .arg(&file)
                .arg("true")
        )
        .status
        .success()
    );
    assert!(
        fs::read_to_string(&file)
            .unwrap()
            .contains("true exited with 0")
    );
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o640
    );
    assert_eq!(
        fs::read_dir(&folder).unwrap().count(),
        1,
        "nothing is left beside it"
    );
}

#[test]
fn a_report_to_a_dash_goes_to_stdout() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = jumbo();
    command.args(["run", "--report-file", "-", "--", "echo", "mine"]);
    let shown = stdout(command.current_dir(&folder));
    let after = shown.strip_prefix("mine\n").unwrap_or_default();
    assert!(after.starts_with("jumbo: echo"), "{shown}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "a file was made");
}

#[test]
fn a_report_that_cannot_be_written_changes_no_exit_status() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gone/report");
    fs::create_dir(folder.path().join("gone")).unwrap();
    let mut command = jumbo();
    command.args(["run", "--report-file"]).arg(&file);
    command
        .current_dir(&folder)
        .args(["--", "sh", "-c", "rmdir gone; exit 9"]);
    let output = output(&mut command);
    assert_eq!(output.status.code(), Some(9));
    assert!(stderr(&output).contains("gone/report"));
}

#[test]
fn an_unusable_report_file_is_an_error_before_the_start() {
    for file in ["/nonexistent/report", "/tmp"] {
        let output = output(jumbo().args(["run", "--report-file", file, "--", "echo", "ran"]));
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(125), "{message}");
        assert!(
            message.contains(file) && message.contains("hint:"),
            "{message}"
        );
        assert!(output.stdout.is_empty(), "the program ran");
    }
}

#[test]
fn what_exists_is_written_in_place() {
    use std::os::unix::fs::{MetadataExt as _, symlink};
    let folder = tempfile::tempdir().unwrap();
    let [file, link, dangling, made] =
        ["file", "link", "dangling", "made"].map(|name| folder.path().join(name));
    fs::write(&file, "x".repeat(1 << 20)).unwrap();
    symlink(&file, &link).unwrap();
    symlink(&made, &dangling).unwrap();
    let inode = fs::metadata(&file).unwrap().ino();
    for (name, target) in [(&file, &file), (&link, &file), (&dangling, &made)] {
        let mut command = jumbo();
        command.args(["run", "--report-file"]).arg(name).arg("true");
        assert!(output(&mut command).status.success());
        let message = fs::read_to_string(target).unwrap();
        assert!(message.starts_with("jumbo: true") && !message.contains("xxx"));
    }
    assert_eq!(fs::metadata(&file).unwrap().ino(), inode);
    assert!(fs::symlink_metadata(&dangling).unwrap().is_symlink());
}

#[test]
fn a_report_to_the_program_s_own_output_file_comes_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("output");
    let mut command = jumbo();
    command.args(["run", "--report-file", "/dev/stdout", "echo", "hello"]);
    command.stdout(fs::File::create(&file).unwrap());
    assert!(command.status().unwrap().success());
    let message = fs::read_to_string(&file).unwrap();
    assert!(message.starts_with("hello\njumbo: echo"), "{message}");
}

#[test]
fn writing_to_a_pipe_without_a_reader_can_be_interrupted() {
    use std::os::unix::process::ExitStatusExt as _;
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(
        Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let mut command = jumbo();
    command.args(["run", "--report-file"]).arg(&pipe);
    let mut running = Running::start(command.args(["env", "--ignore-signal=TERM", "sleep", "0.2"]));
    let mut status = None;
    until("the end", || {
        // jumbo passes on signals until the program ends; the program ignores them.
        kill(running.pid(), "TERM");
        status = running.0.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().signal(), Some(15));
}

#[test]
fn a_report_can_go_to_a_descriptor() {
    let jumbo = env!("CARGO_BIN_EXE_jumbo");
    crate::support::library();
    let script =
        format!("{jumbo} run --report=json --report-file /dev/fd/3 -- true 3>&1 >/dev/null");
    let message = output(Command::new("sh").args(["-c", &script])).stdout;
    assert!(serde_json::from_slice::<Value>(&message).is_ok());
}
