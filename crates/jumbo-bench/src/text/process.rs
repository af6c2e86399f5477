//! Processes of the program with much text: `Bench`; and on which kind of page the text of each is, and whose: `Rung`.

use std::io::Read as _;
use std::time::Instant;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::smaps::Smaps;
use serde_json::Value;

use super::program::{Cached, Program};
use super::worker::is_text;
use crate::claim::{Claim, DRY_RUN, exactly, most_of, part_of};
use crate::figures::{Figures, ms, with};
use crate::launch::Launch;
use crate::talk::Talk;
use crate::task::{Task, Text};
use crate::work::Worker;
use crate::{Error, Settings};

/// The numbers of processes whose memory is measured at once...
pub(super) const PROCESSES: [usize; 3] = [1, 4, 16];
/// ... with these figures.
pub(super) const PSS: [&str; PROCESSES.len()] = ["pss_1_bytes", "pss_4_bytes", "pss_16_bytes"];

/// The programs: each once for the runs with base pages in the page cache, and once primed.
pub(super) struct Bench<'a> {
    pub(super) settings: &'a Settings,
    pub(super) whole: [Program; 2],
    pub(super) part: [Program; 2],
    /// Those of [`Rung::HUGE`] that are to be had here.
    pub(super) rungs: Vec<Rung>,
}

/// The one of two programs that a rung runs.
pub(super) fn of_rung([base, primed]: &[Program; 2], rung: Rung) -> &Program {
    if rung == Rung::FILE { primed } else { base }
}

impl Bench<'_> {
    /// A process of a program: what it says of itself, and how long it took from its start to its end.
    pub(super) fn run(&self, program: &Program, rung: Rung, what: Text) -> Result<Figures, Error> {
        let clock = Instant::now();
        let worker = Worker::new(rung.launch(), Task::Text(what)).of(program.path());
        let figures = worker.sample(self.settings, &rung.claims(what.touched))?;
        Ok(with(figures, [("whole_ms", ms(clock.elapsed()))]))
    }

    /// Whether this host has that rung.
    pub(super) fn try_out(&self, rung: Rung) -> Result<(), Error> {
        let program = of_rung(&self.part, rung);
        program.cache(rung.cached)?;
        let what = rung.work(program, program.size, 0);
        self.run(program, rung, what).map(drop)
    }

    /// The move of one process onto an image, where `beside` is set with another one that has the image already.
    pub(super) fn setup(&self, program: &Program, beside: bool) -> Result<Figures, Error> {
        let rung = Rung::SHARED;
        let _other = beside.then(|| self.stay(program, rung)).transpose()?;
        let Launch::Jumbo(options) = rung.launch() else {
            return Ok(Figures::new());
        };
        let launch = Launch::Jumbo(format!("--report=json {options}"));
        let what = rung.work(program, program.size, 0);
        let worker = Worker::new(launch, Task::Text(what)).of(program.path());
        let (mut talk, figures) = worker.begin(self.settings, &rung.claims(what.touched))?;
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
        if (moved("images_made") > 0.0) == beside {
            let found = "an image was made where there was one, or none";
            return Err(Error::claim(found, DRY_RUN));
        }
        let of_100_mib = moved("shared") / f64::from(100 << 20);
        let took = moved("move_ns") / 1e6 / of_100_mib;
        Ok(with(figures, [("setup_ms", took)]))
    }

    /// A process that has touched its text and stays.
    fn stay(&self, program: &Program, rung: Rung) -> Result<Talk, Error> {
        let what = Text {
            stays: true,
            ..rung.work(program, program.size, 0)
        };
        let worker = Worker::new(rung.launch(), Task::Text(what)).of(program.path());
        let (talk, _) = worker.begin(self.settings, &rung.claims(what.touched))?;
        Ok(talk)
    }

    /// The memory of the text of [`PROCESSES`], each page divided by those that have it.
    pub(super) fn resident(&self, program: &Program, rung: Rung) -> Result<Figures, Error> {
        let (root, mut all) = (Root::host(), Vec::new());
        let mut figures = Figures::new();
        for (count, figure) in PROCESSES.into_iter().zip(PSS) {
            while all.len() < count {
                all.push(self.stay(program, rung)?);
            }
            let mut sum = 0;
            for process in &all {
                let smaps = Smaps::read(&root, process.child.id())?;
                let mut mappings = smaps.mappings();
                let text = mappings.find(|mapping| is_text(mapping, program.size));
                sum += text.map_or(0, |text| text.pss.0);
            }
            figures.insert(figure.to_owned(), sum as f64);
        }
        for process in &mut all {
            process.end()?;
        }
        Ok(figures)
    }
}

/// Nothing but text differs.
const TEXT_ALONE: &str = "--heap=off --maps=off --free=off --reaper=off --data=off";

/// The kind of page that text is on, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rung {
    pub(super) name: &'static str,
    /// The end of the names of rows on it. The rung that costs nothing has the plain names.
    pub(super) suffix: &'static str,
    /// The mode of `jumbo run --text`; empty: plain.
    mode: &'static str,
    /// How the page cache has the program before it starts. Images are made of text that is not huge yet.
    pub(super) cached: Cached,
    /// The figure that counts its huge pages.
    huge: &'static str,
}

impl Rung {
    /// None of it is huge.
    pub(super) const BASE: Self = Self::new(["4 KiB pages", "", "", ""], Cached::Base);
    /// As a plain program has it.
    pub(super) const FOUND: Self = Self::new(["as found", "", "", ""], Cached::AsRead);
    pub(super) const FILE: Self = Self::new(
        ["file, primed", "", "file", "text_file_huge_bytes"],
        Cached::Primed,
    );
    pub(super) const SHARED: Self = Self::new(
        [
            "shared image",
            "_shared",
            "shared",
            "text_shared_huge_bytes",
        ],
        Cached::Base,
    );
    pub(super) const HUGE: [Self; 2] = [Self::FILE, Self::SHARED];

    const fn new([name, suffix, mode, huge]: [&'static str; 4], cached: Cached) -> Self {
        Self {
            name,
            suffix,
            mode,
            cached,
            huge,
        }
    }

    pub(super) fn launch(self) -> Launch {
        match self.mode {
            "" => Launch::Plain,
            mode => Launch::Jumbo(format!("--text={mode} {TEXT_ALONE}")),
        }
    }

    /// The text that was touched is there: none of it on huge pages, or at least half, of the kind
    /// that the rung has.
    pub(super) fn claims(self, touched: Bytes) -> Vec<Claim> {
        let mut claims = vec![most_of("text_resident_bytes", touched)];
        if self == Self::BASE {
            claims.push(exactly("text_huge_bytes", 0));
        }
        if !self.huge.is_empty() {
            claims.push(part_of(self.huge, 50, touched));
        }
        claims
    }

    /// Of all text the part `touched`, and so many calls.
    pub(super) fn work(self, program: &Program, touched: Bytes, calls: u64) -> Text {
        Text {
            size: program.size,
            touched,
            calls,
            any: false,
            base: self == Self::BASE,
            stays: false,
        }
    }
}
