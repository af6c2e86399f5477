//! Tests of `jumbo promote`: huge pages for running programs, whatever they do meanwhile.

use rustix::process::{Pid, Signal};
use serde_json::Value;

use crate::pool::group::Group;
use crate::support::smaps::resident;
use crate::support::{MIB, Program, Ran, Running, Source, build, compile, host, wait};

/// A program that answers each line of input with a digest of its data.
const ANSWERING: &str = "
import sys
kept = [bytes([i % 251]) * (1000 + i % 7) for i in range(int(sys.argv[1]) << 10)]
print('ready', flush=True)
for line in sys.stdin:
    at = int(line)
    print('answer', at, sum(kept[at % len(kept)]), flush=True)
    if at < 0:
        kept += [bytes([i % 251]) * (1000 + i % 7) for i in range(-at << 10)]
        print('grown', flush=True)
";

/// A path that every user may execute.
const PYTHON: &str = "/usr/bin/python3";

/// Runs `jumbo promote`.
fn promote(arguments: &[&str]) -> Ran {
    Program::new("true").jumbo_itself(&[&["promote"], arguments].concat())
}

/// Returns the JSON outcome of the one process.
#[track_caller]
fn promoted(arguments: &[&str]) -> Value {
    let ran = promote(&[&["--json"], arguments].concat());
    let page: Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    page["processes"][0].clone()
}

fn answers(mib: u64) -> Program {
    Program::new(PYTHON).args(["-c", ANSWERING, &mib.to_string()])
}

fn id(running: &Running) -> String {
    running.pid().as_raw_nonzero().to_string()
}

fn status(pid: Pid, name: &str) -> String {
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.unwrap_or_default().trim().to_owned()
}

/// Checks that every thread runs and that no process traces it.
#[track_caller]
fn assert_untouched(pid: Pid) {
    let folder = format!("/proc/{}/task", pid.as_raw_nonzero());
    for thread in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(thread.unwrap().path().join("status"));
        // A thread may end meanwhile.
        let text = text.unwrap_or_default();
        let is = |line: &str| text.contains(line);
        assert!(!is("State:\tt") && !is("State:\tT"), "{text}");
        assert!(text.is_empty() || is("TracerPid:\t0\n"), "{text}");
    }
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

#[test]
fn an_interpreter_is_on_huge_pages_while_it_answers() {
    if host::command("python3").is_none() {
        return;
    }
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let mut running = answers(256).start_plain();
    running.wait_for_line("ready");
    let before = resident(running.pid());
    let plan = promoted(&["--dry-run", &id(&running)]);
    assert_eq!(
        resident(running.pid()).huge,
        before.huge,
        "a dry run changed it"
    );
    let command = Program::new("true").itself();
    let command = command.args(["promote", "--json", "--rate", "512M", &id(&running)]);
    let promoting = command.start_plain();
    let mut asked = 0;
    while !promoting.has_ended() || asked < 20 {
        running.write(&format!("{asked}\n"));
        let sum = (asked % 251) * (1000 + asked % 7);
        running.wait_for_line(&format!("answer {asked} {sum}"));
        asked += 1;
    }
    let ended = promoting.wait().ok();
    let page: Value = serde_json::from_str(&ended.stdout).unwrap();
    let done = &page["processes"][0];
    let after = resident(running.pid());
    assert!(after.huge_share() >= 0.9, "{after:?}\n{ended:?}");
    if !host::thp_is_always() {
        assert!(before.huge_share() < 0.1, "{before:?}");
        assert!(
            number(&done["outcome"]["obtained"]) >= 200 * MIB,
            "{ended:?}"
        );
    }
    let (gain, planned) = (
        number(&plan["plan"]["gain"]),
        number(&done["outcome"]["planned"]),
    );
    assert!(gain.abs_diff(planned) <= 8 * MIB, "{plan}\n{ended:?}");
    // The bound limits the growth of memory.
    let bound = number(&done["plan"]["bound"]);
    assert!(number(&done["outcome"]["cost"]) <= bound, "{ended:?}");
    assert!(
        after.heap <= before.heap + bound + 4 * MIB,
        "{before:?} {after:?}"
    );
    assert_eq!(done["reach"]["method"], "process_madvise");
    assert_untouched(running.pid());

    let undone = promoted(&["--undo", &id(&running)]);
    assert_eq!(undone["split"]["after"], 0, "{undone}");
    assert_eq!(resident(running.pid()).huge, 0);
    running.write("7\n");
    running.wait_for_line("answer 7 7000");
}

#[test]
#[cfg_attr(not(feature = "full"), ignore = "takes long: --features full")]
fn a_program_that_maps_forks_and_executes_all_the_time_stays_as_it_is() {
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[Source::C("restless", &[])]);
    let program = Program::new(files.path("restless")).args(["8", "0", "0"]);
    let plain = program.plain().ok();
    let running = program.start_plain();
    running.wait_for_line("ready");
    let (mut times, mut obtained) = (0, 0);
    while !running.has_ended() {
        let done = promoted(&["--rate", "0", &id(&running)]);
        obtained += done["outcome"]["obtained"].as_u64().unwrap_or(0);
        times += 1;
    }
    let ran = running.wait().ok();
    assert_eq!((ran.stdout, ran.stderr), (plain.stdout, plain.stderr));
    assert!(times > 3 && obtained > 0, "{times} times, {obtained} bytes");
}

#[test]
fn a_program_is_followed_as_it_grows_and_to_its_end() {
    if host::command("python3").is_none() {
        return;
    }
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let mut running = answers(48).start_plain();
    running.wait_for_line("ready");
    let pid = running.pid();
    let follow = |pid: &str| {
        let command = Program::new(build::jumbo());
        command
            .args(["promote", "--follow", "--rate", "0", pid])
            .start_plain()
    };
    let until_huge = |least: u64| {
        wait::until("huge pages", wait::TIMEOUT, || {
            (resident(pid).huge >= least * MIB).then_some(())
        });
    };
    let following = follow(&id(&running));
    until_huge(40);
    running.write("-64\n");
    running.wait_for_line("grown");
    until_huge(90);
    following.signal(Signal::INT);
    let ended = following.wait();
    assert_eq!(ended.shell_status(), 130, "{ended:?}");
    assert_untouched(pid);
    let following = follow(&id(&running));
    running.write("-64\n");
    running.wait_for_line("grown");
    until_huge(150);
    running.write("1\n");
    running.wait_for_line("answer 1 ");
    running.wait().ok();
    following.wait().ok();
}

#[test]
fn sparse_memory_stays_and_shared_memory_is_promoted() {
    if host::command("python3").is_none() {
        return;
    }
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let script = "
import ctypes, mmap, sys
kind = mmap.MAP_SHARED if sys.argv[1] == 'shared' else mmap.MAP_PRIVATE
map = ctypes.CDLL(None).mmap
map.restype, map.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_long] * 5
# Aligned: a shared huge page has to fit its object.
memory = map(0x2000_0000_0000, 64 << 20, 3, kind | mmap.MAP_ANONYMOUS, -1, 0)
assert memory == 0x2000_0000_0000
for at in range(0, 64 << 20, int(sys.argv[2])): ctypes.memset(memory + at, 1, 1)
print('ready', flush=True)
sys.stdin.read()
";
    let program = |kind, step| Program::new(PYTHON).args(["-c", script, kind, step]);
    let sparse = program("private", "65536").start_plain();
    sparse.wait_for_line("ready");
    let before = resident(sparse.pid());
    let done = promoted(&[&id(&sparse)]);
    assert!(
        number(&done["plan"]["kinds"]["heap"]["left"]["sparse"]) >= 3 * MIB,
        "{done}"
    );
    let after = resident(sparse.pid());
    assert!(
        after.heap <= before.heap + 8 * MIB,
        "{before:?} {after:?}\n{done}"
    );

    let shared = program("shared", "4096").start_plain();
    shared.wait_for_line("ready");
    let done = promoted(&["--shm", &id(&shared)]);
    let planned = number(&done["outcome"]["planned"]);
    assert!(planned >= 60 * MIB, "{done}");
    let (obtained, failures) = (&done["outcome"]["obtained"], &done["outcome"]["failures"]);
    // With the host's control at `never` the kernel refuses.
    let refused = failures[0]["errno"] == "EINVAL" && failures[0]["bytes"] == planned;
    assert!(refused || number(obtained) * 10 >= planned * 9, "{done}");
    let undone = promoted(&["--undo", "--shm", &id(&shared)]);
    let split = &undone["split"];
    assert!(split["after"] == 0 || split["left"].is_string(), "{undone}");
}

/// Checks that one process was refused: status 1 and no standard output.
#[track_caller]
fn assert_refused(ran: &Ran, why: &str) {
    assert_eq!(ran.shell_status(), 1, "{ran:?}");
    assert!(
        ran.stderr.contains(why) && ran.stdout.is_empty(),
        "`{why}`: {ran:?}"
    );
}

#[test]
fn what_cannot_be_promoted_is_refused_with_the_reason() {
    if host::command("python3").is_none() {
        return;
    }
    if !host::root() {
        return;
    }
    assert_refused(&promote(&["4194301"]), "no such process");
    let missing = promote(&["4194301", "4194302"]);
    assert_refused(&missing, "4194301: no such process");
    assert_refused(&missing, "4194302: no such process");
    assert_refused(&promote(&["no such name"]), "neither by PID nor by name");
    assert_refused(&promote(&["--cgroup", "no/such"]), "no control group");
    if std::fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n") {
        assert_refused(&promote(&["2"]), "a thread of the kernel");
    }
    let itself = Program::shell("exec \"$0\" promote $$")
        .arg(build::jumbo())
        .plain();
    assert_refused(&itself, "this command itself");

    let zombie = Program::new(PYTHON).args([
        "-c",
        "import os, time\npid = os.fork()\nif pid == 0: os._exit(0)\nos.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)\n\
         print('zombie', pid, flush=True)\nimport sys; sys.stdin.read()",
    ]);
    let zombie = zombie.start_plain();
    let line = zombie.wait_for_line("zombie ");
    let child = line.trim_start_matches("zombie ");
    assert_refused(&promote(&[child]), "it has ended");

    let foreign = answers(8).start_plain();
    foreign.wait_for_line("ready");
    let one_of_two = promote(&["--dry-run", "4194301", &id(&foreign)]);
    assert_eq!(one_of_two.shell_status(), 3, "{one_of_two:?}");
    assert!(one_of_two.stderr.contains("4194301: no such"));
    let as_user = Program::new("true").unprivileged();
    let ran = as_user.jumbo_itself(&["promote", &id(&foreign)]);
    assert_refused(&ran, "it runs as user 0");
    assert!(
        ran.stderr.contains("CAP_SYS_PTRACE and CAP_SYS_NICE"),
        "{ran:?}"
    );
}

#[test]
fn a_dry_run_names_what_leaves_nothing_to_promote() {
    if host::command("python3").is_none() {
        return;
    }
    let Some(group) = Group::of_memory(90 * MIB) else {
        return;
    };
    let full = answers(72).around(group.enter()).start_plain();
    full.wait_for_line("ready");
    let page = promoted(&["--dry-run", &id(&full)]);
    let why = page["obstacle"].as_str().unwrap_or_default();
    assert!(why.starts_with("its control group has "), "{page}");
    for options in [&[][..], &["--dry-run"]] {
        let ran = promote(&[options, &[&id(&full)]].concat());
        let says = ran.stdout.contains("its control group has ");
        assert!(ran.shell_status() == 1 && says, "{ran:?}");
    }
}

#[test]
fn without_privilege_the_error_names_it_and_nothing_changes() {
    if host::command("python3").is_none() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let running = answers(64).unprivileged().start_plain();
    running.wait_for_line("ready");
    let before = resident(running.pid()).huge;
    let command = Program::new("true").unprivileged();
    for option in ["--json", "--follow", "--undo", "--dry-run"] {
        let ran = command.jumbo_itself(&["promote", option, &id(&running)]);
        let all = format!("{}{}", ran.stdout, ran.stderr);
        assert_eq!(ran.shell_status(), 1, "{ran:?}");
        assert!(all.contains("CAP_SYS_NICE"), "{ran:?}");
    }
    assert!(resident(running.pid()).huge == before || host::thp_is_always());
}

#[test]
fn a_process_under_a_filter_or_a_debugger_or_stopped_is_promoted() {
    if host::command("python3").is_none() {
        return;
    }
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    const FILTERED: &str = "
import ctypes, struct, sys
libc = ctypes.CDLL(None)
kept = bytes(32 << 20).replace(b'\\0', b'x')
allow = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))
program = ctypes.create_string_buffer(struct.pack('HxxxxxxP', 1, ctypes.addressof(allow)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
print('ready', flush=True)
sys.stdin.read()
";
    const TRACED: &str = "
import ctypes, os, sys
kept = bytes(32 << 20).replace(b'\\0', b'x')
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
assert ctypes.CDLL(None).ptrace(0x4206, child, 0, 0) == 0
print('traced', child, flush=True)
sys.stdin.read()
";
    let filtered = Program::new(PYTHON)
        .args(["-c", FILTERED])
        .unprivileged()
        .start_plain();
    filtered.wait_for_line("ready");
    promote(&[&id(&filtered)]).ok();

    let traced = Program::new(PYTHON)
        .args(["-c", TRACED])
        .unprivileged()
        .start_plain();
    let line = traced.wait_for_line("traced ");
    let child = line.trim_start_matches("traced ");
    promote(&[child]).ok();

    let stopped = answers(32).unprivileged().start_plain();
    stopped.wait_for_line("ready");
    stopped.signal(Signal::STOP);
    wait::until("the stop", wait::TIMEOUT, || {
        status(stopped.pid(), "State")
            .starts_with('T')
            .then_some(())
    });
    promote(&[&id(&stopped)]).ok();
    assert!(status(stopped.pid(), "State").starts_with('T'));
    stopped.signal(Signal::CONT);
}

#[test]
fn a_process_of_another_pid_namespace_is_promoted_from_outside() {
    if host::command("python3").is_none() {
        return;
    }
    if !host::root() {
        return;
    }
    let Some(_held) = host::with_thp() else {
        return;
    };
    let inner = answers(64).around(["unshare", "--pid", "--fork", "--kill-child"]);
    let running = inner.start_plain();
    running.wait_for_line("ready");
    let child = running.child();
    let done = promoted(&[&child.as_raw_nonzero().to_string()]);
    assert!(resident(child).huge_share() >= 0.85, "{done}");
}
