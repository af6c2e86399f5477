//! The pool of this host.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use crate::support::{Host, PageUser, Snapshot, assert_unchanged, now, stderr, until};

#[test]
fn a_pool_grows_shrinks_and_is_put_back() {
    let Some(host) = Host::take("a_pool_grows_shrinks_and_is_put_back") else {
        return;
    };
    let before = Snapshot::now();
    let had = before.pool.persistent();
    let set = host.json(&[
        "set",
        "2M",
        "--persistent",
        &(had + 8).to_string(),
        "--overcommit",
        "4",
        "--json",
    ]);
    assert_eq!(set["after"]["total"], had + 8);
    assert_eq!((now().persistent(), now().overcommit), (had + 8, 4));
    host.ok(&["grow", "2M", "8M"]);
    assert_eq!(now().persistent(), had + 12);
    host.ok(&["shrink", "2M", "5"]);
    assert_eq!((now().persistent(), host.records()), (had + 7, 2));
    let same = host.ok(&["set", "2M", "--persistent", &(had + 7).to_string()]);
    assert!(same.contains("nothing to do"), "{same}");
    for _ in 0..2 {
        host.ok(&["--undo"]);
    }
    assert_unchanged(&before, "undone");
    assert_eq!(host.records(), 0);
}

#[test]
fn pages_in_use_become_surplus_and_drain() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let Some(host) = Host::take("pages_in_use_become_surplus_and_drain") else {
        return;
    };
    let had = now().persistent();
    host.ok(&["grow", "2M", "6"]);
    let all = now().free - now().reserved;
    let user = PageUser::of(all, 2).unwrap();
    let dry = host.json(&["set", "2M", "--persistent", "0", "--dry-run", "--json"]);
    assert_eq!(dry["effect"]["turned_surplus"], had + 6);
    let page = host.json(&["show", "2M", "--json"]);
    let mine = page["holders"]["processes"].as_array().unwrap();
    let mine = mine
        .iter()
        .find(|holder| holder["pid"] == user.pid())
        .unwrap();
    assert_eq!(
        (&mine["private"], &mine["untouched"]),
        (&(2 * (2 << 20)).into(), &((all - 2) * (2 << 20)).into())
    );

    host.ok(&["set", "2M", "--persistent", "0"]);
    assert_eq!((now().persistent(), now().surplus), (0, had + 6));
    drop(user);
    until("the pages to drain", || (now().total == 0).then_some(()));
    host.ok(&["set", "2M", "--undo"]);
    assert_eq!(now().persistent(), had + 6);
    host.ok(&["set", "2M", "--undo"]);
    assert_eq!(now().persistent(), had);
}

#[test]
fn a_gigantic_page_comes_or_the_reason_does() {
    let Some(host) = Host::take("a_gigantic_page_comes_or_the_reason_does") else {
        return;
    };
    let pool = "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages";
    let Ok(before) = fs::read_to_string(pool) else {
        crate::support::skip(
            "a_gigantic_page_comes_or_the_reason_does",
            "no 1 GiB pages here",
        );
        return;
    };
    let grown = host.run(&["grow", "1G", "1"]);
    match grown.status.code() {
        Some(0) => assert_ne!(fs::read_to_string(pool).unwrap(), before),
        Some(3) => assert!(stderr(&grown).contains("one aligned piece"), "{grown:?}"),
        other => panic!("{other:?}: {grown:?}"),
    }
    host.ok(&["--undo"]);
    assert_eq!(fs::read_to_string(pool).unwrap(), before);
}

#[test]
fn another_user_sees_the_pools_and_cannot_change_them() {
    let Some(_host) = Host::take("another_user_sees_the_pools_and_cannot_change_them") else {
        return;
    };
    // Every user can reach it. cp(1) writes it, so that no child inherits a descriptor open for
    // writing.
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    let copy = folder.path().join("jumbo");
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_jumbo"))
        .arg(&copy)
        .status()
        .unwrap();
    assert!(copied.success());
    let run = |arguments: &[&str]| {
        Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&copy)
            .arg("pool")
            .args(arguments)
            .env_remove("XDG_RUNTIME_DIR")
            .output()
            .unwrap()
    };
    let before = Snapshot::now();
    let refused = run(&["set", "2M", "--persistent", "64"]);
    assert_eq!(refused.status.code(), Some(1));
    let text = stderr(&refused);
    assert!(
        text.contains("hint: changing the kernel's settings takes root"),
        "{text}"
    );
    let refused = stderr(&run(&["grow", "2M", "1"]));
    assert!(
        refused.contains("nr_hugepages: Permission denied"),
        "{refused}"
    );
    assert!(run(&["show"]).status.success());
    assert!(run(&["grow", "2M", "1", "--dry-run"]).status.success());
    assert_unchanged(&before, "untouched");
}

#[test]
fn a_read_only_sys_is_said() {
    let Some(host) = Host::take("a_read_only_sys_is_said") else {
        return;
    };
    let script = "mount -o remount,ro,bind /sys && exec \"$0\" pool grow 2M 1";
    let output = host
        .command(&["sh", "-c", script, env!("CARGO_BIN_EXE_jumbo")])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(
        text.contains("Read-only file system") && text.contains("on the host"),
        "{text}"
    );
}

#[test]
fn a_change_that_cannot_be_recorded_as_done_is_put_back() {
    let Some(host) = Host::take("a_change_that_cannot_be_recorded_as_done_is_put_back") else {
        return;
    };
    let before = Snapshot::now();
    // Inodes for the folders, the lock and one record, none for the next record.
    let script = "mkdir -p /run/jumbo && mount -t tmpfs -o nr_inodes=5,mode=700 none /run/jumbo \
                  && exec \"$0\" pool grow 2M 4";
    let output = host
        .command(&["sh", "-c", script, env!("CARGO_BIN_EXE_jumbo")])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        stderr(&output),
        "jumbo: cannot write /run/jumbo/knobs/pool-2M/changes.toml: \
         No space left on device (os error 28); everything was put back\n"
    );
    assert_unchanged(&before, "put back");
}

#[test]
fn what_a_plan_says_is_what_the_kernel_does() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let Some(host) = Host::take("what_a_plan_says_is_what_the_kernel_does") else {
        return;
    };
    let seed = std::env::var("JUMBO_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    // Shown if the test fails.
    println!("JUMBO_TEST_SEED={seed}");
    let mut state = seed;
    // Knuth's MMIX generator; its high bits are random enough here.
    let mut below = |bound: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % bound
    };
    let mut users = Vec::new();
    for _ in 0..40 {
        match below(4) {
            0 => drop(users.pop()),
            1 => {
                let room =
                    now().free - now().reserved + now().overcommit.saturating_sub(now().surplus);
                let mapped = 1 + below(room.max(1));
                users.extend(PageUser::of(mapped, below(mapped + 1)));
            }
            _ => {
                let before = now();
                let [persistent, overcommit] = [below(24), below(8)].map(|pages| pages.to_string());
                let outcome = host.json(&[
                    "set",
                    "2M",
                    "--persistent",
                    &persistent,
                    "--overcommit",
                    &overcommit,
                    "--json",
                ]);
                let of = |name: &str| outcome["effect"][name].as_u64().unwrap();
                let after = now();
                let seen = (after.total, after.surplus, after.persistent().to_string());
                let total = before.total + of("made") - of("freed");
                let surplus = before.surplus + of("turned_surplus") - of("adopted");
                assert_eq!(seen, (total, surplus, persistent), "{before:?} {outcome}");
            }
        }
    }
}
