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
    run_with(example, &[])
}

fn run_with(example: &str, arguments: &[&Path]) -> String {
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
        .arg("--")
        .args(arguments)
        .output()
        .unwrap();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{example}: {complained}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_buffer_pool_has_hugetlb_pages_where_there_are_some_and_thps_elsewhere() {
    let _alone = host::Alone::new();
    let printed = run("buffer_pool");
    let either = printed.contains("4 hugetlb pages") || printed.contains("4 THPs of 2M");
    assert!(either && printed.contains("6 of them read"), "{printed}");
    // 16 MiB for huge pages, 16 MiB for 1 GiB of base pages, and the reserve.
    let described = [
        "1 TiB in pages of 2M: 16.1 MiB of",
        "1 GiB of it in pages of 4K: 32.1 MiB",
        "again: 16.1 MiB",
    ];
    assert!(
        described.iter().all(|line| printed.contains(line)),
        "{printed}"
    );
    assert!(printed.contains("instead of 16 GiB"), "{printed}");

    let mut knobs = host::Knobs::new();
    if !knobs.set(Path::new(host::POOL).join("nr_overcommit_hugepages"), 64) {
        return host::skip("cannot let the kernel's pool of 2M pages grow");
    }
    let printed = run("buffer_pool");
    assert!(printed.contains("4 hugetlb pages of 2M"), "{printed}");
}

#[test]
fn a_gibibyte_is_gathered() {
    let printed = run("gather");
    let (_, threads) = printed
        .split_once("freed 1 GiB in 16 mappings by ")
        .expect(&printed);
    let threads: usize = threads.split(' ').next().unwrap().parse().unwrap();
    let cpus = std::thread::available_parallelism().unwrap().get();
    assert!((cpus.min(2)..=4).contains(&threads), "{printed}");
}

#[test]
fn shared_buffers_are_on_hugetlb_pages_or_collapsed() {
    let _alone = host::Alone::new();
    let printed = run("shared_buffers");
    let rungs = ["Hugetlb", "Collapse", "Kernel"];
    let rung = rungs
        .iter()
        .find(|rung| printed.contains(&format!("on the rung {rung}")));
    // With the PMD size's control at `never` there is no method, and the example says so.
    let huge = printed.contains("256 MiB of it huge")
        || (rung.is_none() && printed.contains("not Collapse"));
    assert!(
        huge && printed.contains("emptied: true; freed in"),
        "{printed}"
    );
}

#[test]
fn a_process_sees_what_of_it_is_huge() {
    let printed = run("status");
    let (before, after) = printed.split_once("with 64 MiB").expect(&printed);
    let heap = |part: &str| {
        part.lines()
            .find(|line| line.contains("heap"))
            .unwrap()
            .to_owned()
    };
    assert!(heap(before).contains(" 0 B huge"), "{printed}");
    let thp = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if thp.is_ok_and(|thp| !thp.contains("[never]")) {
        assert!(heap(after).contains("64 MiB huge"), "{printed}");
    }
}

#[test]
fn an_array_file_is_summed_on_huge_pages_or_as_a_copy() {
    let numbers: Vec<u8> = (0..1_000_000)
        .flat_map(|at| f64::from(at).to_le_bytes())
        .collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), numbers).unwrap();
    let printed = run_with("sum_file", &[file.path()]);
    assert!(
        printed.contains("7.6 MiB mapped") || printed.contains("7.6 MiB copied"),
        "{printed}"
    );
    assert!(printed.contains("sum 499999500000\n"), "{printed}");
}

#[test]
fn a_program_with_the_heap_says_whose_it_is() {
    let printed = run_with("heap", &[Path::new("1")]);
    let has_thp = Path::new("/sys/kernel/mm/transparent_hugepage").exists();
    assert_eq!(printed.starts_with("jumbo's heap: "), has_thp, "{printed}");
}
