//! Tests of each rule of the doctor: it reports its problem on a fake host, with its evidence, and
//! nothing on a healthy host.

#[path = "../fake/mod.rs"]
mod fake;
mod pools;

use fake::Fake;
use jumbo::units::Bytes;
use jumbo_host::status::doctor::{Cost, Finding, Snapshot, Touch, examine};

const THP: &str = "sys/kernel/mm/transparent_hugepage";
const GIB: u64 = 1 << 20;

fn findings(fake: &Fake) -> Vec<Finding> {
    examine(&Snapshot::read(&fake.root(), 10))
}

fn ids(fake: &Fake) -> Vec<&'static str> {
    findings(fake).iter().map(|finding| finding.id).collect()
}

/// Returns the only finding on a host that is healthy except for `ail`.
fn only(ail: impl FnOnce(&Fake)) -> Finding {
    let fake = Fake::healthy();
    ail(&fake);
    let mut findings = findings(&fake);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    let finding = findings.remove(0);
    assert!(!finding.evidence.is_empty() && finding.hint.contains('`'));
    finding
}

/// Adds a process that maps `pages` of 2 MiB.
fn mapper(fake: &Fake, pages: u64) -> &Fake {
    fake.process(99, "mapper", &[("HugetlbPages", pages * 2048)], &[])
}

#[test]
fn a_healthy_host_has_nothing_to_mend() {
    let fake = Fake::healthy();
    assert_eq!(findings(&fake), []);
    assert_eq!(Snapshot::read(&fake.root(), 10).missing().count(), 0);
}

#[test]
fn thp_switched_off() {
    let finding = only(|fake| {
        fake.thp(2 << 20, "never", "never")
            .thp_size(64, "never", "never")
            .meminfo(&[("AnonPages", GIB), ("AnonHugePages", GIB / 4)]);
    });
    assert_eq!(
        (finding.id, finding.cost),
        ("thp-never", Cost::Slow(Bytes::from_kib(GIB / 4 * 3)))
    );
    assert!(finding.hint.contains("`jumbo thp set enabled=madvise`"));
}

#[test]
fn thp_switched_off_for_the_pmd_size_alone_names_that_knob() {
    let finding = only(|fake| {
        fake.thp_size(64, "never", "never")
            .thp_size(2048, "never", "never");
    });
    assert!(
        finding.hint.contains("`jumbo thp set 2M=madvise`"),
        "{}",
        finding.hint
    );
}

#[test]
fn a_kernel_without_thp() {
    let fake = Fake::healthy();
    std::fs::remove_dir_all(fake.root().path(THP)).unwrap();
    assert_eq!(ids(&fake), ["no-thp"]);
}

#[test]
fn stalls_at_faults() {
    let finding = only(|fake| {
        fake.write(
            &format!("{THP}/defrag"),
            "[always] defer defer+madvise madvise never",
        )
        .write("proc/vmstat", "compact_stall 100\n");
    });
    assert_eq!(
        (finding.id, finding.cost),
        ("defrag-always", Cost::Slow(Bytes(200 << 20)))
    );
    assert!(
        finding
            .hint
            .contains("`jumbo thp set defrag=defer+madvise`")
    );
}

#[test]
fn no_small_folios() {
    let finding = only(|fake| {
        fake.thp_size(64, "never", "never")
            .meminfo(&[("AnonPages", GIB)]);
    });
    assert_eq!((finding.id, finding.cost), ("mthp-never", Cost::Unknown));
    assert!(finding.hint.contains("`jumbo thp set 64K=madvise`"));
}

#[test]
fn khugepaged_fills_holes() {
    let finding = only(|fake| {
        fake.thp(2 << 20, "always", "never")
            .write("proc/vmstat", "thp_collapse_alloc 1000\n");
    });
    assert_eq!(
        (finding.id, finding.cost),
        ("khugepaged-bloat", Cost::Wasted(Bytes(2000 << 20)))
    );
}

#[test]
fn faults_that_fall_back() {
    let ail = |fake: &Fake| {
        fake.write(
            "proc/vmstat",
            "thp_fault_alloc 1000\nthp_fault_fallback 500\n",
        );
    };
    let finding = only(|fake| {
        ail(fake);
        fake.write(
            "proc/buddyinfo",
            "Node 0, zone Normal 100000 50000 0 0 0 0 0 0 0 10 0\n",
        );
    });
    assert_eq!(
        (finding.id, finding.cost),
        ("thp-fallback", Cost::Slow(Bytes(1000 << 20)))
    );
    let fake = Fake::healthy();
    ail(&fake);
    assert_eq!(findings(&fake), [], "a fault finds a huge page again");
    // A rate of 1/1000 is noise.
    let fake = Fake::healthy();
    fake.write(
        "proc/vmstat",
        "thp_fault_alloc 1000000\nthp_fault_fallback 1000\n",
    );
    assert_eq!(findings(&fake), []);
}

#[test]
fn charges_that_fail_are_told_from_memory_that_is_scattered() {
    let finding = only(|fake| {
        let events = "thp_fault_alloc 9\nthp_fault_fallback 900\nthp_fault_fallback_charge 900\n";
        fake.write("proc/vmstat", events);
    });
    assert_eq!(finding.id, "thp-charge");
}

#[test]
fn huge_pages_split_at_swap() {
    let with = |swap: [u64; 2]| {
        let fake = Fake::healthy();
        fake.write("proc/vmstat", "thp_swpout 10\nthp_swpout_fallback 300\n")
            .meminfo(&[("SwapTotal", swap[0]), ("SwapFree", swap[1])]);
        findings(&fake)
    };
    let found = with([4 * GIB, 3 * GIB]);
    assert_eq!(
        (found[0].id, found[0].cost),
        ("swap-splits", Cost::Slow(Bytes(600 << 20)))
    );
    for past in [[0, 0], [4 * GIB, 4 * GIB]] {
        assert_eq!(
            with(past),
            [],
            "nothing is in swap: the counters tell of the past"
        );
    }
}

#[test]
fn programs_that_would_be_served_by_larger_pages() {
    let finding = only(|fake| {
        fake.pool(2048, [20480, 0, 0, 0, 30000]).pool(GIB, [0; 5]);
        fake.process(7, "qemu", &[("HugetlbPages", 40 * GIB)], &[]);
    });
    assert_eq!(finding.id, "larger-pages");
    assert!(
        finding.hint.contains("hugepagesz=1G hugepages=40"),
        "{}",
        finding.hint
    );
}

#[test]
fn a_heap_on_small_pages() {
    let finding = only(|fake| {
        fake.process(
            7,
            "python3",
            &[("RssAnon", GIB)],
            &[("AnonHugePages", GIB / 2)],
        );
        fake.process(8, "small", &[("RssAnon", 1024)], &[]);
        // Workers of `jumbo bench` are no finding.
        fake.process(9, "jumbo", &[("RssAnon", GIB)], &[("AnonHugePages", 0)]);
    });
    assert_eq!(
        (finding.id, finding.cost),
        ("small-heap", Cost::Slow(Bytes::from_kib(GIB / 2)))
    );
    let command = "`jumbo run -- /usr/bin/python3 --flag`";
    assert!(finding.hint.contains(command), "{}", finding.hint);
}

#[test]
fn a_program_that_the_library_does_not_reach_is_promoted_from_outside() {
    let fake = Fake::healthy();
    fake.process(7, "server", &[("RssAnon", GIB)], &[]);
    // A static program: an ELF header for x86-64 without program headers, so no loader.
    let mut header = [0u8; 64];
    header[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    header[16..24].copy_from_slice(&[2, 0, 62, 0, 1, 0, 0, 0]);
    header[52..56].copy_from_slice(&[64, 0, 56, 0]);
    header[58] = 64;
    fake.write("proc/7/exe", header);
    let found = findings(&fake);
    assert_eq!(found[0].id, "small-heap");
    let hint = &found[0].hint;
    assert!(
        hint.contains("statically linked") && hint.contains("`jumbo promote 7`"),
        "{hint}"
    );
}

#[test]
fn the_age_of_a_process_that_has_only_just_begun_is_named() {
    let at = |uptime: &str| {
        let fake = Fake::healthy();
        fake.process(7, "brief", &[("RssAnon", GIB)], &[])
            .write("proc/uptime", uptime)
            .write(
                "proc/7/stat",
                format!("7 (brief) S 1{} 100{}\n", " 0".repeat(17), " 0".repeat(30)),
            );
        let found = findings(&fake);
        assert_eq!((found.len(), found[0].id), (1, "small-heap"));
        found[0].title.clone()
    };
    let young = at("2.00 9.00\n");
    assert!(young.ends_with(", 1 s after its start"), "{young}");
    assert!(!at("60.00 9.00\n").contains("after its start"));
}

#[test]
fn a_snapshot_of_nothing_is_blind() {
    let blind = |fake: &Fake| Snapshot::read(&fake.root(), 10).is_blind();
    assert!(!blind(&Fake::healthy()));
    let fake = Fake::new(4096);
    std::fs::remove_dir_all(fake.root().path("sys")).unwrap();
    assert!(blind(&fake));
}

#[test]
fn what_a_process_writes_into_its_command_line_is_quoted() {
    let finding = only(|fake| {
        fake.process(7, "x", &[("RssAnon", GIB)], &[("AnonHugePages", 0)]);
        fake.write("proc/7/cmdline", "a\0\0; rm -rf ~\0$(id)`id`\0it's\0");
    });
    // A word of `hint` ends at a backtick.
    let command = "`jumbo run -- a '' '; rm -rf ~' ...`";
    assert!(finding.hint.contains(command), "{}", finding.hint);
}

#[test]
fn a_command_in_a_hint_has_one_line_and_its_user() {
    let hint = |arguments: &str| {
        let finding = only(|fake| {
            let kib = [("RssAnon", GIB)];
            fake.process(7, "x\n`id`", &kib, &[("AnonHugePages", 0)]);
            fake.write("proc/7/cmdline", arguments);
            // The name has a newline, as the kernel's file never has.
            let status = format!("Uid:\t0\t4711\nVmSize: 9 kB\nRssAnon: {GIB} kB\n");
            fake.write("proc/7/status", status);
        });
        assert!(!finding.title.contains('\n'), "{}", finding.title);
        finding.hint
    };
    let compiler = "cc1\0".to_owned() + &"-DNAME\0".repeat(400);
    for (arguments, shown) in [
        (
            &*compiler,
            "cc1 -DNAME -DNAME -DNAME -DNAME -DNAME -DNAME -DNAME -DNAME ...",
        ),
        ("sh\0-c\0a\nrm -rf /\0", "sh -c ..."),
        ("/bin/a\x1b[2J\0", " ..."),
        ("server\0-v\0", "server -v"),
    ] {
        let command = format!("`sudo -u '#4711' -- jumbo run -- {shown}`");
        assert!(hint(arguments).contains(&command), "{}", hint(arguments));
    }
}

#[test]
fn shared_memory_on_small_pages_is_counted_once_for_all_who_map_it() {
    let finding = only(|fake| {
        for pid in 7..10 {
            fake.process(
                pid,
                "postgres",
                &[("RssShmem", u64::from(pid) * 100_000)],
                &[],
            );
        }
    });
    assert_eq!(
        (finding.id, finding.cost),
        ("small-shared", Cost::Slow(Bytes::from_kib(900_000)))
    );
    assert!(finding.hint.contains("`jumbo thp set shmem=within_size`"));
    let fake = Fake::healthy();
    fake.thp(2 << 20, "madvise", "within_size");
    fake.process(7, "postgres", &[("RssShmem", GIB)], &[]);
    assert_eq!(findings(&fake), [], "the control is not what is amiss");
}

#[test]
fn files_of_dev_shm_obey_its_mount_and_not_the_table() {
    let mounts = |huge: &str| {
        format!(
            "25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=1k{huge}\n22 27 0:21 / /proc rw - proc proc rw\n"
        )
    };
    let with = |shmem: &str, huge: &str| {
        let fake = Fake::healthy();
        fake.thp(2 << 20, "madvise", shmem);
        fake.write("proc/self/mountinfo", mounts(huge));
        fake.process(7, "postgres", &[("RssShmem", GIB)], &[]);
        findings(&fake)
    };
    let found = with("advise", "");
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].id, found[0].cost), ("dev-shm", Cost::Unknown));
    assert!(found[0].hint.contains("remount,huge=within_size /dev/shm"));
    assert_eq!(with("advise", ",huge=advise"), []);
    assert_eq!(with("force", ""), [], "no mount is asked then");
    assert_eq!(with("never", "")[0].id, "small-shared");
}

#[test]
fn a_program_that_switched_thp_off() {
    let finding = only(|fake| {
        fake.process(7, "redis-server", &[("RssAnon", GIB)], &[]);
        let status = fake.root().read("proc/7/status").unwrap();
        fake.write(
            "proc/7/status",
            status.replace("THP_enabled:\t1", "THP_enabled:\t0"),
        );
    });
    assert_eq!(
        (finding.id, finding.cost),
        ("thp-disabled", Cost::Slow(Bytes::from_kib(GIB)))
    );
    assert!(finding.hint.contains("disable-thp no"));
}

#[test]
fn scattered_memory() {
    let ail = |fake: &Fake| {
        fake.write(
            "proc/buddyinfo",
            "Node 0, zone Normal 100000 50000 0 0 0 0 0 0 0 10 0\n",
        );
    };
    let finding = only(|fake| {
        ail(fake);
        fake.write("proc/vmstat", "compact_success 500\ncompact_fail 300\n");
    });
    // It is free: nothing is slower.
    assert_eq!((finding.id, finding.cost), ("fragmented", Cost::Unknown));
    for few in [
        "compact_success 0\ncompact_fail 3\n",
        "compact_success 9000\ncompact_fail 300\n",
    ] {
        let fake = Fake::healthy();
        ail(&fake);
        fake.write("proc/vmstat", few);
        assert_eq!(findings(&fake), [], "{few}");
    }
    let fake = Fake::healthy();
    ail(&fake);
    assert_eq!(findings(&fake), [], "no program has missed it yet");
}

#[test]
fn page_tables_that_take_a_part_of_memory() {
    let finding = only(|fake| {
        fake.meminfo(&[("PageTables", GIB / 2)]);
    });
    assert_eq!(
        (finding.id, finding.cost),
        ("page-tables", Cost::Wasted(Bytes::from_kib(GIB / 2)))
    );
}

#[test]
fn strict_overcommit_at_its_limit() {
    let finding = only(|fake| {
        fake.write("proc/sys/vm/overcommit_memory", "2\n")
            .meminfo(&[("CommitLimit", 8 * GIB), ("Committed_AS", 8 * GIB - 1)]);
    });
    assert_eq!((finding.id, finding.cost), ("commit-limit", Cost::Fails));
}

#[test]
fn a_control_group_at_its_memory_limit_in_v1() {
    let ail = |fake: &Fake| {
        fake.write("proc/self/cgroup", "4:memory:/a/b\n0::/\n")
            .write(
                "proc/self/mountinfo",
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            )
            // The limit of an ancestor applies if the group has none.
            .write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "8388608\n")
            .write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "7340032\n")
            .write(
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
                "9223372036854771712\n",
            );
    };
    let finding = only(ail);
    assert_eq!((finding.id, finding.cost), ("cgroup-full", Cost::Fails));
    assert!(
        finding.evidence[0]
            .source
            .ends_with("memory/a/memory.limit_in_bytes")
    );
    let with_cache = |dirty: u64| {
        let fake = Fake::healthy();
        ail(&fake);
        let stat = format!(
            "cache 9\ntotal_dirty {dirty}\ntotal_writeback 0\n\
             total_inactive_file 6291456\ntotal_active_file 0\n"
        );
        fake.write("sys/fs/cgroup/memory/a/memory.stat", &stat);
        findings(&fake).len()
    };
    assert_eq!(with_cache(0), 0, "page cache makes room when asked to");
    assert_eq!(with_cache(6_291_456), 1, "it has to be written first");
}

#[test]
fn what_jumbo_measures_is_no_finding() {
    let below = |command: &str| {
        let fake = Fake::healthy();
        fake.process(7, "jumbo", &[("RssAnon", 1024)], &[])
            .write("proc/7/cmdline", command)
            .write("proc/7/status", "Name: jumbo\nPPid:\t1\nVmSize: 9 kB\n")
            .process(8, "sh", &[("RssAnon", 1024)], &[])
            .write("proc/8/status", "Name: sh\nPPid:\t7\nVmSize: 9 kB\n")
            .process(9, "hashmap", &[("RssAnon", GIB), ("RssShmem", GIB)], &[]);
        let status = std::fs::read_to_string(fake.root().path("proc/9/status")).unwrap();
        fake.write("proc/9/status", format!("{status}PPid:\t8\n"));
        ids(&fake)
    };
    assert_eq!(below("jumbo\0bench\0programs\0"), [""; 0]);
    assert_eq!(below("/usr/bin/jumbo\0compare\0--\0sh\0"), [""; 0]);
    assert_eq!(
        below("jumbo\0run\0--\0sh\0"),
        ["small-heap", "small-shared"]
    );
}

#[test]
fn what_runs_under_jumbo_is_not_to_be_started_so() {
    let hint = |library: &str| {
        let finding = only(|fake| {
            fake.process(9, "server", &[("RssAnon", GIB)], &[]).write(
                "proc/9/maps",
                format!("1000-2000 r-xp 00000000 08:01 9 /usr/lib/jumbo/{library}\n"),
            );
        });
        finding.hint
    };
    assert!(hint("libjumbo_preload.so").contains("runs under `jumbo run` already"));
    assert!(hint("libother.so").contains("start it with `jumbo run -- /usr/bin/server"));
}

#[test]
fn the_costliest_comes_first() {
    let fake = Fake::healthy();
    mapper(&fake, 100)
        .pool(2048, [100, 0, 0, 0, 0])
        .write("proc/vmstat", "htlb_buddy_alloc_fail 3\n")
        .process(7, "lesser", &[("RssAnon", GIB)], &[])
        .process(8, "greater", &[("RssAnon", 2 * GIB)], &[]);
    let titles: Vec<_> = findings(&fake)
        .into_iter()
        .map(|finding| finding.title)
        .collect();
    assert!(titles[0].contains("used up"), "{titles:?}");
    assert!(
        titles[1].contains("greater") && titles[2].contains("lesser"),
        "{titles:?}"
    );
    assert!(titles[3].contains("could not grow"), "{titles:?}");
}

/// Adds a balloon that reports free pages.
fn balloon(fake: &Fake) {
    let device = "sys/bus/virtio/devices/virtio0";
    fake.write(&format!("{device}/device"), "0x0005\n")
        .write(&format!("{device}/features"), "0110010100\n");
}

#[test]
fn free_memory_that_goes_back_to_the_host() {
    let finding = only(balloon);
    assert_eq!((finding.id, finding.cost), ("first-touch", Cost::Unknown));
    assert!(finding.evidence[0].source.ends_with("virtio0/features"));
    for command in [
        "`jumbo run --pool SIZE --warm -- PROGRAM`",
        "`jumbo doctor --measure`",
    ] {
        assert!(finding.hint.contains(command), "{}", finding.hint);
    }
}

#[test]
fn a_first_touch_that_was_measured() {
    let measured = |ail: fn(&Fake), first_us| {
        let fake = Fake::healthy();
        ail(&fake);
        let mut snapshot = Snapshot::read(&fake.root(), 10);
        snapshot.touch = Some(Touch {
            size: Bytes(256 << 20),
            first_us,
            again_us: 40_000,
        });
        let findings = examine(&snapshot);
        findings
            .first()
            .map(|finding| (finding.cost, finding.hint.contains("--measure")))
    };
    let waits = |first_us| {
        let size = Bytes(256 << 20);
        Cost::Waits(Touch {
            size,
            first_us,
            again_us: 40_000,
        })
    };
    assert_eq!(measured(balloon, 400_000), Some((waits(400_000), false)));
    // The measurement decides, whatever a device reports.
    assert_eq!(measured(balloon, 44_000), None);
    assert_eq!(measured(|_| (), 400_000), Some((waits(400_000), false)));
    assert_eq!(measured(|_| (), 44_000), None);
    // The text blames a hypervisor only if there is evidence of one.
    let title = |flags: Option<&str>| {
        let fake = Fake::healthy();
        if let Some(flags) = flags {
            fake.write(
                "proc/cpuinfo",
                format!("processor\t: 0\nflags\t\t: {flags}\n"),
            );
        }
        let mut snapshot = Snapshot::read(&fake.root(), 10);
        snapshot.touch = Some(Touch {
            size: Bytes(256 << 20),
            first_us: 64_000,
            again_us: 40_000,
        });
        examine(&snapshot)[0].title.clone()
    };
    assert!(title(Some("fpu hypervisor lm")).contains("goes back to the host"));
    for physical in [Some("fpu lm"), None] {
        assert!(!title(physical).contains("host"), "{physical:?}");
    }
}

#[test]
fn what_cannot_be_read_is_no_finding_but_missing() {
    let fake = Fake::new(4096);
    // A folder in the place of a file is unreadable for any user.
    fake.write(&format!("{THP}/enabled/x"), "");
    let snapshot = Snapshot::read(&fake.root(), 10);
    assert_eq!(examine(&snapshot), []);
    assert!(
        snapshot
            .missing()
            .any(|missing| missing.why.contains("transparent_hugepage"))
    );
}
