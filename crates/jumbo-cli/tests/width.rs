//! Tests of the width of output: at most 80 columns on a terminal, one line a row in a pipe.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::process::{Command, Stdio};

const JUMBO: &str = env!("CARGO_BIN_EXE_jumbo");
const WIDTH: usize = 80;

fn skip(name: &str, reason: &str) {
    assert!(
        std::env::var_os("JUMBO_TEST_STRICT").is_none_or(|value| value != "1"),
        "SKIP {name}: {reason} (JUMBO_TEST_STRICT=1)"
    );
    eprintln!("SKIP {name}: {reason}");
}

/// Returns the output of a shell command on a terminal of `columns` columns, made by script(1),
/// without control sequences. `None` without script(1).
fn on_terminal(columns: usize, command: &str) -> Option<String> {
    let mut script = Command::new("script");
    // NO_COLOR: bold text is no wider.
    script
        .args([
            "-qec",
            &format!("stty cols {columns}; {command}"),
            "/dev/null",
        ])
        .env("NO_COLOR", "1")
        .stdin(Stdio::null());
    let output = script.output().ok()?;
    Some(plain(&String::from_utf8_lossy(&output.stdout)))
}

/// Removes escape sequences and overwritten progress bars.
fn plain(text: &str) -> String {
    let mut out = String::new();
    for line in text.replace("\r\n", "\n").lines() {
        let mut shown = String::new();
        let mut rest = line.rsplit('\r').next().unwrap_or_default().chars();
        while let Some(c) = rest.next() {
            match c {
                '\u{1b}' => drop(rest.find(|c| c.is_ascii_alphabetic())),
                c => shown.push(c),
            }
        }
        out.push_str(&shown);
        out.push('\n');
    }
    out
}

/// Returns the lines that are too wide, except for single words.
fn wide(shown: &str) -> Vec<&str> {
    let is_wide = |line: &&str| line.chars().count() > WIDTH && line.trim().contains(' ');
    shown.lines().filter(is_wide).collect()
}

/// Returns every command that the help lists.
fn commands() -> Vec<String> {
    let mut found = vec![String::new()];
    let mut at = 0;
    while let Some(command) = found.get(at).cloned() {
        let output = Command::new(JUMBO)
            .args(command.split_whitespace())
            .arg("--help")
            .output()
            .unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        let below = help.split("Commands:\n").nth(1).unwrap_or_default();
        let names = below
            .lines()
            .take_while(|line| !line.is_empty())
            .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
            .filter(|name| !name.is_empty() && *name != "help");
        found.extend(names.map(|name| format!("{command} {name}")));
        at += 1;
    }
    found
}

#[test]
fn no_help_is_wider() {
    let commands = commands();
    for known in [
        " run",
        " pool set",
        " bench heap",
        " text align",
        " cdi generate",
    ] {
        assert!(commands.iter().any(|command| command == known), "{known}");
    }
    for command in commands {
        for help in ["-h", "--help"] {
            let Some(shown) = on_terminal(WIDTH, &format!("{JUMBO} {command} {help}")) else {
                return skip("no_help_is_wider", "there is no script(1)");
            };
            assert!(shown.contains("Usage:"), "{command} {help}: {shown}");
            assert_eq!(wide(&shown), [""; 0], "{command} {help}");
        }
    }
}

#[test]
fn no_table_and_no_line_is_wider() {
    let own = std::process::id();
    for (command, part) in [
        ("status", "Page sizes"),
        ("status --top 100", "ANONYMOUS"),
        ("top --once --interval 0.1", "GAIN"),
        (&format!("status -p {own}"), "RESIDENT"),
        (&format!("status --mappings -p {own}"), "ADDRESS"),
        ("doctor", ""),
        ("pool show", "hugetlb pools"),
        ("thp show", "Folio sizes"),
        ("vmemmap show", "HVO"),
        (&format!("files show {JUMBO}"), "Huge page"),
        ("bench", "jumbo bench heap"),
        ("run --report -- true", "says more"),
        ("run --report=full -- true", "requested"),
        (
            "run --report=full -- sh -c 'sleep 0.3 | sleep 0.3'",
            "measured",
        ),
        ("run --dry-run -- sh", "memory"),
        ("run --pool 64M --dry-run -- sh", "pool"),
        ("compare --runs 5 -- true", "Output"),
        ("fleet compare --simulate 20", "drawn fleets"),
        ("pool set 2M --persistent 4 --dry-run", ""),
        ("plan custom --size 10M", "Pools"),
        ("thp set enabled=always 64K=always --dry-run", ""),
        ("kill --timeout 1 2000000000", ""),
        ("status -p no-such-program", "hint:"),
        ("export --listen 9841", "127.0.0.1:9841"),
        ("run --profile no-such-profile -- true", "hint:"),
    ] {
        let Some(shown) = on_terminal(WIDTH, &format!("{JUMBO} {command}")) else {
            return skip("no_table_and_no_line_is_wider", "there is no script(1)");
        };
        assert!(shown.contains(part), "{command}: {shown}");
        assert!(!shown.is_empty(), "{command}");
        assert_eq!(wide(&shown), [""; 0], "{command}");
    }
}

/// Small runs of the tables that are cheap to measure; the same code prints all tables.
#[test]
fn no_measured_table_is_wider() {
    for table in ["heap --size 64M", "exit --size 64M"] {
        let command = format!("{JUMBO} bench {table} --quick --rounds 1");
        let Some(shown) = on_terminal(WIDTH, &command) else {
            return skip("no_measured_table_is_wider", "there is no script(1)");
        };
        assert!(shown.contains("A/A"), "{table}: {shown}");
        assert_eq!(wide(&shown), [""; 0], "{table}");
    }
}

#[test]
fn a_narrow_terminal_has_narrow_lines_and_a_pipe_whole_ones() {
    let Some(shown) = on_terminal(60, &format!("{JUMBO} bench")) else {
        return skip("a_narrow_terminal", "there is no script(1)");
    };
    assert!(
        shown.lines().all(|line| line.chars().count() <= 60),
        "{shown}"
    );
    let output = Command::new(JUMBO).arg("bench").output().unwrap();
    let piped = String::from_utf8(output.stdout).unwrap();
    let rows = piped.lines().skip(1);
    assert!(
        rows.clone().count() > 5 && rows.clone().all(|row| row.starts_with("  jumbo bench ")),
        "{piped}"
    );
}
