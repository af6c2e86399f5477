//! Memory of a process by kind and folio size, on fake trees and on the host.

mod fake;

use fake::Fake;
use jumbo::units::{Bytes, PageSize};
use jumbo_host::kernel::Root;
use jumbo_host::status::process::{Observer, usage};
use jumbo_host::status::{Covered, Kind, KindUsage};

/// Formats a mapping of smaps: header, then the nonzero fields, in KiB.
fn mapping(header: &str, fields: &[(&str, u64)]) -> String {
    let fields: String = fields
        .iter()
        .map(|(key, kib)| format!("{key}: {kib} kB\n"))
        .collect();
    format!("{header}\n{fields}VmFlags: rd mr\n")
}

fn kib(kib: u64) -> Bytes {
    Bytes::from_kib(kib)
}

fn smaps() -> String {
    [
        mapping("1000-3000 r--p 0 08:01 9   /usr/bin/p", &[("Rss", 8)]),
        mapping(
            "3000-203000 r-xp 2000 08:01 9   /usr/bin/p",
            &[("Rss", 2048), ("FilePmdMapped", 2048)],
        ),
        mapping(
            "203000-205000 rw-p 5000 08:01 9   /usr/bin/p",
            &[("Rss", 8), ("Anonymous", 4)],
        ),
        mapping(
            "205000-206000 rw-p 0 00:00 0 ",
            &[("Rss", 4), ("Anonymous", 4)],
        ),
        mapping(
            "300000-400000 rw-p 0 00:00 0   [heap]",
            &[("Rss", 1024), ("Anonymous", 1024)],
        ),
        mapping(
            "400000-c00000 rw-p 0 00:00 0 ",
            &[("Rss", 6144), ("Anonymous", 6144), ("AnonHugePages", 4096)],
        ),
        mapping("c00000-d00000 rw-p 0 00:00 0   [anon:arena]", &[("Rss", 4)]),
        mapping(
            "1000000-1400000 rw-p 0 00:0f 5   /anon_hugepage (deleted)",
            &[("KernelPageSize", 2048), ("Private_Hugetlb", 4096)],
        ),
        mapping(
            "2000000-2400000 rw-s 0 00:01 7   /dev/zero (deleted)",
            &[("Rss", 2052), ("ShmemPmdMapped", 2048)],
        ),
        mapping(
            "2400000-2500000 rw-s 0 00:01 8   /SYSV00000000 (deleted)",
            &[("Rss", 4)],
        ),
        mapping(
            "2500000-2600000 rw-s 0 00:01 8   /memfd:x (deleted)",
            &[("Rss", 4)],
        ),
        mapping("2600000-2700000 rw-s 0 00:19 8   /dev/shm/x", &[("Rss", 4)]),
        mapping(
            "2800000-2a00000 rw-s 0 00:0f 5   /mnt/huge/x",
            &[("KernelPageSize", 2048), ("Shared_Hugetlb", 2048)],
        ),
        mapping(
            "3000000-3001000 rw-s 0 08:01 4   /var/lib/db",
            &[("Rss", 4)],
        ),
        mapping(
            "7ff00000-7ff21000 rw-p 0 00:00 0   [stack]",
            &[("Rss", 132)],
        ),
        mapping("7fff0000-7fff1000 r-xp 0 00:00 0   [vdso]", &[("Rss", 4)]),
    ]
    .concat()
}

#[test]
fn every_mapping_finds_its_kind() {
    let fake = Fake::new(4096);
    fake.thp(2 << 20, "madvise", "never")
        .thp_size(64, "never", "never");
    fake.write("proc/7/smaps", smaps());
    let usage = usage(&fake.root(), 7).unwrap();
    let resident: Vec<_> = usage
        .0
        .iter()
        .map(|(kind, usage)| (*kind, usage.bytes))
        .collect();
    assert_eq!(
        resident,
        [
            (Kind::Heap, kib(1024 + 6144 + 4 + 4096)),
            (Kind::Text, kib(2048)),
            (Kind::Data, kib(12)),
            (Kind::Shared, kib(2052 + 4 + 4 + 4 + 2048)),
            (Kind::Stack, kib(132)),
            (Kind::File, kib(8 + 4 + 4)),
        ]
    );
    let heap = usage.kind(Kind::Heap);
    assert_eq!(heap.huge, kib(4096 + 4096));
    assert_eq!(heap.folios[&PageSize::SIZE_2M], heap.huge);
    assert_eq!(heap.folios[&PageSize::SIZE_4K], kib(1024 + 4));
    assert_eq!(
        heap.unknown,
        kib(2048),
        "parts of THPs may be beside those that are whole"
    );
    assert_eq!(usage.kind(Kind::Text).huge_share(), Some(1.0));
    assert_eq!(usage.kind(Kind::Shared).huge, kib(4096));
    // An unwritten page of the data segment is page cache of unknown folio size.
    assert_eq!(usage.kind(Kind::Data).unknown, kib(4));
    assert_eq!(usage.kind(Kind::File).unknown, kib(16));
}

#[test]
fn the_parts_add_up_whatever_the_kernel() {
    for (base, pmd) in [
        (4 << 10, 2 << 20),
        (16 << 10, 32 << 20),
        (64 << 10, 512 << 20),
    ] {
        for small in ["always", "inherit", "never"] {
            let fake = Fake::new(base);
            fake.thp(pmd, "always", "always")
                .thp_size(1024, small, small);
            fake.write("proc/7/smaps", smaps());
            for (kind, usage) in usage(&fake.root(), 7).unwrap().0 {
                let KindUsage {
                    bytes,
                    unknown,
                    folios,
                    ..
                } = usage;
                let known: Bytes = folios.values().copied().sum();
                assert_eq!(known + unknown, bytes, "{kind:?} {small} {base}");
            }
        }
    }
}

#[test]
fn base_pages_are_what_cannot_be_the_part_of_a_thp() {
    let heap_of = |fake: &Fake, flags: &str| {
        let fields = [("Rss", 1024), ("Anonymous", 1024)];
        let smaps = mapping("300000-400000 rw-p 0 00:00 0   [heap]", &fields);
        fake.write("proc/7/smaps", smaps.replace("rd mr", flags));
        let heap = usage(&fake.root(), 7).unwrap().kind(Kind::Heap);
        assert_eq!(heap.huge, Bytes(0));
        (heap.folios.get(&PageSize::SIZE_4K).copied(), heap.unknown)
    };
    let (base, unknown) = ((Some(kib(1024)), Bytes(0)), (None, kib(1024)));
    for (enabled, plain, advised, declined) in [
        ("never", base, base, base),
        ("madvise", base, unknown, base),
        ("always", unknown, unknown, base),
    ] {
        let old = Fake::new(4096);
        old.thp(2 << 20, enabled, "never");
        // The same for a smaller size, without the PMD size.
        let small = Fake::new(4096);
        small
            .thp(2 << 20, enabled, "never")
            .thp_size(2048, "never", "never")
            .thp_size(64, "inherit", "inherit");
        for fake in [old, small] {
            assert_eq!(heap_of(&fake, "rd mr"), plain, "{enabled}");
            assert_eq!(heap_of(&fake, "rd mr hg"), advised, "{enabled}");
            assert_eq!(heap_of(&fake, "rd mr nh"), declined, "{enabled}");
        }
    }
}

#[test]
fn shared_memory_may_be_huge_on_the_advice_of_another_process() {
    for (enabled, unknown) in [("never", kib(4)), ("advise", kib(4 * 4))] {
        let fake = Fake::new(4096);
        fake.thp(2 << 20, "madvise", enabled);
        fake.write("proc/7/smaps", smaps());
        let shared = usage(&fake.root(), 7).unwrap().kind(Kind::Shared);
        assert_eq!(shared.unknown, unknown, "{enabled}");
    }
}

#[test]
fn two_mebibytes_are_huge_whatever_a_pmd_maps() {
    let fake = Fake::new(64 << 10);
    fake.write("proc/7/smaps", smaps());
    let observer = Observer::new(&fake.root()).unwrap();
    let heap = observer.usage(7).unwrap().kind(Kind::Heap);
    assert_eq!(heap.folios[&PageSize::SIZE_2M], kib(4096));
    assert_eq!(heap.huge, kib(4096 + 4096), "hugetlb and THPs");
}

#[test]
fn a_process_that_is_gone_is_missing() {
    assert!(usage(&Root::host(), 5_000_000).unwrap_err().is_missing());
}

#[test]
fn memory_of_this_process_is_counted() {
    let (observer, pid) = (Observer::new(&Root::host()).unwrap(), std::process::id());
    let before = observer.usage(pid).unwrap().kind(Kind::Heap).bytes;
    let memory = std::hint::black_box(vec![1u8; 64 << 20]);
    let after = observer.usage(pid).unwrap();
    assert!(after.kind(Kind::Heap).bytes.0 >= before.0 + (60 << 20));
    assert!(after.kind(Kind::Text).bytes > Bytes(0) && after.kind(Kind::Stack).bytes > Bytes(0));
    drop(memory);
}

#[test]
fn only_a_process_with_the_library_in_it_has_its_memory_read() {
    let fake = Fake::new(4096);
    let plain = "1000-3000 r--p 0 08:01 9   /usr/bin/p\n";
    fake.write("proc/7/maps", plain);
    assert_eq!(Covered::read(&fake.root(), 7).unwrap(), None);
    // The data segment alone, left after a partial unmap, has no state.
    let data = "4000-5000 rw-p 1000 08:01 8   /usr/lib/libjumbo_preload.so\n";
    fake.write("proc/7/maps", [plain, data].concat());
    assert_eq!(Covered::read(&fake.root(), 7).unwrap(), None);

    // A process can map any file under that name, at an offset whose read never ends.
    let library = "0-1000 r--p 0 08:01 8   /usr/lib/libjumbo_preload.so (deleted)\n";
    fake.write("proc/7/maps", [library, plain].concat())
        .write("proc/7/mem", vec![7u8; 0x1000]);
    let error = Covered::read(&fake.root(), 7).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("is not the library of this command"),
        "{error}"
    );
}
