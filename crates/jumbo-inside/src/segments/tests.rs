//! Tests that move running code.

use std::io::Write as _;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};

use rustix::mm::{self, MapFlags, ProtFlags};

use super::*;

const PMD: usize = 2 << 20;
/// Number of functions of 16 bytes: one whole PMD and both ends.
const COUNT: usize = 2 * PMD / 16 + 1000;

/// File offset of the functions.
const OFFSET: usize = 3 << 16;

/// A mapped file of functions that return their own numbers.
struct Code {
    file: std::fs::File,
    range: Range<usize>,
    // Keeps the addresses reserved.
    _area: StagingArea,
}

use super::memory::StagingArea;

fn function(number: u32) -> [u8; 16] {
    let mut code = [0u8; 16];
    let [low, high] = [number & 0xffff, number >> 16];
    if cfg!(target_arch = "x86_64") {
        // mov eax, number; ret
        code[0] = 0xb8;
        code[1..5].copy_from_slice(&number.to_le_bytes());
        code[5] = 0xc3;
    } else {
        // movz w0, low; movk w0, high, lsl 16; ret
        for (place, word) in [0x5280_0000 | low << 5, 0x72a0_0000 | high << 5, 0xd65f_03c0]
            .into_iter()
            .enumerate()
        {
            code[4 * place..][..4].copy_from_slice(&u32::to_le_bytes(word));
        }
    }
    code
}

impl Code {
    /// Maps code at an address congruent to its file offset, in shared memory with small folios.
    fn new() -> Self {
        let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
        let functions = (0..u32::try_from(COUNT).unwrap()).flat_map(function);
        let bytes: Vec<u8> = std::iter::repeat_n(0, OFFSET).chain(functions).collect();
        file.write_all(&bytes).unwrap();
        let length = (bytes.len() - OFFSET).next_multiple_of(4096);
        let like = OFFSET..OFFSET + length;
        let area = StagingArea::reserve(&like, PMD).unwrap();
        let code = Self {
            file,
            range: area.range(),
            _area: area,
        };
        code.map();
        code
    }

    /// Maps the file, as before a move.
    fn map(&self) {
        let (prot, flags) = (
            ProtFlags::READ | ProtFlags::EXEC,
            MapFlags::PRIVATE | MapFlags::FIXED,
        );
        let at = std::ptr::with_exposed_provenance_mut(self.range.start);
        // SAFETY: the addresses are the value's, and hold the same code or nothing.
        unsafe { mm::mmap(at, self.range.len(), prot, flags, &self.file, OFFSET as u64) }.unwrap();
    }

    fn call(start: usize, number: usize) -> usize {
        let function = std::ptr::with_exposed_provenance::<()>(start + 16 * number);
        // SAFETY: a function begins there.
        let function =
            unsafe { std::mem::transmute::<*const (), extern "C" fn() -> u32>(function) };
        function() as usize
    }

    fn settings(&self, mode: TextMode) -> SegmentSettings {
        SegmentSettings {
            mode,
            data: DataMode::Off,
            libs: None,
            pmd: PMD,
            program: Program {
                headers: 0,
                count: 0,
                entry: self.range.start,
            },
            fixed: [0; 2],
        }
    }

    /// Moves its last segment; returns the result, and the huge bytes of the code afterwards.
    fn move_last(&self, mode: TextMode) -> (Result<(), u32>, usize) {
        let settings = self.settings(mode);
        let pagemap = Pagemap::open().unwrap();
        let found = settings.find().unwrap();
        let segment = found.iter().last().copied().unwrap();
        let moved = move_one(&segment, &pagemap, &settings, &Stop::never(), false);
        memory::touch(&self.range, 4096);
        close_images();
        let huge = pagemap.count(self.range.clone(), Pages::Huge).unwrap();
        (moved, huge)
    }
}

/// Closes the descriptors at which other processes find images.
fn close_images() {
    for number in 960..1000 {
        if rustix::fs::readlink(format!("/proc/self/fd/{number}"), Vec::new()).is_ok() {
            // SAFETY: no value owns the descriptor of an image.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}

/// Locks the descriptors for one test; `None` if the kernel cannot report how pages are mapped.
fn is_ready() -> Option<std::sync::MutexGuard<'static, ()>> {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let guard = ONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let counted = Pagemap::open().unwrap().count(0..4096, Pages::Present);
    if counted.is_err() {
        eprintln!("skipped: no PAGEMAP_SCAN (Linux 6.7)");
        return None;
    }
    Some(guard)
}

#[test]
fn code_is_moved_while_eight_threads_and_a_signal_handler_run_it() {
    static START: AtomicUsize = AtomicUsize::new(0);
    static WRONG: AtomicU32 = AtomicU32::new(0);
    static HANDLED: AtomicU32 = AtomicU32::new(0);
    extern "C" fn handler(_signal: i32) {
        let start = START.load(Ordering::Relaxed);
        let at = HANDLED.fetch_add(1, Ordering::Relaxed) as usize * 7919 % COUNT;
        if Code::call(start, at) != at {
            WRONG.fetch_add(1, Ordering::Relaxed);
        }
    }
    let Some(_one) = is_ready() else { return };
    let code = Code::new();
    START.store(code.range.start, Ordering::Relaxed);
    let timer = |microseconds| libc::itimerval {
        it_interval: libc::timeval {
            tv_sec: 0,
            tv_usec: microseconds,
        },
        it_value: libc::timeval {
            tv_sec: 0,
            tv_usec: microseconds,
        },
    };
    // SAFETY: the handler calls code that is mapped, and touches atomics.
    unsafe {
        libc::signal(libc::SIGPROF, handler as *const () as usize);
        libc::setitimer(libc::ITIMER_PROF, &timer(1000), std::ptr::null_mut());
    }
    let (start, over) = (code.range.start, AtomicBool::new(false));
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let over = &over;
            scope.spawn(move || {
                let mut at = thread;
                while !over.load(Ordering::Relaxed) {
                    for _ in 0..1000 {
                        at = (at * 75 + 74) % COUNT;
                        if Code::call(start, at) != at {
                            WRONG.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    // More threads than CPUs.
                    std::thread::yield_now();
                }
            });
        }
        for round in 0..500 {
            assert_eq!(code.move_last(TextMode::Shared), (Ok(()), PMD), "{round}");
            code.map();
        }
        over.store(true, Ordering::Relaxed);
    });
    // SAFETY: stops the timer.
    unsafe { libc::setitimer(libc::ITIMER_PROF, &timer(0), std::ptr::null_mut()) };
    assert_eq!(WRONG.load(Ordering::Relaxed), 0);
    assert!(HANDLED.load(Ordering::Relaxed) > 100);
}

/// Writes a function as a debugger does, despite the protection.
fn poke(at: usize, number: u32) {
    let memory = std::fs::OpenOptions::new()
        .write(true)
        .open("/proc/self/mem")
        .unwrap();
    rustix::io::pwrite(memory.as_fd(), &function(number), at as u64).unwrap();
}

#[test]
fn changed_code_stays_in_place() {
    let Some(_one) = is_ready() else { return };
    let code = Code::new();
    poke(code.range.start + PMD / 2, 7);
    let number = PMD / 32;
    assert_eq!(code.move_last(TextMode::Shared), (Err(reason::CHANGED), 0));
    assert_eq!(Code::call(code.range.start, number), 7);
    assert_eq!(Code::call(code.range.start, number + 1), number + 1);
}

#[test]
fn a_new_mapping_is_not_taken_for_the_found_segment() {
    let Some(_one) = is_ready() else { return };
    let code = Code::new();
    let settings = code.settings(TextMode::Shared);
    let found = settings.find().unwrap();
    let segment = *found.iter().next().unwrap();
    let other = Code::new();
    let pagemap = Pagemap::open().unwrap();
    check(&pagemap, &segment).unwrap();
    let (prot, flags) = (
        ProtFlags::READ | ProtFlags::EXEC,
        MapFlags::PRIVATE | MapFlags::FIXED,
    );
    let at = std::ptr::with_exposed_provenance_mut(code.range.start);
    // SAFETY: the addresses are the test's own.
    unsafe {
        mm::mmap(
            at,
            code.range.len(),
            prot,
            flags,
            &other.file,
            OFFSET as u64,
        )
    }
    .unwrap();
    assert_eq!(check(&pagemap, &segment), Err(reason::GONE));
}

/// The program and a debugger can change moved text; other mappings of the image do not change.
#[test]
fn a_write_to_an_image_stays_in_its_process() {
    let Some(_one) = is_ready() else { return };
    let code = Code::new();
    assert_eq!(code.move_last(TextMode::Shared).0, Ok(()));
    poke(code.range.start, 42);
    assert_eq!(Code::call(code.range.start, 0), 42);
    assert_eq!(Code::call(code.range.start, 1), 1);
    code.map();
    assert_eq!(Code::call(code.range.start, 0), 0);
}

#[test]
fn an_image_that_holds_other_code_is_refused() {
    let Some(_one) = is_ready() else { return };
    let (code, other) = (Code::new(), Code::new());
    let there = (OFFSET + PMD / 2) as u64;
    rustix::io::pwrite(&other.file, &function(7), there).unwrap();
    let segment_of = |code: &Code| {
        let settings = code.settings(TextMode::Shared);
        *settings.find().unwrap().iter().last().unwrap()
    };
    let (pagemap, stop) = (Pagemap::open().unwrap(), Stop::never());
    let own = image::create(c"jumbo-text-test").unwrap();
    let made = image::make(&own, &segment_of(&other), &pagemap, PMD, &stop).unwrap();
    let refused = image::attach(&segment_of(&code), &made, &pagemap, PMD, &stop);
    assert_eq!(refused, Err(reason::CHANGED));
    assert_eq!(Code::call(code.range.start, PMD / 32), PMD / 32);
}

/// Another process of the same user can open any descriptor through /proc, and write until the
/// seal.
#[test]
fn code_that_another_process_writes_into_an_image_never_runs() {
    let Some(_one) = is_ready() else { return };
    let code = Code::new();
    let over = AtomicBool::new(false);
    let writes = AtomicU32::new(0);
    let results = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                // Images are opened at high numbers: `image::DESCRIPTORS`.
                for number in 900..1000 {
                    let path = format!("/proc/self/fd/{number}");
                    let is_image = std::fs::read_link(&path)
                        .is_ok_and(|link| link.to_string_lossy().contains("memfd:jumbo-text"));
                    let file =
                        is_image.then(|| std::fs::OpenOptions::new().write(true).open(&path));
                    let Some(Ok(file)) = file else { continue };
                    // All the time: before, during and after the copy.
                    while !over.load(Ordering::Relaxed) {
                        let there = (OFFSET + PMD / 2) as u64;
                        match rustix::io::pwrite(&file, &function(7), there) {
                            Ok(_) => writes.fetch_add(1, Ordering::Relaxed),
                            Err(_) => break,
                        };
                    }
                }
            }
        });
        let move_once = |round: usize| {
            let (moved, _) = code.move_last(TextMode::Shared);
            for number in [0, PMD / 32, PMD / 16 - 1] {
                assert_eq!(Code::call(code.range.start, number), number, "{round}");
            }
            code.map();
            moved
        };
        let results: Vec<_> = (0..20).map(move_once).collect();
        over.store(true, Ordering::Relaxed);
        results
    });
    assert!(writes.load(Ordering::Relaxed) > 0);
    // With a tampered image the text stays in place, also if a write in progress refused the seal.
    let is_known = |result: &Result<(), u32>| {
        matches!(result, Ok(()) | Err(reason::TAMPERED | reason::NO_MEMORY))
    };
    assert!(results.iter().all(is_known), "{results:?}");
}

/// A child unknown to the C library, made while text is being moved.
#[test]
fn a_child_made_during_a_move_does_not_wait() {
    let Some(_one) = is_ready() else { return };
    let waited = super::guard::exclusively(|| {
        // SAFETY: the child makes system calls alone, and exits.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        if child == 0 {
            // SAFETY: this is the child, with one thread.
            unsafe { super::guard::forked() };
            let answer = super::guard::wait_and_call(|| 42);
            // SAFETY: the child ends.
            unsafe { libc::_exit(answer) };
        }
        let child = i32::try_from(child).unwrap();
        let mut status = 0;
        for _ in 0..1000 {
            // SAFETY: waits for the child that was made above.
            if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
                return Ok(Some(libc::WEXITSTATUS(status)));
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        // SAFETY: ends and reaps that child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, &raw mut status, 0);
        }
        Ok(None)
    });
    assert_eq!(waited, Ok(Some(42)));
}

#[test]
fn a_stop_changes_nothing() {
    static STOP: AtomicBool = AtomicBool::new(true);
    let Some(_one) = is_ready() else { return };
    let code = Code::new();
    let pagemap = Pagemap::open().unwrap();
    let settings = code.settings(TextMode::Shared);
    let found = settings.find().unwrap();
    let segment = found.iter().next().unwrap();
    let moved = move_one(segment, &pagemap, &settings, &Stop::at(&STOP, &STOP), false);
    assert_eq!(moved, Err(reason::ENDED));
    assert!(segment.is_mapped());
}
