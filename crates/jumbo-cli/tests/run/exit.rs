//! Exit codes, signals, and programs that cannot be started.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;

use crate::support::{MODES, Mode, executable, jumbo, output, run, stderr, stdout};

#[test]
fn the_exit_code_is_the_program_s() {
    for mode in MODES {
        for code in [0, 1, 7, 125, 255] {
            let status = output(run(mode).args(["sh", "-c", &format!("exit {code}")])).status;
            assert_eq!(status.code(), Some(code), "{mode:?}");
        }
    }
}

#[test]
fn a_signal_that_kills_the_program_kills_jumbo() {
    for mode in MODES {
        for (name, number) in [("KILL", 9), ("TERM", 15), ("SEGV", 11), ("RTMIN", 34)] {
            let status = output(run(mode).args([
                "env",
                "--default-signal",
                "bash",
                "-c",
                &format!("kill -s {name} $$"),
            ]))
            .status;
            assert_eq!(status.signal(), Some(number), "{mode:?} {name}");
        }
    }
    let shell = format!(
        "{} run -- sh -c 'kill -9 $$'; echo $?",
        env!("CARGO_BIN_EXE_jumbo")
    );
    let message = stdout(std::process::Command::new("sh").args(["-c", &shell]));
    assert_eq!(message, "137\n");
}

#[test]
fn no_core_is_left_by_jumbo_itself() {
    let folder = tempfile::tempdir().unwrap();
    let script = "ulimit -c 0; kill -s QUIT $$";
    let status = output(
        run(Mode::Parent)
            .current_dir(&folder)
            .args(["sh", "-c", script]),
    )
    .status;
    assert_eq!((status.signal(), status.core_dumped()), (Some(3), false));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn what_cannot_be_started_says_so_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("plain");
    fs::write(&plain, "no program").unwrap();
    let orphan = folder.path().join("orphan");
    executable(&orphan, "#!/nonexistent/interpreter\n");
    let cases = [
        ("/nonexistent", 127),
        ("no-such-program-anywhere", 127),
        ("", 127),
        (plain.to_str().unwrap(), 126),
        (folder.path().to_str().unwrap(), 126),
        (orphan.to_str().unwrap(), 127),
    ];
    for mode in MODES {
        for (program, code) in cases {
            let output = output(run(mode).arg(program));
            let message = stderr(&output);
            assert_eq!(
                output.status.code(),
                Some(code),
                "{mode:?} {program}: {message}"
            );
            assert_eq!(message.lines().count(), 1, "{message}");
            assert!(message.contains(&format!("`{program}`")), "{message}");
        }
    }
}

#[test]
fn an_error_that_cannot_be_written_keeps_its_exit_code() {
    for mode in MODES {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let status = run(mode).arg("/nonexistent").stderr(full).status();
        assert_eq!(status.unwrap().code(), Some(127), "{mode:?}");
    }
}

#[test]
fn without_descriptors_the_program_runs_and_there_is_no_report() {
    let jumbo = env!("CARGO_BIN_EXE_jumbo");
    // One descriptor suffices for the loader, but not for the pipe to a child.
    let script = format!("ulimit -n 4; exec {jumbo} run --report -- sh -c 'echo $$ alive; exit 4'");
    let child = std::process::Command::new("sh")
        .args(["-c", &script])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(4), "{message}");
    assert_eq!(output.stdout, format!("{pid} alive\n").as_bytes());
    assert!(
        message.contains("no report") && message.lines().count() == 1,
        "{message}"
    );
}

#[test]
fn a_file_in_path_that_may_not_be_executed_is_126() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(first.path().join("tool"), "#!/bin/sh\nexit 3").unwrap();
    let path = format!("{}:{}", first.path().display(), second.path().display());
    let status = output(run(Mode::Exec).env("PATH", &path).arg("tool")).status;
    assert_eq!(status.code(), Some(126));
    // An executable file in a later folder of PATH runs.
    let tool = second.path().join("tool");
    executable(&tool, "#!/bin/sh\nexit 3");
    let status = output(run(Mode::Exec).env("PATH", &path).arg("tool")).status;
    assert_eq!(status.code(), Some(3));
}

#[test]
fn a_script_without_an_interpreter_line_is_the_shell_s() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    executable(&script, "echo \"$1\"; exit 4\n");
    for mode in MODES {
        let output = output(run(mode).arg(&script).arg("an argument"));
        assert_eq!(output.status.code(), Some(4), "{mode:?}");
        assert_eq!(output.stdout, b"an argument\n");
    }
}

#[test]
fn jumbo_s_own_failures_are_125_and_wrong_usage_is_2() {
    let output = output(
        jumbo()
            .env("JUMBO_PRELOAD", "/nonexistent.so")
            .args(["run", "true"]),
    );
    assert_eq!(output.status.code(), Some(125));
    let message = stderr(&output);
    assert!(
        message.contains("/nonexistent.so") && message.contains("hint:"),
        "{message}"
    );
    for wrong in [
        &["run"][..],
        &["run", "--haep=on", "true"],
        &["run", "--max-waste=101", "true"],
        &["run", "--keep=101%", "true"],
        &["run", "--keep=64M", "--heap=off", "true"],
    ] {
        assert_eq!(
            crate::support::output(jumbo().args(wrong)).status.code(),
            Some(2),
            "{wrong:?}"
        );
    }
}

#[test]
fn options_after_the_program_are_the_program_s() {
    let message = stdout(jumbo().args(["run", "--heap=on", "echo", "--heap=off", "--", "-q"]));
    assert_eq!(message, "--heap=off -- -q\n");
}
