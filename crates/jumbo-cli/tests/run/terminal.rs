//! Behaviour on a terminal: report, Ctrl-C, Ctrl-Z, fg.

use std::io::{Read as _, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::support::{library, skip};

/// A command on a terminal of its own, made by script(1).
struct Session {
    script: Child,
    input: ChildStdin,
    output: Receiver<Vec<u8>>,
    seen: String,
}

impl Session {
    fn start(command: &str) -> Option<Self> {
        library();
        let mut script = Command::new("script")
            // Without exec the shell of script(1) would lead the session, and its death by SIGQUIT
            // would hang up all processes of the session.
            .args(["-qec", &format!("exec {command}"), "/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .env("PS1", "$ ")
            .env("TERM", "dumb")
            .spawn()
            .ok()?;
        let (input, mut stdout) = (script.stdin.take()?, script.stdout.take()?);
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = stdout.read(&mut buffer) {
                if sender.send(buffer[..read].to_vec()).is_err() {
                    break;
                }
            }
        });
        Some(Self {
            script,
            input,
            output,
            seen: String::new(),
        })
    }

    fn send(&mut self, text: &str) {
        self.input.write_all(text.as_bytes()).unwrap();
        self.input.flush().unwrap();
    }

    /// Waits for `marker` and returns the output up to its end.
    fn expect(&mut self, marker: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(at) = self.seen.find(marker) {
                let rest = self.seen.split_off(at + marker.len());
                return std::mem::replace(&mut self.seen, rest);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.seen.push_str(&String::from_utf8_lossy(&bytes)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("no `{marker}` in `{}`", self.seen)
                }
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

const JUMBO: &str = env!("CARGO_BIN_EXE_jumbo");

#[test]
fn on_a_terminal_there_is_a_report_and_the_program_has_the_terminal() {
    let command = format!("{JUMBO} run -- sh -c \"tty; test -t 0 && test -t 1 && echo is one\"");
    let Some(mut session) = Session::start(&command) else {
        skip("on_a_terminal_there_is_a_report", "there is no script(1)");
        return;
    };
    session.expect("/dev/pts/");
    session.expect("is one");
    session.expect("jumbo: sh exited with 0");
    session.expect("--report=full says more");
}

#[test]
fn on_a_terminal_a_process_that_is_not_there_is_said() {
    // No kernel has that PID.
    let command = format!("{JUMBO} wait --timeout 0 2000000000");
    let Some(mut session) = Session::start(&command) else {
        skip(
            "on_a_terminal_a_process_that_is_not_there_is_said",
            "there is no script(1)",
        );
        return;
    };
    session.expect("there is no process 2000000000; waiting");
}

/// Kills on a request for the terminal's settings. The filters of containers refuse instead.
#[test]
fn under_a_filter_a_terminal_is_known_by_its_name() {
    let name = "under_a_filter_a_terminal_is_known_by_its_name";
    let folder = tempfile::tempdir().unwrap();
    let filter = folder.path().join("under_filter");
    let source = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/programs/under_filter.c"
    );
    let mut cc = Command::new("cc");
    if !cc
        .arg("-o")
        .arg(&filter)
        .arg(source)
        .status()
        .is_ok_and(|status| status.success())
    {
        return skip(name, "there is no C compiler");
    }
    let filter = filter.display();
    let command = format!("{filter} ioctl {JUMBO} run -- sh -c \"exit 0\"");
    let Some(mut session) = Session::start(&command) else {
        return skip(name, "there is no script(1)");
    };
    session.expect("jumbo: sh exited with 0");
    session.expect("--report=full says more");
}

#[test]
fn ctrl_c_reaches_the_program_once() {
    let program =
        "trap \"echo got one\" INT; trap \"exit 3\" QUIT; echo ready; while :; do sleep 0.05; done";
    let command = format!("{JUMBO} run --report -- bash -c '{program}'");
    let Some(mut session) = Session::start(&command) else {
        skip("ctrl_c_reaches_the_program_once", "there is no script(1)");
        return;
    };
    session.expect("ready");
    session.send("\x03");
    session.expect("got one");
    std::thread::sleep(Duration::from_millis(300));
    session.send("\x1c");
    let rest = session.expect("jumbo: bash");
    assert!(!rest.contains("got one"), "Ctrl-C arrived twice: {rest}");
    session.expect("exited with 3");
}

#[test]
fn ctrl_z_stops_the_job_and_fg_continues_it() {
    let Some(mut session) = Session::start("bash --norc --noprofile -i") else {
        skip(
            "ctrl_z_stops_the_job_and_fg_continues_it",
            "there is no script(1)",
        );
        return;
    };
    session.send(&format!(
        "{JUMBO} run --report -- sh -c 'echo re''ady; read line; echo got $line; exit 5'\n"
    ));
    session.expect("ready");
    session.send("\x1a");
    session.expect("Stopped");
    session.send("echo back in th''e shell\n");
    session.expect("back in the shell");
    session.send("fg\n");
    session.send("a line\n");
    session.expect("got a line");
    session.expect("exited with 5");
    session.send("echo status $?.\n");
    session.expect("status 5.");
}

/// The job's stop signal stops jumbo, too; another process may continue the program alone.
#[test]
fn a_program_continued_alone_goes_on() {
    for options in ["--report", "--pool=16M --quiet"] {
        let Some(mut session) = Session::start("bash --norc --noprofile -i") else {
            skip("a_program_continued_alone_goes_on", "there is no script(1)");
            return;
        };
        // Not a shell that starts sleep(1): a stop between vfork and exec would block both.
        let program = "$| = 1; $SIG{CONT} = sub { print \"cont\".\"inued\\n\" }; \
            $SIG{TERM} = sub { exit 6 }; print \"re\".\"ady\\n\"; sleep 1 while 1";
        session.send(&format!("{JUMBO} run {options} -- perl -e '{program}'\n"));
        session.expect("ready");
        session.send("\x1a");
        session.expect("Stopped");
        session.send("program=$(cat /proc/$(jobs -p)/task/*/children); kill -CONT $program\n");
        session.expect("continued");
        session.send("kill -TERM $program; fg\n");
        session.expect("run");
        session.send("echo status $?.\n");
        session.expect("status 6.");
    }
}

#[test]
fn a_new_window_size_is_the_program_s_too() {
    let program = "trap \"stty size </dev/tty\" WINCH; echo ready; while :; do sleep 0.05; done";
    let command = format!(
        "{JUMBO} run --report -- bash -c '{program}' & read line; stty rows 33 cols 77; wait"
    );
    let Some(mut session) = Session::start(&command) else {
        skip(
            "a_new_window_size_is_the_program_s_too",
            "there is no script(1)",
        );
        return;
    };
    session.expect("ready");
    session.send("\n");
    session.expect("33 77");
    session.send("\x03");
}
