//! Tests of text and data on huge pages.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::process::Pid;

use crate::support::{Program, Running, Source, compile, host};

/// Text large enough for a move on request; the same at fixed addresses, so that processes can
/// share it; and enough text that `auto` scans it.
const TEXT: Source = Source::C("text", &[]);
const FIXED_TEXT: Source = Source::C("text", &["-no-pie"]);
const LARGE_TEXT: Source = Source::C("text", &["-no-pie", "-DCOUNT=655360"]);

/// Makes the page cache read a program again, in small folios.
fn cache_anew(program: &Path) {
    let file = fs::File::open(program).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    fs::read(program).unwrap();
}

/// Reports whether this kernel can tell how text is mapped (PAGEMAP_SCAN).
fn has_pagemap_scan() -> bool {
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

/// Locks the host's state; `None` without THP or PAGEMAP_SCAN.
fn ready() -> Option<host::Held> {
    host::with_thp().filter(|_| has_pagemap_scan())
}

/// Parses an output line of the program: KiB of huge text, and the mapping that contains it.
fn parse_line(line: &str) -> (u64, &str) {
    let (huge, mapping) = line.strip_prefix("huge ").unwrap().split_once(' ').unwrap();
    (huge.parse().unwrap(), mapping)
}

#[test]
fn text_is_moved_when_it_is_asked_for_and_the_program_does_not_notice() {
    let Some(_held) = ready() else { return };
    let files = compile(&[FIXED_TEXT]);
    cache_anew(&files.path("text"));
    let program = Program::new(files.path("text"));
    let sum = program.plain().ok();
    for (mode, rung, place) in [
        ("shared", "shared", "/memfd:jumbo-text:text:"),
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
        let (huge, mapping) = parse_line(text.lines().nth(1).unwrap());
        assert_eq!(huge >= 4096, rung != "as it is", "{mode}: {text}");
        assert!(mapping.contains(" r-xp "), "{mode}: {text}");
        assert!(mapping.contains(place), "{mode}: {text}");
    }
}

/// Returns the physical pages of a part of a process's text.
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

/// Starts a process that stays; returns its line about its text.
fn start_staying(program: &Program) -> (Running, String) {
    let running = program.start_jumbo(&["--text=shared"]);
    let line = running.wait_for_line("huge ");
    running.wait_for_line("ready");
    (running, line)
}

#[test]
fn processes_of_one_program_share_an_image_and_it_goes_with_the_last() {
    let Some(_held) = ready().filter(|_| host::root()) else {
        return;
    };
    let files = compile(&[FIXED_TEXT]);
    cache_anew(&files.path("text"));
    let program = Program::new(files.path("text")).arg("stay");
    let mut all: Vec<_> = (0..3).map(|_| start_staying(&program)).collect();
    let seen: Vec<_> = all
        .iter()
        .map(|(running, line)| frames(running.pid(), parse_line(line).1))
        .collect();
    assert!(seen[0].len() > 1000, "{}", seen[0].len());
    assert!(seen.iter().all(|frames| *frames == seen[0]));
    // The creator of the image is killed; later processes still find the image.
    let (first, _) = all.remove(0);
    first.signal(rustix::process::Signal::KILL);
    first.wait();
    let (late, line) = start_staying(&program);
    assert_eq!(frames(late.pid(), parse_line(&line).1), seen[0]);
    for mut running in all.into_iter().map(|(running, _)| running).chain([late]) {
        running.write("\n");
        running.wait().ok();
    }
}

/// Exports an image by a descriptor number where programs search.
fn show(image: &fs::File) -> std::os::fd::OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(image, 960).unwrap()
}

/// Creates a memfd of that name.
fn image(name: &str) -> fs::File {
    use rustix::fs::MemfdFlags;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::EXEC;
    rustix::fs::memfd_create(name, flags).unwrap().into()
}

/// An incomplete image delays no program for long; one on base pages does not prevent a private
/// copy.
#[test]
fn an_image_that_is_never_ready_and_one_on_base_pages_are_passed_over() {
    use rustix::fs::{FallocateFlags, SealFlags, fallocate};
    let Some(_held) = ready().filter(|_| host::root()) else {
        return;
    };
    let files = compile(&[FIXED_TEXT]);
    cache_anew(&files.path("text"));
    let program = Program::new(files.path("text")).arg("stay");
    let (mut first, line) = start_staying(&program);
    let name = parse_line(&line).1.split_once("/memfd:").unwrap().1;
    let name = name.split(' ').next().unwrap().to_owned();
    let shown = (960..968).find_map(|number| {
        let path = format!("/proc/{}/fd/{number}", first.pid().as_raw_nonzero());
        let link = fs::read_link(&path).ok()?;
        link.to_string_lossy()
            .contains(&name)
            .then(|| fs::read(path).unwrap())
    });
    let content = shown.unwrap();
    first.write("\n");
    first.reap();

    // An image of full length that changes all the time and is never sealed.
    let changing = image(&name);
    changing.set_len(content.len() as u64).unwrap();
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let shown = show(&changing);
        scope.spawn(|| {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                changing.write_all_at(&[1; 65536], 0).unwrap();
                std::thread::yield_now();
                fallocate(&changing, hole, 0, 65536).unwrap();
            }
        });
        let began = std::time::Instant::now();
        let (mut late, line) = start_staying(&program);
        let took = began.elapsed();
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(line.contains("/memfd:jumbo-text"), "{line}");
        // The internal timeout is 2 s.
        assert!(took < std::time::Duration::from_secs(20), "{took:?}");
        late.write("\n");
        late.reap();
        drop(shown);
    });

    // The same bytes, sealed, on base pages.
    let small = image(&name);
    small.write_all_at(&content, 0).unwrap();
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fchmod(&small, rustix::fs::Mode::RUSR | rustix::fs::Mode::XUSR).unwrap();
    rustix::fs::fcntl_add_seals(&small, seals).unwrap();
    let shown = show(&small);
    let (mut late, line) = start_staying(&program);
    let (huge, mapping) = parse_line(&line);
    assert!(
        huge >= 4096 && mapping.contains("/memfd:jumbo-text"),
        "{line}"
    );
    late.write("\n");
    late.reap();
    drop(shown);
}

#[test]
fn another_users_image_is_not_taken() {
    let Some(_held) = ready().filter(|_| host::root()) else {
        return;
    };
    let files = compile(&[FIXED_TEXT]);
    cache_anew(&files.path("text"));
    let program = Program::new(files.path("text")).arg("stay");
    let (mut theirs, line) = start_staying(&program.clone().unprivileged());
    let image = frames(theirs.pid(), parse_line(&line).1);
    // Root has the permission to open it.
    let (mut ours, line) = start_staying(&program);
    assert!(frames(ours.pid(), parse_line(&line).1).is_disjoint(&image));
    for running in [&mut theirs, &mut ours] {
        running.write("\n");
        running.reap();
    }
}

#[test]
fn a_program_that_lives_gets_its_text_moved_and_no_thread_stays() {
    let Some(_held) = ready() else { return };
    let files = compile(&[LARGE_TEXT]);
    cache_anew(&files.path("text"));
    let program = Program::new(files.path("text"));
    // Not at the start: a short program pays nothing.
    let ran = program.clone().arg("tell").jumbo_with(&[]).ok();
    assert!(ran.stdout.contains("huge 0 "), "{ran:?}");
    let user = program.clone().unprivileged();
    // With privilege when the program next maps memory.
    for program in [
        user.clone().args(["burn", "60"]),
        program.clone().args(["burn", "60", "maps"]),
    ] {
        let (ran, report) = program.reported_with(&[]);
        let text = ran.ok().stdout;
        assert!(text.contains("memfd:jumbo-text:text"), "{text}");
        assert_eq!(report.at("/obtained/text/rung"), "shared");
    }
    let (ran, _) = user.clone().args(["fork", "60"]).reported_with(&[]);
    let text = ran.ok().stdout;
    assert!(
        text.contains("children 0") && text.contains("memfd:jumbo-text"),
        "{text}"
    );
    // Descriptors and exit status are as in plain.
    let ran = user.args(["lowest", "60"]).jumbo_with(&[]).ok();
    assert!(
        ran.stdout.contains("others 0\n") && ran.stdout.contains("memfd:jumbo-text"),
        "{ran:?}"
    );
    let exits = program.clone().arg("exit");
    assert_eq!(
        exits.plain().shell_status(),
        exits.jumbo_with(&[]).shell_status()
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
    let files = compile(&[TEXT]);
    let program = Program::new(files.path("text")).arg("patch");
    for mode in ["--text=shared", "--text=file"] {
        let ran = program.jumbo_with(&[mode]).ok();
        assert_eq!(ran.stdout, "0\n", "{mode}");
    }
}

#[test]
fn data_and_bss_come_on_huge_pages() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[TEXT]);
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
    // With a bound the last blocks become huge a moment later.
    let at_once = "--max-waste=unbounded";
    let (ran, report) = program.reported_with(&["--text=off", "--data=on", at_once]);
    assert_eq!(plain.stdout, ran.stdout);
    let (data, zeroes) = huge(&ran);
    assert!(data >= 2048 && zeroes >= 16384, "{data} {zeroes}");
    assert!(report.number("/obtained/text/data_moved") >= 6e6);
    // By default data is copied only if written to.
    let (ran, report) = program.reported_with(&[at_once]);
    assert!(huge(&ran).1 >= 16384, "{ran:?}");
    assert_eq!(report.number("/obtained/text/data_moved"), 0.0);
    let ran = program.jumbo_with(&["--data=off"]).ok();
    assert_eq!((plain.stdout, (0, 0)), (ran.stdout.clone(), huge(&ran)));
}

/// Returns the offset in the library of machine code that returns half the number of functions.
fn half(library: &Path) -> u64 {
    let number = 131_072_u32 / 2;
    let code = if cfg!(target_arch = "x86_64") {
        [&[0xb8], &number.to_le_bytes()[..], &[0xc3]].concat()
    } else {
        // movz w0, 0; movk w0, 1, lsl 16
        [0x5280_0000_u32, 0x72a0_0020]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect()
    };
    let bytes = fs::read(library).unwrap();
    let mut found = bytes
        .windows(code.len())
        .enumerate()
        .filter(|(_, window)| **window == code);
    let at = found.next().unwrap().0;
    assert!(found.next().is_none());
    at as u64
}

#[test]
fn a_library_that_is_written_in_place_is_another_one_for_new_programs() {
    let Some(_held) = ready() else {
        return;
    };
    if !cfg!(target_arch = "x86_64") {
        return;
    }
    for (mode, then) in [("off", 7), ("file", 7), ("shared", 65536)] {
        let files = compile(&[
            Source::Library("textlib"),
            Source::C("text", &["-Wl,--no-as-needed", "-ltextlib"]),
        ]);
        let (program, library) = (files.path("text"), files.path("libtextlib.so"));
        cache_anew(&library);
        let program = Program::new(program).arg("library");
        let options = [&*format!("--text={mode}"), "--libs=libtextlib*"];
        let mut running = program.start_jumbo(&options);
        running.wait_for_line("now 65536");
        let moved = parse_line(&running.wait_for_line("huge ")).0 > 0;
        assert_eq!(moved, then == 65536, "{mode}");
        let file = fs::OpenOptions::new().write(true).open(&library).unwrap();
        file.write_all_at(&[7, 0, 0, 0], half(&library) + 1)
            .unwrap();
        // While the first one runs, with its image, if any.
        let mut next = program.start_jumbo(&options);
        next.wait_for_line("now 7");
        for running in [&mut running, &mut next] {
            running.write("\n");
        }
        let text = running.wait().ok().stdout;
        assert!(text.contains(&format!("then {then}")), "{mode}: {text}");
        next.wait().ok();
    }
}

#[test]
fn a_debugger_names_functions_of_text_that_was_moved() {
    let Some(_held) = ready() else {
        return;
    };
    let Some(gdb) = host::command("gdb") else {
        return;
    };
    let files = compile(&[TEXT]);
    let program = Program::new(files.path("text")).arg("stay");
    for mode in ["--text=off", "--text=shared"] {
        let mut running = program.start_jumbo(&[mode]);
        let huge = parse_line(&running.wait_for_line("huge ")).0;
        assert_eq!(huge > 0, mode != "--text=off", "{mode}");
        running.wait_for_line("ready");
        let process = running.pid().as_raw_nonzero().to_string();
        let commands = [
            "-nx",
            "-batch",
            "-p",
            &*process,
            "-ex",
            "bt",
            "-ex",
            "info symbol all",
            "-ex",
            "x/i all",
        ];
        let seen = Program::new(&gdb).args(commands).plain().ok().stdout;
        assert!(
            seen.contains("main (") && seen.contains("all in section .text"),
            "{mode}: {seen}"
        );
        assert!(!seen.contains("Cannot access memory"), "{mode}: {seen}");
        running.write("\n");
        running.wait().ok();
    }
}

/// A file that grows beyond that limit ends its writer by SIGXFSZ; an image could, too.
#[test]
fn a_limit_on_the_size_of_files_ends_no_program() {
    let Some(_held) = host::with_thp() else {
        return;
    };
    let files = compile(&[FIXED_TEXT]);
    let program = Program::new(files.path("text")).around(["prlimit", "--fsize=100000"]);
    assert_eq!(
        program.plain().ok().stdout,
        program.jumbo_with(&["--text=shared"]).ok().stdout
    );
}
