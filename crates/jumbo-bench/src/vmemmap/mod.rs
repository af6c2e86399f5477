//! `jumbo bench vmemmap`: what page descriptors cost that huge pages do not pay for, against descriptors that are all there.
//!
//! - huge pages prepared and released, by address space alone: no memory stands behind what is described;
//! - what all of them keep, with page tables and the section table: counted by the kernel;
//! - `head_of`, of random pages and of one after the other;
//! - ranges pinned and unpinned, from a tail on. The baseline counts by head as well, and learns the heads from the tails.
//!
//! - whole pages of a pool that describes them, taken and given back, against one that does not (`exchange`);
//! - the kernel's own pool, grown and shrunk with its optimisation (HVO) off and on (`kernel`): put back in the end.
//!
//! The baseline (`plain`) is resident before anything is timed, checks nothing and takes no lock.

mod exchange;
mod kernel;
mod plain;
mod worker;

pub(crate) use exchange::take_give;
pub(crate) use worker::{Huge, Kind, describe, pin};

use std::cell::RefCell;

use jumbo::kernel::Root;
use jumbo::units::{Bytes, PageSize, Pages, counted};

use crate::child::Launch;
use crate::claim;
use crate::group::{self, Group};
use crate::memory::room;
use crate::stats::least;
use crate::table::{Missing, Table};
use crate::worker::Task;
use crate::{Error, Settings};
use kernel::Kernel;

/// How many base pages of 4 KiB a huge page has.
const ORDER_2M: u32 = 9;
const ORDER_1G: u32 = 18;

/// Of a plain table, and of one descriptor.
const DESCRIPTOR: u64 = 64;

/// How many 2 MiB pages are prepared, as in the published table, and how many GiB are pinned.
struct Size {
    pages: usize,
    gib: usize,
    /// At most, of the kernel's pool.
    kernel: Pages,
}

const FULL: Size = Size {
    pages: 10_240,
    gib: 16,
    kernel: Pages(4096),
};
const QUICK: Size = Size {
    pages: 2_560,
    gib: 4,
    kernel: Pages(256),
};

/// What the series of 2021 has: 2.5 times as long to make a page, 2.6 times as long to free one.
const SLOWER: [&str; 2] = ["0.40", "0.38"];

/// A take and give is so short that where its memory lies is half of it: the best of so many processes is a sample.
const LAPS: usize = 3;

/// 1 GiB pages prepared.
const GIGANTIC: usize = 10;

/// Measures the table; with `quick` with fewer pages.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, quick: bool) -> Result<Table, Error> {
    let size = if quick { QUICK } else { FULL };
    let gib = |count: usize| Huge {
        order: ORDER_1G,
        pages: count,
    };
    let mib = |pages: usize| Huge {
        order: ORDER_2M,
        pages,
    };
    room(&Root::host(), Bytes(plain_bytes(mib(size.pages)).0 * 2))?;
    let what = format!(
        "{} of 2 MiB and {} of 1 GiB; {} GiB pinned",
        counted(size.pages as u64, "page"),
        counted(GIGANTIC as u64, "page"),
        size.gib
    );
    let mut table = Table::new("vmemmap", what, settings)?;
    let host = match Kernel::take(settings, size.kernel) {
        Ok(kernel) => Some(RefCell::new(kernel)),
        Err(Error::Kernel(of, why)) => {
            let what = "the kernel's own pool with HVO";
            let why = format!("{of}: {why}");
            table.missing.push(Missing { what, why });
            None
        }
        Err(error) => return Err(error),
    };
    let mut groups = vec![
        lives(settings, mib(size.pages), ""),
        lives(settings, gib(GIGANTIC), "_1g"),
        pins(settings, mib(size.gib << 9), ""),
        pins(settings, gib(size.gib), "_1g"),
        exchanges(settings),
    ];
    groups.extend(host.as_ref().map(|kernel| resizes(settings, kernel)));
    let table = group::measure(settings, table, groups)?;
    host.map_or(Ok(()), |kernel| kernel.into_inner().give_back())?;
    Ok(table)
}

/// What a plain table takes for them.
fn plain_bytes(huge: Huge) -> Bytes {
    Bytes(DESCRIPTOR * (huge.pages << huge.order) as u64)
}

fn size_of(huge: Huge) -> &'static str {
    match huge.order {
        ORDER_2M => "2 MiB",
        _ => "1 GiB",
    }
}

/// Both sides: the plain table and ours.
fn sides(group: &mut Group<'_>, huge: Huge, task: fn(Kind, Huge) -> Task) -> [usize; 2] {
    let all = plain_bytes(huge);
    let kept = |most: std::ops::RangeInclusive<u64>| vec![claim::kept(most)];
    let plain = group.asks(
        Launch::Plain,
        task(Kind::Plain, huge),
        all,
        kept(all.0..=all.0 / 8 * 9),
    );
    // At least a hundred times less.
    let ours = group.asks(
        Launch::Plain,
        task(Kind::Optimised, huge),
        all,
        kept(0..=all.0 / 100),
    );
    group.name(plain, "all descriptors");
    group.name(ours, "jumbo::vmemmap");
    [plain, ours]
}

fn lives<'a>(settings: &'a Settings, huge: Huge, suffix: &str) -> Group<'a> {
    let mut group = Group::new(settings, "prepare and release");
    let sides = sides(&mut group, huge, Task::Describe);
    let is_published = suffix.is_empty();
    let mut row = |name: &str, what: &str, figure, published: Option<&'static str>| {
        let (name, what) = (
            format!("{name}{suffix}"),
            format!("{what}, {}", size_of(huge)),
        );
        let row = group.ratio((&name, &what, figure), sides);
        row.published = published;
    };
    row(
        "prepare",
        "pages prepared",
        "prepare_ms",
        is_published.then_some(SLOWER[0]),
    );
    row(
        "release",
        "pages released",
        "release_ms",
        is_published.then_some(SLOWER[1]),
    );
    row(
        "bytes_kept",
        "memory kept",
        "kept_bytes",
        Some(match huge.order {
            ORDER_2M => "4 (2 of 8 kept)",
            _ => "2048 (2 of 4096 kept)",
        }),
    );
    row("head_of_random", "head_of, at random", "random_ns", None);
    row(
        "head_of_sequential",
        "head_of, in order",
        "sequential_ns",
        None,
    );
    group.against_itself(
        (
            &format!("prepare{suffix}_aa"),
            &format!("pages prepared, {}", size_of(huge)),
            "prepare_ms",
        ),
        sides[0],
    );
    let saved = match huge.order {
        ORDER_2M => "saved_of_8",
        _ => "saved_of_4096",
    };
    group.value(saved, "saved_pages", sides[1]);
    for figure in [
        "prepare_p50_ns",
        "prepare_p99_ns",
        "release_p50_ns",
        "release_p99_ns",
    ] {
        for (of, side) in [("plain_", sides[0]), ("", sides[1])] {
            let name = figure.replacen('_', &format!("{suffix}_"), 1);
            group.value(&format!("{of}{name}"), figure, side);
        }
    }
    group
}

fn pins<'a>(settings: &'a Settings, huge: Huge, suffix: &str) -> Group<'a> {
    let mut group = Group::new(settings, "pin and unpin");
    let sides = sides(&mut group, huge, Task::Pin);
    for (name, what, figure, published) in [
        ("pin", "pinned from a tail on", "pin_ms", "3.6"),
        ("unpin", "unpinned", "unpin_ms", "7.1"),
    ] {
        let (name, what) = (
            format!("{name}{suffix}"),
            format!("{what}, {} pages", size_of(huge)),
        );
        group.ratio((&name, &what, figure), sides).published = Some(published);
    }
    let (name, what) = (
        format!("pin{suffix}_aa"),
        format!("pinned, {} pages", size_of(huge)),
    );
    group.against_itself((&name, &what, "pin_ms"), sides[0]);
    group
}

/// A pool that describes its pages gives whole ones as fast as one that does not.
fn exchanges(settings: &Settings) -> Group<'_> {
    let mut group = Group::new(settings, "take and give").laps(LAPS, least);
    let size = exchange::PAGES.bytes(PageSize::SIZE_2M);
    let side = |group: &mut Group<'_>, name: &str, is_described: bool| {
        let folios = u64::from(is_described);
        let mut claims = claim::huge(size);
        claims.push(claim::pages(exchange::FOLIOS, folios..=folios));
        let task = Task::TakeGive(is_described);
        let side = group.asks(Launch::Plain, task, size, claims);
        group.name(side, name);
        side
    };
    let plain = side(&mut group, "pool without folios", false);
    let ours = side(&mut group, "pool", true);
    let what = "a page taken and given";
    group.ratio(("take_give", what, "page_ns"), [plain, ours]);
    group.against_itself(("take_give_aa", what, "page_ns"), plain);
    // Where there are no THPs the rest is as true.
    group.optional = Error::is_of_host;
    group
}

fn resizes<'a>(settings: &'a Settings, kernel: &'a RefCell<Kernel>) -> Group<'a> {
    let mut group = Group::new(settings, "the kernel's pool");
    group.optional = Error::is_of_host;
    let size = kernel.borrow().bytes();
    let [off, on] = [("HVO off", false), ("HVO on", true)]
        .map(|(name, on)| group.side(name, size, move || kernel.borrow_mut().sample(on)));
    for (name, what, figure, published) in [
        (
            "kernel_grow",
            "the kernel's pool grown, 2 MiB",
            "grow_ms",
            SLOWER[0],
        ),
        (
            "kernel_shrink",
            "the kernel's pool shrunk, 2 MiB",
            "shrink_ms",
            SLOWER[1],
        ),
    ] {
        group.ratio((name, what, figure), [off, on]).published = Some(published);
    }
    let what = "the kernel's pool grown, 2 MiB";
    group.against_itself(("kernel_grow_aa", what, "grow_ms"), off);
    group.value("kernel_saved_of_8", "saved_of_8_pages", on);
    for figure in [
        "grow_p50_us",
        "grow_p99_us",
        "shrink_p50_us",
        "shrink_p99_us",
    ] {
        group.value(figure, figure, on);
        group.value(&format!("plain_{figure}"), figure, off);
    }
    group
}
