//! `jumbo thp` and `jumbo vmemmap on` and `off`, on a fake host and on the knobs of this host.

use std::fs;
use std::path::Path;

use crate::cut_short::{at_every_step, can_trace};
use crate::support::{Fake, Host, skip, stderr, stdout};

const THP: &str = "sys/kernel/mm/transparent_hugepage";
const HVO: &str = "proc/sys/vm/hugetlb_optimize_vmemmap";

/// A host with the THP controls, all at `never`.
fn fake() -> Fake {
    let fake = Fake::new();
    let write = |name: &str, text: &str| fake.write(&format!("{THP}/{name}"), text);
    write("hpage_pmd_size", "2097152\n");
    write("enabled", "always madvise [never]\n");
    write(
        "shmem_enabled",
        "always within_size advise [never] deny force\n",
    );
    write("defrag", "always defer defer+madvise madvise [never]\n");
    write("khugepaged/max_ptes_none", "511\n");
    for size in ["64", "2048"] {
        let folder = format!("hugepages-{size}kB");
        write(
            &format!("{folder}/enabled"),
            "always inherit madvise [never]\n",
        );
        let words = "always inherit within_size advise [never]\n";
        write(&format!("{folder}/shmem_enabled"), words);
    }
    fake
}

fn text(fake: &Fake, name: &str) -> String {
    fake.text(&format!("{THP}/{name}")).unwrap()
}

/// Returns the selected value of a knob and rewrites the knob as the kernel does: all values, one
/// in brackets.
fn word(fake: &Fake, name: &str) -> String {
    let text = text(fake, name);
    let word = text.split(['[', ']']).nth(1).unwrap_or(text.trim());
    let words = match name {
        "enabled" => "always madvise never",
        "shmem_enabled" => "always within_size advise never deny force",
        size if size.ends_with("shmem_enabled") => "always inherit within_size advise never",
        _ => "always inherit madvise never",
    };
    let mark = |each| match each == word {
        true => format!("[{each}]"),
        false => String::from(each),
    };
    let listed: Vec<_> = words.split(' ').map(mark).collect();
    fake.write(&format!("{THP}/{name}"), &(listed.join(" ") + "\n"));
    word.to_owned()
}

#[test]
fn a_dry_run_writes_nothing() {
    let fake = fake();
    let before = fake.everything();
    let plan = fake.any_ok(&[
        "thp",
        "set",
        "enabled=madvise",
        "64K.shmem=advise",
        "--dry-run",
    ]);
    for expected in [
        "enabled: never -> madvise",
        "shmem_enabled of 64K: never -> advise",
    ] {
        assert!(plan.contains(expected), "{expected}: {plan}");
    }
    assert_eq!(fake.everything(), before);
}

#[test]
fn tables_are_set_read_back_and_undone() {
    let fake = fake();
    fake.any_ok(&[
        "thp",
        "set",
        "64K=madvise",
        "64K.shmem=advise",
        "max_ptes_none=64",
    ]);
    let set = [
        "hugepages-64kB/enabled",
        "hugepages-64kB/shmem_enabled",
        "khugepaged/max_ptes_none",
    ];
    assert_eq!(
        set.map(|name| text(&fake, name)),
        ["madvise", "advise", "64"]
    );
    let page: serde_json::Value = serde_json::from_str(&fake.any_ok(&["thp", "--json"])).unwrap();
    assert_eq!(page["changes"][0]["group"]["id"], "thp", "{page:#}");
    let shown = fake.any_ok(&["thp", "show"]);
    assert!(shown.contains("What --undo would put back"), "{shown}");

    fake.any_ok(&["thp", "set", "--undo"]);
    assert_eq!(set.map(|name| text(&fake, name)), ["never", "never", "511"]);
    let nothing = fake.any_command(&["thp", "--undo"]).output().unwrap();
    assert!(stderr(&nothing).contains("no change of the THP tables is recorded"));
}

#[test]
fn shared_memory_is_set_by_a_word_or_an_option() {
    let fake = fake();
    let sizes = ["64", "2048"].map(|size| format!("hugepages-{size}kB/shmem_enabled"));
    let now = || [word(&fake, &sizes[0]), word(&fake, &sizes[1])];
    let json = fake.any_ok(&["thp", "set", "shmem", "64K=always,2M=inherit", "--json"]);
    let set: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(set["steps"].as_array().unwrap().len(), 2, "{set:#}");
    assert_eq!(now(), ["always", "inherit"]);
    fake.any_ok(&["thp", "set", "--shmem", "64K=advise", "anon", "64K=madvise"]);
    assert_eq!(now(), ["advise", "inherit"]);
    assert_eq!(text(&fake, "hugepages-64kB/enabled"), "madvise");
    fake.any_ok(&["thp", "--undo"]);
    fake.any_ok(&["thp", "--undo"]);
    assert!(now().iter().all(|text| text == "never"), "{:?}", now());
}

#[test]
fn force_comes_after_the_sizes_and_goes_before_them() {
    let fake = fake();
    let order = |words: &[&str]| -> Vec<String> {
        let text = fake.any_ok(&[&["thp"], words, &["--dry-run", "--json"]].concat());
        let plan: serde_json::Value = serde_json::from_str(&text).unwrap();
        let steps = plan["steps"].as_array().unwrap().iter();
        steps
            .map(|step| step["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let set = ["set", "shmem=force", "2M.shmem=inherit"];
    let sizes_first = ["shmem_enabled of 2M", "shmem_enabled"];
    assert_eq!(order(&set), sizes_first);
    fake.any_ok(&[&["thp"], &set[..]].concat());
    assert_eq!(order(&["--undo"]), ["shmem_enabled", "shmem_enabled of 2M"]);
    word(&fake, "shmem_enabled");
    let leave = ["set", "64K.shmem=inherit", "shmem=never"];
    assert_eq!(order(&leave), ["shmem_enabled", "shmem_enabled of 64K"]);
}

#[test]
fn the_lines_for_a_boot_are_printed_and_nothing_is_written() {
    let fake = fake();
    let before = fake.everything();
    let w = |file: &str| format!("\nw /{THP}/{file} - - - - ");
    let print = |words: &[&str]| fake.any_ok(&[words, &["--print-boot"]].concat());
    let some = print(&["thp", "set", "64K=madvise", "64K.shmem=advise"]);
    assert!(
        some.starts_with("# /etc/tmpfiles.d/60-jumbo-thp.conf\n"),
        "{some}"
    );
    assert!(
        some.contains(&(w("hugepages-64kB/enabled") + "madvise\n")),
        "{some}"
    );
    assert!(
        some.contains(&(w("hugepages-64kB/shmem_enabled") + "advise\n")),
        "{some}"
    );
    assert_eq!(some.matches("\nw /").count(), 2, "{some}");
    assert!(some.contains("thp_shmem=64K:advise"), "{some}");
    let shared = print(&["thp", "set", "--shmem"]);
    assert_eq!(shared.matches("\nw /").count(), 3, "{shared}");
    let wrong = fake
        .any_command(&["thp", "set", "enabled=allways", "--print-boot"])
        .output();
    assert_eq!(wrong.unwrap().status.code(), Some(2));

    let hvo = print(&["vmemmap", "on"]);
    assert!(
        hvo.starts_with("# /etc/sysctl.d/60-jumbo-hvo.conf\n"),
        "{hvo}"
    );
    assert!(hvo.contains("\nvm.hugetlb_optimize_vmemmap = 1\n"), "{hvo}");
    assert!(hvo.contains("hugetlb_free_vmemmap=on"), "{hvo}");
    let json: serde_json::Value =
        serde_json::from_str(&print(&["vmemmap", "off", "--json"])).unwrap();
    assert_eq!(
        json["files"][0]["lines"][0]["line"],
        "vm.hugetlb_optimize_vmemmap = 0"
    );
    assert_eq!(fake.everything(), before);
}

#[test]
fn what_is_of_shared_memory_alone_and_what_no_table_rules_is_said() {
    let fake = fake();
    let words = "always inherit within_size advise [never]\n";
    fake.write(&format!("{THP}/hugepages-8kB/shmem_enabled"), words);
    fake.write(&format!("{THP}/hugepages-64kB/stats/shmem_alloc"), "17\n");
    fake.write(
        "proc/self/mountinfo",
        "25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=1k,huge=advise\n",
    );
    let anon = fake
        .any_command(&["thp", "set", "8K=always"])
        .output()
        .unwrap();
    assert_eq!(anon.status.code(), Some(1));
    assert!(
        stderr(&anon).contains("hint: 8K.shmem=always"),
        "{}",
        stderr(&anon)
    );
    fake.any_ok(&["thp", "set", "8K.shmem=always"]);
    let shown = fake.any_ok(&["thp", "show", "--shmem"]);
    for expected in [
        "shmem_alloc: folios that",
        "17",
        "/dev/shm: huge=advise",
        "thp_shmem=8K:always (6.13)",
        "transparent_hugepage_tmpfs=advise (6.14)",
    ] {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
    let shown = fake.any_ok(&["thp", "show", "--anon"]);
    assert!(!shown.contains("transparent_hugepage_tmpfs"), "{shown}");
    let anon = fake.any_ok(&["thp", "show", "--anon"]);
    assert!(
        !anon.contains("\n  8K") && !anon.contains("/dev/shm"),
        "{anon}"
    );
}

#[test]
fn hvo_is_switched_and_undone_as_a_pool_is() {
    let fake = fake();
    fake.pool(2048, [3, 3, 0, 0, 0]);
    let on = fake.any_ok(&["vmemmap", "on"]);
    assert!(on.contains("stay as they are"), "{on}");
    assert_eq!(fake.text(HVO).unwrap(), "1");
    let page: serde_json::Value =
        serde_json::from_str(&fake.any_ok(&["vmemmap", "--json"])).unwrap();
    assert_eq!(page["hvo"], true, "{page:#}");
    fake.any_ok(&["vmemmap", "--undo"]);
    assert_eq!(fake.text(HVO).unwrap(), "0");
    fs::remove_file(fake.path(HVO)).unwrap();
    let none = fake.any_command(&["vmemmap", "on"]).output().unwrap();
    assert_eq!(none.status.code(), Some(1));
    let message = stderr(&none);
    assert!(
        message.contains(HVO) && message.contains("hint: this kernel does not have it"),
        "{message}"
    );
}

#[test]
fn what_others_have_set_since_is_not_overwritten() {
    let fake = fake();
    fake.any_ok(&["thp", "set", "enabled=madvise"]);
    fake.write(&format!("{THP}/enabled"), "[always] madvise never\n");
    for arguments in [&["thp", "--undo"][..], &["thp", "--undo", "--dry-run"]] {
        let refused = fake.any_command(arguments).output().unwrap();
        assert_eq!(refused.status.code(), Some(1));
        let message = stderr(&refused);
        assert!(
            message.contains("always now, where the change left madvise"),
            "{message}"
        );
    }
    fake.any_ok(&["thp", "--undo", "--force"]);
    assert_eq!(text(&fake, "enabled"), "never");
}

#[test]
fn what_makes_no_sense_is_wrong_usage() {
    let fake = fake();
    for (arguments, expected) in [
        (
            &["set", "enabled=allways"][..],
            "it takes always, madvise, never",
        ),
        (&["set", "64K=never", "64K=always"], "is given twice"),
        (&["set", "63K=never"], "63K is no folio size"),
        (&["set", "swiftly=never"], "there is no knob `swiftly`"),
        (&["set", "enable=always"], "the nearest is enabled;"),
        (&["set", "max_ptes_none=few"], "a whole number"),
        (&["set"], "required"),
        (&["set", "--print-boot", "--undo"], "cannot be used with"),
        (&["set", "64K=never", "--undo"], "cannot be used with"),
        (&["--force"], "--undo"),
    ] {
        let output = fake
            .any_command(&[&["thp"], arguments].concat())
            .output()
            .unwrap();
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(message.contains(expected), "{arguments:?}: {message}");
    }
}

#[test]
fn what_this_kernel_does_not_have_is_said() {
    let fake = fake();
    let size = fake
        .any_command(&["thp", "set", "32K=always"])
        .output()
        .unwrap();
    assert_eq!(size.status.code(), Some(1));
    assert!(stderr(&size).contains("hugepages-32kB/enabled: No such file"));
    fs::remove_dir_all(fake.path(THP)).unwrap();
    let none = fake.any_command(&["thp"]).output().unwrap();
    assert!(stderr(&none).contains("this kernel has no THP"));
}

/// Saved values of the knobs that the tests below set; restored on drop, after a panic, too.
struct Knobs(Vec<(String, String)>);

impl Knobs {
    fn now() -> Option<Self> {
        let size = format!("{THP}/hugepages-64kB");
        let max = format!("{THP}/khugepaged/max_ptes_none");
        let files = [
            format!("{size}/enabled"),
            format!("{size}/shmem_enabled"),
            max,
            HVO.to_owned(),
            format!("{THP}/shmem_enabled"),
        ];
        let read = |file: String| Some((file.clone(), read(&file)?));
        files.into_iter().map(read).collect::<Option<_>>().map(Self)
    }

    fn is(&self) -> bool {
        self.0
            .iter()
            .all(|(file, text)| read(file).as_ref() == Some(text))
    }
}

impl Drop for Knobs {
    fn drop(&mut self) {
        for (file, text) in &self.0 {
            let word = text.split(['[', ']']).nth(1).unwrap_or(text.trim());
            let _ = fs::write(Path::new("/").join(file), word);
        }
    }
}

fn read(file: &str) -> Option<String> {
    fs::read_to_string(Path::new("/").join(file)).ok()
}

fn host(test: &str) -> Option<(Knobs, Host)> {
    let host = Host::take(test)?;
    let knobs = Knobs::now();
    if knobs.is_none() {
        skip(test, "this kernel has no sizes of THPs, or no HVO");
    }
    Some((knobs?, host))
}

#[test]
fn the_kernel_takes_and_gives_back_what_is_set() {
    let Some((knobs, host)) = host("the_kernel_takes_and_gives_back_what_is_set") else {
        return;
    };
    let json = |words: &[&str]| -> serde_json::Value {
        let output = host.any_command(words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_str(&stdout(&output)).unwrap()
    };
    let set = json(&[
        "thp",
        "set",
        "64K=madvise",
        "64K.shmem=advise",
        "max_ptes_none=100",
        "--json",
    ]);
    let after: Vec<_> = set["steps"]
        .as_array()
        .unwrap()
        .iter()
        .map(|step| &step["after"])
        .collect();
    assert_eq!(
        after,
        [
            &"madvise".into(),
            &"advise".into(),
            &serde_json::Value::from(100)
        ]
    );
    assert!(read(&knobs.0[0].0).unwrap().contains("[madvise]"));
    assert_eq!(json(&["thp", "--undo", "--json"])["complete"], true);
    let other = if knobs.0[3].1.trim() == "0" {
        "on"
    } else {
        "off"
    };
    let hvo = json(&["vmemmap", other, "--json"]);
    assert_eq!(hvo["steps"][0]["after"], u64::from(other == "on"));
    assert!(!knobs.is());
    assert_eq!(json(&["vmemmap", "--undo", "--json"])["complete"], true);
    assert!(knobs.is());

    // The kernel accepts `force` only if no size below the PMD size inherits it.
    json(&["thp", "set", "64K.shmem=inherit", "--json"]);
    json(&["thp", "set", "shmem=force", "64K.shmem=never", "--json"]);
    assert!(read(&knobs.0[4].0).unwrap().contains("[force]"));
    assert_eq!(json(&["thp", "--undo", "--json"])["complete"], true);
    assert_eq!(json(&["thp", "--undo", "--json"])["complete"], true);
    assert!(knobs.is());

    // More base pages than a huge page holds.
    let refused = host
        .any_command(&["thp", "set", "64K=madvise", "max_ptes_none=99999"])
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let message = stderr(&refused);
    for expected in [
        "khugepaged/max_ptes_none: Invalid argument (os error 22); everything was put back",
        "hint: this kernel does not take that value",
    ] {
        assert!(message.contains(expected), "{message}");
    }
    assert!(knobs.is());
}

#[test]
fn killed_at_any_step_the_tables_can_be_put_back() {
    const TEST: &str = "killed_at_any_step_the_tables_can_be_put_back";
    let Some((knobs, host)) = host(TEST).filter(|_| can_trace(TEST)) else {
        return;
    };
    let undo = |words: &[&str]| {
        let output = host.any_command(words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let set = [
        "thp",
        "set",
        "64K=madvise",
        "64K.shmem=advise",
        "max_ptes_none=100",
    ];
    at_every_step(&host, &set, "KILL", |step| {
        undo(&["thp", "--undo"]);
        assert!(knobs.is(), "{step}");
    });
    let other = if knobs.0[3].1.trim() == "0" {
        "on"
    } else {
        "off"
    };
    at_every_step(&host, &["vmemmap", other], "KILL", |step| {
        undo(&["vmemmap", "--undo"]);
        assert!(knobs.is(), "{step}");
    });
}
