//! Tests of limits, lack of privilege, debuggers and tracers: jumbo preserves their effect.

use crate::support::program::assert_alike;
use crate::support::{MIB, Program, Ran, Source, assert_same, build, compile, host};

/// Fills memory up to a limit, plain and under jumbo: both reach the same amount within a tenth.
fn assert_same_capacity(program: &Program) {
    let (plain, jumbo) = (program.plain().ok(), program.jumbo().ok());
    let blocks = |ran: &Ran| (ran.number("round0"), ran.number("round1"));
    let (plain_blocks, jumbo_blocks) = (blocks(&plain), blocks(&jumbo));
    for (plain, jumbo) in [
        (plain_blocks.0, jumbo_blocks.0),
        (plain_blocks.1, jumbo_blocks.1),
    ] {
        let alike = jumbo * 10 >= plain * 9 && jumbo * 9 <= plain * 10;
        assert!(
            alike,
            "blocks, plain {plain_blocks:?}, jumbo {jumbo_blocks:?}"
        );
    }
}

#[test]
fn a_limit_of_address_space_holds_as_much_as_before() {
    let files = compile(&[Source::C("until_full", &[])]);
    for kib in ["100", "200", "1024", "3000", "16384"] {
        let program = Program::new(files.path("until_full")).arg(kib);
        assert_same_capacity(&program.around(["prlimit", "--as=536870912"]));
    }
}

#[test]
fn a_limit_that_a_program_gives_itself_holds_as_much_as_before() {
    let files = compile(&[Source::C("limits_itself", &[])]);
    assert_same(&Program::new(files.path("limits_itself")));
}

#[test]
fn a_limit_of_data_holds_as_much_as_before() {
    let files = compile(&[Source::C("until_full", &[])]);
    for kib in ["200", "1024", "3000"] {
        let program = Program::new(files.path("until_full")).arg(kib);
        assert_same_capacity(&program.around(["prlimit", "--data=268435456"]));
    }
}

/// Under mlockall(MCL_FUTURE) all mapped memory is resident and counts; without privilege the limit
/// is firm. The library is locked, too, so the test checks that the rest is usable.
#[test]
fn locked_memory_can_be_used_to_the_limit() {
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("until_full", &[])]);
    for kib in [20, 200, 500] {
        let program = Program::new(files.path("until_full")).args([&kib.to_string(), "locked"]);
        let program = program
            .around(["prlimit", "--memlock=8388608"])
            .unprivileged();
        let (plain, jumbo) = (program.plain().ok(), program.jumbo().ok());
        for round in ["round0", "round1"] {
            let used = |ran: &Ran| ran.number("locked") + ran.number(round) * kib * 1024;
            let (plain, jumbo) = (used(&plain), used(&jumbo));
            // Tolerance: one block, and the huge page by which glibc's heap grows.
            let close = jumbo + kib * 1024 + 2 * MIB >= plain;
            assert!(
                close,
                "{kib} KiB blocks, {round}: {plain} bytes locked plain, {jumbo} with jumbo"
            );
        }
    }
}

#[test]
fn small_limits_leave_programs_running() {
    for limit in [
        "--as=67108864",
        "--data=33554432",
        "--nofile=8",
        "--stack=262144",
        "--memlock=0",
    ] {
        assert_same(&Program::shell("echo small | cat; exit 3").around(["prlimit", limit]));
    }
}

#[test]
fn a_user_without_privilege_gets_huge_pages_too() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("heap", &[]), Source::C("family", &[])]);
    let heap = Program::new(files.path("heap"))
        .args(["256", "go", "7"])
        .unprivileged();
    assert_same(&heap);
    let (_, report) = heap.reported_with(&["--max-waste=unbounded"]);
    crate::memory::assert_huge(&report, 100 * MIB, 0.9);
    assert_same(&Program::new(files.path("family")).unprivileged());
}

#[test]
fn a_read_only_sys_is_enough() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("heap", &[])]);
    // Runs in a mount namespace of its own.
    let script = "mount -o remount,bind,ro /sys && ! echo madvise 2>/dev/null > \
        /sys/kernel/mm/transparent_hugepage/enabled && exec \"$@\"";
    let heap = Program::new(files.path("heap"))
        .args(["256", "go", "7"])
        .around(["unshare", "--mount", "sh", "-c", script, "sh"]);
    let (plain, _) = assert_same(&heap);
    assert_eq!(plain.shell_status(), 7, "{plain:?}");
    let (_, report) = heap.reported_with(&["--max-waste=unbounded"]);
    crate::memory::assert_huge(&report, 100 * MIB, 0.9);
}

/// No file of a control group is there: that is no full group.
#[test]
fn a_host_without_cgroup_files_has_room() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    if !host::root() {
        return;
    }
    let files = compile(&[Source::C("heap", &[])]);
    let script = "mount -t tmpfs none /sys/fs/cgroup && exec \"$@\"";
    let heap = Program::new(files.path("heap"))
        .args(["256", "go", "7"])
        .around(["unshare", "--mount", "sh", "-c", script, "sh"]);
    let (_, report) = heap.reported();
    crate::memory::assert_huge(&report, 100 * MIB, 0.5);
}

/// The namespace has neither /proc nor /sys.
#[test]
fn a_program_runs_without_proc_and_sys() {
    if !host::root() {
        return;
    }
    let script = "mount -t tmpfs none /sys && mount -t tmpfs none /proc && exec \"$@\"";
    let around = ["unshare", "--mount", "sh", "-c", script, "sh"];
    // Without /proc the path of an executable is unknown, so the test names the library.
    let program = Program::shell("echo alone; exit 3").around(around);
    let program = program.env("JUMBO_PRELOAD", build::preload());
    assert_alike(&program.plain(), &program.jumbo(), "jumbo run");
}

#[test]
fn a_program_with_thp_disabled_runs_and_the_report_says_why_nothing_is_huge() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("heap", &[]), Source::C("thp_disabled", &[])]);
    let heap = Program::new(files.path("heap")).args(["128", "go"]);
    let (_, report) = assert_same(&heap.around([files.path("thp_disabled")]));
    assert!(report.heap_huge_share() < 0.01, "{report:?}");
    assert!(report.says("PR_SET_THP_DISABLE"), "{report:?}");
}

#[test]
fn a_host_without_thp_is_named_as_the_reason() {
    let Some(_knob) = host::Knob::set(host::THP_ENABLED, "never") else {
        return;
    };
    let files = compile(&[Source::C("heap", &[])]);
    let (_, report) = assert_same(&Program::new(files.path("heap")).args(["128", "go"]));
    assert!(
        report.says("transparent_hugepage/enabled says never"),
        "{report:?}"
    );
}

#[test]
fn a_debugger_can_attach() {
    let Some(gdb) = host::command("gdb") else {
        return;
    };
    let files = compile(&[Source::C("crash", &[])]);
    let (running, report) = Program::new(files.path("crash"))
        .arg("stay")
        .around(["prlimit", "--core=0"])
        .start_reported(&[]);
    running.wait_for_line("about to crash");
    let pid = running.child().as_raw_nonzero().to_string();
    let commands = [
        "--batch",
        "-nx",
        "-p",
        &pid,
        "-ex",
        "backtrace",
        "-ex",
        "x/s evidence + 0x2800000",
    ];
    let seen = Program::new(gdb).args(commands).plain().ok();
    assert!(seen.stdout.contains("main ("), "{seen:?}");
    assert!(seen.stdout.contains("the heap is in the core"), "{seen:?}");
    // The program continues unchanged, to its crash.
    let ran = running.wait();
    assert_eq!(ran.shell_status(), 139, "{ran:?}");
    report.read(&ran);
}

#[test]
fn a_tracer_sees_the_program_through() {
    let Some(strace) = host::command("strace") else {
        return;
    };
    let folder = build::world_readable_folder();
    let log = folder.path().join("log");
    let files = compile(&[Source::C("heap", &[])]);
    let heap = Program::new(files.path("heap")).args(["16", "go", "7"]);
    let traced = heap.clone().around([
        strace.as_os_str(),
        "-f".as_ref(),
        "-o".as_ref(),
        log.as_os_str(),
    ]);
    let plain = heap.plain();
    assert_alike(&plain, &traced.jumbo(), "strace jumbo run");
    assert_alike(&plain, &traced.reported().0, "strace jumbo run --report");
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(
        log.contains("MADV_HUGEPAGE") && log.contains("+++ exited with 7 +++"),
        "{log}"
    );
}

#[test]
fn a_core_dump_is_written_and_whole() {
    let Some(gdb) = host::command("gdb") else {
        return;
    };
    let Some(_knob) = host::Knob::set("/proc/sys/kernel/core_pattern", "core") else {
        return;
    };
    let files = compile(&[Source::C("crash", &[])]);
    for reported in [false, true] {
        let folder = build::world_readable_folder();
        let program = Program::new(files.path("crash"))
            .folder(folder.path())
            .around(["prlimit", "--core=unlimited"]);
        let ran = if reported {
            program.reported().0
        } else {
            program.jumbo()
        };
        assert_eq!(ran.shell_status(), 139, "{ran:?}");
        let cores: Vec<_> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|e| e.unwrap().path())
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
}

/// With the library in /etc/ld.so.preload a set-user-ID program has orders from its caller.
#[test]
fn a_program_with_more_rights_than_its_caller_takes_no_orders() {
    use std::os::unix::fs::PermissionsExt;
    if !host::root() {
        return;
    }
    let folder = build::world_readable_folder();
    let (library, path) = (folder.path().join("lib.so"), folder.path().join("secure"));
    std::fs::copy(build::preload(), &library).unwrap();
    // The loader follows a path in the program even if it ignores LD_PRELOAD.
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/programs/secure.c");
    let linked = std::process::Command::new("gcc")
        .args(["-Wl,--no-as-needed", "-fno-builtin", source, "-o"])
        .args([&path, &library])
        .status();
    assert!(linked.unwrap().success());
    let program = Program::new(&path).env("JUMBO_ORDERS", "heap=1,maps=0,reaper=off");
    let says = |program: &Program| program.plain().ok().stdout;
    assert_eq!(says(&program), "secure=0 ours=1\n");
    let user = program.user("nobody");
    assert_eq!(says(&user), "secure=0 ours=1\n");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o4755)).unwrap();
    assert_eq!(says(&user), "secure=1 ours=0\n");
}
