//! Fake hosts.

use crate::support::{Fake, POOL, skip, stderr, stdout};

/// Spreads the pages over the nodes, as the kernel does after a write of the total.
fn spread(fake: &Fake, pages: [u64; 2]) {
    for (node, pages) in (0..).zip(pages) {
        fake.node(node, 2048, [pages, pages, 0, 0]);
    }
}

fn on_node(fake: &Fake, node: u32) -> String {
    let file =
        format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
    fake.text(&file).unwrap().trim().to_owned()
}

#[test]
fn a_dry_run_writes_nothing() {
    let fake = Fake::new();
    let before = fake.everything();
    let plan = fake.ok(&[
        "set",
        "2M",
        "--persistent",
        "1G",
        "--overcommit",
        "8",
        "--dry-run",
    ]);
    for expected in [
        "persistent 2M pages: 0 -> 512",
        "overcommit of 2M pages: 0 -> 8",
        "512 pages (1 GiB) made of free memory",
    ] {
        assert!(plan.contains(expected), "{expected}: {plan}");
    }
    let much = fake.jumbo(&["set", "2M", "--persistent", "1T", "--dry-run"]);
    assert_eq!(much.status.code(), Some(1));
    let text = stderr(&much);
    assert!(
        text.contains(
            "refused without --force: 524288 more pages would be 1 TiB, and 16 GiB are available"
        ),
        "{text}"
    );
    let json = fake.json(&["grow", "2M", "5", "--json", "--dry-run"]);
    assert_eq!(json["steps"][0]["to"], 5);
    assert_eq!(json["dry_run"], true);
    assert_eq!(fake.everything(), before);
}

#[test]
fn the_last_change_is_undone_and_then_all_before_it() {
    let fake = Fake::new();
    let pages = || fake.text(&format!("{POOL}/nr_hugepages")).unwrap();
    fake.ok(&["set", "2M", "--persistent", "5"]);
    fake.ok(&["grow", "2M", "6M"]);
    assert_eq!(pages(), "8");
    fake.ok(&["shrink", "2M", "1"]);
    for left in ["8", "0"] {
        let undone = fake.json(&["set", "--undo", "--json"]);
        assert_eq!(undone["complete"], true);
        assert_eq!(pages(), left);
    }
    let nothing = fake.jumbo(&["--undo"]);
    assert!(nothing.status.success() && stderr(&nothing).contains("nothing to undo"));
}

#[test]
fn what_others_have_set_since_is_not_overwritten() {
    let fake = Fake::new();
    fake.ok(&["set", "2M", "--persistent", "5"]);
    fake.write(&format!("{POOL}/nr_hugepages"), "9\n");
    let refused = fake.jumbo(&["--undo"]);
    assert_eq!(refused.status.code(), Some(1));
    let text = stderr(&refused);
    assert!(
        text.contains("9 now, where the change left 5") && text.contains("hint: `--force`"),
        "{text}"
    );
    fake.ok(&["--undo", "--force"]);
    assert_eq!(fake.text(&format!("{POOL}/nr_hugepages")).unwrap(), "0");
}

#[test]
fn on_many_nodes_each_gets_its_pages_back() {
    let fake = Fake::new();
    fake.pool(2048, [10, 10, 0, 0, 0]);
    spread(&fake, [10, 0]);
    fake.ok(&["grow", "2M", "10"]);
    spread(&fake, [15, 5]);
    // As others that spread the pages since.
    fake.ok(&["--undo", "--force"]);
    assert_eq!(
        (on_node(&fake, 0), on_node(&fake, 1)),
        ("10".to_owned(), "0".to_owned())
    );

    fake.pool(2048, [10, 10, 0, 0, 0]);
    fake.ok(&["set", "2M", "--persistent", "3", "--node", "1"]);
    assert_eq!(
        (on_node(&fake, 0), on_node(&fake, 1)),
        ("10".to_owned(), "3".to_owned())
    );
    fake.ok(&["--undo"]);
    assert_eq!(on_node(&fake, 1), "0");
    let none = fake.jumbo(&["grow", "2M", "1", "--node", "2"]);
    assert!(stderr(&none).contains("there is no node 2: the pool of 2M pages has nodes 0, 1"));
    let page = fake.json(&["show", "--json"]);
    assert_eq!(page["pools"][0]["nodes"].as_object().unwrap().len(), 2);
}

#[test]
fn a_part_of_the_pages_is_an_outcome_of_its_own() {
    let fake = Fake::new();
    // The value read back is 12 less than was written: the kernel allocates no more.
    fake.pool(2048, [12, 0, 0, 12, 12]);
    fake.write(
        "proc/pagetypeinfo",
        "Number of blocks type Unmovable Movable \nNode 0, zone Normal 300 100\n",
    );
    let part = fake.jumbo(&["set", "2M", "--persistent", "512"]);
    assert_eq!(part.status.code(), Some(3));
    assert!(
        stdout(&part).contains("0 -> 512, 500 obtained"),
        "{}",
        stdout(&part)
    );
    let text = stderr(&part);
    for expected in [
        "500 of 512 more 2M pages came",
        "fragmentation: ",
        "with 11 whole 2M pages in them",
        "300 of 400 pageblocks",
        "hint: `--compact`",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    fake.ok(&["--undo"]);
}

#[test]
fn nodes_outside_the_cpuset_do_not_count() {
    let fake = Fake::new();
    fake.pool(2048, [12, 0, 0, 12, 12]);
    fake.write(
        "proc/buddyinfo",
        "Node 0, zone Normal 9 9 9 9 9 9 9 9 9 0 0\nNode 3, zone Normal 9 9 9 9 9 9 9 9 9 0 400\n",
    );
    let part = fake.jumbo(&["grow", "2M", "20", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&stdout(&part)).unwrap();
    let zones = json["shortage"]["zones"].as_array().unwrap();
    assert!(
        zones
            .iter()
            .any(|zone| zone["node"] == 3 && zone["closed"].is_string())
    );
    let text = stderr(&part);
    assert!(
        text.contains("node 3") && text.contains("not in this process's cpuset"),
        "{text}"
    );
    assert!(text.contains("with 0 whole 2M pages in them"), "{text}");
}

#[test]
fn a_control_group_that_may_use_less_is_named() {
    let fake = Fake::new();
    fake.write(
        "proc/self/mountinfo",
        "30 22 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    );
    fake.write("proc/self/cgroup", "0::/g\n");
    fake.write("sys/fs/cgroup/cgroup.controllers", "hugetlb memory\n");
    fake.write("sys/fs/cgroup/g/hugetlb.2MB.max", "4194304\n");
    fake.write("sys/fs/cgroup/g/hugetlb.2MB.current", "2097152\n");
    fake.pool(2048, [3, 3, 0, 0, 0]);
    let grown = fake.ok(&["grow", "2M", "1"]);
    assert!(
        grown.contains("may use 2 MiB of the 6 MiB that are free")
            && grown.contains("hugetlb.2MB.max"),
        "{grown}"
    );
    let page = fake.ok(&["show", "2M"]);
    assert!(
        page.contains("may touch 4 MiB of 2M pages, 2 MiB more"),
        "{page}"
    );
}

#[test]
fn compaction_comes_first_and_its_lack_is_no_failure() {
    let fake = Fake::new();
    fake.write("proc/sys/vm/compact_memory", "");
    fake.ok(&["grow", "2M", "4", "--compact"]);
    assert_eq!(fake.text("proc/sys/vm/compact_memory").unwrap(), "1");
    std::fs::remove_file(fake.path("proc/sys/vm/compact_memory")).unwrap();
    let without = fake.ok(&["grow", "2M", "4", "--compact"]);
    assert!(
        without.contains("note: memory was not compacted"),
        "{without}"
    );
}

#[test]
fn a_shortage_of_gigantic_pages_is_explained() {
    let fake = Fake::new();
    fake.pool(1 << 20, [2, 2, 0, 2, 2]);
    let zone = "Node 0, zone Movable 9 9 9 9 9 9 9 9 9 9 900\n";
    fake.write("proc/buddyinfo", zone);
    let grown = fake.jumbo(&["set", "1G", "--persistent", "4"]);
    assert_eq!(grown.status.code(), Some(3));
    let text = stderr(&grown);
    assert!(
        text.contains("ZONE_MOVABLE") && text.contains("1G page takes 1 GiB"),
        "{text}"
    );
}

#[test]
fn the_lines_for_a_boot_are_printed_and_nothing_is_written() {
    let fake = Fake::new();
    fake.pool(64, [0; 5]);
    fake.pool(1 << 20, [2, 2, 0, 2, 2]);
    fake.node(0, 2048, [0; 4]);
    let before = fake.everything();
    for (arguments, file, line) in [
        (
            &["2M", "--persistent", "7"][..],
            "sysctl.d/60-jumbo-pool-2M.conf",
            "vm.nr_hugepages = 7",
        ),
        (
            &["2M", "--overcommit", "9"],
            "sysctl.d",
            "vm.nr_overcommit_hugepages = 9",
        ),
        (&["2M"], "sysctl.d", "vm.nr_hugepages = 0"),
        (
            &["2M", "--persistent", "7", "--node", "0"],
            "tmpfiles.d",
            "nr_hugepages - - - - 7",
        ),
        (
            &["64K", "--persistent", "3"],
            "tmpfiles.d",
            "hugepages-64kB/nr_hugepages - - - - 3",
        ),
        (
            &["1G", "--persistent", "4"],
            "grub.d",
            "hugepagesz=1G hugepages=4",
        ),
    ] {
        let printed = fake.ok(&[&["set", "--print-boot"], arguments].concat());
        assert!(
            printed.contains(file) && printed.contains(line),
            "{arguments:?}: {printed}"
        );
    }
    let more = fake.ok(&["grow", "2M", "5", "--print-boot"]);
    assert!(more.contains("vm.nr_hugepages = 5"), "{more}");
    assert_eq!(fake.everything(), before);
}

#[test]
fn other_base_pages_have_other_pools() {
    let fake = Fake::new();
    let auxv: Vec<u8> = [6, 65536, 0, 0]
        .into_iter()
        .flat_map(u64::to_ne_bytes)
        .collect();
    std::fs::write(fake.path("proc/self/auxv"), auxv).unwrap();
    fake.pool(512 << 10, [0; 5]);
    fake.pool(16 << 20, [0; 5]);
    // 64 KiB to 512 MiB: 14 orders.
    fake.write(
        "proc/buddyinfo",
        "Node 0, zone Normal 0 0 0 0 0 0 0 0 0 0 0 0 0 3\n",
    );
    let plan = fake.ok(&["set", "512M", "--persistent", "2", "--print-boot"]);
    assert!(
        plan.contains("hugepages-524288kB/nr_hugepages - - - - 2") && !plan.contains("hugepagesz"),
        "{plan}"
    );
    let plan = fake.ok(&["set", "16G", "--persistent", "1", "--print-boot"]);
    assert!(plan.contains("hugepagesz=16G hugepages=1"), "{plan}");
    let page = fake.ok(&[]);
    assert!(page.contains("512M") && page.contains("16G"), "{page}");
}

#[test]
fn a_kernel_without_hugetlb_and_a_size_without_a_pool_are_said() {
    let fake = Fake::new();
    let size = fake.jumbo(&["set", "4M", "--persistent", "1"]);
    assert!(stderr(&size).contains("no pool of 4M pages\nhint: it has pools of 2M"));
    std::fs::remove_dir_all(fake.path("sys/kernel/mm/hugepages")).unwrap();
    for arguments in [
        &["show"][..],
        &["set", "2M", "--persistent", "1"],
        &["wait", "2M", "1"],
    ] {
        let output = fake.jumbo(arguments);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("no hugetlb"), "{output:?}");
    }
}

#[test]
fn where_sys_is_hidden_the_pool_of_the_default_size_is_shown() {
    let fake = Fake::new();
    let meminfo = fake.text("proc/meminfo").unwrap();
    let pages = "HugePages_Total: 9\nHugePages_Free: 4\nHugePages_Rsvd: 2\nHugePages_Surp: 1\n";
    fake.write("proc/meminfo", &format!("{meminfo}{pages}"));
    fake.write("proc/sys/vm/nr_overcommit_hugepages", "3\n");
    std::fs::remove_dir_all(fake.path("sys")).unwrap();
    for arguments in [&["--json"][..], &["show", "2M", "--json"]] {
        let page = fake.json(arguments);
        let pool = &page["pools"][0];
        let numbers =
            ["total", "persistent", "unused", "overcommit"].map(|name| pool[name].as_u64());
        assert_eq!(numbers, [9, 8, 2, 3].map(Some), "{page:#}");
        assert_eq!(page["pools"].as_array().unwrap().len(), 1);
        assert!(
            page["missing"].to_string().contains("cannot list"),
            "{page:#}"
        );
    }
    let other = fake.jumbo(&["show", "1G"]);
    assert_eq!(other.status.code(), Some(1));
}

#[test]
fn what_makes_no_sense_is_wrong_usage() {
    let fake = Fake::new();
    for arguments in [
        &["set", "2M"][..],
        &["set", "3M", "--persistent", "1"],
        &["set", "2M", "--persistent", "1.5G"],
        &["grow", "2M"],
        &["shrink", "2M", "1", "--force"],
        &["set", "2M", "--overcommit", "1", "--force"],
        &["--compact"],
        &["--dry-run"],
        &["--force"],
    ] {
        assert_eq!(
            fake.jumbo(arguments).status.code(),
            Some(2),
            "{arguments:?}"
        );
    }
}

#[test]
fn what_is_no_number_is_refused_in_words() {
    let fake = Fake::new();
    for (arguments, expected) in [
        (
            &["set", "2M", "--persistent", "-5"][..],
            "`-5` is neither a whole number",
        ),
        (&["set", "2M", "--persistent", "1E"], "(K, M, G, T)"),
        (
            &["set", "2M", "--persistent", "99999999T"],
            "more than any machine has",
        ),
        (
            &["set", "2M", "--persistent", "1", "--node", "-1"],
            "a whole number",
        ),
        (&["grow", "2M", "-5"], "`-5` is neither a whole number"),
        (
            &["set", "2M", "--persistent", "3M"],
            "3 MiB is no whole number of 2M pages\nhint: 1 of them are 2 MiB, 2 are 4 MiB",
        ),
        (
            &["set", "2M", "--overcommit", "1M"],
            "1 MiB is no whole number",
        ),
        (&["wait", "2M", "5M"], "5 MiB is no whole number"),
        (
            &["wait", "2M", "1", "--timeout", "-1"],
            "a number of seconds",
        ),
    ] {
        let output = fake.jumbo(arguments);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(
            text.contains(expected) && !text.contains("tip:"),
            "{arguments:?}: {text}"
        );
    }
}

#[test]
fn one_page_is_no_plural() {
    let fake = Fake::new();
    // The value read back is one less than was written: the kernel allocates no more.
    fake.pool(2048, [1, 0, 0, 1, 1]);
    let short = fake.jumbo(&["grow", "2M", "1"]);
    let text = stderr(&short);
    assert!(text.contains("0 of 1 more 2M page came"), "{text}");
    let wait = fake.jumbo(&["wait", "2M", "2", "--timeout", "0"]);
    let text = stderr(&wait);
    assert!(text.contains("the pool has 1 page of 2M:"), "{text}");
}

#[test]
fn more_than_there_is_takes_force() {
    let fake = Fake::new();
    let pages = || fake.text(&format!("{POOL}/nr_hugepages")).unwrap();
    for arguments in [
        &["set", "2M", "--persistent", "1000000"][..],
        &["grow", "2M", "17G"],
    ] {
        let refused = fake.jumbo(arguments);
        assert_eq!(refused.status.code(), Some(1), "{arguments:?}");
        let text = stderr(&refused);
        assert!(
            text.contains(", and 16 GiB are available") && text.contains(" --force` asks"),
            "{text}"
        );
        assert_eq!(pages(), "0\n");
    }
    assert!(stderr(&fake.jumbo(&["--undo"])).contains("nothing to undo"));
    assert_eq!(
        fake.json(&["--undo", "--json"])["steps"],
        serde_json::json!([])
    );
    let dry = fake.jumbo(&["grow", "2M", "17G", "--force", "--dry-run"]);
    assert!(dry.status.success() && stderr(&dry).is_empty(), "{dry:?}");
    fake.ok(&["grow", "2M", "16G"]);
    assert_eq!(pages(), "8192");
    fake.ok(&["grow", "2M", "17G", "--force"]);
    assert_eq!(pages(), "16896");
    // A request to shrink needs no check of free memory.
    fake.ok(&["set", "2M", "--persistent", "10000"]);
    assert_eq!(pages(), "10000");
}

#[test]
fn what_speaks_against_a_growth_stands_in_its_plan() {
    let fake = Fake::new();
    fake.write(
        "proc/buddyinfo",
        "Node 0, zone Normal 9 9 9 9 9 9 9 9 9 3 4\nNode 0, zone Movable 0 0 0 0 0 0 0 0 0 2 0\n",
    );
    let plan = fake.ok(&["grow", "2M", "100", "--dry-run"]);
    for expected in [
        "note: free blocks hold 13 of 100 pages",
        "note: movable memory (ZONE_MOVABLE) has blocks for 2 of 100 pages",
    ] {
        assert!(plan.contains(expected), "{expected}: {plan}");
    }
    let few = fake.ok(&["grow", "2M", "2", "--dry-run"]);
    assert!(!few.contains("note:"), "{few}");
}

#[test]
fn pages_that_files_and_processes_have_are_shown() {
    let fake = Fake::new();
    fake.pool(2048, [9, 4, 2, 0, 0]);
    fake.write(
        "proc/7/status",
        "Name:\tdatabase\nVmSize: 99999 kB\nHugetlbPages: 6144 kB\n",
    );
    fake.write("proc/7/comm", "database\n");
    fake.write(
        "proc/7/smaps",
        "7f0000000000-7f0000a00000 rw-s 00000000 00:01 7 /anon_hugepage (deleted)\n\
         KernelPageSize:     2048 kB\nShared_Hugetlb:     2048 kB\nPrivate_Hugetlb:     4096 kB\n",
    );
    let page = fake.json(&["show", "2M", "--json"]);
    let holder = &page["holders"]["processes"][0];
    assert_eq!(holder["pid"], 7);
    assert_eq!(holder["private"], 4 << 20);
    assert_eq!(holder["shared"], 2 << 20);
    assert_eq!(holder["untouched"], 4 << 20);
    assert_eq!(page["pools"][0]["unused"], 2);
    let text = fake.ok(&["show"]);
    assert!(
        text.contains("database") && text.contains("4 MiB"),
        "{text}"
    );
}

#[test]
fn what_fails_on_the_way_is_put_back() {
    const READ_ONLY: &str = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";
    let fake = Fake::new();
    let file = fake.path(&format!("{POOL}/nr_hugepages"));
    if !std::path::Path::new(READ_ONLY).exists() || !rustix::process::geteuid().is_root() {
        let reason = "needs root, and a file that even root cannot write";
        return skip("what_fails_on_the_way_is_put_back", reason);
    }
    std::fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink(READ_ONLY, &file).unwrap();
    let failed = fake.jumbo(&["set", "2M", "--persistent", "1", "--overcommit", "7"]);
    assert_eq!(failed.status.code(), Some(1));
    let text = stderr(&failed);
    assert!(
        text.contains("nr_hugepages") && text.contains("everything was put back"),
        "{text}"
    );
    assert_eq!(
        fake.text(&format!("{POOL}/nr_overcommit_hugepages"))
            .unwrap(),
        "0"
    );
    assert!(stderr(&fake.jumbo(&["--undo"])).contains("nothing to undo"));
}

#[test]
fn what_was_done_is_done_though_it_cannot_be_shown() {
    let fake = Fake::new();
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full");
    for (arguments, pages) in [
        (&["grow", "2M", "5"][..], "5"),
        (&["grow", "2M", "--undo"], "0"),
    ] {
        let output = fake
            .command(arguments)
            .stdout(full().unwrap())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(stderr(&output).contains("it is done, but could not be shown"));
        let now = fake.text(&format!("{POOL}/nr_hugepages")).unwrap();
        assert_eq!(now.trim(), pages);
    }
}

#[test]
fn what_cannot_be_written_is_said() {
    let fake = Fake::new();
    for arguments in [&["show"][..], &["show", "--json"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
        let output = fake.command(arguments).stdout(full.unwrap()).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(
            stderr(&output),
            "jumbo: cannot write to standard output: No space left on device (os error 28)\n",
            "{arguments:?}"
        );
    }
}

#[test]
fn an_undo_takes_nothing_that_it_would_not_heed() {
    let fake = Fake::new();
    for arguments in [
        &["set", "2M", "--undo", "--persistent", "5"][..],
        &["set", "2M", "--undo", "--overcommit", "5"],
        &["set", "2M", "--undo", "--print-boot"],
        &["grow", "2M", "5", "--undo"],
        &["shrink", "2M", "--undo", "--node", "0"],
    ] {
        let output = fake.jumbo(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
    }
}
