//! Environment, arguments, descriptors, signal dispositions and process ID of the program.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use crate::support::{MODES, Mode, jumbo, library, run, stdout};

fn environment(command: &mut Command) -> BTreeMap<String, String> {
    let printed = stdout(command.args(["env", "-0"]));
    let entries = printed.split_terminator('\0');
    entries
        .map(|entry| entry.split_once('=').unwrap())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

#[test]
fn the_environment_is_kept_and_added_to() {
    let library = library().to_str().unwrap();
    for mode in MODES {
        let mut with = environment(run(mode).env("LINES_OF", "one\ntwo").env("EMPTY", ""));
        assert_eq!(with.remove("LD_PRELOAD").as_deref(), Some(library));
        let orders = with.remove("JUMBO_ORDERS").unwrap();
        assert!(
            orders.contains("heap=1") && orders.contains("follow=1"),
            "{orders}"
        );
        assert_eq!(orders.contains("ledger="), mode == Mode::Parent, "{orders}");
        let without = environment(
            Command::new("env")
                .env("LINES_OF", "one\ntwo")
                .env("EMPTY", ""),
        );
        assert_eq!(with, without);
    }
}

#[test]
fn what_the_user_set_stays() {
    let users = "/lib/x86_64-linux-gnu/libc.so.6";
    let with = environment(
        run(Mode::Exec)
            .env("LD_PRELOAD", users)
            .env("GLIBC_TUNABLES", "glibc.malloc.arena_max=2"),
    );
    let expected = format!("{users}:{}", library().display());
    assert_eq!(with["LD_PRELOAD"], expected);
    assert_eq!(with["GLIBC_TUNABLES"], "glibc.malloc.arena_max=2");
}

#[test]
fn print_env_has_the_variables_that_the_program_gets() {
    let set_by_user = |jumbo: &mut Command, word| {
        stdout(
            jumbo
                .env("LD_PRELOAD", "/lib/x86_64-linux-gnu/libc.so.6")
                .args(["run", "--max-waste=7"])
                .args(word),
        )
    };
    let printed = set_by_user(&mut jumbo(), &["--print-env"][..]);
    let got = set_by_user(&mut jumbo(), &["env"][..]);
    for line in printed.lines() {
        assert!(got.lines().any(|other| other == line), "{line} of {got}");
    }
    let names = printed.lines().map(|line| line.split('=').next().unwrap());
    let names: Vec<_> = names.collect();
    assert_eq!(names, ["LD_PRELOAD", "JUMBO_ORDERS"]);

    let print = || {
        let mut print = jumbo();
        print.args(["run", "--print-env"]);
        print
    };
    assert_eq!(stdout(print().env("JUMBO", "off")), "");
    assert_eq!(stdout(print().arg("--json").env("JUMBO", "off")), "{}\n");
    for options in [&[][..], &["--max-waste=2", "--heap=glibc"]] {
        let json = stdout(print().arg("--json").args(options));
        let variables: BTreeMap<String, String> = serde_json::from_str(&json).unwrap();
        let lines = variables
            .iter()
            .map(|(name, value)| format!("{name}={value}\n"));
        let printed = stdout(print().args(options));
        assert!(lines.clone().all(|line| printed.contains(&line)), "{json}");
        assert_eq!(lines.count(), printed.lines().count());
        // The second run starts with these variables set.
        assert_eq!(
            stdout(print().arg("--json").args(options).envs(&variables)),
            json
        );
    }
    let newline = print().env("LD_PRELOAD", "a\nb").output().unwrap();
    assert_eq!(newline.status.code(), Some(125));
    assert!(newline.stdout.is_empty());
    let unknown = print().arg("--profile=unknown").output().unwrap();
    assert_eq!(unknown.status.code(), Some(125));
}

#[test]
fn jumbo_under_jumbo_is_loaded_once() {
    let jumbo = env!("CARGO_BIN_EXE_jumbo");
    let with = environment(run(Mode::Exec).args([jumbo, "run", "--max-waste=9", "--"]));
    assert_eq!(with["LD_PRELOAD"], library().to_str().unwrap());
    assert!(with["JUMBO_ORDERS"].contains("max_waste=9"));
}

#[test]
fn of_a_variable_given_twice_the_last_counts() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let python = "import ctypes, sys\n\
        words = [word.encode() for word in sys.argv[1:]]\n\
        array = ctypes.c_char_p * (len(words) + 1)\n\
        given = (ctypes.c_char_p * 4)(b'LD_PRELOAD=', b'LD_PRELOAD=libc.so.6', b'PATH=/usr/bin:/bin')\n\
        ctypes.CDLL(None).execve(words[0], array(*words), given)";
    let mut command = Command::new("python3");
    command.args(["-c", python, env!("CARGO_BIN_EXE_jumbo")]);
    let expected = format!("LD_PRELOAD=\0LD_PRELOAD=libc.so.6:{}", library().display());
    let printed = stdout(command.args(["run", "--quiet", "cat", "/proc/self/environ"]));
    assert!(printed.starts_with(&expected), "{printed}");
}

#[test]
fn a_folder_is_no_profile_and_one_that_cannot_be_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("node")).unwrap();
    let mut command = jumbo();
    command.current_dir(&folder).env("XDG_CONFIG_HOME", "");
    let with = environment(command.args(["run", "--profile", "node"]));
    assert!(with.contains_key("JUMBO_ORDERS"));

    std::fs::create_dir_all(folder.path().join("jumbo/profiles/node.toml")).unwrap();
    let mut command = jumbo();
    command.env("XDG_CONFIG_HOME", folder.path());
    let output = crate::support::output(command.args(["run", "--profile", "node", "true"]));
    let message = crate::support::stderr(&output);
    assert_eq!(output.status.code(), Some(125), "{message}");
    assert!(message.contains("node.toml"), "{message}");
}

#[test]
fn a_heap_is_named_and_one_that_is_gone_has_a_hint() {
    for (heap, order) in [("on", "heap=1"), ("glibc", "heap=glibc"), ("off", "heap=0")] {
        let with = environment(jumbo().args(["run", "--quiet", "--heap", heap]));
        assert!(with["JUMBO_ORDERS"].contains(order), "{heap}");
    }
    let output = crate::support::output(jumbo().args(["run", "--heap=mimalloc", "true"]));
    let message = crate::support::stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(
        message.contains("hint: ") && message.contains("jumbo's own heap serves all sizes"),
        "{message}"
    );
}

#[test]
fn a_profile_is_read_and_the_command_line_wins() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("p.toml");
    std::fs::write(&profile, "maps = \"off\"\nmax-waste = 3\n").unwrap();
    let profile = profile.to_str().unwrap();
    let with = environment(jumbo().args(["run", "--profile", profile, "--max-waste=4"]));
    let orders = &with["JUMBO_ORDERS"];
    assert!(
        orders.contains("maps=0") && orders.contains("max_waste=4"),
        "{orders}"
    );

    std::fs::write(profile, "maps = \"off\"\nmax-wast = 3\n").unwrap();
    let output = crate::support::output(jumbo().args(["run", "--profile", profile, "true"]));
    let message = crate::support::stderr(&output);
    assert_eq!(output.status.code(), Some(125), "{message}");
    assert!(
        message.contains("line 2") && message.contains("'--max-waste'"),
        "{message}"
    );
}

#[test]
fn the_profiles_that_come_with_jumbo_can_be_used() {
    for name in ["node", "postgresql"] {
        let with = environment(
            jumbo()
                .args(["run", "--profile", name])
                .env("HOME", "/nonexistent"),
        );
        assert!(with.contains_key("JUMBO_ORDERS"), "{name}");
    }
}

#[test]
fn arguments_are_passed_as_typed() {
    for mode in MODES {
        let printed = stdout(run(mode).args(["cat", "/proc/self/cmdline"]));
        assert_eq!(printed, "cat\0/proc/self/cmdline\0", "{mode:?}");
    }
}

#[test]
fn without_a_report_jumbo_becomes_the_program() {
    let mut command = run(Mode::Exec);
    let child = command
        .args(["sh", "-c", "echo $$"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let printed = child.wait_with_output().unwrap().stdout;
    assert_eq!(String::from_utf8(printed).unwrap(), format!("{pid}\n"));
}

/// Prints the signal state and the open descriptors, except for the parent death signal.
const PRINT_STATE: &str = "grep ^Sig /proc/self/status | grep -v SigQ; ls /proc/self/fd";

/// Runs `PRINT_STATE` below `setting`, a shell fragment that ends in `exec`, directly and under
/// jumbo.
fn same_below(setting: &str) {
    let direct =
        stdout(Command::new("bash").args(["-c", &format!("{setting} sh -c '{PRINT_STATE}'")]));
    for options in ["--quiet", "--report-file /dev/null"] {
        let jumbo = env!("CARGO_BIN_EXE_jumbo");
        let script = format!("{setting} {jumbo} run {options} -- sh -c '{PRINT_STATE}'");
        let with = stdout(Command::new("bash").args(["-c", &script]));
        assert_eq!(with, direct, "{setting} {options}");
    }
}

#[test]
fn descriptors_and_dispositions_are_as_without_us() {
    same_below("exec");
    same_below("trap '' PIPE; exec");
    same_below("trap '' INT QUIT HUP CHLD; exec");
    // Closed descriptors stay closed; open ones stay open.
    same_below("exec 9</dev/null; exec");
    same_below("exec <&-; exec");
    same_below("exec 2>&-; exec");
    same_below("exec <&- 2>&-; exec");
}

#[test]
fn blocked_signals_stay_blocked() {
    let perl =
        "use POSIX; sigprocmask(SIG_BLOCK, POSIX::SigSet->new(SIGUSR1, SIGALRM)); exec @ARGV";
    let look = ["grep", "^SigBlk", "/proc/self/status"];
    let direct = stdout(Command::new("perl").args(["-e", perl]).args(look));
    for options in ["--quiet", "--report-file=/dev/null"] {
        let mut command = Command::new("perl");
        command.args([
            "-e",
            perl,
            env!("CARGO_BIN_EXE_jumbo"),
            "run",
            options,
            "--",
        ]);
        assert_eq!(stdout(command.args(look)), direct, "{options}");
    }
}

#[test]
fn a_pipeline_ends_when_its_reader_does() {
    for mode in MODES {
        let mut command = run(mode);
        let mut yes = command.arg("yes").stdout(Stdio::piped()).spawn().unwrap();
        drop(yes.stdout.take());
        let status = yes.wait().unwrap();
        use std::os::unix::process::ExitStatusExt as _;
        assert_eq!(
            status.signal(),
            Some(13),
            "{mode:?}: SIGPIPE is not ignored"
        );
    }
}

/// `jumbo unit --verify` with a systemctl that names a main process.
#[test]
fn a_unit_is_verified_by_its_main_process() {
    let folder = tempfile::tempdir().unwrap();
    let verified = |pid: u32| {
        let systemctl = folder.path().join("systemctl");
        let script = format!("#!/bin/sh\necho LoadState=loaded\necho MainPID={pid}\n");
        std::fs::write(&systemctl, script).unwrap();
        std::fs::set_permissions(&systemctl, std::fs::Permissions::from_mode(0o755)).unwrap();
        let path = format!("{}:/usr/bin:/bin", folder.path().display());
        let output = jumbo()
            .args(["unit", "--verify", "some"])
            .env("PATH", path)
            .output()
            .unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code(), text)
    };
    let (status, text) = verified(std::process::id());
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("has no libjumbo_preload.so"), "{text}");
    assert!(verified(0).1.contains("has no main process"));
    // Without a report jumbo becomes the program, which says so when it has started.
    let mut covered = jumbo()
        .args(["run", "--quiet", "sh", "-c", "echo started; read line"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut started = [0; 8];
    covered
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut started)
        .unwrap();
    let (status, text) = verified(covered.id());
    drop(covered.stdin.take());
    covered.wait().unwrap();
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("is on jumbo"), "{text}");
}
