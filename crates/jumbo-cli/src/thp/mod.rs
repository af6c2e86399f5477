//! `jumbo thp`: the controls of transparent huge pages.
//!
//! [`show`] reads them. `jumbo thp set` is here.

pub(crate) mod show;

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use jumbo::units::{Bytes, PageSize};
use jumbo_host::kernel::{Root, thp};
use jumbo_host::knobs::thp::{Side, Table, twice};
use jumbo_host::knobs::{Group, Knob, Value};

use crate::knobs::change::{self, Change};
use crate::knobs::{BareOptions, ChangeOptions, boot, help, undo, usage};

/// Show and set which folio sizes the kernel uses for anonymous and shared memory
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = help!("Examples:
  jumbo thp                          # the controls, and their effect
  jumbo thp set enabled=madvise defrag=defer+madvise --dry-run
  jumbo thp set 64K=madvise 64K.shmem=advise
  jumbo thp set shmem 64K=always,2M=inherit
  jumbo thp set --print-boot         # lines for tmpfiles.d, as it is now
  jumbo thp --undo"))]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    bare: BareOptions,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show the controls and their effect
    ///
    /// With --anon or --shmem: all counters of each size, with their meaning.
    Show(SideArgs),
    Set(SetArgs),
}

#[derive(Clone, Copy, Debug, clap::Args)]
struct SideArgs {
    /// Show the controls of anonymous memory
    #[arg(long, conflicts_with = "shmem")]
    anon: bool,

    /// Show the controls of shared memory
    #[arg(long)]
    shmem: bool,
}

impl SideArgs {
    fn side(self) -> Option<Side> {
        match (self.anon, self.shmem) {
            (true, _) => Some(Side::Anon),
            (_, true) => Some(Side::Shmem),
            _ => None,
        }
    }
}

/// Set any number of knobs, all or none
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("wish").required(true).multiple(true).args(["values", "print_boot", "undo"]))]
#[command(mut_arg("force", |force| force.requires("undo")))]
#[command(after_help = "Knobs:
  enabled=     anonymous memory: always, madvise (where asked for), never
  shmem=       shared memory: always, within_size (of the file), advise,
               never
  SIZE=        anonymous memory in folios of SIZE; inherit: as `enabled`
  SIZE.shmem=  shared memory in folios of SIZE; inherit: as `shmem`.
               8K is a size of shared memory only
  defrag=      what a fault does when no huge page is free: always, defer,
               defer+madvise, madvise, never
  max_ptes_none=     untouched base pages that khugepaged fills
  use_zero_page=     1: a read of untouched memory maps a page of zeroes
  shrink_underused=  1: huge pages of mostly zeroes are split

These are the words that the knobs take; those of this kernel: `jumbo thp show --json`. Behind the word `shmem` (or with --shmem) \
SIZE= is of shared memory, behind `anon` of anonymous memory. Commas may stand for blanks. Files of a tmpfs, as in /dev/shm, obey \
the `huge=` of their mount and not this table; System V segments (shmget) obey `shmem` alone, in the PMD size.

Examples:
  jumbo thp set enabled=madvise
  jumbo thp set 64K=always 64K.shmem=within_size --dry-run
  jumbo thp set shmem 64K=always,2M=inherit
  jumbo thp set --undo")]
struct SetArgs {
    /// Knobs and their values
    #[arg(value_name = "KNOB=VALUE", conflicts_with = "undo")]
    values: Vec<String>,

    #[command(flatten)]
    side: SideArgs,

    #[command(flatten)]
    options: ChangeOptions,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let root = Root::at(&args.bare.root);
    match &args.command {
        None if args.bare.undo => undo::main(&root, &[Group::thp()], &args.bare.mode, false),
        None => show::main(&root, None, args.bare.mode.json),
        Some(Command::Show(side)) => show::main(&root, side.side(), args.bare.mode.json),
        Some(Command::Set(args)) => set(&root, args),
    }
}

fn set(root: &Root, args: &SetArgs) -> anyhow::Result<ExitCode> {
    let side = args.side.side().unwrap_or(Side::Anon);
    let controls = thp::Thp::read_controls(root).ok().flatten();
    let sizes = controls.map(|thp| thp.sizes.into_keys().collect());
    let sizes: Vec<_> = sizes.unwrap_or_default();
    let values = assignments(&args.values, side, &sizes).unwrap_or_else(|wrong| usage(&wrong));
    if let Some(knob) = twice(&values) {
        usage(&format!("{knob} is given twice"));
    }
    for (knob, value) in &values {
        refuse_order_1(root, knob, value)?;
    }
    let (group, options) = (Group::thp(), &args.options);
    if options.print_boot {
        change::plan(root, &group, &values)?;
        return print_boot(root, &values, args.side.side(), options.mode.json);
    }
    if options.undo {
        return undo::main(root, &[group], &options.mode, false);
    }
    change::change(root, &options.mode, || {
        Ok(Change::new(
            change::plan(root, &group, &values)?,
            Vec::new(),
        ))
    })
}

/// Prints the lines for a boot: of `values`, or of all current values of `side`.
fn print_boot(
    root: &Root,
    values: &[(Knob, Value)],
    side: Option<Side>,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let table = table(root, side.filter(|_| values.is_empty()))?.with(values);
    let arguments = table.arguments(show::huge_of_dev_shm(root).as_deref());
    let arguments = arguments.iter().map(|argument| argument.text.as_str());
    let arguments = arguments.collect::<Vec<_>>().join(" ");
    let lost = lost_at_boot(&table).map_or(String::new(), |lost| format!("; {lost}"));
    let why = format!("Instead of tmpfiles.d: the kernel has these tables from its start{lost}.");
    let values = match values {
        [] => table.knobs(),
        values => values.to_vec(),
    };
    boot::print(root, &Group::thp(), &values, Some((arguments, why)), json)
}

fn table(root: &Root, side: Option<Side>) -> anyhow::Result<Table> {
    Ok(Table::of(&thp::Thp::read(root)?.context(NO_THP)?, side))
}

const NO_THP: &str = "this kernel has no THP (CONFIG_TRANSPARENT_HUGEPAGE)";

/// Note on a value that no boot argument can set.
fn lost_at_boot(table: &Table) -> Option<String> {
    let word = table.lost_at_boot()?;
    Some(format!(
        "no argument sets shmem_enabled to {word}: with these the kernel begins with never"
    ))
}

/// Refuses 8 KiB (order 1) for anonymous memory: only files have folios of this size. The kernel's
/// error would be a missing file.
fn refuse_order_1(root: &Root, knob: &Knob, value: &Value) -> anyhow::Result<()> {
    let controls = thp::Thp::read_controls(root)?.context(NO_THP)?;
    let sizes = controls.sizes.iter();
    let mut sizes = sizes.filter(|(_, of)| of.enabled.is_none() && of.shmem_enabled.is_some());
    match sizes.find(|(size, _)| Knob::thp(Some(**size), "enabled") == *knob) {
        Some((size, _)) => bail!(
            "no folio of anonymous memory has {size}: it is a size of shared memory only\nhint: {size}.shmem={value}"
        ),
        None => Ok(()),
    }
}

/// Parses `enabled=madvise 64K.shmem=advise` or `shmem 64K=always,2M=inherit`. A bare SIZE belongs
/// to `side` until a word changes it. `sizes` are the folio sizes of this kernel.
fn assignments(
    words: &[String],
    mut side: Side,
    sizes: &[PageSize],
) -> Result<Vec<(Knob, Value)>, String> {
    let mut values = Vec::new();
    for word in words.iter().flat_map(|words| words.split(',')) {
        match word {
            "anon" => side = Side::Anon,
            "shmem" => side = Side::Shmem,
            word => values.push(assignment(word, side, sizes)?),
        }
    }
    match values.is_empty() && !words.is_empty() {
        true => Err("there is no KNOB=VALUE, such as 64K=always".to_owned()),
        false => Ok(values),
    }
}

/// Knobs without a size.
const KNOBS: [&str; 6] = [
    "enabled",
    "shmem",
    "defrag",
    "max_ptes_none",
    "use_zero_page",
    "shrink_underused",
];

/// Error for a size that is no folio size on any kernel, such as 65K.
fn no_folio_size(name: &str, sizes: &[PageSize]) -> Option<String> {
    let typed = name.strip_suffix(".shmem").unwrap_or(name);
    let bytes = typed.parse::<Bytes>().ok()?;
    if PageSize::new(bytes.0).is_ok() {
        return None;
    }
    let short = |size: &PageSize| size.to_string().replace([' ', 'i', 'B'], "");
    let nearest = sizes
        .iter()
        .min_by_key(|size| size.bytes().abs_diff(bytes.0));
    let hint = nearest.map_or_else(String::new, |nearest| {
        let all: Vec<_> = sizes.iter().map(short).collect();
        let (nearest, all) = (short(nearest), all.join(", "));
        format!("\nhint: the nearest is {nearest}; this kernel has {all}")
    });
    Some(format!(
        "{typed} is no folio size: folio sizes are powers of two{hint}"
    ))
}

/// Error for an unknown knob, with the nearest one.
fn no_knob(name: &str) -> String {
    let nearest = KNOBS
        .into_iter()
        .min_by_key(|knob| strsim::levenshtein(knob, name));
    let (nearest, all) = (nearest.unwrap_or_default(), KNOBS.join(", "));
    format!(
        "there is no knob `{name}`\nhint: the nearest is {nearest}; known are {all}, and a size such as 64K or 64K.shmem"
    )
}

/// Parses `enabled=madvise` or `64K.shmem=advise`.
fn assignment(text: &str, side: Side, sizes: &[PageSize]) -> Result<(Knob, Value), String> {
    let wrong =
        || format!("`{text}` is not KNOB=VALUE, such as enabled=madvise or 64K.shmem=advise");
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    if let Some(wrong) = no_folio_size(name, sizes) {
        return Err(wrong);
    }
    let of_side =
        (side == Side::Shmem && name.parse::<PageSize>().is_ok()).then(|| format!("{name}.shmem"));
    let knob = Knob::thp_named(of_side.as_deref().unwrap_or(name)).ok_or_else(|| no_knob(name))?;
    let value = match knob.takes_word() {
        true => value.into(),
        false => {
            let number: Result<u64, _> = value.parse();
            number
                .map_err(|_| format!("{name} takes a whole number"))?
                .into()
        }
    };
    Ok((knob, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(words: &[&str]) -> Result<Vec<String>, String> {
        let words: Vec<_> = words.iter().map(ToString::to_string).collect();
        let values = assignments(&words, Side::Anon, &[])?.into_iter();
        Ok(values
            .map(|(knob, _)| knob.file.replace(thp::FOLDER, ""))
            .collect())
    }

    #[test]
    fn short_names_and_side_words_select_knobs() {
        for (words, found) in [
            ("enabled=always", "/enabled"),
            ("shmem=never", "/shmem_enabled"),
            ("64K=never", "/hugepages-64kB/enabled"),
            ("64K.shmem=never", "/hugepages-64kB/shmem_enabled"),
            (
                "shmem 64K=always,2M=inherit",
                "/hugepages-64kB/shmem_enabled /hugepages-2048kB/shmem_enabled",
            ),
            (
                "shmem shmem=advise anon 32K=never",
                "/shmem_enabled /hugepages-32kB/enabled",
            ),
        ] {
            let words: Vec<_> = words.split(' ').collect();
            assert_eq!(files(&words).unwrap().join(" "), found);
        }
        for bad in [
            "",
            "64K",
            "63K=never",
            "64K.shm=never",
            "use_zero_page=yes",
            "=1",
            "shmem",
        ] {
            assert!(files(&[bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_invalid_folio_size_is_refused_with_the_nearest_one() {
        let sizes = [16, 64, 2048].map(|kib| PageSize::new(kib << 10).unwrap());
        let error = |word: &str| assignment(word, Side::Anon, &sizes).unwrap_err();
        let odd = error("65K=always");
        assert!(
            odd.contains("65K is no folio size: folio sizes are powers of two"),
            "{odd}"
        );
        assert!(
            odd.contains("nearest is 64K; this kernel has 16K, 64K, 2M"),
            "{odd}"
        );
        assert!(error("1900K.shmem=always").contains("nearest is 2M;"));
        assert!(error("65Q=always").contains("no knob `65Q`"));
        let misspelt = error("enable=always");
        assert!(misspelt.contains("the nearest is enabled;"), "{misspelt}");
        assert!(assignment("64K=always", Side::Shmem, &sizes).is_ok());
    }
}
