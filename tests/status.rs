//! Tests of `jumbo status -p` of covered programs: values read from their memory.

use std::process::Command;

use rustix::process::Pid;
use serde_json::Value;

use crate::support::{MIB, Program, Source, build, compile, host};

/// Returns the row of `jumbo status` for a process.
fn status(pid: Pid) -> Value {
    let pid = pid.as_raw_nonzero().to_string();
    let output = Command::new(build::jumbo())
        .args(["status", "--json", "-p", &pid])
        .output()
        .unwrap();
    let mut page: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    page["processes"][0].take()
}

#[test]
fn what_jumbo_does_in_a_running_program_is_shown_without_a_launcher() {
    // In place, without a ledger; and as a child, with a ledger.
    let report = ["--report=json", "--report-file", "/dev/null"];
    for (options, reported) in [(&[][..], false), (&report, true)] {
        let mut running = Program::new("cat").start_jumbo(options);
        running.write("ready\n");
        running.wait_for_line("ready");
        let process = status(if reported {
            running.child()
        } else {
            running.pid()
        });
        let free = &process["jumbo"]["free"];
        for count in [
            "threads",
            "pending",
            "gathered",
            "inline",
            "background",
            "workers",
            "waits",
        ] {
            assert!(free[count].is_u64(), "{count}: {process:#}");
        }
        assert!(
            process["jumbo"]["reaper"]["state"].is_string(),
            "{process:#}"
        );
        assert_eq!(process["missing"], Value::Array(Vec::new()));
        running.wait();
    }
}

#[test]
fn what_a_pool_gives_is_shown_while_the_program_runs() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("heap", &[])]);
    let program = Program::new(files.path("heap")).args(["128", "stay"]);
    let mut running = program.start_jumbo(&["--pool=32M,each"]);
    running.wait_for_line("ready");
    let pool = &status(running.pid())["jumbo"]["pool"];
    let bytes = |count: &str| {
        pool[count]
            .as_u64()
            .unwrap_or_else(|| panic!("{count}: {pool}"))
    };
    let (now, most) = (
        bytes("hugetlb") + bytes("thp"),
        bytes("hugetlb_peak") + bytes("thp_peak"),
    );
    assert!(now >= 16 * MIB && most >= now, "{pool}");
    assert!(bytes("beyond") >= 16 * MIB, "{pool}");
    assert_eq!((bytes("moved"), bytes("stuck")), (0, 0));

    let pid = running.pid().as_raw_nonzero().to_string();
    let page = Command::new(build::jumbo())
        .args(["status", "-p", &pid])
        .output()
        .unwrap();
    let page = String::from_utf8(page.stdout).unwrap();
    assert!(
        page.contains("  pool: ") && page.contains("asked for beyond it"),
        "{page}"
    );
    running.write("\n");
    running.wait();
}

#[test]
fn a_program_that_jumbo_does_not_cover_shows_none() {
    let mut running = Program::new("cat").start_plain();
    running.write("ready\n");
    running.wait_for_line("ready");
    let process = status(running.pid());
    assert_eq!(process["name"], "cat");
    assert!(process["jumbo"].is_null(), "{process:#}");
    running.wait();
}

/// The name finds a program and its reaper process, which has the same command line.
#[test]
fn the_memory_of_a_program_and_its_reaper_is_counted_once() {
    let files = compile(&[Source::C("reaped", &[])]);
    let path = files.path("reaped");
    let program = Program::new(&path).args(["300", "stay"]);
    let mut running = program.start_jumbo(&["--reaper=on"]);
    running.wait_for_line("ready");
    let pid = running.pid().as_raw_nonzero().get();
    let jumbo = |arguments: &[&str]| {
        let output = Command::new(build::jumbo())
            .arg("status")
            .args(arguments)
            .output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    let page: Value = serde_json::from_str(&jumbo(&["--json", "--top", "1000"])).unwrap();
    let reapers = page["tasks"]["siblings"].as_array().unwrap();
    let reaper = reapers.iter().find(|reaper| reaper["program"] == pid);
    let reaper = &reaper.unwrap_or_else(|| panic!("no reaper of {pid} in {reapers:?}"))["pid"];
    let largest = page["tasks"]["largest"].as_array().unwrap();
    assert!(largest.iter().any(|task| task["pid"] == pid));
    assert!(largest.iter().all(|task| task["pid"] != *reaper));

    let (program, reaper) = (pid.to_string(), reaper.to_string());
    let both = ["--json", "-p", &program, "-p", &reaper];
    let page: Value = serde_json::from_str(&jumbo(&both)).unwrap();
    let alone: Value = serde_json::from_str(&jumbo(&both[..3])).unwrap();
    let heap = |page: &Value| page["total"]["heap"]["bytes"].as_u64().unwrap();
    assert_eq!(heap(&page), heap(&alone));
    assert!(heap(&alone) >= 300 * MIB, "{alone:#}");
    let label = format!("the jumbo-reaper of process {pid}");
    assert!(jumbo(&both[1..]).contains(&label), "{}", jumbo(&both[1..]));
    assert!(jumbo(&[]).contains(&format!("{reaper} of {pid}")));
    running.write("q");
    running.wait();
}
