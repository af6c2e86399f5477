//! The process that is measured: a table of one kind, its pages prepared, looked up, pinned and released.

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use jumbo::kernel::Root;
use jumbo::units::{Order, PageSize};
use jumbo::vmemmap::{Geometry, Pinned, Vmemmap};
use serde::{Deserialize, Serialize};

use super::plain::Plain;
use crate::Error;
use crate::memory::{base_pages_only, had};
use crate::worker::{Figures, ms, with};

/// A kind of table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// Descriptors that are all there.
    Plain,
    /// Those of huge pages given back.
    Optimised,
}

/// Huge pages: their order, over base pages of 4 KiB, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Huge {
    pub(crate) order: u32,
    pub(crate) pages: usize,
}

/// The base page of both tables.
const BASE: PageSize = PageSize::SIZE_4K;

/// How many random pages are looked up.
const LOOKS: usize = 1 << 20;

/// What both kinds of table can. Pages go by their number.
trait Describe {
    type Held<'t>
    where
        Self: 't;

    fn prepare(&self, head: usize, order: u32) -> Result<(), Error>;
    fn release(&self, head: usize) -> Result<(), Error>;
    fn head_of(&self, page: usize) -> Option<usize>;
    fn pin(&self, pages: Range<usize>) -> Result<Self::Held<'_>, Error>;
    fn unpin(&self, held: Self::Held<'_>);
    fn pins(&self, page: usize) -> u64;
    /// How many base pages of descriptors one huge page gives back, by the kernel's count; and how many it had.
    fn saved(&self, head: usize) -> Result<[f64; 2], Error>;
}

impl Describe for Plain {
    type Held<'t> = Range<usize>;

    fn prepare(&self, head: usize, order: u32) -> Result<(), Error> {
        self.prepare(head, order);
        Ok(())
    }

    fn release(&self, head: usize) -> Result<(), Error> {
        self.release(head);
        Ok(())
    }

    fn head_of(&self, page: usize) -> Option<usize> {
        self.head_of(page)
    }

    fn pin(&self, pages: Range<usize>) -> Result<Range<usize>, Error> {
        self.pin(pages.clone());
        Ok(pages)
    }

    fn unpin(&self, held: Range<usize>) {
        self.unpin(held);
    }

    fn pins(&self, page: usize) -> u64 {
        self.pins(page)
    }

    fn saved(&self, _: usize) -> Result<[f64; 2], Error> {
        Ok([0.0; 2])
    }
}

fn address(page: usize) -> u64 {
    page as u64 * BASE.bytes()
}

impl Describe for Vmemmap {
    type Held<'t> = Pinned<'t>;

    fn prepare(&self, head: usize, order: u32) -> Result<(), Error> {
        Ok(self.prepare(address(head), Order(order)).map(drop)?)
    }

    fn release(&self, head: usize) -> Result<(), Error> {
        Ok(self.release(address(head))?)
    }

    fn head_of(&self, page: usize) -> Option<usize> {
        let head = self.head_of(address(page))?.head;
        usize::try_from(head / BASE.bytes()).ok()
    }

    fn pin(&self, pages: Range<usize>) -> Result<Pinned<'_>, Error> {
        Ok(self.pin(address(pages.start)..address(pages.end))?)
    }

    fn unpin(&self, held: Pinned<'_>) {
        drop(held);
    }

    fn pins(&self, page: usize) -> u64 {
        self.users(address(page)).map_or(0, |users| users.pins)
    }

    fn saved(&self, head: usize) -> Result<[f64; 2], Error> {
        let root = Root::host();
        let pages = || {
            let resident = self.resident(&root)?.descriptors;
            Ok::<_, Error>(resident.whole_pages(BASE).0 as f64)
        };
        let before = pages()?;
        self.restore(address(head))?;
        let restored = pages()?;
        self.optimise(address(head))?;
        Ok([restored - pages()?, restored - before])
    }
}

/// Prepares so many huge pages, looks them up and releases them.
pub(crate) fn describe(kind: Kind, huge: Huge) -> Result<Figures, Error> {
    on_table(kind, huge, Life)
}

/// Pins all of them but the first and the last base page, and unpins them.
pub(crate) fn pin(kind: Kind, huge: Huge) -> Result<Figures, Error> {
    on_table(kind, huge, Pins)
}

trait Work {
    fn on<T: Describe>(&self, table: &T) -> Result<Figures, Error>;
}

/// Has `work` done on a table with all its pages prepared: what that took, and what was kept of memory with all pages there.
fn on_table<W: Work>(kind: Kind, huge: Huge, work: fn(Huge) -> W) -> Result<Figures, Error> {
    base_pages_only()?;
    // Code and files that are touched for the first time are not what a table keeps.
    let few = Huge { pages: 2, ..huge };
    with_table(kind, few, &work(few))?;
    with_table(kind, huge, &work(huge))
}

fn with_table(kind: Kind, huge: Huge, work: &impl Work) -> Result<Figures, Error> {
    let all = huge.pages << huge.order;
    let before = taken()?;
    match kind {
        Kind::Plain => with_pages(&Plain::new(all), huge, before, work),
        Kind::Optimised => {
            let geometry = Geometry::new(BASE, PageSize::SIZE_2M)?;
            let table = Vmemmap::new(0..address(all), geometry)?;
            with_pages(&table, huge, before, work)
        }
    }
}

fn with_pages<T: Describe>(
    table: &T,
    huge: Huge,
    before: f64,
    work: &impl Work,
) -> Result<Figures, Error> {
    for head in heads(huge) {
        table.prepare(head, huge.order)?;
    }
    let kept = taken()? - before;
    let figures = work.on(table)?;
    let figures = with(figures, [("kept_bytes", kept.max(1.0))]);
    Ok(with(figures, had_libraries()?))
}

fn heads(huge: Huge) -> impl Iterator<Item = usize> + Clone {
    (0..huge.pages).map(move |page| page << huge.order)
}

/// What this process has of memory, with its page tables.
fn taken() -> Result<f64, Error> {
    let root = Root::host();
    let status = root.read("proc/self/status")?;
    let tables = status.lines().find_map(|line| line.strip_prefix("VmPTE:"));
    let tables = tables.and_then(|kib| kib.trim().trim_end_matches(" kB").parse().ok());
    let tables: f64 = tables.unwrap_or(f64::NAN);
    Ok(had(&root)?["resident_bytes"] + tables * 1024.0)
}

fn had_libraries() -> Result<[(&'static str, f64); 1], Error> {
    let libraries = "preload_libraries";
    Ok([(libraries, had(&Root::host())?[libraries])])
}

/// How long all of it takes.
fn timed(work: impl FnOnce() -> Result<(), Error>) -> Result<Duration, Error> {
    let clock = Instant::now();
    work()?;
    Ok(clock.elapsed())
}

/// How long each takes, in order of length.
fn each(
    all: impl Iterator<Item = usize>,
    one: impl Fn(usize) -> Result<(), Error>,
) -> Result<Vec<Duration>, Error> {
    let mut times: Vec<_> = all.map(|at| timed(|| one(at))).collect::<Result<_, _>>()?;
    times.sort_unstable();
    Ok(times)
}

/// So many of a thousand took no longer.
fn quantile(times: &[Duration], mille: usize) -> f64 {
    let at = (times.len() * mille / 1000).min(times.len().saturating_sub(1));
    times
        .get(at)
        .map_or(f64::NAN, |time| time.as_secs_f64() * 1e9)
}

struct Life(Huge);

impl Work for Life {
    fn on<T: Describe>(&self, table: &T) -> Result<Figures, Error> {
        let Self(huge) = *self;
        let heads = || heads(huge);
        let prepare = |head| table.prepare(head, huge.order);
        let release = |head| table.release(head);
        // All has been touched by now, in both kinds of table: the kernel has its own from the boot on.
        let [random, sequential] = looks(table, huge)?;
        let [saved, of] = table.saved(0)?;
        let released = timed(|| heads().try_for_each(release))?;
        let prepared = timed(|| heads().try_for_each(prepare))?;
        let releases = each(heads(), release)?;
        let prepares = each(heads(), prepare)?;
        let figures = [
            ("prepare_ms", ms(prepared)),
            ("release_ms", ms(released)),
            ("prepare_p50_ns", quantile(&prepares, 500)),
            ("prepare_p99_ns", quantile(&prepares, 990)),
            ("release_p50_ns", quantile(&releases, 500)),
            ("release_p99_ns", quantile(&releases, 990)),
            ("random_ns", random),
            ("sequential_ns", sequential),
            ("saved_pages", saved),
            ("described_pages", of),
        ];
        Ok(with(Figures::new(), figures))
    }
}

/// What a look takes: at random pages, and at one after the other.
fn looks<T: Describe>(table: &T, huge: Huge) -> Result<[f64; 2], Error> {
    let all = huge.pages << huge.order;
    let look = |page: usize| -> Result<(), Error> {
        let head = black_box(table.head_of(page));
        let right = page >> huge.order << huge.order;
        if head != Some(right) {
            let found = format!("the head of page {page} is {head:?}");
            return Err(Error::Corrupt(found));
        }
        Ok(())
    };
    let mut random = fastrand::Rng::with_seed(1);
    let at_random = timed(|| (0..LOOKS).try_for_each(|_| look(random.usize(..all))))?;
    let in_order = timed(|| (0..all).try_for_each(look))?;
    let [at_random, in_order] = [(at_random, LOOKS), (in_order, all)];
    Ok([at_random, in_order].map(|(time, looks)| time.as_secs_f64() * 1e9 / looks as f64))
}

struct Pins(Huge);

impl Work for Pins {
    fn on<T: Describe>(&self, table: &T) -> Result<Figures, Error> {
        let Self(huge) = *self;
        let all = huge.pages << huge.order;
        let pages = 1..all - 1;
        let clock = Instant::now();
        let held = table.pin(pages.clone())?;
        let pinned = clock.elapsed();
        // Of the first huge page all but one base page.
        let pins = table.pins(pages.start);
        if pins != (1 << huge.order) - 1 {
            return Err(Error::Corrupt(format!("a page has {pins} pins")));
        }
        let unpinned = timed(|| {
            table.unpin(held);
            Ok(())
        });
        Ok(with(
            Figures::new(),
            [("pin_ms", ms(pinned)), ("unpin_ms", ms(unpinned?))],
        ))
    }
}
