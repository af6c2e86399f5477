//! Processes that jumbo refuses to end.

use std::process::{Command, Output};

use crate::victim::{Installed, NOBODY, Victim, is_root, jumbo, kill, row, skip, until};

#[track_caller]
fn assert_refused(output: &Output, why: &str) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        message.contains(why) && output.stdout.is_empty(),
        "{message}"
    );
}

#[test]
fn a_process_that_is_not_there() {
    let output = jumbo(&[], 4_194_305).output().unwrap();
    assert_refused(&output, "cannot end 4194305: no such process");
}

#[test]
fn itself() {
    let script = "exec \"$0\" kill $$";
    let output = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_jumbo")])
        .output()
        .unwrap();
    assert_refused(&output, "that is this command itself");
}

#[test]
fn init_and_threads_of_the_kernel() {
    assert_refused(
        &jumbo(&["-s", "WINCH"], 1).output().unwrap(),
        "the init process",
    );
    if std::fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n") {
        assert_refused(&jumbo(&[], 2).output().unwrap(), "a thread of the kernel");
    }
}

#[test]
fn one_thread_of_a_process() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let victim = Victim::start("threading.Thread(target=time.sleep, args=(600,)).start()");
    let tasks = std::fs::read_dir(format!("/proc/{}/task", victim.pid())).unwrap();
    let mut tids = tasks.map(|task| {
        task.unwrap()
            .file_name()
            .into_string()
            .unwrap()
            .parse()
            .unwrap()
    });
    let other: u32 = tids.find(|tid| *tid != victim.pid()).unwrap();
    let output = jumbo(&[], other).output().unwrap();
    assert_refused(&output, &format!("a thread of process {}", victim.pid()));
}

#[test]
fn wrong_usage_is_2() {
    for arguments in [
        &["0"][..],
        &[],
        &["-s", "NONE", "1"],
        &["-t", "-1", "1"],
        &["-s", "0", "1"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_jumbo"))
            .arg("kill")
            .args(arguments)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn a_zombie_has_ended_already() {
    let mut child = Command::new("true").spawn().unwrap();
    until("its end", || {
        crate::victim::status(child.id(), "State").starts_with('Z')
    });
    let (row, code) = kill(&[], child.id());
    assert_eq!(
        (code, row["outcome"].as_str()),
        (Some(0), Some("had-ended")),
        "{row}"
    );
    let page = jumbo(&[], child.id()).output().unwrap();
    let page = String::from_utf8(page.stdout).unwrap();
    assert!(
        page.contains(&format!("its parent {} has not", std::process::id())),
        "{page}"
    );
    child.wait().unwrap();
}

#[test]
fn another_user_s_process() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    if !is_root() {
        return skip(
            "another_user_s_process",
            "only root can become another user",
        );
    }
    let victim = Victim::plain();
    let installed = Installed::new();
    let pid = victim.pid().to_string();
    let output = installed.as_nobody().args(["kill", &pid]).output().unwrap();
    assert_refused(&output, "not permitted\nhint: ");
}

#[test]
fn without_root_one_s_own_is_ended() {
    use std::os::unix::process::CommandExt as _;
    if crate::needs::command("python3").is_none() {
        return;
    }
    if !is_root() {
        return skip("without_root", "only root can become another user");
    }
    let installed = Installed::new();
    let mut command = Command::new("python3");
    command
        .args(["-c", &crate::victim::with_memory("")])
        .uid(NOBODY)
        .gid(NOBODY);
    let victim = Victim::of(&mut command);
    let pid = victim.pid().to_string();
    let output = installed
        .as_nobody()
        .args(["kill", "--json", &pid])
        .output()
        .unwrap();
    let row = row(&output);
    assert_eq!(
        (output.status.code(), row["outcome"].as_str()),
        (Some(0), Some("ended")),
        "{row}"
    );
    let reason = row["gain"]["reason"].as_str();
    assert!(
        reason.is_none_or(|reason| reason.contains("faster")),
        "{row}"
    );
}

/// Beyond the limit of descriptors the reason is named: a live process is not "no such process".
#[test]
fn more_processes_than_descriptors() {
    let mut sleepers: Vec<_> = (0..12)
        .map(|_| Command::new("sleep").arg("600").spawn().unwrap())
        .collect();
    let pids: Vec<_> = sleepers.iter().map(|one| one.id().to_string()).collect();
    let jumbo = |limit: &str, command: &str| {
        let script = format!("ulimit {limit}; exec \"$0\" \"$@\"");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script, env!("CARGO_BIN_EXE_jumbo"), command]);
        shell.args(&pids).output().unwrap()
    };
    let hint = "Too many open files (os error 24)\nhint: raise";
    assert_refused(&jumbo("-n 4", "promote"), hint);
    let output = jumbo("-n 10", "kill");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains(hint), "{message}");
    assert!(!message.contains("no such process"), "{message}");
    // The soft limit alone is raised.
    assert_eq!(jumbo("-S -n 10", "kill").status.code(), Some(0));
    sleepers.iter_mut().for_each(|one| _ = one.wait().unwrap());
}
