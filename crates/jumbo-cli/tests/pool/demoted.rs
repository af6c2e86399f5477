//! `jumbo pool demote`: huge pages split into smaller ones.

use std::fs;

use crate::support::{Fake, Host, POOL, now, skip, stderr};

const GIGANTIC_POOL: &str = "sys/kernel/mm/hugepages/hugepages-1048576kB";

fn with_large_pages() -> Fake {
    let fake = Fake::new();
    fake.pool(1 << 20, [3, 2, 1, 0, 0]);
    fake.write(&format!("{GIGANTIC_POOL}/demote_size"), "2048kB\n");
    fake.write(&format!("{GIGANTIC_POOL}/demote"), "");
    fake
}

#[test]
fn the_plan_says_what_becomes_of_the_pages() {
    let fake = with_large_pages();
    let before = fake.everything();
    let plan = fake.ok(&["demote", "1G", "1", "--dry-run"]);
    for expected in [
        "persistent 1G pages: 3 -> 2",
        "/demote",
        "1 1G page split into 512 2M pages: the pool of 2M pages has 0, and gets 512 more",
    ] {
        assert!(plan.contains(expected), "{expected}: {plan}");
    }
    let many = fake.jumbo(&["demote", "1G", "2", "--dry-run"]);
    assert_eq!(many.status.code(), Some(1));
    let text = stderr(&many);
    assert!(
        text.contains("cannot split 2 pages of 1G: 1 free"),
        "{text}"
    );
    let small = fake.jumbo(&["demote", "2M", "1"]);
    assert!(
        stderr(&small).contains("does not split 2M pages"),
        "{small:?}"
    );
    assert_eq!(fake.everything(), before);
}

#[test]
fn the_kernel_is_told_how_many_and_both_pools_are_put_back() {
    let fake = with_large_pages();
    // No kernel acts on the fake files: the result is partial.
    let part = fake.jumbo(&["demote", "1G", "1"]);
    assert_eq!(part.status.code(), Some(3), "{part:?}");
    assert_eq!(fake.text(&format!("{GIGANTIC_POOL}/demote")).unwrap(), "1");
    // The state that a kernel would report. Nothing was split here, so another process has grown the
    // smaller pool since.
    fake.pool(1 << 20, [3, 2, 1, 0, 0]);
    fake.pool(2048, [512, 512, 0, 0, 0]);
    let refused = fake.jumbo(&["demote", "1G", "--undo"]);
    assert!(
        stderr(&refused).contains("set by others since"),
        "{refused:?}"
    );
    assert_eq!(fake.text(&format!("{POOL}/nr_hugepages")).unwrap(), "512\n");
    let undone = fake.json(&["demote", "1G", "--undo", "--force", "--json"]);
    assert_eq!(undone["complete"], true, "{undone}");
    assert_eq!(fake.text(&format!("{POOL}/nr_hugepages")).unwrap(), "0");
}

#[test]
fn a_large_page_of_this_host_is_split_and_comes_back() {
    const NAME: &str = "a_large_page_of_this_host_is_split_and_comes_back";
    let Some(host) = Host::take(NAME) else {
        return;
    };
    let large = || fs::read_to_string(format!("/{GIGANTIC_POOL}/nr_hugepages"));
    let Ok(before) = large() else {
        return skip(NAME, "no 1 GiB pages here");
    };
    let (small, one_more) = (now().total, before.trim().parse::<u64>().unwrap() + 1);
    let grown = host.run(&["grow", "1G", "1"]);
    if grown.status.code() != Some(0) {
        host.ok(&["--undo"]);
        // Not a skip: success depends on the other users of memory.
        assert!(stderr(&grown).contains("one aligned piece"), "{grown:?}");
        return;
    }
    host.ok(&["demote", "1G", "1"]);
    assert_eq!(large().unwrap(), before);
    assert_eq!(now().total, small + 512);
    let undone = host.run(&["demote", "1G", "--undo"]);
    assert_eq!(now().total, small);
    match undone.status.code() {
        Some(0) => assert_eq!(large().unwrap().trim(), one_more.to_string()),
        Some(3) => {
            assert!(
                stderr(&undone).contains("not all of it could be put back"),
                "{undone:?}"
            );
            host.ok(&["demote", "1G", "--undo", "--force"]);
        }
        other => panic!("{other:?}: {undone:?}"),
    }
    host.ok(&["--undo"]);
    assert_eq!(large().unwrap(), before);
}
