//! `auto`, `wait` and `watch`.

use std::io::Read as _;
use std::process::{Child, Stdio};

use crate::support::{Before, Host, User, assert_as, now, stderr, stdout, until};

/// `jumbo pool auto` while it runs.
struct Auto(Child);

impl Auto {
    fn start(host: &Host, arguments: &[&str]) -> Self {
        let common = ["auto", "2M", "--interval", "0.02", "--keep-free", "64M"];
        let child = host
            .jumbo(&[&common[..], arguments].concat())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child)
    }

    fn send(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// How it ended, and what it told.
    fn end(mut self) -> (std::process::ExitStatus, String) {
        let status = self.0.wait().unwrap();
        let mut told = String::new();
        self.0
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut told)
            .unwrap();
        (status, told)
    }
}

#[test]
fn a_pool_follows_demand_and_is_put_back() {
    let Some(host) = Host::take("a_pool_follows_demand_and_is_put_back") else {
        return;
    };
    host.ok(&["set", "2M", "--persistent", "0", "--overcommit", "0"]);
    let (before, records) = (Before::now(), host.records());
    let auto = Auto::start(
        &host,
        &[
            "--min",
            "2",
            "--max",
            "64",
            "--headroom",
            "4",
            "--idle",
            "0.5",
        ],
    );
    until("the headroom", || (now().persistent() == 4).then_some(()));
    assert_eq!(
        until("overcommit", || (now().overcommit > 0)
            .then(|| now().overcommit)),
        60
    );
    // Far more than the headroom at once: the kernel makes it, and it stays.
    let user = User::of(40, 10).unwrap();
    until("persistent pages", || {
        (now().persistent() == 44 && now().surplus == 0).then_some(())
    });
    assert!(now().overcommit <= 20);
    let beyond = User::of(30, 0).err().unwrap();
    assert!(beyond.contains("Cannot allocate memory"), "{beyond}");
    drop(user);
    until("the idle pages' return", || {
        (now().persistent() == 4).then_some(())
    });
    auto.send(rustix::process::Signal::TERM);
    let (status, told) = auto.end();
    assert!(status.success(), "{told}");
    for expected in [
        "persistent 0 -> 4",
        "0 in use and 0 reserved, headroom 4",
        " -> 44: ",
        "no more than 4 needed for 0.5 s",
        ": stopped",
        "put back what was before",
    ] {
        assert!(told.contains(expected), "{expected}: {told}");
    }
    assert_as(&before, "stopped");
    assert_eq!(host.records(), records);
}

#[test]
fn killed_while_steering_it_can_be_undone() {
    let Some(host) = Host::take("killed_while_steering_it_can_be_undone") else {
        return;
    };
    let before = Before::now();
    let most = (before.pool.total + 64).to_string();
    let auto = Auto::start(
        &host,
        &[
            "--min",
            &(before.pool.total + 8).to_string(),
            "--max",
            &most,
        ],
    );
    until("growth", || {
        (now().persistent() >= before.pool.total + 8).then_some(())
    });
    let busy = host.run(&["grow", "2M", "1"]);
    assert_eq!(busy.status.code(), Some(1));
    let text = stderr(&busy);
    assert!(
        text.contains("is being changed by process") && text.contains("pool auto"),
        "{text}"
    );
    auto.send(rustix::process::Signal::KILL);
    drop(auto.end());
    assert_eq!(host.records(), 1);
    let undone = host.ok(&["--undo"]);
    assert!(undone.contains("cut short"), "{undone}");
    assert_as(&before, "undone");
    assert_eq!(host.records(), 0);
}

#[test]
fn the_next_one_puts_back_what_was_before_those_that_were_killed() {
    let Some(host) = Host::take("the_next_one_puts_back_what_was_before_those_that_were_killed")
    else {
        return;
    };
    let (before, records) = (Before::now(), host.records());
    let least = |more: u64| (before.pool.total + more).to_string();
    let most = least(64);
    for more in [8, 16] {
        let auto = Auto::start(&host, &["--min", &least(more), "--max", &most]);
        until("growth", || {
            (now().persistent() >= before.pool.total + more).then_some(())
        });
        auto.send(rustix::process::Signal::KILL);
        drop(auto.end());
        assert_eq!(host.records(), records + 1);
    }
    let last = Auto::start(&host, &["--min", "0", "--max", &most, "--for", "0.1"]);
    let (status, told) = last.end();
    assert!(status.success(), "{told}");
    for expected in [
        "goes on for process",
        "has not put back what was before it",
        "put back what was before",
    ] {
        assert!(told.contains(expected), "{expected}: {told}");
    }
    assert_as(&before, "put back");
    assert_eq!(host.records(), records);
}

#[test]
fn what_was_set_after_one_was_killed_is_put_back() {
    let Some(host) = Host::take("what_was_set_after_one_was_killed_is_put_back") else {
        return;
    };
    let (before, records) = (Before::now(), host.records());
    let least = |more: u64| (before.pool.total + more).to_string();
    let most = least(64);
    let auto = Auto::start(&host, &["--min", &least(8), "--max", &most]);
    until("growth", || {
        (now().persistent() >= before.pool.total + 8).then_some(())
    });
    auto.send(rustix::process::Signal::KILL);
    drop(auto.end());
    // Not on the way to what that one wrote, which it may have been killed in the middle of.
    std::fs::write("/proc/sys/vm/nr_hugepages", least(20)).unwrap();
    let set = now();
    let next = Auto::start(&host, &["--min", "0", "--max", &most, "--for", "0.1"]);
    let (status, told) = next.end();
    assert!(status.success(), "{told}");
    assert!(!told.contains("goes on for"), "{told}");
    assert_eq!(now().persistent(), set.persistent(), "{told}");
    assert_eq!(host.records(), records + 1);
    host.ok(&["--undo"]);
    assert_as(&before, "undone");
}

#[test]
fn memory_to_be_kept_is_kept() {
    let Some(host) = Host::take("memory_to_be_kept_is_kept") else {
        return;
    };
    let before = Before::now();
    let most = (before.pool.total + 64).to_string();
    let all = [
        "--min",
        "0",
        "--max",
        &most,
        "--keep-free",
        "1000G",
        "--for",
        "0.3",
    ];
    let arguments = [&["auto", "2M"][..], &all[..]].concat();
    let output = host.run(&arguments);
    assert!(output.status.success(), "{output:?}");
    assert!(!stderr(&output).contains("persistent 0 ->"), "{output:?}");
    assert_as(&before, "untouched");
}

#[test]
fn one_step_is_left_as_a_change_is() {
    let Some(host) = Host::take("one_step_is_left_as_a_change_is") else {
        return;
    };
    let before = Before::now();
    let [least, most] =
        [before.pool.total + 3, before.pool.total + 64].map(|pages| pages.to_string());
    let change = host.json(&[
        "auto",
        "2M",
        "--json",
        "--no-overcommit",
        "--min",
        &least,
        "--max",
        &most,
        "--once",
        "--keep-free",
        "64M",
    ]);
    assert_eq!(change["steps"][0]["after"], now().persistent());
    assert!(now().persistent() >= before.pool.total + 3);
    host.ok(&["--undo"]);
    assert_as(&before, "undone");
    assert_eq!(host.records(), 0);
}

#[test]
fn waiting_ends_when_the_pages_are_free() {
    let Some(host) = Host::take("waiting_ends_when_the_pages_are_free") else {
        return;
    };
    host.ok(&["grow", "2M", "6"]);
    let all = now().free - now().reserved;
    let user = User::of(all, 1).unwrap();
    let wanted = all.to_string();
    let in_vain = host.run(&["wait", "2M", &wanted, "--timeout", "0", "--json"]);
    assert_eq!(in_vain.status.code(), Some(124));
    let text = stderr(&in_vain);
    assert!(
        text.contains(&format!("python3 ({})", user.pid())),
        "{text}"
    );
    assert!(stdout(&in_vain).contains("\"free\": false"));

    let waiting = host.jumbo(&["wait", "2M", &wanted]).spawn().unwrap();
    drop(user);
    assert!(waiting.wait_with_output().unwrap().status.success());
    host.ok(&["wait", "2M", "4M", "--timeout", "0"]);
    host.ok(&["--undo"]);
}

#[test]
fn looks_come_one_a_line_with_who_has_the_pages() {
    let Some(host) = Host::take("looks_come_one_a_line_with_who_has_the_pages") else {
        return;
    };
    host.ok(&["grow", "2M", "6"]);
    let user = User::of(now().free - now().reserved, 2).unwrap();
    let looks = host.ok(&[
        "watch",
        "2M",
        "--count",
        "3",
        "--interval",
        "0.05",
        "--json",
    ]);
    let looks: Vec<serde_json::Value> = looks
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(looks.len(), 3);
    assert!(
        looks[2]["holders"]
            .as_array()
            .unwrap()
            .iter()
            .any(|h| h["pid"] == user.pid())
    );
    let text = host.ok(&["watch", "2M", "--count", "1"]);
    assert!(
        text.contains("SECONDS PERSISTENT ") && text.contains(&user.pid().to_string()),
        "{text}"
    );
    drop(user);
    host.ok(&["--undo"]);
}
