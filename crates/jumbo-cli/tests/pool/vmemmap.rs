//! `jumbo vmemmap`: its output on a fake host, and reallocated pages of this host.

use std::fs;

use serde_json::{Value, json};

use crate::cut_short::{at_every_step, can_trace};
use crate::support::{Fake, Host, Snapshot, assert_unchanged, now, skip, stderr};

const HVO: &str = "proc/sys/vm/hugetlb_optimize_vmemmap";
const NR_HUGEPAGES: &str = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const MIB: u64 = 1 << 20;

/// A host with 16 GiB; HVO reduces its page metadata by `less` base pages.
fn counted(less: u64) -> Fake {
    let fake = Fake::new();
    let memory = "sys/devices/system/memory";
    fake.write(&format!("{memory}/block_size_bytes"), "8000000\n");
    for block in 0..128 {
        fake.write(&format!("{memory}/memory{block}/online"), "1\n");
    }
    let boot = (256 * MIB / 4096) - 100 - less;
    let vmstat = format!("nr_memmap_pages 100\nnr_memmap_boot_pages {boot}\n");
    fake.write("proc/vmstat", &vmstat);
    fake
}

fn shown(fake: &Fake) -> Value {
    serde_json::from_str(&fake.any_ok(&["vmemmap", "show", "--json"])).unwrap()
}

#[test]
fn what_is_saved_follows_from_the_counters() {
    let fake = counted(7 * 300);
    fake.pool(2048, [500, 500, 0, 0, 0]);
    let page = shown(&fake);
    let pool = &page["savings"]["pools"][0];
    assert_eq!(page["savings"]["now"], 7 * 300 * 4096);
    assert_eq!(pool["optimised"], json!([300, 300]));
    assert_eq!(page["savings"]["most"], 7 * 500 * 4096);
    let text = fake.any_ok(&["vmemmap"]);
    let row = text
        .lines()
        .find(|line| line.trim_start().starts_with("2M"))
        .unwrap();
    assert!(row.ends_with(" 200"), "200 predate the switch: {text}");
    // With two pools the distribution of the savings is ambiguous.
    fake.pool(1 << 20, [1, 1, 0, 0, 0]);
    let pools = &shown(&fake)["savings"]["pools"];
    assert_eq!(pools[0]["optimised"], json!([0, 300]));
    assert_eq!(pools[1]["optimised"], json!([0, 0]));
}

#[test]
fn what_does_not_follow_is_not_known() {
    let fake = Fake::new();
    fake.pool(2048, [500, 500, 0, 0, 0]);
    let page = shown(&fake);
    assert_eq!(page["savings"]["now"], Value::Null);
    assert!(fake.any_ok(&["vmemmap"]).contains("does not count"));
    let fake = counted(7 * 300);
    fake.pool(2048, [500, 500, 0, 0, 0]);
    let knob = "sys/module/memory_hotplug/parameters/memmap_on_memory";
    fake.write(knob, "Y\n");
    assert_eq!(shown(&fake)["savings"]["now"], Value::Null);
    assert!(fake.any_ok(&["vmemmap"]).contains("memmap_on_memory yes"));
}

#[test]
fn free_pages_that_predate_the_switch_are_made_anew() {
    let fake = counted(0);
    // Three pages are mapped and two are reserved.
    fake.pool(2048, [20, 17, 2, 0, 4]);
    let words = ["vmemmap", "on", "--convert", "--json"];
    let plan = fake.any_ok(&[&words[..], &["--dry-run"]].concat());
    let plan: Value = serde_json::from_str(&plan).unwrap();
    let steps = plan["steps"].as_array().unwrap();
    let writes = steps.iter().map(|step| (&step["before"], &step["to"]));
    let writes: Vec<_> = writes.map(|(a, b)| (a.as_u64(), b.as_u64())).collect();
    let numbers = [(0, 1), (20, 5), (5, 20)].map(|(a, b)| (Some(a), Some(b)));
    assert_eq!(writes, numbers);
    let notes = plan["notes"].to_string();
    assert!(
        notes.contains("5 2M pages in use or reserved stay"),
        "{notes}"
    );
    assert!(notes.contains("lends them"), "{notes}");
    assert_eq!(fake.text(HVO).unwrap(), "0\n");

    fake.any_ok(&words);
    assert_eq!(
        (fake.text(HVO).unwrap(), fake.text(NR_HUGEPAGES).unwrap()),
        ("1".into(), "20".into())
    );
    // The change is complete despite two writes of the pool, and is no change of the pool.
    let none = fake.jumbo(&["--undo"]);
    assert!(stderr(&none).contains("nothing to undo"), "{none:?}");
    fake.any_ok(&["vmemmap", "--undo"]);
    assert_eq!(
        (fake.text(HVO).unwrap(), fake.text(NR_HUGEPAGES).unwrap()),
        ("0".into(), "20".into())
    );
}

#[test]
fn nothing_is_given_back_in_vain() {
    let fake = counted(7 * 20);
    fake.pool(2048, [20, 20, 0, 0, 0]);
    fake.write(HVO, "1\n");
    let text = fake.any_ok(&["vmemmap", "on", "--convert"]);
    assert!(text.contains("nothing to do"), "{text}");
    let plan = fake.any_ok(&["vmemmap", "on", "--convert", "--dry-run", "--json"]);
    assert!(plan.contains("20 2M pages left as they are"), "{plan}");
    // An allocation of 1 GiB pages may fail.
    let fake = counted(0);
    fake.pool(1 << 20, [2, 2, 0, 0, 0]);
    let refused = fake
        .any_command(&["vmemmap", "on", "--convert"])
        .output()
        .unwrap();
    let message = stderr(&refused);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        message.contains("may not come again") && message.contains("--force"),
        "{message}"
    );
    assert_eq!(fake.text(HVO).unwrap(), "0\n");
    fake.any_ok(&["vmemmap", "on", "--convert", "2M"]);
    fake.any_ok(&["vmemmap", "on", "--convert", "1G", "--force"]);
    let none = fake
        .any_command(&["vmemmap", "on", "--convert", "64K"])
        .output()
        .unwrap();
    assert!(stderr(&none).contains("no pool of 64K pages"));
}

/// HVO switch of this host, restored on drop.
struct Switch(String);

impl Switch {
    fn now(test: &str) -> Option<Self> {
        let before = fs::read_to_string(format!("/{HVO}"));
        let writable = fs::OpenOptions::new().write(true).open(format!("/{HVO}"));
        if before.is_err() || writable.is_err() {
            skip(test, "HVO cannot be switched here");
            return None;
        }
        before.ok().map(Self)
    }

    fn set(to: &str) {
        fs::write(format!("/{HVO}"), to).unwrap();
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        Self::set(&self.0);
    }
}

/// Returns the kernel's counters of page metadata, in bytes.
fn metadata() -> Option<u64> {
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    let counters = text.lines().filter(|line| line.starts_with("nr_memmap"));
    let values: Vec<u64> = counters
        .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
        .collect();
    (values.len() == 2).then(|| values.iter().sum::<u64>() * 4096)
}

#[test]
fn savings_agree_with_the_fall_of_the_counters() {
    const TEST: &str = "savings_agree_with_the_fall_of_the_counters";
    let Some(host) = Host::take(TEST) else {
        return;
    };
    let (Some(_switch), Some(_)) = (Switch::now(TEST), metadata()) else {
        return;
    };
    let json = |words: &[&str]| -> Value {
        let output = host.any_command(words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let had = now().persistent();
    Switch::set("0");
    host.ok(&["grow", "2M", "600"]);
    let before = metadata().unwrap();
    let page = json(&["vmemmap", "--json"]);
    let saved = |page: &Value| page["savings"]["now"].as_u64();
    let Some(at_first) = saved(&page) else {
        skip(TEST, &page["savings"]["unknown"].to_string());
        return;
    };
    json(&["vmemmap", "on", "--convert", "2M", "--json"]);
    assert_eq!(now().persistent(), had + 600);
    let page = json(&["vmemmap", "--json"]);
    let fall = before - metadata().unwrap();
    let shown = saved(&page).unwrap() - at_first;
    assert!(
        shown.abs_diff(fall) * 50 <= fall,
        "{shown} shown, {fall} by the counters"
    );
    let all = 600 * 7 * 4096;
    assert!(fall * 50 >= all * 49, "{fall} of {all}");
    // A pool of another size may have pages of its own, which were not converted.
    let pools = page["savings"]["pools"].as_array().unwrap();
    let pool = pools.iter().find(|pool| pool["size"] == 2 << 20).unwrap();
    assert_eq!(pool["most"], (had + 600) * 7 * 4096);
}

#[test]
fn killed_at_any_step_a_conversion_can_be_undone() {
    const TEST: &str = "killed_at_any_step_a_conversion_can_be_undone";
    let Some(host) = Host::take(TEST).filter(|_| can_trace(TEST)) else {
        return;
    };
    let Some(_switch) = Switch::now(TEST) else {
        return;
    };
    Switch::set("0");
    host.ok(&["grow", "2M", "6"]);
    let before = Snapshot::now();
    let convert = ["vmemmap", "on", "--convert", "2M"];
    at_every_step(&host, &convert, "KILL", |step| {
        let output = host.any_command(&["vmemmap", "--undo"]).output().unwrap();
        assert!(output.status.success(), "{step}: {output:?}");
        assert_unchanged(&before, step);
        let off = fs::read_to_string(format!("/{HVO}")).unwrap();
        assert_eq!(off.trim(), "0", "{step}");
        // Reallocates all pages without HVO, so that there are pages to convert.
        let has = before.pool.persistent().to_string();
        let pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
        fs::write(pool, "0").unwrap();
        fs::write(pool, &has).unwrap();
    });
}
