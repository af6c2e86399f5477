//! Targets that survive, and interrupted commands: the target is unchanged.

use std::process::Stdio;

use crate::victim::{Victim, jumbo, kill, until};

/// Checks that the victim is untraced, and running or sleeping.
#[track_caller]
fn assert_as_it_was(victim: &Victim) {
    assert_eq!(victim.status("TracerPid"), "0");
    let state = victim.status("State");
    assert!(state.starts_with(['S', 'R']), "{state}");
}

#[test]
fn a_target_that_handles_the_signal_lives_on() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let mut victim = Victim::start("signal.signal(signal.SIGTERM, lambda *_: say('handled'))");
    let (row, code) = kill(&["--timeout", "0.2"], victim.pid());
    assert_eq!(code, Some(1));
    assert_eq!(row["outcome"], "alive", "{row}");
    assert_eq!(row["reason"], "it handles SIGTERM", "{row}");
    victim.expect("handled");
    assert_as_it_was(&victim);
    // Signals reach the target again.
    victim.signal(libc::SIGTERM);
    victim.expect("handled");
}

#[test]
fn why_it_lives_on_is_said() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    for (script, why) in [
        (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
            "it ignores SIGTERM",
        ),
        (
            "signal.pthread_sigmask(signal.SIG_BLOCK, [15])",
            "it has blocked SIGTERM",
        ),
    ] {
        let victim = Victim::start(script);
        let output = jumbo(&["-t", "0"], victim.pid()).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(
            message.contains(why) && message.contains("hint: "),
            "{message}"
        );
        assert_eq!(output.status.code(), Some(1));
        assert_as_it_was(&victim);
    }
}

#[test]
fn a_stopped_target_stays_stopped_and_gets_the_signal_later() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let mut victim = Victim::start("signal.signal(signal.SIGTERM, lambda *_: say('handled'))");
    victim.signal(libc::SIGSTOP);
    until("the stop", || victim.status("State").starts_with('T'));
    let (row, code) = kill(&["--timeout", "0.1"], victim.pid());
    assert_eq!(
        (code, row["outcome"].as_str()),
        (Some(1), Some("alive")),
        "{row}"
    );
    assert!(row["reason"].as_str().unwrap().contains("stopped"), "{row}");
    until("the stop", || victim.status("State").starts_with('T'));
    assert_eq!(victim.status("TracerPid"), "0");
    victim.signal(libc::SIGCONT);
    victim.expect("handled");
    assert_as_it_was(&victim);
}

/// Another process stops and continues the target while jumbo holds it.
#[test]
fn stops_and_continues_pass_through() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let script = "signal.signal(signal.SIGTERM, lambda *_: say('handled'))
signal.signal(signal.SIGCONT, lambda *_: say('continued'))";
    let mut victim = Victim::start(script);
    let mut command = jumbo(&["--timeout", "600"], victim.pid());
    let mut command = command.stdout(Stdio::null()).spawn().unwrap();
    victim.expect("handled");
    for signal in [libc::SIGSTOP, libc::SIGTSTP] {
        victim.signal(signal);
        until("the stop", || {
            victim.status("State").starts_with(['t', 'T'])
        });
        victim.signal(libc::SIGCONT);
        victim.expect("continued");
        until("going on", || {
            victim.status("State").starts_with(['S', 'R'])
        });
    }
    victim.signal(libc::SIGKILL);
    assert!(command.wait().unwrap().success());
}

#[test]
fn interrupted_it_leaves_the_target_as_it_was() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    use std::os::unix::process::ExitStatusExt as _;
    for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGKILL] {
        let mut victim = Victim::start("signal.signal(signal.SIGTERM, lambda *_: say('handled'))");
        let mut command = jumbo(&["--timeout", "600"], victim.pid());
        let command = command.stderr(Stdio::piped()).spawn().unwrap();
        victim.expect("handled");
        assert_ne!(victim.status("TracerPid"), "0");
        let pid = rustix::process::Pid::from_child(&command);
        let signal = rustix::process::Signal::from_named_raw(number).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        let output = command.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(number));
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            message.contains("interrupted: "),
            number != libc::SIGKILL,
            "{message}"
        );
        assert_as_it_was(&victim);
        victim.signal(libc::SIGTERM);
        victim.expect("handled");
    }
}

/// The kill signals cover the run time of the command.
#[test]
fn killed_at_any_moment_it_leaves_the_target_running() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let mut victim = Victim::start(
        "signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGUSR1, lambda *_: say('alive'))",
    );
    for microseconds in (0..6000).step_by(200) {
        let mut command = jumbo(&["--timeout", "600"], victim.pid()).spawn().unwrap();
        let moment = std::time::Duration::from_micros(microseconds);
        let start = std::time::Instant::now();
        while start.elapsed() < moment {
            std::hint::spin_loop();
        }
        command.kill().unwrap();
        command.wait().unwrap();
        assert_as_it_was(&victim);
        victim.signal(libc::SIGUSR1);
        victim.expect("alive");
    }
}
