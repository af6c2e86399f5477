//! The measured process: it prepares, looks up, pins and releases the pages of a table.

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use jumbo::units::{Order, PageSize};
use jumbo::vmemmap::{Geometry, Vmemmap};
use jumbo_host::kernel::Root;

use super::plain::{DescriptorTable, PlainTable};
use crate::Error;
use crate::figures::{Figures, figures, ms, with};
use crate::memory::{base_pages_only, own_memory, preload_figure};
use crate::task::DescribeTask;

const BASE_PAGE: PageSize = PageSize::SIZE_4K;

const RANDOM_LOOKUPS: usize = 1 << 20;

fn address(page: usize) -> u64 {
    page as u64 * BASE_PAGE.bytes()
}

impl DescriptorTable for Vmemmap {
    fn prepare(&self, head: usize, order: u32) -> Result<(), Error> {
        Ok(self.prepare(address(head), Order(order)).map(drop)?)
    }

    fn release(&self, head: usize) -> Result<(), Error> {
        Ok(self.release(address(head))?)
    }

    fn head_of(&self, page: usize) -> Option<usize> {
        let head = self.head_of(address(page))?.head;
        usize::try_from(head / BASE_PAGE.bytes()).ok()
    }

    fn pinned(&self, pages: Range<usize>, meanwhile: &mut dyn FnMut()) -> Result<(), Error> {
        let held = self.pin(address(pages.start)..address(pages.end))?;
        meanwhile();
        drop(held);
        Ok(())
    }

    fn pins(&self, page: usize) -> u64 {
        self.users(address(page)).map_or(0, |users| users.pins)
    }
}

/// [`Task::Describe`](crate::task::Task::Describe): times on a full table, and its memory.
pub(crate) fn describe(huge: DescribeTask) -> Result<Figures, Error> {
    base_pages_only()?;
    // A first run touches code and files, which would count as memory of the table.
    on_table(DescribeTask { pages: 2, ..huge })?;
    on_table(huge)
}

fn on_table(huge: DescribeTask) -> Result<Figures, Error> {
    let before = taken()?;
    if !huge.optimised {
        return prepared(huge, &PlainTable::new(huge.all().end), before);
    }
    let geometry = Geometry::new(BASE_PAGE, PageSize::SIZE_2M)?;
    prepared(
        huge,
        &Vmemmap::new(0..address(huge.all().end), geometry)?,
        before,
    )
}

fn prepared<T: DescriptorTable>(
    huge: DescribeTask,
    table: &T,
    before: f64,
) -> Result<Figures, Error> {
    heads(huge).try_for_each(|head| table.prepare(head, huge.order))?;
    let kept = taken()? - before;
    let kept = [("kept_bytes", kept.max(1.0)), preload_figure()?];
    let work = if huge.pinned { pins } else { life };
    Ok(with(work(huge, table)?, kept))
}

fn heads(huge: DescribeTask) -> impl Iterator<Item = usize> + Clone {
    huge.all().step_by(1 << huge.order)
}

/// Resident memory of this process, with its page tables.
fn taken() -> Result<f64, Error> {
    let root = Root::host();
    let status = root.read("proc/self/status")?;
    let tables = status.lines().find_map(|line| line.strip_prefix("VmPTE:"));
    let tables = tables.and_then(|kib| kib.trim().trim_end_matches(" kB").parse().ok());
    let tables: f64 = tables.unwrap_or(f64::NAN);
    Ok(own_memory()?["resident_bytes"] + tables * 1024.0)
}

fn timed(work: impl FnOnce() -> Result<(), Error>) -> Result<Duration, Error> {
    let clock = Instant::now();
    work()?;
    Ok(clock.elapsed())
}

fn life<T: DescriptorTable>(huge: DescribeTask, table: &T) -> Result<Figures, Error> {
    let prepare = |head| table.prepare(head, huge.order);
    let release = |head| table.release(head);
    // Both tables are fully touched by now, as the kernel's is from boot on.
    let [random, sequential] = looks(table, huge)?;
    let released = timed(|| heads(huge).try_for_each(release))?;
    let prepared = timed(|| heads(huge).try_for_each(prepare))?;
    Ok(figures([
        ("prepare_ms", ms(prepared)),
        ("release_ms", ms(released)),
        ("random_ns", random),
        ("sequential_ns", sequential),
    ]))
}

/// Nanoseconds per lookup: of random and of consecutive pages.
fn looks<T: DescriptorTable>(table: &T, huge: DescribeTask) -> Result<[f64; 2], Error> {
    let all = huge.all().end;
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
    let at_random = timed(|| (0..RANDOM_LOOKUPS).try_for_each(|_| look(random.usize(..all))))?;
    let in_order = timed(|| (0..all).try_for_each(look))?;
    let [at_random, in_order] = [(at_random, RANDOM_LOOKUPS), (in_order, all)];
    Ok([at_random, in_order].map(|(time, looks)| time.as_secs_f64() * 1e9 / looks as f64))
}

fn pins<T: DescriptorTable>(huge: DescribeTask, table: &T) -> Result<Figures, Error> {
    let pages = 1..huge.all().end - 1;
    let (mut pinned, mut pins, mut clock) = (Duration::ZERO, 0, Instant::now());
    let mut look = || {
        pinned = clock.elapsed();
        pins = table.pins(pages.start);
        clock = Instant::now();
    };
    table.pinned(pages.clone(), &mut look)?;
    let unpinned = clock.elapsed();
    // All base pages of the first huge page but one.
    if pins != (1 << huge.order) - 1 {
        return Err(Error::Corrupt(format!("a page has {pins} pins")));
    }
    Ok(figures([
        ("pin_ms", ms(pinned)),
        ("unpin_ms", ms(unpinned)),
    ]))
}
