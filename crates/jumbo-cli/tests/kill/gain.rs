//! Release of memory beside the kernel, and processes for which it is not allowed.

use std::fs::File;
use std::process::Command;

use serde_json::Value;

use crate::victim::{VICTIM_BYTES, Victim, jumbo, kill, skip, until, with_memory};

/// Checks that the process ended and that the kernel alone freed its memory.
#[track_caller]
fn assert_left_to_the_kernel(row: &Value, reason: &str) {
    assert_eq!(row["outcome"], "ended", "{row}");
    let found = row["gain"]["reason"].as_str().unwrap_or_default();
    assert!(found.contains(reason), "{row}");
}

/// The call comes too late for some processes.
#[test]
fn memory_is_freed_beside_the_kernel() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    for (signal, number) in [("TERM", 15), ("KILL", 9), ("sigusr1", 10), ("RTMIN+1", 35)] {
        let freed = (0..20).any(|_| {
            let victim = Victim::plain();
            let (row, code) = kill(&["--signal", signal], victim.pid());
            assert_eq!((code, victim.ended_by()), (Some(0), Some(number)), "{row}");
            assert_eq!(row["outcome"], "ended", "{row}");
            let gain = &row["gain"];
            let [anonymous, released] =
                ["anonymous", "released"].map(|of| gain[of].as_u64().unwrap());
            assert!(
                (VICTIM_BYTES..2 * VICTIM_BYTES).contains(&anonymous),
                "{row}"
            );
            assert!(released <= anonymous, "{row}");
            assert_eq!(gain["reason"].is_null(), released > 0, "{row}");
            released > 0
        });
        assert!(freed, "{signal}: never beside the kernel");
    }
}

#[test]
fn a_program_that_ends_by_itself_is_left_to_the_kernel() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let handler = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), os._exit(3)))";
    let victim = Victim::start(handler);
    let (row, _) = kill(&[], victim.pid());
    assert_left_to_the_kernel(&row, "did not end at once");
    assert!(row["wait_ms"].as_f64().unwrap() > 200.0, "{row}");
    assert_eq!(victim.ended_by(), None);
}

#[test]
fn several_are_ended_at_once() {
    if crate::needs::command("python3").is_none() {
        return;
    }
    let threads =
        "for _ in range(50): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()";
    let victims = [Victim::plain(), Victim::start(threads)];
    let [first, second] = victims.each_ref().map(|victim| victim.pid().to_string());
    // A PID that is named twice is one.
    let output = jumbo(&[&first, &second], victims[0].pid())
        .output()
        .unwrap();
    let page = String::from_utf8(output.stdout).unwrap();
    assert_eq!(page.matches("python3: ended, ").count(), 2, "{page}");
    let given = [" given back from both sides", " left to the kernel: "]
        .map(|text| page.matches(text).count());
    assert_eq!(given[0] + given[1], 2, "{page}");
    assert!(output.stderr.is_empty() && output.status.success());
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
    assert_eq!(
        (code, row["outcome"].as_str()),
        (Some(0), Some("ended")),
        "{row}"
    );
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
    assert_eq!(row["outcome"], "ended", "{row}");
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
    // The calls were refused, until the process itself had let go of the memory.
    assert!(row["gain"]["reason"].is_string(), "{row}");
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
