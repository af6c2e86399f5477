//! `jumbo bench text`: what a program gains whose text is on huge pages, and what that costs.
//!
//! Two things are measured. A [`Program`] with much text, made for it, on each rung of the ladder: faults, time, memory, the
//! set-up, a cold start. And programs as they are ([`real`]), which shall not lose.
//!
//! Each sample of the first kind says how its text was mapped: base pages have none mapped by a PMD, the others at least half, of the
//! kind of memory that their rung has.
//!
//! No other process runs the program, so what the page cache has of it is known: as the kernel reads a file ahead, in huge folios, or
//! nothing.

#[expect(unsafe_code, reason = "maps a file, congruent to its offsets")]
mod cache;
#[expect(unsafe_code, reason = "opens counters by perf_event_open(2)")]
mod counters;
mod program;
mod real;
#[expect(
    unsafe_code,
    reason = "calls functions that were made when it is measured"
)]
mod worker;

pub(crate) use worker::{Text, text};

use std::io::Read as _;
use std::process::Stdio;
use std::time::Instant;

use jumbo::kernel::Root;
use jumbo::kernel::smaps::Smaps;
use jumbo::units::Bytes;
use serde_json::Value;

use crate::child::{Launch, Talk, worker_in};
use crate::claim::{self, Claim};
use crate::group::Group;
use crate::memory::room;
use crate::table::{Missing, Table};
use crate::worker::{Figures, Task, ms, with};
use crate::{Error, Settings, group};
use counters::Counters;
use program::{Cached, Program};

/// The least size: with less than [`TOUCHED`] the processor's own caches of addresses hold half of it.
pub const MIN_SIZE: Bytes = TOUCHED;

/// What a program touches whose time is measured: more than processors keep addresses of, less than all of its text.
const TOUCHED: Bytes = Bytes(64 << 20);

/// How often it calls a function then: for some tenths of a second, or one.
const CALLS: [u64; 2] = [4_000_000, 1_000_000];

/// The text of each of the processes whose memory is measured, as a part of the other program's.
const PART: u64 = 4;

/// How many processes those are.
const PROCESSES: [usize; 3] = [1, 4, 16];

const PUBLISHED_FAULTS: &str = "7728 to 598 (12.9)";
const PUBLISHED_TIME: &str = "307.1 to 289.6 s (1.06)";
const PUBLISHED_MISSES: &str = "published: 1.22e9 to 5.19e7 iTLB misses (23.5)";

/// Nothing but text differs.
const TEXT_ALONE: &str = "--heap=off --maps=off --free=off --reaper=off --data=off";

/// On which kind of page text is, and whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rung {
    /// None huge.
    Base,
    /// As a plain program has it.
    Found,
    File,
    Shared,
    Private,
}

impl Rung {
    const HUGE: [Self; 3] = [Self::File, Self::Shared, Self::Private];

    fn name(self) -> &'static str {
        match self {
            Self::Base => "4 KiB pages",
            Self::Found => "as found",
            Self::File => "file, primed",
            Self::Shared => "shared image",
            Self::Private => "private copy",
        }
    }

    /// What is added to the names of rows on it. What costs nothing has the plain name.
    fn suffix(self) -> &'static str {
        match self {
            Self::Base | Self::Found | Self::File => "",
            Self::Shared => "_shared",
            Self::Private => "_private",
        }
    }

    fn launch(self) -> Launch {
        let text = match self {
            Self::Base | Self::Found => return Launch::Plain,
            Self::File => "file",
            Self::Shared => "shared",
            Self::Private => "private",
        };
        Launch::Jumbo(format!("--text={text} {TEXT_ALONE}"))
    }

    /// What the page cache is to have of the program before it starts. Copies and images are made of text that is not huge yet.
    fn cached(self) -> Cached {
        match self {
            Self::Found => Cached::AsRead,
            Self::File => Cached::Primed,
            Self::Base | Self::Shared | Self::Private => Cached::Base,
        }
    }

    fn claims(self, touched: Bytes) -> Vec<Claim> {
        let huge = |figure| claim::text_on_huge(figure, touched);
        match self {
            Self::Base => claim::text_on_base(touched),
            Self::Found => claim::text(touched),
            Self::File => huge("text_file_huge_bytes"),
            Self::Shared => huge("text_shared_huge_bytes"),
            Self::Private => huge("text_private_huge_bytes"),
        }
    }

    /// Of all text the part `touched`, and so many calls.
    fn work(self, program: &Program, touched: Bytes, calls: u64) -> Text {
        Text {
            size: program.size,
            touched,
            calls,
            any: false,
            base: self == Self::Base,
            stays: false,
        }
    }
}

/// Measures the table, with a program of `size` bytes of text; with less work where `quick` is set.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, size: Bytes, quick: bool) -> Result<Table, Error> {
    let part = Bytes(size.0 / PART);
    let most = PROCESSES.iter().max().copied().unwrap_or_default() as u64;
    // The programs in the page cache; and one with a copy and an image, or many with a copy each.
    room(&Root::host(), Bytes(size.0 * 4 + part.0 * (most + 2)))?;
    let mut table = Table::new("text", format!("{size} of text"), settings)?;
    let make = |size| {
        settings.progress.set_message("making programs");
        Program::make(&settings.jumbo, size)
    };
    let mut bench = Bench {
        settings,
        whole: [make(size)?, make(size)?],
        part: [make(part)?, make(part)?],
        rungs: Vec::new(),
    };
    for rung in Rung::HUGE {
        match bench.try_out(rung) {
            Ok(()) => bench.rungs.push(rung),
            Err(error) if error.is_of_host() => table.missing.push(Missing {
                what: rung.name(),
                why: error.of_side(rung.name()).to_string(),
            }),
            Err(error) => return Err(error),
        }
    }
    let obstacle = Counters::obstacle();
    let counted = obstacle.is_none();
    if let Some(error) = obstacle {
        let why = format!("{error} (perf_event_open); {PUBLISHED_MISSES}");
        table.without(&Counters::NAMES, "TLB misses", why);
    }
    let calls = CALLS[usize::from(quick)];
    let mut groups = vec![
        bench.faults(),
        bench.times(calls, false, counted),
        bench.times(calls, true, counted),
        bench.cold_starts(),
        bench.setups(),
        bench.memory(),
    ];
    groups.extend(real::groups(settings, quick, &mut table));
    group::measure(settings, table, groups)
}

/// The programs: each once for the runs with base pages in the page cache, and once primed.
struct Bench<'a> {
    settings: &'a Settings,
    whole: [Program; 2],
    part: [Program; 2],
    /// Those of [`Rung::HUGE`] that are to be had here.
    rungs: Vec<Rung>,
}

/// That of two programs which a rung runs.
fn of_rung([base, primed]: &[Program; 2], rung: Rung) -> &Program {
    if rung == Rung::File { primed } else { base }
}

impl<'a> Bench<'a> {
    /// A process of a program: what it says of itself, and how long it took from its start to its end.
    fn run(&self, program: &Program, rung: Rung, what: Text) -> Result<Figures, Error> {
        let launch = rung.launch();
        let command = self.command(program, &launch, what);
        let clock = Instant::now();
        let mut talk = Talk::start(command, Stdio::piped())?;
        let figures: Figures = talk.hear()?;
        talk.end()?;
        let whole = ms(clock.elapsed());
        claim::check(&rung.claims(what.touched), &launch, &figures)?;
        Ok(with(figures, [("whole_ms", whole)]))
    }

    fn command(&self, program: &Program, launch: &Launch, what: Text) -> std::process::Command {
        let path = program.path();
        worker_in(path.as_os_str(), launch, self.settings, &Task::Text(what))
    }

    /// Whether this host has that rung.
    fn try_out(&self, rung: Rung) -> Result<(), Error> {
        let program = of_rung(&self.part, rung);
        program.cache(rung.cached())?;
        let what = rung.work(program, program.size, 0);
        self.run(program, rung, what).map(drop)
    }

    /// A side that runs the large program, with that in the page cache.
    fn side(
        &'a self,
        group: &mut Group<'a>,
        (rung, cached): (Rung, Cached),
        (touched, calls, any): (Bytes, u64, bool),
    ) -> usize {
        let program = of_rung(&self.whole, rung);
        let what = Text {
            any,
            ..rung.work(program, touched, calls)
        };
        let name = match cached {
            Cached::Dropped => format!("{}, not cached", rung.name()),
            _ => rung.name().to_owned(),
        };
        let own = match rung {
            Rung::Base | Rung::Found | Rung::File => Bytes(0),
            Rung::Shared | Rung::Private => program.size,
        };
        group.side(name, own, move || {
            program.cache(cached)?;
            self.run(program, rung, what)
        })
    }

    /// All of the text touched, in the order of its addresses: the best case for base pages, of which a fault maps 16 then.
    fn faults(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "faults");
        let what = (self.whole[0].size, 0, false);
        let cold = self.side(&mut group, (Rung::Base, Cached::Dropped), what);
        let base = self.side(&mut group, (Rung::Base, Cached::Base), what);
        let found = self.side(&mut group, (Rung::Found, Cached::AsRead), what);
        let measure = "faults, all text touched";
        group.against_itself(("faults_aa", measure, "touch_faults"), cold);
        for &rung in &self.rungs {
            let side = self.side(&mut group, (rung, rung.cached()), what);
            let name = format!("faults{}", rung.suffix());
            // The move to a copy has touched all of it before.
            if rung != Rung::Private {
                let row = group.ratio((&name, measure, "touch_faults"), [cold, side]);
                row.published = Some(PUBLISHED_FAULTS).filter(|_| rung == Rung::File);
                for (suffix, beside) in [("cached", base), ("as_found", found)] {
                    let name = format!("{name}_{suffix}");
                    group.ratio((&name, measure, "touch_faults"), [beside, side]);
                }
            }
            let (name, whole) = (
                format!("{name}_with_start"),
                "faults, start and move included",
            );
            group.ratio((&name, whole, "faults"), [cold, side]);
        }
        group
    }

    /// Functions called at random: one in each page, which the processor's caches hold; or all of them.
    fn times(&'a self, calls: u64, any: bool, counted: bool) -> Group<'a> {
        let (key, which) = match any {
            false => ("time", "one function a page"),
            true => ("time_any", "any function"),
        };
        let mut group = Group::new(self.settings, key);
        let what = (TOUCHED, calls, any);
        let base = self.side(&mut group, (Rung::Base, Cached::Base), what);
        let measure = format!("calls in {TOUCHED}, {which}");
        group.against_itself((&format!("{key}_aa"), &measure, "calls_ms"), base);
        for &rung in &self.rungs {
            let side = self.side(&mut group, (rung, rung.cached()), what);
            let name = format!("{key}{}", rung.suffix());
            let row = group.ratio((&name, &measure, "calls_ms"), [base, side]);
            row.published = Some(PUBLISHED_TIME).filter(|_| name == "time");
            if !any {
                let (name, whole) = (
                    format!("{name}_with_setup"),
                    "the same, start and move included",
                );
                group.ratio((&name, whole, "whole_ms"), [base, side]);
            }
            if counted && name == "time" {
                for figure in Counters::NAMES {
                    group.value(figure, figure, side);
                    group.value(&format!("{figure}_base"), figure, base);
                }
            }
        }
        group
    }

    /// From the start to the end, with nothing of the program in the page cache: it comes from the disk.
    fn cold_starts(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "cold start");
        let what = (TOUCHED, 0, false);
        let base = self.side(&mut group, (Rung::Found, Cached::Dropped), what);
        let measure = format!("start to end, {TOUCHED} from disk");
        group.against_itself(("cold_start_aa", &measure, "whole_ms"), base);
        group.value("cold_start_plain_ms", "whole_ms", base);
        if self.rungs.contains(&Rung::File) {
            let advised = self.side(&mut group, (Rung::File, Cached::Dropped), what);
            group.ratio(("cold_start", &measure, "whole_ms"), [base, advised]);
            group.value("cold_start_ms", "whole_ms", advised);
        }
        group
    }

    /// What a move of the text takes, for each 100 MiB, by the report.
    fn setups(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "set-up");
        let program = of_rung(&self.whole, Rung::Shared);
        let mut side = |rung: Rung, name: &str, beside: bool| {
            group.side(name, program.size, move || {
                program.cache(rung.cached())?;
                self.setup(program, rung, beside)
            })
        };
        let measure = "set-up of 100 MiB";
        let mut sides = Vec::new();
        for (rung, beside, name, key) in [
            (
                Rung::Private,
                false,
                "private copy",
                "setup_private_ms_per_100mib",
            ),
            (
                Rung::Shared,
                false,
                "shared image, made",
                "setup_ms_per_100mib",
            ),
            (
                Rung::Shared,
                true,
                "shared image, found",
                "setup_found_ms_per_100mib",
            ),
        ] {
            if self.rungs.contains(&rung) {
                sides.push((side(rung, name, beside), key));
            }
        }
        for &(side, key) in &sides {
            group.value(key, "setup_ms", side);
        }
        if let [(private, _), (made, _), (found, _)] = sides[..] {
            group.against_itself(("setup_aa", measure, "setup_ms"), private);
            for (name, side) in [
                ("setup_made_vs_private", made),
                ("setup_found_vs_private", found),
            ] {
                group.ratio((name, measure, "setup_ms"), [private, side]);
            }
        }
        group
    }

    /// The set-up of one process, where `beside` is set with another one that has the image already.
    fn setup(&self, program: &Program, rung: Rung, beside: bool) -> Result<Figures, Error> {
        let _other = match beside {
            true => Some(self.stay(program, rung)?),
            false => None,
        };
        let Launch::Jumbo(options) = rung.launch() else {
            return Ok(Figures::new());
        };
        let launch = Launch::Jumbo(format!("--report=json {options}"));
        let what = rung.work(program, program.size, 0);
        let mut talk = Talk::start(self.command(program, &launch, what), Stdio::piped())?;
        let figures: Figures = talk.hear()?;
        claim::check(&rung.claims(what.touched), &launch, &figures)?;
        let mut report = Vec::new();
        if let Some(stderr) = &mut talk.child.stderr {
            stderr.read_to_end(&mut report)?;
        }
        talk.end()?;
        let report: Value = serde_json::from_slice(&report)
            .map_err(|error| Error::Answer(talk.command.clone(), error))?;
        let moved = |name| {
            report["obtained"]["text"][name]
                .as_f64()
                .unwrap_or_default()
        };
        let of_100_mib = (moved("shared") + moved("private")) / f64::from(100 << 20);
        let took = moved("move_ns") / 1e6 / of_100_mib;
        Ok(with(figures, [("setup_ms", took)]))
    }

    /// A process that has touched its text and stays.
    fn stay(&self, program: &Program, rung: Rung) -> Result<Staying, Error> {
        let launch = rung.launch();
        let what = Text {
            stays: true,
            ..rung.work(program, program.size, 0)
        };
        let mut talk = Talk::start(self.command(program, &launch, what), Stdio::piped())?;
        let figures: Figures = talk.hear()?;
        claim::check(&rung.claims(what.touched), &launch, &figures)?;
        let pid = talk.child.id();
        Ok(Staying { pid, talk })
    }

    /// What the text of some processes of one program takes, each page divided by those that have it.
    fn memory(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "memory");
        let mut side = |rung: Rung| {
            let program = of_rung(&self.part, rung);
            let most = PROCESSES.iter().max().copied().unwrap_or_default() as u64;
            let own = match rung {
                Rung::Private => Bytes(program.size.0 * most),
                _ => program.size,
            };
            group.side(rung.name(), own, move || {
                program.cache(rung.cached())?;
                self.resident(program, rung)
            })
        };
        let base = side(Rung::Base);
        let sides: Vec<_> = self.rungs.iter().map(|&rung| (rung, side(rung))).collect();
        let of = |rung| sides.iter().find(|side| side.0 == rung).map(|side| side.1);
        for (processes, figure) in PROCESSES.into_iter().zip(PSS) {
            let measure = format!("text of {processes} x {}", self.part[0].size);
            let name = format!("memory_{processes}");
            if let (Some(private), Some(shared)) = (of(Rung::Private), of(Rung::Shared)) {
                group.ratio((&name, &measure, figure), [private, shared]);
            }
            for &(rung, side) in &sides {
                let huge = rung.suffix();
                let name = format!(
                    "{name}{}_vs_base",
                    if huge.is_empty() { "_file" } else { huge }
                );
                group.ratio((&name, &measure, figure), [base, side]);
            }
        }
        group.against_itself(("memory_16_aa", "text of 16 processes", PSS[2]), base);
        group
    }

    fn resident(&self, program: &Program, rung: Rung) -> Result<Figures, Error> {
        let (root, mut all) = (Root::host(), Vec::new());
        let mut figures = Figures::new();
        for (count, figure) in PROCESSES.into_iter().zip(PSS) {
            while all.len() < count {
                all.push(self.stay(program, rung)?);
            }
            let mut sum = 0;
            for process in &all {
                let smaps = Smaps::read(&root, process.pid)?;
                let mut mappings = smaps.mappings();
                let text = mappings.find(|mapping| worker::is_text(mapping, program.size));
                sum += text.map_or(0, |text| text.pss.0);
            }
            figures.insert(figure.to_owned(), sum as f64);
        }
        for process in &mut all {
            process.talk.end()?;
        }
        Ok(figures)
    }
}

/// The figures of [`PROCESSES`].
const PSS: [&str; PROCESSES.len()] = ["pss_1_bytes", "pss_4_bytes", "pss_16_bytes"];

/// A process that stays until its input ends.
struct Staying {
    pid: u32,
    talk: Talk,
}
