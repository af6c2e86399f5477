//! Tests of programs that LD_PRELOAD cannot reach: a companion process with the privilege for
//! process_madvise(2) promotes their memory. Without it they run plainly.

use std::collections::BTreeSet;
use std::path::PathBuf;

use rustix::process::{Pid, Signal};

use crate::support::{Compiled, MIB, Program, Source, compile, host, wait};

/// Run time limit of the program, above that of any machine; a promoted program continues at once.
const RUN_SECONDS: &str = "100";

/// C library of a static program.
#[derive(Clone, Copy)]
enum Libc {
    Glibc,
    Musl,
}

fn fills(libc: Libc) -> Compiled {
    compile(&[match libc {
        Libc::Glibc => Source::C("fills", &["-static"]),
        Libc::Musl => Source::Musl("fills", &["-static"]),
    }])
}

/// Returns the companion process; `None` once it has ended.
fn companion(program: Pid) -> Option<Pid> {
    let end = format!("\0{}\0", program.as_raw_nonzero());
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let pid: i32 = pids.find(|pid: &i32| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.contains("\0--from-start\0") && line.ends_with(&end)
    })?;
    Pid::from_raw(pid)
}

#[track_caller]
fn assert_alone(program: Pid) {
    wait::until("the end of the companion process", wait::TIMEOUT, || {
        companion(program).is_none().then_some(())
    });
}

fn program(files: &Compiled, seconds: &str) -> Program {
    Program::new(files.path("fills")).args(["128", seconds])
}

/// Variants of a program without the privilege: an ordinary user, and root as in a container.
fn without_privilege(program: &Program) -> Vec<Program> {
    let user = program.clone().unprivileged();
    let container = program
        .clone()
        .around(["setpriv", "--bounding-set=-sys_nice"]);
    match host::root() {
        true => vec![user, container],
        false => vec![user],
    }
}

#[test]
fn a_static_program_is_promoted_in_place() {
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    for libc in [Libc::Glibc, Libc::Musl] {
        if matches!(libc, Libc::Musl) && host::command("musl-gcc").is_none() {
            continue;
        }
        let files = fills(libc);
        let running = program(&files, RUN_SECONDS).start_jumbo(&[]);
        let pid = running.pid();
        let line = running.wait_for_line("filled");
        assert_eq!(line, format!("filled pid={}", pid.as_raw_nonzero()));
        let ran = running.wait();
        assert_eq!(ran.shell_status(), 5, "{ran:?}");
        assert_eq!((ran.number("huge"), ran.number("child")), (1, 0), "{ran:?}");
        assert_alone(pid);
    }
}

#[test]
fn no_call_of_a_static_program_is_cut_short() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("long_calls", &["-static"])]);
    let program = Program::new(files.path("long_calls")).arg("100");
    let mut programs = without_privilege(&program);
    programs.push(program);
    for program in programs {
        for options in [&[][..], &["--report"]] {
            let ran = program.start_jumbo(options).wait().ok();
            assert_eq!(ran.number("partial"), 0, "{ran:?}");
        }
    }
}

#[test]
fn without_privilege_there_is_no_companion_and_the_report_says_why() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = fills(Libc::Glibc);
    for program in without_privilege(&program(&files, "1")) {
        let running = program.start_jumbo(&[]);
        running.wait_for_line("filled");
        assert_eq!(companion(running.pid()), None);
        let ran = running.wait();
        assert!(ran.number("huge") == 0 || host::thp_is_always(), "{ran:?}");
        let (_, report) = program.reported();
        let why = report.at("/outside/reason").as_str().unwrap();
        assert!(
            why.starts_with("process_madvise takes CAP_SYS_NICE"),
            "{report:?}"
        );
        let text = program.start_jumbo(&["--report"]).wait().stderr;
        assert!(
            text.contains("CAP_SYS_NICE") && text.contains("hint: "),
            "{text}"
        );
    }
}

#[test]
fn the_report_says_how_a_static_program_was_promoted() {
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = fills(Libc::Glibc);
    let program = program(&files, RUN_SECONDS);
    let (ran, report) = program.reported();
    assert_eq!((ran.number("huge"), ran.number("child")), (1, 0), "{ran:?}");
    assert_eq!(
        report.at("/outside/method"),
        "process_madvise",
        "{report:?}"
    );
    let [obtained, cost] =
        ["obtained", "cost"].map(|name| report.number(&format!("/outside/{name}")));
    assert!(obtained >= 110.0 * MIB as f64, "{report:?}");
    assert!(cost <= 16.0 * MIB as f64, "{report:?}");
    let text = program.start_jumbo(&["--report"]).wait();
    let how = "from outside, by process_madvise: it is statically";
    assert!(text.stderr.contains(how), "{text:?}");
}

#[test]
fn what_is_switched_off_stays_off() {
    let files = fills(Libc::Glibc);
    let program = program(&files, "0");
    for option in ["--heap=off", "--maps=off"] {
        let (_, report) = program.reported_with(&[option]);
        assert_eq!(report.at("/outside/reason"), option, "{report:?}");
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let ran = Program::new(files.path("fills"))
        .args(["128", "2"])
        .env("JUMBO", "off")
        .jumbo();
    assert!(ran.number("huge") == 0 || host::thp_is_always(), "{ran:?}");
}

/// The companion process would be a child of the program and appear in its waits.
#[test]
fn the_first_process_of_a_namespace_has_no_child() {
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = fills(Libc::Glibc);
    let around = ["unshare", "--pid", "--fork", "--mount-proc"];
    let ran = program(&files, RUN_SECONDS).around(around).jumbo();
    assert!(ran.stdout.starts_with("filled pid=1\n"), "{ran:?}");
    assert_eq!((ran.number("huge"), ran.number("child")), (1, 0), "{ran:?}");
}

/// An init that waits only for its own child would keep it as a zombie.
#[test]
fn an_init_that_waits_for_no_orphan_is_left_none() {
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = fills(Libc::Glibc);
    let init = compile(&[Source::C("init", &[])]);
    let init = init.path("init").display().to_string();
    for (how, seconds, huge) in [("application", "2", 0), ("catches", RUN_SECONDS, 1)] {
        let around = ["unshare", "--pid", "--fork", "--mount-proc", &init, how];
        let ran = program(&files, seconds).around(around).jumbo();
        assert!(
            ran.number("huge") == huge || host::thp_is_always(),
            "{how} {ran:?}"
        );
        assert_eq!(
            (ran.number("child"), ran.number("zombies")),
            (0, 0),
            "{how} {ran:?}"
        );
    }
}

/// Neither the end of the program nor that of its output waits for the companion process.
#[test]
fn a_kill_ends_both() {
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = fills(Libc::Glibc);
    let program = program(&files, RUN_SECONDS).args(["sleep", "1000"]);
    let running = program.start_jumbo(&[]);
    running.wait_for_line("huge=1");
    let pid = running.pid();
    let other = wait::until("the companion process", wait::TIMEOUT, || companion(pid));
    // The launcher may have a pipe to its own child.
    let ours = pipes(pid);
    assert!(!ours.is_empty());
    let held = pipes(other);
    assert!(held.is_disjoint(&ours), "{held:?} {ours:?}");
    running.signal(Signal::TERM);
    assert_eq!(running.wait().shell_status(), 128 + 15);
    assert_alone(pid);
}

/// Returns the pipes of a process.
fn pipes(pid: Pid) -> BTreeSet<PathBuf> {
    let files = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).unwrap();
    let files = files
        .flatten()
        .flat_map(|file| std::fs::read_link(file.path()));
    files
        .filter(|file| file.to_string_lossy().starts_with("pipe:"))
        .collect()
}

/// libjumbo_preload.so has a bound of its own.
#[test]
fn a_dynamic_program_in_its_place_is_left_to_the_library() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("fills", &["-static"]), Source::C("heap", &[])]);
    let heap = files.path("heap");
    let program = Program::new(files.path("fills")).args(["32", RUN_SECONDS]);
    let program = program.arg(heap).args(["16", "go"]);
    let plain = Program::new(files.path("heap")).args(["16", "go"]).plain();
    let ran = program.jumbo();
    assert!(ran.stdout.ends_with(&plain.stdout), "{ran:?}");
    assert_eq!(ran.shell_status(), plain.shell_status(), "{ran:?}");
}

#[test]
fn a_program_under_a_filter_is_left_alone() {
    let files = fills(Libc::Glibc);
    let filter = compile(&[Source::C("under_filter", &[])]);
    let filter = filter.path("under_filter").display().to_string();
    let program = program(&files, "0").around([&filter, "container"]);
    let (ran, report) = program.reported();
    assert_eq!((ran.shell_status(), ran.number("child")), (5, 0), "{ran:?}");
    assert_eq!(report.at("/outside/reason"), "a seccomp filter is in force");
}
