//! `jumbo bench text`: gains of program text on huge pages, and their costs.
//!
//! A generated program with much text (`program`), by each method: faults, time, memory, cold start.
//! Real programs with much text are among the [`programs`](crate::programs).
//!
//! Each sample reports how its text was mapped: none of it by PMDs on base pages, else at least half,
//! in the kind of memory that the method claims.
//!
//! No other process runs the program, so the state of its page cache is known: as readahead leaves
//! it, in huge folios, or empty.

mod process;
mod program;
#[expect(
    unsafe_code,
    reason = "calls functions that were made when it is measured"
)]
mod worker;

pub(crate) use worker::text;

use jumbo::units::Bytes;

use crate::group::{self, Group, rows};
use crate::memory::check_available;
use crate::table::Table;
use crate::{Error, Settings};
use process::{PROCESSES, TextBench, TextMethod, program_of};
use program::{CacheState, TextProgram};

/// Minimum size: the TLB would cover half of a smaller text.
pub const MIN_SIZE: Bytes = TOUCHED_BYTES;

/// Text that a timed program touches: more than the TLB covers, less than the whole text.
const TOUCHED_BYTES: Bytes = Bytes(64 << 20);

/// Number of calls, without and with `--quick`: some tenths of a second to one second.
const CALLS: [u64; 2] = [4_000_000, 1_000_000];

/// Divisor of the text size for the processes whose memory is measured.
const PART_DIVISOR: u64 = 8;

const PUBLISHED_FAULTS: &str = "7728 to 598 (12.9)";
const PUBLISHED_TIME: &str = "307.1 to 289.6 s (1.06)";

/// Measures the table, with a program of `size` bytes of text; `quick` reduces the work.
pub fn measure(settings: &Settings, size: Bytes, quick: bool) -> Result<Table, Error> {
    let part = Bytes(size.0 / PART_DIVISOR);
    // The programs in the page cache, and one with a copy and an image, or many with a copy each.
    check_available(Bytes(size.0 * 4 + part.0 * (PROCESSES as u64 + 2)))?;
    let mut table = Table::new("text", format!("{size} of text"), settings)?;
    let make = |size| {
        settings.progress.set_message("making programs");
        TextProgram::make(&settings.jumbo, size)
    };
    let mut bench = TextBench {
        settings,
        whole: [make(size)?, make(size)?],
        part: [make(part)?, make(part)?],
        methods: Vec::new(),
    };
    for method in TextMethod::HUGE {
        let result = bench.try_out(method);
        let result = result.map_err(|error| error.of_side(method.name));
        bench
            .methods
            .extend(table.available(method.name, result)?.map(|()| method));
    }
    let calls = CALLS[usize::from(quick)];
    let groups = vec![
        bench.faults(),
        bench.times(calls),
        bench.cold_starts(),
        bench.memory(),
    ];
    group::measure(settings, table, groups)
}

impl<'a> TextBench<'a> {
    /// Adds a side that runs the large program, with this state of the page cache.
    fn side(
        &'a self,
        group: &mut Group<'a>,
        (method, cached): (TextMethod, CacheState),
        (touched, calls): (Bytes, u64),
    ) -> usize {
        let program = program_of(&self.whole, method);
        let what = method.work(program, touched, calls);
        let name = match cached {
            CacheState::Dropped => format!("{}, not cached", method.name),
            _ => method.name.to_owned(),
        };
        let own = if method == TextMethod::SHARED {
            program.size
        } else {
            Bytes(0)
        };
        group.side(name, own, move || {
            program.cache(cached)?;
            self.run(program, method, what)
        })
    }

    /// Touches of all text in ascending order: the best case for base pages (16 per fault).
    fn faults(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "faults");
        let what = (self.whole[0].size, 0);
        let cold = self.side(&mut group, (TextMethod::BASE, CacheState::Dropped), what);
        let measure = "faults, all text touched";
        rows! { group; "faults_aa" => measure, "touch_faults", cold / cold; }
        for &method in &self.methods {
            let side = self.side(&mut group, (method, method.cached), what);
            let name = format!("faults{}", method.suffix);
            let published = Some(PUBLISHED_FAULTS).filter(|_| method == TextMethod::FILE);
            rows! { group; name => measure, "touch_faults", cold / side, published; }
        }
        group
    }

    /// Random calls, of one function per page, whose code fits the caches.
    fn times(&'a self, calls: u64) -> Group<'a> {
        let mut group = Group::new(self.settings, "time");
        let what = (TOUCHED_BYTES, calls);
        let base = self.side(&mut group, (TextMethod::BASE, CacheState::Base), what);
        let measure = &format!("calls in {TOUCHED_BYTES}, one function a page");
        rows! { group; "time_aa" => measure, "calls_ms", base / base; }
        for &method in &self.methods {
            let side = self.side(&mut group, (method, method.cached), what);
            let name = format!("time{}", method.suffix);
            let published = Some(PUBLISHED_TIME).filter(|_| name == "time");
            rows! { group; name => measure, "calls_ms", base / side, published; }
        }
        group
    }

    /// Time from start to end with an empty page cache: the program comes from the disk.
    fn cold_starts(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "cold start");
        let what = (TOUCHED_BYTES, 0);
        let base = self.side(&mut group, (TextMethod::FOUND, CacheState::Dropped), what);
        let measure = &format!("start to end, {TOUCHED_BYTES} from disk");
        rows! { group; "cold_start_aa" => measure, "whole_ms", base / base; }
        group.value("cold_start_plain_ms", "whole_ms", base);
        if self.methods.contains(&TextMethod::FILE) {
            let advised = self.side(&mut group, (TextMethod::FILE, CacheState::Dropped), what);
            rows! { group; "cold_start" => measure, "whole_ms", base / advised; }
            group.value("cold_start_ms", "whole_ms", advised);
        }
        group
    }

    /// Proportional memory (PSS) of the text of several processes of one program.
    fn memory(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "memory");
        let size = self.part[0].size;
        let side = |group: &mut Group<'a>, method: TextMethod| {
            group.side(method.name, size, move || self.resident(method))
        };
        let base = side(&mut group, TextMethod::BASE);
        let measure = &format!("text of {PROCESSES} x {size}");
        rows! { group; "memory_16_aa" => measure, "pss_bytes", base / base; }
        for &method in &self.methods {
            let own = side(&mut group, method);
            let name = match method {
                TextMethod::FILE => "memory_16_file_vs_base",
                _ => "memory_16_shared_vs_base",
            };
            rows! { group; name => measure, "pss_bytes", base / own; }
        }
        group
    }
}
