//! Text and data on huge pages.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt as _;

use rustix::process::Pid;

use crate::support::{Program, Running, Source, compile, host};

/// Text for which a move is tried when it is asked for, and for which `auto` looks.
const SOME: Source = Source::C("text", &[]);
const MUCH: Source = Source::C("text", &["-DCOUNT=655360"]);

/// Whether this kernel can say how text is mapped (PAGEMAP_SCAN).
fn can_look() -> bool {
    let release = rustix::system::uname();
    let release = release.release().to_string_lossy().into_owned();
    let mut numbers = release
        .split('.')
        .map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < (6, 7) {
        host::skip("Linux 6.7 is needed to look how text is mapped");
    }
    version >= (6, 7)
}

/// What a line of the program says: how much of its text is huge, in KiB, and the mapping that it is in.
fn told(line: &str) -> (u64, &str) {
    let (huge, mapping) = line.strip_prefix("huge ").unwrap().split_once(' ').unwrap();
    (huge.parse().unwrap(), mapping)
}

#[test]
fn text_is_moved_when_it_is_asked_for_and_the_program_does_not_notice() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    if !can_look() {
        return;
    }
    let files = compile(&[SOME]);
    let program = Program::new(files.path("text"));
    let sum = program.plain().ok();
    for (mode, rung, place) in [
        ("shared", "shared", "/memfd:jumbo-text:text:"),
        ("private", "private", ""),
        ("file", "as it is", "/text"),
        ("off", "as it is", "/text"),
    ] {
        let mode = format!("--text={mode}");
        let (ran, report) = program.reported_with(&[&mode]);
        assert_eq!(
            (&sum.stdout, sum.shell_status()),
            (&ran.stdout, ran.shell_status()),
            "{mode}"
        );
        assert_eq!(report.at("/obtained/text/rung"), rung, "{mode}: {report:?}");
        let ran = program.clone().arg("tell").jumbo_with(&[&mode]).ok();
        let text = ran.stdout;
        let (huge, mapping) = told(text.lines().nth(1).unwrap());
        assert_eq!(huge >= 4096, rung != "as it is", "{mode}: {text}");
        assert!(mapping.contains(" r-xp "), "{mode}: {text}");
        assert!(mapping.contains(place), "{mode}: {text}");
    }
}

/// The physical pages of a part of a process's text.
fn frames(pid: Pid, mapping: &str) -> BTreeSet<u64> {
    let (start, rest) = mapping.split_once('-').unwrap();
    let end = rest.split(' ').next().unwrap();
    let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap() / 4096);
    let pagemap = fs::File::open(format!("/proc/{}/pagemap", pid.as_raw_nonzero())).unwrap();
    let mut bytes = vec![0; usize::try_from(8 * (end - start)).unwrap()];
    pagemap.read_exact_at(&mut bytes, 8 * start).unwrap();
    let entries = bytes
        .chunks(8)
        .map(|entry| u64::from_le_bytes(entry.try_into().unwrap()));
    entries
        .filter(|entry| entry >> 63 == 1)
        .map(|entry| entry & ((1 << 55) - 1))
        .collect()
}

/// A process that stays, and what it says of its text.
fn staying(program: &Program) -> (Running, String) {
    let running = program.start_jumbo(&["--text=shared"]);
    let line = running.wait_for_line("huge ");
    running.wait_for_line("ready");
    (running, line)
}

#[test]
fn processes_of_one_program_share_an_image_and_it_goes_with_the_last() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    if !can_look() || !host::root() {
        return;
    }
    let files = compile(&[SOME]);
    let program = Program::new(files.path("text")).arg("stay");
    let mut all: Vec<_> = (0..3).map(|_| staying(&program)).collect();
    let seen: Vec<_> = all
        .iter()
        .map(|(running, line)| frames(running.pid(), told(line).1))
        .collect();
    assert!(seen[0].len() > 1000, "{}", seen[0].len());
    assert!(seen.iter().all(|frames| *frames == seen[0]));
    // The maker goes, in the hardest way; who comes later finds it still.
    let (first, _) = all.remove(0);
    first.signal(rustix::process::Signal::KILL);
    first.wait();
    let (late, line) = staying(&program);
    assert_eq!(frames(late.pid(), told(&line).1), seen[0]);
    // A private copy is another one.
    let alone = program.start_jumbo(&["--text=private"]);
    let line = alone.wait_for_line("huge ");
    assert!(frames(alone.pid(), told(&line).1).is_disjoint(&seen[0]));
    for mut running in all
        .into_iter()
        .map(|(running, _)| running)
        .chain([late, alone])
    {
        running.write("\n");
        running.wait().ok();
    }
}

#[test]
fn another_users_image_is_not_taken() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    if !can_look() || !host::root() {
        return;
    }
    let files = compile(&[SOME]);
    let program = Program::new(files.path("text")).arg("stay");
    let (mut theirs, line) = staying(&program.clone().unprivileged());
    let image = frames(theirs.pid(), told(&line).1);
    // Root could open it.
    let (mut ours, line) = staying(&program);
    assert!(frames(ours.pid(), told(&line).1).is_disjoint(&image));
    for running in [&mut theirs, &mut ours] {
        running.write("\n");
        running.reap();
    }
}

#[test]
fn a_program_that_lives_gets_its_text_moved_and_no_thread_stays() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    if !can_look() {
        return;
    }
    let files = compile(&[MUCH]);
    let program = Program::new(files.path("text"));
    // Not at the start: a short program pays nothing.
    let ran = program.clone().arg("tell").jumbo_with(&[]).ok();
    assert!(ran.stdout.contains("huge 0 "), "{ran:?}");
    let (ran, report) = program.clone().args(["burn", "60"]).reported_with(&[]);
    let text = ran.ok().stdout;
    assert!(text.contains("memfd:jumbo-text:text"), "{text}");
    assert_eq!(report.at("/obtained/text/rung"), "shared");
    let (ran, _) = program.clone().args(["fork", "60"]).reported_with(&[]);
    let text = ran.ok().stdout;
    assert!(
        text.contains("children 0") && text.contains("memfd:jumbo-text"),
        "{text}"
    );
    if host::root() {
        let ran = program
            .clone()
            .arg("user")
            .jumbo_with(&["--reaper=off"])
            .ok();
        assert_eq!(ran.stdout, "threads 1\n");
    }
}

#[test]
fn a_program_may_still_change_its_text() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[SOME]);
    let program = Program::new(files.path("text")).arg("patch");
    for mode in ["--text=shared", "--text=private", "--text=file"] {
        let ran = program.jumbo_with(&[mode]).ok();
        assert_eq!(ran.stdout, "0\n", "{mode}");
    }
}

#[test]
fn data_and_bss_come_on_huge_pages() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[SOME]);
    let program = Program::new(files.path("text")).arg("data");
    let plain = program.plain().ok();
    let huge = |ran: &crate::support::Ran| {
        let text = ran.stderr.clone();
        let numbers: Vec<u64> = text
            .split(' ')
            .filter_map(|word| word.trim().parse().ok())
            .collect();
        (numbers[0], numbers[1])
    };
    let (ran, report) = program.reported_with(&["--text=off"]);
    assert_eq!(plain.stdout, ran.stdout);
    let (data, zeroes) = huge(&ran);
    assert!(data >= 4096 && zeroes >= 16384, "{data} {zeroes}");
    assert!(report.number("/obtained/text/data_moved") > 0.0);
    let ran = program.jumbo_with(&["--data=off"]).ok();
    assert_eq!((plain.stdout, (0, 0)), (ran.stdout.clone(), huge(&ran)));
}
