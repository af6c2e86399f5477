//! Tests that run the examples as a reader would, each as a process of its own.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::path::Path;
use std::process::Command;

#[expect(dead_code, reason = "what the tests of the pool need besides")]
#[path = "pool/host.rs"]
mod host;

/// Returns the output of an example, built with the profile of this test.
fn run(example: &str) -> String {
    let test = std::env::current_exe().unwrap();
    let profile = test.ancestors().nth(2).unwrap();
    let built = match profile.file_name().and_then(|name| name.to_str()) {
        Some("debug") => "dev",
        name => name.unwrap(),
    };
    let target = profile.parent().unwrap();
    let output = Command::new(std::env::var_os("CARGO").unwrap())
        .args(["run", "--quiet", "--offline", "--package", "jumbo"])
        .args(["--profile", built, "--example", example, "--target-dir"])
        .arg(target)
        .output()
        .unwrap();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{example}: {complained}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_buffer_pool_has_hugetlb_pages_where_there_are_some_and_thps_elsewhere() {
    let _alone = host::Alone::new();
    let said = run("buffer_pool");
    let either = said.contains("4 hugetlb pages") || said.contains("4 THPs of 2M");
    assert!(either && said.contains("6 of them read"), "{said}");
    // 16 MiB for huge pages, 16 MiB for 1 GiB of base pages, and the reserve.
    let described = [
        "1 TiB in pages of 2M: 16.1 MiB of",
        "1 GiB of it in pages of 4K: 32.1 MiB",
        "again: 16.1 MiB",
    ];
    assert!(described.iter().all(|line| said.contains(line)), "{said}");
    assert!(said.contains("instead of 16 GiB"), "{said}");

    let mut knobs = host::Knobs::new();
    if !knobs.set(Path::new(host::POOL).join("nr_overcommit_hugepages"), 64) {
        return host::skip("cannot let the kernel's pool of 2M pages grow");
    }
    let said = run("buffer_pool");
    assert!(said.contains("4 hugetlb pages of 2M"), "{said}");
}

#[test]
fn a_gibibyte_is_gathered() {
    let said = run("gather");
    let (_, threads) = said
        .split_once("freed 1 GiB in 16 mappings by ")
        .expect(&said);
    let threads: usize = threads.split(' ').next().unwrap().parse().unwrap();
    let cpus = std::thread::available_parallelism().unwrap().get();
    assert!((cpus.min(2)..=4).contains(&threads), "{said}");
}

#[test]
fn shared_buffers_are_on_hugetlb_pages_or_collapsed() {
    let _alone = host::Alone::new();
    let said = run("shared_buffers");
    let rungs = ["Hugetlb", "Collapse", "Kernel"];
    let rung = rungs
        .iter()
        .find(|rung| said.contains(&format!("on the rung {rung}")));
    // With the PMD size's control at `never` there is no method, and the example says so.
    let huge =
        said.contains("256 MiB of it huge") || (rung.is_none() && said.contains("not Collapse"));
    assert!(huge && said.contains("emptied: true; freed in"), "{said}");
}

#[test]
fn a_process_sees_what_of_it_is_huge() {
    let said = run("status");
    let (before, after) = said.split_once("with 64 MiB").expect(&said);
    let heap = |part: &str| {
        part.lines()
            .find(|line| line.contains("heap"))
            .unwrap()
            .to_owned()
    };
    assert!(heap(before).contains(" 0 B huge"), "{said}");
    let thp = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if thp.is_ok_and(|thp| !thp.contains("[never]")) {
        assert!(heap(after).contains("64 MiB huge"), "{said}");
    }
}
