//! The tools of libhugetlbfs by the names of links.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

#[expect(dead_code, reason = "what the tests of the pool need besides")]
#[path = "../../jumbo/tests/pool/host.rs"]
mod host;

/// Runs a tool of that name with the words of a line.
fn run(line: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut words = line.split(' ');
    let tool = folder.path().join(words.next().unwrap());
    symlink(env!("CARGO_BIN_EXE_jumbo"), &tool).unwrap();
    let mut command = Command::new(tool);
    for variable in ["LD_PRELOAD", "JUMBO_PRELOAD", "JUMBO_ORDERS", "JUMBO"] {
        command.env_remove(variable);
    }
    command
        .args(words)
        .env("XDG_CONFIG_HOME", folder.path())
        .output()
        .unwrap()
}

fn printed(line: &str) -> String {
    let output = run(line);
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn hugectl_runs_a_program_with_its_heap() {
    let line = "hugectl --heap --verbose 0 printenv JUMBO_ORDERS LD_PRELOAD";
    assert!(printed(line).contains("libjumbo_preload.so"));
    let plan = printed("hugectl --heap --dry-run /bin/sh -c exit");
    assert!(plan.contains("sh"), "{plan}");
    // The program's exit status.
    assert_eq!(
        run("hugectl --heap /bin/sh -c false").status.code(),
        Some(1)
    );
}

#[test]
fn what_is_refused_has_status_2_and_a_reason() {
    for line in [
        "hugectl true",
        "hugectl --heap --no-preload true",
        "hugeadm --create-mounts",
        "hugeedit --data x",
    ] {
        let output = run(line);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}: {stderr}");
        assert!(
            stderr.starts_with("jumbo: ") && stderr.contains("hint: "),
            "{line}: {stderr}"
        );
    }
}

#[test]
fn hugeadm_lists_pools_and_plans_without_a_change() {
    let _alone = host::Alone::new();
    let Ok(before) = fs::read_to_string(Path::new(host::POOL).join("nr_hugepages")) else {
        return host::skip("this kernel has no pool of 2M pages");
    };
    let sizes = printed("hugeadm --page-sizes-all");
    assert!(sizes.lines().any(|line| line == "2097152"), "{sizes}");
    let list = printed("hugeadm --pool-list");
    let row = list
        .lines()
        .find(|line| line.trim().starts_with("2097152 "))
        .unwrap();
    assert_eq!(row.split_whitespace().nth(1), Some(before.trim()), "{list}");

    let plan = printed("hugeadm --pool-pages-min 2MB:+3 --dry-run");
    let wanted = before.trim().parse::<u64>().unwrap() + 3;
    assert!(plan.contains(&wanted.to_string()), "{plan}");
    let after = fs::read_to_string(Path::new(host::POOL).join("nr_hugepages")).unwrap();
    assert_eq!(before, after);
}
