//! Tests of `jumbo run` itself: the program behaves as without it, whatever it does and however it
//! ends.

use std::fs;
use std::process::Command;

use rustix::process::Signal;

use crate::support::program::assert_alike;
use crate::support::{MIB, Program, Source, assert_same, build, compile, host, smaps, wait};

#[test]
fn the_exit_status_is_the_programs() {
    for code in [0, 1, 7, 125, 126, 127, 128, 200, 255] {
        let (plain, _) = assert_same(&Program::shell(&format!("exit {code}")));
        assert_eq!(plain.shell_status(), code);
    }
}

#[test]
fn a_program_that_cannot_start_is_127_or_126() {
    for reported in [false, true] {
        let run = |program: Program| match reported {
            false => program.jumbo(),
            true => program.jumbo_with(&["--report=json", "--report-file", "/dev/null"]),
        };
        let missing = run(Program::new("/nonexistent/program"));
        assert_eq!(missing.shell_status(), 127, "{missing:?}");
        assert!(missing.stderr.contains("/nonexistent"), "{missing:?}");
        assert_eq!(
            run(Program::new("no-such-command-anywhere")).shell_status(),
            127
        );
        let not_executable = run(Program::new("/etc/passwd"));
        assert_eq!(not_executable.shell_status(), 126, "{not_executable:?}");
        let folder = run(Program::new("/tmp"));
        assert_eq!(folder.shell_status(), 126);
        assert!(folder.stderr.contains("is a directory"), "{folder:?}");
    }
}

/// The musl loader loads the library, too, and lacks functions that only glibc has.
#[test]
fn a_program_of_another_c_library_runs_as_it_is() {
    if host::command("musl-gcc").is_none() {
        return;
    }
    let files = compile(&[Source::Musl("elsewhere", &[])]);
    let direct = Program::new(files.path("elsewhere"));
    let path = files.path("elsewhere");
    let child = Program::shell(&format!("{}; exit 3", path.display()));
    for program in [direct, child] {
        let plain = program.plain();
        assert_eq!(plain.stdout, "from a child\n", "{plain:?}");
        for options in [&[][..], &["--pool=64M"], &["--heap=off"]] {
            assert_alike(&plain, &program.jumbo_with(options), &options.join(" "));
        }
    }
}

#[test]
fn children_below_another_root_run_without_the_library() {
    if !host::root() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let copy = Command::new("sh")
        .current_dir(root.path())
        .args(["-c", COPY_SHELL])
        .status();
    assert!(copy.unwrap().success());
    let script = "/bin/sh -c 'echo \"preloads: $LD_PRELOAD\"'";
    let program = Program::new("chroot")
        .arg(root.path())
        .args(["/bin/sh", "-c", script]);
    let plain = program.plain().ok();
    assert_eq!(plain.stdout, "preloads: \n");
    assert_alike(&plain, &program.jumbo(), "jumbo run");
    // A file that exists below the new root as well stays in LD_PRELOAD.
    let kept = Program::shell("chroot / sh -c 'echo \"$LD_PRELOAD\"'")
        .jumbo()
        .ok();
    assert!(kept.stdout.contains("libjumbo_preload.so"), "{kept:?}");
}

/// Copies sh and its libraries, with their paths.
const COPY_SHELL: &str = r"
    mkdir bin && cp /bin/sh bin/sh &&
    for file in $(ldd /bin/sh | grep -o '/[^ ]*'); do mkdir -p .${file%/*} && cp $file .$file || exit; done
";

/// An inherited filter kills each process that makes a call unknown to the program: the launcher as
/// well.
#[test]
fn a_program_is_worth_more_than_its_report() {
    let files = compile(&[Source::C("under_filter", &[])]);
    let filtered = files.path("under_filter");
    let program = |call: &str| {
        let program = Program::new("sh").args(["-c", "exit 3"]);
        program.around([filtered.as_os_str(), call.as_ref()])
    };
    let report = ["--report=json", "--report-file", "/dev/null"];
    for (call, options, message) in [
        ("ioctl", &[][..], ""),
        ("ioctl", &report[..], ""),
        ("allow", &report[..], ""),
        ("memfd_create", &[], ""),
        ("memfd_create", &report[..], "there will be no report"),
        ("ptrace", &report[..], ""),
    ] {
        let ran = program(call).jumbo_with(options);
        assert_eq!(ran.shell_status(), 3, "{call} {options:?}: {ran:?}");
        assert_eq!(
            ran.stderr.is_empty(),
            message.is_empty(),
            "{call} {options:?}: {ran:?}"
        );
        assert!(ran.stderr.contains(message), "{call} {options:?}: {ran:?}");
    }
}

#[test]
fn a_program_killed_by_a_signal_ends_as_by_that_signal() {
    for signal in ["HUP", "INT", "KILL", "TERM", "USR1", "PIPE", "ABRT"] {
        assert_same(&Program::shell(&format!(
            "ulimit -c 0; kill -{signal} $$; sleep 60"
        )));
    }
    let (plain, _) = assert_same(&Program::shell("kill -9 $$"));
    assert_eq!(plain.shell_status(), 137);
}

#[test]
fn a_crash_is_a_crash() {
    let files = compile(&[Source::C("crash", &[])]);
    for (how, status) in [("segv", 139), ("abort", 134)] {
        let program = Program::new(files.path("crash"))
            .arg(how)
            .around(["prlimit", "--core=0"]);
        let (plain, report) = assert_same(&program);
        assert_eq!(plain.shell_status(), status);
        // The program dies before the first sample; the kernel knows its peak.
        assert!(report.number("/max_rss") >= (48 * MIB) as f64, "{report:?}");
    }
}

#[test]
fn the_report_is_written_when_the_program_is_killed() {
    let files = compile(&[Source::C("heap", &[])]);
    let (running, report) = Program::new(files.path("heap"))
        .args(["256", "stay"])
        .start_reported(&[]);
    running.wait_for_line("ready");
    running.wait_until_sampled();
    let program = running.child();
    let seen = smaps::resident(program);
    rustix::process::kill_process(program, Signal::KILL).unwrap();
    let ran = running.wait();
    assert_eq!(ran.shell_status(), 137, "{ran:?}");
    let report = report.read(&ran);
    // The last sample may predate the kernel's peak.
    let whole = report.number("/max_rss") >= seen.heap as f64;
    assert!(whole && report.heap_bytes() > 0.0, "{seen:?} {report:?}");
    assert_eq!(report.number("/exit/signal"), 9.0);
}

/// The launcher forwards signals; one that the program ignores ends neither.
#[test]
fn a_program_that_ignores_sigterm_goes_on() {
    let script =
        "trap 'echo caught INT' INT; trap '' TERM; echo ready; read line; echo got $line; exit 9";
    for reported in [false, true] {
        let program = Program::shell(script);
        // The report's folder must exist as long as the program runs.
        let (mut running, _report) = if reported {
            let (running, report) = program.start_reported(&[]);
            (running, Some(report))
        } else {
            (program.start_jumbo(&[]), None)
        };
        running.wait_for_line("ready");
        running.signal(Signal::TERM);
        running.signal(Signal::TERM);
        running.write("a line\n");
        let ran = running.wait();
        assert_eq!(
            (ran.shell_status(), ran.stdout.as_str()),
            (9, "ready\ngot a line\n"),
            "{ran:?}"
        );
    }
}

#[test]
fn signals_reach_the_program() {
    // The trap interrupts `read`; the loop waits for a line or for its end.
    let script = "trap 'echo caught USR1' USR1; trap 'echo caught TERM; exit 5' TERM; echo ready
                  while :; do sleep 0.05; done";
    let (running, report) = Program::shell(script).start_reported(&[]);
    running.wait_for_line("ready");
    running.signal(Signal::USR1);
    running.wait_for_line("caught USR1");
    running.signal(Signal::TERM);
    let ran = running.wait();
    assert_eq!(ran.shell_status(), 5, "{ran:?}");
    report.read(&ran);
}

#[test]
fn a_pipeline_passes_everything_through() {
    let input: String = (0..200_000)
        .map(|i| format!("{} line\n", i * 7919 % 200_000))
        .collect();
    assert_same(&Program::shell("sort -n | uniq | tail -n 3; echo done >&2").stdin(input.clone()));
    // jumbo within a pipeline, on both sides.
    let plain = Program::shell("sort -n | head -n 5")
        .stdin(input.clone())
        .plain();
    let jumbo = format!(
        "'{0}' run -- sort -n | '{0}' run -- head -n 5",
        env!("CARGO_BIN_EXE_jumbo")
    );
    assert_alike(
        &plain,
        &Program::shell(&jumbo).stdin(input).plain(),
        "a pipeline of jumbos",
    );
}

#[test]
fn children_behave_too() {
    let files = compile(&[Source::C("spawn", &[])]);
    let heap = compile(&[Source::C("heap", &[])]);
    assert_same(
        &Program::new(files.path("spawn"))
            .arg(heap.path("heap"))
            .args(["16", "go"]),
    );
    assert_same(&Program::shell(
        "for i in 1 2 3; do (echo $i; sh -c 'exit 3'; echo $?); done | cat",
    ));
    assert_same(&Program::new("env").args(["-i", "/bin/sh", "-c", "echo alone; exit 4"]));
    assert_same(&Program::shell("exec env -i /bin/cat /proc/self/environ"));
}

/// Children are on huge pages like their parent, unless excluded.
#[test]
fn children_are_covered_unless_told_otherwise() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("heap", &[])]);
    let script = format!("'{}' 256 go; exit 6", files.path("heap").display());
    let program = Program::shell(&script);
    let (ran, report) = program.reported_with(&["--max-waste=unbounded"]);
    assert_eq!(ran.shell_status(), 6, "{ran:?}");
    crate::memory::assert_huge(&report, 100 * MIB, 0.9);
    let (ran, report) = program.reported_with(&["--no-follow"]);
    assert_eq!(ran.shell_status(), 6, "{ran:?}");
    if !host::thp_is_always() {
        assert!(report.heap_huge_share() < 0.5, "{report:?}");
    }
}

#[test]
fn no_follow_leaves_the_childs_environment_as_it_was() {
    let program = Program::shell("/usr/bin/env; :");
    let followed = program.jumbo().ok().stdout;
    assert!(followed.contains("libjumbo_preload.so"), "{followed}");
    assert_alike(
        &program.plain(),
        &program.jumbo_with(&["--no-follow"]),
        "jumbo run --no-follow",
    );
}

#[test]
fn the_environment_is_kept() {
    let early = compile(&[Source::Library("early")]);
    let early = early.path("libearly.so");
    let program = Program::shell("echo $LD_PRELOAD; echo $GLIBC_TUNABLES; echo \"$MINE\"")
        .env("LD_PRELOAD", &early)
        .env("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
        .env("MINE", "as it was");
    let ran = program.jumbo().ok();
    let lines: Vec<_> = ran.stdout.lines().collect();
    // The user's value comes first.
    assert!(lines[0].starts_with(early.to_str().unwrap()), "{ran:?}");
    assert!(lines[0].ends_with("libjumbo_preload.so"), "{ran:?}");
    assert_eq!(lines[1], "glibc.malloc.arena_max=2");
    assert_eq!(lines[2], "as it was");
}

#[test]
fn descriptors_are_the_programs_alone() {
    // Closed descriptors stay closed, and none is added.
    assert_same(&Program::shell("ls /proc/self/fd"));
    assert_same(&Program::shell("exec cat <&-"));
    let closed = Program::shell("exec \"$@\" <&- >&- 2>&-").args(["sh", "sh", "-c", "exit 3"]);
    assert_same(&closed);
    for close in ["<&-", "2>&-", "<&- 2>&-"] {
        let plain = Program::shell(&format!("exec ls /proc/self/fd {close}")).plain();
        for options in ["", "--report=json --report-file /dev/null"] {
            let jumbo = env!("CARGO_BIN_EXE_jumbo");
            let script = format!("exec '{jumbo}' run {options} -- ls /proc/self/fd {close}");
            assert_alike(&plain, &Program::shell(&script).plain(), &script);
        }
    }
}

/// Without a report jumbo becomes the program, so that supervisors see the PID that they started.
#[test]
fn without_a_report_the_pid_is_the_programs() {
    let running = Program::shell("echo $$; read line").start_jumbo(&[]);
    let pid = running.pid().as_raw_nonzero().to_string();
    running.wait_for_line(&pid);
    // The shell read the end of its input.
    assert_eq!(running.wait().shell_status(), 1);
}

#[test]
fn nothing_outlives_the_program() {
    let (running, report) = Program::shell("echo ready; exec sleep 600").start_reported(&[]);
    running.wait_for_line("ready");
    let program = running.child();
    running.signal(Signal::TERM);
    let ran = running.wait();
    assert_eq!(ran.shell_status(), 143, "{ran:?}");
    report.read(&ran);
    wait::until("the end of the program", wait::TIMEOUT, || {
        rustix::process::test_kill_process(program)
            .is_err()
            .then_some(())
    });
}

/// SIGKILL cannot be forwarded: the death of the launcher must end the program.
#[test]
fn a_program_ends_when_its_launcher_is_killed() {
    let (running, _report) = Program::shell("echo ready; exec sleep 600").start_reported(&[]);
    running.wait_for_line("ready");
    let program = running.child();
    running.signal(Signal::KILL);
    assert_eq!(running.wait().shell_status(), 137);
    wait::until("the end of the program", wait::TIMEOUT, || {
        rustix::process::test_kill_process(program)
            .is_err()
            .then_some(())
    });
}

/// Start-up is short: the launcher reads files in few calls, and of the program only its headers.
#[test]
fn the_launcher_makes_few_system_calls() {
    let Some(strace) = host::command("strace") else {
        return;
    };
    let folder = build::world_readable_folder();
    let log = folder.path().join("log");
    let traced = Program::new("/bin/true").around([
        strace.as_os_str(),
        "-f".as_ref(),
        "-o".as_ref(),
        log.as_os_str(),
    ]);
    // Cargo sets folders there, which the loader would search.
    traced.env("LD_LIBRARY_PATH", "").jumbo().ok();
    let log = std::fs::read_to_string(&log).unwrap();
    let calls: Vec<_> = log.lines().collect();
    let program = calls
        .iter()
        .rposition(|call| call.contains("execve(\"/bin/true\""));
    let launchers = &calls[..program.expect("the program was started")];
    // A debug build loads three C libraries; the released one loads none.
    assert!(
        launchers.len() < 160,
        "{} calls: {launchers:#?}",
        launchers.len()
    );
    let of = |name: &str| launchers.iter().filter(|call| call.contains(name)).count();
    assert!(of(" lseek(") < 10 && of(" read(") < 40, "{launchers:#?}");
    // The short path leaves the program's signal state unchanged.
    assert_eq!(
        Program::shell("kill -s PIPE $$").jumbo().shell_status(),
        141
    );
}

/// `JUMBO_DEBUG`: by a file, and by a descriptor of the program.
#[test]
fn decisions_are_lines_for_a_bug_report() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("growing", &[])]);
    let program = Program::new(files.path("growing"));
    let lines = files.path("lines");
    let to_file = program.clone().env("JUMBO_DEBUG", lines.to_str().unwrap());
    to_file.jumbo().ok();
    let text = fs::read_to_string(&lines).unwrap();
    let to_stderr = program
        .clone()
        .env("JUMBO_DEBUG", "2")
        .jumbo_with(&["-q"])
        .ok();
    for text in [&text, &to_stderr.stderr] {
        for words in [
            "program: started",
            "program: new memory: ",
            "program: freed blocks: ",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(
            text.lines().all(|line| line.starts_with("jumbo[")),
            "{text}"
        );
    }
    // A file behind a link is left as it is.
    std::os::unix::fs::symlink(&lines, files.path("link")).unwrap();
    let link = files.path("link");
    program
        .env("JUMBO_DEBUG", link.to_str().unwrap())
        .jumbo()
        .ok();
    assert_eq!(fs::read_to_string(&lines).unwrap(), text);
}

/// The kernel's policy is set for the program, and a refusal ends the command before it.
#[test]
fn a_program_can_be_spared_huge_pages() {
    let enabled = |mode: &str| {
        let program =
            Program::shell("sed -n 's/^THP_enabled:[[:space:]]*/thp=/p' /proc/self/status");
        program.jumbo_with(&["--thp", mode])
    };
    let inherited = enabled("inherit").ok().number("thp");
    assert_eq!(enabled("never").ok().number("thp"), 0);
    let spared = enabled("madvise");
    match spared.shell_status() {
        0 => assert_eq!(spared.number("thp"), inherited, "{spared:?}"),
        125 => assert!(spared.stderr.contains("takes Linux 6.18"), "{spared:?}"),
        _ => panic!("{spared:?}"),
    }
}
