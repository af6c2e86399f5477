//! A heap of small objects that change, beside threads in system calls that a stop of a thread
//! could end early.
//!
//!     usage: heap MIB STEPS
//!
//! Prints as JSON: the seconds of the fill and of the work, the share of anonymous memory on huge
//! pages after each, and the numbers of waits, of EINTR results and of early ends.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

static WAITS: AtomicU64 = AtomicU64::new(0);
static INTERRUPTED: AtomicU64 = AtomicU64::new(0);
static EARLY: AtomicU64 = AtomicU64::new(0);

const PAUSE: Duration = Duration::from_millis(20);
const EINTR: i32 = 4;
static PAUSE_TIME: [i64; 2] = [0, 20_000_000];

unsafe extern "C" {
    fn epoll_create1(flags: i32) -> i32;
    fn epoll_wait(epoll: i32, events: *mut [u8; 12], most: i32, milliseconds: i32) -> i32;
    fn nanosleep(time: *const [i64; 2], left: *mut [i64; 2]) -> i32;
    fn pipe(ends: *mut [i32; 2]) -> i32;
    fn read(end: i32, byte: *mut u8, length: usize) -> isize;
    fn write(end: i32, byte: *const u8, length: usize) -> isize;
    fn syscall(number: i64, ...) -> i64;
}

/// Waits for the pause repeatedly by `call`, which returns less than 0 on failure.
fn wait(timed: bool, call: impl Fn() -> i64 + Send + 'static) {
    std::thread::spawn(move || {
        loop {
            let start = Instant::now();
            let answer = call();
            let error = std::io::Error::last_os_error().raw_os_error();
            WAITS.fetch_add(1, Relaxed);
            if answer < 0 && error == Some(EINTR) {
                INTERRUPTED.fetch_add(1, Relaxed);
            } else if timed && start.elapsed() < PAUSE - Duration::from_millis(1) {
                EARLY.fetch_add(1, Relaxed);
            }
        }
    });
}

fn start_waits() {
    // SAFETY: each call gets pointers to values of the types that it takes, which outlive it.
    unsafe {
        let epoll = epoll_create1(0);
        wait(true, move || epoll_wait(epoll, &mut [0; 12], 1, 20).into());
        wait(true, || nanosleep(&raw const PAUSE_TIME, std::ptr::null_mut()).into());
        let (futex, wait_private) = (202, 128);
        wait(true, move || {
            let word = 0u32;
            syscall(futex, &raw const word, wait_private, 0, &raw const PAUSE_TIME, 0usize, 0)
        });
        let mut ends = [0; 2];
        assert_eq!(pipe(&mut ends), 0);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(PAUSE);
                write(ends[1], &1, 1);
            }
        });
        wait(false, move || read(ends[0], &mut 0, 1) as i64);
    }
}

/// Returns the share of anonymous memory on huge pages, and the memory in MiB.
fn memory() -> (f64, f64) {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let value = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap().trim().trim_end_matches(" kB").parse().unwrap()
    };
    let all = value("Anonymous");
    (value("AnonHugePages") / all, all / 1024.0)
}

fn object(key: u64) -> Box<[u64; 30]> {
    Box::new(std::array::from_fn(|at| key + at as u64))
}

fn main() {
    let arguments: Vec<usize> = std::env::args().skip(1).map(|word| word.parse().unwrap()).collect();
    let [mib, steps] = arguments[..] else { panic!("usage: heap MIB STEPS") };
    start_waits();
    let start = Instant::now();
    let mut objects: Vec<_> = (0..(mib << 20) as u64 / 256).map(object).collect();
    let fill = start.elapsed().as_secs_f64();
    let (filled, _) = memory();
    let start = Instant::now();
    let (mut random, mut sum) = (88_172_645_463_325_252u64, 0u64);
    for step in 0..steps {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let at = random as usize % objects.len();
        sum = sum.wrapping_add(objects[at][0] + objects[at / 2][1]);
        if step % 8 == 0 {
            objects[at] = object(objects[at][0] + 1);
        }
    }
    let work = start.elapsed().as_secs_f64();
    let (worked, mib) = memory();
    let [waits, interrupted, early] = [&WAITS, &INTERRUPTED, &EARLY].map(|count| count.load(Relaxed));
    println!(
        "{{\"fill_seconds\":{fill},\"work_seconds\":{work},\"huge_share_filled\":{filled},\
         \"huge_share_worked\":{worked},\"anonymous_mib\":{mib},\"collections\":0,\"waits\":{waits},\
         \"eintr\":{interrupted},\"early\":{early},\"sum\":{sum}}}"
    );
}
