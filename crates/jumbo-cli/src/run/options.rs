//! The options of `jumbo run` that a profile has too, in one table: [`Options`].
//!
//! A new option is a field here, a line in [`Options::or`] and, where the preload library obeys it, one in
//! [`Options::orders`] and in the table of [`jumbo::policy::Orders`].

use std::path::PathBuf;

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use jumbo::policy::{
    DataMode, FreeMode, HeapMode, Keep, MAX_FREE_WORKERS, Mode, Orders, PoolRequest, ReaperMode,
    ShmMode, TextMode,
};
use jumbo::units::{Bytes, PageSize};
use serde::{Deserialize, Deserializer};

/// The most that --max-waste can be, in percent: as much again as was asked for.
pub(super) const MAX_WASTE: u32 = 100;

/// What was typed, or stands in a profile under the same names.
#[derive(Debug, Default, PartialEq, clap::Args, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(super) struct Options {
    /// Allocations on huge pages: on, glibc, mimalloc or off [default: on]
    ///
    /// `on`: those of 128 KiB and more from jumbo, small objects (up to 128 bytes) of threads that ask for more than a MiB
    /// of them from mimalloc (16 threads, and one more for each 20 MiB), and the rest from glibc, whose heap is advised. mimalloc is left out where you set limits to
    /// address space or data (ulimit -v, -d), MALLOC_ variables or tunables of glibc.malloc, and from the program's mlockall(2)
    /// or seccomp filter on. `glibc`: without
    /// mimalloc, so that mallinfo(3) counts small objects, and glibc finds those that are freed twice. `mimalloc`: as `on`, and
    /// with --pool all come from mimalloc, on the pool. A program with an allocator of its own keeps it.
    #[arg(long, value_name = "MODE", value_parser = mode::<HeapMode>(), hide_possible_values = true)]
    pub(super) heap: Option<HeapMode>,

    /// A pool of SIZE for the heap, in pages of PAGESIZE [default: what a PMD maps, 2M mostly]
    ///
    /// SIZE bounds all processes of the run together; SIZE,each bounds each of them. It is a bound: no page is set
    /// aside before a process asks for it, unless you ask for --warm. A process takes pages while the others leave some, keeps
    /// them when they are free, and gives them back when it ends. What a forked child shares with its parent counts once. jumbo stays
    /// as the program's parent, to keep the account; with SIZE,each it does so for a report alone.
    ///
    /// The heap's pages come from the kernel's hugetlb pool where it has some. The others are THPs, which
    /// take no privilege. Beyond SIZE allocations get what they get without a pool. SIZE is one page at least, and 256G at most,
    /// --overcommit included. Pages larger than a PMD maps (1G) are hugetlb alone; where the kernel's pool has none, the pool is
    /// in pages that a PMD maps. With --heap=on and --heap=glibc the pool serves large allocations, with --heap=mimalloc small ones
    /// too. None of them serves allocations aligned to whole base pages from it.
    ///
    /// Hugetlb pages serve processes of one thread: where there are more, a fork could end the child by SIGBUS.
    /// What they hold moves to THPs before a fork and before the second thread starts; a forked child
    /// takes pages of its own. If the program never forks while it has threads, say so: SIZE,nofork. Otherwise
    /// jumbo takes no hugetlb pages under a memory cgroup's limit, nor where there might be no room to move them to,
    /// and keeps none behind a seccomp filter or a chroot.
    #[arg(
        long,
        value_name = "SIZE[:PAGESIZE][,each][,nofork]",
        allow_hyphen_values = true
    )]
    pub(super) pool: Option<PoolRequest>,

    /// How much the pool may grow beyond its size; given back when it is free [default: 0]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    #[serde(deserialize_with = "size")]
    pub(super) overcommit: Option<Bytes>,

    /// Make all of the pool resident, with several threads, before the program starts
    #[arg(long)]
    pub(super) warm: bool,

    /// Anonymous mappings on huge pages [default: on]
    #[arg(long, value_name = "on|off", hide_possible_values = true)]
    pub(super) maps: Option<Switch>,

    /// The program's text on huge pages: auto, file, shared or off [default: auto]
    ///
    /// Which rung of a ladder is the highest that is tried. `file`: the file's own mapping, which takes nothing and is shared by
    /// all processes, where the page cache has the file in huge folios: see `jumbo text prime` and `jumbo text align`.
    /// `shared`: one copy of the text for all your processes that run the file, made by the first at its start; a
    /// position-independent program that is not aligned has one for each process. `auto`: what the page cache has; and, once the
    /// program has used a second of CPU time or more (50 times what the copy takes) and touched 32 MiB of its text, as `shared`,
    /// where processes can share the copy.
    ///
    /// Text that was changed since it was loaded (relocations, breakpoints) stays as it is.
    #[arg(long, value_name = "MODE", value_parser = mode::<TextMode>(), hide_possible_values = true)]
    pub(super) text: Option<TextMode>,

    /// The program's data and bss on huge pages: auto, on or off [default: auto]
    ///
    /// `auto`: bss is advised, and huge pages of data are copied at the start of which half was written to by then (by
    /// relocations). `on`: all whole huge pages of data are copied. A program that touches little of a large bss becomes
    /// larger, as with --heap: `off`.
    #[arg(long, value_name = "MODE", value_parser = mode::<DataMode>(), hide_possible_values = true)]
    pub(super) data: Option<DataMode>,

    /// Libraries whose text comes on huge pages too
    ///
    /// PATTERN is that of a file's name, without folders: `*` stands for any characters, `?` for one. Several have commas
    /// between them. Libraries that are loaded while the program runs are looked for as `auto` looks at text.
    #[arg(long, value_name = "PATTERN", value_parser = libs)]
    #[serde(deserialize_with = "patterns")]
    pub(super) libs: Option<Patterns>,

    /// Shared memory on huge pages: auto, advise, hugetlb, user or off [default: auto]
    ///
    /// Of mmap(MAP_SHARED), memfd_create, shm_open and shmget, in mappings of at least what a PMD maps. `advise`: aligned
    /// and advised; the rest is up to the kernel's controls (`jumbo thp`), which most hosts have at `never`. `auto`: that, and
    /// in mappings of 32 MiB and more what the program has touched is collapsed onto huge pages, by a thread that spends a
    /// tenth of a CPU on it. It needs no privilege, and the PMD size at `inherit`, as it is by default. `hugetlb`: anonymous mappings of whole
    /// hugetlb pages get pages of the kernel's pool (`jumbo pool`), populated at once; a program that unmaps or protects
    /// parts of such a page gets EINVAL. `user`: the first touch of a block brings in the whole block
    /// (userfaultfd), where the kernel's controls allow nothing at all. A system call that jumbo does not see then fails with EFAULT
    /// where it is given memory that was never touched.
    #[arg(long, value_name = "MODE", value_parser = mode::<ShmMode>(), hide_possible_values = true)]
    pub(super) shm: Option<ShmMode>,

    /// The sizes that --shm uses, such as 64K,2M [default: what a PMD maps; 64K with --shm=user]
    ///
    /// With `auto`, blocks are collapsed if what a PMD maps is among them. With `hugetlb`, a mapping gets the largest of them
    /// that it is whole pages of. With `user`, a touch brings in the largest. Which sizes the kernel takes for advised memory its
    /// own controls say, for all programs: `jumbo thp set`.
    #[arg(long, value_name = "SIZE,...", value_parser = sizes)]
    #[serde(deserialize_with = "some_sizes")]
    pub(super) shm_sizes: Option<Sizes>,

    /// The most memory to spend for it, in percent [default: 5]
    ///
    /// What may become resident beyond what the program asked for, in percent of what it has on huge
    /// pages: the ends of blocks that do not fill a huge page, and what was not touched of a block of shared memory.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_WASTE)),
        allow_negative_numbers = true)]
    pub(super) max_waste: Option<u32>,

    /// How much freed memory stays for the next large allocations [default: see below]
    ///
    /// At most SIZE, or a percentage of the most that the program had in large allocations (128 KiB and more) at once. What stays is neither given back nor
    /// touched anew: a program that frees and allocates large blocks in turn is faster, and stays larger. A freed block of more than
    /// that goes back as a whole; with 0 all do. By default 16M, or twice the largest freed block of up to 32M, and --max-waste percent of what is in use; less where the program grows beyond all that it had.
    /// Not with --heap=off, nor with --heap=mimalloc and --pool: what is freed of a --pool stays in it.
    #[arg(long, value_name = "SIZE|PERCENT%", allow_hyphen_values = true)]
    #[serde(deserialize_with = "keep")]
    pub(super) keep: Option<Keep>,

    /// Free large blocks with several threads: sync, background or off [default: sync]
    ///
    /// `sync`: a large free or munmap returns when all is free, sooner than by one thread. `background`:
    /// it returns at once and the memory follows, where there is room for it once more and vm.overcommit_memory
    /// is not 2. `off`: as without jumbo. Under a seccomp filter (in a container) and without a report this option is off,
    /// unless you give it.
    #[arg(long, value_name = "MODE", value_parser = mode::<FreeMode>(), hide_possible_values = true)]
    pub(super) free: Option<FreeMode>,

    /// How many threads free at once, the caller among them [default: the CPUs, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_FREE_WORKERS)),
        allow_negative_numbers = true)]
    pub(super) free_workers: Option<u32>,

    /// Give the memory back after the program has ended: auto, on or off [default: auto]
    ///
    /// A sibling process that shares the memory outlives the program, so that a process that waits for the
    /// program does not wait for its memory. `auto`: once the program asked for more than 1 GiB, and where
    /// nothing hangs on its memory that must end with it. `on`: for each process, from its start; that costs each child half a
    /// millisecond, and 2 to 10 where all CPUs are busy. `jumbo wait` waits for the memory.
    ///
    /// The sibling has the program's executable and command line, and ignores signals: pidof(1), `pgrep -f`,
    /// fuser(1) and `start-stop-daemon --exec` find both. Use a PID file, `systemctl kill`, or --reaper=off.
    #[arg(long, value_name = "MODE", value_parser = mode::<ReaperMode>(), hide_possible_values = true)]
    pub(super) reaper: Option<ReaperMode>,

    /// Free the program's memory from two sides when it ends, however it does
    ///
    /// jumbo stays the program's parent and traces it (not its children), so that a thread of jumbo can
    /// free its memory beside the kernel. Works without the preload library, and for programs that are
    /// killed. A debugger cannot attach then, and a set-user-ID program that takes PROGRAM's place gets no
    /// privileges, unless jumbo is root. Where the program has a reaper, the reaper gives the memory back: see
    /// --reaper=off.
    #[arg(long)]
    pub(super) supervise: bool,

    /// Leave the program's children alone
    #[arg(long)]
    pub(super) no_follow: bool,

    /// Report when the program ends: text, full, json or none
    ///
    /// `text` is what matters, in a few lines; `full` all that is known, with folio sizes and what jumbo leaves alone.
    ///
    /// Without this option there is a report where stdout and stderr are a terminal. The program is then
    /// a child of jumbo, in its process group, rather than jumbo itself turned into the program.
    #[arg(
        long,
        value_name = "FORMAT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "text",
        hide_possible_values = true
    )]
    pub(super) report: Option<ReportFormat>,

    /// Write the report to FILE instead of stderr; -: to stdout
    #[arg(long, value_name = "FILE")]
    pub(super) report_file: Option<PathBuf>,

    /// No report, even on a terminal
    #[arg(long, short, conflicts_with_all = ["report", "report_file"])]
    pub(super) quiet: bool,
}

/// Something that is done or is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Switch {
    On,
    Off,
}

/// Patterns of file names, as they stand in the orders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Patterns(pub(super) String);

/// Sizes of folios: their sum in bytes, as it stands in the orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes(pub(super) usize);

/// The form of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ReportFormat {
    Text,
    Full,
    Json,
    None,
}

impl Options {
    /// These, and those of `profile` for what they leave open.
    pub(super) fn or(self, profile: Self) -> Self {
        Self {
            heap: self.heap.or(profile.heap),
            pool: self.pool.or(profile.pool),
            overcommit: self.overcommit.or(profile.overcommit),
            warm: self.warm || profile.warm,
            maps: self.maps.or(profile.maps),
            text: self.text.or(profile.text),
            data: self.data.or(profile.data),
            libs: self.libs.or(profile.libs),
            shm: self.shm.or(profile.shm),
            shm_sizes: self.shm_sizes.or(profile.shm_sizes),
            max_waste: self.max_waste.or(profile.max_waste),
            keep: self.keep.or(profile.keep),
            free: self.free.or(profile.free),
            free_workers: self.free_workers.or(profile.free_workers),
            reaper: self.reaper.or(profile.reaper),
            supervise: self.supervise || profile.supervise,
            no_follow: self.no_follow || profile.no_follow,
            report: self.report.or(profile.report),
            report_file: self.report_file.or(profile.report_file),
            quiet: self.quiet || profile.quiet,
        }
    }

    /// What of them the preload library is to obey, but for the pool, with the defaults filled in.
    pub(super) fn orders(&self) -> Orders<'static> {
        let usual = Orders::default();
        Orders {
            heap: self.heap.unwrap_or(usual.heap),
            maps: self.maps.map_or(usual.maps, |maps| maps == Switch::On),
            text: self.text.unwrap_or(usual.text),
            data: self.data.unwrap_or(usual.data),
            shm: self.shm.unwrap_or(usual.shm),
            shm_sizes: self.shm_sizes.map_or(usual.shm_sizes, |sizes| sizes.0),
            max_waste: self.max_waste.unwrap_or(usual.max_waste),
            keep: self.keep.or(usual.keep),
            follow: !self.no_follow,
            free: self.free.unwrap_or(usual.free),
            free_workers: self.free_workers.unwrap_or(usual.free_workers),
            reaper: self.reaper.unwrap_or(usual.reaper),
            ..usual
        }
    }
}

/// One of the words of a mode.
fn mode<M: Mode + Send + Sync>() -> impl TypedValueParser<Value = M> {
    PossibleValuesParser::new(M::ALL.iter().map(|(name, _)| *name)).try_map(|typed| {
        let named = M::ALL.iter().find(|(name, _)| *name == typed);
        named.map(|(_, mode)| *mode).ok_or("no such mode")
    })
}

/// `"libLLVM*,libclang*"`.
fn libs(typed: &str) -> Result<Patterns, String> {
    let longest = Orders::LONGEST_LIBS;
    if typed.contains(Orders::BETWEEN) {
        return Err(String::from(
            "a pattern is of a file's name, without folders",
        ));
    }
    if typed.is_empty() || typed.len() > longest {
        return Err(format!("between 1 and {longest} characters"));
    }
    let names: Vec<_> = typed.split(',').filter(|name| !name.is_empty()).collect();
    Ok(Patterns(names.join(&Orders::BETWEEN.to_string())))
}

fn patterns<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Patterns>, D::Error> {
    let text = String::deserialize(deserializer)?;
    libs(&text).map(Some).map_err(serde::de::Error::custom)
}

fn keep<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Keep>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// `"64K,2M"`.
fn sizes(typed: &str) -> Result<Sizes, String> {
    let mut sum = 0;
    for name in typed.split(',') {
        let size: PageSize = name.parse().map_err(|error| format!("{error}"))?;
        sum |= usize::try_from(size.bytes()).map_err(|error| error.to_string())?;
    }
    Ok(Sizes(sum))
}

fn some_sizes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Sizes>, D::Error> {
    let text = String::deserialize(deserializer)?;
    sizes(&text).map(Some).map_err(serde::de::Error::custom)
}

/// A size as it is typed: `"512M"`.
fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bytes>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}
