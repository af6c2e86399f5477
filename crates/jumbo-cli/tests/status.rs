//! Tests of `jumbo status` and `jumbo doctor` on this host.

#![allow(
    clippy::unwrap_used,
    reason = "a command that cannot be run fails its test"
)]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

const NOBODY: u32 = 65534;

fn jumbo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jumbo"));
    command.args(arguments);
    command
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&text(&jumbo(arguments).output().unwrap())).unwrap()
}

fn own_pid() -> String {
    std::process::id().to_string()
}

#[test]
fn the_host_as_json_has_what_the_page_shows() {
    let page = json(&["status", "--json", "--top", "3"]);
    assert!(page["host"]["memory"]["total"].as_u64().unwrap() > 0);
    assert!(page["host"]["formable"].is_array() && page["host"]["missing"].is_array());
    assert!(page["tasks"]["largest"].as_array().unwrap().len() <= 3);
    assert!(page["probe"]["collapse"]["reason"].is_string());
}

/// Returns the lines before the first empty line.
fn summary(page: &str) -> Vec<&str> {
    page.lines().take_while(|line| !line.is_empty()).collect()
}

#[test]
fn pages_begin_with_what_matters() {
    let page = |arguments: &[&str]| text(&jumbo(arguments).output().unwrap());
    let host = page(&["status"]);
    let lines = summary(&host);
    assert!((2..=3).contains(&lines.len()), "{host}");
    assert!(lines[0].contains("on huge pages; "), "{host}");
    assert!(lines[1].contains(" pages: "), "{host}");
    let process = page(&["status", "-p", &own_pid()]);
    let lines = summary(&process);
    assert!((1..=2).contains(&lines.len()), "{process}");
    assert!(lines[0].contains("on huge pages"), "{process}");
    let doctor = page(&["doctor"]);
    let lines = summary(&doctor);
    assert!((1..=3).contains(&lines.len()), "{doctor}");
    let is_told = lines[0].contains("; the first: ");
    assert_eq!(is_told, doctor.contains("\n1. "), "{doctor}");
}

#[test]
fn a_process_as_json_adds_up() {
    let page = json(&["status", "--json", "--mappings", "-p", &own_pid()]);
    let process = &page["processes"][0];
    assert_eq!(process["pid"], std::process::id());
    let mappings = process["mappings"].as_array().unwrap();
    for kind in ["heap", "text"] {
        let usage = &process["usage"][kind];
        let folios = usage["folios"]
            .as_object()
            .unwrap()
            .values()
            .map(|v| v.as_u64().unwrap());
        let bytes = usage["bytes"].as_u64().unwrap();
        assert!(bytes > 0, "{kind}");
        assert_eq!(
            folios.sum::<u64>() + usage["unknown"].as_u64().unwrap(),
            bytes,
            "{kind}"
        );
        assert!(mappings.iter().any(|mapping| mapping["kind"] == kind));
    }
    assert_eq!(page["total"], process["usage"]);
}

#[test]
fn many_processes_have_a_line_each_and_a_total() {
    let mut sleeps: Vec<_> = (0..5)
        .map(|_| Command::new("sleep").arg("1000").spawn().unwrap())
        .collect();
    let pids = sleeps.iter().map(|sleep| sleep.id().to_string());
    let pids: Vec<_> = pids.flat_map(|pid| ["-p".to_owned(), pid]).collect();
    let arguments: Vec<_> = ["status"]
        .into_iter()
        .chain(pids.iter().map(String::as_str))
        .collect();
    let page = text(&jumbo(&arguments).output().unwrap());
    // The total needs no right to read the processes.
    let nobody = jumbo(&arguments).uid(NOBODY).output();
    for sleep in &mut sleeps {
        sleep.kill().unwrap();
        sleep.wait().unwrap();
    }
    assert!(page.contains("5 processes in all"), "{page}");
    let lines = page.lines().filter(|line| line.contains("sleep 1000"));
    assert_eq!(lines.count(), 5, "{page}");
    assert!(page.lines().count() < 30, "{page}");
    let may_change_user = nobody.is_ok_and(|output| {
        let page = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            page.contains("5 processes in all") && page.contains("anonymous "),
            "{page}"
        );
        true
    });
    if !may_change_user {
        println!("SKIP many_processes_have_a_line_each_and_a_total: cannot change the user");
    }
}

#[test]
fn pages_for_people_have_no_escape_codes_in_a_pipe() {
    let pid = own_pid();
    for arguments in [&["status"][..], &["status", "-p", &pid], &["doctor"]] {
        let page = text(&jumbo(arguments).output().unwrap());
        assert!(!page.contains('\x1b') && !page.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error_message() {
    for arguments in [&["status"][..], &["status", "--json"], &["doctor"]] {
        // Not a pipe: a child of another test may briefly hold its other end open.
        let (reader, writer) = UnixStream::pair().unwrap();
        reader.shutdown(std::net::Shutdown::Both).unwrap();
        let writer = OwnedFd::from(writer);
        let output = jumbo(arguments).stdout(writer).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
    }
}

#[test]
fn every_process_of_a_name_is_shown_and_added_up() {
    let name = format!("jumbo-test-sleeper-{}", std::process::id());
    let mut sleepers: Vec<_> = (0..2)
        .map(|_| {
            Command::new("sleep")
                .arg0(&name)
                .arg("600")
                .spawn()
                .unwrap()
        })
        .collect();
    // A process exists before it has its name.
    for sleeper in &sleepers {
        let path = format!("/proc/{}/cmdline", sleeper.id());
        let start = Instant::now();
        while !std::fs::read_to_string(&path).unwrap().starts_with(&name) {
            assert!(start.elapsed() < Duration::from_secs(60), "no {name}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let page = json(&["status", "--json", "-p", &name]);
    for sleeper in &mut sleepers {
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
    let processes = page["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 2);
    let text = |usage: &Value| usage["text"]["bytes"].as_u64().unwrap();
    let sum: u64 = processes
        .iter()
        .map(|process| text(&process["usage"]))
        .sum();
    assert_eq!(text(&page["total"]), sum);
}

#[test]
fn a_process_that_is_not_there_is_one_error_with_a_hint() {
    for name in ["5000000", "no-such-program"] {
        let output = jumbo(&["status", "-p", name]).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr.contains(name) && stderr.contains("hint: ") && output.stdout.is_empty());
    }
}

#[test]
fn a_normal_user_sees_what_it_may_and_is_told_what_it_may_not() {
    if !rustix::process::geteuid().is_root() {
        let skip = "SKIP a_normal_user_sees_what_it_may: only root can become another user";
        assert!(
            std::env::var_os("JUMBO_TEST_STRICT").is_none_or(|value| value != "1"),
            "{skip}"
        );
        eprintln!("{skip}");
        return;
    }
    // The build folder may be closed to others, so they run a copy. cp(1) writes it: another test's
    // child could inherit our descriptor open for writing, and execve would fail (ETXTBSY).
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let copy = folder.path().join("jumbo");
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_jumbo"))
        .arg(&copy)
        .status()
        .unwrap();
    assert!(copied.success());
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let run = |arguments: &[&str]| {
        Command::new(&copy)
            .args(arguments)
            .uid(NOBODY)
            .gid(NOBODY)
            .output()
            .unwrap()
    };
    let host = text(&run(&["status"]));
    assert!(
        host.contains("hugetlb pools") && host.contains("Not shown"),
        "{host}"
    );
    let process = text(&run(&["status", "-p", &own_pid()]));
    assert!(
        process.contains("anonymous") && process.contains("/smaps: "),
        "{process}"
    );
    assert!(run(&["doctor"]).status.success());
}

#[test]
fn findings_are_no_failure_unless_asked_for() {
    let output = jumbo(&["doctor", "--exit-code"]).output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 1)));
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        output.status.success(),
        stdout.starts_with("nothing to mend"),
        "{stdout}"
    );
    assert!(jumbo(&["doctor"]).output().unwrap().status.success());
    assert!(json(&["doctor", "--json"])["findings"].is_array());
}

/// The first touch takes longer than the next where the host has reclaimed the memory, and about as
/// long elsewhere. Without a free huge page the command says so.
#[test]
fn what_a_first_touch_takes_is_measured_on_request() {
    let page = json(&["doctor", "--measure", "--json"]);
    match page["touch"].as_object() {
        Some(touch) => {
            assert_eq!(touch["size"], 256 << 20);
            for time in ["first_us", "again_us"] {
                assert!(touch[time].as_u64().unwrap() > 0, "{touch:?}");
            }
        }
        None => {
            let missing = page["missing"].as_array().unwrap();
            let is_told =
                |missing: &Value| missing["what"] == "what the first touch of memory takes";
            assert!(missing.iter().any(is_told), "{page}");
        }
    }
    assert!(json(&["doctor", "--json"])["touch"].is_null());
}
