//! Tests of `jumbo compare` on programs that behave alike, that differ, and that fail, without
//! times.

#![allow(
    clippy::unwrap_used,
    reason = "a command that cannot be run fails its test"
)]

#[allow(dead_code, reason = "shared with other tests")]
#[path = "../../../tests/support/needs.rs"]
mod needs;

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn compare(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jumbo"));
    command.args(["compare", "--runs", "2"]).args(arguments);
    command
        .env_remove("LD_PRELOAD")
        .env_remove("JUMBO_ORDERS")
        .stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = compare(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

fn json(arguments: &[&str]) -> (Option<i32>, Value) {
    let (code, text, stderr) = run(&[&["--json"], arguments].concat());
    (
        code,
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("{stderr}")),
    )
}

#[test]
fn a_program_that_does_the_same_is_compared_in_80_columns() {
    let (code, text, stderr) = run(&["--modes", "default,glibc", "--", "echo", "hello"]);
    assert_eq!(code, Some(0), "{text}{stderr}");
    assert!(
        text.contains("Output and exit status were the same in all runs."),
        "{text}"
    );
    assert!(
        text.starts_with("echo hello: 2 runs of each kind"),
        "{text}"
    );
    for name in ["plain", "jumbo run: ", "jumbo run --heap=glibc: "] {
        assert!(text.contains(name), "{name}: {text}");
    }
    assert!(
        text.lines().all(|line| line.chars().count() <= 80),
        "{text}"
    );
    assert!(!text.contains("hello\n"), "{text}");
}

#[test]
fn the_json_has_ratios_with_the_noise_beside_them() {
    let options = ["--modes", "default", "--modes", "--heap=off --maps=off"];
    let (code, it) = json(&[&options[..], &["--", "true"]].concat());
    assert_eq!(code, Some(0), "{it:#}");
    for ratio in [
        "time",
        "time_aa",
        "time_rss",
        "time_rss_aa",
        "time_heap_off_maps_off",
    ] {
        assert!(
            it["ratios"][ratio]["median"].as_f64().unwrap() > 0.0,
            "{it:#}"
        );
    }
    for figure in [
        "time_ms",
        "user_ms",
        "system_ms",
        "rss_bytes",
        "faults",
        "huge_faults",
        "huge_percent",
    ] {
        for side in ["plain", "default", "heap_off_maps_off"] {
            let value = &it["values"][format!("time_{side}_{figure}")];
            assert!(
                value["median"].is_f64() && value["unit"].is_string(),
                "{side} {figure}: {it:#}"
            );
        }
    }
    assert_eq!(it["table"], "compare");
    assert_eq!(it["program"][0], "true");
    assert_eq!(it["ways"][0]["stdout"], "same");
    assert!(it["ways"][0]["time"]["noise"].is_f64());
}

#[test]
fn output_that_differs_by_itself_is_no_fault_of_jumbo() {
    let (code, it) = json(&["--", "sh", "-c", "date +%N; echo same >&2"]);
    let way = &it["ways"][0];
    assert_eq!(
        (&way["stdout"], &way["stderr"]),
        (&"differs_from_itself".into(), &"same".into())
    );
    assert_eq!(code, Some(0), "{it:#}");
    let (_, text, _) = run(&["--", "date", "+%N"]);
    assert!(text.contains("stdout differs from itself"), "{text}");
}

#[test]
fn output_or_a_status_that_differs_with_jumbo_is_told() {
    let script = "echo ${JUMBO_ORDERS:+other}; exit ${JUMBO_ORDERS:+7}";
    let (code, it) = json(&["--", "sh", "-c", script]);
    let way = &it["ways"][0];
    assert_eq!(
        (&way["stdout"], &way["status"]),
        (&"differs".into(), &"differs".into())
    );
    assert_eq!(
        (code, &way["ended"]),
        (Some(3), &"exit status: 7".into()),
        "{it:#}"
    );
    let (code, text, _) = run(&["--", "sh", "-c", script]);
    assert_eq!(code, Some(3));
    assert!(
        text.contains("WARNING: jumbo run ended with exit status: 7"),
        "{text}"
    );
    // A run that ended differently did other work: its figures are not comparable.
    for cost in ["time", "cpu", "memory"] {
        assert_eq!(way[cost]["change"], "unknown", "{it:#}");
    }
    assert!(text.contains("time and memory say nothing"), "{text}");
}

#[test]
fn what_differs_with_a_peer_alone_is_told_and_no_fault_of_jumbo() {
    if let Err(why) = jumbo_bench::program::Way::peer("jemalloc") {
        return needs::skip(&why.to_string());
    }
    let script = "test -n \"$JUMBO_ORDERS\" || echo $LD_PRELOAD";
    // The jumbo run prints the text that the plain run prints.
    let script = format!("{script}; test -z \"$JUMBO_ORDERS\" || echo");
    let options = ["--peers", "jemalloc", "--", "sh", "-c", &script];
    let (code, it) = json(&options);
    let [ours, peer] = [&it["ways"][0], &it["ways"][1]];
    assert_eq!(
        [&ours["is_jumbo"], &peer["is_jumbo"]],
        [&Value::from(true), &Value::from(false)]
    );
    assert_eq!(
        (&ours["stdout"], &peer["stdout"]),
        (&"same".into(), &"differs".into())
    );
    assert_eq!(code, Some(0), "{it:#}");
    let (_, text, _) = run(&options);
    assert!(
        text.contains("WARNING: jemalloc printed something else"),
        "{text}"
    );
}

#[test]
fn failures_and_signals_are_compared_too() {
    for (script, status) in [
        ("echo no such thing >&2; exit 3", "exit status: 3"),
        ("echo no such thing >&2; kill -9 $$", "signal: 9 (SIGKILL)"),
    ] {
        let (code, it) = json(&["--", "sh", "-c", script]);
        assert_eq!(
            (code, &it["plain_status"]),
            (Some(0), &status.into()),
            "{it:#}"
        );
        assert_eq!(it["ways"][0]["status"], "same");
        let (_, text, _) = run(&["--", "sh", "-c", script]);
        assert!(
            text.contains("It failed without jumbo too") && text.contains("no such thing"),
            "{text}"
        );
    }
    for (arguments, message) in [
        (&["--", "/nonexistent"][..], "cannot start `/nonexistent`"),
        (
            &["--prepare", "echo why; exit 1", "--", "true"],
            "failed with exit status: 1: why",
        ),
    ] {
        let (code, text, stderr) = run(arguments);
        assert_eq!((code, text.as_str()), (Some(1), ""), "{stderr}");
        assert!(stderr.contains(message), "{stderr}");
    }
}

#[test]
fn what_is_asked_wrongly_is_named() {
    for (arguments, named) in [
        (
            &["--modes", "best", "--", "true"][..],
            "there is no mode `best`",
        ),
        (&["--peers", "best", "--", "true"], "--peers"),
        (&["--load", "true", "--", "true"], "--for"),
        (
            &["--runs", "0", "--", "true"],
            "cannot be used multiple times",
        ),
        (&[], "PROGRAM"),
    ] {
        let (code, _, stderr) = run(arguments);
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.contains(named), "{stderr}");
    }
}

#[test]
fn preparations_and_input_come_afresh_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "input\n").unwrap();
    let count = folder.path().join("count");
    let prepare = format!("echo >> {}", count.display());
    let output = compare(&["--json", "--prepare", &prepare, "--", "cat"])
        .stdin(std::fs::File::open(&file).unwrap())
        .output()
        .unwrap();
    let it: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(it["ways"][0]["stdout"], "same", "{it:#}");
    // One first run; then a warm-up and two rounds of plain, jumbo and plain again.
    let lines = std::fs::read_to_string(&count).unwrap().len();
    assert!(lines >= 10, "{lines}");
}

#[test]
fn a_server_is_measured_by_its_load() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("served");
    let (path, server) = (
        file.display(),
        "trap 'exit 5' TERM; while :; do sleep 0.05; done",
    );
    let load = format!("echo >> {path}");
    let ready = format!("test -e {path} || {{ touch {path}; false; }}");
    let (code, it) = json(&[
        "--for", "0.2", "--ready", &ready, "--load", &load, "--", "sh", "-c", server,
    ]);
    assert_eq!(code, Some(0), "{it:#}");
    assert!(std::fs::metadata(&file).unwrap().len() > 6);
    assert!(it["ways"][0]["status"].is_null() && it["ways"][0]["stdout"].is_null());
    let (_, text, _) = run(&["--for", "0.1", "--load", "true", "--", "sh", "-c", server]);
    assert!(
        text.contains("how it ends and what it prints was not compared"),
        "{text}"
    );
    assert!(!text.contains("exit status"), "{text}");
    // Without a terminal each run prints a line.
    let (_, _, stderr) = run(&["--for", "0.1", "--load", "true", "--", "sh", "-c", server]);
    for line in [
        "warm-up: program: plain",
        "round 2 of 2: program: jumbo run",
    ] {
        assert!(stderr.contains(&format!("jumbo: {line}")), "{stderr}");
    }
    let failing = [
        "--for",
        "1",
        "--load",
        "false",
        "--",
        "sh",
        "-c",
        "echo cannot listen >&2; exit 9",
    ];
    let (code, _, stderr) = run(&failing);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("exit status: 9: cannot listen"), "{stderr}");
}

#[test]
fn the_figures_of_a_load_are_shown() {
    let server = ["--", "sh", "-c", "while :; do sleep 0.05; done"];
    let load = "echo 'SET: 1250.00 requests per second, p50=0.500 msec'; echo 'took 7 ms'";
    let options = ["--for", "0.1", "--load", load];
    let (code, it) = json(&[&options[..], &server].concat());
    assert_eq!(code, Some(0), "{it:#}");
    for served in [&it["plain_served"], &it["ways"][0]["served"]] {
        assert_eq!(served["throughput"], 1250.0, "{it:#}");
        assert_eq!(served["p50_ms"], 0.5, "{it:#}");
        assert!(served["p99_ms"].is_null(), "{it:#}");
    }
    let regex = ["--latency-regex", "took ([0-9]+) ms"];
    let (_, text, _) = run(&[&options[..], &regex, &server].concat());
    let row = text.lines().find(|line| line.contains("1250/s"));
    assert!(row.is_some_and(|row| row.contains("7.0 ms")), "{text}");
    let (code, _, stderr) = run(&[&options[..], &["--latency-regex", "took"], &server].concat());
    assert_eq!(code, Some(2));
    assert!(stderr.contains("it has no group"), "{stderr}");
}

#[test]
fn a_program_that_cannot_be_reached_is_said_to_be_so() {
    // The ELF headers name no loader.
    let folder = tempfile::tempdir().unwrap();
    let [source, program] = ["static.c", "static"].map(|name| folder.path().join(name));
    std::fs::write(&source, "int main(void) { return 0; }").unwrap();
    let compiled = Command::new("gcc")
        .args(["-static", "-o"])
        .args([&program, &source])
        .status();
    assert!(compiled.unwrap().success());
    let program = program.to_str().unwrap();
    let (_, it) = json(&["--", program]);
    assert!(
        it["unreached"]
            .as_str()
            .unwrap()
            .contains("statically linked"),
        "{it:#}"
    );
    let (_, text, _) = run(&["--", program]);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        text.contains("LD_PRELOAD cannot reach this program"),
        "{text}"
    );
    let (_, it) = json(&["--", "true"]);
    assert!(it["unreached"].is_null(), "{it:#}");
    // The peak must not include memory of the command that starts the program.
    let small = it["values"]["time_plain_rss_bytes"]["median"]
        .as_f64()
        .unwrap();
    assert!(small < f64::from(4 << 20), "{small}");
}

#[test]
fn a_signal_ends_it_and_all_that_it_started() {
    let folder = tempfile::tempdir().unwrap();
    let pids = folder.path().join("pids");
    let script = format!(
        "echo $$ >> {0}; sleep 1000 & echo $! >> {0}; wait",
        pids.display()
    );
    let mut jumbo = compare(&["--", "sh", "-c", &script]);
    let mut jumbo = jumbo.stdout(Stdio::piped()).spawn().unwrap();
    let clock = Instant::now();
    let read = || std::fs::read_to_string(&pids).unwrap_or_default();
    while read().lines().count() < 2 {
        assert!(clock.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
    // SIGINT may be ignored, as in the background of a shell.
    let pid = rustix::process::Pid::from_child(&jumbo);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = jumbo.wait().unwrap();
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&status),
        Some(15),
        "{status}"
    );
    for pid in read().lines() {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "{state}");
    }
}

#[test]
fn without_a_thread_it_fails_and_leaves_no_process() {
    const USER: u32 = 64999;
    if !rustix::process::geteuid().is_root() || needs::command("prlimit").is_none() {
        return needs::skip("only root can become a user without other processes");
    }
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let mut copy = Command::new("cp");
    copy.arg(env!("CARGO_BIN_EXE_jumbo")).arg(folder.path());
    assert!(copy.status().unwrap().success());
    for limit in 1..4 {
        let mut command = Command::new("prlimit");
        command
            .arg(format!("--nproc={limit}"))
            .arg(folder.path().join("jumbo"));
        command.args(["compare", "--runs=1", "--", "sleep", "1000"]);
        let output = command.uid(USER).gid(USER).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{limit}: {text}");
        assert!(
            text.contains("cannot start `sleep 1000`: Resource temp"),
            "{text}"
        );
        assert!(
            text.contains("hint: raise the limit of processes"),
            "{text}"
        );
    }
    let mut left = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let is_its = |meta: std::fs::Metadata| meta.uid() == USER;
    assert!(!left.any(|entry| entry.metadata().is_ok_and(is_its)));
}
