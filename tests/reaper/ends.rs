//! Tests that a parent is notified at once, however the program ends, and that the memory is freed.

use super::{assert_no_reaper, reaper, reapers, states};
use crate::support::{MIB, Program, Ran, Report, Source, build, compile, host, wait};

/// Runs under `waiter`, which reports what is left when the program has ended.
fn waited(size: &str, how: &str, options: &[&str]) -> (Ran, Report) {
    let files = compile(&[Source::C("waiter", &[]), Source::C("reaped", &[])]);
    let program = Program::new(files.path("waiter"))
        .arg(files.path("reaped"))
        .args([size, how])
        .around(["prlimit", "--core=0:"]);
    let (ran, report) = program.reported_with(options);
    assert_no_reaper(&files.path("reaped"));
    (ran, report)
}

/// Returns the bytes that ended reapers freed.
fn freed(report: &Report) -> u64 {
    let reapers = report.at("/obtained/reapers").as_array().unwrap();
    let freed = |row: &serde_json::Value| row["freed"].as_u64().unwrap();
    reapers.iter().map(freed).sum()
}

#[test]
fn every_end_leaves_the_memory_to_the_sibling() {
    let ends = [
        ("exit", 3),
        ("_exit", 3),
        ("return", 3),
        ("abort", 134),
        ("segv", 139),
        ("kill", 137),
        ("exec", 5),
        ("exec-thread", 5),
        ("exec-fails", 3),
    ];
    for (how, status) in ends {
        let (ran, report) = waited("300", how, &["--reaper=on"]);
        assert_eq!(ran.shell_status(), status, "{how} {ran:?}");
        assert!(ran.stdout.contains("closed=1"), "{how} {ran:?}");
        assert!(states(&report).contains(&"done".into()), "{how} {report:?}");
        assert!(freed(&report) >= 300 * MIB, "{how} {report:?}");
    }
}

#[test]
fn off_starts_nothing() {
    let (_, report) = waited("16", "exit", &["--reaper=off"]);
    assert!(
        states(&report).iter().all(|state| state == "off"),
        "{report:?}"
    );
}

/// Text, bss and heap of the program, its libraries and jumbo's: only the reaper's own mappings
/// remain.
#[test]
fn a_killed_program_holds_none_of_its_files() {
    let files = compile(&[Source::C("reaped", &[])]);
    let running = Program::new(files.path("reaped"))
        .args(["1000", "stay"])
        .start_jumbo(&["--reaper=on"]);
    running.wait_for_line("ready");
    let pid = reaper(&files.path("reaped"));
    assert_eq!(reapers(&files.path("reaped")), [pid]);
    running.signal(rustix::process::Signal::KILL);
    assert_eq!(running.wait().shell_status(), 137);
    assert_no_reaper(&files.path("reaped"));
}

#[test]
fn a_core_dump_is_whole_and_the_only_one() {
    let Some(gdb) = host::command("gdb") else {
        return;
    };
    let Some(_knob) = host::Knob::set("/proc/sys/kernel/core_pattern", "core.%p") else {
        return;
    };
    let files = compile(&[Source::C("crash", &[])]);
    let folder = build::world_readable_folder();
    let program = Program::new(files.path("crash"))
        .folder(folder.path())
        .around(["prlimit", "--core=unlimited"]);
    let ran = program.jumbo_with(&["--reaper=on"]);
    assert_eq!(ran.shell_status(), 139, "{ran:?}");
    assert_no_reaper(&files.path("crash"));
    let cores: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let [core] = cores.as_slice() else {
        panic!("one core dump, not {cores:?}")
    };
    let seen = Program::new(&gdb)
        .args(["--batch", "-nx", "-ex", "x/s evidence + 0x2800000"])
        .arg(files.path("crash"))
        .arg(core)
        .plain();
    assert!(seen.stdout.contains("the heap is in the core"), "{seen:?}");
}

/// A kill of the whole cgroup includes the reaper: the kernel frees, and neither is left.
#[test]
fn a_killed_cgroup_is_empty() {
    if !host::root() {
        return;
    }
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    let unified = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let place = words.next()?;
        (words.next()? == "cgroup2").then_some(place)
    });
    let Some(unified) = unified else {
        return host::skip("no cgroup2 file system is mounted");
    };
    let cgroup = std::path::Path::new(unified).join(format!("jumbo-e2e-{}", std::process::id()));
    std::fs::create_dir(&cgroup).unwrap();
    if !cgroup.join("cgroup.kill").exists() {
        std::fs::remove_dir(&cgroup).unwrap();
        return host::skip("this kernel has no cgroup.kill");
    }
    let files = compile(&[Source::C("reaped", &[])]);
    let path = files.path("reaped");
    let enter = "echo 0 > \"$0\"/cgroup.procs && exec \"$@\"";
    let program = Program::new(&path).args(["100", "stay"]);
    let around = [
        "sh".as_ref(),
        "-c".as_ref(),
        enter.as_ref(),
        cgroup.as_os_str(),
    ];
    let running = program.around(around).start_jumbo(&["--reaper=on"]);
    running.wait_for_line("ready");
    let pid = reaper(&path).as_raw_nonzero().to_string();
    let members = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap();
    assert!(members.lines().any(|line| line == pid), "{members}");
    std::fs::write(cgroup.join("cgroup.kill"), "1").unwrap();
    assert_eq!(running.wait().shell_status(), 137);
    assert_no_reaper(&path);
    wait::until("the cgroup to be empty", wait::TIMEOUT, || {
        std::fs::remove_dir(&cgroup).ok()
    });
}

/// A series of programs leaves no process, neither alive nor dead. JUMBO_TEST_PROCESSES sets their
/// number.
#[test]
fn thousands_of_short_programs_leave_nothing() {
    let count = std::env::var("JUMBO_TEST_PROCESSES").unwrap_or_else(|_| "1000".into());
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("init", &[]), Source::C("short", &[])]);
    // Init of a PID namespace, which receives all orphans.
    let init = files.path("init").display().to_string();
    let program = Program::new(files.path("short")).arg(&count);
    let around = [
        "prlimit",
        "--core=0:",
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
    ];
    let program = program.around(around).around([&*init, "catches"]);
    let (ran, report) = program.reported_with(&["--reaper=on"]);
    assert_eq!(ran.ok().number("zombies"), 0, "{report:?}");
    assert!(states(&report).contains(&"done".into()), "{report:?}");
    assert_no_reaper(&files.path("short"));
}
