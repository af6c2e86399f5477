//! The kernel's pool by demand, `wait` and `watch`, with programs that request pages.

use crate::support::{Host, PageUser, Snapshot, assert_unchanged, now, stderr, stdout, until};

#[test]
fn a_pool_follows_demand_by_its_overcommit_limit() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let Some(host) = Host::take("a_pool_follows_demand_by_its_overcommit_limit") else {
        return;
    };
    let (before, records) = (Snapshot::now(), host.records());
    host.ok(&["set", "2M", "--persistent", "4", "--overcommit", "60"]);
    let user = PageUser::of(40, 10).unwrap();
    assert_eq!((now().persistent(), now().surplus), (4, 36));
    let beyond = PageUser::of(30, 0).err().unwrap();
    assert!(beyond.contains("Cannot allocate memory"), "{beyond}");
    drop(user);
    until("the surplus pages' return", || {
        (now().total == 4 && now().surplus == 0).then_some(())
    });
    host.ok(&["set", "2M", "--undo"]);
    assert_unchanged(&before, "undone");
    assert_eq!(host.records(), records);
}

#[test]
fn waiting_ends_when_the_pages_are_free() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let Some(host) = Host::take("waiting_ends_when_the_pages_are_free") else {
        return;
    };
    host.ok(&["grow", "2M", "6"]);
    let all = now().free - now().reserved;
    let user = PageUser::of(all, 1).unwrap();
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
