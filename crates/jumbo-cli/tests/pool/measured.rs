//! Tests of `jumbo bench pool`: its output, without times, and the restored pool after any end.

use std::path::Path;
use std::process::{Output, Stdio};

use serde_json::Value;

use crate::support::{Host, POOL, Snapshot, assert_unchanged, now, skip, stderr, until};

/// The smallest and shortest run.
const BENCH: [&str; 6] = [
    env!("CARGO_BIN_EXE_jumbo"),
    "bench",
    "pool",
    "--json",
    "--rounds=1",
    "--size=48M",
];

/// Returns false, and reports the skip, if this host cannot measure.
pub(crate) fn is_measurable(test: &str) -> bool {
    let thp = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if !thp.is_ok_and(|text| text.contains("[madvise]")) {
        skip(test, "transparent_hugepage/enabled is not `madvise`");
    } else {
        return true;
    }
    false
}

#[track_caller]
pub(crate) fn table(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
pub(crate) fn assert_ratios(table: &Value, names: &[&str]) {
    for name in names {
        let ratio = &table["ratios"][name];
        for figure in ["median", "min", "max"] {
            assert!(
                ratio[figure].as_f64().is_some_and(|figure| figure > 0.0),
                "{name}: {table:#}"
            );
        }
    }
}

/// Ratios that need no privilege.
const UNPRIVILEGED_RATIOS: [&str; 4] = [
    "stream_aa",
    "preallocated_vs_baseline_thp",
    "dynamic_vs_preallocated_thp",
    "take_give_vs_mmap_thp",
];

#[test]
fn every_ratio_is_measured_and_the_pool_is_as_it_was() {
    let test = "every_ratio_is_measured_and_the_pool_is_as_it_was";
    let Some(host) = Host::take(test).filter(|_| is_measurable(test)) else {
        return;
    };
    let before = Snapshot::now();
    let table = table(&host.command(&BENCH).output().unwrap());
    assert_unchanged(&before, "measured");
    assert_eq!(host.records(), 0);
    assert_eq!(table["table"], "pool");
    assert!(table["missing"].is_null(), "{table:#}");
    assert_ratios(&table, &UNPRIVILEGED_RATIOS);
    assert_ratios(
        &table,
        &[
            "preallocated_vs_baseline",
            "dynamic_vs_preallocated",
            "start_dynamic",
            "faults_dynamic",
            "mmap_aa",
            "take_give_vs_mmap",
        ],
    );
    // These are counts, independent of time.
    for name in ["faults_dynamic", "faults_dynamic_thp"] {
        let fewer = table["ratios"][name]["min"].as_f64().unwrap();
        assert!(fewer > 10.0, "{name}: {table:#}");
    }
}

#[test]
fn descriptors_are_measured_and_the_pool_is_as_it_was() {
    let test = "descriptors_are_measured_and_the_pool_is_as_it_was";
    let Some(host) = Host::take(test) else {
        return;
    };
    let before = Snapshot::now();
    let command = [
        BENCH[0],
        "bench",
        "vmemmap",
        "--json",
        "--quick",
        "--rounds=1",
    ];
    let table = table(&host.command(&command).output().unwrap());
    assert_unchanged(&before, "measured");
    assert_eq!(host.records(), 0);
    assert_eq!(table["table"], "vmemmap");
    for suffix in ["", "_1g"] {
        let names = [
            "prepare",
            "release",
            "bytes_kept",
            "head_of_random",
            "head_of_sequential",
            "pin",
            "unpin",
        ];
        for name in names {
            assert_ratios(&table, &[&format!("{name}{suffix}")]);
        }
    }
    // These are counts, independent of time.
    for name in ["bytes_kept", "bytes_kept_1g"] {
        let least = table["ratios"][name]["min"].as_f64().unwrap();
        assert!(least > 100.0, "{table:#}");
    }
    assert!(table["missing"].is_null(), "{table:#}");
}

#[test]
fn without_the_right_to_set_the_pool_the_rest_is_measured() {
    let test = "without_the_right_to_set_the_pool_the_rest_is_measured";
    let Some(host) = Host::take(test).filter(|_| is_measurable(test)) else {
        return;
    };
    let before = Snapshot::now();
    // Read-only for root, too, like in a container.
    let pool = Path::new("/").join(POOL);
    let script = "mount --bind \"$0\" \"$0\" && mount -o remount,bind,ro \"$0\" && exec \"$@\"";
    let mut words = vec!["sh", "-c", script, pool.to_str().unwrap()];
    words.extend(BENCH);
    let table = table(&host.command(&words).output().unwrap());
    assert_unchanged(&before, "measured");
    let missing = table["missing"].as_array().unwrap();
    assert_eq!(missing.len(), 1, "{table:#}");
    assert!(missing[0]["what"].as_str().unwrap().contains("hugetlb"));
    assert!(
        missing[0]["why"].as_str().unwrap().contains("Read-only"),
        "{table:#}"
    );
    assert_ratios(&table, &UNPRIVILEGED_RATIOS);
    for name in ["dynamic_vs_preallocated", "take_give_vs_mmap"] {
        assert!(table["ratios"][name].is_null(), "{name}: {table:#}");
    }
}

#[test]
fn a_killed_measurement_leaves_the_pool_as_it_was() {
    let Some(host) = Host::take("a_killed_measurement_leaves_the_pool_as_it_was") else {
        return;
    };
    let before = Snapshot::now();
    let mut bench = host
        .command(&BENCH)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("a pool that is set", || {
        (now().persistent() > before.pool.persistent() && host.records() == 1).then_some(())
    });
    bench.kill().unwrap();
    bench.wait().unwrap();
    assert_unchanged(&before, "killed");
    until("the record to be gone", || {
        (host.records() == 0).then_some(())
    });
}
