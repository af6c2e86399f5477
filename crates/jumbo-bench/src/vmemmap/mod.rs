//! `jumbo bench vmemmap`: what page descriptors cost that huge pages do not pay for, against descriptors that are all there.
//!
//! - huge pages prepared and released, by address space alone: no memory stands behind what is described;
//! - what all of them keep, with page tables and the section table: counted by the kernel;
//! - `head_of`, of random pages and of one after the other;
//! - ranges pinned and unpinned, from a tail on. The baseline counts by head as well, and learns the heads from the tails.
//!
//! - whole pages of a pool that describes them, taken and given back, against one that does not;
//! - the kernel's own pool, grown and shrunk with its optimisation (HVO) off and on (`kernel`): put back in the end.
//!
//! The baseline (`plain`) is resident before anything is timed, checks nothing and takes no lock.

mod kernel;
mod plain;
mod worker;

pub(crate) use worker::describe;

use jumbo::units::{Bytes, PageSize, Pages, counted};
use jumbo_host::kernel::Root;

use crate::claim;
use crate::group::{self, Group, rows};
use crate::launch::Launch;
use crate::memory::room;
use crate::pool::FOLIOS;
use crate::stats::least;
use crate::table::Table;
use crate::task::{Huge, Source, Task, Way};
use crate::work::Worker;
use crate::{Error, Settings};
use kernel::OfKernel;

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

/// The figures of the series of 2021: 2.5 times as long to make a page, 2.6 times as long to free
/// one.
const SLOWER: [&str; 2] = ["0.40", "0.38"];

/// A take and give is so short that where its memory lies is half of it: the best of so many processes is a sample.
const LAPS: usize = 3;

/// How many pages the pool has whose pages are taken and given.
const EXCHANGED: Pages = Pages(16);

/// 1 GiB pages prepared.
const GIGANTIC: usize = 10;

/// Measures the table; with `quick` with fewer pages.
///
/// # Errors
/// [`Error`].
pub fn measure(settings: &Settings, quick: bool) -> Result<Table, Error> {
    let size = if quick { QUICK } else { FULL };
    let plain = |order, pages| Huge {
        order,
        pages,
        optimised: false,
        pinned: false,
    };
    let (mib, gib) = (
        |pages| plain(ORDER_2M, pages),
        |pages| plain(ORDER_1G, pages),
    );
    room(&Root::host(), Bytes(bytes(mib(size.pages)).0 * 2))?;
    let what = format!(
        "{} of 2 MiB and {} of 1 GiB; {} GiB pinned",
        counted(size.pages as u64, "page"),
        counted(GIGANTIC as u64, "page"),
        size.gib
    );
    let mut table = Table::new("vmemmap", what, settings)?;
    let kernel = OfKernel::take(settings, size.kernel);
    let kernel = table.found("the kernel's own pool with HVO", kernel)?;
    let mut groups = vec![
        lives(settings, mib(size.pages), "", "2 MiB"),
        lives(settings, gib(GIGANTIC), "_1g", "1 GiB"),
        pins(settings, mib(size.gib << 9), "", "2 MiB"),
        pins(settings, gib(size.gib), "_1g", "1 GiB"),
        exchanges(settings),
    ];
    groups.extend(kernel.as_ref().map(|kernel| resizes(settings, kernel)));
    let table = group::measure(settings, table, groups)?;
    kernel.map_or(Ok(()), OfKernel::give_back)?;
    Ok(table)
}

/// The memory of a plain table for them.
fn bytes(huge: Huge) -> Bytes {
    Bytes(DESCRIPTOR * huge.all().len() as u64)
}

/// Both sides: the plain table and ours, which keeps at least a hundred times less.
fn sides(group: &mut Group<'_>, huge: Huge) -> [usize; 2] {
    let all = bytes(huge);
    let mut side = |name, optimised, kept| {
        let worker = Worker::new(Launch::Plain, Task::Describe(Huge { optimised, ..huge }));
        group.worker(name, worker, all, vec![claim::within("kept_bytes", kept)])
    };
    let plain = side("all descriptors", false, all.0..=all.0 / 8 * 9);
    [plain, side("jumbo::vmemmap", true, 0..=all.0 / 100)]
}

fn lives<'a>(settings: &'a Settings, huge: Huge, suffix: &str, of: &str) -> Group<'a> {
    let mut group = Group::new(settings, "prepare and release");
    let [plain, ours] = sides(&mut group, huge);
    let (name, what) = (
        |name| format!("{name}{suffix}"),
        |what| format!("{what}, {of}"),
    );
    let published = SLOWER.map(|figure| Some(figure).filter(|_| suffix.is_empty()));
    let (saved, kept) = match huge.order {
        ORDER_2M => ("saved_of_8", "4 (2 of 8 kept)"),
        _ => ("saved_of_4096", "2048 (2 of 4096 kept)"),
    };
    rows! { group;
        name("prepare") => what("pages prepared"), "prepare_ms", plain / ours, published[0];
        name("release") => what("pages released"), "release_ms", plain / ours, published[1];
        name("bytes_kept") => what("memory kept"), "kept_bytes", plain / ours, kept;
        name("head_of_random") => what("head_of, at random"), "random_ns", plain / ours;
        name("head_of_sequential") => what("head_of, in order"), "sequential_ns", plain / ours;
        format!("prepare{suffix}_aa") => what("pages prepared"), "prepare_ms", plain / plain;
    }
    group.value(saved, "saved_pages", ours);
    for figure in [
        "prepare_p50_ns",
        "prepare_p99_ns",
        "release_p50_ns",
        "release_p99_ns",
    ] {
        let name = figure.replacen('_', &format!("{suffix}_"), 1);
        group.value(format!("plain_{name}"), figure, plain);
        group.value(name, figure, ours);
    }
    group
}

fn pins<'a>(settings: &'a Settings, huge: Huge, suffix: &str, of: &str) -> Group<'a> {
    let mut group = Group::new(settings, "pin and unpin");
    let pinned = true;
    let [plain, ours] = sides(&mut group, Huge { pinned, ..huge });
    let (name, what) = (
        |name| format!("{name}{suffix}"),
        |what| format!("{what}, {of} pages"),
    );
    rows! { group;
        name("pin") => what("pinned from a tail on"), "pin_ms", plain / ours, "3.6";
        name("unpin") => what("unpinned"), "unpin_ms", plain / ours, "7.1";
        format!("pin{suffix}_aa") => what("pinned"), "pin_ms", plain / plain;
    }
    group
}

/// A pool that describes its pages gives whole ones as fast as one that does not.
fn exchanges(settings: &Settings) -> Group<'_> {
    let mut group = Group::new(settings, "take and give").laps(LAPS, least);
    let (source, size) = (Source::Thp, EXCHANGED.bytes(PageSize::SIZE_2M));
    let mut side = |name: &str, way: Way, folios: u64| {
        let mut claims = way.claims(source, EXCHANGED);
        claims.push(claim::exactly(FOLIOS, folios));
        let worker = Worker::new(Launch::Plain, Task::Exchange(source, way, EXCHANGED, 1));
        group.worker(name, worker, size, claims)
    };
    let plain = side("pool without folios", Way::TakePlain, 0);
    let ours = side("pool", Way::Take, 1);
    let what = "a page taken and given";
    rows! { group;
        "take_give" => what, "page_ns", plain / ours;
        "take_give_aa" => what, "page_ns", plain / plain;
    }
    // Where there are no THPs the rest is as true.
    group.optional = Error::is_of_host;
    group
}

fn resizes<'a>(settings: &'a Settings, kernel: &'a OfKernel) -> Group<'a> {
    let mut group = Group::new(settings, "the kernel's pool");
    group.optional = Error::is_of_host;
    let [off, on] = [("HVO off", false), ("HVO on", true)]
        .map(|(name, on)| group.side(name, kernel.bytes(), move || kernel.sample(on)));
    let [grown, shrunk] = ["grown", "shrunk"].map(|how| format!("the kernel's pool {how}, 2 MiB"));
    rows! { group;
        "kernel_grow" => &grown, "grow_ms", off / on, SLOWER[0];
        "kernel_shrink" => shrunk, "shrink_ms", off / on, SLOWER[1];
        "kernel_grow_aa" => grown, "grow_ms", off / off;
    }
    group.value("kernel_saved_of_8", "saved_of_8_pages", on);
    for figure in [
        "grow_p50_us",
        "grow_p99_us",
        "shrink_p50_us",
        "shrink_p99_us",
    ] {
        group.value(figure, figure, on);
        group.value(format!("plain_{figure}"), figure, off);
    }
    group
}
