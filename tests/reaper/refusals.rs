//! Tests of cases without a reaper, and of calls that end it.

use super::{assert_no_reaper, is_started, reapers, states};
use crate::pool::group::Group;
use crate::support::program::assert_alike;
use crate::support::{Program, Source, build, compile, host};

#[test]
fn pid_one_of_a_namespace_gets_none() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("reaped", &[])]);
    let program = Program::new(files.path("reaped")).args(["16", "exit"]);
    let program = program.around(["unshare", "--pid", "--fork", "--mount-proc"]);
    let (ran, report) = program.reported_with(&["--reaper=on"]);
    // The launcher is PID 1, and the program is not.
    assert_eq!(ran.shell_status(), 3, "{ran:?}");
    assert_eq!(states(&report).len(), 1, "{report:?}");
    // Without a report the launcher becomes the program.
    let program = Program::new(files.path("reaped")).args(["16", "stay"]);
    let program = program.around(["unshare", "--pid", "--fork", "--mount-proc"]);
    let mut running = program.start_jumbo(&["--reaper=on"]);
    running.wait_for_line("ready");
    assert_eq!(reapers(&files.path("reaped")), []);
    running.write("q");
    assert_eq!(running.wait().shell_status(), 6);
    assert_no_reaper(&files.path("reaped"));
}

/// A child that is not waited for stays a zombie as long as the namespace.
#[test]
fn an_init_that_waits_for_no_orphan_is_left_none() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("reaped", &[]), Source::C("init", &[])]);
    let init = files.path("init").display().to_string();
    for (how, started) in [
        ("application", false),
        ("catches", true),
        ("blocks", true),
        ("ignores", true),
    ] {
        for (mode, size) in [("--reaper=on", "16"), ("--reaper=auto", "1200")] {
            let program = Program::new(files.path("reaped")).args([size, "exit"]);
            let around = ["unshare", "--pid", "--fork", "--mount-proc", &init, how];
            let program = program.around(around);
            let (ran, report) = program.reported_with(&[mode]);
            assert_eq!(ran.number("zombies"), 0, "{how} {mode} {ran:?} {report:?}");
            let state = &*states(&report)[0];
            assert_eq!(is_started(state), started, "{how} {mode} {report:?}");
            assert!(started || state == "init", "{how} {mode} {report:?}");
        }
    }
}

/// The first child after unshare(1) --pid is PID 1 of the new namespace, and must be the program's.
#[test]
fn children_of_another_namespace_are_the_programs() {
    if !host::root() {
        return;
    }
    let script = "sh -c 'echo pid $$'; sh -c 'echo never' 2>/dev/null; echo $?";
    let program = Program::shell(script).around(["unshare", "--pid"]);
    let plain = program.plain();
    assert!(plain.stdout.starts_with("pid 1\n"), "{plain:?}");
    assert_alike(&plain, &program.jumbo_with(&["--reaper=on"]), "jumbo run");
}

#[test]
fn a_program_under_a_filter_is_left_alone() {
    let files = compile(&[Source::C("filtered", &[]), Source::C("reaped", &[])]);
    let program = Program::new(files.path("filtered"))
        .args(["exec".as_ref(), files.path("reaped").as_os_str()])
        .args(["1200", "exit"]);
    for mode in ["--reaper=on", "--reaper=auto"] {
        let (ran, report) = program.reported_with(&[mode]);
        assert_eq!(ran.shell_status(), 3, "{mode} {ran:?}");
        let states = states(&report);
        assert_eq!(states.last().unwrap(), "seccomp", "{mode} {report:?}");
    }
}

/// Each step towards a reaper would kill this program.
#[test]
fn a_program_that_installs_a_filter_is_left_alone_from_then_on() {
    let files = compile(&[Source::C("filtered", &[])]);
    for how in ["prctl", "syscall"] {
        let program = Program::new(files.path("filtered")).args([how, "1200"]);
        let (ran, report) = program.reported_with(&["--reaper=auto"]);
        assert_eq!(ran.ok().stdout, "went on\n");
        assert_eq!(states(&report), ["seccomp"], "{how} {report:?}");
        // A reaper that was started before stays.
        let (ran, report) = program.reported_with(&["--reaper=on"]);
        assert_eq!(ran.ok().stdout, "went on\n");
        assert!(is_started(&states(&report)[0]), "{how} {report:?}");
    }
    let program = Program::new(files.path("filtered")).args(["refused", "1200"]);
    let (ran, report) = program.reported_with(&["--reaper=auto"]);
    assert_eq!(ran.ok().stdout, "went on\n");
    assert!(is_started(&states(&report)[0]), "{report:?}");
    assert_no_reaper(&files.path("filtered"));
}

#[test]
fn where_no_process_can_be_made_the_program_runs_without() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("reaped", &[])]);
    let program = Program::new(files.path("reaped")).args(["16", "exit"]);
    // A user that no other test has may have this one process: `prlimit` counts those of all tests.
    let ids = ["--reuid=61357", "--regid=61357", "--clear-groups"];
    let program = program
        .around(["prlimit", "--nproc=1", "setpriv"])
        .around(ids)
        .installed();
    let plain = program.plain();
    assert_eq!(plain.shell_status(), 3, "{plain:?}");
    assert_alike(&plain, &program.jumbo_with(&["--reaper=on"]), "jumbo run");
}

#[test]
fn without_proc_there_is_none() {
    if !host::root() {
        return;
    }
    let script = "mount -t tmpfs none /proc && exec \"$@\"";
    let around = ["unshare", "--mount", "sh", "-c", script, "sh"];
    let program = Program::shell("echo alone; exit 3").around(around);
    let program = program.env("JUMBO_PRELOAD", build::preload());
    assert_alike(
        &program.plain(),
        &program.jumbo_with(&["--reaper=on"]),
        "jumbo run",
    );
}

#[test]
fn calls_that_want_memory_of_ones_own_answer_as_before() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("unshares", &[])]);
    let path = files.path("unshares");
    // Calls, and whether there is a reaper again afterwards.
    let calls = [
        ("memory", true),
        ("time", true),
        ("user", true),
        ("pid", false),
        // The calling thread cannot have it back.
        ("thread", false),
    ];
    for (call, again) in calls {
        let program = Program::new(&path).arg(call);
        let plain = program.clone().stdin("\n").plain().ok();
        let mut running = program.start_jumbo(&["--reaper=on"]);
        running.wait_for_line("ready");
        assert_eq!(reapers(&path).len(), usize::from(again), "{call}");
        running.write("\n");
        assert_alike(&plain, &running.wait(), call);
        assert_no_reaper(&path);
    }
}

/// A process of the same user can open the root folder of another one without privilege: a reaper
/// that kept the old one would be a way out.
#[test]
fn a_program_that_changes_its_root_has_no_way_back() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("unshares", &[])]);
    let path = files.path("unshares");
    for (call, how, again) in [
        ("chroot", "name", false),
        ("chroot", "number", true),
        ("pivot", "name", true),
        ("pivot", "number", false),
    ] {
        let root = build::world_readable_folder();
        let program = Program::new(&path).args([call, how]).arg(root.path());
        let program = program.around(in_own_mounts(root.path(), again));
        let plain = program.clone().stdin("\n").plain().ok();
        let mut running = program.start_jumbo(&["--reaper=on"]);
        running.wait_for_line("ready");
        // Below a new root with a /proc there is a reaper again.
        assert_eq!(reapers(&path).len(), usize::from(again), "{call} {how}");
        running.write("\n");
        assert_alike(&plain, &running.wait(), how);
        assert_no_reaper(&path);
    }
}

/// Runs a program in its own mount namespace, with a /proc in `root` if `proc` is set.
fn in_own_mounts(root: &std::path::Path, proc: bool) -> [String; 6] {
    let root = root.display();
    let mounts = if proc {
        format!("mkdir -p {root}/proc && mount --bind /proc {root}/proc && ")
    } else {
        String::new()
    };
    let script = format!("{mounts}exec \"$@\"");
    ["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned)
}

/// A reaper that one thread starts while another changes the root would keep the old one.
/// JUMBO_TEST_ROUNDS sets the number of rounds.
#[test]
fn calls_of_several_threads_leave_one_with_the_root_of_the_program() {
    if !host::root() {
        return;
    }
    let rounds = std::env::var("JUMBO_TEST_ROUNDS").unwrap_or_else(|_| "300".into());
    let files = compile(&[Source::C("rooted", &[])]);
    let path = files.path("rooted");
    let root = build::world_readable_folder();
    let program = Program::new(&path).arg(root.path()).arg(&rounds);
    let program = program.around(in_own_mounts(root.path(), true));
    let (ran, report) = program.reported_with(&["--reaper=on"]);
    let ran = ran.ok();
    // In every round there was one reaper, and never two.
    assert_eq!(ran.number("seen"), ran.number("rounds"), "{ran:?}");
    assert!(is_started(&states(&report)[0]), "{report:?}");
    assert_no_reaper(&path);
}

/// The same for a cgroup with a low limit of processes.
#[test]
fn a_small_pids_cgroup_leaves_none() {
    let files = compile(&[Source::C("reaped", &[])]);
    for (limit, started) in [(20, false), (1000, false), (5000, true)] {
        let Some(group) = Group::of_pids(limit) else {
            return;
        };
        for (mode, size) in [("--reaper=on", "16"), ("--reaper=auto", "1200")] {
            let program = Program::new(files.path("reaped")).args([size, "exit"]);
            let program = program.around(group.enter());
            let (ran, report) = program.reported_with(&[mode]);
            assert_eq!(ran.shell_status(), 3, "{limit} {ran:?}");
            let state = &*states(&report)[0];
            assert_eq!(is_started(state), started, "{limit} {mode} {report:?}");
            assert!(started || state == "limits", "{limit} {mode} {report:?}");
            assert_no_reaper(&files.path("reaped"));
        }
    }
}

/// A user with a low limit of processes may need each.
#[test]
fn a_small_limit_of_processes_leaves_none() {
    let files = compile(&[Source::C("reaped", &[])]);
    let program = Program::new(files.path("reaped")).args(["16", "exit"]);
    for (limit, started) in [("--nproc=4000", false), ("--nproc=5000", true)] {
        let (ran, report) = program
            .clone()
            .around(["prlimit", limit])
            .reported_with(&["--reaper=on"]);
        assert_eq!(ran.shell_status(), 3, "{limit} {ran:?}");
        let state = &*states(&report)[0];
        assert_eq!(is_started(state), started, "{limit} {report:?}");
        assert!(started || state == "limits", "{limit} {report:?}");
    }
    assert_no_reaper(&files.path("reaped"));
}
