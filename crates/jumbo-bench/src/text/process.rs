//! Processes of the program with much text: `TextBench`; and the page type and origin of their
//! text: `TextMethod`.

use std::time::Instant;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::smaps::Smaps;

use super::program::{CacheState, TextProgram};
use super::worker::is_text;
use crate::claim::{Claim, at_least_percent, exactly, nearly_all};
use crate::figures::{Figures, figures, ms, with};
use crate::json_child::JsonChild;
use crate::launch::Launch;
use crate::task::{Task, TextTask};
use crate::work::Worker;
use crate::{Error, Settings};

/// Number of processes whose memory is measured together.
pub(super) const PROCESSES: usize = 16;

/// Two copies of each program: one cached in base pages, one primed.
pub(super) struct TextBench<'a> {
    pub(super) settings: &'a Settings,
    pub(super) whole: [TextProgram; 2],
    pub(super) part: [TextProgram; 2],
    pub(super) methods: Vec<TextMethod>,
}

/// The copy of the program that a method runs.
pub(super) fn program_of([base, primed]: &[TextProgram; 2], method: TextMethod) -> &TextProgram {
    if method == TextMethod::FILE {
        primed
    } else {
        base
    }
}

impl TextBench<'_> {
    /// Runs one process; returns its figures, and its time from start to end.
    pub(super) fn run(
        &self,
        program: &TextProgram,
        method: TextMethod,
        what: TextTask,
    ) -> Result<Figures, Error> {
        let clock = Instant::now();
        let figures = worker(method.launch(), program, what)
            .sample(self.settings, &method.claims(what.touched))?;
        Ok(with(figures, [("whole_ms", ms(clock.elapsed()))]))
    }

    pub(super) fn try_out(&self, method: TextMethod) -> Result<(), Error> {
        let program = program_of(&self.part, method);
        program.cache(method.cached)?;
        let what = method.work(program, program.size, 0);
        self.run(program, method, what).map(drop)
    }

    /// Starts a process that touches its text and stays.
    fn stay(&self, program: &TextProgram, method: TextMethod) -> Result<JsonChild, Error> {
        let what = TextTask {
            stays: true,
            ..method.work(program, program.size, 0)
        };
        let worker = worker(method.launch(), program, what);
        let (child, _) = worker.begin(self.settings, &method.claims(what.touched))?;
        Ok(child)
    }

    /// Proportional memory of the text of [`PROCESSES`].
    pub(super) fn resident(&self, method: TextMethod) -> Result<Figures, Error> {
        let program = program_of(&self.part, method);
        program.cache(method.cached)?;
        let (root, mut all) = (Root::host(), Vec::new());
        while all.len() < PROCESSES {
            all.push(self.stay(program, method)?);
        }
        let mut sum = 0;
        for process in &all {
            let smaps = Smaps::read(&root, process.process.id())?;
            let mut mappings = smaps.mappings();
            let text = mappings.find(|mapping| is_text(mapping, program.size));
            sum += text.map_or(0, |text| text.pss.0);
        }
        for process in &mut all {
            process.wait()?;
        }
        Ok(figures([("pss_bytes", sum as f64)]))
    }
}

fn worker(launch: Launch, program: &TextProgram, what: TextTask) -> Worker {
    Worker::new(launch, Task::Text(what)).of(program.path())
}

/// Options under which only text differs from plain.
const TEXT_ONLY: &str = "--heap=off --maps=off --free=off --reaper=off --data=off";

/// Page type and origin of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TextMethod {
    pub(super) name: &'static str,
    /// Suffix of its row names; empty for the method without costs.
    pub(super) suffix: &'static str,
    /// Mode of `jumbo run --text`; empty: plain.
    mode: &'static str,
    /// Required state of the page cache. Images are made of text that is not huge yet.
    pub(super) cached: CacheState,
    /// Figure that counts its huge pages.
    huge: &'static str,
}

impl TextMethod {
    pub(super) const BASE: Self = Self::new(["4 KiB pages", "", "", ""], CacheState::Base);
    /// The state that a plain program finds after a boot.
    pub(super) const FOUND: Self = Self::new(["as found", "", "", ""], CacheState::Dropped);
    pub(super) const FILE: Self = Self::new(
        ["file, primed", "", "file", "text_file_huge_bytes"],
        CacheState::Primed,
    );
    pub(super) const SHARED: Self = Self::new(
        [
            "shared image",
            "_shared",
            "shared",
            "text_shared_huge_bytes",
        ],
        CacheState::Base,
    );
    pub(super) const HUGE: [Self; 2] = [Self::FILE, Self::SHARED];

    const fn new([name, suffix, mode, huge]: [&'static str; 4], cached: CacheState) -> Self {
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
            mode => Launch::Jumbo(format!("--text={mode} {TEXT_ONLY}")),
        }
    }

    /// Claims that the touched text is resident, and half or none of it on huge pages.
    pub(super) fn claims(self, touched: Bytes) -> Vec<Claim> {
        let mut claims = vec![nearly_all("text_resident_bytes", touched)];
        if self == Self::BASE {
            claims.push(exactly("text_huge_bytes", 0));
        }
        if !self.huge.is_empty() {
            claims.push(at_least_percent(self.huge, 50, touched));
        }
        claims
    }

    /// Task that touches `touched` bytes of the text and makes `calls` random calls.
    pub(super) fn work(self, program: &TextProgram, touched: Bytes, calls: u64) -> TextTask {
        TextTask {
            size: program.size,
            touched,
            calls,
            base: self == Self::BASE,
            stays: false,
        }
    }
}
