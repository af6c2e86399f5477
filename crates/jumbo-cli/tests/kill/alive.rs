//! Targets that survive, and interrupted commands: the target is unchanged.

use std::process::Stdio;

use crate::victim::{Victim, jumbo, kill, until};

/// Checks that the victim is running or sleeping.
#[track_caller]
fn assert_as_it_was(victim: &Victim) {
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
    victim.signal(libc::SIGCONT);
    victim.expect("handled");
    assert_as_it_was(&victim);
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
