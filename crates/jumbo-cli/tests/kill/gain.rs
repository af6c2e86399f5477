//! Release of memory from two sides, and processes for which it is not allowed.

use std::fs::File;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::victim::{VICTIM_BYTES, Victim, jumbo, kill, skip, until, with_memory};

/// Checks that process_mrelease ran at the exit stop and released memory.
#[track_caller]
fn assert_released(row: &Value) {
    assert_eq!(row["outcome"], "ended", "{row}");
    let gain = &row["gain"];
    assert_eq!(gain["way"], "held", "{row}");
    assert!(gain["reason"].is_null() && row["unheld"].is_null(), "{row}");
    let anonymous = gain["anonymous"].as_u64().unwrap();
    assert!(
        (VICTIM_BYTES..2 * VICTIM_BYTES).contains(&anonymous),
        "{row}"
    );
    let released = gain["released"].as_u64().unwrap();
    assert!(released > 0 && released <= anonymous, "{row}");
    assert!(gain["worked_ms"].as_f64().unwrap() > 0.0, "{row}");
}

/// Checks that the process ended and that the kernel alone freed its memory.
#[track_caller]
fn assert_left_to_the_kernel(row: &Value, reason: &str) {
    assert_eq!(row["outcome"], "ended", "{row}");
    let found = row["gain"]["reason"].as_str().unwrap_or_default();
    assert!(found.contains(reason), "{row}");
}

#[test]
fn every_way_to_end_is_held() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    for (signal, number) in [
        ("TERM", 15),
        ("KILL", 9),
        ("sigusr1", 10),
        ("RTMIN+1", 35),
        ("3", 3),
    ] {
        let victim = Victim::plain();
        let (row, code) = kill(&["--signal", signal], victim.pid());
        assert_released(&row);
        assert_eq!(
            (code, victim.ended_by()),
            (Some(0), Some(number)),
            "{signal}"
        );
    }
}

#[test]
fn a_program_that_ends_of_its_own_accord_is_held_then() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let handler = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), os._exit(3)))";
    let victim = Victim::start(handler);
    let (row, _) = kill(&[], victim.pid());
    assert_released(&row);
    assert!(row["wait_ms"].as_f64().unwrap() > 200.0, "{row}");
    assert_eq!(victim.ended_by(), None);
}

#[test]
fn the_page_says_what_was_gained() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let victim = Victim::plain();
    let output = jumbo(&[], victim.pid()).output().unwrap();
    let page = String::from_utf8(output.stdout).unwrap();
    assert!(
        page.contains("python3: ended, ") && page.contains("from both sides"),
        "{page}"
    );
    assert!(output.stderr.is_empty() && output.status.success());
}

#[test]
fn several_are_ended_at_once() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let victims = [Victim::plain(), Victim::plain()];
    let [first, second] = victims.each_ref().map(|victim| victim.pid().to_string());
    let mut command = jumbo(&["--json", &first, &second], victims[0].pid());
    let page: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    let rows = page["processes"].as_array().unwrap();
    assert_eq!(rows.len(), 2, "a PID that is named twice is one: {page}");
    rows.iter().for_each(assert_released);
}

#[test]
fn a_stopped_process_is_killed() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let victim = Victim::plain();
    victim.signal(libc::SIGSTOP);
    until("the stop", || victim.status("State").starts_with('T'));
    let (row, code) = kill(&["--signal", "KILL"], victim.pid());
    assert_released(&row);
    assert_eq!(code, Some(0));
}

#[test]
fn threads_end_with_their_process() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let threads =
        "for _ in range(50): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()";
    for signal in ["TERM", "KILL"] {
        let victim = Victim::start(threads);
        let (row, _) = kill(&["--signal", signal], victim.pid());
        assert_released(&row);
    }
}

/// Script whose first thread runs `before` while another runs `rest`, indented by four blanks.
fn without_first_thread(before: &str, rest: &str) -> String {
    let exit = if cfg!(target_arch = "x86_64") { 60 } else { 93 };
    format!(
        "
def end(*_):
    libc.syscall({exit}, 0)
def rest():
    while open('/proc/self/stat').read().split(') ')[1][0] != 'Z':
        time.sleep(0.001)
{rest}
threading.Thread(target=rest).start()
{before}
"
    )
}

/// The first thread has ended and is a zombie as long as the process lives.
#[test]
fn a_process_outlives_its_first_thread() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let script = without_first_thread("end()", "    say('ready')\n    time.sleep(600)");
    let victim = Victim::start(&script);
    let (row, _) = kill(&[], victim.pid());
    assert_released(&row);
}

/// The held thread ends; other threads go on.
#[test]
fn the_hold_moves_on_when_its_thread_ends() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let script = without_first_thread(
        "signal.signal(signal.SIGUSR1, end)",
        "    until_traced()\n    os._exit(0)",
    );
    let victim = Victim::start(&script);
    let (row, _) = kill(&["--signal", "USR1"], victim.pid());
    assert_released(&row);
}

/// execve(2) in another thread ends the first thread, which is held, and takes its thread ID.
#[test]
fn the_hold_survives_an_exec_by_another_thread() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let script = format!(
        "import base64
signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=os.execlp, args=('python3', 'python3', '-c', {:?})).start())",
        with_memory("signal.signal(signal.SIGUSR1, signal.SIG_DFL); until_traced(); os.kill(os.getpid(), 9)")
    );
    let victim = Victim::start(&script);
    let (row, _) = kill(&["--signal", "USR1"], victim.pid());
    assert_released(&row);
    assert_eq!(victim.ended_by(), Some(9));
}

#[test]
fn the_core_is_whole() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    // Lock of all tests that change the host's state: others set core_pattern.
    let lock = std::env::temp_dir().join("jumbo-e2e.lock");
    let still = File::create(&lock).or_else(|_| File::open(&lock)).unwrap();
    still.lock_shared().unwrap();
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.starts_with('|') || pattern.contains('/') {
        return skip(
            "the_core_is_whole",
            &format!("cores go to {}", pattern.trim()),
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let python = with_memory("");
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            "ulimit -c unlimited && exec python3 -c \"$0\"",
            &python,
        ])
        .current_dir(folder.path());
    let victim = Victim::of(&mut command);
    let (row, _) = kill(&["--signal", "ABRT"], victim.pid());
    assert_released(&row);
    let Some(core) = std::fs::read_dir(folder.path()).unwrap().next() else {
        return skip("the_core_is_whole", "no core may be written here");
    };
    let core = std::fs::read(core.unwrap().path()).unwrap();
    let pages = core
        .chunks(4096)
        // Python itself has pages that begin with the same byte.
        .filter(|page| page.starts_with(b"J") && page[1..].iter().all(|byte| *byte == 0));
    assert_eq!(pages.count() as u64, VICTIM_BYTES / 4096);
}

/// The kernel must find the lock of the waiter in the memory of its dead owner.
#[test]
fn a_process_that_waits_for_a_robust_lock_gets_it() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let script = "
shared = mmap.mmap(-1, 4096)
lock = ctypes.c_char.from_buffer(shared)
attributes = ctypes.create_string_buffer(64)
libc.pthread_mutexattr_init(attributes)
libc.pthread_mutexattr_setpshared(attributes, 1)
libc.pthread_mutexattr_setrobust(attributes, 1)
libc.pthread_mutex_init(ctypes.byref(lock), attributes)
libc.pthread_mutex_lock(ctypes.byref(lock))
if os.fork() == 0:
    say('waiting')
    say('got %d' % libc.pthread_mutex_lock(ctypes.byref(lock)))
    os._exit(0)
";
    for signal in ["TERM", "KILL"] {
        let mut victim = Victim::start(script);
        let (row, _) = kill(&["--signal", signal], victim.pid());
        assert_left_to_the_kernel(&row, "robust locks");
        victim.expect(&format!("got {}", libc::EOWNERDEAD));
    }
}

/// Like a child of vfork(2), which keeps running in its parent's memory after the parent is killed.
#[test]
fn memory_that_another_process_shares_is_not_touched() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    // CLONE_VM without CLONE_VFORK: the child sleeps in a system call and touches no memory.
    let script = "
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
stack = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 20) - 64
say('child %d' % libc.clone(pause, ctypes.c_void_p(top), 0x100, None))
";
    let victim = Victim::start(script);
    let child: u32 = victim.earlier_line("child ").parse().unwrap();
    let (row, _) = kill(&["--signal", "KILL"], victim.pid());
    assert_left_to_the_kernel(&row, "shares its memory");
    let resident = crate::victim::status(child, "RssAnon");
    let kib: u64 = resident.trim_end_matches(" kB").parse().unwrap();
    assert!(
        kib >= VICTIM_BYTES >> 10,
        "the child lost its memory: {resident}"
    );
    assert!(
        Command::new("sh")
            .args(["-c", "kill -9 \"$0\"", &child.to_string()])
            .status()
            .unwrap()
            .success()
    );
}

#[test]
fn a_name_stands_for_all_processes_that_have_it() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("jumbo-named");
    // Another process writes it: a child of another test could have it open for writing.
    let copied = Command::new("cp").arg("/bin/sleep").arg(&program).status();
    assert!(copied.unwrap().success());
    let script = "echo ready; exec \"$0\" 600";
    let start = || Victim::of(Command::new("sh").args(["-c", script]).arg(&program));
    let victims = [start(), start()];
    let by_name = |name: &str| {
        let mut jumbo = Command::new(env!("CARGO_BIN_EXE_jumbo"));
        jumbo.args(["kill", "--json", name]);
        jumbo
    };
    for victim in &victims {
        until("the program", || victim.status("Name") == "jumbo-named");
    }
    let output = by_name("jumbo-named").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    for victim in &victims {
        assert!(text.contains(&victim.pid().to_string()), "{text}");
    }
    let none = by_name("no-such-name").output().unwrap();
    let error = String::from_utf8(none.stderr).unwrap();
    assert!(error.contains("no process is `no-such-name`"), "{error}");
}

#[test]
fn a_small_process_is_not_worth_a_thread() {
    let victim = Victim::of(Command::new("sh").args(["-c", "echo ready; exec sleep 600"]));
    let (row, code) = kill(&[], victim.pid());
    assert_left_to_the_kernel(&row, "too little memory");
    assert_eq!(code, Some(0));
}

/// A process that another tracer holds cannot be held. jumbo then races the kernel to release its
/// memory, and only if no other process can wait for a lock in it.
#[test]
fn a_process_that_is_traced_already_is_raced() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    for (script, way) in [("", "raced"), ("shared = mmap.mmap(-1, 4096)", "kernel")] {
        let victim = Victim::start(script);
        let tracer = Command::new("strace")
            .args(["-qq", "-o", "/dev/null", "-p", &victim.pid().to_string()])
            .stderr(Stdio::null())
            .spawn();
        let Ok(mut tracer) = tracer else {
            return skip("a_process_that_is_traced_already", "there is no strace");
        };
        let id = tracer.id().to_string();
        until("the tracer", || victim.status("TracerPid") == id);
        let (row, code) = kill(&["--signal", "KILL"], victim.pid());
        assert_eq!(
            (code, row["outcome"].as_str()),
            (Some(0), Some("ended")),
            "{row}"
        );
        let unheld = row["unheld"].as_str().unwrap();
        assert!(unheld.contains(&format!("{id} traces it")), "{row}");
        assert_eq!(row["gain"]["way"], way, "{row}");
        tracer.wait().unwrap();
    }
}
