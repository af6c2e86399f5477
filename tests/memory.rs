//! Tests that memory is huge, and that no more of it is resident than the program requested.

use crate::bound::MIN_WASTE_BYTES;
use crate::support::{MIB, Program, Report, Source, compile, host, smaps, wait};

#[test]
fn a_heap_is_on_huge_pages_by_the_kernels_own_count() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("heap", &[])]);
    let heap = Program::new(files.path("heap")).args(["512", "stay"]);
    let share = |running: &crate::support::Running| {
        running.wait_for_line("ready");
        smaps::resident(running.pid()).huge_share()
    };
    // Without jumbo nothing is huge; otherwise the test would prove nothing.
    if !host::thp_is_always() {
        let plain = heap.start_plain();
        let plain_share = share(&plain);
        plain.wait().ok();
        assert!(plain_share < 0.05, "plain: {plain_share}");
    }
    // While the tests beside want all CPUs, the scanner may come late.
    let mut shares = Vec::new();
    while shares.last().is_none_or(|share| *share < 0.8) {
        assert!(shares.len() < 5, "jumbo: {shares:?}");
        let wrapped = heap.start_jumbo(&[]);
        shares.push(share(&wrapped));
        // Memory that the program filled before its advice is collapsed in the first pause.
        wait::until("a heap of which 95 % is huge", wait::TIMEOUT, || {
            (smaps::resident(wrapped.pid()).huge_share() >= 0.95).then_some(())
        });
        wrapped.wait().ok();
    }
}

#[test]
fn the_report_agrees_with_the_kernel() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("heap", &[])]);
    let (running, report) = Program::new(files.path("heap"))
        .args(["512", "stay"])
        .start_reported(&[]);
    running.wait_for_line("ready");
    // The last part becomes huge afterwards.
    wait::until("a heap that is huge", wait::TIMEOUT, || {
        (smaps::resident(running.child()).huge_share() > 0.98).then_some(())
    });
    running.wait_until_sampled();
    let seen = smaps::resident(running.child());
    let report = report.read(&running.wait().ok());
    assert_close(report.heap_bytes(), seen.heap as f64, 0.02);
    // The sample of the largest size may have come before the last part became huge.
    assert_close(report.heap_huge_share(), seen.huge_share(), 0.1);
    assert!(report.number("/faults/minor") > 0.0);
}

#[track_caller]
fn assert_close(left: f64, right: f64, tolerance: f64) {
    assert!(
        (left - right).abs() <= tolerance * right,
        "{left} is not within {tolerance} of {right}"
    );
}

/// Reused addresses are as huge as new ones, whatever the block size.
#[test]
fn a_later_fill_is_as_huge_as_the_first() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("refill", &[])]);
    for kib in ["300", "1000", "2150"] {
        let running = Program::new(files.path("refill")).arg(kib).start_jumbo(&[]);
        running.wait_for_line("ready");
        let share = smaps::resident(running.pid()).huge_share();
        running.wait().ok();
        assert!(share >= 0.9, "{kib} KiB: {share}");
    }
}

/// What a program fills in order is huge at its first touch, although it began with a few blocks of each
/// of many sizes, as an interpreter does. Without a bound all of it is.
#[test]
fn a_fill_in_order_is_believed_at_once() {
    const MIB: u64 = 128;
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("in_order", &[])]);
    for size in ["64", "1000", "30000", "100000", "300000", "3000000"] {
        let program = Program::new(files.path("in_order")).args([&MIB.to_string(), size]);
        let faults =
            |options: &[&str]| -> u64 { program.jumbo_with(options).ok().number("faults") };
        let (bounded, unbounded) = (faults(&[]), faults(&["--max-waste=unbounded"]));
        let pages = (MIB << 20) / 4096;
        assert!(
            bounded <= unbounded + pages / 50,
            "{size} bytes: {bounded} faults, {unbounded} without a bound"
        );
    }
}

/// While other programs want the CPUs, the process that scans the memory takes little of their time. Here
/// it can save none: no block is filled in order.
#[test]
fn a_scan_takes_little_of_a_busy_host() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("paced", &[])]);
    let ran = Program::new(files.path("paced")).args(["2"]).jumbo().ok();
    let [used, elapsed, scanner] = ["used", "elapsed", "scanner"].map(|name| ran.number(name));
    assert!(scanner > 0, "nothing scans");
    // Twice the bound, and more, for what is not counted: waking up.
    let max = (used / 10).max(elapsed / 10);
    assert!(
        scanner < max,
        "{scanner} us, the program {used} in {elapsed}"
    );
}

/// The slabs have no such blocks, and cannot use what the C library keeps of them.
#[test]
fn freed_blocks_of_large_alignments_serve_others() {
    let files = compile(&[Source::C("over_aligned", &[])]);
    for sizes in [["100", "8192", "8192"], ["100", "20000", "16384"]] {
        let program = Program::new(files.path("over_aligned")).args(sizes);
        let [plain, jumbo] = [program.plain(), program.jumbo()].map(|ran| ran.ok().number("peak"));
        let allowed = plain + MIN_WASTE_BYTES / 1024 + plain / 20;
        assert!(
            jumbo < allowed,
            "{sizes:?}: {plain} KiB plain, {jumbo} KiB under jumbo"
        );
    }
}

/// Short-lived blocks often have new addresses; records about old ones must not accumulate. glibc's
/// heap accumulates in plain, too.
#[test]
fn blocks_that_come_and_go_leave_nothing_behind() {
    let files = compile(&[Source::C("come_and_go", &[])]);
    let program = Program::new(files.path("come_and_go"));
    let [plain, jumbo] = [program.plain(), program.jumbo()].map(|ran| ran.ok().number("then"));
    let allowed = plain + MIN_WASTE_BYTES / 1024 + 4096;
    assert!(
        jumbo < allowed,
        "{plain} KiB plain, {jumbo} KiB under jumbo"
    );
}

/// glibc's check whether to advise depends on uninitialised stack memory at its start; see
/// docs/design/heap.md. A program of few objects shows it: each start has to be huge.
#[test]
fn every_start_has_a_huge_heap() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("heap", &[])]);
    let mut at_once = Vec::new();
    for _ in 0..12 {
        let running = Program::new(files.path("heap"))
            .args(["64", "stay"])
            .start_jumbo(&[]);
        running.wait_for_line("ready");
        let share = || smaps::resident(running.pid()).huge_share();
        at_once.push(share());
        // On a busy host the program fills base pages before its advice. They are collapsed.
        wait::until("a heap of which 85 % is huge", wait::TIMEOUT, || {
            (share() >= 0.85).then_some(())
        });
        running.wait().ok();
    }
    let huge_at_once = at_once.iter().filter(|share| **share >= 0.85).count();
    assert!(huge_at_once >= 6, "{at_once:?}");
}

/// `--heap=off` and `--maps=off` leave a program unchanged.
#[test]
fn switched_off_is_off() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    if host::thp_is_always() {
        return host::skip("THP is `always` on this host: everything is huge without jumbo");
    }
    let files = compile(&[Source::C("heap", &[])]);
    let heap = Program::new(files.path("heap")).arg("256");
    let (ran, report) = heap.reported_with(&["--heap=off", "--maps=off"]);
    ran.ok();
    assert!(report.heap_huge_share() < 0.05, "{report:?}");
}

/// Freed memory is released as by glibc: 1 GiB, in blocks of several sizes.
#[test]
fn freed_memory_is_given_back() {
    let files = compile(&[Source::C("given_back", &[])]);
    for kib in ["0.2", "0.05", "100", "132", "1024", "2100", "65536"] {
        let program = Program::new(files.path("given_back")).arg(kib);
        let (plain, jumbo) = (program.plain().ok(), program.jumbo().ok());
        let [plain_full, jumbo_full] = [&plain, &jumbo].map(|ran| ran.number("full"));
        assert!(jumbo_full > 1000 * MIB, "{kib} KiB: {jumbo:?}");
        // At most a tenth of the gigabyte stays longer than in a plain run.
        let kept = jumbo.number("after").saturating_sub(plain.number("after"));
        assert!(
            kept <= plain_full / 10,
            "{kib} KiB blocks: {kept} bytes stay resident\n{jumbo:?}"
        );
    }
}

/// Of 500 MiB one page in 16 is touched.
#[test]
fn of_sparse_blocks_what_is_touched_is_resident() {
    let files = compile(&[Source::C("sparse_blocks", &[])]);
    for option in ["--heap=on", "--heap=glibc", "--max-waste=0"] {
        let ran = Program::new(files.path("sparse_blocks")).jumbo_with(&[option]);
        let peak = ran.ok().number("peak");
        assert!(peak < 80 * MIB, "{option}: {peak}");
    }
}

/// After a fill, frees and new allocations resident memory is at most 6 % and 4 MiB above plain,
/// plus the freed blocks that the heap may keep.
#[test]
fn nothing_is_resident_that_was_not_asked_for() {
    let files = compile(&[Source::C("resident", &[])]);
    let mut wasteful = Vec::new();
    for (size, count, how) in [
        (24, 4_000_000, "heap"),
        (200, 2_000_000, "heap"),
        (1_040, 400_000, "heap"),
        (100_000, 4000, "heap"),
        (131_072, 3000, "heap"),
        (200_000, 2000, "heap"),
        (1_048_576, 400, "heap"),
        (2_202_009, 200, "heap"),
        (4_089_446, 100, "heap"),
        (16_777_216, 20, "heap"),
        (64, 400_000, "narrow"),
        (2_202_009, 100, "aligned"),
        (3_300_000, 80, "aligned"),
        (7_500_000, 40, "aligned"),
        (262_144, 1500, "map"),
        (1_048_576, 400, "map"),
        (2_202_009, 200, "map"),
        (4_089_446, 100, "map"),
    ] {
        let program = Program::new(files.path("resident")).args([
            size.to_string(),
            count.to_string(),
            how.to_owned(),
        ]);
        let (plain, jumbo) = (program.plain().ok(), program.jumbo().ok());
        for moment in ["rss0", "rss1", "rss2"] {
            let (plain, jumbo) = (plain.number(moment), jumbo.number(moment));
            // The heap keeps 16 MiB of freed blocks, or twice the largest; the rest of its
            // allowance is a share of live memory.
            let freed = moment != "rss0" && how != "map";
            let kept = if freed { (2 * size).max(16 * MIB) } else { 0 };
            if jumbo > plain * 106 / 100 + 4 * MIB + kept {
                wasteful.push(format!(
                    "{count} x {size} {how} {moment}: {plain} plain, {jumbo} jumbo"
                ));
            }
        }
    }
    assert!(wasteful.is_empty(), "{wasteful:#?}");
}

/// They come from slabs, unless the user tunes glibc's malloc.
#[test]
fn small_objects_have_no_headers() {
    let files = compile(&[Source::C("resident", &[])]);
    let program = Program::new(files.path("resident")).args(["64", "2000000", "heap"]);
    let rss = |ran: crate::support::program::Ran| ran.ok().number("rss0");
    let plain = rss(program.plain());
    let least = plain - 20 * MIB;
    assert!(rss(program.jumbo()) < least, "{plain}");
    assert!(rss(program.jumbo_with(&["--heap=glibc"])) > least);
    let tuned = program.clone().env("MALLOC_ARENA_MAX", "1");
    let says_so = "the C library serves all of them";
    let (ran, report) = tuned.reported_with(&[]);
    assert!(rss(ran) > least && report.says(says_so), "{report:?}");
    let (_, report) = program.reported_with(&[]);
    assert!(!report.says(says_so), "{report:?}");
}

/// Threads with few objects get no pages of their own for each size.
#[test]
fn many_threads_with_few_objects_take_as_much_as_plain() {
    let files = compile(&[Source::C("many", &["-pthread"])]);
    let program = Program::new(files.path("many"));
    let [plain, jumbo] = [program.plain(), program.jumbo()].map(|ran| ran.ok().number("resident"));
    assert!(jumbo < plain + 8 * MIB, "{plain} plain, {jumbo} jumbo");
}

/// Sweeps and joined blocks, in threads that free each other's objects, damage no object.
#[test]
fn what_lies_around_few_objects_is_given_back_and_reused_without_damage() {
    let files = compile(&[Source::C("sparse_threads", &["-pthread"])]);
    let program = Program::new(files.path("sparse_threads"));
    for options in [&["--max-waste=1"][..], &[], &["--max-waste=unbounded"]] {
        let ran = program.jumbo_with(options).ok();
        assert_eq!(ran.number("damaged"), 0, "{options:?}: {ran:?}");
    }
}

/// The heap releases kept memory once the program exceeds its previous peak.
#[test]
fn a_table_that_grows_does_not_leave_its_smaller_selves_beside_it() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("growing", &[])]);
    let program = Program::new(files.path("growing"));
    let [plain, jumbo] = [program.plain(), program.jumbo()].map(|ran| ran.ok().number("peak"));
    assert!(
        jumbo < plain + MIN_WASTE_BYTES + 4 * MIB,
        "{plain} plain, {jumbo} under jumbo"
    );
    // Nor does other memory find one of 16 MiB beside it.
    for beside in ["objects", "mappings"] {
        let program = program.clone().arg(beside);
        let [plain, jumbo] = [program.plain(), program.jumbo()].map(|ran| ran.ok().number("peak"));
        assert!(
            jumbo < plain + 12 * MIB,
            "{plain} plain, {jumbo} with {beside}"
        );
    }
}

/// Credit that an untouched range gave up for later ones is no loss: the range is huge once it is full,
/// and at once where the program has advised it.
#[test]
fn a_range_that_waits_for_its_first_touch_is_huge_after_it() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("reserved_early", &[])]);
    let program = Program::new(files.path("reserved_early"));
    let jumbo = program.jumbo().ok();
    assert!(jumbo.number("later") >= 6 * MIB, "{jumbo:?}");
    let program = program.arg("advised");
    let [plain, jumbo] = [program.plain(), program.jumbo()].map(|ran| ran.ok().number("first"));
    assert!(
        jumbo >= plain.min(6 * MIB),
        "{plain} plain, {jumbo} with advice of its own"
    );
}

/// `--keep` sets how much freed memory stays: with enough of it a repeated block causes no faults.
#[test]
fn what_stays_of_freed_memory_can_be_chosen() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("rounds", &[])]);
    let program = Program::new(files.path("rounds"));
    let none = program.jumbo_with(&["--keep=0"]).ok();
    // First touches of 20 times 50 huge pages.
    assert!(none.number("faults") >= 900, "{none:?}");
    for enough in ["--keep=128M", "--keep=100%"] {
        let kept = program.jumbo_with(&[enough]).ok();
        assert!(kept.number("faults") < 100, "{enough}: {kept:?}");
        let more = kept.number("kept").saturating_sub(none.number("kept"));
        assert!(more > 90 * MIB, "{enough}: {kept:?} {none:?}");
    }
    // By default memory stays while the program reuses it, and no longer.
    let usual = program.clone().arg("rests").jumbo().ok();
    assert!(usual.number("kept") > 90 * MIB, "{usual:?}");
    assert!(usual.number("rested") < 20 * MIB, "{usual:?}");
}

/// Memory from a reservation is on base pages until it turns out dense.
#[test]
fn a_reservation_that_is_sparse_stays_as_small_and_one_that_fills_becomes_huge() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("reserved", &[])]);
    let program = Program::new(files.path("reserved"));
    let plain = program.clone().arg("headers").plain().ok();
    let plain = plain.number("headers");
    for forks in [&[][..], &["forks"]] {
        let jumbo = program.clone().args(forks).jumbo().ok();
        let headers = jumbo.number("headers");
        if !host::thp_is_always() {
            assert!(headers < plain + 8 * MIB, "{plain} plain, {headers}");
        }
        assert!(jumbo.number("first") >= 120 * MIB, "{jumbo:?}");
        assert!(jumbo.number("second") >= 200 * MIB, "{jumbo:?}");
    }
}

/// A sparse program can be excluded.
#[test]
fn a_sparse_program_can_be_excluded() {
    let files = compile(&[Source::C("resident", &[])]);
    let sparse = Program::new(files.path("resident")).args(["67108864", "8", "sparse"]);
    let plain = sparse.plain().ok().number("rss0");
    let off = sparse
        .jumbo_with(&["--heap=off", "--maps=off"])
        .ok()
        .number("rss0");
    assert!(
        off <= plain * 106 / 100 + 4 * MIB,
        "{plain} plain, {off} with --heap=off --maps=off"
    );
}

/// A typical CPython program; `python3` may be a script that starts the real one.
#[test]
fn a_python_heap_is_nine_tenths_huge() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let Some(python) = host::command("python3") else {
        return;
    };
    let program = Program::new(python).args(["-c", "a=[bytes(1000+i%7) for i in range(1000000)]"]);
    let (ran, report) = program.reported();
    ran.ok();
    // A tenth of its GiB: on a busy machine the last sample may be long before the end.
    assert_huge(&report, 100 * MIB, 0.9);
    assert!(report.number("/faults/minor") > 0.0);
    assert!(report.at("/requested").is_object() && report.at("/obtained").is_object());
}

/// Checks that the heap is at least `bytes` at its peak, with at least `share` of it huge.
#[track_caller]
pub(crate) fn assert_huge(report: &Report, bytes: u64, share: f64) {
    eprintln!(
        "heap: {} bytes, {} huge",
        report.heap_bytes(),
        report.heap_huge_share()
    );
    let enough = report.heap_bytes() >= bytes as f64 && report.heap_huge_share() >= share;
    assert!(enough, "wanted {bytes} bytes, {share} huge: {report:?}");
}

/// gcore(1) writes addresses without access, too, unless the kernel has MADV_DONTDUMP for them. The
/// heap reserves none.
#[test]
fn what_is_only_reserved_is_not_dumped() {
    const SUM: &str = "kept = [bytes(60 + i % 7) for i in range(400000)]
dumped = hidden = 0
for line in open('/proc/self/smaps'):
    words = line.split()
    if '-' in words[0]:
        low, high = (int(word, 16) for word in words[0].split('-'))
        size, access, is_anonymous = high - low, words[1], words[4] == '0'
    if words[0] == 'VmFlags:' and is_anonymous:
        dumped += size * (access == '---p' and 'dd' not in words)
        hidden += size * (access == 'rw-p' and 'dd' in words)
print('dumped=%d hidden=%d' % (dumped, hidden))";
    let Some(python) = host::command("python3") else {
        return;
    };
    let ran = Program::new(python).args(["-c", SUM]).jumbo().ok();
    assert!(ran.number("dumped") < 4 * MIB, "{ran:?}");
    assert_eq!(ran.number("hidden"), 0, "{ran:?}");
}

/// The pieces of V8's heap (Node 22 and later), heaps with code (SBCL), and heaps in a memfd that is
/// allocated before it is mapped (ZGC), at once or as they grow.
#[test]
fn heaps_that_are_mapped_otherwise_are_huge() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("placed_heaps", &[])]);
    for how in ["pieces", "code", "allocated", "grown"] {
        let program = Program::new(files.path("placed_heaps")).arg(how);
        let ran = program.jumbo().ok();
        assert!(ran.number("percent") >= 80, "{how}: {ran:?}");
    }
}

/// The reasons of a report sum up to the memory that is not huge: addresses without memory are none.
#[test]
fn a_reason_counts_memory_and_not_addresses() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("narrow", &[])]);
    let (_, report) = Program::new(files.path("narrow")).reported();
    let reason = "mappings without a whole huge page";
    assert!(
        report.says(&format!("64.0 MiB are in {reason}")),
        "{report:?}"
    );
}
