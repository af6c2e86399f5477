//! Other environments: another user, /sys read-only, no /sys, no /proc.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use crate::support::{WAIT_FOR_SAMPLE, jumbo, library, output, skip, stderr};

const SCRIPT: &str = "a = [bytes(1000 + i % 7) for i in range(50000)]";

/// Runs jumbo below `wrapper`, a shell fragment, and returns its JSON report.
fn below(name: &str, wrapper: &str, probe: &str) -> Option<serde_json::Value> {
    if !Command::new("sh")
        .args(["-c", probe])
        .output()
        .unwrap()
        .status
        .success()
    {
        skip(name, &format!("`{probe}` does not work here"));
        return None;
    }
    // Every user can reach this folder.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    let jumbo = folder.path().join("jumbo");
    // cp(1) writes them: a child of another test could inherit our descriptor open for writing
    // (ETXTBSY).
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_jumbo"))
        .args([library(), folder.path()])
        .status();
    assert!(copied.unwrap().success());
    let script = format!(
        "{wrapper} {} run --report=json -- /usr/bin/python3 -c \"$0\"",
        jumbo.display()
    );
    let python = format!("{SCRIPT}\n{WAIT_FOR_SAMPLE}\nos._exit(3)");
    let output = output(
        Command::new("sh")
            .current_dir("/")
            .args(["-c", &script, &python]),
    );
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(
        report["peak"]["heap"]["bytes"].as_u64().unwrap() > 40_000_000,
        "{report:#}"
    );
    Some(report)
}

/// Variant of [`below`] in which the library joins the counters.
fn reaches(name: &str, wrapper: &str) -> Option<serde_json::Value> {
    let report = below(name, wrapper, &format!("{wrapper} /usr/bin/python3 -V"))?;
    assert_eq!(report["reach"]["reached"], true, "{report:#}");
    Some(report)
}

#[test]
fn an_unprivileged_user_gets_the_same() {
    let wrapper = "setpriv --reuid=65534 --regid=65534 --clear-groups";
    reaches("an_unprivileged_user_gets_the_same", wrapper);
}

/// The counters of a command whose file is unreadable are closed to the program.
#[test]
fn a_library_without_counters_is_no_missing_library() {
    let name = "a_library_without_counters_is_no_missing_library";
    // setpriv(1) has its capabilities until it executes env(1).
    let user = "setpriv --reuid=65534 --regid=65534 --clear-groups env";
    let wrapper = format!("sh -c 'chmod 711 \"$1\" && exec {user} \"$@\"' -");
    if let Some(report) = below(name, &wrapper, &format!("{user} /usr/bin/python3 -V")) {
        let less = report["shortfalls"].to_string();
        assert!(less.contains("may not open the counters"), "{report:#}");
        assert_eq!(report["reach"]["reached"], false, "{report:#}");
    }
}

#[test]
fn a_read_only_sys_is_enough() {
    let wrapper = "unshare -m sh -c 'mount -o remount,ro,bind /sys && exec \"$@\"' -";
    reaches("a_read_only_sys_is_enough", wrapper);
}

#[test]
fn without_sys_it_runs() {
    let wrapper = "unshare -m sh -c 'mount -t tmpfs none /sys && exec \"$@\"' -";
    let Some(report) = reaches("without_sys_it_runs", wrapper) else {
        return;
    };
    // Unreadable files must not be reported as missing.
    let less = report["shortfalls"].to_string();
    assert!(!less.contains("no transparent huge pages"), "{report:#}");
    let plan = format!(
        "{wrapper} {} run --dry-run -- true",
        env!("CARGO_BIN_EXE_jumbo")
    );
    let plan = output(
        Command::new("sh")
            .args(["-c", &plan])
            .env("JUMBO_PRELOAD", library()),
    );
    let plan = String::from_utf8_lossy(&plan.stdout);
    assert!(plan.contains("cannot be read here (/sys)"), "{plan}");
}

#[test]
fn without_proc_nothing_is_made_up() {
    let name = "without_proc_nothing_is_made_up";
    let inside = |arguments: &[&str]| {
        let mut sh = Command::new("unshare");
        let script = "mount -t tmpfs none /proc && exec \"$@\"";
        sh.args(["-m", "sh", "-c", script, "-"]).args(arguments);
        output(sh.env("JUMBO_PRELOAD", library()))
    };
    if !inside(&["true"]).status.success() {
        return skip(name, "no mount namespace of one's own");
    }
    let jumbo = env!("CARGO_BIN_EXE_jumbo");
    let ran = inside(&[jumbo, "run", "--report=full", "--", "sh", "-c", "exit 3"]);
    assert_eq!(ran.status.code(), Some(3));
    let message = stderr(&ran);
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        message.contains("no /proc here to look at it in"),
        "{message}"
    );
    assert!(message.contains("/proc/self/exe"), "{message}");
    let status = inside(&[jumbo, "status"]);
    let shown = String::from_utf8_lossy(&status.stdout);
    let host = shown.lines().find(|line| line.starts_with("Host"));
    assert!(
        host.is_some_and(|line| line.ends_with("memory unknown")),
        "{shown}"
    );
    assert!(!shown.contains("Huge now"), "{shown}");
}

#[test]
fn why_nothing_is_huge_is_said_where_it_was_switched_off() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let off = ["--heap=off", "--maps=off"];
    let script = format!("b = bytearray(80 << 20)\n{WAIT_FOR_SAMPLE}");
    let itself = format!("import ctypes; ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)\n{script}");
    for (options, script, words) in [
        (&off[..], &*script, "--heap=off --maps=off"),
        (&off[..1], &*script, "--heap=off"),
        (&[], &*itself, "PR_SET_THP_DISABLE"),
    ] {
        let mut command = jumbo();
        command.args(["run", "--report=json"]).args(options);
        let message = stderr(&output(command.args([
            "--",
            "/usr/bin/python3",
            "-c",
            script,
        ])));
        let report: serde_json::Value = serde_json::from_str(&message).unwrap();
        let heap = &report["peak"]["heap"];
        // With THP `always` much of it is huge anyway.
        let few = heap["huge_share"].as_f64().is_some_and(|share| share < 0.5);
        let less = report["shortfalls"].to_string();
        assert!(!few || less.contains(words), "{report:#}");
        assert!(!less.contains("nothing that was counted"), "{report:#}");
    }
}

/// A filter that refuses an advice is no kernel without it.
#[test]
fn a_filter_is_no_old_kernel() {
    let name = "a_filter_is_no_old_kernel";
    // BPF: load the number of the call; madvise(2) fails with EPERM.
    let number = libc::SYS_madvise;
    let filter = format!(
        "import ctypes, os, struct, sys
code = [(32, 0, 0, 0), (21, 0, 1, {number}), (6, 0, 0, 0x50001), (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b\"\".join(struct.pack(\"HBBI\", *step) for step in code))
class Filter(ctypes.Structure):
    _fields_ = [(\"count\", ctypes.c_ushort), (\"code\", ctypes.c_void_p)]
filter = Filter(4, ctypes.cast(code, ctypes.c_void_p))
prctl = ctypes.CDLL(None).prctl
failed = prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(filter), 0, 0)
os.execvp(sys.argv[1 + failed], sys.argv[1:])"
    );
    let wrapper = format!("/usr/bin/python3 -c '{filter}'");
    if let Some(report) = reaches(name, &wrapper) {
        let less = report["shortfalls"].to_string();
        assert!(less.contains("a seccomp filter refuses"), "{report:#}");
    }
}
