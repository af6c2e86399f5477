//! Unmodified programs: plain, under `jumbo run` in several modes, and with other allocators
//! through LD_PRELOAD. For `jumbo compare` and `jumbo bench programs`.
//!
//! - [`Program`]: the program; [`Server`]: its load, if it does not end by itself. [`Way`]: the way
//!   to start it.
//! - `running`: one run. `listens`: checks for a listening socket. `peak`: peak memory. `served`:
//!   figures that a load prints.
//! - [`compare`]: compares one program with itself, with a [`verdict`].
//!
//! Invariants: the sides differ only in the way to start; the first run of each side examines its
//! memory and is not counted; no process outlives the measurement.

mod listens;
mod peak;
#[expect(unsafe_code, reason = "has the standard library fork instead of vfork")]
mod running;
mod served;
mod server;
pub mod verdict;
mod way;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::memory::Events;
use jumbo_host::status::reapers_of_the_ended;
use serde::Serialize;

use crate::figures::{Figures, figures, ms, with};
use crate::group::{self, Group, rows};
use crate::table::Table;
use crate::{Error, Settings, interrupt};
use peak::MemoryPeak;
use running::{ProgramRun, RunResult};
pub use served::{Pattern, Served};
pub use server::Server;
use verdict::{Agreement, Change};
pub use way::Way;

/// The measured program, the same on all sides.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// Program and arguments.
    pub words: Vec<OsString>,
    /// Keeps the user's variables that change `malloc`: they belong to the program.
    pub as_set: bool,
    /// Command for `sh -c` before each run, unmeasured.
    pub prepare: Option<String>,
    /// File for the standard input, read from its start in each run; `None`: empty.
    pub input: Option<PathBuf>,
    /// Working directory; `None`: unchanged.
    pub folder: Option<PathBuf>,
    /// Load of a program that does not end by itself.
    pub server: Option<Server>,
    /// A failed run is an error; else exit statuses are compared. Not for servers.
    pub must_succeed: bool,
}

/// Comparison of one program with itself, started in several ways.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Figures: `time`, `time_aa`, `time_cpu`, `time_rss` of the default mode, `time_WAY` of
    /// another.
    #[serde(flatten)]
    pub table: Table,
    /// Program and arguments.
    pub program: Vec<String>,
    /// Reason why LD_PRELOAD cannot reach the program, if known.
    pub unreached: Option<String>,
    /// The program's memory is promoted from outside instead.
    pub outside: bool,
    /// Exit of the first plain run, as in "exit status: 0"; `None` for a server.
    pub plain_status: Option<String>,
    /// Figures that the load of a server printed, plain.
    pub plain_served: Option<Served>,
    /// Last line of output of a plain run that failed.
    pub plain_words: Option<String>,
    /// Results of each way.
    pub ways: Vec<Compared>,
}

/// Results of one way.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// Part of the names of its figures.
    pub key: String,
    /// Options, or the name of the peer.
    pub name: String,
    /// A mode of jumbo; else a peer.
    pub is_jumbo: bool,
    /// Change of the time. Unknown, as the other two, if the exit status differs: then the work
    /// differs.
    pub time: Change,
    /// Change of the CPU time, which other programs disturb less.
    pub cpu: Change,
    /// Change of the peak resident memory.
    pub memory: Change,
    /// Agreement of the exit status; `None` for a server.
    pub status: Option<Agreement>,
    /// Agreement of stdout; `None` for a server, or if a remaining process keeps it open.
    pub stdout: Option<Agreement>,
    /// Agreement of stderr; `None` as above.
    pub stderr: Option<Agreement>,
    /// Figures that the load of a server printed: medians over the runs.
    pub served: Option<Served>,
    /// Exit status, if it differs from plain.
    pub ended: Option<String>,
}

/// Observations of a program during the measurement.
#[derive(Default)]
pub(crate) struct Observations {
    size: Cell<Bytes>,
    plain_size: Cell<Bytes>,
    ended: RefCell<BTreeMap<String, Vec<RunResult>>>,
}

/// First part of the name of a side of plain runs.
pub const PLAIN: &str = "plain";

/// Minimum and maximum of the default number of rounds, and the time that they should take.
const DEFAULT_ROUNDS: (f64, f64) = (5.0, 20.0);
const DEFAULT_TIME_MS: f64 = 60_000.0;

/// Maximum time to wait for memory that a reaper frees.
const REAPER_TIMEOUT: Duration = Duration::from_secs(20);

/// Compares `program`, started in those ways, with itself started plain.
pub fn compare(
    settings: &Settings,
    program: &Program,
    ways: &[Way],
    rounds: Option<NonZeroUsize>,
) -> Result<Comparison, Error> {
    let observations = Observations::default();
    settings.progress.set_length(1);
    settings.show_progress("first run".to_owned());
    program.prepare()?;
    let clock = Instant::now();
    let plain = Way::plain();
    observations.sample(settings, program, &plain, &Cell::default())?;
    // Plain runs count twice, because of the A/A row.
    let lap = ms(clock.elapsed()) * (ways.len() + 2) as f64;
    let fitting = (DEFAULT_TIME_MS / lap).clamp(DEFAULT_ROUNDS.0, DEFAULT_ROUNDS.1);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped"
    )]
    let fitting = NonZeroUsize::MIN.saturating_add(fitting as usize - 1);
    let settings = &Settings {
        rounds: rounds.unwrap_or(fitting),
        ..settings.clone()
    };
    let program_words = program.words.iter().map(|word| word.to_string_lossy());
    let words: Vec<_> = program_words.map(String::from).collect();
    let table = Table::new("compare", words.join(" "), settings)?;
    let group = observations.group(settings, program, "time", "program", ways);
    let table = group::measure(settings, table, vec![group])?;
    interrupt::check()?;
    Ok(observations.compared(table, words, (program, ways)))
}

impl Program {
    fn prepare(&self) -> Result<(), Error> {
        let command = self.prepare.as_ref();
        command.map_or(Ok(()), |command| self.shell(command))
    }

    /// Runs a shell command, unmeasured.
    pub(crate) fn shell(&self, command: &str) -> Result<(), Error> {
        let mut shell = server::shell(command, self.folder.as_deref());
        shell.stdin(Stdio::null());
        let running = ProgramRun::start(&Root::host(), shell)?;
        running.succeed(&mut || REAPER_TIMEOUT).map(drop)
    }

    /// Reports whether a server's load is measured.
    fn has_load(&self) -> bool {
        self.server
            .as_ref()
            .is_some_and(|server| server.load.is_some())
    }

    /// Runs the program once, and samples its memory if there is a `peak`.
    fn run(
        &self,
        settings: &Settings,
        way: &Way,
        (size, peak): (Bytes, Option<&mut MemoryPeak>),
    ) -> Result<(Figures, RunResult), Error> {
        let root = Root::host();
        let mut words = self.words.iter();
        let first = words.next().cloned().unwrap_or_default();
        let mut command = way.command(&settings.jumbo, &first, (self.as_set, size));
        command.args(words);
        command.stdin(match &self.input {
            None => Stdio::null(),
            Some(input) => File::open(input)?.into(),
        });
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        let (huge, clock) = (huge_faults(&root), Instant::now());
        let running = ProgramRun::start(&root, command)?;
        let (pid, mut peak) = (running.pid(), peak);
        let sample = &mut || {
            peak.as_mut()
                .map_or(REAPER_TIMEOUT, |peak| peak.sample(&root, pid))
        };
        let (elapsed_ms, served) = match &self.server {
            None => {
                running.wait(None, sample)?;
                (Some(ms(clock.elapsed())), None)
            }
            Some(server) => {
                match server.serve(settings, &running, self.folder.as_deref(), sample) {
                    Ok(served) => served,
                    Err(error) => return Err(running.blame(error)),
                }
            }
        };
        let mut ended = match self.must_succeed && self.server.is_none() {
            true => running.succeed(&mut || REAPER_TIMEOUT)?,
            false => running.reap()?,
        };
        ended.served = served;
        let huge = huge_faults(&root) - huge;
        let cpu = ended.user_ms + ended.system_ms;
        let [p50, p99] = [|it: Served| it.p50_ms, |it: Served| it.p99_ms]
            .map(|of| served.and_then(of).unwrap_or(f64::NAN));
        let figures = figures([
            ("p50_ms", p50),
            ("p99_ms", p99),
            ("time_ms", elapsed_ms.unwrap_or(cpu)),
            ("user_ms", ended.user_ms),
            ("system_ms", ended.system_ms),
            ("rss_bytes", ended.rss_bytes),
            ("faults", ended.faults),
            ("huge_faults", huge),
        ]);
        Ok((figures, ended))
    }
}

impl Observations {
    /// Takes a sample. The first run of each side, and all of a loaded server, sample the memory.
    fn sample(
        &self,
        settings: &Settings,
        program: &Program,
        way: &Way,
        seen: &Cell<Option<MemoryPeak>>,
    ) -> Result<Figures, Error> {
        let is_sampled = seen.get().is_none() || program.has_load();
        let mut peak = is_sampled.then(MemoryPeak::default);
        let size = (self.plain_size.get(), peak.as_mut());
        let (mut figures, ended) = program.run(settings, way, size)?;
        if let Some(peak) = peak {
            seen.set(Some(peak));
            self.size.set(self.size.get().max(peak.bytes));
            if way.key == PLAIN {
                self.plain_size.set(self.plain_size.get().max(peak.bytes));
            }
        }
        self.ended
            .borrow_mut()
            .entry(way.key.clone())
            .or_default()
            .push(ended);
        if way.is_jumbo() {
            wait_for_memory()?;
        }
        let seen = seen.get().unwrap_or_default();
        if let Some(resident) = figures.get_mut("rss_bytes") {
            *resident = if program.has_load() {
                // The largest process says little about a server: the RSS of shared memory counts
                // only its own touches on base pages, and those of all processes on huge ones.
                seen.bytes.0 as f64
            } else {
                // wait4(2) does not count hugetlb pages.
                *resident + seen.hugetlb.0 as f64
            };
        }
        Ok(with(figures, [("huge_percent", seen.huge_percent)]))
    }

    /// Group that measures `program` in all ways; its row names begin with `key`.
    pub(crate) fn group<'a>(
        &'a self,
        settings: &'a Settings,
        program: &'a Program,
        key: &str,
        what: &'static str,
        ways: &'a [Way],
    ) -> Group<'a> {
        let mut group = Group::new(settings, what);
        let mut side = |way: Way| {
            let seen = Cell::default();
            let prepare = || program.prepare().map(|()| self.size.get());
            let name = way.name.clone();
            group.prepared(name, prepare, move || {
                self.sample(settings, program, &way, &seen)
            })
        };
        let plain = side(Way::plain());
        let sides: Vec<_> = ways.iter().map(|way| side(way.clone())).collect();
        for (suffix, measure, figure) in [
            ("", "time", "time_ms"),
            ("_cpu", "CPU time", "user_ms+system_ms"),
            ("_rss", "peak memory", "rss_bytes"),
            ("_faults", "page faults", "faults"),
            // Only for a server whose load prints them.
            ("_p50", "p50 of the load", "p50_ms"),
            ("_p99", "p99 of the load", "p99_ms"),
        ] {
            let measure = &format!("{what}, {measure}");
            rows! { group; format!("{key}{suffix}_aa") => measure, figure, plain / plain; }
            for (way, &side) in ways.iter().zip(&sides) {
                let name = format!("{}{suffix}", way.row(key));
                rows! { group; name => measure, figure, plain / side; }
            }
        }
        if let Some(default) = ways.iter().position(Way::is_default) {
            let default = sides[default];
            for (way, &peer) in ways.iter().zip(&sides) {
                if let Some(name) = way.peer_row(key) {
                    rows! { group; name => format!("{what}, time"), "time_ms", peer / default; }
                }
            }
        }
        let keys = ways.iter().map(|way| way.key.as_str());
        for (way, side) in [PLAIN]
            .into_iter()
            .chain(keys)
            .zip([plain].iter().chain(&sides))
        {
            for figure in RUN_FIGURES {
                group.value(format!("{key}_{way}_{figure}"), figure, *side);
            }
        }
        group
    }

    fn compared(
        &self,
        table: Table,
        words: Vec<String>,
        (program, ways): (&Program, &[Way]),
    ) -> Comparison {
        let ended = self.ended.borrow();
        let none = Vec::new();
        let plain = ended.get(PLAIN).unwrap_or(&none);
        let ends_by_itself = program.server.is_none();
        let known =
            |agreement| (agreement != Agreement::Unknown && ends_by_itself).then_some(agreement);
        let status = |ended: &RunResult| Some(ended.status.to_string());
        // The first run is the warm-up.
        let served = |runs: &[RunResult]| {
            let runs = runs.iter().skip(1).filter_map(|run| run.served);
            Served::median(&runs.collect::<Vec<_>>())
        };
        let first = plain.first().filter(|_| ends_by_itself);
        let ways = ways.iter().map(|way| {
            let runs = ended.get(&way.key).unwrap_or(&none);
            let row = way.row("time");
            let agrees = known(Agreement::of(plain, runs, status));
            let change = |suffix: &str| match agrees {
                Some(Agreement::Differs) => Change::Unknown,
                _ => Change::of(
                    &table,
                    &format!("{row}{suffix}"),
                    &format!("time{suffix}_aa"),
                ),
            };
            let other = runs.iter().find(|run| {
                plain
                    .first()
                    .is_some_and(|first| run.status != first.status)
            });
            Compared {
                time: change(""),
                cpu: change("_cpu"),
                memory: change("_rss"),
                status: agrees,
                stdout: known(Agreement::of(plain, runs, |ended| ended.output[0].clone())),
                stderr: known(Agreement::of(plain, runs, |ended| ended.output[1].clone())),
                ended: other.filter(|_| ends_by_itself).and_then(status),
                key: way.key.clone(),
                name: way.name.clone(),
                is_jumbo: way.is_jumbo(),
                served: served(runs),
            }
        });
        Comparison {
            ways: ways.collect(),
            program: words,
            unreached: None,
            outside: false,
            plain_status: first.and_then(status),
            plain_served: served(plain),
            plain_words: (first.filter(|ended| !ended.status.success())).map(RunResult::last_line),
            table,
        }
    }
}

const RUN_FIGURES: [&str; 7] = [
    "time_ms",
    "user_ms",
    "system_ms",
    "rss_bytes",
    "faults",
    "huge_faults",
    "huge_percent",
];

/// Number of huge pages that the host has mapped at first touches so far. Other programs count too.
fn huge_faults(root: &Root) -> f64 {
    let events = Events::read(root).ok();
    let count = events.and_then(|events| events.get("thp_fault_alloc"));
    count.unwrap_or_default() as f64
}

/// Waits for the reapers of ended programs: they would take a CPU from the next run.
fn wait_for_memory() -> Result<(), Error> {
    let (root, clock) = (Root::host(), Instant::now());
    while !reapers_of_the_ended(&root)?.is_empty() && clock.elapsed() < REAPER_TIMEOUT {
        interrupt::check()?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
