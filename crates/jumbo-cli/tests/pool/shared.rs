//! Tests of `jumbo bench shmem`: its output, without times, and the restored controls and pool
//! after any end.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::Value;

use crate::measured::{assert_ratios, is_measurable, table};
use crate::support::{Host, Snapshot, assert_unchanged, now, until};

/// The smallest and shortest run.
const BENCH: [&str; 6] = [
    env!("CARGO_BIN_EXE_jumbo"),
    "bench",
    "shmem",
    "--json",
    "--rounds=1",
    "--size=128M",
];

const THP_FOLDER: &str = "/sys/kernel/mm/transparent_hugepage";

/// Returns each control of shared memory with its value.
fn controls() -> Vec<(PathBuf, String)> {
    let sizes = fs::read_dir(THP_FOLDER).unwrap();
    let files = sizes.map(|size| size.unwrap().path().join("shmem_enabled"));
    let mut all: Vec<_> = files
        .filter_map(|file| Some((file.clone(), fs::read_to_string(file).ok()?)))
        .collect();
    all.sort();
    all
}

/// Ratios that need no privilege while the kernel's controls are at their defaults.
const UNPRIVILEGED_RATIOS: [&str; 5] = [
    "touch_aa",
    "unmap_aa",
    "disabled",
    "collapse_2m",
    "unmap_2m",
];

fn is_missing(table: &Value, what: &str) -> bool {
    let missing = table["missing"].as_array();
    let mut missing = missing.into_iter().flatten();
    missing.any(|missing| missing["what"].as_str().unwrap().contains(what))
}

#[test]
fn shared_memory_is_measured_in_each_way_and_all_is_as_it_was() {
    let test = "shared_memory_is_measured_in_each_way_and_all_is_as_it_was";
    let Some(host) = Host::take(test).filter(|_| is_measurable(test)) else {
        return;
    };
    let (before, set) = (Snapshot::now(), controls());
    let table = table(&host.command(&BENCH).output().unwrap());
    assert_unchanged(&before, "measured");
    assert_eq!(controls(), set);
    assert_eq!(table["table"], "shmem");
    assert_ratios(&table, &UNPRIVILEGED_RATIOS);
    let sized = [
        "kernel_16k",
        "kernel_64k",
        "kernel_256k",
        "kernel_2m",
        "hugetlb_2m",
    ];
    assert_ratios(&table, &sized);
    let value = |name: &str| table["values"][name]["median"].as_f64();
    for way in ["base", "kernel_64k"] {
        for column in [
            "user_ms",
            "system_ms",
            "faults_per_s",
            "faults_per_s_per_cpu",
        ] {
            let name = format!("{column}_{way}");
            assert!(
                value(&name).is_some_and(|value| value >= 0.0),
                "{name}: {table:#}"
            );
        }
    }
}

#[test]
fn without_the_right_to_set_the_controls_the_rest_is_measured() {
    let test = "without_the_right_to_set_the_controls_the_rest_is_measured";
    let Some(host) = Host::take(test).filter(|_| is_measurable(test)) else {
        return;
    };
    // Read-only for root, too, like in a container.
    let script = "for f; do [ $f != -- ] || break; mount --bind $f $f && mount -o remount,bind,ro $f || exit; done
        shift 2; shift; exec \"$@\"";
    let mut words = vec![
        "sh",
        "-c",
        script,
        "sh",
        THP_FOLDER,
        "/sys/kernel/mm/hugepages",
        "--",
    ];
    words.extend(BENCH);
    words.push("--quick");
    let table = table(&host.command(&words).output().unwrap());
    assert!(
        is_missing(&table, "folio sizes") && is_missing(&table, "hugetlb"),
        "{table:#}"
    );
    assert_ratios(&table, &UNPRIVILEGED_RATIOS);
    assert!(table["ratios"]["kernel_64k"].is_null(), "{table:#}");
}

#[test]
fn a_killed_measurement_leaves_the_controls_as_they_were() {
    let Some(host) = Host::take("a_killed_measurement_leaves_the_controls_as_they_were") else {
        return;
    };
    let (before, set) = (Snapshot::now(), controls());
    let mut bench = host
        .command(&BENCH)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // The last method measured needs both.
    until("the controls and the pool to be set", || {
        let is_set = controls() != set && now().persistent() > before.pool.persistent();
        is_set.then_some(())
    });
    bench.kill().unwrap();
    bench.wait().unwrap();
    until("the controls to be as they were", || {
        (controls() == set).then_some(())
    });
    assert_unchanged(&before, "killed");
}
