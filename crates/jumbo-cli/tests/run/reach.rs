//! Programs that LD_PRELOAD cannot reach: they run unchanged, and jumbo reports the reason.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::support::{MODES, executable, jumbo, output, run, skip, stdout};

fn plan(program: &Path) -> Value {
    let plan = stdout(
        jumbo()
            .args(["run", "--dry-run", "--json", "--"])
            .arg(program),
    );
    serde_json::from_str(&plan).unwrap()
}

fn reason(program: &Path) -> String {
    let plan = plan(program);
    assert_eq!(plan["reach"]["reached"], false, "{plan:#}");
    plan["reach"]["reason"].as_str().unwrap().to_owned()
}

/// Compiles a C program that prints its environment.
fn compile(folder: &Path, arguments: &[&str]) -> Option<PathBuf> {
    let source = folder.join("look.c");
    let code = "#include <stdio.h>\n#include <stdlib.h>\nint main(void) {\n\
        puts(getenv(\"LD_PRELOAD\") ? \"preload\" : \"-\");\n return 3; }\n";
    fs::write(&source, code).unwrap();
    let binary = folder.join("look");
    let gcc = Command::new("gcc")
        .args(arguments)
        .arg("-o")
        .arg(&binary)
        .arg(&source)
        .output();
    gcc.is_ok_and(|output| output.status.success())
        .then_some(binary)
}

#[test]
fn a_pipe_for_an_interpreter_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let (script, pipe) = (folder.path().join("script"), folder.path().join("pipe"));
    assert!(
        Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    executable(&script, &format!("#!{}\n", pipe.display()));
    for mode in MODES {
        assert_eq!(output(run(mode).arg(&script)).status.code(), Some(126));
    }
}

#[test]
fn go_is_known_by_its_build_information() {
    let folder = tempfile::tempdir().unwrap();
    let name = "go_is_known_by_its_build_information";
    let Some(binary) = compile(folder.path(), &["-static"]) else {
        skip(name, "no static libc");
        return;
    };
    assert!(!reason(&binary).contains("Go"));
    let section = format!(".go.buildinfo={}", folder.path().join("look.c").display());
    let mut objcopy = Command::new("objcopy");
    objcopy.args(["--add-section", &section]).arg(&binary);
    assert!(objcopy.status().unwrap().success());
    assert!(reason(&binary).contains("Go"), "{}", reason(&binary));
}

#[test]
fn a_static_program_runs_without_the_library() {
    let folder = tempfile::tempdir().unwrap();
    let Some(binary) = compile(folder.path(), &["-static"]) else {
        skip(
            "a_static_program_runs_without_the_library",
            "no static libc",
        );
        return;
    };
    let mut command = jumbo();
    command.env("JUMBO_PRELOAD", "/nonexistent.so");
    let output = output(command.args(["run", "--quiet", "--"]).arg(&binary));
    assert_eq!(output.stdout, b"-\n", "{output:?}");
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_dynamic_program_and_a_script_are_reached() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    fs::write(&script, "#! /bin/sh -e\nexit 0\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    for program in [Path::new("env"), &script] {
        assert_eq!(
            plan(program)["reach"]["reached"],
            true,
            "{}",
            program.display()
        );
    }
    assert_eq!(plan(&script)["binary"], "/bin/sh");
}

#[test]
fn a_static_program_runs_untouched() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile(folder.path(), &["-static"]) else {
        skip(
            "a_static_program_runs_untouched",
            "gcc -static does not work here",
        );
        return;
    };
    assert!(reason(&program).contains("statically linked"));
    for mode in MODES {
        let output = output(run(mode).arg(&program));
        assert_eq!(output.status.code(), Some(3), "{mode:?}");
        // Its children may be reachable.
        assert_eq!(output.stdout, b"preload\n", "{mode:?}");
    }
}

#[test]
fn the_report_says_why_a_program_was_not_reached() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile(folder.path(), &["-static"]) else {
        skip(
            "the_report_says_why_a_program_was_not_reached",
            "gcc -static does not work here",
        );
        return;
    };
    let mut command = jumbo();
    let output = output(command.args(["run", "--report=json"]).arg(&program));
    let report: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(report["reach"]["reached"], false);
    assert!(
        report["reach"]["reason"]
            .as_str()
            .unwrap()
            .contains("statically")
    );
    assert_eq!(report["shortfalls"][0]["what"], "the program");
}

#[test]
fn another_machine_s_program_gets_no_library() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    let mut bytes = fs::read("/bin/true").unwrap();
    // e_machine: SPARC, which no test host is.
    bytes[18] = 2;
    bytes[19] = 0;
    fs::write(&program, bytes).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(reason(&program).contains("built for ELF machine 2"));
    let plan = plan(&program);
    assert_eq!(
        plan["environment"].as_object().unwrap().len(),
        0,
        "{plan:#}"
    );
}

#[test]
fn a_set_user_id_program_is_not_reached() {
    if !rustix::process::getuid().is_root() {
        skip(
            "a_set_user_id_program_is_not_reached",
            "it takes root to give a file away",
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    fs::copy("/bin/true", &program).unwrap();
    std::os::unix::fs::chown(&program, Some(65534), None).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    assert!(reason(&program).contains("set-user-ID"));
    // No effect for the owner.
    std::os::unix::fs::chown(&program, Some(0), None).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    assert_eq!(plan(&program)["reach"]["reached"], true);
}

#[test]
fn scripts_that_interpret_each_other_end() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    executable(&program, &format!("#!{}\n", program.display()));
    assert!(reason(&program).contains("interpret each other"));
    assert_eq!(
        output(run(crate::support::Mode::Exec).arg(&program))
            .status
            .code(),
        Some(126)
    );
}

#[test]
fn the_plan_for_people_names_every_kind_of_memory() {
    let plan = stdout(jumbo().args(["run", "--dry-run", "--heap=off", "--", "env"]));
    for part in [
        "Reached",
        "LD_PRELOAD=",
        "large allocations",
        "--heap=off",
        "anonymous mappings",
        "shared memory",
    ] {
        assert!(plan.contains(part), "{part}: {plan}");
    }
}
