//! Tests of programs that attack a command that inspects them.

use std::fs::{self, File};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::support::{
    Compiled, OUTSIDE_CALLS, Program, Running, Source, build, compile, host, sample, wait,
};

const REAPER_COMM: &str = "jumbo-reaper";

/// Timeout of a command on a slow machine under load.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// A hostile program and its child, which poses as a reaper.
struct Hostile {
    running: Running,
    impostor: Pid,
    _files: (Compiled, tempfile::TempDir),
}

impl Hostile {
    fn start(name: &str, way: &[&str], user: Option<&str>) -> Self {
        let files = (
            compile(&[Source::C("hostile", &[])]),
            tempfile::tempdir().unwrap(),
        );
        let folder = (!way.is_empty()).then(|| files.1.path().to_str().unwrap());
        let mut program = Program::new(files.0.path("hostile"));
        if let Some(user) = user {
            program = program.user(user);
        }
        let program = program.arg(name).args(way).args(folder);
        let running = program.start_plain();
        let ready = running.wait_for_line("ready ");
        let impostor = ready.split(' ').nth(1).and_then(|pid| pid.parse().ok());
        Self {
            running,
            impostor: impostor.and_then(Pid::from_raw).unwrap(),
            _files: files,
        }
    }

    /// Runs a jumbo command; returns its status and output. The assertion is that it ends.
    #[track_caller]
    fn jumbo(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let printed = tempfile::NamedTempFile::new().unwrap();
        let output = || File::options().append(true).open(printed.path()).unwrap();
        let mut command = Command::new(build::jumbo());
        command.args(arguments).stdout(output()).stderr(output());
        let mut child = command.spawn().unwrap();
        // Not killed on timeout: the hostile program must not be able to block the command.
        let status = wait::until(&format!("the end of {command:?}"), COMMAND_TIMEOUT, || {
            child.try_wait().unwrap()
        });
        let printed = fs::read(printed.path()).unwrap();
        (
            status.code(),
            String::from_utf8_lossy(&printed).into_owned(),
        )
    }
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn no_command_waits_for_a_process_that_holds_its_memory_back() {
    if !host::root() {
        return;
    }
    for way in ["mapped", "locked"] {
        let hostile = Hostile::start(REAPER_COMM, &[way], None);
        let pid = hostile.running.pid().to_string();
        let impostor = hostile.impostor.to_string();
        let name = "hostile";

        let (status, printed) = hostile.jumbo(&["status", "-p", &pid]);
        assert_eq!(status, Some(0), "{printed}");
        let why = match way {
            "mapped" => "is not the library of this command",
            _ => "the process holds it back",
        };
        assert!(
            printed.contains("Not shown") && printed.contains(why),
            "{printed}"
        );
        for command in [
            &["status"][..],
            &["status", "--json", "--top=1000"],
            &["status", "-p", name],
            &["status", "-p", &impostor],
            &["doctor"],
            &["export"],
            &["top", "--once"],
            &["wait", "--timeout=1"],
            &["wait", "--timeout=0", &impostor],
            &["kill", "--timeout=1", "--signal=CONT", &impostor],
            &["kill", "--signal=KILL", &pid],
        ] {
            hostile.jumbo(command);
        }
    }
}

#[test]
fn who_looks_like_a_reaper_is_not_waited_for_and_can_be_killed() {
    let users: &[Option<&str>] = match rustix::process::geteuid().is_root() {
        true => &[None, Some("nobody")],
        false => &[None],
    };
    for user in users {
        let hostile = Hostile::start(REAPER_COMM, &[], *user);
        let impostor = hostile.impostor.to_string();
        for (command, list) in [
            (&["wait", "--json", "--timeout=0"][..], "/waited_for"),
            (&["status", "--json"], "/tasks/siblings"),
        ] {
            let page = hostile.jumbo(command).1;
            let page: serde_json::Value = serde_json::from_str(&page).unwrap();
            let reapers = page.pointer(list).unwrap().as_array().unwrap();
            let pid = hostile.impostor.as_raw_nonzero().get();
            assert!(reapers.iter().all(|row| row["pid"] != pid), "{reapers:?}");
        }
        let (status, printed) = hostile.jumbo(&["kill", "--signal=KILL", &impostor]);
        assert_eq!(status, Some(0), "{printed}");
        wait::until("the impostor's end", wait::TIMEOUT, || {
            let path = format!("/proc/{impostor}/stat");
            let stat = fs::read_to_string(path).unwrap_or_default();
            let gone = test_kill_process(hostile.impostor).is_err() || stat.contains(") Z ");
            gone.then_some(())
        });
    }
}

/// A process chooses its name; the reader has a terminal.
#[test]
fn the_name_of_a_process_does_not_drive_the_terminal() {
    let hostile = Hostile::start("\x1b[31mred\x07", &[], None);
    let impostor = hostile.impostor.to_string();
    for command in [
        &["kill", "--timeout=0", "--signal=CONT", &impostor][..],
        &["kill", "--timeout=0", "--signal=CONT", &impostor, "--json"],
        &["wait", "--timeout=0", &impostor],
        &["status", "-p", &impostor],
        &["status", "--top=1000"],
        &["kill", "--signal=KILL", &impostor],
    ] {
        let (_, printed) = hostile.jumbo(command);
        let drives = |byte: char| byte.is_control() && byte != '\n';
        assert!(!printed.contains(drives), "{command:?}: {printed:?}");
        assert!(
            printed.contains("red") || command[0] == "status",
            "{printed}"
        );
    }
}

/// The program can write its counts: a run ends like the program, whatever the counts are.
#[test]
fn a_program_that_overwrites_its_counts_ends_as_it_would() {
    let files = compile(&[Source::C("scribbles", &[])]);
    for fill in ["0", "0xff", "0x80", "0x7f", "1", "random"] {
        let program = Program::new(files.path("scribbles")).arg(fill);
        for report in ["--report", "--report=full", "--report=json"] {
            let ran = program.jumbo_with(&[report, "--reaper=off"]);
            assert!(ran.stdout.contains("filled 1"), "{ran:?}");
            assert_eq!(ran.shell_status(), 7, "{fill} {report}: {ran:?}");
        }
        let ran = program.jumbo_with(&["--pool", "64M", "--report=full"]);
        assert_eq!(ran.shell_status(), 7, "{fill} --pool: {ran:?}");
    }
}

/// A bare system call changes one thread: a thread of jumbo must not keep the privilege that the
/// program dropped.
#[test]
fn no_thread_keeps_a_user_or_cpus_that_the_program_left_by_a_bare_system_call() {
    let Some(_held) = host::with_thp().filter(|_| host::root()) else {
        return;
    };
    let files = compile(&[Source::C("raw_user", &[])]);
    for change in ["user", "idle", "cpus"] {
        let program = Program::new(files.path("raw_user")).arg(change);
        let ran = program.jumbo_with(&["--reaper=off"]).ok();
        assert!(ran.stdout.contains("watched 1\n"), "{change}: {ran:?}");
        assert!(
            ran.stdout.contains("without capabilities 1\n"),
            "{change}: {ran:?}"
        );
        assert!(ran.stdout.contains("left behind 0\n"), "{change}: {ran:?}");
    }
}

/// The process that scans the memory has root's user after the program has dropped it by a bare
/// system call, until its next comparison. Code that the program puts into it can use no call of
/// root's.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_program_that_dropped_root_gains_nothing_by_the_process_beside_it() {
    let Some(_held) = host::with_thp().filter(|_| host::root()) else {
        return;
    };
    let files = compile(&[Source::C("escalate", &[])]);
    let attack = |name: &str| {
        let program = Program::new(files.path("escalate"))
            .args(["watch", name])
            .installed();
        let ran = program.jumbo_with(&["--reaper=off"]).ok();
        assert_ne!(ran.number("ran"), 0, "{name}: {ran:?}");
        assert_eq!(ran.number("returned"), 1, "{name}: {ran:?}");
        ran.number("refused")
    };
    // A permitted call, as proof that results are visible.
    assert_eq!(attack("futex"), 0);
    for name in sample(OUTSIDE_CALLS, 5) {
        assert_eq!(attack(name), 1, "{name} was answered");
    }
}

/// Sends SIGKILL to the server of a file system.
struct Server(Pid);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

#[test]
fn a_process_that_holds_its_memory_map_holds_no_command() {
    if host::command("python3").is_none() {
        return;
    }
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let program = Program::new("/usr/bin/python3").args(["-c", include_str!("programs/held.py")]);
    let program = program.arg(folder.path()).around(["unshare", "--mount"]);
    let running = program.start_plain();
    let line = running.wait_for_line("");
    let Some(server) = line.strip_prefix("ready ") else {
        host::skip("there is no FUSE");
        return;
    };
    let server = Server(Pid::from_raw(server.parse().unwrap()).unwrap());
    running.wait_for_line("held");
    let pid = running.pid().as_raw_nonzero().to_string();
    let command = |words: &[&str]| {
        Program::new(build::jumbo())
            .args(words)
            .arg(&pid)
            .start_plain()
    };
    // A collapse waits for the lock, and no signal ends its wait.
    let killed = command(&["promote"]);
    std::thread::sleep(Duration::from_millis(300));
    killed.signal(Signal::KILL);
    assert_eq!(killed.wait().shell_status(), 128 + 9);
    // From now on readers of the lock wait too, behind that collapse.
    for words in [&["promote"][..], &["promote", "--undo"], &["status", "-p"]] {
        let started = Instant::now();
        let ran = command(words).wait();
        assert!(started.elapsed() < COMMAND_TIMEOUT, "{words:?} {ran:?}");
        let all = format!("{}{}", ran.stdout, ran.stderr);
        assert!(all.contains("holds"), "{words:?} {ran:?}");
    }
    drop(server);
    wait::until("the end", wait::TIMEOUT, || {
        running.has_ended().then_some(())
    });
}
