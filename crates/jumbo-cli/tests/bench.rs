//! Tests of the output of `jumbo bench` and its exit status, without times.
//!
//! The tables of the pool, shared memory and page descriptors change kernel settings; the tests of
//! `jumbo pool` include them.

#![allow(
    clippy::unwrap_used,
    reason = "a command that cannot be run fails its test"
)]

use std::fs::File;
use std::process::{Command, Output, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jumbo"));
    command.arg("bench").args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    bench(arguments).output().unwrap()
}

/// Shared lock on the host's global state, taken by all tests of all processes. Held until exit.
static HOST_LOCK: LazyLock<Option<File>> = LazyLock::new(|| {
    let file = File::create(std::env::temp_dir().join("jumbo-e2e.lock")).ok()?;
    file.lock_shared().ok().map(|()| file)
});

/// Returns the reason why this host cannot measure. With JUMBO_TEST_STRICT=1 it is a failure.
fn unmeasurable() -> Option<&'static str> {
    LazyLock::force(&HOST_LOCK);
    let thp = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let why = if !thp.is_ok_and(|text| text.contains("[madvise]")) {
        "transparent_hugepage/enabled is not `madvise`"
    } else {
        return None;
    };
    let strict = std::env::var_os("JUMBO_TEST_STRICT").is_some_and(|value| value == "1");
    assert!(!strict, "{why}");
    Some(why)
}

#[test]
fn without_a_table_it_lists_them() {
    let output = run(&[]);
    let list = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for table in [
        "heap", "free", "exit", "pool", "text", "files", "shmem", "vmemmap", "fork", "latency",
        "programs",
    ] {
        assert!(list.contains(&format!("jumbo bench {table}")), "{list}");
    }
    assert!(!list.contains("worker"), "{list}");
}

#[test]
fn wrong_options_are_named() {
    for (arguments, named) in [
        (["heap", "--size", "1M"], "--size"),
        (["heap", "--rounds", "0"], "--rounds"),
        (["free", "--size", "1M"], "--size"),
        (["free", "--workers", "1,65"], "--workers"),
        (["exit", "--size", "1M"], "--size"),
        (["pool", "--size", "1M"], "--size"),
        (["text", "--size", "1M"], "--size"),
        (["files", "--size", "1M"], "--size"),
        (["shmem", "--size", "1M"], "--size"),
        (["fork", "--size", "1M"], "--size"),
        (["latency", "--size", "1M"], "--size"),
    ] {
        let output = run(&arguments);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(
            message.contains(named) && output.stdout.is_empty(),
            "{message}"
        );
    }
    for table in [
        "heap", "free", "exit", "pool", "text", "files", "shmem", "fork", "latency",
    ] {
        let output = run(&[table, "--size", "900T"]);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(
            message.contains("is available\nhint: measure less, with --size"),
            "{message}"
        );
    }
}

/// Parses the output of `jumbo bench --json`.
fn table(arguments: &[&str]) -> Value {
    let output = run(arguments);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Checks that the table has these ratios, these values with their units, and both sides in each
/// row.
fn assert_whole(table: &Value, ratios: &[&str], values: &[(&str, &str)]) {
    assert!(table["machine"]["cores"].as_u64().unwrap() > 0);
    assert!(table["hit"]["samples"].as_u64().unwrap() > 0);
    assert!(table["hit"]["taken_again"].is_u64() && table["hit"]["kept"].is_u64());
    for spread in ratios.iter().map(|name| &table["ratios"][name]) {
        assert!(
            spread["median"].as_f64().is_some_and(|m| m > 0.0),
            "{table:#}"
        );
        assert!(
            spread["min"].is_f64() && spread["max"].is_f64(),
            "{table:#}"
        );
    }
    for (name, unit) in values {
        let value = &table["values"][name];
        assert!(
            value["median"].is_f64() && value["unit"] == *unit,
            "{name}: {table:#}"
        );
    }
    let rows = table["rows"].as_array().unwrap();
    assert!(rows.len() >= ratios.len());
    for row in rows {
        assert!(row["baseline"]["median"].as_f64().unwrap() > 0.0, "{row:#}");
        assert!(
            row["candidate"]["median"].as_f64().unwrap() > 0.0,
            "{row:#}"
        );
        assert!(
            ["ahead", "no_difference_seen", "behind"].contains(&row["verdict"].as_str().unwrap())
        );
    }
}

/// Serializes tests that measure: memory of one would look to another like memory not freed.
static MEMORY: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn the_json_of_the_programs_table() {
    let _alone = alone();
    let strict = std::env::var_os("JUMBO_TEST_STRICT").is_some_and(|value| value == "1");
    let options = [
        "programs", "--json", "--quick", "--rounds", "1", "--peers", "jemalloc",
    ];
    let has_peer = strict || jumbo_bench::program::Way::peer("jemalloc").is_ok();
    let table = table(&[&options[..], &["hashmap", "redis_fork"]].concat());
    for name in ["hashmap", "redis_fork"] {
        if let Some(missing) = table["missing"].as_array() {
            let why = missing.iter().find(|missing| missing["what"] == name);
            assert!(
                why.is_none()
                    || !strict && why.unwrap()["why"].as_str().unwrap().contains("hint: "),
                "{table:#}"
            );
            continue;
        }
        let ratios = [
            name.to_owned(),
            format!("{name}_aa"),
            format!("{name}_rss"),
            format!("{name}_vs_peer_jemalloc"),
        ];
        let measured = if has_peer { 4 } else { 3 };
        let ratios = ratios.each_ref().map(String::as_str);
        assert_whole(&table, &ratios[..measured], &[]);
    }
    let output = run(&["programs", "no_such"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn the_json_of_the_fork_table() {
    if let Some(why) = unmeasurable() {
        return eprintln!("skipped the_json_of_the_fork_table: {why}");
    }
    let _alone = alone();
    let sizes = ["fork", "--json", "--rounds", "1", "--size", "64M,128M,900T"];
    let table = table(&sizes);
    let ratios = [
        "fork_64m",
        "fork_64m_aa",
        "fork_128m",
        "fork_64m_writes",
        "fork_64m_writes_aa",
    ];
    assert_whole(&table, &ratios, &[]);
    assert!(
        table["missing"][0]["why"]
            .as_str()
            .unwrap()
            .starts_with("900 TiB: ")
    );
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn the_json_of_the_latency_table() {
    if let Some(why) = unmeasurable() {
        return eprintln!("skipped the_json_of_the_latency_table: {why}");
    }
    let _alone = alone();
    let options = ["--json", "--quick", "--rounds", "1", "--size", "128M"];
    let table = table(&[&["latency"], &options[..]].concat());
    let (mut ratios, mut values) = (Vec::new(), Vec::new());
    for host in ["", "_fragmented"] {
        for part in ["p50", "p99", "p999", "max"] {
            ratios.push(format!("{part}{host}_aa"));
            let sides = ["jumbo", "unbounded"].into_iter();
            ratios.extend(sides.map(|side| format!("{side}_{part}{host}")));
        }
        let sides = ["plain", "jumbo", "unbounded"].into_iter();
        for side in sides {
            values.push(format!("{side}_huge_percent{host}"));
            values.push(format!("{side}_free_whole_percent{host}"));
        }
    }
    let ratios: Vec<_> = ratios.iter().map(String::as_str).collect();
    let values: Vec<_> = values.iter().map(|name| (&**name, "percent")).collect();
    assert_whole(&table, &ratios, &values);
    assert_eq!(table["values"]["plain_huge_percent"]["max"], 0.0);
}

#[test]
fn the_json_of_the_heap_table() {
    if let Some(why) = unmeasurable() {
        return eprintln!("skipped the_json_of_the_heap_table: {why}");
    }
    let _alone = alone();
    let table = table(&["heap", "--json", "--rounds", "1", "--size", "64M"]);
    assert_eq!(table["table"], "heap");
    assert_eq!(table["rounds"], 1);
    assert_whole(
        &table,
        &["heap_aa", "heap_total", "rss", "large_pair"],
        &[
            ("startup_ms", "ms"),
            ("startup_aa_ms", "ms"),
            ("small_free_ns", "ns"),
        ],
    );
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn the_json_of_the_free_table() {
    if let Some(why) = unmeasurable() {
        return eprintln!("skipped the_json_of_the_free_table: {why}");
    }
    let _alone = alone();
    let table = table(&[
        "free",
        "--json",
        "--rounds",
        "1",
        "--size",
        "512M",
        "--workers",
        "1,2",
    ]);
    assert_eq!(table["table"], "free");
    assert_whole(
        &table,
        &[
            "free_aa",
            "free_1_workers",
            "free_2_workers",
            "free_background_call",
            "free_background_back",
            "huge_inline",
            "huge_inline_aa",
            "small_inline",
            "small_inline_aa",
        ],
        &[("background_call_ms", "ms")],
    );
    let published = |name: &str| {
        let mut rows = table["rows"].as_array().unwrap().iter();
        rows.find(|row| row["name"] == name).unwrap()["published"].clone()
    };
    assert_eq!(published("free_1_workers"), "1.21");
    assert_eq!(published("free_2_workers"), "1.91");
    assert!(table["ratios"]["free_4_workers"].is_null(), "{table:#}");
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn the_json_of_the_exit_table() {
    if let Some(why) = unmeasurable() {
        return eprintln!("skipped the_json_of_the_exit_table: {why}");
    }
    let _alone = alone();
    let table = table(&["exit", "--json", "--rounds", "1", "--size", "128M"]);
    assert_eq!(table["table"], "exit");
    let (mut ratios, mut values) = (Vec::new(), Vec::new());
    for end in ["exit", "kill"] {
        for ratio in ["wait", "wait_aa", "memory_back", "memory_back_aa"] {
            ratios.push(format!("{end}_{ratio}"));
        }
        values.push(format!("{end}_wait_ms"));
        values.push(format!("plain_{end}_wait_ms"));
    }
    let mut ratios: Vec<_> = ratios.iter().map(String::as_str).collect();
    ratios.push("jumbo_kill_memory_back");
    let values: Vec<_> = values.iter().map(|value| (value.as_str(), "ms")).collect();
    assert_whole(&table, &ratios, &values);
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn the_json_of_the_files_table() {
    if let Some(why) = unmeasurable() {
        return eprintln!("skipped the_json_of_the_files_table: {why}");
    }
    let _alone = alone();
    let output = run(&["files", "--json", "--rounds", "1", "--size", "64M"]);
    let message = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && message.contains("set TMPDIR") {
        return eprintln!("skipped the_json_of_the_files_table: {message}");
    }
    assert!(output.status.success(), "{output:?}");
    let table: Value = serde_json::from_slice(&output.stdout).unwrap();
    for row in ["pass", "pass_aa", "faults", "gather", "gather_aa"] {
        assert!(table["ratios"][row]["median"].is_number(), "{row}: {table}");
    }
    assert!(
        table["ratios"]["faults"]["median"].as_f64().unwrap() > 4.0,
        "{table}"
    );
    assert_eq!(table["values"]["prime"]["unit"], "ms");
}

#[test]
fn the_json_of_the_text_table() {
    if let Some(why) = unmeasurable() {
        return eprintln!("skipped the_json_of_the_text_table: {why}");
    }
    let _alone = alone();
    let table = table(&[
        "text", "--json", "--quick", "--rounds", "1", "--size", "64M",
    ]);
    assert_eq!(table["table"], "text");
    // Absent where all was measured.
    let missing = table["missing"].as_array().into_iter().flatten();
    let is_missing = |what: &str| missing.clone().any(|missing| missing["what"] == what);
    // Methods that this kernel or file system lacks are absent.
    let (mut ratios, mut values) = (vec!["faults_aa", "time_aa", "cold_start_aa"], vec![]);
    values.push(("cold_start_plain_ms", "ms"));
    let rungs = ["file, primed", "shared image"].map(|rung| !is_missing(rung));
    if rungs[0] {
        ratios.extend(["faults", "time", "cold_start", "memory_16_file_vs_base"]);
        values.push(("cold_start_ms", "ms"));
    }
    if rungs[1] {
        ratios.extend(["faults_shared", "time_shared"]);
        ratios.extend(["memory_16_shared_vs_base", "memory_16_aa"]);
        // With one copy per process the ratio would be 1/16.
        let name = "memory_16_shared_vs_base";
        let share = table["ratios"][name]["median"].as_f64().unwrap();
        assert!(share > 0.9, "{table:#}");
    }
    assert_whole(&table, &ratios, &values);
}

#[test]
fn a_folder_in_which_no_program_can_be_made_is_named() {
    let output = bench(&["text", "--size", "64M"])
        .env("TMPDIR", "/proc")
        .output()
        .unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(
        message.contains("/proc") && message.contains("hint: let TMPDIR"),
        "{message}"
    );
}

#[test]
fn an_interrupted_measurement_takes_its_worker_with_it() {
    let _alone = alone();
    for table in ["heap", "free", "exit"] {
        interrupt(&[table, "--size", "1G"]);
    }
    interrupt(&["text", "--size", "64M"]);
}

fn interrupt(arguments: &[&str]) {
    let mut parent = bench(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let worker = loop {
        let children = format!("/proc/{0}/task/{0}/children", parent.id());
        let children = std::fs::read_to_string(children).unwrap_or_default();
        if let Some(worker) = children
            .split_whitespace()
            .next()
            .filter(|pid| dies_with_parent(pid))
        {
            break worker.to_owned();
        }
        assert!(Instant::now() < deadline, "no worker was started");
        std::thread::sleep(Duration::from_millis(1));
    };
    parent.kill().unwrap();
    parent.wait().unwrap();
    while is_bench(&worker) {
        assert!(
            Instant::now() < deadline,
            "worker {worker} outlives its parent"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reports whether the worker has set its parent death signal: by then its resident memory exceeds
/// 16 MiB.
fn dies_with_parent(pid: &str) -> bool {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let resident = statm
        .split_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse().ok());
    is_bench(pid) && resident.is_some_and(|pages: u64| pages > 4096)
}

/// Reports whether `pid` is a live worker.
fn is_bench(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
        .is_ok_and(|line| line.contains("bench\0worker"))
}
