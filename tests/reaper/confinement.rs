//! Tests that the reaper process can do nothing that the program cannot.

use std::fs;

use rustix::process::{Pid, Signal};

use super::{assert_no_reaper, is_started, reaper, reapers, states, status};
use crate::support::build::world_readable_folder;
use crate::support::{OUTSIDE_CALLS, Program, Running, Source, compile, host, sample};

/// A waiting program and its reaper.
fn waiting() -> (crate::support::build::Compiled, Running, Pid) {
    let files = compile(&[Source::C("reaped", &[])]);
    let program = Program::new(files.path("reaped")).args(["16", "stay"]);
    let running = program.start_jumbo(&["--reaper=on"]);
    running.wait_for_line("ready");
    let pid = reaper(&files.path("reaped"));
    (files, running, pid)
}

/// Returns the soft and the hard limit of a line of /proc/PID/limits.
fn limit(pid: Pid, name: &str) -> String {
    let limits = fs::read_to_string(format!("/proc/{}/limits", pid.as_raw_nonzero())).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix(name));
    let words: Vec<_> = line.unwrap().split_whitespace().take(2).collect();
    words.join(" ")
}

#[test]
fn it_holds_nothing() {
    let (files, mut running, pid) = waiting();
    for key in ["CapEff", "CapInh", "CapAmb"] {
        assert_eq!(status(pid, key), "0000000000000000", "{key}");
    }
    // The reaper cannot use them; they protect its memory from other processes.
    assert_eq!(status(pid, "CapPrm"), status(running.pid(), "CapPrm"));
    let expected = [
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
        ("Threads", "1"),
        ("TracerPid", "0"),
    ];
    for (key, value) in expected {
        assert_eq!(status(pid, key), value, "{key}");
    }
    // It blocks all signals that can be blocked: no handler of the program can run, and none is
    // installed.
    assert_eq!(status(pid, "SigBlk"), "fffffffffffbfeff");
    assert_eq!(status(pid, "SigCgt"), "0000000000000000");
    let id = pid.as_raw_nonzero().get();
    let link = |name: &str| fs::read_link(format!("/proc/{id}/{name}")).unwrap();
    assert_eq!(link("cwd").to_str(), Some("/"));
    // Neither a second core nor a pipe for one; and a CPU limit against forced computation.
    assert_eq!(limit(pid, "Max core file size"), "1 1");
    let seconds = limit(pid, "Max cpu time");
    let seconds: u64 = seconds.split_once(' ').unwrap().0.parse().unwrap();
    assert!((10..600).contains(&seconds), "{seconds}");
    assert_eq!(limit(pid, "Max open files"), "5 5");
    let mut held: Vec<_> = fs::read_dir(format!("/proc/{id}/fd"))
        .unwrap()
        .map(|entry| fs::read_link(entry.unwrap().path()).unwrap())
        .collect();
    held.sort();
    // Two files about its own memory.
    let own = ["maps", "statm"].map(|name| std::path::PathBuf::from(format!("/proc/{id}/{name}")));
    assert_eq!(held, own);
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
    let (_, stat) = stat.rsplit_once(") ").unwrap();
    let words: Vec<&str> = stat.split(' ').collect();
    // A session and group of its own, without a terminal; the parent is init or a subreaper.
    let (parent, group, session, terminal) = (words[1], words[2], words[3], words[4]);
    assert_eq!(
        (group, session, terminal),
        (&*id.to_string(), &*id.to_string(), "0")
    );
    assert_ne!(parent, running.pid().as_raw_nonzero().to_string());
    // SCHED_BATCH: it takes no CPU from the process that waits for the program.
    assert_eq!(words[38], "3");
    running.write("q");
    assert_eq!(running.wait().shell_status(), 6);
    assert_no_reaper(&files.path("reaped"));
}

/// Typical of services: no core, and no right to change that.
#[test]
fn a_hard_core_limit_of_0_is_none_to_a_user_without_privilege() {
    let files = compile(&[Source::C("reaped", &[])]);
    for (mode, size) in [("--reaper=on", "16"), ("--reaper=auto", "1200")] {
        let program = Program::new(files.path("reaped")).args([size, "stay"]);
        let program = program.around(["prlimit", "--core=0:0"]).unprivileged();
        let (mut running, report) = program.start_reported(&[mode]);
        running.wait_for_line("ready");
        assert_eq!(
            limit(reaper(&files.path("reaped")), "Max core file size"),
            "0 0"
        );
        running.write("q");
        let ran = running.wait();
        assert_eq!(ran.shell_status(), 6, "{ran:?}");
        assert_no_reaper(&files.path("reaped"));
        let report = report.read(&ran);
        assert!(is_started(&states(&report)[0]), "{mode} {report:?}");
    }
}

/// If the program may become another user, the reaper would keep the previous one.
#[test]
fn a_hard_core_limit_of_0_leaves_none_to_who_may_change_the_user() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("reaped", &[])]);
    let program = Program::new(files.path("reaped")).args(["16", "exit"]);
    let bounded = "--bounding-set=-sys_resource";
    let may_set_user = ["--inh-caps=+setuid", "--ambient-caps=+setuid"];
    let nobody = [bounded, "--reuid=nobody", may_set_user[0], may_set_user[1]];
    let cases: [(&str, &[&str], bool); 3] = [
        ("root", &[bounded], false),
        ("nobody who may become another user", &nobody, false),
        ("root without capabilities", &["--bounding-set=-all"], true),
    ];
    for (name, options, started) in cases {
        let around = [&["prlimit", "--core=0:0", "setpriv"], options].concat();
        let program = program.clone().around(around).installed();
        let (ran, report) = program.reported_with(&["--reaper=on"]);
        assert_eq!(ran.shell_status(), 3, "{name} {ran:?}");
        let state = &*states(&report)[0];
        assert_eq!(is_started(state), started, "{name} {report:?}");
        assert!(started || state == "unconfined", "{name} {report:?}");
        assert_no_reaper(&files.path("reaped"));
    }
}

/// A program that has become the user `nobody`, and dumpable again, makes root's reaper do a
/// forbidden call. The reaper of that user, beside it, shows that a core would be visible.
#[test]
fn no_core_in_the_name_of_another_user_goes_into_a_pipe() {
    if !host::root() || cfg!(not(target_arch = "x86_64")) {
        return;
    }
    let files = compile(&[Source::C("escalate", &[])]);
    let path = files.path("escalate");
    let cores = world_readable_folder();
    let pipe = format!("|/bin/cp /dev/stdin {}/core.%u", cores.path().display());
    let Some(_knob) = host::Knob::set("/proc/sys/kernel/core_pattern", &pipe) else {
        return;
    };
    let attacked = |program: Program| {
        let mut running = program.start_jumbo(&["--reaper=on"]);
        running.wait_for_line("ready");
        let pid = reaper(&path);
        running.write(&format!("{}\n", pid.as_raw_nonzero()));
        let ran = running.wait().ok();
        // The program ends after its core was taken.
        assert_no_reaper(&path);
        assert_ne!(ran.number("ran"), 0, "{ran:?}");
        let names = fs::read_dir(cores.path()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect::<Vec<_>>()
    };
    let program = Program::new(&path).args(["attack", "dumpable"]);
    let none: [&str; 0] = [];
    let root = program.clone().around(["prlimit", "--core=0:"]);
    assert_eq!(attacked(root.installed()), none);
    let nobody = program.around(["prlimit", "--core=0:0"]);
    assert_eq!(attacked(nobody.unprivileged()), ["core.65534"]);
}

#[test]
fn the_programs_waits_never_see_it() {
    let files = compile(&[Source::C("childless", &[])]);
    let path = files.path("childless");
    for subreaper in ["", "subreaper"] {
        let program = Program::new(&path).arg(subreaper);
        let ran = program.jumbo_with(&["--reaper=on"]);
        assert_eq!(ran.shell_status(), 0, "{subreaper} {ran:?}");
        assert_no_reaper(&path);
    }
}

#[test]
fn a_program_that_takes_orphans_gets_none() {
    let files = compile(&[Source::C("childless", &[])]);
    let program = Program::new(files.path("childless")).arg("exec");
    let (ran, report) = program.reported_with(&["--reaper=on"]);
    assert_eq!(ran.shell_status(), 0, "{ran:?}");
    assert_eq!(states(&report).last().unwrap(), "subreaper", "{report:?}");
    assert_no_reaper(&files.path("childless"));
}

/// A subreaper above the program waits for all its children; it must find the same ones as without
/// jumbo.
#[test]
fn a_subreaper_that_is_covered_is_given_no_stranger() {
    let files = compile(&[Source::C("subreaper", &[]), Source::C("reaped", &[])]);
    let reaped = files.path("reaped").display().to_string();
    // Directly; by a program that execs; by a child.
    let commands: [&[&str]; 3] = [
        &[],
        &["env", "--"],
        &["sh", "-c", "\"$@\" ; code=$?; :; exit $code", "sh"],
    ];
    for (mode, size) in [("--reaper=on", "16"), ("--reaper=auto", "1200")] {
        for how in ["fork", "spawn"] {
            for command in commands {
                let program = Program::new(files.path("subreaper")).arg(how).args(command);
                let program = program.args([&*reaped, size, "exit"]);
                let (ran, report) = program.reported_with(&[mode]);
                let ran = ran.ok();
                let found = (ran.number("waits"), ran.number("last"));
                assert_eq!(found, (1, 1), "{mode} {how} {command:?} {report:?}");
                assert_eq!(states(&report).last().unwrap(), "subreaper", "{report:?}");
            }
        }
    }
    assert_no_reaper(&files.path("reaped"));
}

/// The first reaper detects an uncovered subreaper and ends at once: no other follows.
#[test]
fn a_subreaper_that_is_not_covered_is_given_one_orphan_at_most() {
    let files = compile(&[Source::C("subreaper", &[]), Source::C("reaped", &[])]);
    let (subreaper, reaped) = (files.path("subreaper"), files.path("reaped"));
    let around = [subreaper.as_os_str(), "fork".as_ref()];
    let script = "for i in 1 2 3; do \"$@\"; [ $? = 3 ] || exit 1; done";
    for (mode, size) in [("--reaper=on", "16"), ("--reaper=auto", "1200")] {
        let alone = Program::new(&reaped).args([size, "exit"]);
        let several = Program::shell(script)
            .arg("sh")
            .arg(&reaped)
            .args([size, "exit"]);
        for (program, most) in [
            (alone, 2),
            (several, if mode == "--reaper=on" { 2 } else { 4 }),
        ] {
            let program = program.around(around);
            // Children left when the command ends would be reaped later. The program knows that the
            // orphan is gone a moment before the orphan's parent, so that the order of both ends
            // may vary.
            let is_last = (0..5).any(|_| {
                let (ran, report) = program.reported_with(&[mode]);
                assert!(ran.number("waits") <= most, "{mode} {ran:?} {report:?}");
                assert_eq!(states(&report).last().unwrap(), "subreaper", "{report:?}");
                ran.number("last") == 1
            });
            assert!(is_last, "{mode}: an orphan was left each time");
        }
    }
    assert_no_reaper(&reaped);
}

/// A handler that ran in the reaper would use the program's memory with the reaper's identity.
#[test]
fn a_signal_for_it_is_not_handled() {
    let files = compile(&[Source::C("escalate", &[])]);
    let path = files.path("escalate");
    let mut running = Program::new(&path)
        .arg("handler")
        .start_jumbo(&["--reaper=on"]);
    running.wait_for_line("ready");
    let pid = reaper(&path);
    for signal in [Signal::TERM, Signal::HUP, Signal::USR1] {
        rustix::process::kill_process(pid, signal).unwrap();
    }
    assert_eq!(reaper(&path), pid);
    running.write("\n");
    let ran = running.wait().ok();
    assert_eq!(ran.number("handled"), 0, "{ran:?}");
    assert_no_reaper(&path);
}

/// A reaper that stayed root would run code that its unprivileged program writes.
#[test]
fn no_sibling_is_left_that_its_program_was_before_it_changed_its_user() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("escalate", &[])]);
    let path = files.path("escalate");
    let as_its_program = |running: &Running| {
        for key in ["Uid", "Gid"] {
            let of_both = [reaper(&path), running.pid()].map(|pid| status(pid, key));
            assert_eq!(of_both[0], of_both[1]);
        }
    };
    for (mode, mib) in [("--reaper=on", "16"), ("--reaper=auto", "1100")] {
        for call in [
            "setuid",
            "seteuid",
            "setreuid",
            "setresuid",
            "setgid",
            "setegid",
            "setregid",
            "setresgid",
            "number",
        ] {
            let program = Program::new(&path).args(["change", call, mib]).installed();
            let mut running = program.start_jumbo(&[mode]);
            running.wait_for_line("large");
            as_its_program(&running);
            running.write("\n");
            running.wait_for_line("changed");
            // The reaper of a large program starts again as its memory grows.
            match mode {
                "--reaper=on" => as_its_program(&running),
                _ => assert_eq!(reapers(&path), [], "{call}"),
            }
            running.write("\n");
            running.wait_for_line("larger");
            as_its_program(&running);
            running.write("\n");
            running.wait().ok();
            assert_no_reaper(&path);
        }
    }
}

/// A call without effect keeps the reaper; behind a filter it is told without a system call.
#[test]
fn a_sibling_is_ended_for_a_change_alone_and_behind_a_filter_without_a_call() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("escalate", &[])]);
    let path = files.path("escalate");
    for (mode, mib) in [("--reaper=on", "16"), ("--reaper=auto", "1100")] {
        for call in ["nothing", "filtered"] {
            let program = Program::new(&path).args(["change", call, mib]).installed();
            let mut running = program.start_jumbo(&[mode]);
            running.wait_for_line("large");
            let before = reaper(&path);
            running.write("\n");
            running.wait_for_line("changed");
            match call {
                "nothing" => assert_eq!(reapers(&path), [before], "{mode}"),
                _ => assert_no_reaper(&path),
            }
            running.write("\n");
            running.wait_for_line("larger");
            running.write("\n");
            running.wait().ok();
            assert_no_reaper(&path);
        }
    }
}

/// The kernel protects a program's memory from processes without its capabilities. Its reaper has
/// the same memory and needs the same protection.
#[test]
fn who_may_not_touch_the_program_may_not_touch_its_sibling() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("reaped", &[])]);
    let nobody = ["setpriv", "--reuid=nobody", "--clear-groups"];
    for (capability, is_open) in [("", true), ("+net_raw", false)] {
        let mut around = nobody.map(str::to_owned).to_vec();
        around.push(format!("--inh-caps={capability}"));
        around.push(format!("--ambient-caps={capability}"));
        around.retain(|option| !option.ends_with('='));
        let program = Program::new(files.path("reaped")).args(["16", "stay"]);
        let program = program.around(around).installed();
        let mut running = program.start_jumbo(&["--reaper=on"]);
        running.wait_for_line("ready");
        for pid in [running.pid(), reaper(&files.path("reaped"))] {
            let open = format!(": < /proc/{}/mem", pid.as_raw_nonzero());
            let opened = std::process::Command::new(nobody[0])
                .args(&nobody[1..])
                .args(["sh", "-c", &open])
                .output()
                .unwrap();
            assert_eq!(opened.status.success(), is_open, "{capability} {opened:?}");
        }
        running.write("q");
        running.wait();
        assert_no_reaper(&files.path("reaped"));
    }
}

/// Run as root, then as the user `nobody` under a seccomp filter: the program overwrites the code
/// and data of the reaper, which then runs chosen code with one system call.
#[test]
fn code_of_the_programs_choice_does_nothing_in_it() {
    if !host::root() || cfg!(not(target_arch = "x86_64")) {
        return;
    }
    let files = compile(&[Source::C("escalate", &[])]);
    let path = files.path("escalate");
    let attack = |name: &str| {
        let program = Program::new(&path).args(["attack", name]).installed();
        let mut running = program.start_jumbo(&["--reaper=on"]);
        running.wait_for_line("ready");
        let pid = reaper(&path);
        assert_eq!(status(pid, "Uid"), "0\t0\t0\t0");
        running.write(&format!("{}\n", pid.as_raw_nonzero()));
        let ran = running.wait().ok();
        assert_no_reaper(&path);
        // The code has run in the reaper.
        let who = i64::from(pid.as_raw_nonzero().get());
        assert_eq!(ran.number("ran").cast_signed(), who, "{name} {ran:?}");
        ran.number("returned")
    };
    // A permitted call, as proof that results are visible.
    assert_eq!(attack("futex"), 1);
    // The kernel permits as many threads as descriptors.
    assert!(attack("counted-threads") <= 3);
    let memory_calls = [
        "threads",
        "mmap",
        "read",
        "write",
        "madvise-other",
        "getpid",
    ];
    for name in sample(OUTSIDE_CALLS.into_iter().chain(memory_calls), 5) {
        assert_eq!(attack(name), 0, "{name} was answered");
    }
}

#[test]
fn the_program_is_as_dumpable_as_without() {
    let files = compile(&[Source::C("escalate", &[])]);
    let program = Program::new(files.path("escalate")).arg("dumpable");
    for program in [program.clone().unprivileged(), program] {
        let plain = program.plain().ok();
        let jumbo = program.jumbo_with(&["--reaper=on"]).ok();
        assert_eq!(plain.stdout, jumbo.stdout);
    }
}

#[test]
fn a_tracer_does_not_follow_it() {
    let Some(strace) = host::command("strace") else {
        return;
    };
    let files = compile(&[Source::C("reaped", &[])]);
    let folder = world_readable_folder();
    let log = folder.path().join("log");
    let program = Program::new(files.path("reaped"))
        .args(["16", "exit"])
        .around([
            strace.as_os_str(),
            "-f".as_ref(),
            "-o".as_ref(),
            log.as_os_str(),
        ]);
    // With a bound a thread of jumbo scans the program's memory; it is traced like any other.
    let ran = program.jumbo_with(&["--reaper=on", "--max-waste=unbounded"]);
    assert_eq!(ran.shell_status(), 3, "{ran:?}");
    let log = fs::read_to_string(&log).unwrap();
    let mut tasks: Vec<&str> = log
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    tasks.sort_unstable();
    tasks.dedup();
    assert_eq!(tasks.len(), 1, "{log}");
    assert!(log.contains("CLONE_UNTRACED"), "{log}");
    assert_no_reaper(&files.path("reaped"));
}
