//! `jumbo thp`: the tables of transparent huge pages.
//!
//! - [`show`]: look. [`save`]: keep them in a file, and put back what a file has. Setting is here.

mod save;
pub(crate) mod show;

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use jumbo::units::{Bytes, PageSize};
use jumbo_host::kernel::{Root, thp};
use jumbo_host::knobs::thp::{Side, Table, once};
use jumbo_host::knobs::{Group, Knob, Plan, Value};

use crate::knobs::{Bare, How, change, help, undo, usage};

/// Show and set which folio sizes the kernel uses for anonymous and shared memory
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = help!("Examples:
  jumbo thp                          # the tables, and what came of them
  jumbo thp set enabled=madvise defrag=defer+madvise --dry-run
  jumbo thp set 64K=madvise 64K.shmem=advise --persist
  jumbo thp set shmem 64K=always,2M=inherit
  jumbo thp save before.json && jumbo thp restore before.json
  jumbo thp --undo"))]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    bare: Bare,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show the tables, and what came of them
    ///
    /// With --anon or --shmem: all that the kernel counts for each size, and what it means.
    Show(Which),
    Set(SetArgs),
    Save(save::SaveArgs),
    Restore(save::RestoreArgs),
}

/// Which memory.
#[derive(Clone, Copy, Debug, clap::Args)]
struct Which {
    /// The controls of anonymous memory alone
    #[arg(long, conflicts_with = "shmem")]
    anon: bool,

    /// The controls of shared memory alone
    #[arg(long)]
    shmem: bool,
}

impl Which {
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
#[command(group = clap::ArgGroup::new("wish").required(true).multiple(true).args(["values", "forget", "undo"]))]
#[command(mut_arg("persist", |persist| persist.requires("values")))]
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
SIZE= is of shared memory, behind `anon` of anonymous memory. A comma is as good as a blank. Files of a tmpfs, as in /dev/shm, obey \
the `huge=` of their mount and not this table; System V segments (shmget) obey `shmem` alone, in the PMD size.

Examples:
  jumbo thp set enabled=madvise
  jumbo thp set 64K=always 64K.shmem=within_size --dry-run
  jumbo thp set shmem 64K=always,2M=inherit
  jumbo thp set --undo")]
struct SetArgs {
    /// Which knob gets which value; any number of them
    #[arg(value_name = "KNOB=VALUE", conflicts_with = "undo")]
    values: Vec<String>,

    #[command(flatten)]
    which: Which,

    #[command(flatten)]
    how: How,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let root = Root::at(&args.bare.root);
    match &args.command {
        None if args.bare.undo => undo::main(&root, &[Group::thp()], &args.bare.manner, false),
        None => show::main(&root, None, args.bare.manner.json),
        Some(Command::Show(which)) => show::main(&root, which.side(), args.bare.manner.json),
        Some(Command::Set(args)) => set(&root, args),
        Some(Command::Save(args)) => save::save(&root, args),
        Some(Command::Restore(args)) => save::restore(&root, args),
    }
}

fn set(root: &Root, args: &SetArgs) -> anyhow::Result<ExitCode> {
    let side = args.which.side().unwrap_or(Side::Anon);
    let controls = thp::Thp::read_controls(root).ok().flatten();
    let sizes = controls.map(|thp| thp.sizes.into_keys().collect());
    let sizes: Vec<_> = sizes.unwrap_or_default();
    let values = assignments(&args.values, side, &sizes).unwrap_or_else(|wrong| usage(&wrong));
    once(&values).unwrap_or_else(|wrong| usage(&wrong.to_string()));
    for (knob, value) in &values {
        shared_only(root, knob, value)?;
    }
    give(root, &args.how, &values)
}

/// Gives the knobs these values, as one change.
fn give(root: &Root, how: &How, values: &[(Knob, Value)]) -> anyhow::Result<ExitCode> {
    change::set(root, &Group::thp(), how, values, |root, _: &Plan| {
        let table = table(root, None).ok().filter(|_| how.persist)?;
        in_command_line(&table.with(values), root)
    })
}

/// The present values.
fn table(root: &Root, side: Option<Side>) -> anyhow::Result<Table> {
    let thp = thp::Thp::read(root)?.context(NO_THP)?;
    let kernel = root.read("proc/sys/kernel/osrelease").unwrap_or_default();
    Ok(Table::of(&thp, kernel.trim(), side))
}

const NO_THP: &str = "this kernel has no THP (CONFIG_TRANSPARENT_HUGEPAGE)";

/// The arguments of the kernel that say what `table` does, in words.
fn in_command_line(table: &Table, root: &Root) -> Option<String> {
    let arguments = table.arguments(show::huge_of_dev_shm(root).as_deref());
    let arguments: Vec<_> = arguments
        .into_iter()
        .map(|argument| argument.text)
        .collect();
    let joined = arguments.join(" ");
    (!joined.is_empty()).then(|| {
        let lost = lost_at_boot(table).map_or(String::new(), |lost| format!("; {lost}"));
        format!("the kernel's command line has it too: {joined}{lost}")
    })
}

/// The value that no argument of the kernel sets, in words.
fn lost_at_boot(table: &Table) -> Option<String> {
    let word = table.lost_at_boot()?;
    Some(format!(
        "no argument sets shmem_enabled to {word}: with these the kernel begins with never"
    ))
}

/// Folios of 8 KiB (order 1) are of files alone: the control for anonymous memory is not there, and
/// no error of the kernel's says why.
fn shared_only(root: &Root, knob: &Knob, value: &Value) -> anyhow::Result<()> {
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

/// `enabled=madvise 64K.shmem=advise`, `shmem 64K=always,2M=inherit`: a SIZE without more is of
/// `side`, until a word says another. `sizes` are those of this kernel.
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

/// The error of a name that is a number of bytes and no folio size on any kernel, such as 65K.
/// `sizes` are those of this one.
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

/// `enabled=madvise`, `64K.shmem=advise`.
fn assignment(text: &str, side: Side, sizes: &[PageSize]) -> Result<(Knob, Value), String> {
    let wrong =
        || format!("`{text}` is not KNOB=VALUE, such as enabled=madvise or 64K.shmem=advise");
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    if let Some(wrong) = no_folio_size(name, sizes) {
        return Err(wrong);
    }
    let of_side =
        (side == Side::Shmem && name.parse::<PageSize>().is_ok()).then(|| format!("{name}.shmem"));
    let knob = Knob::thp_named(of_side.as_deref().unwrap_or(name)).ok_or_else(wrong)?;
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
    fn knobs_are_named_shortly_and_a_word_says_of_which_memory_sizes_are() {
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
    fn a_size_that_no_folio_has_is_named_with_the_nearest() {
        let sizes = [16, 64, 2048].map(|kib| PageSize::new(kib << 10).unwrap());
        let said = |word: &str| assignment(word, Side::Anon, &sizes).unwrap_err();
        let odd = said("65K=always");
        assert!(
            odd.contains("65K is no folio size: folio sizes are powers of two"),
            "{odd}"
        );
        assert!(
            odd.contains("nearest is 64K; this kernel has 16K, 64K, 2M"),
            "{odd}"
        );
        assert!(said("1900K.shmem=always").contains("nearest is 2M;"));
        assert!(said("65Q=always").contains("is not KNOB=VALUE"));
        assert!(assignment("64K=always", Side::Shmem, &sizes).is_ok());
    }
}
