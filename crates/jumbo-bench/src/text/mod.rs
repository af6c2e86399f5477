//! `jumbo bench text`: what a program gains whose text is on huge pages, and what that costs.
//!
//! Two things are measured. A program with much text (`program`), made for it, on each rung of the ladder: faults, time, memory, the
//! set-up, a cold start. And programs as they are (`real`), which shall not lose.
//!
//! Each sample of the first kind says how its text was mapped: base pages have none mapped by a PMD, the others at least half, of the
//! kind of memory that their rung has.
//!
//! No other process runs the program, so what the page cache has of it is known: as the kernel reads a file ahead, in huge folios, or
//! nothing.

#[expect(unsafe_code, reason = "opens counters by perf_event_open(2)")]
mod counters;
mod process;
mod program;
mod real;
#[expect(
    unsafe_code,
    reason = "calls functions that were made when it is measured"
)]
mod worker;

pub(crate) use worker::text;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;

use crate::group::{self, Group, rows};
use crate::memory::room;
use crate::table::Table;
use crate::task::Text;
use crate::{Error, Settings};
use counters::Counters;
use process::{Bench, PROCESSES, PSS, Rung, of_rung};
use program::{Cached, Program};

/// The least size: with less than what is called at random the processor's own caches of addresses hold half of it.
pub const MIN_SIZE: Bytes = TOUCHED;

/// The text that a timed program touches: more than processors keep addresses of, less than all of
/// its text.
const TOUCHED: Bytes = Bytes(64 << 20);

/// How often it calls a function then: for some tenths of a second, or one.
const CALLS: [u64; 2] = [4_000_000, 1_000_000];

/// The text of each of the processes whose memory is measured, as a part of the other program's.
const PART: u64 = 8;

const PUBLISHED_FAULTS: &str = "7728 to 598 (12.9)";
const PUBLISHED_TIME: &str = "307.1 to 289.6 s (1.06)";
const PUBLISHED_MISSES: &str = "published: 1.22e9 to 5.19e7 iTLB misses (23.5)";

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
        let tried = bench.try_out(rung);
        let tried = tried.map_err(|error| error.of_side(rung.name));
        bench
            .rungs
            .extend(table.found(rung.name, tried)?.map(|()| rung));
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
        bench.cold_starts(),
        bench.setups(),
        bench.memory(),
    ];
    if !quick {
        groups.push(bench.times(calls, true, counted));
    }
    groups.extend(real::groups(settings, quick, &mut table));
    group::measure(settings, table, groups)
}

impl<'a> Bench<'a> {
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
            Cached::Dropped => format!("{}, not cached", rung.name),
            _ => rung.name.to_owned(),
        };
        let own = if rung == Rung::SHARED {
            program.size
        } else {
            Bytes(0)
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
        let cold = self.side(&mut group, (Rung::BASE, Cached::Dropped), what);
        let base = self.side(&mut group, (Rung::BASE, Cached::Base), what);
        let found = self.side(&mut group, (Rung::FOUND, Cached::AsRead), what);
        let measure = "faults, all text touched";
        rows! { group; "faults_aa" => measure, "touch_faults", cold / cold; }
        for &rung in &self.rungs {
            let side = self.side(&mut group, (rung, rung.cached), what);
            let name = |of: &str| format!("faults{}{of}", rung.suffix);
            let published = Some(PUBLISHED_FAULTS).filter(|_| rung == Rung::FILE);
            rows! { group;
                name("") => measure, "touch_faults", cold / side, published;
                name("_cached") => measure, "touch_faults", base / side;
                name("_as_found") => measure, "touch_faults", found / side;
            }
            let whole = "faults, start and move included";
            rows! { group; name("_with_start") => whole, "faults", cold / side; }
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
        let base = self.side(&mut group, (Rung::BASE, Cached::Base), what);
        let measure = &format!("calls in {TOUCHED}, {which}");
        rows! { group; format!("{key}_aa") => measure, "calls_ms", base / base; }
        for &rung in &self.rungs {
            let side = self.side(&mut group, (rung, rung.cached), what);
            let name = format!("{key}{}", rung.suffix);
            let published = Some(PUBLISHED_TIME).filter(|_| name == "time");
            rows! { group; &name => measure, "calls_ms", base / side, published; }
            if !any {
                let whole = "the same, start and move included";
                rows! { group; format!("{name}_with_setup") => whole, "whole_ms", base / side; }
            }
            if counted && name == "time" {
                for figure in Counters::NAMES {
                    group.value(figure, figure, side);
                    group.value(format!("{figure}_base"), figure, base);
                }
            }
        }
        group
    }

    /// From the start to the end, with nothing of the program in the page cache: it comes from the disk.
    fn cold_starts(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "cold start");
        let what = (TOUCHED, 0, false);
        let base = self.side(&mut group, (Rung::FOUND, Cached::Dropped), what);
        let measure = &format!("start to end, {TOUCHED} from disk");
        rows! { group; "cold_start_aa" => measure, "whole_ms", base / base; }
        group.value("cold_start_plain_ms", "whole_ms", base);
        if self.rungs.contains(&Rung::FILE) {
            let advised = self.side(&mut group, (Rung::FILE, Cached::Dropped), what);
            rows! { group; "cold_start" => measure, "whole_ms", base / advised; }
            group.value("cold_start_ms", "whole_ms", advised);
        }
        group
    }

    /// The time of a move of the text, for each 100 MiB, by the report.
    fn setups(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "set-up");
        if !self.rungs.contains(&Rung::SHARED) {
            return group;
        }
        let program = of_rung(&self.whole, Rung::SHARED);
        let mut side = |name: &str, beside: bool| {
            group.side(name, program.size, move || {
                program.cache(Rung::SHARED.cached)?;
                self.setup(program, beside)
            })
        };
        let made = side("shared image, made", false);
        let found = side("shared image, found", true);
        let measure = "set-up of 100 MiB";
        group.value("setup_ms_per_100mib", "setup_ms", made);
        group.value("setup_found_ms_per_100mib", "setup_ms", found);
        rows! { group;
            "setup_aa" => measure, "setup_ms", made / made;
            "setup_made_vs_found" => measure, "setup_ms", made / found;
        }
        group
    }

    /// The memory of the text of some processes of one program, each page divided by those that
    /// have it.
    fn memory(&'a self) -> Group<'a> {
        let mut group = Group::new(self.settings, "memory");
        let mut side = |rung: Rung| {
            let program = of_rung(&self.part, rung);
            group.side(rung.name, program.size, move || {
                program.cache(rung.cached)?;
                self.resident(program, rung)
            })
        };
        let base = side(Rung::BASE);
        let sides: Vec<_> = self.rungs.iter().map(|&rung| (rung, side(rung))).collect();
        for (processes, figure) in PROCESSES.into_iter().zip(PSS) {
            let measure = &format!("text of {processes} x {}", self.part[0].size);
            let name = |of: &str| format!("memory_{processes}{of}");
            for &(rung, side) in &sides {
                let huge = if rung == Rung::FILE {
                    "_file"
                } else {
                    rung.suffix
                };
                let name = name(&format!("{huge}_vs_base"));
                rows! { group; name => measure, figure, base / side; }
            }
        }
        rows! { group; "memory_16_aa" => "text of 16 processes", PSS[2], base / base; }
        group
    }
}
