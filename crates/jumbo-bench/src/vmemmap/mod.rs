//! `jumbo bench vmemmap`: costs of optimised page descriptors, compared with a full table.
//!
//! - Preparing and releasing huge pages, by address only: no memory is behind them.
//! - Memory that all of them keep, page tables and section table included, by the kernel's count.
//! - `head_of` of random and of consecutive pages.
//! - Pinning and unpinning ranges that start at a tail. The baseline also counts per head, and
//!   finds the heads through the tails.
//!
//! The baseline (`plain`) is resident before the measurement, checks nothing and takes no lock.

mod plain;
mod worker;

pub(crate) use worker::describe;

use jumbo::units::{Bytes, counted};

use crate::claim;
use crate::group::{self, Group, rows};
use crate::launch::Launch;
use crate::memory::check_available;
use crate::table::Table;
use crate::task::{DescribeTask, Task};
use crate::work::Worker;
use crate::{Error, Settings};

/// Orders of huge pages over base pages of 4 KiB.
const ORDER_2M: u32 = 9;
const ORDER_1G: u32 = 18;

const DESCRIPTOR_BYTES: u64 = 64;

/// 2 MiB pages to prepare, and GiB to pin; without and with `--quick`.
const PAGES: [usize; 2] = [10_240, 2_560];
const PINNED_GIB: [usize; 2] = [16, 4];

/// Ratios of the series of 2021: allocating and freeing took 2.5 and 2.6 times as long.
const PUBLISHED: [&str; 2] = ["0.40", "0.38"];

const GIGANTIC_PAGES: usize = 10;

/// Measures the table; `quick` reduces the number of pages.
pub fn measure(settings: &Settings, quick: bool) -> Result<Table, Error> {
    let quick = usize::from(quick);
    let (pages, pinned_gib) = (PAGES[quick], PINNED_GIB[quick]);
    let plain = |order, pages| DescribeTask {
        order,
        pages,
        optimised: false,
        pinned: false,
    };
    let (mib, gib) = (
        |pages| plain(ORDER_2M, pages),
        |pages| plain(ORDER_1G, pages),
    );
    check_available(Bytes(bytes(mib(pages)).0 * 2))?;
    let what = format!(
        "{} of 2 MiB and {} of 1 GiB; {} GiB pinned",
        counted(pages as u64, "page"),
        counted(GIGANTIC_PAGES as u64, "page"),
        pinned_gib
    );
    let table = Table::new("vmemmap", what, settings)?;
    let groups = vec![
        lives(settings, mib(pages), "", "2 MiB"),
        lives(settings, gib(GIGANTIC_PAGES), "_1g", "1 GiB"),
        pins(settings, mib(pinned_gib << 9), "", "2 MiB"),
        pins(settings, gib(pinned_gib), "_1g", "1 GiB"),
    ];
    group::measure(settings, table, groups)
}

/// Memory of a full table for these pages.
fn bytes(huge: DescribeTask) -> Bytes {
    Bytes(DESCRIPTOR_BYTES * huge.all().len() as u64)
}

/// The full table and ours, which keeps at most a hundredth of it.
fn sides(group: &mut Group<'_>, huge: DescribeTask) -> [usize; 2] {
    let all = bytes(huge);
    let mut side = |name, optimised, kept| {
        let worker = Worker::new(
            Launch::Plain,
            Task::Describe(DescribeTask { optimised, ..huge }),
        );
        group.worker(name, worker, all, vec![claim::within("kept_bytes", kept)])
    };
    let plain = side("all descriptors", false, all.0..=all.0 / 8 * 9);
    [plain, side("jumbo::vmemmap", true, 0..=all.0 / 100)]
}

fn lives<'a>(settings: &'a Settings, huge: DescribeTask, suffix: &str, of: &str) -> Group<'a> {
    let mut group = Group::new(settings, "prepare and release");
    let [plain, ours] = sides(&mut group, huge);
    let (name, what) = (
        |name| format!("{name}{suffix}"),
        |what| format!("{what}, {of}"),
    );
    let published = PUBLISHED.map(|figure| Some(figure).filter(|_| suffix.is_empty()));
    let kept = match huge.order {
        ORDER_2M => "4 (2 of 8 kept)",
        _ => "2048 (2 of 4096 kept)",
    };
    rows! { group;
        name("prepare") => what("pages prepared"), "prepare_ms", plain / ours, published[0];
        name("release") => what("pages released"), "release_ms", plain / ours, published[1];
        name("bytes_kept") => what("memory kept"), "kept_bytes", plain / ours, kept;
        name("head_of_random") => what("head_of, at random"), "random_ns", plain / ours;
        name("head_of_sequential") => what("head_of, in order"), "sequential_ns", plain / ours;
        format!("prepare{suffix}_aa") => what("pages prepared"), "prepare_ms", plain / plain;
    }
    group
}

fn pins<'a>(settings: &'a Settings, huge: DescribeTask, suffix: &str, of: &str) -> Group<'a> {
    let mut group = Group::new(settings, "pin and unpin");
    let pinned = true;
    let [plain, ours] = sides(&mut group, DescribeTask { pinned, ..huge });
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
