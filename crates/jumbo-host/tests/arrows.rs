//! Dependencies between modules: the `crate::`, `jumbo::`, `jumbo_inside::` and `jumbo_sys::` paths
//! in the source of four crates, compared with one table each. The benchmarks have an order instead.
//!
//! An unused entry of a table is an error, too, so that the tables stay minimal. Comments and unit
//! tests are ignored.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Top-level modules of a crate with the modules that they use. A module uses only modules of lower
/// lines.
type Table = &'static [(&'static str, &'static [&'static str])];

/// Modules of the kernel's layer. `calls` are the system calls at the root of the crate.
const SYS: Table = &[
    ("folios", &["files", "units"]),
    ("smaps", &["files", "maps", "proc", "units"]),
    ("thp", &["files", "units"]),
    ("files", &["units"]),
    ("cgroup", &["proc"]),
    ("mounts", &[]),
    ("proc", &["calls", "maps", "units"]),
    ("calls", &["units"]),
    ("maps", &[]),
    ("units", &[]),
];

/// Modules of the code inside programs. `ledger` holds the quota of a run's pool; `headroom`
/// reports its free part.
const INSIDE: Table = &[
    (
        "shmem",
        &["density", "heap", "ledger", "orders", "pool", "sandbox"],
    ),
    (
        "heap",
        &[
            "debug", "density", "events", "gather", "headroom", "keep", "ledger", "one_page",
            "orders", "pool", "sandbox", "slab", "sync", "watch",
        ],
    ),
    (
        "slab",
        &["density", "events", "one_page", "orders", "sandbox", "sync"],
    ),
    (
        "segments",
        &[
            "density", "events", "headroom", "ledger", "one_page", "orders", "sandbox", "standing",
            "sync", "watch",
        ],
    ),
    (
        "reaper",
        &[
            "bpf", "headroom", "ledger", "one_page", "orders", "sandbox", "sync", "watch",
        ],
    ),
    (
        "populate",
        &[
            "density", "events", "gather", "ledger", "one_page", "orders", "pool", "sandbox",
            "sync",
        ],
    ),
    (
        "gather",
        &[
            "events", "headroom", "ledger", "one_page", "sandbox", "sync",
        ],
    ),
    (
        "density",
        &[
            "debug", "events", "headroom", "ledger", "one_page", "orders", "sandbox", "sync",
            "watch",
        ],
    ),
    ("debug", &["events", "sandbox", "sync", "watch"]),
    (
        "watch",
        &[
            "bpf", "events", "headroom", "one_page", "sandbox", "standing", "sync",
        ],
    ),
    ("standing", &[]),
    ("ledger", &["one_page", "pool", "sandbox", "sync"]),
    ("pool", &["headroom", "sandbox"]),
    ("events", &[]),
    ("sandbox", &["bpf", "one_page"]),
    ("headroom", &[]),
    ("orders", &["keep"]),
    ("keep", &[]),
    ("bpf", &[]),
    ("sync", &[]),
    ("one_page", &[]),
];

/// Modules of the Rust library.
const PROGRAM: Table = &[
    ("file", &["gather", "units"]),
    ("heap", &[]),
    ("shmem", &["mutex", "units"]),
    ("pool", &["mutex", "units", "vmemmap"]),
    ("vmemmap", &["mutex", "units"]),
    ("status", &["units"]),
    ("gather", &["units"]),
    ("populate", &[]),
    ("mutex", &[]),
    ("units", &[]),
];

/// Modules of the command's backend. `kernel` uses no mechanism. `status` asks `policy` for
/// LD_PRELOAD reachability. `policy` reads the probe's THP table, and nothing else of `kernel`.
const HOST: Table = &[
    ("promote", &["kernel", "status", "units"]),
    ("host_pools", &["kernel", "knobs", "status", "units"]),
    ("status", &["kernel", "policy", "units"]),
    ("knobs", &["kernel", "units", "whole_file"]),
    ("segments", &["kernel", "policy", "units", "whole_file"]),
    ("policy", &["kernel", "units"]),
    ("kernel", &["units"]),
    ("whole_file", &[]),
    ("units", &[]),
];

/// Dependencies of the code inside programs on the kernel's layer.
const INSIDE_TO_SYS: Table = &[
    ("density", &["calls", "proc"]),
    ("gather", &["calls", "proc", "units"]),
    ("headroom", &["calls", "cgroup", "proc"]),
    ("heap", &["calls", "proc"]),
    ("keep", &["units"]),
    ("orders", &["units"]),
    ("pool", &["calls"]),
    ("populate", &["calls", "proc"]),
    ("promises", &["calls"]),
    ("reaper", &["calls", "maps", "proc"]),
    ("sandbox", &["calls", "proc"]),
    ("segments", &["calls", "maps", "proc"]),
    ("shmem", &["calls", "proc"]),
    ("slab", &["calls"]),
    ("standing", &["calls", "proc"]),
    ("watch", &["calls", "proc"]),
    ("ledger", &["calls", "proc"]),
    ("debug", &["calls"]),
    ("sync", &["calls"]),
];

/// Dependencies of the Rust library on the kernel's layer.
const PROGRAM_TO_SYS: Table = &[
    ("pool", &["calls", "files", "proc", "thp"]),
    ("shmem", &["calls", "files", "thp"]),
    ("status", &["calls", "files", "folios", "smaps", "thp"]),
    ("units", &["units"]),
    ("fake", &["files"]),
    ("file", &["calls", "files", "smaps", "thp"]),
    ("heap", &["files", "thp"]),
    ("vmemmap", &["calls", "files", "smaps"]),
];

/// Dependencies of the command's backend on the kernel's layer.
const HOST_TO_SYS: Table = &[(
    "kernel",
    &[
        "calls", "cgroup", "files", "folios", "mounts", "proc", "smaps", "thp",
    ],
)];

/// Dependencies of the Rust library on the inside: safe interfaces.
const PROGRAM_TO_INSIDE: Table = &[
    ("pool", &["pool"]),
    ("shmem", &["pool"]),
    ("vmemmap", &["pool"]),
    ("populate", &["populate"]),
    ("file", &["orders", "populate"]),
    (
        "heap",
        &[
            "density", "events", "gather", "heap", "orders", "sandbox", "slab", "watch",
        ],
    ),
    ("gather", &["gather"]),
];

/// Dependencies of the command's backend on the inside: formats that both sides read.
const HOST_TO_INSIDE: Table = &[
    ("status", &["ledger", "reaper", "watch"]),
    ("policy", &["orders"]),
    ("promote", &["orders"]),
];

/// Modules of the benchmarks in order: tables on top; the engine that starts workers and compares
/// results below. A module uses only later ones.
const BENCH: &[&str] = &[
    "worker",
    "programs",
    "exit",
    "fork",
    "free",
    "latency",
    "shmem",
    "text",
    "files",
    "populate",
    "vmemmap",
    "pool",
    "program",
    "elf",
    "heap",
    "life",
    "group",
    "table",
    "keeper",
    "work",
    "claim",
    "machine",
    "memory",
    "stats",
    "json_child",
    "interrupt",
    "published",
    "error",
    "launch",
    "task",
    "figures",
];

/// Dependencies of the command's backend on the Rust library.
const HOST_TO_PROGRAM: Table = &[("status", &["status"])];

/// Modules used by each top-level module of a crate.
type Arrows = BTreeMap<String, BTreeSet<String>>;

#[test]
fn each_module_uses_what_the_table_allows_and_nothing_else() {
    let (sys, inside, program, host) = (
        source_of("jumbo-sys"),
        source_of("jumbo-inside"),
        source_of("jumbo"),
        source_of("jumbo-host"),
    );
    for (name, table, found) in [
        ("SYS", SYS, arrows(&sys, "crate::")),
        ("INSIDE", INSIDE, arrows(&inside, "crate::")),
        ("PROGRAM", PROGRAM, arrows(&program, "crate::")),
        ("HOST", HOST, arrows(&host, "crate::")),
        (
            "INSIDE_TO_SYS",
            INSIDE_TO_SYS,
            arrows(&inside, "jumbo_sys::"),
        ),
        (
            "PROGRAM_TO_SYS",
            PROGRAM_TO_SYS,
            arrows(&program, "jumbo_sys::"),
        ),
        ("HOST_TO_SYS", HOST_TO_SYS, arrows(&host, "jumbo_sys::")),
        (
            "PROGRAM_TO_INSIDE",
            PROGRAM_TO_INSIDE,
            arrows(&program, "jumbo_inside::"),
        ),
        (
            "HOST_TO_INSIDE",
            HOST_TO_INSIDE,
            arrows(&host, "jumbo_inside::"),
        ),
        ("HOST_TO_PROGRAM", HOST_TO_PROGRAM, arrows(&host, "jumbo::")),
    ] {
        for (module, used) in &found {
            let allowed = row(table, module);
            let used = used.iter().map(String::as_str);
            let used: BTreeSet<&str> = match name {
                "SYS" => used.map(of_sys).filter(|used| used != module).collect(),
                _ if name.ends_with("_TO_SYS") => used.map(of_sys).collect(),
                _ => used.collect(),
            };
            assert_eq!(used, allowed, "{module}: used, and allowed by {name}");
        }
        for (module, allowed) in table {
            assert!(
                allowed.is_empty() || found.contains_key(*module),
                "{module} uses nothing that {name} allows"
            );
        }
    }
}

#[test]
fn arrows_point_down() {
    for table in [SYS, INSIDE, PROGRAM, HOST] {
        for (line, (module, allowed)) in table.iter().enumerate() {
            for used in *allowed {
                let below = table.iter().skip(line + 1).any(|(name, _)| name == used);
                assert!(below, "{module} uses {used}, which does not stand below it");
            }
        }
    }
}

#[test]
fn benchmarks_use_what_stands_below_them() {
    let source = source_of("jumbo-bench");
    let place = |name: &str| BENCH.iter().position(|module| *module == name);
    for (module, _) in &source {
        assert!(place(module).is_some(), "{module} is not in BENCH");
    }
    for (module, used) in arrows(&source, "crate::") {
        // Other names are items of the crate's root.
        for used in used.iter().filter(|used| place(used).is_some()) {
            let is_below = place(used) > place(&module);
            assert!(
                is_below,
                "{module} uses {used}, which does not stand below it"
            );
        }
    }
}

#[test]
fn policy_does_no_input_or_output() {
    let policy = source_of("jumbo-host")
        .into_iter()
        .filter(|(module, _)| module == "policy");
    for (_, code) in policy {
        for path in ["std::fs", "std::env", "std::process", "rustix::", "libc::"] {
            assert!(!code.contains(path), "policy uses {path}");
        }
        for (_, rest) in uses(&code, "crate::kernel::") {
            assert!(rest.starts_with("thp::Thp;"), "policy uses kernel::{rest}");
        }
    }
}

/// Returns the modules that a table permits; none for a module without a line.
fn row(table: Table, module: &str) -> BTreeSet<&'static str> {
    let line = table.iter().find(|(name, _)| *name == module);
    line.map(|(_, allowed)| allowed.iter().copied().collect())
        .unwrap_or_default()
}

/// Returns the code of each file of a crate, with its top-level module.
fn source_of(name: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(name)
        .join("src");
    let mut files = Vec::new();
    collect(&root, &mut files);
    assert!(files.len() > 10, "no source in {}", root.display());
    let module = |file: &PathBuf| {
        let top = file.strip_prefix(&root).unwrap().iter().next().unwrap();
        match top.to_str().unwrap().trim_end_matches(".rs") {
            top if name == "jumbo-sys" && top != "lib" => of_sys(top).to_owned(),
            top => top.to_owned(),
        }
    };
    let files = files.iter().map(|file| (module(file), code_of(file)));
    files.filter(|(module, _)| module != "lib").collect()
}

/// Returns the row of [`SYS`] of a module or an item of the crate's root.
fn of_sys(name: &str) -> &str {
    let is_module = SYS.iter().any(|(module, _)| *module == name);
    if is_module { name } else { "calls" }
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else {
            files.push(path);
        }
    }
}

/// Returns a file without comments and without its unit tests, which are at its end.
fn code_of(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let lines = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the modules named after `prefix` in the code of a crate, except for self-references.
fn arrows(source: &[(String, String)], prefix: &str) -> Arrows {
    let within = prefix == "crate::";
    let mut arrows = Arrows::new();
    for (module, code) in source {
        let mut found: Vec<String> = uses(code, prefix)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        // In a top-level file `super` is the crate.
        let is_file = !source
            .iter()
            .any(|(other, text)| other == module && text != code);
        if within && is_file {
            found.extend(uses(code, "super::").into_iter().map(|(name, _)| name));
        }
        if prefix == "jumbo_sys::" {
            let names = uses(code, "jumbo_sys as ");
            found.extend(names.into_iter().map(|(name, _)| name));
        }
        found.retain(|name| !(within && name == module));
        if !found.is_empty() {
            arrows.entry(module.clone()).or_default().extend(found);
        }
    }
    arrows
}

/// Returns each name after `prefix`, or all names of a list in braces, with the text from there on.
fn uses<'a>(code: &'a str, prefix: &str) -> Vec<(String, &'a str)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices(prefix) {
        // Neither `$crate::` nor the end of a longer name.
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
            continue;
        }
        let rest = &code[at + prefix.len()..];
        match rest.strip_prefix('{') {
            Some(list) => {
                let mut depth = 0;
                let mut starts = true;
                for (at, c) in list.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => starts = true,
                        c if starts && !c.is_whitespace() => {
                            found.push((name_at(&list[at..]), &list[at..]));
                            starts = false;
                        }
                        _ => {}
                    }
                }
            }
            None => found.push((name_at(rest), rest)),
        }
    }
    found
}

/// Returns the name at the start of a text.
fn name_at(text: &str) -> String {
    let ends = text.find(|c: char| !(c.is_alphanumeric() || c == '_'));
    text[..ends.unwrap_or(text.len())].to_owned()
}
