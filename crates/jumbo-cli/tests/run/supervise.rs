//! `--supervise`: the end is held and gains; everything else is as without. That the program cannot tell
//! is tested by the other modules, which run in this mode too.

use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{Running, child_of, jumbo, kill, library, output, skip, state, stderr, until};

const SIZE: u64 = 200 << 20;

/// A Python program with `SIZE` of base pages that then runs `script`.
fn python(script: &str) -> String {
    format!(
        "import ctypes, mmap, os, signal, sys, threading, time
libc = ctypes.CDLL(None)
memory = mmap.mmap(-1, {SIZE}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
memory[::4096] = b'J' * ({SIZE} // 4096)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory)) # for Python would unmap it at its end
{script}"
    )
}

/// Runs a command with `options`: its report, and how jumbo ended.
fn supervised(options: &[&str], command: &[&str]) -> (Value, std::process::ExitStatus) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let mut jumbo = jumbo();
    jumbo.args(["run", "--supervise", "--report=json", "--report-file"]);
    let output = output(jumbo.arg(&file).args(options).arg("--").args(command));
    let report = std::fs::read(&file).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (serde_json::from_slice(&report).unwrap(), output.status)
}

#[track_caller]
fn assert_released(report: &Value) {
    let supervised = &report["obtained"]["supervised"];
    assert!(supervised["reason"].is_null(), "{supervised}");
    let anonymous = supervised["anonymous"].as_u64().unwrap();
    assert!((SIZE..2 * SIZE).contains(&anonymous), "{supervised}");
    let released = supervised["released"].as_u64().unwrap();
    assert!(released > 0 && released <= anonymous, "{supervised}");
    assert!(
        supervised["teardown_ms"].as_f64().unwrap() > 0.0,
        "{supervised}"
    );
}

#[test]
fn every_end_is_held() {
    let exec = format!(
        "os.execlp('python3', 'python3', '-c', {:?})",
        python("sys.exit(4)")
    );
    // Not before the hold has moved on to it.
    let thread = "
def last():
    end = time.monotonic() + 60
    while 'TracerPid:\\t0\\n' in open('/proc/thread-self/status').read() and time.monotonic() < end:
        time.sleep(0.001)
    os._exit(5)
threading.Thread(target=last).start()
libc.syscall(60 if os.uname().machine == 'x86_64' else 93, 0)";
    let threads =
        "for _ in range(30): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
os.kill(os.getpid(), 15)";
    for (script, code, signal) in [
        ("", Some(0), None),
        ("sys.exit(7)", Some(7), None),
        ("os._exit(3)", Some(3), None),
        ("os.kill(os.getpid(), 9)", None, Some(9)),
        ("os.abort()", None, Some(6)),
        (exec.as_str(), Some(4), None),
        (thread, Some(5), None),
        (threads, None, Some(15)),
    ] {
        let (report, status) = supervised(&["--reaper=off"], &["python3", "-c", &python(script)]);
        assert_eq!((status.code(), status.signal()), (code, signal), "{script}");
        assert_released(&report);
        assert_eq!(report["requested"]["supervise"], true);
    }
}

#[test]
fn a_chain_of_programs_is_one_program() {
    let python = python("sys.exit(9)");
    let chain = "exec sh -c 'exec env python3 -c \"$0\"' \"$0\"";
    let (report, status) = supervised(&["--reaper=off"], &["sh", "-c", chain, &python]);
    assert_eq!(status.code(), Some(9));
    assert_released(&report);
}

#[test]
fn without_a_report_there_is_no_word() {
    for (script, expected) in [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)] {
        let shell = format!(
            "{} run --supervise -- sh -c '{script}'; echo $?",
            env!("CARGO_BIN_EXE_jumbo")
        );
        let output = output(Command::new("sh").args(["-c", &shell]));
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            format!("{expected}\n")
        );
        let said = stderr(&output);
        assert!(!said.contains("jumbo: "), "{said}");
    }
}

#[test]
fn the_report_for_people_has_a_line() {
    let mut jumbo = jumbo();
    jumbo.args(["run", "--supervise", "--report=full", "--reaper=off", "--"]);
    let output = output(jumbo.args(["python3", "-c", &python("")]));
    let said = stderr(&output);
    assert!(
        said.contains("  its end   ") && said.contains("from both sides"),
        "{said}"
    );
}

#[test]
fn a_profile_can_ask_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile.toml");
    std::fs::write(&profile, "supervise = true\n").unwrap();
    let mut jumbo = jumbo();
    jumbo
        .args(["run", "--dry-run", "--json", "--profile"])
        .arg(&profile);
    let output = output(jumbo.args(["--", "true"]));
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&plan["mode"], &plan["supervise"]),
        (&Value::from("parent"), &Value::from(true))
    );
}

/// Where a reaper shares the memory the kernel refuses, and the report says why.
#[test]
fn a_reaper_comes_first() {
    let (report, status) = supervised(&["--reaper=on"], &["python3", "-c", &python("")]);
    assert!(status.success());
    let running = report["obtained"]["reapers"].as_array().unwrap();
    if !running
        .iter()
        .any(|reaper| matches!(reaper["state"].as_str(), Some("running" | "done")))
    {
        return skip(
            "a_reaper_comes_first",
            &format!("no reaper runs here: {running:?}"),
        );
    }
    let reason = report["obtained"]["supervised"]["reason"].as_str().unwrap();
    assert!(reason.contains("shares its memory"), "{reason}");
}

#[test]
fn others_can_still_trace_its_children() {
    let script = "exec strace -qq -e trace=none -e signal=none true";
    let (_, status) = supervised(&[], &["sh", "-c", script]);
    match status.code() {
        Some(127) => skip("others_can_still_trace", "there is no strace"),
        code => assert_eq!(code, Some(0)),
    }
}

/// A program that gets privileges as it starts keeps them, is not traced, and that is said.
#[test]
fn a_set_user_id_program_keeps_its_privileges() {
    if !rustix::process::geteuid().is_root() {
        return skip("a_set_user_id_program", "only root can become another user");
    }
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let copies = [env!("CARGO_BIN_EXE_jumbo"), "/usr/bin/id"];
    let copied = Command::new("cp")
        .args(copies)
        .arg(library())
        .arg(folder.path())
        .status();
    assert!(copied.unwrap().success());
    let mode = |path: &std::path::Path, mode| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(path, mode).unwrap();
    };
    mode(folder.path(), 0o755);
    mode(&folder.path().join("id"), 0o4755);
    let mut jumbo = Command::new(folder.path().join("jumbo"));
    jumbo
        .uid(65534)
        .gid(65534)
        .args(["run", "--supervise", "--"]);
    let output = output(jumbo.arg(folder.path().join("id")).arg("-u"));
    let said = stderr(&output);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n", "{said}");
    // It may have ended before it was looked at.
    assert!(
        said.is_empty() || said.contains("not supervised: it may not be traced"),
        "{said}"
    );
}

/// If jumbo is killed the program goes with it, as without `--supervise`; stopped it does not.
#[test]
fn it_stops_and_goes_on_by_itself_while_jumbo_is_stopped_with_it() {
    let mut command = jumbo();
    command.args(["run", "--supervise", "--", "sleep", "60"]);
    let jumbo = Running::start(command.stdout(Stdio::null()));
    let program = child_of(jumbo.pid(), "sleep");
    for _ in 0..20 {
        kill(program, "STOP");
        until("the stop", || matches!(state(program), Some('T' | 't')));
        kill(program, "CONT");
        until("going on", || state(program) == Some('S'));
    }
    kill(jumbo.pid(), "KILL");
    until("the program's end", || {
        !matches!(state(program), Some('S' | 'R' | 'D' | 't' | 'T'))
    });
}
