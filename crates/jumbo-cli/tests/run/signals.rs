//! Signals: forwarding, stop and continue, end.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Stdio};

use crate::support::{MODES, Mode, Running, child_of, kill, run, skip, state, stdout, until};

/// A shell script that writes `file` once its traps are set, and waits.
fn trapping(traps: &str, file: &std::path::Path) -> String {
    format!(
        "{traps}; echo ready > {}; while :; do sleep 0.02; done",
        file.display()
    )
}

/// A shell cannot trap a signal that was ignored at its start. Some are ignored below nohup(1) and
/// in the background of a script, where tests may run.
const BASH: [&str; 4] = ["env", "--default-signal", "bash", "-c"];

/// Runs a script under jumbo and sends jumbo a signal once the script is ready.
fn send(mode: Mode, traps: &str, signal: &str) -> ExitStatus {
    send_to(run(mode), traps, signal)
}

fn send_to(mut jumbo: Command, traps: &str, signal: &str) -> ExitStatus {
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let script = trapping(traps, &ready);
    let mut jumbo = Running::start(jumbo.args(BASH).arg(&script));
    until("the program's start", || {
        fs::read(&ready).is_ok_and(|printed| !printed.is_empty())
    });
    kill(jumbo.pid(), signal);
    let mut status = None;
    until("its end", || {
        status = jumbo.0.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

#[test]
fn every_signal_reaches_the_program() {
    for mode in MODES {
        for signal in [
            "TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH", "ALRM", "CONT", "34", "64",
        ] {
            let status = send(mode, &format!("trap 'exit 42' {signal}"), signal);
            assert_eq!(status.code(), Some(42), "{mode:?} {signal}");
        }
    }
}

/// Starts jumbo with signals ignored, as below nohup(1). The program may handle them nevertheless.
fn ignoring(signals: &str, mode: Mode) -> Command {
    let jumbo = run(mode);
    let mut command = Command::new("env");
    command.arg(format!("--ignore-signal={signals}"));
    command.arg(jumbo.get_program()).args(jumbo.get_args());
    command
}

#[test]
fn a_signal_that_was_ignored_at_the_start_reaches_a_program_that_handles_it() {
    for mode in MODES {
        for signal in ["INT", "QUIT", "HUP", "TERM", "USR1", "PIPE"] {
            let trap = format!("trap 'exit 42' {signal}");
            let status = send_to(ignoring(signal, mode), &trap, signal);
            assert_eq!(status.code(), Some(42), "{mode:?} {signal}");
        }
    }
}

#[test]
fn what_is_ignored_is_inherited() {
    let ignored =
        |mut command: Command| stdout(command.args(["grep", "^Sig[BI]", "/proc/self/status"]));
    let mut plain = Command::new("env");
    plain.arg("--ignore-signal=INT,HUP,QUIT,PIPE,CHLD,40");
    let expected = ignored(plain);
    for mode in MODES {
        let jumbo = ignoring("INT,HUP,QUIT,PIPE,CHLD,40", mode);
        assert_eq!(ignored(jumbo), expected, "{mode:?}");
    }
}

#[test]
fn a_signal_that_is_not_caught_ends_both() {
    for mode in MODES {
        assert_eq!(send(mode, ":", "TERM").signal(), Some(15), "{mode:?}");
    }
}

#[test]
fn a_program_that_ignores_sigterm_goes_on() {
    for mode in MODES {
        let folder = tempfile::tempdir().unwrap();
        let ready = folder.path().join("ready");
        let script = trapping("trap '' TERM; trap 'exit 5' USR1", &ready);
        let mut jumbo = Running::start(run(mode).args(BASH).arg(&script));
        until("the start", || {
            fs::read(&ready).is_ok_and(|printed| !printed.is_empty())
        });
        kill(jumbo.pid(), "TERM");
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(jumbo.0.try_wait().unwrap().is_none(), "{mode:?}");
        kill(jumbo.pid(), "USR1");
        assert_eq!(jumbo.0.wait().unwrap().code(), Some(5), "{mode:?}");
    }
}

#[test]
fn the_value_of_a_queued_signal_comes_along() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    // Python's sigwaitinfo omits the value: int 6 of siginfo_t on 64-bit systems.
    let python = "import ctypes, sys\n\
        libc, signals, info = ctypes.CDLL(None), (ctypes.c_long * 16)(), (ctypes.c_int * 32)()\n\
        libc.sigaddset(signals, 40)\n\
        libc.sigprocmask(0, signals, None)\n\
        open(sys.argv[1], 'w').write('ready')\n\
        libc.sigwaitinfo(signals, info)\n\
        sys.exit(info[6])";
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    for mode in MODES {
        let _ = fs::remove_file(&ready);
        let mut jumbo = Running::start(run(mode).args(["python3", "-c", python]).arg(&ready));
        until("the start", || {
            fs::read(&ready).is_ok_and(|printed| !printed.is_empty())
        });
        let pid = jumbo.pid().to_string();
        let sent = Command::new("/bin/kill")
            .args(["-q", "7", "-s", "40", &pid])
            .output();
        if !sent.is_ok_and(|output| output.status.success()) {
            skip(
                "the_value_of_a_queued_signal_comes_along",
                "/bin/kill has no -q",
            );
            return;
        }
        assert_eq!(jumbo.0.wait().unwrap().code(), Some(7), "{mode:?}");
    }
}

#[test]
fn without_a_terminal_jumbo_goes_on_while_the_program_is_stopped() {
    let mut command = Command::new("setsid");
    command.args([
        env!("CARGO_BIN_EXE_jumbo"),
        "run",
        "--report-file=/dev/null",
        "--",
        "sleep",
        "60",
    ]);
    let mut jumbo = Running::start(&mut command);
    let program = child_of(jumbo.pid(), "sleep");
    kill(program, "STOP");
    until("the stop", || matches!(state(program), Some('T' | 't')));
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert_ne!(state(jumbo.pid()), Some('T'));
    kill(jumbo.pid(), "CONT");
    until("the program going on", || state(program) == Some('S'));
    kill(jumbo.pid(), "TERM");
    assert_eq!(jumbo.0.wait().unwrap().signal(), Some(15));
}

#[test]
fn what_the_program_sends_to_its_parent_does_not_come_back() {
    // The senders stay alive.
    let script = "kill -USR1 $PPID; sh -c 'kill -USR2 $1; echo sent; exec tail --pid=$PPID -f /dev/null' - $PPID & wait";
    let mut command = run(Mode::Parent);
    command.args(["sh", "-c", script]).stdout(Stdio::piped());
    let mut jumbo = Running::start(&mut command);
    let mut printed = String::new();
    let mut stdout = BufReader::new(jumbo.0.stdout.take().unwrap());
    stdout.read_line(&mut printed).unwrap();
    assert_eq!(printed, "sent\n");
    // The kernel delivers the lowest signal number first, to jumbo and to the program.
    kill(jumbo.pid(), "TERM");
    assert_eq!(jumbo.0.wait().unwrap().signal(), Some(15));
}

/// jumbo cannot tell whose child an ended sender was; but the sender wrote into the ledger.
#[test]
fn what_a_short_lived_child_sends_does_not_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let script = "echo ready; until [ -e \"$1\" ]; do sleep 0.01; done
        /bin/kill -USR1 $PPID; echo sent; exec sleep 60";
    let mut command = run(Mode::Parent);
    command.args(["sh", "-c", script, "-"]).arg(&go);
    let mut jumbo = Running::start(command.stdout(Stdio::piped()));
    let mut lines = BufReader::new(jumbo.0.stdout.take().unwrap()).lines();
    let mut printed = || lines.next().unwrap().unwrap();
    assert_eq!(printed(), "ready");
    // jumbo reads the signal after the sender was reaped.
    kill(jumbo.pid(), "STOP");
    until("the stop", || state(jumbo.pid()) == Some('T'));
    fs::write(&go, "").unwrap();
    assert_eq!(printed(), "sent");
    kill(jumbo.pid(), "CONT");
    kill(jumbo.pid(), "TERM");
    assert_eq!(jumbo.0.wait().unwrap().signal(), Some(15));
}

#[test]
fn killing_jumbo_kills_the_program() {
    let mut jumbo = Running::start(run(Mode::Parent).args(["sleep", "60"]));
    let program = child_of(jumbo.pid(), "sleep");
    kill(jumbo.pid(), "KILL");
    assert_eq!(jumbo.0.wait().unwrap().signal(), Some(9));
    until("the program's end", || {
        !matches!(state(program), Some('S' | 'R' | 'D'))
    });
}

#[test]
fn an_alarm_set_before_reaches_the_program() {
    for mode in ["--quiet", "--report-file=/dev/null"] {
        let perl = "alarm 1; exec @ARGV";
        let mut command = Command::new("perl");
        command.args([
            "-e",
            perl,
            env!("CARGO_BIN_EXE_jumbo"),
            "run",
            mode,
            "--",
            "sleep",
            "60",
        ]);
        let mut running = Running::start(&mut command);
        assert_eq!(running.0.wait().unwrap().signal(), Some(14), "{mode}");
    }
}
