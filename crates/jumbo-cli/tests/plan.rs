//! Tests of `jumbo plan`: golden output, file formats, exit status. `tests/plan/run` starts
//! programs.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// Every workload on a fake host, each with other file formats.
const PLANS: [&str; 9] = [
    "postgres --shared-buffers 200G --nodes 2",
    "redis --data-set 20G",
    "mysql --buffer-pool 64G",
    "mysql --server mysql --buffer-pool 64G --group 109",
    "jvm --heap 16G --count 4",
    "jvm --heap 16G --thp",
    "qemu --memory 64G --nodes 2 --count 3",
    "dpdk --socket-memory 4G --nodes 2",
    "custom --size 12G --size 1M --kind sysv --group 1001 --headroom 5",
];

fn plan(words: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jumbo"));
    command.arg("plan").args(words.split(' ')).output().unwrap()
}

fn stdout(words: &str) -> String {
    let output = plan(words);
    assert!(output.status.success(), "{words}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(words: &str) -> Value {
    serde_json::from_str(&stdout(&format!("{words} --json"))).unwrap()
}

fn skip(name: &str, reason: &str) {
    let strict = std::env::var_os("JUMBO_TEST_STRICT").is_some_and(|value| value == "1");
    assert!(!strict, "SKIP {name}: {reason} (JUMBO_TEST_STRICT=1)");
    eprintln!("SKIP {name}: {reason}");
}

#[test]
fn two_hundred_gib_of_shared_buffers_on_two_nodes() {
    let shown =
        stdout("postgres --shared-buffers 200G --connections 500 --nodes 2 --host-memory 512G");
    let golden = include_str!("../../../tests/plan/postgres_200G.txt");
    assert!(
        shown == golden,
        "tests/plan/postgres_200G.txt is otherwise:\n{shown}"
    );
}

#[test]
fn memory_is_that_of_the_pools_and_every_setting_has_its_reason() {
    for words in PLANS {
        let plan = json(&format!("{words} --host-memory 2T"));
        let pools = plan["pools"].as_array().unwrap();
        let sum: u64 = pools
            .iter()
            .map(|pool| pool["memory"].as_u64().unwrap())
            .sum();
        let is_thp = plan["kind"] == "thp";
        assert!(is_thp == pools.is_empty(), "{words}");
        assert!(is_thp || plan["memory"] == sum, "{words}");
        assert_eq!(is_thp, plan["vmemmap_saved"] == 0, "{words}");
        let left = plan["host_memory"].as_u64().unwrap() - plan["rest"].as_u64().unwrap();
        let private = plan["private"].as_u64().unwrap() * plan["count"].as_u64().unwrap();
        assert_eq!(left, plan["memory"].as_u64().unwrap() + private, "{words}");
        for file in plan["files"].as_array().unwrap() {
            for line in file["lines"].as_array().unwrap() {
                let text = line["line"].as_str().unwrap();
                let has_reason = line["why"].is_string();
                match file["reader"].as_str().unwrap() {
                    "sysctl" => {
                        let (key, value) = text.split_once(" = ").unwrap();
                        let is_number = value.parse::<u64>().is_ok();
                        assert!(has_reason && is_number && key.starts_with("vm."), "{text}");
                    }
                    "tmpfiles" => {
                        let fields: Vec<_> = text.split(' ').collect();
                        let ["w", path, "-", "-", "-", "-", _] = fields[..] else {
                            panic!("{text}");
                        };
                        assert!(has_reason && path.starts_with('/'), "{text}");
                    }
                    "command-line" => assert!(has_reason && text.ends_with('"'), "{text}"),
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn pods_are_yaml_with_the_pages_of_one_instance() {
    for words in PLANS {
        let pod = stdout(&format!("{words} --host-memory 2T --for kubernetes"));
        let script = "import sys, json\ntry: import yaml\nexcept ImportError: sys.exit(77)\n\
                      print(json.dumps(yaml.safe_load(sys.stdin)))";
        let mut python = Command::new("python3");
        let python = python
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let Ok(mut python) = python.spawn() else {
            return skip("pods_are_yaml", "python3 is not installed");
        };
        python
            .stdin
            .take()
            .unwrap()
            .write_all(pod.as_bytes())
            .unwrap();
        let output = python.wait_with_output().unwrap();
        if output.status.code() == Some(77) {
            return skip("pods_are_yaml", "python3-yaml is not installed");
        }
        assert!(output.status.success(), "{words}: {pod}");
        let pod: Value = serde_json::from_slice(&output.stdout).unwrap();
        let plan = json(&format!("{words} --host-memory 2T"));
        let limits = &pod["spec"]["containers"][0]["resources"]["limits"];
        let mib = format!("{}Mi", plan["instance"].as_u64().unwrap() >> 20);
        let pages = limits["hugepages-2Mi"]
            .as_str()
            .or(limits["hugepages-1Gi"].as_str());
        let expected = (plan["kind"] != "thp").then_some(&mib[..]);
        assert_eq!(pages, expected, "{words}: {pod}");
        assert!(limits["memory"].is_string(), "{pod}");
    }
}

#[test]
fn systemd_takes_the_units() {
    let folder = tempfile::tempdir().unwrap();
    let words = "dpdk --socket-memory 4G --host-memory 64G";
    let plan = json(words);
    let of_systemd = |file: &&Value| file["reader"] == "systemd";
    for file in plan["files"].as_array().unwrap().iter().filter(of_systemd) {
        let path = Path::new(file["path"].as_str().unwrap())
            .strip_prefix("/etc/systemd/system")
            .unwrap();
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let lines = file["lines"].as_array().unwrap().iter();
        let lines: Vec<_> = lines.map(|line| line["line"].as_str().unwrap()).collect();
        fs::write(path, lines.join("\n") + "\n").unwrap();
    }
    let unit = folder.path().join("dpdk.service");
    fs::write(&unit, "[Service]\nExecStart=/bin/true\n").unwrap();
    let mount = folder.path().join("dev-hugepages1G.mount");
    let verify = || {
        Command::new("systemd-analyze")
            .arg("verify")
            .args([&unit, &mount])
            .output()
    };
    let Ok(taken) = verify() else {
        return skip(
            "systemd_takes_the_units",
            "systemd-analyze is not installed",
        );
    };
    let message = |output: Output| String::from_utf8(output.stderr).unwrap();
    let folder_is_named = folder.path().to_str().unwrap();
    let message_of_it = message(taken);
    assert!(!message_of_it.contains(folder_is_named), "{message_of_it}");
    fs::write(&mount, "[Mount]\nNo=such\n").unwrap();
    assert!(message(verify().unwrap()).contains("dev-hugepages1G.mount"));
}

#[test]
fn a_process_is_read_and_what_does_not_fit_is_printed_and_fails() {
    let touched = vec![1_u8; 64 << 20];
    let plan_of_it = json(&format!("--pid {}", std::process::id()));
    let size = plan_of_it["regions"][0]["size"].as_u64().unwrap();
    assert!(
        size >= touched.len() as u64 && plan_of_it["kind"] == "thp",
        "{plan_of_it}"
    );
    for (words, status, printed, message) in [
        (
            "custom --size 12G --host-memory 8G",
            1,
            "vm.nr_hugepages = 6144",
            "does not fit",
        ),
        (
            "custom --size 3G --host-memory 8G --nodes 2 --private 6G",
            1,
            "Left",
            "does not fit",
        ),
        (
            "custom --size 1G --nodes 1024",
            1,
            "",
            "hint: --host-memory",
        ),
        (
            "custom --size 1G --host-memory 8G --for command-line",
            1,
            "",
            "hint: it has files for sysctl, kubernetes",
        ),
        (
            "custom --size 1G --kind thp --page-size 1G",
            2,
            "",
            "hint: --page-size",
        ),
        ("custom --size 1G --page-size 3M", 2, "", "power of two"),
        (
            "qemu --memory 3G --nodes 2 --page-size 1G",
            1,
            "",
            "no whole number of 1G pages",
        ),
        // Root's, or no data folder.
        ("postgres --data /proc", 1, "", "hint: "),
        (
            "postgres --shared-buffers 200",
            2,
            "",
            "it has no unit: 200M is 200 MiB",
        ),
        ("--pid no-such-name", 1, "", "no process is `no-such-name`"),
        ("--pid 2147483647", 1, "", "there is no process"),
        ("--pid 1 redis --data-set 1G", 2, "", "leave one away"),
    ] {
        let output = plan(words);
        let (shown, error) = (output.stdout, output.stderr);
        let [shown, error] = [shown, error].map(|text| String::from_utf8(text).unwrap());
        assert_eq!(output.status.code(), Some(status), "{words}: {error}");
        assert!(
            shown.contains(printed) && error.contains(message),
            "{words}: {shown}{error}"
        );
        assert!(shown.is_empty() == printed.is_empty(), "{words}: {shown}");
    }
}
