//! Tests of `jumbo top` on a pseudo-terminal of tmux(1): the tests send keys and read the screen.

use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::{Program, Running, Source, build, compile, host, wait};

/// A terminal that runs a shell script.
struct Terminal {
    folder: tempfile::TempDir,
}

impl Terminal {
    /// A terminal of 80 columns and 24 lines; `None`, and a reported skip, without tmux. `script`
    /// finds the command in $JUMBO.
    #[track_caller]
    fn start(script: &str) -> Option<Self> {
        host::command("tmux")?;
        let terminal = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let jumbo = format!("JUMBO={}", build::jumbo().display());
        let folder = format!("OUT={}", terminal.folder.path().display());
        let size = ["-x", "80", "-y", "24"];
        let more = ["-e", &jumbo, "-e", &folder, "bash", "--norc", "-c", script];
        let start = [&["-f", "/dev/null", "new-session", "-d"][..], &size, &more].concat();
        let (printed, is_success) = terminal.tmux(&start);
        assert!(is_success, "{printed}");
        Some(terminal)
    }

    fn tmux(&self, arguments: &[&str]) -> (String, bool) {
        let mut command = Command::new("tmux");
        command.arg("-S").arg(self.folder.path().join("socket"));
        // A tmux around the tests must not interfere.
        let ran = command.args(arguments).env_remove("TMUX").output().unwrap();
        let printed = [ran.stdout, ran.stderr].concat();
        (
            String::from_utf8_lossy(&printed).into_owned(),
            ran.status.success(),
        )
    }

    fn send(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    /// Returns the value of a tmux format such as `#{alternate_on}`.
    fn state(&self, format: &str) -> String {
        self.tmux(&["display-message", "-p", format])
            .0
            .trim()
            .to_owned()
    }

    /// Waits for a screen that satisfies `is_right` and returns it.
    #[track_caller]
    fn expect(&self, what: &str, is_right: impl Fn(&str) -> bool) -> String {
        let mut last = String::new();
        let right = || {
            last = self.tmux(&["capture-pane", "-p"]).0;
            is_right(&last).then(|| last.clone())
        };
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait::until(what, wait::TIMEOUT, right)
        }));
        found.unwrap_or_else(|_| panic!("no {what} on the screen:\n{last}"))
    }

    #[track_caller]
    fn expect_text(&self, text: &str) -> String {
        self.expect(text, |screen| screen.contains(text))
    }

    /// Returns the PID of the command, a child of the shell.
    fn jumbo(&self) -> Pid {
        let shell = self.state("#{pane_pid}");
        let children = format!("/proc/{shell}/task/{shell}/children");
        let child = std::fs::read_to_string(children).unwrap();
        Pid::from_raw(child.trim().parse().unwrap()).unwrap()
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

/// Saves the terminal's settings before and after the command, and stays.
const SAVE_SETTINGS: &str = "trap : INT; stty -a >$OUT/before; $JUMBO top --interval 0.5; echo \"ended $?\"; stty -a >$OUT/after; \
                       echo settled; read";

/// Returns the huge share of a process in percent, if known.
fn share(screen: &str, pid: &str) -> Option<u32> {
    let line = screen
        .lines()
        .find(|line| line.split_whitespace().next() == Some(pid))?;
    let share = line.split_whitespace().find(|word| word.ends_with('%'))?;
    share.trim_end_matches('%').parse().ok()
}

/// Starts a program with 48 MiB, on base pages unless THP is `always`; returns its name, too.
fn program() -> (Running, String) {
    let files = compile(&[Source::C("crash", &[])]);
    let running = Program::new(files.path("crash")).arg("stay").start_plain();
    running.wait_for_line("about to crash");
    let pid = running.pid().as_raw_nonzero().to_string();
    (running, pid)
}

#[test]
fn the_share_of_a_process_rises_and_falls() {
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let (_running, pid) = program();
    let Some(terminal) = Terminal::start(SAVE_SETTINGS) else {
        return;
    };
    terminal.expect_text("jumbo top: ");
    let shown = terminal.expect_text("[GAIN]");
    assert!(
        shown.contains("RESIDENT") && shown.contains("q quit"),
        "{shown}"
    );
    assert_eq!(terminal.state("#{alternate_on}#{cursor_flag}"), "10");

    terminal.send(&["/", &pid, "Enter"]);
    terminal.expect_text("1 of ");
    terminal.send(&[">"]);
    terminal.expect_text("[WASTE]");
    terminal.send(&["t"]);
    terminal.expect("tree", |screen| {
        screen.contains("  - /") && share(screen, &pid).is_some()
    });
    terminal.send(&["t"]);
    terminal.expect("list", |screen| {
        !screen.contains("  - /") && share(screen, &pid).is_some()
    });
    terminal.send(&["Enter"]);
    let detail = terminal.expect_text("ADDRESS");
    assert!(
        detail.contains("heap") && detail.contains("Promote"),
        "{detail}"
    );
    terminal.send(&["q"]);
    let shown = terminal.expect("share", |screen| share(screen, &pid).is_some());

    let promote = |arguments: &[&str]| {
        let all = [&["promote"], arguments, &[&pid]].concat();
        Program::new("true").jumbo_itself(&all).ok();
    };
    if share(&shown, &pid) < Some(10) {
        promote(&[]);
    }
    terminal.expect("rise", |screen| share(screen, &pid) >= Some(80));
    promote(&["--undo"]);
    terminal.expect("fall", |screen| share(screen, &pid) == Some(0));
    terminal.send(&["q"]);
    terminal.expect_text("ended 0");
}

#[test]
fn however_it_ends_the_terminal_is_as_it_was() {
    for (how, status) in [
        ("q", 0),
        ("C-c", 130),
        ("TERM", 143),
        ("HUP", 129),
        ("panic", 134),
    ] {
        // A release build has no forced panic.
        if how == "panic" && !cfg!(debug_assertions) {
            continue;
        }
        let script = match how {
            // The place of the shell's message about the kill is irrelevant.
            "panic" => format!("export JUMBO_TOP_PANIC=1 RUST_BACKTRACE=0; {SAVE_SETTINGS}"),
            _ => SAVE_SETTINGS.to_owned(),
        };
        let Some(terminal) = Terminal::start(&script) else {
            return;
        };
        if how != "panic" {
            terminal.expect_text("[GAIN]");
        }
        match how {
            "TERM" => kill_process(terminal.jumbo(), Signal::TERM).unwrap(),
            "HUP" => kill_process(terminal.jumbo(), Signal::HUP).unwrap(),
            "panic" => {}
            keys => terminal.send(&[keys]),
        }
        let end = terminal.expect_text("settled");
        assert!(end.contains(&format!("ended {status}")), "{how}: {end}");
        assert!(how != "panic" || end.contains("panicked at"), "{end}");
        assert_eq!(terminal.file("before"), terminal.file("after"), "{how}");
        assert_eq!(
            terminal.state("#{alternate_on}#{cursor_flag}"),
            "01",
            "{how}"
        );
    }
}

#[test]
fn it_stops_goes_on_and_fills_another_size() {
    let Some(terminal) = Terminal::start("exec bash --norc -i") else {
        return;
    };
    terminal.send(&["PS1='ready> '; $JUMBO top", "Enter"]);
    terminal.expect_text("[GAIN]");
    terminal.send(&["C-z"]);
    terminal.expect("prompt", |screen| {
        screen.contains("Stopped") && !screen.contains("[GAIN]")
    });
    assert_eq!(terminal.state("#{alternate_on}#{cursor_flag}"), "01");
    terminal.send(&["fg", "Enter"]);
    terminal.expect_text("[GAIN]");
    terminal.tmux(&["resize-window", "-x", "200", "-y", "50"]);
    terminal.expect("more columns", |screen| {
        screen.contains("COMMAND") && screen.contains("CGROUP")
    });
    terminal.send(&["q"]);
    terminal.expect("prompt", |screen| {
        screen.contains("ready>") && !screen.contains("[GAIN]")
    });
}

#[test]
fn a_user_sees_what_it_may() {
    if !host::root() {
        return;
    }
    let (_running, pid) = program();
    let ran = Program::new("true").unprivileged();
    let ran = ran
        .jumbo_itself(&["top", "--json", "--interval", "0.1"])
        .ok();
    let page: Value = serde_json::from_str(&ran.stdout).unwrap();
    let found = page["processes"].as_array().unwrap().iter();
    let is_it = |process: &&Value| process["pid"].as_u64() == pid.parse().ok();
    let process = found.clone().find(is_it).unwrap();
    assert!(process["anon"].as_u64() >= Some(48 << 20), "{process}");
    assert!(process["glance"].is_null(), "{process}");
    assert!(page["hidden"].as_u64() > Some(0), "{page}");
    let ran = Program::new("true").unprivileged();
    let ran = ran
        .jumbo_itself(&["top", "--once", "--interval", "0.1", "--sort", "resident"])
        .ok();
    assert!(ran.stdout.contains("unread: run it as root"), "{ran:?}");
}

#[test]
fn without_a_terminal_it_prints_one_sample_or_says_so() {
    let (_running, pid) = program();
    let top = |arguments: &[&str]| {
        let all = [&["top", "--interval", "0.1"], arguments].concat();
        Program::new("true").jumbo_itself(&all)
    };
    let refused = top(&[]);
    assert_eq!(refused.shell_status(), 2, "{refused:?}");
    assert!(
        refused.stderr.contains("hint: `jumbo top --once`"),
        "{refused:?}"
    );
    let text = top(&["--once"]).ok().stdout;
    assert!(share(&text, &pid).is_some(), "{text}");
    let tree = top(&["--once", "--tree"]).ok().stdout;
    assert!(
        tree.contains("- /") && share(&tree, &pid).is_some(),
        "{tree}"
    );
    let page: Value = serde_json::from_str(&top(&["--json"]).ok().stdout).unwrap();
    let found = page["processes"].as_array().unwrap().iter();
    let process = found
        .clone()
        .find(|process| process["pid"].as_u64() == pid.parse().ok());
    let glance = &process.unwrap()["glance"];
    let known = [&glance["gain"], &glance["huge"]["anon"]].map(Value::as_u64);
    let sum = known[0].unwrap() + known[1].unwrap();
    assert!(sum >= 47 << 20, "{glance}");
    assert!(
        page["host"]["rates"]["events"]["pgfault"].is_number(),
        "{page}"
    );
    let all = page["groups"]["/"]["processes"].as_u64();
    assert_eq!(all, Some(found.count() as u64));
}
